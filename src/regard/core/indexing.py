"""Resolve the index of `A[index]` once, with NumPy's rules."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.types import IntArray
from regard.validation import as_array


class ResolvedIndex(NamedTuple):
    """An index in canonical form.

    Attributes:
        positions: Positions to compute along each axis.
        local: Index that gives the computed block the shape that NumPy would give it.
        kept: Whether each axis remains in the result; an integer drops it.
        adds_axes: Whether the index adds axes, by newaxis or an array that is not 1-D.
        keeps_tokens: Whether the last two axes are left out or written as `:`, and no axes are added.
    """

    positions: list[IntArray]
    local: tuple[Any, ...]
    kept: list[bool]
    adds_axes: bool
    keeps_tokens: bool

    @property
    def leading_local(self) -> tuple[Any, ...]:
        """The part of `local` that belongs to the axes before the token axes."""
        entries = list(self.local)
        for _ in range(2):
            while entries.pop() is Ellipsis:
                pass
        return tuple(entries)


def resolve_index(index: Any, shape: tuple[int, ...], operation: str) -> ResolvedIndex:
    """Resolve an index of integers, slices, ellipsis, newaxis and at most one integer array.

    Args:
        index: The index that the caller passed.
        shape: Shape of the matrix.
        operation: Name of the operation in errors.

    Raises:
        IndexOutOfRangeError: If a position is past the end, or there are too many entries.
        ArgumentTypeError: If an entry has another type, or there are several arrays.
        ArgumentError: If a slice has bounds that are not integers, or a step of 0.

    >>> resolve_index((..., 1, slice(0, 4, 2)), (7, 5, 5), "A[index]").positions[1:]
    [array([1]), array([0, 2])]
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = _expand_ellipsis(entries, len(shape), operation)
    positions: list[IntArray] = []
    local: list[Any] = []
    kept: list[bool] = []
    arrays = 0
    adds_axes = False
    for entry in entries:
        if entry is None or entry is Ellipsis:
            local.append(entry)
            adds_axes = adds_axes or entry is None
            continue
        if hasattr(entry, "detach"):  # a tensor
            entry = entry.detach().cpu().numpy()
        axis = len(positions)
        local_entry: Any
        if isinstance(entry, slice):
            chosen, local_entry = _resolve_slice(entry, shape[axis], operation), slice(None)
        elif _is_integer(entry):
            chosen = _check_range(np.array([operator.index(entry)]), shape[axis], axis, operation)
            local_entry = 0
        else:
            array = _as_integers(entry, operation)
            arrays += 1
            chosen = _check_range(array.ravel(), shape[axis], axis, operation)
            local_entry = np.arange(array.size).reshape(array.shape)
            adds_axes = adds_axes or array.ndim != 1
        positions.append(chosen)
        local.append(local_entry)
        kept.append(not isinstance(local_entry, int))
    if arrays > 1:
        raise ArgumentTypeError(
            operation,
            received=f"{arrays} integer arrays",
            expected="at most one integer array, besides slices and integers",
            hint="Index in two steps: A[rows][:, columns].",
        )
    tokens = [entry for entry in entries if entry is not Ellipsis][-2:]
    whole = all(isinstance(entry, slice) and entry == slice(None) for entry in tokens)
    return ResolvedIndex(positions, tuple(local), kept, adds_axes, whole and not adds_axes)


def _expand_ellipsis(entries: list[Any], ndim: int, operation: str) -> list[Any]:
    """Replace the ellipsis, or the end of a short index, by full slices.

    An ellipsis that stands for no axis stays: in NumPy it separates an array from an integer, which moves axes.
    """
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
    if not dots or not missing:
        return entries + missing
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    return entries[:at] + missing + entries[at + 1 :]


def _resolve_slice(entry: slice, size: int, operation: str) -> IntArray:
    try:
        return np.arange(*entry.indices(size))
    except (TypeError, ValueError):
        raise ArgumentError(
            operation,
            received=f"{entry!r}",
            expected="integer bounds, and a step other than 0",
            hint="Write A[start:stop:step].",
        ) from None


def _is_integer(entry: Any) -> bool:
    if isinstance(entry, bool | np.bool_ | list | np.ndarray):
        return isinstance(entry, np.ndarray) and entry.ndim == 0 and entry.dtype.kind in "iu"
    return hasattr(entry, "__index__")


def _as_integers(entry: Any, operation: str) -> IntArray:
    array = as_array(entry, operation, "an index")
    if array.size == 0 and isinstance(entry, list):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or isinstance(entry, bool):
        raise ArgumentTypeError(
            operation,
            received=describe_argument(entry if isinstance(entry, str) else array),
            expected="integers, slices, an ellipsis or one integer array",
            hint="Convert booleans to positions first: numpy.flatnonzero(chosen)."
            if array.dtype.kind == "b"
            else "Pass positions as integers.",
        )
    integers: IntArray = array.astype(np.int64)
    return integers


def _check_range(positions: IntArray, size: int, axis: int, operation: str) -> IntArray:
    """Refuse positions past the end, and count negative ones from the end."""
    wrong = (positions < -size) | (positions >= size)
    if wrong.any():
        raise IndexOutOfRangeError(
            operation,
            received=f"index {positions[wrong][0]} for axis {axis}",
            expected=f"{-size} to {size - 1}" if size else "an axis that is not empty",
            hint=f"The axis has size {size}.",
        )
    return np.where(positions < 0, positions + size, positions)
