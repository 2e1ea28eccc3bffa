"""Parameters of masks: integers that compare and hash by content, and where a mask is best split."""

from __future__ import annotations

import numpy as np

from regard.errors import ArgumentError
from regard.types import Array, IntArray, Namespace
from regard.validation import as_array


class IntParameter:
    """One integer or an array of integers of a mask: read-only, with equality and hash by content."""

    def __init__(self, values: int | Array) -> None:
        self.array = np.asarray(values)
        self.array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntParameter) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))

    def __repr__(self) -> str:
        values = self.array.tolist()
        return f"<{self.array.shape} numbers>" if self.array.size > 16 else repr(values)


def as_int_parameter(values: int | Array, operation: str, minimum: int | None) -> IntParameter:
    """Validate token counts of at least `minimum`, or document ids if `minimum` is None."""
    array = as_array(values, operation, "numbers")
    if not array.size:
        array = array.astype(np.int64)  # NumPy makes an empty list an array of floats
    if array.dtype.kind not in "iu" or (minimum is not None and array.size and array.min() < minimum):
        raise ArgumentError(
            operation,
            received=f"{values!r}",
            expected="whole numbers" + ("" if minimum is None else f", {minimum} or more"),
            hint="Number the documents: 0, 1, 2, …" if minimum is None else "Sizes and lengths count tokens.",
        )
    return IntParameter(array.astype(np.int64))


def as_limit(limits: IntArray, xp: Namespace) -> Array | int:
    """Return limits (pairs or 1, 1, 1) as an array; one limit as a number, which needs no copy to a device."""
    return int(limits.flat[0]) if limits.size == 1 else xp.asarray(limits)


def sort_splits(positions: IntArray, length: int) -> IntArray:
    """Return the positions inside an axis in ascending order, with 0 first."""
    inside = positions[(positions > 0) & (positions < length)]
    return np.unique(np.concatenate([[0], inside])).astype(np.int64)
