"""Broken versions of the steps of the definition, as real functions have them. Known faults are built from these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.testing.conformance.attention_call import Align, AttentionCall, build_causal_mask
from regard.testing.conformance.attention_steps import repeat_kv_heads

# -- Scale ----------------------------------------------------------------------------------------------------


def replace_default_scale(default: Callable[[AttentionCall], float]) -> Callable[[AttentionCall], float]:
    """Return a scale step that is wrong only if the call passes no scale."""
    return lambda call: default(call) if call.scale is None else call.scale


# -- Heads and positions --------------------------------------------------------------------------------------


def read_as_heads_first(array: Any) -> Any:
    """Read memory that holds (n, heads) as (heads, n)."""
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, heads, length, width)


def read_as_positions_first(array: Any) -> Any:
    """Read memory that holds (heads, n) as (n, heads)."""
    batch, heads, length, width = array.shape
    return array.reshape(batch, length, heads, width).swapaxes(1, 2)


def split_heads_last(array: Any) -> Any:
    """Split heads from a packed axis as (d h), although it holds (h d)."""
    batch, heads, length, width = array.shape
    packed = array.swapaxes(1, 2).reshape(batch, length, width, heads)
    return packed.transpose(0, 3, 1, 2)


def join_heads_last(array: Any) -> Any:
    """Invert `split_heads_last`."""
    batch, heads, length, width = array.shape
    packed = array.transpose(0, 2, 3, 1).reshape(batch, length, heads, width)
    return packed.swapaxes(1, 2)


def reverse_heads(array: Any) -> Any:
    """Reverse the order of the heads."""
    return array[:, ::-1]


def swap_positions_and_heads(array: Any) -> Any:
    """Swap the axes of positions and heads."""
    return array.swapaxes(1, 2)


def apply_to_each(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step that changes query, key and value alike."""
    return lambda query, key, value: (change(query), change(key), change(value))


def tile_kv_heads(array: Any, heads: int) -> Any:
    """Repeat the key heads as a whole, so that head h reads key head h mod kv_heads."""
    return np.tile(array, (1, heads // array.shape[1], 1, 1)) if array.shape[1] else array


def repeat_first_head(array: Any, heads: int) -> Any:
    """Repeat the first key head for every query head."""
    return np.repeat(array[:, :1], heads, axis=1)


# -- Mask and causal ------------------------------------------------------------------------------------------


def change_mask(change: Callable[[Any], Any]) -> Callable[[AttentionCall], Any]:
    """Return a mask step that changes the mask, if the call has one."""
    return lambda call: np.True_ if call.mask is None else change(call.mask)


def all_live(scores: Any) -> Any:
    """Return True for every score."""
    return np.ones(np.shape(scores), bool)


def if_causal(build: Callable[[AttentionCall], Any]) -> Callable[[AttentionCall], Any]:
    """Return a causal step that builds its mask only if the call is causal."""
    return lambda call: np.True_ if call.causal is None else build(call)


def shift_diagonal(by: int) -> Callable[[AttentionCall], Any]:
    """Return a causal step whose diagonal is off by `by` keys."""

    def build(call: AttentionCall) -> Any:
        q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
        return np.tri(q_len, kv_len, by + (kv_len - q_len if call.causal == "lower_right" else 0), dtype=bool)

    return build


def use_other_corner(call: AttentionCall) -> Any:
    """Build the causal mask of the other alignment."""
    other: Align = "lower_right" if call.causal == "upper_left" else "upper_left"
    return build_causal_mask(call.query.shape[-2], call.key.shape[-2], other)


def always_causal(align: Align) -> Callable[[AttentionCall], Any]:
    """Return a causal step that masks in every call, by `align` if the call names no corner."""
    return lambda call: build_causal_mask(call.query.shape[-2], call.key.shape[-2], call.causal or align)


def show_future(call: AttentionCall) -> Any:
    """Build a causal mask that masks the past instead of the future."""
    q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
    return build_causal_mask(kv_len, q_len, call.causal).T


def keep_whole_blocks(tile: int) -> Callable[[AttentionCall], Any]:
    """Return a mask step that drops the keys after the last whole block; a shorter sequence is one block."""

    def build(call: AttentionCall) -> Any:
        kv_len = call.key.shape[-2]
        kept = np.arange(kv_len) < (kv_len // tile * tile if kv_len >= tile else kv_len)
        return kept & (np.True_ if call.mask is None else call.mask)

    return build


# -- Softmax --------------------------------------------------------------------------------------------------


def softmax_unmasked(scores: Any, kv_len: int) -> Any:
    """Compute the weights of an empty row from its unmasked scores."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(-1, keepdims=True)


def count_padding(tile: int) -> Callable[[int], int]:
    """Return a function from kv_len to the number of keys that pad its last block."""
    return lambda kv_len: -kv_len % tile


def count_extra_keys(count: Callable[[int], int]) -> Callable[..., Any]:
    """Return a denominator with `count(kv_len)` extra keys of score 0."""
    return lambda exponentials, axis, base: (
        exponentials.sum(axis=axis, keepdims=True) + count(exponentials.shape[-1]) * np.exp(-base)
    )


def skip_shift(scores: Any, axis: Any) -> Any:
    """Subtract nothing before the exponential."""
    return np.zeros((1, 1, 1, 1))


def replace_zero_by_nan(exponentials: Any, axis: Any, base: Any) -> Any:
    """Return a denominator that is NaN if the sum underflows to 0."""
    total = exponentials.sum(axis=axis, keepdims=True)
    return np.where(total == 0, np.nan, total)


def drop_nan_rows(call: AttentionCall, weights: Any, live: Any, allowed: Any) -> tuple[Any, Any]:
    """Return zeros for a row whose scores are all NaN, as a running maximum that skips NaN does."""
    scores = call.query @ repeat_kv_heads(call.key, call.query.shape[1]).swapaxes(-1, -2)
    dropped = allowed.any(-1, keepdims=True) & (np.isnan(scores) | ~allowed).all(-1, keepdims=True)
    return np.where(dropped, 0, weights), live & ~dropped
