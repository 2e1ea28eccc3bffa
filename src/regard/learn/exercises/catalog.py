"""The eight exercises in the order of the book."""

from __future__ import annotations

from regard.learn.exercises.exercise import Exercise
from regard.learn.exercises.four_steps import FOUR_STEPS
from regard.learn.exercises.heads import SPLIT_HEADS
from regard.learn.exercises.keys import KEYS_EQUAL_QUERIES, ORTHOGONAL_KEYS
from regard.learn.exercises.masks import MASKS
from regard.learn.exercises.scale import VARIANCE, WITHOUT_SCALING
from regard.learn.exercises.write_attention import WRITE_ATTENTION
from regard.validation import check_count

EXERCISES: tuple[Exercise, ...] = (
    FOUR_STEPS,
    WITHOUT_SCALING,
    KEYS_EQUAL_QUERIES,
    ORTHOGONAL_KEYS,
    VARIANCE,
    MASKS,
    SPLIT_HEADS,
    WRITE_ATTENTION,
)


def get_exercise(operation: str, n: int) -> Exercise:
    """Return an exercise by its number, or raise an ArgumentError of the operation."""
    hint = "exercises.show(1) is the first."
    return EXERCISES[check_count(n, 1, len(EXERCISES), f"exercises.{operation}", "n", "", hint) - 1]
