"""Checks of arguments that several packages share."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.types import Array


def as_array(argument: Any, operation: str, name: str) -> Array:
    """Convert an argument to a NumPy array.

    Args:
        argument: An array, or nested lists of numbers.
        operation: Name of the operation in errors.
        name: Name of the argument in errors.

    Raises:
        ArgumentError: Nested lists have different lengths.
    """
    try:
        return np.asarray(argument)
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{name} as nested lists of different lengths",
            expected="rows of one length",
            hint="Pad the shorter ones, and mask the padding with padding(lengths).",
        ) from None


def check_count(count: Any, least: int, most: int, operation: str, name: str, of: str, hint: str) -> int:
    """Return an argument that must be an integer in a range.

    Args:
        count: The argument.
        least: Smallest accepted integer.
        most: Largest accepted integer.
        operation: Name of the operation in errors.
        name: Name of the argument in errors.
        of: Text in errors after the received value, such as " for kv_len 7".
        hint: How to fix the call.

    Raises:
        ArgumentError: The argument is not an integer from `least` to `most`.
    """
    if isinstance(count, int | np.integer) and not isinstance(count, bool) and least <= count <= most:
        return int(count)
    raise ArgumentError(
        operation,
        received=f"{name}={count!r}{of}",
        expected=f"{name} from {least} to {most}, a whole number",
        hint=hint,
    )


def check_align(align: object, operation: str) -> None:
    """Refuse an unknown alignment.

    Args:
        align: The argument.
        operation: Name of the operation in errors.

    Raises:
        ArgumentError: It is neither None, "upper_left" nor "lower_right".
    """
    if align not in (None, "upper_left", "lower_right"):
        raise ArgumentError(
            operation,
            received=f"align={align!r}",
            expected='"upper_left" or "lower_right"',
            hint='If the queries are the last tokens of the keys, use align="lower_right".',
        )
