"""The definition: dense, float64 or better, nothing clever. It says what is right; nothing fast imports it.

Masks and biases are whole arrays here. What is hidden (masked, or a bias of −inf) has no weight and reaches
nothing, whatever its key and value hold; a row that sees nothing is zeros with an lse of −inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Definition(NamedTuple):
    """scores and weights (…, heads, q_len, kv_len), lse (…, heads, q_len), output (…, q_len, value_dim) or None."""

    scores: Any
    weights: Any
    lse: Any
    output: Any


def attention(
    query: Any, key: Any, value: Any = None, *, mask: Any = True, biases: Any = (), cap: float | None = None,
    scale: float | None = None, sink: Any = None, dtype: Any = np.float64,
) -> Definition:  # fmt: skip
    """Attention by its definition: scale → cap → biases → mask → sink → softmax.

    >>> attention([[1, 0]], [[1, 0], [1, 1], [0, 1]]).weights.round(4)
    array([[0.4011, 0.4011, 0.1978]])
    """
    query, key = np.asarray(query).astype(dtype), np.asarray(key).astype(dtype)
    with np.errstate(all="ignore"):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ repeat_heads(key, query).swapaxes(-1, -2) * dtype(scale)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        for bias in biases:
            scores = np.where(np.asarray(bias) == -np.inf, -np.inf, scores + bias)
        scores = np.where(mask, scores, -np.inf)
        return _normalised(scores, -np.inf if sink is None else np.asarray(sink)[..., None], value, query)


def linear_attention(
    query: Any, key: Any, value: Any = None, *, feature_map: Any, mask: Any = True, dtype: Any = np.float64
) -> Definition:
    """Linear attention by its definition: weights φ(query) · φ(key) over the sum of the row, scores their logs.

    >>> linear_attention([[1, 0]], [[1, 0], [1, 1], [0, 1]], feature_map=lambda x: x + 1).weights.round(4)
    array([[0.3333, 0.4   , 0.2667]])
    """
    query, key = np.asarray(query).astype(dtype), np.asarray(key).astype(dtype)
    with np.errstate(all="ignore"):
        products = feature_map(query) @ repeat_heads(feature_map(key), query).swapaxes(-1, -2)
        return _normalised(np.where(mask, np.log(products), -np.inf), -np.inf, value, query)


def _normalised(scores: Any, extra: Any, value: Any, query: Any) -> Definition:
    """Everything from the scores; `extra` is that of the sink."""
    with np.errstate(all="ignore"):
        extra = np.broadcast_to(extra, scores.shape[:-1])
        shift = np.maximum(np.max(scores, axis=-1, initial=-np.inf), extra)
        base = np.where(shift == -np.inf, 0, shift)
        exponentials = np.exp(scores - base[..., None])
        total = exponentials.sum(-1) + np.exp(extra - base)
        live = scores != -np.inf
        weights = np.where(live, exponentials / np.where(total == 0, 1, total)[..., None], 0)
        output = None
        if value is not None:
            value = repeat_heads(np.asarray(value).astype(query.dtype), query)
            if np.isfinite(value).all():
                output = weights @ value
            else:  # 0 · NaN is NaN, so what is hidden is left out before the sum
                output = np.where(live[..., None], weights[..., None] * value[..., None, :, :], 0).sum(-2)
        return Definition(scores, weights, base + np.log(total), output)


def repeat_heads(array: Any, query: Any) -> Any:
    """Each key head for heads / kv_heads query heads in a row."""
    if array.ndim < 3 or query.ndim < 3 or query.shape[-3] in (0, 1, array.shape[-3]) or array.shape[-3] < 2:
        return array
    return np.repeat(array, query.shape[-3] // array.shape[-3], axis=-3)
