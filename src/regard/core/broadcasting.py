"""Leading axes: how those of query, key and value make those of the matrix, without repeating anything."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.errors import ArgumentError, format_named_shape
from regard.types import Array, IntArray


def num_pairs(array: Array) -> int:
    """How many (batch, head) pairs an array (…, length, width) has."""
    return math.prod(array.shape[:-2])


def broadcast_index(
    array: Array, lead: tuple[int, ...], groups: int, operation: str = "", name: str = ""
) -> IntArray:
    """Which of the array's own pairs serves each pair of `lead`; each of its heads serves `groups` in a row."""
    own = tuple(array.shape[:-2])
    numbers = np.arange(math.prod(own)).reshape(own)
    if groups > 1 and own:
        numbers = np.repeat(numbers, groups, axis=-1)
    try:
        return np.broadcast_to(numbers, lead).ravel()
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{name} of shape {tuple(array.shape)}",
            expected=f"axes before the last two that broadcast to {lead}"
            + (f", its heads counted {groups} times" if groups > 1 else ""),
            hint=f"Give {name} the leading axes of the matrix, or none.",
        ) from None


def leading_shape(
    query: Array, key: Array, enable_gqa: bool, operation: str = "attention"
) -> tuple[tuple[int, ...], int]:
    """The leading axes of the matrix, and how many query heads share a key head."""
    if (
        not enable_gqa
        and query.ndim > 1 < key.ndim
        and query.shape[:-2] == key.shape[:-2]
        and query.shape[-1] == key.shape[-1]
    ):
        return tuple(query.shape[:-2]), 1  # the common case, which should cost nothing
    for name, array in (("query", query), ("key", key)):
        if array.ndim < 2:
            raise ArgumentError(
                operation,
                received=f"{name} of shape {tuple(array.shape)}",
                expected="(…, heads, length, head_dim), two axes at least",
                hint=f"A single token is a length of one: {name}[None, :].",
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
            hint="Query and key are compared entry by entry; project them to one head_dim, or check for a transpose.",
        )
    q_lead, kv_lead, groups = tuple(query.shape[:-2]), tuple(key.shape[:-2]), 1
    if enable_gqa:
        heads, kv_heads = (lead[-1] if lead else 1 for lead in (q_lead, kv_lead))
        if not (q_lead and kv_lead) or kv_heads == 0 or heads % kv_heads:
            raise ArgumentError(
                operation,
                received=f"{shapes} with enable_gqa=True",
                expected="heads that are a multiple of kv_heads",
                hint="Each key head serves heads / kv_heads query heads in a row.",
            )
        groups = heads // kv_heads
        kv_lead = (*kv_lead[:-1], heads)
    try:
        return np.broadcast_shapes(q_lead, kv_lead), groups
    except ValueError:
        raise ArgumentError(
            operation,
            received=shapes,
            expected="leading axes that broadcast",
            hint="For fewer key heads than query heads set enable_gqa=True.",
        ) from None


def resolve_scale(scale: Any, head_dim: int) -> float:
    """The scale that was given, or 1/√head_dim."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number) or not math.isfinite(scale):
        raise ArgumentError(
            "attention",
            received=f"scale={scale!r}",
            expected="a finite number",
            hint="Leave it out for 1/√head_dim; 0 makes every row uniform.",
        )
    return float(scale)
