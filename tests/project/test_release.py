"""What a release is made of: pinned lists, builds that come out the same, licences, workflows, versions in step."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
IN_CI = os.environ.get("CI") == "true"

RELEASE = runpy.run_path(str(ROOT / "scripts/release"))


# -- requirements/ agrees with pyproject.toml --------------------------------------------------------------


class Pin(NamedTuple):
    version: str
    hashes: tuple[str, ...]
    direct: bool  # asked for by pyproject.toml itself


def pins(name: str) -> dict[str, Pin]:
    """What requirements/`name`.txt lists."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    blocks = re.findall(r"^([\w.-]+)==([^ \n]+)(.*(?:\n +.*)*)", text, re.MULTILINE)
    return {
        canonicalize_name(package): Pin(
            version, tuple(re.findall(r"--hash=sha256:(\w{64})\b", rest)), "(pyproject.toml" in rest
        )
        for package, version, rest in blocks
    }


def asked(pyproject: str, *, group: str | None = None) -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for: all extras with docs and dev, or one dependency group; regard itself left out."""
    read = tomllib.loads(pyproject)
    project = read["project"]
    lines = read["dependency-groups"][group] if group else project["dependencies"]
    if group is None:
        groups = (read["dependency-groups"][name] for name in ("docs", "dev"))
        lines = sum((*project["optional-dependencies"].values(), *groups), start=lines)
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    found.pop("regard", None)
    return found


def disagreements(wanted: dict[str, list[Requirement]], listed: dict[str, Pin]) -> list[str]:
    """What is asked for and not listed, listed as asked for and not, or listed at a version outside the range."""
    direct = {name for name, pin in listed.items() if pin.direct}
    return sorted(
        [f"{name} is not listed" for name in wanted.keys() - listed.keys()]
        + [f"{name} is no longer asked for" for name in direct - wanted.keys()]
        + [
            f"{name} {listed[name].version} is not {requirement.specifier}"
            for name in wanted.keys() & listed.keys()
            for requirement in wanted[name]
            if listed[name].version not in requirement.specifier
        ]
    )


def locked() -> dict[str, Pin]:
    """What CI installs: the list, and torch, which has one of its own."""
    return pins("ci") | {"torch": pins("torch")["torch"]}


def test_the_lists_agree_with_pyproject():
    hint = "run scripts/lock"
    assert disagreements(asked(PYPROJECT), locked()) == [], hint
    assert disagreements(asked(PYPROJECT, group="release"), pins("release")) == [], hint


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ('"numpy>=2.0"', '"numpy>=9.9"', r"numpy \S+ is not >=9\.9"),
        ('"numpy>=2.0"', '"numpy>=2.0", "unheard-of"', "unheard-of is not listed"),
        ('plot = ["matplotlib', 'plot = ["numpy"] #', "matplotlib is no longer asked for"),
        ('"torch>=2.9"', '"torch>=9.9"', r"torch 2\.13\.0 is not >=9\.9"),
    ],
)
def test_a_list_that_disagrees_is_seen(line, instead, says):
    assert line in PYPROJECT
    (found,) = disagreements(asked(PYPROJECT.replace(line, instead)), locked())
    assert re.fullmatch(says, found)


def test_the_lists_agree_with_each_other():
    ci = locked()
    for name in ("run", "release"):
        shared = pins(name).keys() & ci.keys()
        assert {package for package in shared if pins(name)[package].version != ci[package].version} == set()
    assert pins("run").keys() <= ci.keys()
    assert pins("torch-cpu")["torch"].version == f"{ci['torch'].version}+cpu"
    assert pins("release")["hatchling"] == ci["hatchling"]  # CI builds what a release builds
    for line in tomllib.loads(PYPROJECT)["project"]["dependencies"]:
        name = Requirement(line).name
        assert line == f"{name}>={pins('lowest')[name].version.removesuffix('.0')}"
        assert Version(pins("newest")[name].version) >= Version(ci[name].version)


def test_every_file_is_named_by_its_hash_and_no_registry_is():
    names = {path.stem for path in (ROOT / "requirements").iterdir()} - {"licences"}  # a list of licences
    engines = {"lowest", "newest"}
    assert {
        "bertviz",
        "ci",
        "loggers",
        "older-tools",
        "run",
        "release",
        "third-party",
        "tools",
        "torch",
        "torch-cpu",
        "triton",
        "vllm",
        "weights",
    } | engines == names
    for name in names:
        assert pins(name)
        assert {package for package, pin in pins(name).items() if not pin.hashes} == set()
        assert not re.search(r"://|^--?[a-z]", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE)


def test_nothing_of_cuda_is_installed_beside_the_cpu_build():
    listed = pins("ci").keys() | pins("run").keys() | pins("vllm").keys()
    assert [name for name in listed if re.match(r"cuda|nvidia|triton|torch$", name)] == []


# -- Builds ------------------------------------------------------------------------------------------------

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n- All of it.\n"
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "tiny"
version = "0.1.0.dev0"
requires-python = ">=3.11"

[tool.hatch.build.targets.sdist]
include = ["/tiny.py"]
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A project in a repository of its own, with scripts/release; returns what runs a command in it."""
    pytest.importorskip("build")
    for key in [key for key in os.environ if key.startswith("GIT_")] + ["SOURCE_DATE_EPOCH"]:
        monkeypatch.delenv(key, raising=False)
    for who, what in itertools.product(("AUTHOR", "COMMITTER"), ("NAME", "EMAIL")):
        monkeypatch.setenv(f"GIT_{who}_{what}", "nobody")
    files = {"pyproject.toml": PROJECT, "CHANGELOG.md": CHANGELOG, "CITATION.cff": "title: tiny\n"}
    files["tiny.py"] = "x = 1\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/release", tmp_path / "scripts")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    def release(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "scripts/release", "--out", f"{tmp_path}-out", *arguments)

    run("git", "init", "-q")
    run("git", "add", "-A")
    assert run("git", "commit", "-qm", "start").returncode == 0
    return tmp_path, run, release


def test_a_release_is_one_command(tiny):
    folder, run, release = tiny
    done = release("--tag")
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"^(\w{64})  (tiny-0\.1\.0\S+)$", done.stdout, re.MULTILINE)
    assert [name for _, name in digests] == ["tiny-0.1.0-py3-none-any.whl", "tiny-0.1.0.tar.gz"]
    assert "git push origin HEAD v0.1.0" in done.stdout
    assert run("git", "log", "--format=%s").stdout.split("\n")[:2] == ["After 0.1.0", "Release 0.1.0"]
    assert run("git", "tag").stdout == "v0.1.0\n"
    tagged = {
        name: run("git", "show", f"v0.1.0:{name}").stdout
        for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff")
    }
    assert out_of_step(**{name.split(".")[0].lower(): text for name, text in tagged.items()}) == []
    assert 'version = "0.2.0.dev0"' in (folder / "pyproject.toml").read_text()
    (folder / "tiny.py").write_text("x = 2\n")  # what lies about does not matter: the tag is built
    assert release("v0.1.0").stdout in done.stdout


def test_a_build_that_comes_out_otherwise_is_seen(tmp_path, monkeypatch):
    number = itertools.count()

    def build(source: Path, out: Path, platforms: Iterable[str]) -> dict[str, str]:
        out.mkdir()
        with tarfile.open(out / "tiny-0.1.0.tar.gz", "w:gz") as archive:
            archive.add(__file__, "tiny-0.1.0/tiny.py")
        return {"tiny-0.1.0.tar.gz": "the same", "tiny-0.1.0.whl": f"time {next(number)}"}

    monkeypatch.setitem(RELEASE["build_twice"].__globals__, "build", build)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match=r"the second build differs: tiny-0\.1\.0\.whl; see "):
        RELEASE["build_twice"](tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "pyproject.toml",
            PROJECT.replace(".dev0", ""),
            "pyproject.toml has version 0.1.0; a release needs one like 0.1.0.dev0",
        ),
        ("pyproject.toml", PROJECT.replace("0.1.0.dev0", "1.0rc1.dev0"), "has version 1.0rc1.dev0"),
        ("CHANGELOG.md", CHANGELOG + "\n## [0.1.0] - 2020-01-01\n\n- x\n", "has a section [0.1.0]"),
        (
            "CHANGELOG.md",
            "# Changelog\n\n## [Unreleased]\n",
            "[Unreleased] in CHANGELOG.md is empty",
        ),
        ("CHANGELOG.md", "# Changelog\n", "CHANGELOG.md has no section [Unreleased]"),
    ],
)
def test_what_is_not_ready_is_not_released(name, text, says):
    texts = {"pyproject.toml": PROJECT, "CHANGELOG.md": CHANGELOG, "CITATION.cff": ""} | {name: text}
    with pytest.raises(SystemExit, match=re.escape(says)):
        RELEASE["prepare_release"](texts, "2030-01-01")


def test_uncommitted_changes_are_not_released(tiny):
    folder, _, release = tiny
    (folder / "tiny.py").write_text("x = 2\n")
    assert "the working tree has changes" in release("--tag").stderr


def test_a_release_needs_a_branch_and_an_empty_folder(tiny):
    folder, run, release = tiny
    run("git", "checkout", "-q", "--detach")
    assert "no branch is checked out" in release("--tag").stderr
    run("git", "checkout", "-q", "-")
    Path(f"{folder}-out").mkdir()
    Path(f"{folder}-out/old.whl").touch()
    assert "is not an empty folder" in release("--tag").stderr
    assert run("git", "tag").stdout == ""


@pytest.mark.parametrize(
    "what",
    ["a file at --out", "no key to sign with", "a hook that refuses", "an interrupt", "a closed terminal"],
)
def test_a_release_that_fails_changes_nothing(tiny, what):
    folder, run, _ = tiny
    out, before = Path(f"{folder}-out"), run("git", "rev-parse", "HEAD").stdout
    if what == "a file at --out":
        out = Path(__file__)
    elif what == "no key to sign with":
        run("git", "config", "tag.gpgsign", "true")
        run("git", "config", "gpg.program", "false")
    elif what == "a hook that refuses":
        hook = folder / ".git/hooks/pre-commit"
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    command = [sys.executable, "scripts/release", "--out", out, "--tag"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if number := {"an interrupt": signal.SIGTERM, "a closed terminal": signal.SIGHUP}.get(what):
        while run("git", "rev-parse", "HEAD").stdout == before:
            assert process.poll() is None
        process.send_signal(number)
    assert process.wait(60) != 0
    assert run("git", "rev-parse", "HEAD").stdout == before
    assert (run("git", "status", "--porcelain").stdout, run("git", "tag").stdout) == ("", "")
    assert not out.is_dir()


def test_files_do_not_depend_on_the_settings_of_a_user(tiny):
    _, run, release = tiny
    expected = release().stdout
    run("git", "config", "core.autocrlf", "true")
    assert re.findall(r"\w{64}", expected) and release().stdout == expected


@pytest.mark.parametrize("arguments", [["--tag", "v7.0.0"], ["--here", "HEAD"], ["--notes", ""]])
def test_an_argument_without_use_is_an_error(tiny, arguments):
    assert tiny[2](*arguments).returncode != 0


def test_a_tag_that_is_not_its_version_is_not_built(tiny):
    _, run, release = tiny
    run("git", "tag", "v0.3.0")
    assert "the tag v0.3.0 has version 0.1.0.dev0" in release("v0.3.0").stderr


def test_the_sdist_has_every_folder_that_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    include = tomllib.loads(PYPROJECT)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    packed = {name.removeprefix("/") for name in include} | {".gitignore", "LICENSE", "pyproject.toml"}
    assert top - packed == {".editorconfig", ".pre-commit-config.yaml"}  # of use in a checkout only
    assert packed - top == set()


# -- Versions in step --------------------------------------------------------------------------------------


def out_of_step(pyproject: str, changelog: str, citation: str) -> list[str]:
    """What is wrong between the three files that bear a version."""
    version = Version(tomllib.loads(pyproject)["project"]["version"])
    headings = RELEASE["HEADING"].findall(changelog)
    released = [(Version(name), date) for name, date in headings[1:]]
    cited = yaml.safe_load(citation)
    wrong = []
    if headings[:1] != [("Unreleased", "")]:
        wrong.append("the changelog does not begin with [Unreleased]")
    if released != sorted(released, reverse=True) or not all(date for _, date in released):
        wrong.append("the changelog is not in order")
    last, date = released[0] if released else (None, None)
    if last and not (version == last or (version > last and version.is_devrelease)):
        wrong.append(f"pyproject.toml has {version}, the changelog {last}")
    if not last and not version.is_devrelease:
        wrong.append(f"pyproject.toml has {version}, the changelog no release")
    if (cited.get("version"), str(cited.get("date-released"))) != (str(last) if last else None, str(date)):
        wrong.append("CITATION.cff is not of the last release")
    return wrong


def test_versions_are_in_step():
    texts = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    assert out_of_step(PYPROJECT, *texts) == []


@pytest.mark.parametrize(
    ("version", "changelog", "citation", "says"),
    [
        (
            "0.2.0",
            "## [Unreleased]\n## [0.1.0] - 2030-01-01\n",
            ("0.1.0", "2030-01-01"),
            "pyproject.toml has 0.2.0",
        ),
        ("0.1.0", "## [Unreleased]\n", (), "the changelog no release"),
        ("0.1.0", "## [Unreleased]\n## [0.1.0] - 2030-01-01\n", ("0.1.0", "2030-01-02"), "CITATION.cff"),
        ("0.1.0", "## [0.1.0] - 2030-01-01\n", (), "does not begin"),
        (
            "0.3.0.dev0",
            "## [Unreleased]\n## [0.1.0] - 2030-01-01\n## [0.2.0] - 2030-02-01\n",
            ("0.1.0", "2030-01-01"),
            "not in order",
        ),
    ],
)
def test_versions_out_of_step_are_seen(version, changelog, citation, says):
    keys = ("version", "date-released")[: len(citation)]
    cited = "title: tiny\n" + "".join(f"{key}: {value}\n" for key, value in zip(keys, citation, strict=True))
    (found, *_) = out_of_step(f'[project]\nversion = "{version}"\n', changelog, cited)
    assert says in found


def test_links_of_the_package_page_are_absolute_and_lead_to_files():
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"], cwd=ROOT, capture_output=True, check=True
    )
    metadata = json.loads(done.stdout)
    links = re.findall(r"(!?)\[[^]]*\]\(([^)#]+)", metadata["readme"]["text"])
    source = metadata["urls"]["Source"]
    assert [link for _, link in links if not link.startswith("https://")] == []
    assert all(url.startswith(source) for url in metadata["urls"].values())
    own = [(mark, link) for mark, link in links if "/main/" in link or "/v" in link]
    assert len(own) > 15 and any(mark for mark, _ in own)
    for mark, link in own:
        assert link.startswith("https://raw." if mark else source)
        assert (ROOT / re.split(r"/(?:main|v[\d.]+)/", link, maxsplit=1)[1]).exists(), link


def test_the_page_of_machines_is_made_from_the_reports():
    machines = importlib.import_module("scripts.pages.machines")
    reports = machines.read_reports()
    assert (
        reports and (ROOT / "docs/machines.md").read_text() == machines.format_page(reports).rstrip() + "\n"
    )
    texts = [path.read_text() for path in (ROOT / "docs/machines").iterdir()]
    assert not any(re.search(r"/(?:home|Users|root|tmp)/", text) for text in texts)


HOSTILE = "<img src=x> a|b\n\n```{include} x\n```\n[x](javascript:x)"


def test_a_report_cannot_write_into_the_page():
    machines = importlib.import_module("scripts.pages.machines")
    (report, *_) = machines.read_reports()
    wrong = {**report, "platform": {**report["platform"], "machine": HOSTILE}, "problems": [HOSTILE]}
    assert not re.search(r"[<>|`\n\[\]{}]", "".join(machines.format_machine(wrong)))


@pytest.mark.parametrize(
    "text",
    [
        '{"ok": true}',
        "",
        "[]",
        "null",
        "[" * 100_000,
        *(json.dumps({"failed": n, "checks": 3}) for n in (-5, 99, float("nan"), "1", True, 1)),
        *(json.dumps({"failed": 0, "checks": n}) for n in (0, float("inf"), 300.5, True, 10**400)),
    ],
)
def test_what_is_no_report_is_refused(text, tmp_path):
    machines = importlib.import_module("scripts.pages.machines")
    (report, *_) = machines.read_reports()
    if "checks" in text:
        text = json.dumps({**report, "cases": report["cases"] | json.loads(text)})
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit, match=r"a\.json"):
        machines.read_reports(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"ok": False}, {"problems": ["x"]}, {"problems": [1]}, {"versions": {"torch": None}}]
)
def test_a_report_that_contradicts_itself_is_refused(wrong, tmp_path):
    machines = importlib.import_module("scripts.pages.machines")
    (report, *_) = machines.read_reports()
    (tmp_path / "a.json").write_text(json.dumps({**report, **wrong}))
    with pytest.raises(SystemExit, match=r"a\.json"):
        machines.read_reports(tmp_path)


def test_a_copy_of_a_report_is_refused(tmp_path):
    machines = importlib.import_module("scripts.pages.machines")
    (report, *_) = machines.read_reports()
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(report))
    with pytest.raises(SystemExit, match=r"b\.json is a copy"):
        machines.read_reports(tmp_path)


def test_a_missing_device_is_named_until_its_report_comes():
    machines = importlib.import_module("scripts.pages.machines")
    (report, *_) = machines.read_reports()
    assert machines.list_missing([report])[0] == "NVIDIA GPUs (CUDA)"
    device = {"device": {"type": "cuda", "hip": None, "model": "A"}, "cases": [{"count": 5, "failed": 1}]}
    wrong = {**report, "device": device, "problems": ["1 of 5 cases failed"]}
    assert machines.list_missing([wrong])[0] == "AMD GPUs (ROCm)"
    assert machines.format_machine(wrong)[-1] == "**1**: 1 of 5 cases failed"
    assert machines.find_device_kind({"device": {"device": {"type": "cuda", "hip": "7"}}}) == "ROCm"


def test_the_citation_has_what_the_format_asks():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads(PYPROJECT)["project"]
    assert {"cff-version", "message", "title", "authors", "license", "repository-code"} <= cited.keys()
    assert cited["repository-code"] == project["urls"]["Source"] and cited["license"] == project["license"]
    assert cited["abstract"] == project["description"]


def test_security_names_the_ranges_that_are_declared():
    project = tomllib.loads(PYPROJECT)["project"]
    wanted = {"Python": (project["requires-python"], set())}
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in map(Requirement, lines):
            if requirement.name == "regard":
                continue
            name = "NumPy" if requirement.name == "numpy" else requirement.name
            # hf brings what torch brings
            wanted[name] = (
                str(requirement.specifier),
                {extra} - {""} | ({"hf"} if extra == "torch" else set()),
            )
    rows = re.findall(r"^\| ([\w-]+) \| `(\S+)` \|(.*)\|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    told = {name: (ranges, set(re.findall(r"`([\w-]+)`", extras))) for name, ranges, extras in rows}
    assert {name: (set(ranges.split(",")), extras) for name, (ranges, extras) in told.items()} == {
        name: (set(ranges.split(",")), extras) for name, (ranges, extras) in wanted.items()
    }


# -- Licences ----------------------------------------------------------------------------------------------


def check_licences(allowed: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/release", "--licences", allowed]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_licences_of_what_users_install_are_allowed():
    pytest.importorskip("piplicenses")
    checked = check_licences(ROOT / "requirements/licences.txt")
    assert checked.returncode == 0, checked.stderr
    assert re.search(r"^ *numpy .* BSD-3-Clause", checked.stdout, re.MULTILINE)
    assert re.search(r"^ *torch ", checked.stdout, re.MULTILINE)


def test_a_licence_that_is_not_listed_is_refused(tmp_path):
    pytest.importorskip("piplicenses")
    lines = (ROOT / "requirements/licences.txt").read_text().splitlines()
    (tmp_path / "allowed").write_text("\n".join(line for line in lines if line != "MIT"))
    checked = check_licences(tmp_path / "allowed")
    assert checked.returncode == 1 and "license MIT not in allow-only" in checked.stderr


# -- Workflows and templates -------------------------------------------------------------------------------

WORKFLOWS = {path.name: path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{file}, {name}", job)
        for file, text in WORKFLOWS.items()
        for name, job in yaml.safe_load(text)["jobs"].items()
    ]


def test_jobs_may_do_what_they_must_and_no_more():
    assert all(yaml.safe_load(text)["permissions"] == {} for text in WORKFLOWS.values())
    more = {name: job["permissions"] for name, job in jobs() if job["permissions"] != {"contents": "read"}}
    assert more == {
        "compatibility.yml, report": {"issues": "write"},
        "nightly.yml, report": {"issues": "write"},
        "release.yml, publish": {"id-token": "write"},
        "release.yml, announce": {"contents": "write"},
    }
    publish = dict(jobs())["release.yml, publish"]
    assert publish["environment"] == "pypi"
    assert set(publish["needs"]) == {"ci", "build", "install"}
    assert publish["steps"][-1]["with"]["attestations"] is True


@pytest.mark.parametrize("file", WORKFLOWS)
def test_actions_are_pinned_by_commit(file):
    used = re.findall(r"uses: (\S+)(.*)", WORKFLOWS[file])
    elsewhere = [(name, rest) for name, rest in used if not name.startswith("./")]
    assert elsewhere
    pinned = re.compile(r"[^@]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [name for name, rest in elsewhere if not pinned.fullmatch(name + rest)] == []
    assert all((ROOT / name).exists() for name, _ in used if name.startswith("./"))
    assert WORKFLOWS[file].count("actions/checkout@") == WORKFLOWS[file].count("persist-credentials: false")


def test_workflows_name_what_is_there():
    commands = [step["run"] for _, job in jobs() for step in job.get("steps", []) if "run" in step]
    assert not any("${{" in command for command in commands)  # values come in by the environment
    named = re.findall(r"(?:scripts|requirements|\.ci)/[\w./-]+", " ".join(commands))
    scripts = {f"scripts/{name}" for name in ("compat", "nightly", "release", "setup")}
    assert {".ci/run", "requirements/release.txt", "requirements/newest.txt"} | scripts == set(named)
    assert all((ROOT / name).is_file() for name in named)


def test_workflows_pass_the_audit():
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None and not IN_CI:
        pytest.skip("zizmor is not installed")
    done = subprocess.run(
        [zizmor, "--offline", "--strict-collection", "--quiet", "--persona", "auditor", ROOT / ".github"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_issue_templates_are_forms():
    forms = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]-*.yml"))
    assert len(forms) == 6
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form.keys() == {"name", "description", "body"}, path.name
        fields = [field["id"] for field in form["body"]]
        assert len(fields) == len(set(fields))
        for field in form["body"]:
            assert field["type"] in ("input", "textarea")
            assert field.keys() <= {"type", "id", "attributes", "validations"}
            allowed = {"label", "description"} | ({"render"} if field["type"] == "textarea" else set())
            assert {"label"} <= field["attributes"].keys() <= allowed, path.name
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_every_script_is_executable_and_documented():
    scripts = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())
    assert len(scripts) <= 14
    documented = "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "README.md"))
    assert [path.name for path in scripts if not os.access(path, os.X_OK)] == []
    assert [path.name for path in scripts if f"scripts/{path.name}" not in documented] == []


def test_every_measured_page_has_a_command():
    for name in ("transformers", "triton"):
        pytest.importorskip(name)
    listed = re.findall(r"^    scripts/docs ([a-z-]+) ", (ROOT / "scripts/docs").read_text(), re.MULTILINE)
    modules = [importlib.import_module(f"scripts.pages.{name.replace('-', '_')}") for name in listed]
    assert all(module.__doc__ and module.add_arguments and module.run for module in modules)
    shared = {"page", "base-models"}
    assert {path.stem.replace("_", "-") for path in (ROOT / "scripts/pages").glob("*.py")} == {
        *listed
    } | shared
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert {*re.findall(r"`scripts/docs ([a-z-]+)", pages)} <= {*listed}
