"""Resolve and check the arguments of the matrix's methods: axes, rows, heads, measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.core.indexing import resolve_index
from regard.errors import (
    ArgumentError,
    ArgumentTypeError,
    TooLargeError,
    describe_argument,
    format_named_shape,
)
from regard.measures import Measure, get_result_name

# Most bytes that A[index] and np.asarray(A) store.
MAX_RESULT_BYTES = 1 << 28
# The axes of a reduction: one axis, several, or None for all.
Axis = int | tuple[int, ...] | None


def resolve_reduction(
    shape: tuple[int, ...], operation: str, axis: Any, dim: Any, numpy_keywords: Mapping[str, Any]
) -> int | None:
    """Resolve the arguments of a reduction to −1 (over the keys), −2 (over the queries) or None (over all axes).

    `dim` is a synonym of `axis`. The keywords that NumPy's functions pass (out, dtype, keepdims) are accepted with
    their default values.
    """
    for name, value in numpy_keywords.items():
        if name not in ("out", "dtype", "keepdims"):
            raise ArgumentTypeError(
                operation,
                received=f"the keyword {name}",
                expected="axis or dim",
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
    return _resolve_axis(shape, operation, dim if axis is None else axis)


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
        hint = f"Reduce one after the other: A.{operation}(axis=-1).{operation}(-1)."
    elif resolved and resolved <= set(range(-ndim, 0)):
        hint = f"A reduction over heads is a whole matrix: take A[..., rows, :].{operation}(axis), or coarsen first."
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
            hint="An empty matrix has no largest entry.",
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
            else "The matrix is empty: it has no head to choose.",
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
            else f"For several queries call {operation} in a loop: one call for each i in rows.",
        )
    return int(resolve_index((..., q_idx, slice(None)), shape, operation).positions[-2][0])


def name_measures(measures: Sequence[Measure], named: Mapping[str, Measure]) -> dict[str, Measure]:
    """Check measures and return a dict from result names to measures."""
    for measure in (*measures, *named.values()):
        is_measure = all(hasattr(measure, method) for method in ("init", "step", "merge", "finish"))
        if not is_measure or isinstance(measure, type):
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
            hint="Rename one with a keyword: A.measure(Mass(first(1)), near=Mass(sliding_window(64))).",
        )
    return dict(zip(names, (*measures, *named.values()), strict=True))
