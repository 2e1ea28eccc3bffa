"""The exercises of the book, 1 to 8: `show` the task, `check` an answer, read the `solution`.

>>> from regard.learn import exercises
>>> print(exercises.check(5, {"variance": 64 * 81, "scale": 1 / 8}))
Exercise 5. The scale for variance σ²: not yet.
Right so far: variance.
scale: That is the scale for entries of variance 1; with σ² the scores spread more.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from regard.learn.exercises.checker import judge
from regard.learn.exercises.exercise import Exercise, Result, Solution, Task, wrapped
from regard.learn.exercises.four_steps import FOUR_STEPS
from regard.learn.exercises.heads import SPLIT_HEADS
from regard.learn.exercises.keys import KEYS_EQUAL_QUERIES, ORTHOGONAL_KEYS
from regard.learn.exercises.masks import MASKS
from regard.learn.exercises.scale import VARIANCE, WITHOUT_SCALING
from regard.learn.exercises.write_attention import WRITE_IT
from regard.validation import check_count

__all__ = ["Result", "Solution", "Task", "check", "show", "solution"]

EXERCISES: tuple[Exercise, ...] = (
    FOUR_STEPS,
    WITHOUT_SCALING,
    KEYS_EQUAL_QUERIES,
    ORTHOGONAL_KEYS,
    VARIANCE,
    MASKS,
    SPLIT_HEADS,
    WRITE_IT,
)


def show(n: int) -> Task:
    """The task of exercise `n`: what is given, and what to answer in which form; `print` it to read it.

    >>> task = show(4)
    >>> task.title
    'Exercise 4. Keys at right angles'
    >>> task.given["query"]
    array([0., 2., 0., 0.])
    """
    exercise = _exercise("show", n)
    asked = tuple((part.name, part.asks, part.form) for part in exercise.parts)
    return Task(exercise.title, exercise.task, deepcopy(exercise.given), asked)  # theirs to write into


def check(n: int, answer: Any) -> Result:
    """Whether an answer to exercise `n` is `right`, and if not the `hint` that fits the mistake.

    The answer is a dict of the parts that `show` names; some of them will do, to have them checked so far,
    and `...` stands for one that is still to come.

    >>> check(3, {"itself": True}).hint
    'itself: Look at row t2: with itself it scores 8, with t1 10. A longer key can win.'
    """
    return judge(_exercise("check", n), answer)


def solution(n: int) -> Solution:
    """The solution of exercise `n` with every number worked out now, and `code` that runs.

    >>> found = {}
    >>> exec(solution(2).code, found)
    >>> check(2, found["answer"]).right
    True
    """
    exercise = _exercise("solution", n)
    return Solution(exercise.title, "\n".join(wrapped(exercise.explain())), exercise.code)


def _exercise(operation: str, n: int) -> Exercise:
    hint = "exercises.show(1) is the first."
    return EXERCISES[check_count(n, 1, len(EXERCISES), f"exercises.{operation}", "n", "", hint) - 1]
