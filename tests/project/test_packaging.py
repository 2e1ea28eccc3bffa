"""The project around the code: declared versions, what an import loads and costs, the house, the public face."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import regard

PACKAGE = Path(regard.__file__).parent
ROOT = Path(__file__).parents[2]


# -- Declared versions ------------------------------------------------------------------------------------


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for line in sum(extras, start=project["dependencies"])]


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def outside(requirement: Requirement, version: str) -> bool:
    return not requirement.specifier.contains(version, prereleases=True)


def test_what_is_installed_lies_in_the_declared_ranges():
    found = {r: version for r in declared() if (version := installed(r.name))}
    assert any(r.name == "numpy" for r in found)
    assert {str(r): version for r, version in found.items() if outside(r, version)} == {}


def test_ci_installs_every_declared_requirement():
    missing = [str(r) for r in declared() if installed(r.name) is None]
    # Elsewhere extras may be absent; in CI a declared range that did not run is a false declaration.
    assert missing == [] or os.environ.get("CI") != "true"


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "3.0"])
def test_a_version_that_ci_did_not_run_is_seen(version):
    (torch,) = (r for r in declared() if r.name == "torch")
    assert outside(torch, version)
    assert not outside(torch, "2.13.0+cpu")


# -- What an import loads, and what it costs --------------------------------------------------------------

HEAVY = ("matplotlib", "pandas", "pyarrow", "ray", "scipy", "torch", "transformers")


def fresh(code: str, *path: Path) -> str:
    """What `code` prints in a fresh process that sees the given directories, then this tree's package."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, PACKAGE.parent)))}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def heavy_after(tmp_path):
    """The heavy modules loaded after a statement. Stand-ins make every import succeed, installed or not."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").touch()

    def heavy_after(statement: str) -> list[str]:
        code = f"{statement}\nimport sys; print(*sorted({set(HEAVY)!r} & sys.modules.keys()))"
        return fresh(code, tmp_path).split()

    return heavy_after


def test_import_loads_nothing_heavier_than_numpy(heavy_after):
    assert heavy_after("import regard") == []


def test_a_heavy_import_is_seen(heavy_after):
    assert heavy_after("import regard, torch") == ["torch"]
    assert heavy_after(f"import {', '.join(HEAVY)}") == list(HEAVY)


@pytest.mark.slow
def test_import_takes_at_most_half_more_than_numpy(tmp_path, monkeypatch):
    # Both from compiled files, as after an installation, whatever the caller's settings.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))

    def seconds(name: str) -> float:
        return float(
            fresh(f"from time import perf_counter as now; t = now(); import {name}; print(now() - t)")
        )

    def both() -> tuple[float, float]:
        return seconds("numpy"), seconds("regard")

    both()  # compiles
    # Alternated, and the least of each: what the import itself takes, without what others do meanwhile.
    numpy, ours = (min(times) for times in zip(*(both() for _ in range(11)), strict=True))
    print(f"import numpy {numpy * 1e3:.0f} ms, import regard {ours * 1e3:.0f} ms, ratio {ours / numpy:.2f}")
    assert ours <= 1.5 * numpy


# -- The house: imports point only to the left ------------------------------------------------------------

HOUSE = (
    "_errors ← _types ← view, _index, _shapes, masks, scores, positions ← _views, engines ← features, _stream"
    " ← _linear, measures ← _products, _explain, _reductions, _carried ← _page ← _looking, _plan ← _matrix ← _attention"
    " ← learn, nn, lens ← explore, plot ← _models ← _survey ← cli ← __main__"
)
LAYER = {name: n for n, layer in enumerate(HOUSE.split(" ← ")) for name in layer.split(", ")}


def imports(path: Path, source: str) -> Iterator[tuple[str, bool]]:
    """Each import of regard as (dotted name below regard, whether it stands inside a function)."""
    package = ["regard", *path.parent.parts]

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        names: list[list[str]] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        for name in names:
            if name[0] == "regard":
                yield ".".join(name[1:]), inside
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def allowed(module: str, target: str, inside: bool) -> bool:
    """Whether `module` ('engines._numpy') may import `target` ('masks.causal'), here."""
    room, goal = module.split(".")[0], target.split(".")[0]
    if room == "testing":
        return True
    if room == "reference" or goal == "reference":
        return False
    if room == "__init__":
        return True
    if goal == "testing":
        return module.startswith("learn.exercises") and inside
    if room == goal:
        return not {"_numpy", "_torch"} <= set(f"{module}.{target}".split("."))
    return room in LAYER and goal in LAYER and LAYER[goal] < LAYER[room]


def forbidden(file: str, source: str) -> list[str]:
    """The imports of regard in `file` ('engines/_numpy.py') that the house forbids."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = imports(Path(file), source)
    return [target or "regard" for target, inside in found if not allowed(module, target, inside)]


def test_imports_point_only_to_the_left():
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert "__init__.py" in files
    rooms = {file.split("/")[0].removesuffix(".py") for file in files}
    assert rooms - LAYER.keys() - {"__init__", "reference", "testing"} == set(), "no place in the house"
    assert {file: wrong for file, source in files.items() if (wrong := forbidden(file, source))} == {}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("masks.py", "from ._matrix import attention"),
        ("masks.py", "from . import scores"),
        ("masks.py", "import regard"),
        ("masks.py", "from regard import attention"),
        ("measures.py", "import regard.core.matrix"),
        ("measures.py", "def late():\n    from ._explain import explain"),
        ("view/_text.py", "from .._matrix import AttentionMatrix"),
        ("engines/_torch.py", "from ._numpy import matmul"),
        ("engines/_numpy.py", "from . import _torch"),
        ("engines/_numpy.py", "from regard.engines import _torch"),
        ("engines/__init__.py", "from .._stream import stream"),
        ("reference.py", "from ._types import Array"),
        ("_matrix.py", "from .reference import attention"),
        ("__init__.py", "from . import reference"),
        ("cli.py", "def run():\n    from . import testing"),
        ("learn/exercises.py", "from ..testing import assert_matches"),
        ("unheard_of.py", "from . import masks"),
    ],
)
def test_an_import_to_the_right_is_seen(file, source):
    assert len(forbidden(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("_matrix.py", "from . import masks, measures\nfrom .engines import engine_of\nimport numpy as np"),
        ("_matrix.py", "def _repr_html_(self):\n    from .view import page"),
        ("engines/__init__.py", "from . import _numpy, _torch"),
        ("engines/_numpy.py", "from .. import _errors\nfrom ._common import Engine"),
        ("learn/exercises.py", "def check():\n    from ..testing import assert_matches"),
        ("testing.py", "from . import reference, learn"),
        ("__init__.py", "from ._matrix import attention\nfrom .masks import causal"),
    ],
)
def test_an_import_to_the_left_is_not(file, source):
    assert forbidden(file, source) == []


# -- The public face --------------------------------------------------------------------------------------


def test_all_is_sorted_and_true():
    assert list(regard.__all__) == sorted(set(regard.__all__))
    assert [name for name in regard.__all__ if not hasattr(regard, name)] == []

    def is_ours(value: object) -> bool:
        """Not a module, nor imported from elsewhere; a plain value names no module and is ours."""
        return not isinstance(value, ModuleType) and getattr(value, "__module__", "regard").startswith(
            "regard"
        )

    public = {name for name, value in vars(regard).items() if name[0] != "_" and is_ours(value)}
    assert public - set(regard.__all__) == set()
