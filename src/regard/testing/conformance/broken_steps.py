"""Steps of the definition done wrong, each as functions do it: the material of which faults are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.testing.conformance.attention_call import Align, Call, causal_mask
from regard.testing.conformance.attention_steps import interleave


def sizes(call: Call) -> dict[str, int]:
    return call.sizes


def unless_given(default: Callable[[Call], float]) -> Callable[[Call], float]:
    """A scale that is wrong only where none was given."""
    return lambda call: default(call) if call.scale is None else call.scale


def mixed(array: Any) -> Any:
    """(heads, n) read from memory that holds (n, heads)."""
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, heads, length, width)


def unmixed(array: Any) -> Any:
    """(n, heads) read from memory that holds (heads, n)."""
    batch, heads, length, width = array.shape
    return array.reshape(batch, length, heads, width).swapaxes(1, 2)


def interleaved(array: Any) -> Any:
    """Heads split from a packed axis as (d h) where it holds (h d)."""
    batch, heads, length, width = array.shape
    packed = array.swapaxes(1, 2).reshape(batch, length, width, heads)
    return packed.transpose(0, 3, 1, 2)


def packed_back(array: Any) -> Any:
    """The inverse of `interleaved`."""
    batch, heads, length, width = array.shape
    packed = array.transpose(0, 2, 3, 1).reshape(batch, length, heads, width)
    return packed.swapaxes(1, 2)


def reversed_heads(array: Any) -> Any:
    return array[:, ::-1]


def on_each(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda query, key, value: (change(query), change(key), change(value))


def swap_positions_and_heads(array: Any) -> Any:
    return array.swapaxes(1, 2)


def tiled(array: Any, heads: int) -> Any:
    return np.tile(array, (1, heads // array.shape[1], 1, 1)) if array.shape[1] else array


def first_head(array: Any, heads: int) -> Any:
    return np.repeat(array[:, :1], heads, axis=1)


def where_causal(triangle: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """The triangle, where one was asked for."""
    return lambda call: np.True_ if call.causal is None else triangle(call)


def shifted_triangle(by: int) -> Callable[[Call], Any]:
    def triangle(call: Call) -> Any:
        q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
        return np.tri(q_len, kv_len, by + (kv_len - q_len if call.causal == "lower_right" else 0), dtype=bool)

    return triangle


def other_corner(call: Call) -> Any:
    other: Align = "lower_right" if call.causal == "upper_left" else "upper_left"
    return causal_mask(call.query.shape[-2], call.key.shape[-2], other)


def future(call: Call) -> Any:
    q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
    return causal_mask(kv_len, q_len, call.causal).T


def of_mask(change: Callable[[Any], Any]) -> Callable[[Call], Any]:
    """The mask changed, where there is one."""
    return lambda call: np.True_ if call.mask is None else change(call.mask)


def all_live(scores: Any) -> Any:
    return np.ones(np.shape(scores), bool)


def softmax_of(scores: Any, kv_len: int) -> Any:
    exponentials = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(-1, keepdims=True)


def whole_blocks(tile: int) -> Callable[[Call], Any]:
    """Only keys in whole blocks are seen; a sequence shorter than a block is one."""

    def seen(call: Call) -> Any:
        kv_len = call.key.shape[-2]
        kept = np.arange(kv_len) < (kv_len // tile * tile if kv_len >= tile else kv_len)
        return kept & (np.True_ if call.mask is None else call.mask)

    return seen


def padded_to(tile: int) -> Callable[[int], int]:
    return lambda kv_len: -kv_len % tile


def with_phantoms(count: Callable[[int], int]) -> Callable[..., Any]:
    """Keys that are not there, counted with a score of 0."""
    return lambda exponentials, axis, base: (
        exponentials.sum(axis=axis, keepdims=True) + count(exponentials.shape[-1]) * np.exp(-base)
    )


def no_shift(scores: Any, axis: Any) -> Any:
    return np.zeros((1, 1, 1, 1))


def nan_for_zero(exponentials: Any, axis: Any, base: Any) -> Any:
    total = exponentials.sum(axis=axis, keepdims=True)
    return np.where(total == 0, np.nan, total)


def rows_of_nan_dropped(call: Call, weights: Any, live: Any, allowed: Any) -> tuple[Any, Any]:
    """Zeros for a row whose scores are all NaN, as a running maximum that skips NaN leaves it."""
    scores = call.query @ interleave(call.key, call.query.shape[1]).swapaxes(-1, -2)
    dropped = allowed.any(-1, keepdims=True) & (np.isnan(scores) | ~allowed).all(-1, keepdims=True)
    return np.where(dropped, 0, weights), live & ~dropped
