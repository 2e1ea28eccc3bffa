"""The files of a class as a teacher gets them: of every naming scheme, right and wrong, broken and hostile."""

from __future__ import annotations

import json
from pathlib import Path

from regard.learn import exercises

ROSTER = """Name;ID;Email
Ana María García;1001;ana.garcia@school.org
Ben O'Brien;1002;ben@school.org
"Cho, Dae-Jung";1003;
Dee Müller;1004;
Eve Adams;1005;
Fay Ito;1006;
Gil Sá;1007;
Hal Berg;1008;
Ivy Lund;1009;hlund@school.org
Jo Kim;1010;
Kai Roth;1011;
Leo Wu;1012;
Mia Fox;1013;
Ned Ash;1014;
Oli Sun;1015;
Pia Ray;1016;
Quin Lee;1017;
Ria Dor;1018;
Sam Poe;1019;
Tom Day;1020;
Uma Bell;1021;
Val Absent;1022;
"""
THREE = "answer = {'itself': 'no', 'most': [0, 1, 1], 'weights': [0.2119, 0.5761, 0.2119], 'change': 'b'}\n"
HALF = "answer = {'itself': 'no', 'most': [0, 1, 1]}\n"
MASKS = exercises.solution(6).code


def make_notebook(*cells: str | list[str]) -> str:
    """Return a notebook with these cells of code, after one with text."""
    code = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": it}
        for it in cells
    ]
    return json.dumps(
        {"cells": [{"cell_type": "markdown", "source": ["# 1"]}, *code], "nbformat": 4, "metadata": {}}
    )


MAGICS = make_notebook(
    "%matplotlib inline\n!pip install regard\nimport numpy as np",
    "%%bash\necho not Python",
    "if True:\n    !ls\nfiles = !ls\nnp.dot?",
    "%time x = 1\nget_ipython().run_line_magic('timeit', 'x')\ndisplay(x)",
    "%%time\n" + THREE,
)

# The name of a file, its content, the student, and the result of each exercise that it answers.
FILES: list[tuple[str, str | bytes, str, dict[int, str]]] = [
    ("Ana María García_1001_assignsubmission_file_/exercise-3.py", THREE, "Ana María García", {3: "right"}),
    ("Ben O'Brien_1002_assignsubmission_file/sub/hw_final_v2.py", MASKS, "Ben O'Brien", {6: "right"}),
    ("Dae-Jung Cho_77_assignsubmission_file_ex3.ipynb", MAGICS, "Cho, Dae-Jung", {3: "right"}),
    ("müllerdee_LATE_1004_555_homework.py", HALF, "Dee Müller", {3: "2/4"}),
    ("adamseve_1005_556_exercise-3-1.py", "answer = {'itself': 'no'", "Eve Adams", {3: "error"}),
    ("itofay_1006_557_endless.py", "while True: pass\n" + THREE, "Fay Ito", {3: "time"}),
    (
        "gil-sa/exercise-3.py",
        ("# größer, ça va\r\n" + THREE).replace("\n", "\r\n").encode("latin-1"),
        "Gil Sá",
        {3: "right"},
    ),
    ("berg, hal/exercise_3.py", ("# Übung\n" + HALF).encode("utf-16"), "Hal Berg", {3: "2/4"}),
    ("hlund-exercise-3.py", b"\xef\xbb\xbf" + THREE.encode(), "Ivy Lund", {3: "right"}),
    ("exercise 3 (Jo).py", "", "Jo Kim", {3: "0/4"}),
    ("kai_hw_final_v2.PY", THREE.replace("\n", "\nimport sys; sys.exit()\n"), "Kai Roth", {3: "right"}),
    ("leo wu exercise 3.py", "import os\nos._exit(0)\n" + THREE, "Leo Wu", {3: "error"}),
    ("mia/exercise-3.py", "print('x' * (4 << 20))\n" + THREE, "Mia Fox", {3: "right"}),
    ("mia/exercise-3 (old).py", "answer = {'itself': 'yes'}", "Mia Fox", {3: "right"}),
    (
        "Ned Ash/all of it.ipynb",
        make_notebook(THREE, "answer = 1 / 0", "import no_such_module", MASKS),
        "Ned Ash",
        {3: "right", 6: "right"},
    ),
    (
        "sunoli_1015_560_nb.ipynb",
        make_notebook("exercises.check(3, {'itself': 'no', 'most': [0, 1, 1]})"),
        "Oli Sun",
        {3: "error"},
    ),
    (
        "raypia_1016_561_nb.ipynb",
        make_notebook("from regard.learn import exercises", "exercises.check(3, {'itself': 'no'})"),
        "Pia Ray",
        {3: "1/4"},
    ),
    ("quin-exercise-3.ipynb", "{ this is not JSON", "Quin Lee", {3: "error"}),
    (
        "ria_homework_new.py",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n" + MASKS,
        "Ria Dor",
        {6: "right"},
    ),
    (
        "sam poe/ex3.py",
        "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd",
        "Sam Poe",
        {3: "error"},
    ),
    ("tom/exercise-3.py", f"raise ValueError('n\\n' * {10**6})", "Tom Day", {3: "error"}),
    ("Zed Unknown_9_assignsubmission_file_/exercise-3.py", HALF, "Zed Unknown", {3: "2/4"}),
    ("anon_x7Yz2_600_mine.py", HALF, "anon_x7Yz2", {3: "2/4"}),
    ("=cmd()-exercise-3.py", HALF, "=cmd", {3: "2/4"}),
]
# Files that are not checked: the student, and part of the reason.
SKIPPED = {
    "uma bell/report.docx": ("Uma Bell", "neither"),
    "Uma Bell_1021_assignsubmission_onlinetext_/onlinetext.html": ("Uma Bell", "neither"),
    "uma bell/notes.py": ("Uma Bell", "no exercise"),
}


def write_class(folder: Path) -> Path:
    """Write the files of the class into a folder, with what a teacher's folder also has; return it."""
    ignored = (".git/x.py", "__MACOSX/._exercise-3.py", "ana/.ipynb_checkpoints/exercise-3.py", "notes.txt")
    files = {name: content for name, content, *_ in FILES} | dict.fromkeys((*SKIPPED, *ignored), "x = 1")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def expect_results() -> dict[tuple[str, int], str]:
    """Return the result that counts, by student and exercise."""
    return {(student, n): result for *_, student, results in FILES for n, result in results.items()}
