"""`check_installation`: a report that passes here, notices a wrong engine or kernel, and holds nothing private."""

from __future__ import annotations

import getpass
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest

from regard.engines.numpy import NumpyEngine
from regard.testing import ENGINES, check_device, check_installation
from regard.testing import installation as module
from regard.testing.tolerance import ErrorBound


@pytest.fixture(scope="module")
def report():
    return check_installation(30)


def test_it_passes_here(report):
    engines = ENGINES if importlib.util.find_spec("torch") else ENGINES[:1]
    assert report.ok and report.problems == []
    assert report.cases["engines"] == list(engines) and report.cases["checks"] == 30 * len(engines)
    assert report.cases["failed"] == 0 and 0 < report.cases["largest_share_of_allowed_error"] <= 1
    assert report.versions["numpy"] == np.__version__
    assert [kernel["passed"] for kernel in report.kernels] == [True] * 2 * (len(engines) > 1)


def test_it_holds_nothing_private(report, monkeypatch):
    text = json.dumps(report.to_dict())
    assert json.loads(text) == report.to_dict()
    for private in (str(Path.home()), str(Path.cwd()), platform.node(), getpass.getuser()):
        assert len(private) < 3 or private not in text
    wrong = "OSError: /home/me/lib/libx.so: cannot open; C:\\Users\\me\\x.dll too, 1/2 and a/b stay"
    assert module._remove_paths(wrong) == "OSError: (path): cannot open; (path) too, 1/2 and a/b stay"
    folders = (
        "/home/Jane Doe/",
        "C:\\Users\\Jane (Doe)\\",
        "/Users/Jane O'Doe/",
        "Jane/Doe/x/",
        "\\\\Doe\\Jane\\",
    )
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a home
    assert module._remove_paths("~ and no path") == "~ and no path"
    monkeypatch.setattr("os.path.expanduser", lambda path: "/home/O'Doe, Jane")
    assert "Doe" not in module._remove_paths("dlopen(/home/O'Doe, Jane/x.dylib, 6): no")
    assert "Doe" not in module._remove_paths(f"no {'/home/O' + chr(39) + 'Doe, Jane/x.so'!r}")
    assert module._remove_paths("dlopen(/Users/Jane Doe/x.dylib, 6): no") == "dlopen((path), 6): no"
    for path in [f"{folder}{name}" for folder in folders for name in ("_C.so", "a b/_C.so")] + [
        "C:\\Doe.dll"
    ]:
        for text in (f"{path}: too short", f"cannot open '{path}' for reading", f"{path}, or {path}; both"):
            assert not re.search("Jane|Doe", module._remove_paths(text)), text


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_is_left_out_without_ml_dtypes(has_bfloat16, monkeypatch):
    find_spec = importlib.util.find_spec
    absent = {"torch"} | (set() if has_bfloat16 else {"ml_dtypes"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))
    report = check_installation(5)
    assert report.ok and report.cases["engines"] == ["numpy"] and report.kernels == []
    if find_spec("ml_dtypes"):
        assert ("bfloat16" in report.cases["dtypes"]) == has_bfloat16


def test_a_wrong_engine_is_noticed(monkeypatch):
    monkeypatch.setattr(NumpyEngine, "exponentiate", lambda self, scores, shift: np.exp2(scores - shift))
    report = check_installation(12)
    failed, checks = report.cases["failed"], report.cases["checks"]
    assert not report.ok and failed > 3
    assert report.problems == [f"{failed} of {checks} checks against the definition failed"]
    assert len(report.cases["failures"]) == module.MAX_FAILURES
    assert all(failure.startswith("numpy: Case(dtype=") for failure in report.cases["failures"])


def test_an_engine_that_raises_is_noticed(monkeypatch):
    def fail(*_):
        raise AttributeError("module 'numpy' has no attribute 'gone'")

    monkeypatch.setattr(NumpyEngine, "compute_scores", fail)
    report = check_installation(4)
    assert "has no attribute 'gone'" in report.cases["failures"][0]


def test_a_wrong_kernel_is_named_with_its_cause(monkeypatch):
    pytest.importorskip("torch")
    from regard.engines import torch_kernels as kernels

    def forward(*arguments):
        output, lse = kernels._cpu_forward(*arguments)
        return output * 1.001, lse

    flash, public = kernels.KERNELS["cpu"]
    monkeypatch.setattr(kernels, "_checked", {})
    monkeypatch.setitem(kernels.KERNELS, "cpu", (replace(flash, forward=forward), public))
    report = check_installation(3)
    wrong, right = report.kernels
    assert not report.ok and not wrong["passed"] and right["passed"]
    assert wrong["cause"].startswith("output off by ")
    assert report.problems == [f"kernel flash on CPU on cpu: {wrong['cause']}"]
    assert report.cases["failed"] == 0  # the public function takes over
    # A device that is checked as well has its kernels in its own report, once.
    brief = partial(check_device, num_cases=1, lengths=())
    monkeypatch.setattr("regard.testing.installation.check_device", brief)
    again = check_installation(3, device="cpu")
    assert again.kernels == [] and [kernel["passed"] for kernel in again.device["kernels"]] == [False, True]
    assert sum(problem.startswith("kernel ") for problem in again.problems) == 1


def test_a_torch_that_cannot_be_used_is_a_problem(monkeypatch):
    pytest.importorskip("torch")

    def fail():
        raise ImportError("torch 2.8.0 has no fp32_precision")

    # Where pytest has also read the docstrings of the module, there are two of it.
    monkeypatch.setitem(check_installation.__globals__, "_describe_precision", fail)
    report = check_installation(2)
    assert report.problems == ["torch cannot be used: torch 2.8.0 has no fp32_precision"]
    assert report.cases["engines"] == ["numpy"]


@pytest.mark.parametrize("package", ["from torch import _C", "raise RuntimeError('no driver')", ""])
def test_a_broken_torch_is_reported(package, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(package)
    (tmp_path / f"torch/_C{EXTENSION_SUFFIXES[-1]}").write_text("no library")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from regard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "selfcheck", "-n", "1", "--report", tmp_path / "report.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = (tmp_path / "report.json").read_text()
    assert done.returncode == 1 and json.loads(report)["problems"][0].startswith("torch cannot be used: "), (
        done
    )
    assert tmp_path.name not in report


def test_a_library_that_cannot_be_used_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(module.library, "LIBRARY_FILE", tmp_path / "measures.so")
    monkeypatch.setattr(module.library, "find_instruction_set", lambda: None)
    assert module._describe_platform()["compiled_pass"] == "none"
    shutil.copy(__file__, tmp_path / "measures.so")
    assert module._describe_platform()["compiled_pass"] == "none: its library cannot be used"


def test_the_share_of_the_allowed_error_is_one_at_the_limit():
    bound = ErrorBound.compute([1.0, 2.0], [1.0, 2.0 + 1e-6], dtype="float32")
    result = bound.definition + np.array([0.0, 0.5]) * bound.limit
    assert bound.compute_share(result) == pytest.approx(0.5)
    assert bound.compute_share(bound.definition) == 0
    bound.check(bound.definition + bound.limit * (1 - 1e-6))
    with pytest.raises(AssertionError, match="is above the error rule"):
        bound.check(bound.definition + bound.limit * (1 + 1e-6))


def test_right_results_pass_where_long_double_is_float64(monkeypatch):
    """As on Windows and on Apple's processors: sums of the definition need more than float64."""
    monkeypatch.setattr(np, "longdouble", np.float64)
    report = check_installation(200)
    assert "float64" in report.cases["dtypes"] and report.cases["failed"] == 0, report.cases["failures"]
