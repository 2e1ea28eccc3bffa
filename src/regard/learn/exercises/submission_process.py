"""The process that runs a learner's file: `python -m regard.learn.exercises.submission_process N FILE RESULT`.

It runs the file, checks the answer that it leaves, and writes the result as JSON. Only `check_file` starts it.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.learn.exercises.catalog import EXERCISES
from regard.learn.exercises.checker import check_answer
from regard.learn.exercises.exercise import CheckResult, Exercise

MEMORY_LIMIT = 4 << 30  # bytes of address space
NOTEBOOK_COMMAND = re.compile(r"^\s*[%!?].*$", re.MULTILINE)


def read_cells(path: Path) -> list[tuple[str, str]]:
    """Read the code of a script or notebook: the name and the text of each cell.

    Commands of the notebook itself, such as `%pip install`, become empty lines.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return [(path.name, text)]
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [
        (f"cell {number}", NOTEBOOK_COMMAND.sub("", "".join(cell["source"])))
        for number, cell in enumerate(cells, start=1)
    ]


def run_cells(cells: list[tuple[str, str]], path: Path) -> dict[str, Any]:
    """Run code cell by cell, and return the names that it leaves."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    for title, text in cells:
        exec(compile(text, title, "exec"), names)
    return names


def find_answer(exercise: Exercise, names: Mapping[str, Any]) -> Any:
    """Find the answer among the names that a file left: `answer`, or the names of the parts."""
    if "answer" in names:
        return names["answer"]
    return {part.name: names[part.name] for part in exercise.parts if part.name in names}


def describe_error(error: BaseException, titles: set[str]) -> str:
    """Describe an error with the place in the learner's own code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in titles]
    line, title = (frames[-1].lineno, frames[-1].filename) if frames else (None, "")
    if isinstance(error, SyntaxError):
        line, title = error.lineno, error.filename or ""
    where = f"{title}, line {line}: " if line is not None else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{where}{type(error).__name__}: {text}".rstrip(": ")


def check_here(exercise: Exercise, path: Path) -> dict[str, Any]:
    """Run a file in this process and check its answer; return the fields of a result."""
    titles: set[str] = set()
    try:
        cells = read_cells(path)
        titles = {title for title, _ in cells}
        answer = find_answer(exercise, run_cells(cells, path))
    except (Exception, SystemExit) as error:  # a learner's file may raise anything
        hint = describe_error(error, titles)
        result = CheckResult(False, hint, f"{exercise.title}: {hint}")
        return {"status": "error", **_fields(result)}
    if isinstance(answer, Mapping) and not answer:
        hint = f"The file leaves no answer. Assign a dict to answer, with {', '.join(p.name for p in exercise.parts)}."
        return {"status": "not yet", **_fields(CheckResult(False, hint, f"{exercise.title}: {hint}"))}
    result = check_answer(exercise, answer)
    return {"status": "right" if result.correct else "not yet", **_fields(result)}


def _fields(result: CheckResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name != "correct"}


def main(n: str, path: str, out: str) -> None:
    """Check a file and write the result as JSON; the entry point of the process."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        pass  # Windows has no such limit, macOS may refuse it
    found = check_here(EXERCISES[int(n) - 1], Path(path))
    Path(out).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
