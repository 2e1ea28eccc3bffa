"""The conformance kit on the command line and in pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard.testing import generate_tests  # noqa: E402
from regard.testing.__main__ import import_function, main  # noqa: E402
from tests.helpers.torch_capabilities import NAN_CAPABILITIES, list_rejected  # noqa: E402

SOURCE = Path(regard.__file__).parents[1]
NAN = (*NAN_CAPABILITIES, *list_rejected())


# -- The command line ---------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import numpy as np

        def attention(Q, K, V, mask=None):
            scores = Q @ K.T
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return weights / weights.sum(axis=-1, keepdims=True) @ V
        """)
    )
    monkeypatch.chdir(tmp_path)
    return "mine:attention"


@pytest.mark.slow
def test_the_command_line_prints_the_report(mine, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "regard.testing", mine],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (1, "")
    assert "1. error: scale missing." in run.stdout
    assert "2. error: mask ignored." in run.stdout


def test_the_command_line_prints_json(capsys):
    path = "torch.nn.functional:scaled_dot_product_attention"
    assert main([path, "--json", "--unsupported", *NAN]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert record["convention"]["unsupported"] == list(NAN)
    assert main([path, "--causal", "lower_right", "--unsupported", *NAN]) == 1
    assert "Causal is aligned upper left, expected lower right." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math", "received 'math'; expected module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:no", "expected a function of math, which has acos,"),
    ],
)
def test_the_command_line_rejects_what_it_cannot_import(path, message, capsys):
    assert main([path]) == 2
    assert message in capsys.readouterr().err


def test_an_attribute_path_is_imported():
    assert import_function("torch:nn.functional.softmax") is torch.nn.functional.softmax


# -- pytest ---------------------------------------------------------------------------------------------------

TEST = """
import pytest
from regard.testing import generate_tests
from mine import attention

@pytest.mark.parametrize("test", generate_tests(layout="n d"), ids=str)
def test_attention(test):
    test.check(attention)
"""


def run_pytest(tmp_path, body):
    (tmp_path / "mine.py").write_text(
        f"from regard import reference\n\ndef attention(Q, K, V, mask=None):\n    {body}\n"
    )
    (tmp_path / "test_mine.py").write_text(TEST)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_correct_function_passes_its_tests(tmp_path):
    run = run_pytest(
        tmp_path, "return reference.attention(Q, K, V, mask=True if mask is None else mask).output"
    )
    assert run.returncode == 0, run.stdout
    assert f"{len(generate_tests(layout='n d'))} passed" in run.stdout


@pytest.mark.slow
def test_a_broken_function_fails_with_the_name_of_its_fault(tmp_path):
    run = run_pytest(
        tmp_path, "return reference.attention(Q, K, V, mask=True if mask is None else ~mask).output"
    )
    assert run.returncode == 1
    assert "test_attention[boolean mask: 3 " in run.stdout
    assert "The mask is inverted: True drops a key." in run.stdout
    assert "test_attention[plain: two keys]" not in run.stdout
