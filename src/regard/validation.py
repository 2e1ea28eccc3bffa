"""Checks of arguments that several packages share."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.types import Array


def as_array(thing: Any, operation: str, name: str) -> Array:
    """A NumPy array from what the caller gave, or a refusal that names it."""
    try:
        return np.asarray(thing)
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{name} as nested lists of different lengths",
            expected="rows of one length",
            hint="Fill up the shorter ones, and hide what was filled in with padding(lengths).",
        ) from None


def check_count(count: Any, least: int, most: int, operation: str, name: str, of: str, hint: str) -> int:
    """A whole number from `least` to `most`; `of` says what it is asked of."""
    if isinstance(count, int | np.integer) and not isinstance(count, bool) and least <= count <= most:
        return int(count)
    raise ArgumentError(
        operation,
        received=f"{name}={count!r}{of}",
        expected=f"{name} from {least} to {most}, a whole number",
        hint=hint,
    )


def check_align(align: object, operation: str) -> None:
    """Refuse an alignment that is none."""
    if align not in (None, "upper_left", "lower_right"):
        raise ArgumentError(
            operation,
            received=f"align={align!r}",
            expected='"upper_left" or "lower_right"',
            hint='Where queries are the last tokens of the keys, say align="lower_right".',
        )
