"""`regard survey` and `regard report`: output, resuming, errors and exit codes."""

from __future__ import annotations

import json
import re
import sys

import pytest

pytest.importorskip("pyarrow")

import regard
from regard.survey.dataset import build_report
from tests.helpers.command_line import run_process
from tests.helpers.survey_files import write_survey


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    names = [f"pages/{number:02}.txt" for number in range(38)]
    return write_survey(tmp_path_factory.mktemp("survey") / "out", names)


@pytest.fixture
def stub(monkeypatch):
    """The command runs a stand-in instead of its model."""
    from tests.helpers.survey_stub import Stub

    real = regard.survey.run
    monkeypatch.setattr("regard.survey.run", lambda _, *args, **kwargs: real(Stub(), *args, **kwargs))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"page {number} " * (20 * number + 1))
    (folder / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    return folder


def test_report_prints_the_answer_and_writes_the_page(run, survey, tmp_path):
    page = survey.page()
    path = tmp_path / "page.html"
    captured = run("report", survey.path, "-o", path)
    assert captured.err == "" and captured.out.splitlines()[0] == build_report(survey).answer()
    assert "  induction: 1\n" in captured.out and captured.out.splitlines()[-1].startswith(
        f"{page.title}: {path}, "
    )
    assert path.read_text() == page.html
    captured = run("report", survey.path, "-o", path, "--json")
    record = json.loads(captured.out)
    assert captured.err == "" and record["page"] == str(path) and record["bytes"] == path.stat().st_size
    assert {name: record[name] for name in build_report(survey).summary} == json.loads(
        json.dumps(build_report(survey).summary)
    )


def test_survey_resumes_and_prints_quarantined_documents(run, stub, texts, tmp_path):
    out = tmp_path / "out"
    captured = run("survey", "a-model", texts, "--output", out, "--shard-size", 3)
    first, quarantined, hint = captured.out.splitlines()
    assert first.startswith("stub: 6 documents, ") and first.endswith(f", written to {out}")
    assert (
        quarantined.startswith("quarantined: bad.txt (not text: ")
        and hint == f"To write the report: regard report {out}"
    )
    assert captured.err == ""
    before = {path: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    next(iter(before)).write_bytes(b"broken")
    captured = run("survey", "a-model", texts, "--output", out, "--shard-size", 3, "--json")
    record = json.loads(captured.out)
    assert (record["documents"], record["quarantined"], record["heads"]) == (6, 1, 6)
    assert (
        len(record["notes"]) == 1 and captured.err == f"warning: {record['notes'][0]}\n"
    )  # once: logging does not repeat it
    assert "is damaged" in captured.err and regard.survey.load(out).find_damaged() == []


def test_survey_shows_its_progress(run, stub, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    captured = run("survey", "a-model", texts, "-o", tmp_path / "out", "--shard-size", 2)
    assert "6 documents" in captured.err and "/s)" in captured.err and "1 quarantined" in captured.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--measures", "entropy,colour"], 2, "received measures with 'colour'"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--executor", "spark"], 2, "--executor"),
    ],
)
def test_a_usage_error_of_survey_is_one_line(run, stub, texts, tmp_path, options, code, words):
    captured = run("survey", "a-model", texts, "--output", tmp_path / "out", *options, code=code)
    assert captured.out == "" and captured.err.startswith("regard survey: ") and words in captured.err
    assert captured.err.count("\n") == 1


def test_a_missing_survey_or_extra_is_one_line(run, stub, texts, tmp_path, monkeypatch):
    captured = run("report", tmp_path, code=2)
    assert captured.err.startswith("regard report: received ") and "no settings.json" in captured.err
    captured = run("survey", "a-model", texts, code=2)
    assert "'--output'" in captured.err and captured.err.count("\n") == 1
    for command in (["report", tmp_path], ["survey", "a-model", texts, "--output", tmp_path / "out"]):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        captured = run(*command, code=3)
        assert (
            captured.err == f"regard {command[0]}: pyarrow is not installed. pip install 'regard[survey]'\n"
        )
    monkeypatch.undo()


def test_a_survey_that_cannot_continue_exits_with_4_and_an_interrupt_with_130(run, monkeypatch, tmp_path):
    from regard.survey import SurveyError

    def stop(error):
        def survey(*_, **__):
            raise error

        monkeypatch.setattr("regard.survey.run", survey)

    stop(SurveyError("survey.run", received="a full disk", expected="free space", hint="Free some."))
    captured = run("survey", "a", "b", "--output", tmp_path, code=4)
    assert captured.err == "regard survey: received a full disk; expected free space. Free some.\n"
    stop(KeyboardInterrupt())
    captured = run("survey", "a", "b", "--output", tmp_path, code=130)
    assert captured.err.startswith("warning: Interrupted. Run the same command again to resume; ")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_survey_and_report_of_a_model(run, texts, tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "out"
    model = "tests.helpers.survey_models:tiny"
    done = run_process("survey", model, texts, "--output", out, "--max-tokens", 96, "--json", check=True)
    record = json.loads(done.stdout)
    assert (record["documents"], record["quarantined"], record["heads"]) == (6, 1, 4) and done.stderr == ""
    answer = run("report", out, "-o", tmp_path / "page.html").out
    pattern = r"\d of 4 heads have 99 % of their weight within 64 tokens, measured on \d longer documents"
    assert re.match(pattern, answer)
    assert (tmp_path / "page.html").stat().st_size < 200_000
