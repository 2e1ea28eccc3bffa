"""pip installs the wheel, with every extra, beside a stack that is there already, and changes nothing of it.

The stacks are metadata without code: names and versions, as pip reads them. Installing the real ones takes gigabytes;
scripts/compat does that.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [*PROJECT["optional-dependencies"]]
REQUIREMENTS = [
    requirement
    for name in ("", *EXTRAS)
    for line in (PROJECT["optional-dependencies"] | {"": PROJECT["dependencies"]})[name]
    if (requirement := Requirement(line)).name != "regard"
]
LOWEST = {r.name: bound.version for r in REQUIREMENTS for bound in r.specifier if bound.operator == ">="}


def read_locked() -> dict[str, str]:
    """The versions that CI runs."""
    text = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("ci", "torch"))
    pins = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    }
    return {name: pins[canonicalize_name(name)] for name in LOWEST}


STACKS = {
    "lowest": LOWEST,
    "locked": read_locked(),
    "newer than anything": dict.fromkeys(LOWEST, "99.0"),
    "builds with a local version": LOWEST | {"torch": "2.15.0+cu130", "numpy": "2.5.4"},
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def plan_install(environment: Path, wheel: Path, stack: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Ask pip what it would install beside a stack. It has no index, so a replacement is not found and pip fails."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    for name, version in stack.items():
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: data\n"
        (info / "METADATA").write_text(metadata)
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").touch()
    try:
        return subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "--python",
                    str(environment),
                    "--isolated",
                    "install",
                    "--dry-run",
                ),
                *("-q", "--no-index", "--report", "-", f"{wheel}[{','.join(EXTRAS)}]"),
            ],
            capture_output=True,
            text=True,
        )
    finally:
        for info in packages.glob("*.dist-info"):
            for file in info.iterdir():
                file.unlink()
            info.rmdir()


def test_the_stacks_hold_every_requirement_of_users():
    assert {r.name for r in REQUIREMENTS} == LOWEST.keys()
    assert {"numpy", "torch", "transformers", "ray", "pyarrow", "matplotlib", "typer"} <= LOWEST.keys()


@pytest.mark.parametrize("stack", STACKS)
def test_pip_changes_nothing_of_what_is_installed(stack, wheel, environment):
    run = plan_install(environment, wheel, STACKS[stack])
    assert run.returncode == 0, run.stderr
    installed = [item["metadata"]["name"] for item in json.loads(run.stdout)["install"]]
    assert installed == ["regard"]


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_release_below_the_lowest_is_not_accepted(name, wheel, environment):
    run = plan_install(environment, wheel, LOWEST | {name: "0.0.1"})
    assert run.returncode != 0 and f"{name}" in run.stderr


def test_a_cap_would_be_noticed(wheel, environment, tmp_path):
    capped = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(capped, "w") as after:
        for item in before.infolist():
            text = before.read(item)
            if item.filename.endswith(".dist-info/METADATA"):
                assert b"torch>=2.9" in text
                text = text.replace(b"torch>=2.9", b"torch<2.14,>=2.9")
            after.writestr(item, text)
    run = plan_install(environment, capped, STACKS["builds with a local version"])
    assert run.returncode != 0 and "torch<2.14" in run.stderr
    assert plan_install(environment, capped, LOWEST).returncode == 0
