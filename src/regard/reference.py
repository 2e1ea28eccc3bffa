"""The definition of attention: dense, in float64 or wider, without optimisation. Nothing fast imports it.

Masks and biases are dense arrays here. A masked key, or one with a bias of −inf, has weight 0 and reaches no result,
whatever its key and value hold. A row with no key to attend to is zeros, and its lse is −inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Definition(NamedTuple):
    """The results of the definition.

    Attributes:
        scores: Scores, −inf where masked: (…, heads, q_len, kv_len).
        weights: Weights: (…, heads, q_len, kv_len).
        lse: Natural-log logsumexp of each row: (…, heads, q_len).
        output: Weights times value: (…, heads, q_len, value_dim); None without a value.
    """

    scores: Any
    weights: Any
    lse: Any
    output: Any


def attention(
    query: Any, key: Any, value: Any = None, *, mask: Any = True, biases: Any = (), cap: float | None = None,
    scale: float | None = None, sink: Any = None, dtype: Any = np.float64,
) -> Definition:  # fmt: skip
    """Compute attention by its definition: scale → cap → biases → mask → sink → softmax.

    Args:
        query: (…, heads, q_len, head_dim).
        key: (…, kv_heads, kv_len, head_dim); consecutive query heads share a key head if there are fewer.
        value: (…, kv_heads, kv_len, value_dim).
        mask: Booleans, True = attend, that broadcast to the scores.
        biases: Arrays to add to the scores, in order; −inf masks.
        cap: Soft cap: cap · tanh(scores / cap).
        scale: Factor of the products. Default: 1/√head_dim.
        sink: A score, or one for each head, that takes part in the softmax and belongs to no key.
        dtype: Dtype of the computation.

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
            bias = np.asarray(bias).astype(dtype)
            scores = np.where(bias == -np.inf, -np.inf, scores + bias)
        scores = np.where(mask, scores, -np.inf)
        return _normalise(scores, -np.inf if sink is None else np.asarray(sink)[..., None], value, query)


def linear_attention(
    query: Any, key: Any, value: Any = None, *, feature_map: Any, mask: Any = True, dtype: Any = np.float64
) -> Definition:
    """Compute linear attention by its definition: weights φ(query) · φ(key) over the row's sum.

    Scores are the logarithms of these products.

    Args:
        query: (…, heads, q_len, head_dim).
        key: (…, kv_heads, kv_len, head_dim).
        value: (…, kv_heads, kv_len, value_dim).
        feature_map: φ, a function of one array.
        mask: Booleans, True = attend, that broadcast to the scores.
        dtype: Dtype of the computation.

    >>> linear_attention([[1, 0]], [[1, 0], [1, 1], [0, 1]], feature_map=lambda x: x + 1).weights.round(4)
    array([[0.3333, 0.4   , 0.2667]])
    """
    query, key = np.asarray(query).astype(dtype), np.asarray(key).astype(dtype)
    with np.errstate(all="ignore"):
        products = feature_map(query) @ repeat_heads(feature_map(key), query).swapaxes(-1, -2)
        return _normalise(np.where(mask, np.log(products), -np.inf), -np.inf, value, query)


def _normalise(scores: Any, sink: Any, value: Any, query: Any) -> Definition:
    """Compute the results from the scores and the score of the sink."""
    with np.errstate(all="ignore"):
        sink = np.broadcast_to(np.asarray(sink).astype(scores.dtype), scores.shape[:-1])
        shift = np.maximum(np.max(scores, axis=-1, initial=-np.inf), sink)
        base = np.where(shift == -np.inf, 0, shift)
        exponentials = np.exp(scores - base[..., None])
        total = exponentials.sum(-1) + np.exp(sink - base)
        live = scores != -np.inf
        weights = np.where(live, exponentials / np.where(total == 0, 1, total)[..., None], 0)
        output = None
        if value is not None:
            value = repeat_heads(np.asarray(value).astype(query.dtype), query)
            if np.isfinite(value).all():
                output = weights @ value
            else:  # 0 · NaN is NaN, so masked terms are left out of the sum
                output = np.where(live[..., None], weights[..., None] * value[..., None, :, :], 0).sum(-2)
        return Definition(scores, weights, base + np.log(total), output)


def repeat_heads(array: Any, query: Any) -> Any:
    """Repeat each key head for the heads / kv_heads consecutive query heads that share it."""
    if array.ndim < 3 or query.ndim < 3 or query.shape[-3] in (0, 1, array.shape[-3]) or array.shape[-3] < 2:
        return array
    return np.repeat(array, query.shape[-3] // array.shape[-3], axis=-3)
