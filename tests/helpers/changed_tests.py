"""The tests near the files that differ from main, which `scripts/test --changed` runs."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = "src/regard/"
# A change here concerns every test.
SHARED = ("pyproject.toml", "requirements/", "tests/conftest.py", "src/regard/__init__.py")
# Tests of files that are neither sources nor tests, by the beginning of their paths; "" for all others.
PROJECT_TESTS = {"docs/": "tests/project/test_docs.py", "examples/": "", "": "tests/project/"}


def list_changed_files() -> set[str]:
    """List the files that differ from the commit where this branch left main, those that git does not know included."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.split("\n")[:-1]

    start = git("merge-base", "HEAD", "main") or ["HEAD"]
    return {*git("diff", "--name-only", *start), *git("ls-files", "--others", "--exclude-standard")}


@cache
def read_imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports or names as an attribute: `import a.b`, `from a import b`, `a.b.c`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return frozenset(found)


def read_all_imports(path: Path) -> set[str]:
    """Return the imports of a test, and those of the helpers that it imports."""
    found, files = set(), [path]
    while files:
        new = read_imports(files.pop()) - found
        found |= new
        modules = (name.split(".") for name in new if name.startswith("tests."))
        places = (ROOT.joinpath(*parts[:length]) for parts in modules for length in (3, 4))
        files += [place for name in places if (place := name.with_suffix(".py")).is_file()]
    return found


def get_two_parts(name: str) -> str:
    """Return the package of a dotted name, as `regard.masks`."""
    return ".".join(name.split(".")[:2])


def get_package(path: str) -> str:
    """Return the package of a source file; a module of the top level is a package of its own."""
    return path.removeprefix(SOURCE).split("/")[0].removesuffix(".py")


@cache
def build_graph() -> Any:
    """Return the graph of all imports between modules of the package."""
    import grimp

    return grimp.build_graph("regard", cache_dir=None)


def find_importers(package: str) -> set[str]:
    """Return the modules of other packages that import a package directly."""
    graph, own = build_graph(), f"regard.{package}"
    modules = {own, *graph.find_descendants(own)} & graph.modules
    importers = {name for module in modules for name in graph.find_modules_that_directly_import(module)}
    return importers - modules - {"regard"}


def find_unit_tests(package: str) -> set[str]:
    """Return the unit tests of a package."""
    single = ROOT / "tests" / "unit" / f"test_{package}.py"
    files = [*(ROOT / "tests" / "unit" / package).rglob("test_*.py"), *([single] if single.exists() else [])]
    return {path.relative_to(ROOT).as_posix() for path in files}


def find_module_tests(module: str) -> set[str]:
    """Return the unit tests that are named after a module, or one that imports it; without any, of its package."""
    package = module.split(".")[1]
    files = find_unit_tests(package)
    for names in ({module}, build_graph().find_modules_that_directly_import(module)):
        stems = {name.rsplit(".", 1)[1] for name in names if name.startswith(f"regard.{package}.")}
        if found := {file for file in files if any(stem in file.rsplit("/", 1)[1] for stem in stems)}:
            return found
    return files


def choose_tests(changed: Iterable[str]) -> set[str] | None:
    """Choose the files to collect: tests, and sources with their examples.

    Args:
        changed: paths relative to the root.

    Returns:
        Paths relative to the root, or None if all tests must run. They are the unit tests of each package with a
        change, the unit tests of the modules that import such a package, tests anywhere that import it themselves,
        its examples, and tests that changed or use a helper that did.
    """
    changed = set(changed)
    if any(path.startswith(SHARED) for path in changed):
        return None
    packages = {get_package(path) for path in changed if path.startswith(SOURCE)}
    chosen = {path for path in changed if path.startswith("tests/") and Path(path).name.startswith("test_")}
    for package in packages:
        chosen |= find_unit_tests(package)
        for importer in find_importers(package):
            chosen |= find_module_tests(importer)
        own = ROOT / SOURCE / package
        sources = own.rglob("*.py") if own.is_dir() else [own.with_suffix(".py")]
        chosen |= {path.relative_to(ROOT).as_posix() for path in sources}
    helpers = {
        path.removesuffix(".py").replace("/", ".")
        for path in changed - chosen
        if path.startswith(("tests/", "examples/")) and path.endswith(".py")
    }
    for path in (ROOT / "tests").rglob("test_*.py"):
        own = {f"regard.{package}" for package in packages} & {*map(get_two_parts, read_imports(path))}
        if own or any(
            f"{used}.".startswith(f"{name}.") for used in read_all_imports(path) for name in helpers
        ):
            chosen.add(path.relative_to(ROOT).as_posix())
    for path in changed - chosen:
        if not path.startswith((SOURCE, "tests/")):
            chosen.add(next(tests for start, tests in PROJECT_TESTS.items() if path.startswith(start)))
    return {path for path in chosen if path and (ROOT / path).exists()}
