"""`regard exercise` as a learner and as a teacher uses it."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shlex
import shutil

import pytest

from regard.learn import exercises
from tests.helpers.command_line import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_learner_opens_answers_and_solves_an_exercise(folder, run):
    out, _ = run("exercise")
    assert "0 of 8 solved. Next: regard exercise 1" in out and len(out.splitlines()) == 11
    out, _ = run("exercise", 3)
    assert "Let K = Q." in out and out.endswith(
        "Wrote exercise-3.py. Replace the dots, then run: regard exercise 3\n"
    )
    file = folder / "exercise-3.py"
    assert file.read_text() == exercises.starter(3)
    file.write_text(file.read_text("utf-8").replace('"itself": ...', '"itself": "yes"'), "utf-8")
    out, _ = run("exercise", 3, code=1)
    assert "with itself it scores 8" in out
    file.write_text(exercises.solution(3).code, "utf-8")
    out, _ = run("exercise", "3", "--json")
    found = json.loads(out)
    assert found["correct"] and found["attempts"] == 2 and found["status"] == "right"
    assert json.loads((folder / "regard-progress.json").read_text())["exercises"]["3"]["attempts"] == 2
    out, _ = run("exercise")
    assert "2 tries" in out and "1 of 8 solved. Next: regard exercise 1" in out


def test_the_solution_and_the_list_as_json(folder, run):
    assert "answer = " in run("exercise", 2, "--solution")[0]
    found = json.loads(run("exercise", "--json", "--progress", "mine.json")[0])
    assert [item["chapter"] for item in found["exercises"]] == [4, 5, 3, 6, 5, 7, 8, 8]
    assert found["exercises"][0]["parts"] == ["scores", "scaled", "weights", "output"]
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exercise", "9"], "Invalid value for 'N'"),
        (["exercise", "--solution"], "regard exercise 3 --solution"),
        (["exercise", "--csv"], "received --csv without --class"),
        (["exercise", "3", "none.py"], "cannot open"),
        (["exercise", "--class", "none"], "a folder or a ZIP file"),
        (["exercise", "3", "--roster", "x.csv"], "received --roster without --class"),
        (["exercise", "3", "-o", "x.html"], "received --output without --class"),
        (["exercise", "--class", ".", "--points", "9=1"], "--points 1=5,8=20"),
        (["exercise", "--class", ".", "--points", "nan"], "--points 1=5,8=20"),
        (["exercise", "--class", ".", "--roster", "none.csv"], "cannot open"),
        (["exercise", "--class", ".", "-o", "none/page.html"], "Create the folder first"),
        (["exercise", "--class", ".", "--csv", "--json"], "received --csv and --json"),
        (["exercise", "--class", "."], "0 files without an answer to an exercise"),
    ],
)
def test_usage_errors_say_what_to_do(arguments, message, folder, run):
    assert message in run(*arguments, code=2)[1]


def test_two_files_for_an_exercise_need_a_name(folder, run):
    (folder / "exercise-3.py").write_text("")
    (folder / "03-keys-equal-queries.ipynb").write_text("{}")
    assert "Name the one to check: regard exercise 3 exercise-3.py." in run("exercise", 3, code=2)[1]


# Answers to exercise 3 as students give them, and the result in the table.
ANSWERS = {
    "answer = {'itself': 'no', 'most': [0, 1, 1], 'weights': [0.2119, 0.5761, 0.2119], 'change': 'b'}": "right",
    "answer = {'itself': 'yes'}": "0/4",
    "answer = {'itself': 'no', 'most': [0, 1, 1]}": "2/4",
    "answer = undefined": "error",
}


def check_class(folder, run, count):
    """Write the files of a class, check them, and compare the table with what was written."""
    rng = random.Random(3)
    students = {f"student {i:02}": rng.choice(list(ANSWERS)) for i in range(count - len(ANSWERS))}
    students |= {f"student {count - 1 - i:02}": text for i, text in enumerate(ANSWERS)}
    for number, (student, text) in enumerate(students.items()):
        if number % 2:
            (folder / student).mkdir()
            (folder / student / "exercise-3.py").write_text(text)
        else:
            (folder / f"exercise 3 ({student}).py").write_text(text)
    out, _ = run("exercise", "--class", folder)
    table, hints = out.split("\n\nThe most common hints\n")
    header, *rows, last = [re.split("  +", line) for line in table.splitlines()]
    assert header == ["student", "exercise 3", "points"]
    points = {"right": "4", "2/4": "2"}
    assert rows == [
        [student, ANSWERS[text], points.get(ANSWERS[text], "0")] for student, text in sorted(students.items())
    ]
    right = sum(ANSWERS[text] == "right" for text in students.values())
    assert last == ["right", f"{right} of {count}", "of 4"]
    assert "with itself it scores 8" in hints and "NameError" in hints
    return students


def test_a_class_of_six_is_a_table(tmp_path, run):
    check_class(tmp_path, run, 6)


def test_a_class_is_csv_for_a_gradebook(tmp_path, run):
    files = {
        "ben.py": "answer = undefined",
        "=Ana.py": "itself = 'no'",
        "cy/notes.docx": "",
        "dee/exercise-6.py": "causal = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    roster = tmp_path / "roster.csv"
    roster.write_text("name,id\nBen,7\nCy,8\nDee,9\nEve,10\n")
    out, _ = run("exercise", 3, "--class", tmp_path, "--csv", "--roster", roster, "--points", "10")
    assert out.count("\n") == 6
    ana, ben, cy, dee, eve = csv.DictReader(io.StringIO(out))
    assert list(ana) == ["student", "id", "exercise 3", "points", "of", "late", "feedback"]
    assert [ana[name] for name in ("student", "id", "exercise 3", "points", "of")] == [
        "'=Ana",
        "",
        "2.5",
        "2.5",
        "10",
    ]
    assert ben["feedback"] == "Exercise 3: error. ben.py, line 1: NameError: name 'undefined' is not defined"
    assert (ben["id"], ben["exercise 3"], cy["exercise 3"], eve["points"]) == ("7", "0", "", "0")
    assert "neither a script nor a notebook" in cy["feedback"] and eve["feedback"] == "No file."
    assert dee["feedback"] == "No file."  # another exercise
    found = json.loads(run("exercise", "--class", tmp_path, "--json", "--roster", roster)[0])
    assert (found["absent"], found["not_in_roster"]) == (["Eve"], ["=Ana"])
    assert [row["student"] for row in found["submissions"]] == ["=Ana", "Dee"]


def test_the_commands_of_the_guide_run(folder, run):
    (folder / "submissions").mkdir()
    (folder / "submissions/Ana Li_101_assignsubmission_file_hw.py").write_text(
        "answer = {'scores': 1, 'scaled': 2}"
    )
    (folder / "roster.csv").write_text("name\nAna Li\nBen Sá\n", "utf-8")
    shutil.make_archive("submissions", "zip", "submissions")
    text = (ROOT / "docs/guides/10-teach-a-class.md").read_text("utf-8")
    commands = [
        line.split("#")[0].split(">")[0] for line in text.splitlines() if line.startswith("regard ex")
    ]
    assert len(commands) >= 4
    for command in commands:
        out, _ = run(*shlex.split(command)[1:])
        assert "Ana Li" in out and ("--roster" not in command or "No file (1): Ben Sá" in out)
    assert (folder / "class.html").exists()


def test_no_line_end_is_escaped_in_the_table_of_hints(tmp_path, run):
    text = "def attention(query, key, value, mask=None): return value[0]\nanswer = {'attention': attention}"
    (tmp_path / "ana-exercise-8.py").write_text(text)
    (tmp_path / "ben-exercise-3.py").write_text("raise ValueError('two\\nlines')")
    out, _ = run("exercise", "--class", tmp_path, "-o", tmp_path / "class.html")
    assert "\\n" not in out and "ValueError: two lines" in out
    assert "Results of the class: " in out and "Ana" not in out
    page = (tmp_path / "class.html").read_text("utf-8")
    assert '"student":"ana"' in page and "two lines" in page


@pytest.mark.nightly
def test_a_class_of_thirty_is_a_table(tmp_path, run):
    check_class(tmp_path, run, 30)
