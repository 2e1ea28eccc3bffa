"""The compatibility page: generated from the results on file, complete, green, and of the bounds in pyproject.toml."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
COMPAT = runpy.run_path(str(ROOT / "scripts/compat"))
RESULTS = json.loads((ROOT / "docs/compatibility.json").read_text())
ROWS = {row["name"]: row for row in RESULTS["stacks"]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USER_EXTRAS = [*PROJECT["optional-dependencies"]]
PYTHONS = [
    line.split(":: ")[-1]
    for line in PROJECT["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", line)
]


def list_requirements() -> list[Requirement]:
    """List the requirements of users."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in USER_EXTRAS for line in extras[extra])]
    return [Requirement(line) for line in lines if not line.startswith("regard[")]


def list_lower_bounds() -> dict[str, Version]:
    """Return the lower bound of every package that users install."""
    return {
        requirement.name: Version(specifier.version)
        for requirement in list_requirements()
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


def list_untested(row: dict, bounds: dict[str, Version]) -> list[str]:
    """List the packages of which a stack has another version than the lower bound."""
    return [
        f"{name} {bound}"
        for name, bound in bounds.items()
        if Version(row["versions"].get(name, "0")) != bound
    ]


def find_minors(package: str) -> set[str]:
    """Return the minor releases of a package that were run."""
    found = {row["versions"].get(package, "") for row in ROWS.values()}
    return {".".join(version.split(".")[:2]) for version in found}


def test_the_page_is_generated_from_the_results():
    assert (ROOT / "docs/compatibility.md").read_text() == COMPAT["format_page"](RESULTS)
    assert "\ncompatibility\n" in (ROOT / "docs/about.md").read_text()


def test_every_stack_was_run_at_one_commit_and_nothing_failed():
    assert len({row["commit"] for row in ROWS.values()}) == 1
    assert list(ROWS) == [stack.name for stack in COMPAT["STACKS"]] and len(ROWS) == len(RESULTS["stacks"])
    assert {name: row["failures"] for name, row in ROWS.items() if row["failures"]} == {}
    assert all(
        row["passed"] > 300 and row["passed"] > 20 * sum(row["skipped"].values()) for row in ROWS.values()
    )


def test_every_area_was_run_as_the_script_has_it():
    assert {name: row["areas"] for name, row in ROWS.items()} == {
        stack.name: list(stack.areas) for stack in COMPAT["STACKS"]
    }
    for name in ("lowest", "newest"):
        assert set(ROWS[name]["areas"]) >= COMPAT["TESTS"].keys() - {"matrix"}


def test_no_requirement_of_users_has_a_cap():
    operators = {str(r): {s.operator for s in r.specifier} for r in list_requirements()}
    assert {name: found for name, found in operators.items() if found != {">="}} == {}


def test_every_lower_bound_is_in_the_lowest_stack_and_was_not_in_the_newest():
    bounds = list_lower_bounds()
    assert {
        "numpy",
        "torch",
        "transformers",
        "ray",
        "pyarrow",
        "matplotlib",
        "typer",
        "rich",
    } <= bounds.keys()
    assert list_untested(ROWS["lowest"], bounds) == []
    assert len(list_untested(ROWS["newest"], bounds)) == len(bounds)


def test_a_bound_that_was_not_run_is_seen():
    bounds = {**list_lower_bounds(), "torch": Version("2.8")}
    assert list_untested(ROWS["lowest"], bounds) == ["torch 2.8"]


def test_releases_between_the_bounds_were_run():
    assert {"2.10", "2.13"} < find_minors("torch") and {"5.10", "5.22"} < find_minors("transformers")
    assert len(find_minors("torch") - {""}) >= 4 and len(find_minors("ray") - {""}) >= 2
    for stack in COMPAT["STACKS"]:
        for package, version in stack.versions.items():
            if version not in ("lowest", "newest"):
                assert ROWS[stack.name]["versions"][package].startswith(f"{version}."), stack.name


@pytest.mark.parametrize("python", PYTHONS)
def test_both_ends_of_numpy_were_run_on_a_python(python):
    low, high = (ROWS[f"Python {python}, {which} NumPy"] for which in ("lowest", "newest"))
    assert low["python"].startswith(f"{python}.") and high["python"].startswith(f"{python}.")
    assert Version(low["versions"]["numpy"]) < Version(high["versions"]["numpy"])
    if python == PYTHONS[0]:
        assert Version(low["versions"]["numpy"]) == list_lower_bounds()["numpy"]


@pytest.mark.parametrize("area", COMPAT["TESTS"])
def test_the_paths_of_an_area_exist(area):
    for path in COMPAT["TESTS"][area]:
        file, _, name = path.partition("::")
        assert (ROOT / file).exists(), path
        assert not name or f"def {name}(" in (ROOT / file).read_text(), path


def test_a_failure_is_shown():
    row = {**RESULTS["stacks"][0], "failures": ["tests.unit.test_x::test_y"]}
    page = COMPAT["format_page"]({**RESULTS, "stacks": [row]})
    assert "| **1** |" in page and "tests.unit.test_x::test_y" in page


def test_the_workflow_runs_every_stack_and_prereleases_of_the_newest():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/compatibility.yml").read_text())["jobs"]
    commands = {
        job: [step["run"] for step in jobs[job]["steps"] if "scripts/compat" in step.get("run", "")]
        for job in jobs
    }
    (listing,) = commands["stacks"]
    assert "scripts/compat --list --json" in listing
    assert "needs.stacks.outputs.stacks" in jobs["stack"]["strategy"]["matrix"]["include"]
    assert commands["stack"] == ['python scripts/compat "$STACK"']
    assert commands["prereleases"] == ["python scripts/compat --pre newest"] and "newest" in ROWS
    limit = jobs["stack"]["timeout-minutes"] * 60
    assert max(row["cpu_seconds"] for row in ROWS.values()) < limit / 2
