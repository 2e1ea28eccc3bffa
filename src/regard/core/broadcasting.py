"""Broadcast the leading axes of query, key and value without repeating any array."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.errors import ArgumentError, format_named_shape
from regard.types import Array, IntArray


def num_pairs(array: Array) -> int:
    """Count the (batch, head) pairs of an array (…, length, width)."""
    return math.prod(array.shape[:-2])


def broadcast_index(
    array: Array, leading_shape: tuple[int, ...], groups: int, operation: str = "", name: str = ""
) -> IntArray:
    """Compute which pair of an array each pair of the matrix uses.

    Args:
        array: (…, length, width); its leading axes broadcast to `leading_shape`.
        leading_shape: Leading axes of the matrix.
        groups: Number of consecutive heads of the matrix that share a head of the array.
        operation: Name of the operation in errors.
        name: Name of the array in errors.

    Returns:
        Flat indices into the leading axes of the array: (prod(leading_shape),).

    Raises:
        ArgumentError: If the leading axes do not broadcast.
    """
    own_shape = tuple(array.shape[:-2])
    pairs = np.arange(math.prod(own_shape)).reshape(own_shape)
    if groups > 1 and own_shape:
        pairs = np.repeat(pairs, groups, axis=-1)
    try:
        return np.broadcast_to(pairs, leading_shape).ravel()
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{name} of shape {tuple(array.shape)}",
            expected=f"axes before the last two that broadcast to {leading_shape}"
            + (f", its heads repeated {groups} times" if groups > 1 else ""),
            hint=f"Give {name} the leading axes of the matrix, or none.",
        ) from None


def leading_shape(
    query: Array, key: Array, enable_gqa: bool, operation: str = "attention"
) -> tuple[tuple[int, ...], int]:
    """Compute the leading axes of the matrix.

    Args:
        query: (…, heads, q_len, head_dim).
        key: (…, kv_heads, kv_len, head_dim).
        enable_gqa: Whether heads / kv_heads consecutive query heads share a key head.
        operation: Name of the operation in errors.

    Returns:
        The leading axes, and how many query heads share a key head.

    Raises:
        ArgumentError: If the shapes do not fit together.
    """
    if (
        not enable_gqa
        and query.ndim > 1 < key.ndim
        and query.shape[:-2] == key.shape[:-2]
        and query.shape[-1] == key.shape[-1]
    ):
        return tuple(query.shape[:-2]), 1  # fast path of the common case
    for name, array in (("query", query), ("key", key)):
        if array.ndim < 2:
            raise ArgumentError(
                operation,
                received=f"{name} of shape {tuple(array.shape)}",
                expected="(…, heads, length, head_dim), with at least two axes",
                hint=f"A single token is a sequence of length one: {name}[None, :].",
            )
    shapes = ", ".join(
        f"{name} {format_named_shape(array.shape, length, 'head_dim')}"
        for name, array, length in (("query", query, "q_len"), ("key", key, "kv_len"))
    )
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentError(
            operation,
            received=shapes,
            expected="the same head_dim",
            hint="A score is a dot product of query and key: project them to one head_dim, or check for a transpose.",
        )
    q_leading, kv_leading, groups = tuple(query.shape[:-2]), tuple(key.shape[:-2]), 1
    if enable_gqa:
        heads, kv_heads = (leading[-1] if leading else 1 for leading in (q_leading, kv_leading))
        if not (q_leading and kv_leading) or kv_heads == 0 or heads % kv_heads:
            raise ArgumentError(
                operation,
                received=f"{shapes} with enable_gqa=True",
                expected="heads that are a multiple of kv_heads",
                hint="Each key head is shared by heads / kv_heads consecutive query heads.",
            )
        groups = heads // kv_heads
        kv_leading = (*kv_leading[:-1], heads)
    try:
        return np.broadcast_shapes(q_leading, kv_leading), groups
    except ValueError:
        raise ArgumentError(
            operation,
            received=shapes,
            expected="leading axes that broadcast",
            hint="For fewer key heads than query heads set enable_gqa=True.",
        ) from None


def resolve_scale(scale: Any, head_dim: int) -> float:
    """Return the given scale, or 1/√head_dim for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number) or not math.isfinite(scale):
        raise ArgumentError(
            "attention",
            received=f"scale={scale!r}",
            expected="a finite number",
            hint="Omit scale for 1/√head_dim; 0 makes every row uniform.",
        )
    return float(scale)
