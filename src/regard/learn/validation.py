"""What the teaching code asks of its arguments, kept here so that the lessons read without interruption."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import SupportsFloat

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument, format_named_shape
from regard.validation import as_array

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def as_floats(operation: str, name: str, array: npt.ArrayLike, *last: str) -> Floats:
    """The array in float64; `last` names the axes it must have at the end, for the message if it has not."""
    given = as_array(array, operation, name)
    if given.dtype.kind not in "iuf":
        raise ArgumentTypeError(
            operation,
            received=f"{name}, {describe_argument(given)}",
            expected=f"{name} as an array of real numbers",
            hint=f"Convert it first, as in np.asarray({name}, dtype=float); a mask goes in as mask=.",
        )
    if given.ndim < len(last):
        raise ArgumentError(
            operation,
            received=f"{name} of shape {given.shape}",
            expected=f"{name} of shape (…, {', '.join(last)})",
            hint=f"A single vector is a table of one row: {name}[None, :].",
        )
    floats: Floats = given.astype(np.float64, copy=False)
    return floats


def as_count(operation: str, name: str, number: int, minimum: int) -> int:
    """The number as an int of at least `minimum`."""
    wanted = f"{name} as a whole number of at least {minimum}"
    try:
        count = operator.index(number)
    except TypeError:
        raise ArgumentTypeError(
            operation,
            received=f"{name}, {describe_argument(number)}",
            expected=wanted,
            hint=f"Pass int({name}).",
        ) from None
    if count < minimum:
        raise ArgumentError(
            operation, received=f"{name} {count}", expected=wanted, hint="Take it from the shape of an array."
        )
    return count


def as_number(operation: str, name: str, number: float, hint: str, *, positive: bool = False) -> float:
    """The number as a float that is not negative, nor NaN; with `above`, not zero either."""
    wanted = f"{name} as a number {'above' if positive else 'of at least'} 0"
    if isinstance(number, bool | str) or not isinstance(number, SupportsFloat):
        raise ArgumentTypeError(
            operation, received=f"{name}, {describe_argument(number)}", expected=wanted, hint=hint
        )
    real = float(number)
    if not (real > 0 if positive else real >= 0):
        raise ArgumentError(operation, received=f"{name} {real:g}", expected=wanted, hint=hint)
    return real


def as_choice(operation: str, name: str, choice: str, choices: Iterable[str]) -> str:
    """The choice, sure to be one of those there are."""
    known = list(choices)
    if choice not in known:
        raise ArgumentError(
            operation,
            received=f"{name}={choice!r}",
            expected=f"{name} as one of {', '.join(map(repr, known))}",
            hint=f"{name}={known[0]!r} is the usual one.",
        )
    return choice


def as_counts(operation: str, name: str, numbers: Iterable[int] | int, minimum: int) -> tuple[int, ...]:
    """The numbers, or the one, as ints of at least `minimum`, each larger than the one before it."""
    given = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    counts = tuple(as_count(operation, name, number, minimum) for number in given)
    if not counts or any(a >= b for a, b in pairwise(counts)):
        raise ArgumentError(
            operation,
            received=f"{name} {counts}",
            expected=f"{name} in rising order, at least one",
            hint=f"Pass sorted(set({name})).",
        )
    return counts


def as_mask(operation: str, mask: npt.ArrayLike, shape: tuple[int, ...]) -> Bools:
    """The mask, sure to be boolean and to broadcast to the `shape` of the scores."""
    given = as_array(mask, operation, "mask")
    if given.dtype != np.bool_:
        raise ArgumentTypeError(
            operation,
            received=f"mask, {describe_argument(given)}",
            expected="a boolean mask, True = attend",
            hint="Say which entries may be attended to: mask != 0 where 1 means attend, mask == 0 where 1 "
            "means hide or where the mask was to be added to the scores.",
        )
    if not broadcasts_to(given.shape, shape):
        raise ArgumentError(
            operation,
            received=f"mask of shape {given.shape} for scores "
            + format_named_shape(shape, "q_len", "kv_len"),
            expected="a mask that broadcasts to the shape of the scores",
            hint="Give it axes of one where it is the same for all: (batch, 1, 1, kv_len) goes with "
            "(batch, heads, q_len, kv_len).",
        )
    return np.broadcast_to(given, shape)


def check_leading_axes(operation: str, a: str, A: Floats, b: str, B: Floats) -> None:
    """Refuse two arrays whose axes before the last two cannot be paired with each other."""
    try:
        np.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{a} of shape {A.shape} and {b} of shape {B.shape}",
            expected=f"equal axes, or axes of one, before the last two of {a} and {b}",
            hint=f"Take {a} and {b} from the same batch and the same heads.",
        ) from None


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of `shape` can be repeated into `target` without changing `target`."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
