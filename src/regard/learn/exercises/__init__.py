"""The eight exercises of the book: `show` the task, `check` an answer, print the `solution`.

`starter` is a file to fill in, `check_file` checks it. For a class, `find_submissions` finds the files, `check_class`
checks them, and `read_roster` reads the list of students.

Imports from `regard.learn` and below, and `regard.testing` to check attention functions.

>>> from regard.learn import exercises
>>> print(exercises.check(5, {"variance": 64 * 81, "scale": 1 / 8}))
Exercise 5. The scale for variance σ²: not yet.
Right so far: variance.
scale: That is the scale for entries of variance 1; with σ² the scores spread more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from regard.learn.exercises.catalog import get_exercise
from regard.learn.exercises.classroom import (
    CheckedSubmission,
    ClassReport,
    SkippedFile,
    Student,
    Submission,
    check_class,
    find_submissions,
    open_submissions,
    read_roster,
)
from regard.learn.exercises.exercise import (
    AttentionFunctionAnswer,
    CheckResult,
    ExerciseTask,
    Solution,
    check_answer,
    wrap,
)
from regard.learn.exercises.submission import SubmissionResult, check_file

__all__ = [
    "CheckResult",
    "CheckedSubmission",
    "ClassReport",
    "ExerciseTask",
    "SkippedFile",
    "Solution",
    "Student",
    "Submission",
    "SubmissionResult",
    "check",
    "check_class",
    "check_file",
    "find_submissions",
    "open_submissions",
    "read_roster",
    "show",
    "solution",
    "starter",
]


def show(n: int) -> ExerciseTask:
    """Show the task of an exercise.

    Args:
        n: The number of the exercise, from 1 to 8.

    Returns:
        The text, the inputs in `given`, and the format of each part of the answer; `print` it to read it.

    Raises:
        ArgumentError: If there is no such exercise.

    >>> task = show(4)
    >>> task.title
    'Exercise 4. Keys at right angles'
    >>> task.given["query"]
    array([0., 2., 0., 0.])
    """
    exercise = get_exercise("show", n)
    parts = tuple((part.name, part.question, part.format) for part in exercise.parts)
    return ExerciseTask(
        exercise.title, exercise.task, deepcopy(exercise.given), parts
    )  # the caller may modify it


def check(n: int, answer: Any) -> CheckResult:
    """Check an answer, and give hints that fit the mistakes.

    Args:
        n: The number of the exercise, from 1 to 8.
        answer: A dict of the parts that `show` names. Parts may be left out, or be `...`, to check the others first.

    Returns:
        Whether the answer is `correct`, a hint for each fault, and the whole `message`; `print` it to read it.

    Raises:
        ArgumentError: If there is no such exercise. A wrong answer of any kind does not raise.

    >>> check(3, {"itself": True}).hint
    'itself: Look at row t2: with itself it scores 8, with t1 10. A longer key can win.'
    """
    return check_answer(get_exercise("check", n), answer)


def solution(n: int) -> Solution:
    """Return the worked solution of an exercise, with every number computed now.

    Args:
        n: The number of the exercise, from 1 to 8.

    Returns:
        The explanation as `text`, and `code` that runs; `print` it to read it.

    Raises:
        ArgumentError: If there is no such exercise.

    >>> names = {}
    >>> exec(solution(2).code, names)
    >>> check(2, names["answer"]).correct
    True
    """
    exercise = get_exercise("solution", n)
    return Solution(exercise.title, "\n".join(wrap(exercise.explain())), exercise.code)


def starter(n: int) -> str:
    """Return a Python file for the answer to an exercise: the task, the given arrays, and dots to replace.

    Args:
        n: The number of the exercise, from 1 to 8.

    Returns:
        The text of the file. `check_file` accepts it before and after it is filled in.

    Raises:
        ArgumentError: If there is no such exercise.

    >>> text = starter(5)
    >>> print(text.splitlines()[0])
    # Exercise 5. The scale for variance σ²
    >>> '"variance": ...,' in text
    True
    """
    exercise = get_exercise("starter", n)
    lines = [f"# {line}".rstrip() for line in wrap(f"{exercise.title}\n\n{exercise.task}")]
    lines += [
        "#",
        f"# Replace the dots, and check the file with: regard exercise {n}",
        "",
        "import numpy as np",
        "",
    ]
    if exercise.given:
        given = f"given = exercises.show({n}).given  # {', '.join(exercise.given)}"
        lines += ["from regard.learn import exercises", "", given, ""]
    functions = {
        part.name for part in exercise.parts if isinstance(part.answer_type, AttentionFunctionAnswer)
    }
    for name in (part.name for part in exercise.parts if part.name in functions):
        lines += ["", _format_stub(name, exercise.solve()[name]), ""]
    lines += [*([""] if functions else []), "answer = {"]
    for part in exercise.parts:
        lines += [f"    # {line}" for line in wrap(f"{part.question} [{part.format}]")]
        lines.append(f'    "{part.name}": {part.name if part.name in functions else "..."},')
    return "\n".join([*lines, "}"]) + "\n"


def _format_stub(name: str, function: Callable[..., Any]) -> str:
    """Return a function without a body, and without types."""
    parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return f"def {name}({', '.join(map(str, plain))}):\n    ..."
