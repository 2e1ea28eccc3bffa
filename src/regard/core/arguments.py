"""Resolve and check the arguments of the matrix's methods: indices with NumPy's rules, axes, rows, heads, measures."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.errors import (
    ArgumentError,
    ArgumentTypeError,
    IndexOutOfRangeError,
    TooLargeError,
    describe_argument,
    format_named_shape,
)
from regard.measures import Measure
from regard.measures.base import get_result_name
from regard.types import IntArray
from regard.validation import as_array

# Most bytes that A[index] and np.asarray(A) store.
MAX_RESULT_BYTES = 1 << 28
# The axes of a reduction: one axis, several, or None for all.
Axis = int | tuple[int, ...] | None


# Indices


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
            number = operator.index(entry)
            chosen = np.array([number])
            if not 0 <= number < shape[axis]:
                chosen = _check_range(chosen, shape[axis], axis, operation)
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


def is_row_or_entry(index: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an index of a matrix is a plain integer for every axis, or every one but the last.

    >>> is_row_or_entry((0, 2), (1, 5, 5)), is_row_or_entry((0, 5), (1, 5, 5)), is_row_or_entry(0, (1, 5, 5))
    (True, False, False)
    """
    entries = index if type(index) is tuple else (index,)
    return len(shape) - 1 <= len(entries) <= len(shape) and all(
        [type(entry) is int and -size <= entry < size for entry, size in zip(entries, shape, strict=False)]
    )


def _expand_ellipsis(entries: list[Any], ndim: int, operation: str) -> list[Any]:
    """Replace the ellipsis, or the end of a short index, by full slices.

    An ellipsis that stands for no axis stays: in NumPy it separates an array from an integer, which moves axes.
    """
    given = dots = 0
    for entry in entries:
        dots += entry is Ellipsis
        given += entry is not None and entry is not Ellipsis
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
            expected=f"{-size} to {size - 1}" if size else "a non-empty axis",
            hint=f"The axis has size {size}.",
        )
    return np.where(positions < 0, positions + size, positions)


# Axes, rows, heads, measures


def resolve_reduction(
    shape: tuple[int, ...], operation: str, axis: Any, dim: Any, keywords: Mapping[str, Any]
) -> tuple[int | None, bool]:
    """Resolve the axis of a reduction to −1 (over the keys), −2 (over the queries) or None (over all axes).

    `dim` is a synonym of `axis`. The keywords out and dtype, which NumPy's functions pass, are accepted with their
    default values.

    Returns:
        The axis, and whether it is kept with size 1.
    """
    keep = False
    for name, value in keywords.items():
        if name in ("keepdim", "keepdims") and isinstance(value, bool | np.bool_ | None):
            keep = keep or bool(value)
            continue
        if name not in ("out", "dtype"):
            raise ArgumentTypeError(
                operation,
                received=f"the keyword {name}",
                expected="axis or dim, and keepdim",
                hint=f"Write A.{operation}(axis=-1), A.{operation}(axis=-2) or A.{operation}().",
            )
        if value is not None and value is not False:
            raise ArgumentError(
                operation,
                received=f"{name}={describe_argument(value) if hasattr(value, 'shape') else repr(value)}",
                expected=f"no {name}",
                hint=f"The matrix is lazy: compute result = A.{operation}(axis) first, then cast, store or reshape it.",
            )
    if axis is not None and dim is not None:
        raise ArgumentError(
            operation,
            received=f"axis={axis!r} and dim={dim!r}",
            expected="one of the two",
            hint="dim is an alias of axis; pass only one.",
        )
    return _resolve_axis(shape, operation, dim if axis is None else axis), keep


def _resolve_axis(shape: tuple[int, ...], operation: str, axis: Any) -> int | None:
    """Resolve an axis; axes of heads are refused, since a sum over them is a whole matrix."""
    if axis is None:
        return None
    ndim = len(shape)
    axes = axis if isinstance(axis, tuple) else (axis,)
    are_integers = all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes)
    resolved: set[int] = {a - ndim if a >= 0 else a for a in axes} if are_integers else set()
    if resolved == set(range(-ndim, 0)):
        return None
    if resolved in ({-1}, {-2}):
        return int(resolved.pop())
    hint = f"The matrix has {ndim} axes."
    if resolved == {-2, -1} and operation != "argmax":
        hint = f"Reduce one axis after the other: A.{operation}(axis=-1).{operation}(-1)."
    elif resolved and resolved <= set(range(-ndim, 0)):
        hint = f"The result would be a whole matrix: use A[..., rows, :].{operation}(axis), or coarsen first."
    raise ArgumentError(
        operation,
        received=f"axis={axis!r}",
        expected="axis=-1 (over the keys), axis=-2 (over the queries) or None (over everything)",
        hint=hint,
    )


def check_result_size(nbytes: int, operation: str, received: str, hint: str) -> None:
    """Refuse to store a large result; `A.to_dense()` stores any size."""
    if nbytes > MAX_RESULT_BYTES:
        raise TooLargeError(
            operation,
            received=f"{received} that would take {nbytes:,} bytes",
            expected=f"at most {MAX_RESULT_BYTES:,} bytes",
            hint=hint,
        )


def check_not_empty(shape: tuple[int, ...], operation: str) -> None:
    """Refuse to look for the largest entry of an empty matrix."""
    if not math.prod(shape):
        raise ArgumentError(
            operation,
            received=f"a matrix of shape {shape}",
            expected="at least one entry",
            hint="An empty matrix has no largest and no smallest entry.",
        )


def check_one_head(shape: tuple[int, ...], operation: str, hint: str) -> None:
    """Refuse several heads; `hint` is the call for one head, with {} in place of the head's index."""
    if (heads := math.prod(shape[:-2])) != 1:
        raise ArgumentError(
            operation,
            received=f"a matrix of {format_named_shape(shape, 'q_len', 'kv_len')}",
            expected="one head",
            hint=f"Choose one: {hint.format(', '.join('0' * (len(shape) - 2)))}."
            if heads
            else "The matrix is empty: it has no heads.",
        )


def resolve_row(shape: tuple[int, ...], operation: str, q_idx: Any) -> int:
    """Resolve the index of one query to a row counted from the first."""
    if not hasattr(q_idx, "__index__") or np.ndim(q_idx):
        raise ArgumentTypeError(
            operation,
            received=describe_argument(q_idx),
            expected="the index of one query",
            hint=f"Pass the position of a token: tokens.index({q_idx!r})."
            if isinstance(q_idx, str)
            else f"For several queries call {operation} in a loop, once for each row.",
        )
    return int(resolve_index((..., q_idx, slice(None)), shape, operation).positions[-2][0])


def name_measures(measures: Sequence[Measure], named: Mapping[str, Measure]) -> dict[str, Measure]:
    """Check measures and return a dict from result names to measures."""
    for measure in (*measures, *named.values()):
        if not isinstance(measure, Measure):
            raise ArgumentTypeError(
                "measure",
                received=describe_argument(measure),
                expected="measures such as Entropy() or TopK(8)",
                hint=f"Pass an instance: {measure.__name__}(…)."
                if isinstance(measure, type)
                else "To write a measure, subclass regard.measures.Measure and define init and step.",
            )
    names = [*map(get_result_name, measures), *named]
    if len(set(names)) != len(names):
        raise ArgumentError(
            "measure",
            received=f"results with the names {', '.join(names)}",
            expected="a unique name for each result",
            hint="Rename one with a keyword: A.measure(Mass(regard.masks.first(1)), near=Mass(sliding_window(64))).",
        )
    return dict(zip(names, (*measures, *named.values()), strict=True))
