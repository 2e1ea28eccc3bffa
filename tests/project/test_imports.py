"""The direction of imports: the contracts of pyproject.toml pass, and fail when an import is turned round."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp")  # import-linter is built on it

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "regard"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the package below `folder` by the contracts of pyproject.toml there."""
    program = Path(sys.executable).with_name("lint-imports")
    environ = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(
        [program, "--no-logo", "--no-cache"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the package and its contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        PACKAGE, tmp_path / "src" / "regard", ignore=shutil.ignore_patterns("__pycache__", "assets")
    )
    return tmp_path


def test_the_contracts_pass():
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout


TYPES_ALONE = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from regard.core import matrix"


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("masks/base.py", "from regard.core import matrix", "Packages import downwards only"),
        ("masks/base.py", TYPES_ALONE, "Packages import downwards only"),
        ("render/text.py", "def late():\n    from regard.cli import main", "Packages import downwards only"),
        ("core/planner.py", "def late():\n    from regard.core import matrix", "No import cycles"),
        ("core/matrix.py", "from regard import reference", "Only the testing package imports the reference"),
        ("reference.py", "from regard.types import Array", "The reference imports nothing"),
        ("engines/numpy.py", "from regard.engines import torch", "Engines do not know each other"),
    ],
)
def test_an_import_turned_round_is_found(copy, file, line, contract):
    path = copy / "src" / "regard" / file
    path.write_text(f"{path.read_text('utf-8')}\n\n{line}\n", "utf-8")
    checked = lint(copy)
    assert checked.returncode == 1
    broken = [row for row in checked.stdout.splitlines() if row.endswith("BROKEN")]
    assert any(row.startswith(contract) for row in broken), checked.stdout


def test_no_module_is_part_of_a_cycle():
    graph = grimp.build_graph("regard", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 150
    TopologicalSorter(imports).prepare()  # raises CycleError
    with pytest.raises(CycleError):
        TopologicalSorter(
            {**imports, "regard.errors": {"regard.cli"}, "regard.cli": {"regard.errors"}}
        ).prepare()
