"""Starter files: the task as a comment, and an answer with dots to replace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from regard.learn.exercises.answer_types import AttentionFunctionAnswer
from regard.learn.exercises.catalog import get_exercise
from regard.learn.exercises.exercise import wrap


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
