"""Indices: what `A[index]` asks for, settled once, in NumPy's own terms."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.types import IntArray
from regard.validation import as_array


class ResolvedIndex(NamedTuple):
    """Positions to compute along each axis, and the index that then gives the block the shape NumPy gives it."""

    positions: list[IntArray]
    local: tuple[Any, ...]
    kept: list[bool]


def resolve_index(index: Any, shape: tuple[int, ...], operation: str) -> ResolvedIndex:
    """Split an index of integers, slices, ellipsis, newaxis and at most one integer array.

    >>> resolve_index((..., 1, slice(0, 4, 2)), (7, 5, 5), "A[index]").positions[1:]
    [array([1]), array([0, 2])]
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = _without_ellipsis(entries, len(shape), operation)
    positions: list[IntArray] = []
    local: list[Any] = []
    kept: list[bool] = []
    arrays = 0
    for entry in entries:
        if entry is None:
            local.append(None)
            continue
        if hasattr(entry, "detach"):
            entry = entry.detach().cpu().numpy()  # a tensor
        axis = len(positions)
        here: Any
        if isinstance(entry, slice):
            chosen, here = _sliced(entry, shape[axis], operation), slice(None)
        elif _is_integer(entry):
            chosen, here = _in_range(np.array([operator.index(entry)]), shape[axis], axis, operation), 0
        else:
            array = _integers(entry, operation)
            arrays += 1
            chosen = _in_range(array.ravel(), shape[axis], axis, operation)
            here = np.arange(array.size).reshape(array.shape)
        positions.append(chosen)
        local.append(here)
        kept.append(not isinstance(here, int))
    if arrays > 1:
        raise ArgumentTypeError(
            operation,
            received=f"{arrays} integer arrays",
            expected="one integer array at most, beside slices and integers",
            hint="Index in two steps: A[rows][:, columns].",
        )
    return ResolvedIndex(positions, tuple(local), kept)


def _without_ellipsis(entries: list[Any], ndim: int, operation: str) -> list[Any]:
    given = sum(entry is not None and entry is not Ellipsis for entry in entries)
    dots = sum(entry is Ellipsis for entry in entries)
    if given > ndim or dots > 1:
        raise IndexOutOfRangeError(
            operation,
            received=f"{given} indices and {dots} ellipses",
            expected=f"at most {ndim} indices and one ellipsis",
            hint=f"The matrix has {ndim} axes.",
        )
    missing = [slice(None)] * (ndim - given)
    if not dots:
        return entries + missing
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    return entries[:at] + missing + entries[at + 1 :]


def _sliced(entry: slice, size: int, operation: str) -> IntArray:
    try:
        return np.ascontiguousarray(np.arange(size)[entry])
    except (TypeError, ValueError):
        raise ArgumentError(
            operation,
            received=f"{entry!r}",
            expected="whole numbers, and a step that is not 0",
            hint="Write A[start:stop:step].",
        ) from None


def _is_integer(entry: Any) -> bool:
    if isinstance(entry, bool | np.bool_ | list | np.ndarray):
        return isinstance(entry, np.ndarray) and entry.ndim == 0 and entry.dtype.kind in "iu"
    return hasattr(entry, "__index__")


def _integers(entry: Any, operation: str) -> IntArray:
    array = as_array(entry, operation, "an index")
    if array.size == 0 and isinstance(entry, list):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or isinstance(entry, bool):
        raise ArgumentTypeError(
            operation,
            received=describe_argument(array),
            expected="integers, slices, an ellipsis or one integer array",
            hint="Turn booleans into positions first: numpy.flatnonzero(chosen)."
            if array.dtype.kind == "b"
            else "Positions are whole numbers.",
        )
    integers: IntArray = array.astype(np.int64)
    return integers


def _in_range(positions: IntArray, size: int, axis: int, operation: str) -> IntArray:
    wrong = (positions < -size) | (positions >= size)
    if wrong.any():
        raise IndexOutOfRangeError(
            operation,
            received=f"index {positions[wrong][0]} for axis {axis}",
            expected=f"from {-size} to {size - 1}",
            hint=f"That axis has {size} entries.",
        )
    return np.where(positions < 0, positions + size, positions)
