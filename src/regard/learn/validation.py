"""Validate the arguments of the teaching code, so that the lessons stay free of checks."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument, format_named_shape
from regard.validation import as_array

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
MaskLike = ArrayLike | None
TrueMeans = Literal["attend", "ignore"] | None

MAX_MASK_ENTRIES = 36  # of a mask that an error repeats


def as_floats(operation: str, name: str, array: ArrayLike, *last_axes: str) -> Floats:
    """Convert an array to float64, and require at least the axes that `last_axes` names."""
    converted = as_array(array, operation, name)
    if converted.dtype.kind not in "iuf":
        raise ArgumentTypeError(
            operation,
            received=f"{name}, {describe_argument(converted)}",
            expected=f"{name} as an array of real numbers",
            hint=f"Convert it first, e.g. np.asarray({name}, dtype=float). Pass a mask as mask=.",
        )
    if converted.ndim < len(last_axes):
        raise ArgumentError(
            operation,
            received=f"{name} of shape {converted.shape}",
            expected=f"{name} of shape (…, {', '.join(last_axes)})",
            hint=f"A single vector is a table of one row: {name}[None, :].",
        )
    floats: Floats = converted.astype(np.float64, copy=False)
    return floats


def require(condition: bool, operation: str, received: str, expected: str, hint: str) -> None:
    """Raise an ArgumentError if a condition is not met."""
    if not condition:
        raise ArgumentError(operation, received=received, expected=expected, hint=hint)


def as_count(operation: str, name: str, number: int, minimum: int) -> int:
    """Convert a whole number to an int, and require at least `minimum`."""
    expected = f"{name} as a whole number of at least {minimum}"
    try:
        count = operator.index(number)
    except TypeError:
        raise ArgumentTypeError(
            operation,
            received=f"{name}, {describe_argument(number)}",
            expected=expected,
            hint=f"Pass int({name}).",
        ) from None
    if count < minimum:
        hint = "Use a size from the shape of an array."
        raise ArgumentError(operation, received=f"{name} {count}", expected=expected, hint=hint)
    return count


def as_choice(operation: str, name: str, choice: str, choices: Iterable[str]) -> str:
    """Return a choice, and require that it is one of `choices`; a hint names the first of them."""
    accepted = list(choices)
    if choice not in accepted:
        raise ArgumentError(
            operation,
            received=f"{name}={choice!r}",
            expected=f"{name} as one of {', '.join(map(repr, accepted))}",
            hint=f"The usual choice is {name}={accepted[0]!r}.",
        )
    return choice


def as_counts(operation: str, name: str, numbers: Iterable[int] | int, minimum: int) -> tuple[int, ...]:
    """Convert one or more whole numbers to ints, and require them in rising order."""
    listed = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    counts = tuple(as_count(operation, name, number, minimum) for number in listed)
    if not counts or any(a >= b for a, b in pairwise(counts)):
        raise ArgumentError(
            operation,
            received=f"{name} {counts}",
            expected=f"{name} in ascending order, at least one",
            hint=f"Pass sorted(set({name})).",
        )
    return counts


def read_mask(operation: str, mask: MaskLike, true_means: TrueMeans) -> Bools | None:
    """Convert a mask of booleans, or of 0 and 1, to booleans with True = attend.

    Without `true_means`, True means attend, and numbers are refused.

    >>> read_mask("forward", [[1, 0]], "ignore")
    array([[False,  True]])
    """
    if mask is None:
        return None
    converted = as_array(mask, operation, "mask")
    if true_means is None and converted.dtype != np.bool_:
        raise _mask_error(operation, converted, takes_true_means=True)
    if true_means not in (None, "attend", "ignore"):
        raise ArgumentError(
            operation,
            received=f"true_means={true_means!r}",
            expected='"attend" or "ignore"',
            hint='Pass "attend" if True or 1 marks keys to attend to, "ignore" if it marks keys to ignore.',
        )
    if not _is_zero_or_one(converted):
        raise ArgumentError(
            operation,
            received="a mask with numbers other than 0 and 1",
            expected="a mask of booleans, or of 0 and 1",
            hint="If it is an additive mask of 0 and -inf, pass mask == 0.",
        )
    marked: Bools = converted.astype(bool)
    return ~marked if true_means == "ignore" else marked


def as_mask(operation: str, mask: ArrayLike, shape: tuple[int, ...]) -> Bools:
    """Broadcast a boolean mask, True = attend, to the shape of the scores."""
    converted = as_array(mask, operation, "mask")
    if converted.dtype != np.bool_:
        raise _mask_error(operation, converted, takes_true_means=False)
    try:
        return np.broadcast_to(converted, shape)
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"mask of shape {converted.shape} for scores "
            + format_named_shape(shape, "q_len", "kv_len"),
            expected="a mask that broadcasts to the shape of the scores",
            hint="Add axes of size 1 to broadcast: (batch, 1, 1, kv_len) fits (batch, heads, q_len, kv_len).",
        ) from None


def _is_zero_or_one(mask: npt.NDArray[Any]) -> bool:
    return bool(np.isin(mask, (0, 1)).all()) if mask.dtype.kind in "biuf" else False


def _mask_error(operation: str, mask: npt.NDArray[Any], *, takes_true_means: bool) -> ArgumentTypeError:
    """Build the error for a mask of numbers; for 0 and 1, its hint has the two lines to choose from."""
    received = f"mask, {describe_argument(mask)}"
    if not _is_zero_or_one(mask):
        hint = "If it is an additive mask of 0 and -inf, pass mask == 0."
        return ArgumentTypeError(
            operation, received=received, expected="a boolean mask, True = attend", hint=hint
        )
    array = str(mask.astype(int).tolist()) if mask.size <= MAX_MASK_ENTRIES else "mask"
    lines = []
    for number, meaning, verb in ((1, "attend", "look here"), (0, "ignore", "do not look")):
        if takes_true_means:
            call = f'mask={array}, true_means="{meaning}"'
        else:
            call = f"mask=np.array({array}) == {number}"
        lines.append(f"\n    {call}  # 1 = {verb}{_describe_first_row(mask == number)}")
    return ArgumentTypeError(
        operation,
        received=f"{received}, of 0 and 1",
        expected="a boolean mask, True = attend, or the meaning of 1",
        hint="Pass one of these:" + "".join(lines),
    )


def _describe_first_row(visible: Bools) -> str:
    """Describe the keys that the first query sees: ": query 0 sees keys 1, 2"."""
    if not visible.ndim or not visible.size:
        return ""
    keys = np.flatnonzero(visible.reshape(-1, visible.shape[-1])[0]).tolist()
    shown = ", ".join(map(str, keys[:5])) + (", …" if len(keys) > 5 else "")
    return f": query 0 sees {'no key' if not keys else f'key {shown}' if len(keys) == 1 else f'keys {shown}'}"


def check_leading_axes(operation: str, a: str, A: Floats, b: str, B: Floats) -> None:
    """Raise an error if the axes of two arrays before the last two do not broadcast."""
    try:
        np.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{a} of shape {A.shape} and {b} of shape {B.shape}",
            expected=f"{a} and {b} whose axes before the last two are equal or of size 1",
            hint=f"Compute {a} and {b} from the same batch and the same heads.",
        ) from None
