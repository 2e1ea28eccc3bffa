"""The nightly run: stages that cover every test, results that belong to a commit, and the page made from them."""

from __future__ import annotations

import json
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.changed_tests import build_graph, get_two_parts, read_all_imports

ROOT = Path(__file__).parents[2]
NIGHTLY = runpy.run_path(str(ROOT / "scripts/nightly"))
STAGES = {stage.name: stage for stage in NIGHTLY["STAGES"]}
RESULTS = json.loads((ROOT / "docs/nightly.json").read_text())


RESULT = {
    "date": "2030-01-01",
    "cases": 9,
    "failures": 0,
    "skipped": 0,
    "seconds": 90,
    "problem": "",
    "commit": "c" * 40,
}


def make_stage(code: str, *, minutes: float = 1, **patterns: str):
    return NIGHTLY["Stage"]("small", "a test", minutes, ((sys.executable, "-c", code),), **patterns)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def find_test_paths(stage) -> tuple[list[str], list[str]]:
    """Return the paths that a stage gives to pytest, and those it leaves out."""
    words = [word for command in stage.commands if "pytest" in command for word in command]
    ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    return [word for word in words if word.startswith("tests/")], ignored


def list_tests(stage) -> list[Path]:
    """List the Python files of the paths that a stage gives to pytest."""
    paths = [ROOT / path for path in find_test_paths(stage)[0]]
    return [file for path in paths for file in ([path] if path.suffix == ".py" else path.rglob("*.py"))]


def test_every_test_is_in_one_stage_that_reads_pytests_count():
    found: dict[str, list[str]] = {}
    for name, stage in STAGES.items():
        paths, ignored = find_test_paths(stage)
        if name == "firefox":  # runs the tests of another stage again
            continue
        for path in paths:
            target = ROOT / path
            files = [target] if target.is_file() else sorted(target.rglob("test_*.py"))
            assert files, path
            for file in files:
                relative = file.relative_to(ROOT).as_posix()
                if relative not in ignored:
                    found.setdefault(relative, []).append(name)
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert every - found.keys() == set()
    assert {path: names for path, names in found.items() if len(names) > 1} == {}


def test_scripts_of_the_stages_exist_and_no_stage_outlasts_a_hosted_runner():
    for stage in STAGES.values():
        assert stage.minutes <= 330
        for _, word, *_ in stage.commands:
            assert word == "-m" or (ROOT / word).is_file(), word


@pytest.mark.parametrize(
    ("code", "patterns", "cases", "failures", "problem"),
    [
        ("print('1,200 cases ran')", {"cases": r"([\d,]+) cases"}, 1200, 0, ""),
        ("print('a: x\\na: y')", {"cases": r"(?m)^a: "}, 2, 0, ""),
        (
            "print('2 ran, 1 failed'); exit(1)",
            {"cases": r"(\d) ran", "failures": r"(\d) failed"},
            2,
            1,
            "exit code 1",
        ),
        ("print('=== 1 failed, 4 passed, 3 skipped, 1 error in 2.00s ===')", {}, 5, 2, ""),
        ("exit(3)", {}, 0, 1, "exit code 3"),
        ("print('fine')", {}, 0, 1, "nothing ran"),
    ],
)
def test_a_stage_counts_cases_and_failures(tmp_path, code, patterns, cases, failures, problem):
    result = NIGHTLY["run_stage"](make_stage(code, **patterns), tmp_path)
    assert (result["cases"], result["failures"], result["problem"]) == (cases, failures, problem)
    assert result["skipped"] == (3 if "skipped" in code else 0)
    assert f"{cases:,} cases" in NIGHTLY["format_result"]("small", result)


def test_a_stage_is_stopped_by_its_time_limit_with_its_children(tmp_path):
    child = "import time; time.sleep(60)"
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', '{child}'])"
    code = f"{start}; print(p.pid, flush=True); p.wait()"
    result = NIGHTLY["run_stage"](make_stage(code, minutes=1 / 60), tmp_path)
    assert result["problem"] == "stopped by its time limit" and result["seconds"] < 30
    pid = int((tmp_path / "small.log").read_text().split()[-1])
    end = time.monotonic() + 10  # a signal takes a moment
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("src/regard/masks/kinds.py", {"matrix", "serving", "soak", "release", "documents"}),
        ("tests/unit/masks/test_masks.py", {"matrix", "faults", "mutants", "coverage", "release"}),
        ("tests/helpers/pages.py", {"browser", "matrix"}),
        ("docs/index.md", {"site", "project", "browser", "release"}),
        ("scripts/soak", {"soak", "project"}),
        ("scripts/setup", {"serving", "matrix"}),
        ("README.md", {"project", "site", "release"}),
        ("DESIGN.md", {"matrix", "coverage", "compat", "site"}),
        ("docs/book/04-the-four-steps.md", {"faults", "course"}),
        ("hatch_build.py", {"serving", "matrix"}),
        ("tests/unit/engines/test_native.py", {"engines", "sanitizers"}),
        ("examples/induction/train.py", {"training", "integration"}),
    ],
)
def test_a_change_concerns_the_stages_that_read_the_file(name, reading):
    found = {stage.name for stage in STAGES.values() if NIGHTLY["is_read"](name, stage)}
    assert reading <= found
    if not name.startswith(("src/", "tests/helpers", "examples/", "scripts/setup", "hatch_build.py")):
        assert not {"survey-load", "distributed", "tools"} & found


def test_only_stages_with_a_browser_read_the_style_and_script_of_the_site():
    found = {stage.name for stage in STAGES.values() if NIGHTLY["is_read"]("docs/_static/site.js", stage)}
    assert found == {"browser", "firefox", "site", "project", "release"}
    for stage in STAGES.values():
        assert stage.name in found or not any(
            "docs/_static" in f.read_text("utf-8") for f in list_tests(stage)
        )


def test_only_the_stage_of_the_mutants_reads_their_list():
    found = {stage.name for stage in STAGES.values() if NIGHTLY["is_read"](NIGHTLY["EQUIVALENT"], stage)}
    assert found == {"mutants", "project", "release"}


@pytest.mark.parametrize(
    ("before", "after", "is_wording"),
    [
        ('hint="Pass all keys.",', 'hint="XXPass all keys.XX",', True),
        ('_refuse("a", "all keys")', '_refuse("a", "ALL KEYS")', True),
        ('_refuse("A.to", "all keys")', '_refuse("a.to", "all keys")', False),  # the name of an operation
        ('_refuse("A.to", "all keys")', "_refuse(None, None)", False),
        ('hint="Pass all keys.",', "", False),
        ('f(x, "two words") + 1', 'f(x, "two words") - 1', False),
    ],
)
def test_a_mutant_of_the_words_alone_is_told_from_others(before, after, is_wording):
    found = runpy.run_path(str(ROOT / "scripts/mutants"))["is_wording"]
    assert found({"before": before, "after": after}) == is_wording


def test_no_test_of_a_stage_imports_what_the_stage_does_not_use():
    pytest.importorskip("grimp")
    graph = build_graph()
    for stage in STAGES.values():
        files = [ROOT / "tests/conftest.py", *list_tests(stage)] if stage.unused else []
        names = {get_two_parts(name) for file in files for name in read_all_imports(file)}
        used = {found for name in names & graph.modules - {"regard"} for found in descend(graph, name)}
        packages = {name.split(".")[1] for name in used}
        assert not packages & {*stage.unused} and ("core" in packages) == bool(stage.unused), stage.name
        for package in stage.unused:
            assert (ROOT / "src/regard" / package).is_dir()
            assert not NIGHTLY["is_read"](f"src/regard/{package}/__init__.py", stage)


def descend(graph, package: str) -> set[str]:
    """List the modules of a package and all that they import."""
    own = {package, *graph.find_descendants(package)}
    return own | {name for module in own for name in graph.find_upstream_modules(module)} - {"regard"}


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--json"], "--json needs --list"), (["--jobs", "0"], "got 0")]
)
def test_arguments_that_start_nothing(arguments, message):
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/nightly", *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2 and message in run.stderr and not run.stdout


def test_a_stage_reads_the_tests_and_documents_that_its_tests_name():
    """Tests import few other tests; what they name of docs is seen by the text."""
    for stage in STAGES.values():
        _, ignored = find_test_paths(stage)
        for file in list_tests(stage):
            text, name = file.read_text("utf-8"), file.relative_to(ROOT).as_posix()
            modules = re.findall(r"(?:from|import) (tests(?:\.\w+)*\.test_\w+)", text)
            read = [f"{module.replace('.', '/')}.py" for module in modules]
            read += ["docs/index.md"] if re.search(r"""["/ ]docs["/]|DOCS\b""", text) else []
            assert name in ignored or all(NIGHTLY["is_read"](other, stage) for other in read), (
                stage.name,
                name,
            )


def test_the_stage_that_looks_up_the_tests_of_a_guarantee_reads_them():
    named = set(re.findall(r"tests/[\w/]+\.py", (ROOT / "docs/promises.md").read_text()))
    assert len(named) > 5 and all(NIGHTLY["is_read"](name, STAGES["matrix"]) for name in named)


GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main", "-C")


@pytest.fixture
def night(tmp_path, monkeypatch, capsys):
    """A repository with a stage; functions write files, commit them, and tell whether --resume ran the stage."""
    repository, state = tmp_path / "repository", tmp_path / "out/state.json"
    own = NIGHTLY["main"].__globals__
    stage = make_stage("print('tests/unit', 1)", cases=r"tests/unit (\d)")
    stage = stage._replace(commands=((*stage.commands[0], "tests/unit"),))
    for name, value in {
        "ROOT": repository,
        "STAGES": (stage,),
        "RESULTS": repository / "docs/nightly.json",
    }.items():
        monkeypatch.setitem(own, name, value)
    monkeypatch.setitem(own, "PAGE", repository / "docs/nightly.md")

    def git(*arguments: str) -> None:
        subprocess.run([*GIT, repository, *arguments], check=True, capture_output=True)

    def write(*names: str) -> None:
        for name in names:
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(f"{time.monotonic_ns()}")

    def commit(*names: str) -> None:
        write(*names)
        git("add", "-A")
        git("commit", "-q", "-m", "a change")

    def runs() -> bool:
        monkeypatch.setattr(sys, "argv", ["nightly", "--resume", "--state", str(state)])
        log = state.with_name("small.log")
        log.unlink(missing_ok=True)
        assert NIGHTLY["main"]() == 0 and "small " in capsys.readouterr().out
        return log.exists()

    def page() -> str:
        monkeypatch.setattr(sys, "argv", ["nightly", "--page", str(state)])
        assert NIGHTLY["main"]() == 0
        return (repository / "docs/nightly.md").read_text()

    repository.mkdir()
    git("init", "-q")
    write("src/a.py", "tests/unit/test_b.py", "README.md")
    (repository / "docs").mkdir()
    (repository / "docs/nightly.json").write_text('{"stages": {}}')
    commit()
    return SimpleNamespace(
        repository=repository, state=state, git=git, write=write, commit=commit, runs=runs, page=page
    )


def test_resume_keeps_a_stage_while_its_files_are_as_they_were(night):
    assert night.runs() and not night.runs()
    night.write("README.md", "docs/nightly.md", "notes/a.py", "tests/browser/test_c.py")
    assert not night.runs()
    night.commit()
    assert not night.runs() and "\n1 of 1 stages passed" in night.page()
    for name in ("src/a.py", "tests/unit/test_b.py", "src/\u00e9.py", "tests/conftest.py"):
        night.commit(name)
        assert "(outdated)" in night.page() and night.runs() and not night.runs(), name
    night.git("mv", "src/a.py", "notes/b.py")  # a renamed file is gone
    night.commit()
    assert night.runs() and not night.runs()


def test_what_a_page_tells_is_in_a_commit(night):
    night.write("src/new.py")
    assert night.runs() and night.runs()  # again, since this file is in no commit
    with pytest.raises(SystemExit, match=r"commit the changes of src/new\.py first"):
        night.page()
    night.commit()
    with pytest.raises(SystemExit, match="small ran on files that are not in a commit"):
        night.page()
    assert night.runs() and "\n1 of 1 stages passed" in night.page()
    night.state.unlink()
    assert not night.runs()  # docs/nightly.json has the result
    assert json.loads(night.state.read_text()) == {"stages": {}} and "\n1 of 1 stages passed" in night.page()


@pytest.mark.parametrize(
    "change", [{"commit": "a" * 40}, {"commit": "docs"}, {"commands": "another"}, {"failures": 1}]
)
def test_a_result_that_cannot_be_kept(night, change):
    assert night.runs()
    result = json.loads(night.state.read_text())["stages"]["small"]
    night.state.write_text(json.dumps({"stages": {"small": result | change, "gone": result}}))
    assert night.runs()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"stages": {"small": {}}}', '{"stages": {"small": {"commit": null}}}']
)
def test_a_damaged_state_is_an_error_in_one_line(night, text):
    night.state.parent.mkdir()
    night.state.write_text(text)
    for call in (night.runs, night.page):
        with pytest.raises(SystemExit, match=r"state\.json cannot be read: .*Remove it"):
            call()


def test_files_that_change_while_a_stage_runs_are_noticed(night, monkeypatch):
    own = NIGHTLY["main"].__globals__
    (stage,) = own["STAGES"]
    code = f"open({str(night.repository / 'src/a.py')!r}, 'w').write('x'); print('1 case')"
    stage = stage._replace(commands=((sys.executable, "-c", code),), cases=r"(\d) case")
    result = NIGHTLY["run_stage"](stage, night.repository.parent)
    assert result["cases"] == 1 and result["commit"] == NIGHTLY["CHANGED"]


def test_a_program_that_is_missing_is_a_failure_of_its_stage(tmp_path):
    stage = make_stage("")._replace(commands=(("no/such/program",),))
    result = NIGHTLY["run_stage"](stage, tmp_path)
    assert result["problem"] == "no/such/program does not run (No such file or directory)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_its_commands(tmp_path, number):
    text = (ROOT / "scripts/nightly").read_text().replace("STAGES = (", "STAGES = () and (", 1)
    own = f"STAGES = (Stage('small', '', 1, (({sys.executable!r}, '-c', 'import time; time.sleep(60)'),)),)\n"
    script = tmp_path / "scripts/nightly"
    script.parent.mkdir()
    script.write_text(text.replace("def read_commit()", f"{own}\n\ndef read_commit()", 1))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.DEVNULL)
    log = tmp_path / "build/nightly/small.log"
    end = time.monotonic() + 20
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (log.exists() and log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    started = [
        pid for task in children.parents[1].iterdir() for pid in (task / "children").read_text().split()
    ]
    assert started
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    while any(map(is_running, started)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, started))


def test_stages_side_by_side_give_the_same_results(tmp_path, monkeypatch, capsys):
    own = NIGHTLY["main"].__globals__
    code = "import time; time.sleep(0.2); print('1 cases ran')"
    stages = [make_stage(code, cases=r"(\d) cases")._replace(name=name) for name in "abc"]
    monkeypatch.setitem(own, "STAGES", (*stages, stages[0]._replace(name="d", uses_every_core=True)))
    monkeypatch.setattr(sys, "argv", ["nightly", "--jobs", "2", "--state", str(tmp_path / "state.json")])
    assert NIGHTLY["main"]() == 0
    assert sorted(json.loads((tmp_path / "state.json").read_text())["stages"]) == ["a", "b", "c", "d"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("d ")


def test_a_seed_belongs_to_a_commit(tmp_path):
    seed = NIGHTLY["choose_seed"](NIGHTLY["read_commit"]())
    assert NIGHTLY["choose_seed"]("00000ff" + "0" * 33) == 255
    stage = make_stage("import sys; print(sys.argv[1], 'cases')", cases=r"(\d+) cases")
    stage = stage._replace(commands=((*stage.commands[0], "SEED"),))
    assert NIGHTLY["run_stage"](stage, tmp_path)["cases"] == seed


def test_the_page_is_generated_from_the_results():
    assert (ROOT / "docs/nightly.md").read_text() == NIGHTLY["format_page"](RESULTS)
    assert "\nnightly\n" in (ROOT / "docs/about.md").read_text()
    assert RESULTS["stages"].keys() <= STAGES.keys()


def test_every_failure_on_the_page_has_a_reason_and_a_fix():
    failed = {name: result for name, result in RESULTS["stages"].items() if result["failures"]}
    assert [name for name, result in failed.items() if not (result.get("reason") and result.get("fix"))] == []


def format_page(**stages: dict) -> str:
    return NIGHTLY["format_page"]({"commit": "c" * 40, "outdated": ["soak"], "stages": stages})


def test_the_page_shows_failures_and_stages_that_did_not_run():
    result = RESULT | {"cases": 1000, "failures": 2, "skipped": 4, "problem": "exit code 1"}
    page = format_page(faults=result)
    assert f"| 1,000 | **2** | 4 | 1.5 | 2030-01-01 | {'c' * 10} |" in page
    assert "Stages that failed: 1, of which 0 were fixed" in page and "**faults failed:** exit code 1" in page
    fixed = format_page(faults=result | {"reason": "A cause.", "fix": "A change."})
    order = ["which 0 were", "which 1 were fixed", "failed:** A cause.", "**Fixed:** A change.", "| stage |"]
    assert [part for part in order if part in fixed] == order[1:]
    assert sorted(order[1:], key=fixed.index) == order[1:]
    assert page.count("| not run |") == len(STAGES) - 1


def test_the_page_shows_which_results_are_outdated_and_hours_of_two_cores():
    page = format_page(
        soak=RESULT | {"commit": "d" * 40, "seconds": 7200}, documents=RESULT | {"seconds": 3600}
    )
    assert f"\n1 of {len(STAGES)} stages passed on the files of commit {'c' * 10}:" in page
    assert f"| {'d' * 10} (outdated) |" in page and "take 2.0 hours of two\ncores" in page


def test_the_page_shows_the_figures_of_a_stage(tmp_path):
    lines = "core          3 of    4 noticed (75.0%) {}\\nall           8 of    9 noticed (88.9%) {}"
    stage = make_stage(f"print('{lines}')", cases=STAGES["mutants"].cases, figures=STAGES["mutants"].figures)
    result = NIGHTLY["run_stage"](stage, tmp_path)
    page = format_page(mutants=result, soak=RESULT)
    assert "\n\n- core 3 of 4 noticed (75.0%)\n- all 8 of 9 noticed (88.9%)\n" in page
    assert f"`soak`, {STAGES['soak'].summary}:" not in page


def test_the_workflow_runs_every_stage_and_opens_an_issue():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow[True]["schedule"][0]["cron"]  # YAML reads the key `on` as true
    assert "scripts/nightly --list --json" in jobs["stages"]["steps"][-1]["run"]
    assert jobs["stage"]["strategy"]["matrix"]["include"] == "${{ fromJSON(needs.stages.outputs.stages) }}"
    assert jobs["stage"]["strategy"]["fail-fast"] is False
    assert jobs["stage"]["timeout-minutes"] >= max(stage.minutes for stage in STAGES.values()) + 30
    listed = subprocess.run(
        [sys.executable, ROOT / "scripts/nightly", "--list", "--json"], capture_output=True, check=True
    )
    assert [entry["stage"] for entry in json.loads(listed.stdout)] == list(STAGES)
    assert "gh issue create" in jobs["report"]["steps"][0]["run"] and "failure" in jobs["report"]["if"]


def test_coverage_floors_only_rise_and_are_checked():
    coverage = runpy.run_path(str(ROOT / "scripts/coverage"))
    counts = {"core": [90, 100, 1, 2], "masks": [10, 10, 0, 0]}
    floors = coverage["raise_floors"](counts, {"core": [95, 40]})
    assert floors == {"core": [95, 49], "masks": [99, 99]}
    assert coverage["find_below"](counts, floors) == ["core: 90.0 % of the lines, the floor is 95 %"]


def test_the_soak_notices_what_grows():
    soak = runpy.run_path(str(ROOT / "scripts/soak"))
    sample, mib = soak["Sample"], 1 << 20
    flat = [sample(float(second), 400 * mib, 9, 2, ()) for second in range(20)]
    assert soak["find_growth"](flat) == []
    grown = [*flat, sample(20.0, 440 * mib, 10, 3, ("torch.softmax",))]
    assert soak["find_growth"](grown) == [
        "files went from 9 to 10",
        "threads went from 2 to 3",
        "memory went from 400 to 440 MiB",
        "torch.softmax is still patched",
    ]


def test_the_sample_of_mutants_is_stable_and_only_listed_changes_are_equivalent():
    mutants = runpy.run_path(str(ROOT / "scripts/mutants"))
    names = [f"regard.core.f{i}__mutmut_{j}" for i in range(20) for j in range(5)]
    chosen = mutants["choose"](names, 30, 0)
    others = [name for name in names if ".f3__" not in name] + ["regard.core.f3__mutmut_9"]
    assert len(chosen) == 30 and chosen != mutants["choose"](names, 30, 1)
    assert len({*chosen} - {*mutants["choose"](others, 30, 0)} - {n for n in names if ".f3__" in n}) <= 1
    change = {"function": "regard.core.f", "before": "a + b", "after": "a - b"}
    listed = [change | {"reason": "b is 0"}]
    assert mutants["find_reason"](change, listed) == "b is 0"
    assert mutants["find_reason"](change | {"after": "a * b"}, listed) == ""
    for entry in json.loads(mutants["EQUIVALENT"].read_text()):
        assert {*entry} == {*change, "reason"} and entry["reason"]


def test_noticed_mutants_are_kept_until_their_function_changes(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts/mutants"))
    Mutant, NoticedMutants = script["Mutant"], script["NoticedMutants"]
    f, g, h = (f"regard.core.x_{name}__mutmut_1" for name in "fgh")
    mutants = {name: Mutant("before", "not run") for name in (f, g, h)}
    path = tmp_path / "noticed.json"
    NoticedMutants(path, mutants).add({h: "survived", g: "timeout", f: "killed"})
    assert list(json.loads(path.read_text())) == [f, g]
    assert NoticedMutants(path, mutants).verdicts == {f: "killed", g: "timeout"}
    assert NoticedMutants(path, mutants, again=True).verdicts == {}
    assert NoticedMutants(path, mutants | {f: Mutant("after", "not run")}).verdicts == {g: "timeout"}
    assert NoticedMutants(path, {f: mutants[f]}).verdicts == {f: "killed"}


def test_the_lowest_and_the_newest_numpy_are_tested_every_night_and_imported_in_ci():
    compat = runpy.run_path(str(ROOT / "scripts/compat"))
    stacks = {stack.name: stack for stack in compat["STACKS"]}
    for name in ("Python 3.11, lowest NumPy", "Python 3.13, newest NumPy"):
        assert stacks[name].areas == ("matrix",)
        assert name in STAGES["compat"].commands[0]
    weekly = (ROOT / ".github/workflows/compatibility.yml").read_text()
    assert "cron:" in weekly and "scripts/compat --list" in weekly  # every stack
    folders = {f"tests/unit/{name}" for name in ("core", "masks", "measures", "render")}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/unit").glob("test_*.py")}
    assert folders | files <= {*compat["TESTS"]["matrix"]}
    assert 'for stack in "lowest 11" "newest 13"' in (ROOT / ".ci/run").read_text()


def test_the_tests_of_the_core_exist_and_all_others_are_the_rest():
    tests = runpy.run_path(str(ROOT / "scripts/coverage"))["SELECTIONS"]["core"].tests
    assert [path for path in tests if not (ROOT / path).exists()] == []
    command = [sys.executable, ROOT / "scripts/coverage", "--others"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [f"--ignore={path}" for path in tests]
