"""`scripts/test`: with --changed it runs the tests near a change, and it keeps bytecode out of the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.changed_tests import choose_tests, read_imports

pytest.importorskip("grimp")
ROOT = Path(__file__).parents[2]


def test_a_change_in_a_leaf_chooses_its_tests_its_importers_and_its_examples():
    chosen = choose_tests({"src/regard/plot/__init__.py"})
    assert {"tests/unit/plot/test_plot.py", "src/regard/plot/__init__.py"} <= chosen
    assert "tests/unit/policy/test_policy.py" in chosen  # regard.policy.policy draws
    assert not any(
        path.startswith(("tests/unit/core/", "tests/unit/nn/", "tests/browser/")) for path in chosen
    )


def test_a_change_at_the_bottom_chooses_the_tests_of_all_that_import_it():
    chosen = choose_tests({"src/regard/masks/__init__.py"})
    for package in ("masks", "core", "engines", "nn", "interventions"):
        assert any(path.startswith(f"tests/unit/{package}/") for path in chosen), package


def test_a_changed_test_or_helper_chooses_those_who_use_it():
    assert choose_tests({"tests/unit/test_tiling.py"}) == {"tests/unit/test_tiling.py"}
    chosen = choose_tests({"tests/helpers/wrong_calls.py"})
    assert "tests/unit/core/test_errors.py" in chosen and len(chosen) < 5
    assert choose_tests({"tests/unit/test_no_longer_there.py"}) == set()


def test_other_files_choose_the_tests_of_the_project_and_settings_choose_all():
    assert choose_tests({"docs/index.md"}) == {"tests/project/test_docs.py"}
    assert choose_tests({"scripts/docs", "README.md"}) == {"tests/project/"}
    assert choose_tests({"pyproject.toml", "docs/index.md"}) is None


def test_imports_are_read_in_every_form(tmp_path):
    (tmp_path / "a.py").write_text(
        "import regard.nn\nfrom regard.masks import causal\n\n\ndef f():\n    regard.plot.heatmap()\n"
    )
    assert read_imports(tmp_path / "a.py") >= {"regard.nn", "regard.masks.causal", "regard.plot"}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A repository with two packages, their tests and this project's selection, on a branch of main."""
    for name in (
        "scripts/test",
        "tests/conftest.py",
        "tests/helpers/changed_tests.py",
        "tests/helpers/browsers.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src").symlink_to(ROOT / "src")
    for package in ("masks", "plot"):
        folder = tmp_path / "tests/unit" / package
        folder.mkdir(parents=True)
        (folder / f"test_{package}.py").write_text("def test_one():\n    pass\n")
    (tmp_path / ".gitignore").write_text("src\nbuild\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = src .\naddopts = --import-mode=importlib\n")
    for command in ("init -q -b main", "add -A", "commit -q -m one", "checkout -q -b other"):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_the_script_runs_the_changed_tests_and_writes_no_bytecode_beside_them(copy):
    (copy / "tests/unit/plot/test_plot.py").write_text("def test_two():\n    pass\n")
    environ = os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    environ.pop("PYTHONPYCACHEPREFIX", None)
    command = [copy / "scripts/test", "--changed", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert not list((copy / "tests").rglob("*.pyc")) and list(
        (copy / "build/bytecode").rglob("test_plot*.pyc")
    )
