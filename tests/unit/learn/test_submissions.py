"""Files as answers: scripts and notebooks in a process of their own, and progress."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import regard
from regard.learn import exercises
from regard.learn.exercises import SubmissionResult
from regard.learn.exercises.catalog import EXERCISES
from regard.learn.exercises.submission import CourseProgress, check_here, load_progress
from tests.helpers.class_files import make_notebook
from tests.helpers.notebooks import list_cells

NUMBERS = range(1, len(EXERCISES) + 1)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("n", NUMBERS)
def test_a_starter_runs_and_names_the_first_part(n, tmp_path):
    found = check_here(EXERCISES[n - 1], write(tmp_path, "start.py", exercises.starter(n)))
    assert found["status"] == "not yet"
    assert found["hints"][0].removeprefix("Still missing is ").startswith(EXERCISES[n - 1].parts[0].name)


@pytest.mark.parametrize("n", NUMBERS[:-1])  # the last takes seconds, and is checked by test_exercises
def test_a_solution_as_a_file_is_right(n, tmp_path):
    found = check_here(EXERCISES[n - 1], write(tmp_path, "mine.py", exercises.solution(n).code))
    assert found["status"] == "right" and found["hints"] == ()
    assert found["right_parts"] == tuple(part.name for part in EXERCISES[n - 1].parts)


def test_parts_may_be_plain_names(tmp_path):
    found = check_here(EXERCISES[2], write(tmp_path, "mine.py", "itself = 'no'\nchange = 'b'\n"))
    assert found["right_parts"] == ("itself", "change") and "Still missing is most" in found["hints"][0]
    found = check_here(EXERCISES[2], write(tmp_path, "empty.py", "x = 1"))
    assert found["hints"][0].startswith("The file leaves no answer.")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a = 1\nb = a / 0\n", "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("a = 1\nreturn a\n", "mine.py, line 2: SyntaxError: 'return' outside function"),
        ("import sys\nsys.exit('enough')\n", "mine.py, line 2: SystemExit: enough"),
        ("def f():\n    raise KeyError\nf()\n", "mine.py, line 2: KeyError"),
    ],
)
def test_an_error_names_the_line_of_the_learner(text, hint, tmp_path):
    found = check_here(EXERCISES[2], write(tmp_path, "mine.py", text))
    assert (found["status"], found["hints"]) == ("error", (hint,))


def test_a_notebook_leaves_its_last_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "not for the files of a class")
    write(tmp_path, "random.py", "raise RuntimeError('a file beside it is not imported')")
    right = "import os, random\nanswer = {'itself': 'yes' if 'SECRET_TOKEN' in os.environ else 'no'}"
    cells = ("%pip install regard\n!ls", ["answer = {'itself': ...}\n", "print('not shown')"], right)
    found = exercises.check_file(3, write(tmp_path, "03.ipynb", make_notebook(*cells)))
    assert found.right_parts == ("itself",) and found.summary == "1/4" and not found.correct
    found = check_here(EXERCISES[2], write(tmp_path, "bad.ipynb", make_notebook("x = 1", "\nx.y")))
    assert found["hints"][0] == "cell 2, line 2: AttributeError: 'int' object has no attribute 'y'"


@pytest.mark.parametrize(
    "code",
    [
        "\n\n%pip install x\n\n  !ls\nfail",
        "x = (7\n  % 4)\nfail",
        "x = 7 \\\n  % 4\nfail",
        "text = '''\n!not a command\n%nor this\n'''\nassert text.count('!') == 1\nfail",
        "if True:\n    %matplotlib inline\n    x = {\n        1: 2\n        % 3}\n?x\nfail",
    ],
)
def test_only_commands_of_the_notebook_are_left_out_and_lines_keep_their_numbers(code, tmp_path):
    found = check_here(EXERCISES[2], write(tmp_path, "a.ipynb", make_notebook(code)))
    line = code.split("\n").index("fail") + 1
    assert found["hints"][0] == f"cell 1, line {line}: NameError: name 'fail' is not defined"


@pytest.mark.parametrize("n", NUMBERS[:-1])
def test_the_notebook_of_an_exercise_can_be_handed_in(n, tmp_path):
    (page,) = (Path(__file__).parents[3] / "docs/exercises").glob(f"0{n}-*.md")
    cells = [cell["source"] for cell in list_cells(page) if cell["cell_type"] == "code"]
    found = check_here(EXERCISES[n - 1], write(tmp_path, "mine.ipynb", make_notebook(*cells)))
    assert (found["status"], found["right_parts"]) == ("not yet", ()), (
        found
    )  # attempts of the page do not count
    turn = next(i for i, cell in reversed(list(enumerate(cells))) if "..." in cell)
    cells[turn] = f"{exercises.solution(n).code}\nexercises.check({n}, answer)"
    found = check_here(EXERCISES[n - 1], write(tmp_path, "mine.ipynb", make_notebook(*cells)))
    assert found["status"] == "right", found


def test_a_file_may_answer_several_exercises(tmp_path):
    three, five = ("answer = {'itself': 'no'}\n", "answer = {'variance': 5184}\n")
    path = write(tmp_path, "a.py", f"{three}{five}fail")
    for n, part in ((3, "itself"), (5, "variance")):
        found = check_here(EXERCISES[n - 1], path)
        assert found["right_parts"] == (part,)
        assert found["hints"][0] == "a.py, line 3: NameError: name 'fail' is not defined"
    path = write(
        tmp_path, "a.py", "answer_3 = {'itself': 'no'}\nanswer_text = 'x'\nanswer_5 = {'variance': 5184}"
    )
    assert check_here(EXERCISES[2], path)["right_parts"] == ("itself",)


def test_an_answer_with_a_part_of_the_same_name_belongs_to_its_own_exercise(tmp_path):
    numbers = (1, 2, 3, 4, 5)  # four of them ask for weights
    path = write(tmp_path, "all.py", "\n".join(exercises.solution(n).code for n in numbers))
    for n in numbers:
        assert check_here(EXERCISES[n - 1], path)["status"] == "right"


@pytest.mark.parametrize("name", ["answer", "answer: dict", "answer_3"])
@pytest.mark.parametrize("end", ["exit()", "1 / 0", "raise KeyboardInterrupt"])
def test_an_answer_before_an_error_counts(name, end, tmp_path):
    found = check_here(EXERCISES[2], write(tmp_path, "a.py", f"{name} = {{'itself': 'no'}}; {end}"))
    assert found["right_parts"] == ("itself",)


def test_after_an_error_the_next_cells_of_a_notebook_run(tmp_path):
    path = write(
        tmp_path, "a.ipynb", make_notebook("import no_such_module", "answer = {'itself': 'no'}", "1 +")
    )
    found = check_here(EXERCISES[2], path)
    assert found["right_parts"] == ("itself",) and found["status"] == "not yet"
    assert [hint.split(",")[0] for hint in found["hints"][:2]] == ["cell 1", "cell 3"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"cells": 3}', '{"cells": [{}]}', '{"cells": [{"cell_type": "code"}]}', "[" * 10**5],
)
def test_a_notebook_that_cannot_be_read_is_an_error(text, tmp_path):
    found = check_here(EXERCISES[2], write(tmp_path, "a.ipynb", text))
    assert found["status"] == "error" and "not a notebook that can be read" in found["hints"][0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_files_of_any_encoding_are_read(encoding, line_end, tmp_path):
    text = "# ä\nword = 'größer'\nanswer = {'itself': 'no' if len(word) == 6 else 'yes'}\nfail"
    path = tmp_path / "a.py"
    path.write_bytes(text.replace("\n", line_end).encode(encoding))
    found = check_here(EXERCISES[2], path)
    assert found["right_parts"] == ("itself",) and found["hints"][0].startswith("a.py, line 4: NameError")


def test_many_commands_of_a_notebook_take_no_time(tmp_path):
    path = write(tmp_path, "a.ipynb", make_notebook("x = (1)\n%pip install x\n" * 3000 + "itself = 'no'"))
    begin = time.perf_counter()
    assert check_here(EXERCISES[2], path)["right_parts"] == ("itself",)
    assert time.perf_counter() - begin < 20


def test_a_module_beside_the_file_can_be_imported(tmp_path):
    write(tmp_path, "my_parts.py", "itself = 'no'")
    found = exercises.check_file(3, write(tmp_path, "a.py", "from my_parts import itself"))
    assert found.right_parts == ("itself",), found.hint


def test_a_file_sees_its_own_arguments_and_no_thread_keeps_it_running(tmp_path):
    text = (
        "import sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "answer = {'itself': 'no' if len(sys.argv) == 1 else 'yes'}\n"
        "sys.stdout.close()\n"
    )
    found = exercises.check_file(3, write(tmp_path, "a.PY", text), timeout=60)
    assert found.right_parts == ("itself",), found.hint


def test_a_relative_path_to_packages_is_that_of_this_process(tmp_path, monkeypatch):
    write(tmp_path, "packages/own_package.py", "itself = 'no'\n")
    monkeypatch.chdir(tmp_path)
    source = Path(regard.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["packages", str(source)]))
    found = exercises.check_file(3, write(tmp_path, "mine.py", "from own_package import itself\n"))
    assert found.right_parts == ("itself",), found.hint


def test_a_file_that_does_not_end_is_stopped_with_what_it_started(tmp_path):
    marks = tmp_path / "marks"
    child = f"import time\nwhile True: open({str(marks)!r}, 'a').write('x'); time.sleep(0.01)"
    text = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass\n"
    found = exercises.check_file(3, write(tmp_path, "endless.py", text), timeout=5)
    assert (found.status, found.summary) == ("time", "time") and "does not end" in found.hint
    size = marks.stat().st_size
    time.sleep(0.5)
    assert 0 < marks.stat().st_size == size


def test_a_process_that_dies_is_a_result(tmp_path):
    found = exercises.check_file(3, write(tmp_path, "gone.py", "import os\nos._exit(7)"))
    assert found.status == "error" and "code 7" in found.hint


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import os\nopen('result.json', 'w').write('[1')\nos._exit(0)", "error"),
        ("import os, shutil\nshutil.rmtree(os.getcwd())", "right"),
    ],
)
def test_a_file_may_write_or_remove_anything_where_it_runs(text, status, tmp_path):
    path = write(tmp_path, "a.py", f"{exercises.solution(3).code}\n{text}")
    assert exercises.check_file(3, path).status == status


def test_other_files_are_refused(tmp_path):
    with pytest.raises(regard.ArgumentError, match=r"'mine.txt'.*\.ipynb"):
        exercises.check_file(3, write(tmp_path, "mine.txt", ""))
    with pytest.raises(FileNotFoundError):
        exercises.check_file(3, tmp_path / "none.py")
    with pytest.raises(regard.ArgumentError, match=r"exercises\.show"):
        exercises.check_file(9, tmp_path / "none.py")


def test_progress_counts_and_keeps_the_first_success(tmp_path):
    path = tmp_path / "progress.json"
    assert load_progress(path).exercises == {}
    wrong = SubmissionResult("not yet", ("scale: …",), "…", ("variance",), 3, 0.1)
    right = SubmissionResult("right", (), "…", ("variance", "scale", "keys_only"), 3, 0.1)
    CourseProgress().record(5, wrong).save(path)
    load_progress(path).record(5, right).save(path)
    solved = load_progress(path).exercises[5].solved
    assert solved.endswith("+00:00")
    load_progress(path).record(5, wrong).record(2, wrong).save(path)
    entry = load_progress(path).exercises[5]
    assert (entry.attempts, entry.solved, entry.right_parts) == (3, solved, ("variance",))
    assert sorted(load_progress(path).exercises) == [2, 5]
    assert os.listdir(tmp_path) == ["progress.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 1, "exercises": {"x": {}}}'])
def test_a_damaged_progress_file_is_not_overwritten(text, tmp_path):
    path = write(tmp_path, "progress.json", text)
    with pytest.raises(regard.ArgumentError, match="Move the file"):
        load_progress(path)
    assert path.read_text() == text
