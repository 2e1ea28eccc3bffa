"""`regard exercise` as a learner and as a teacher uses it."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest

from regard.learn import exercises


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
    file.write_text(file.read_text().replace('"itself": ...', '"itself": "yes"'))
    out, _ = run("exercise", 3, code=1)
    assert "with itself it scores 8" in out
    file.write_text(exercises.solution(3).code)
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
        (["exercise", "--class", "none"], "which is not a folder"),
        (["exercise", "--class", ".", "--csv", "--json"], "received --csv and --json"),
        (["exercise", "--class", "."], "no exercise in their names"),
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
    header, *rows, last = [line.rsplit("  ", 1) for line in table.splitlines()]
    assert header[-1].strip() == "exercise 3"
    assert {name.strip(): result.strip() for name, result in rows} == {
        student: ANSWERS[text] for student, text in students.items()
    }
    right = sum(ANSWERS[text] == "right" for text in students.values())
    assert last[-1].strip() == f"{right} of {count}"
    assert "with itself it scores 8" in hints and "NameError" in hints
    return students


def test_a_class_of_six_is_a_table(tmp_path, run):
    check_class(tmp_path, run, 6)


def test_a_class_is_csv_for_a_spreadsheet(tmp_path, run):
    for student, text in (("ben", "answer = undefined"), ("Ana", "itself = 'no'")):
        (tmp_path / f"{student}.py").write_text(text)
    out, _ = run("exercise", 3, "--class", tmp_path, "--csv")
    first, second = csv.DictReader(io.StringIO(out))
    assert (first["student"], first["status"], first["right"], first["parts"]) == ("Ana", "not yet", "1", "4")
    assert (second["student"], second["hint"]) == (
        "ben",
        "ben.py, line 1: NameError: name 'undefined' is not defined",
    )


@pytest.mark.nightly
def test_a_class_of_thirty_is_a_table(tmp_path, run):
    check_class(tmp_path, run, 30)
