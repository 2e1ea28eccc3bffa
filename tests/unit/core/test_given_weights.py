"""A matrix whose weights are given: entries, products and measures are those of the array."""

from __future__ import annotations

import numpy as np
import pytest

from regard import Distance, Entropy, Mass, Received, TopK, causal
from regard.core.attention import attention_from_weights
from regard.masks import first
from regard.tiling import use_tile_sizes

Q_LEN, KV_LEN = 5, 7


def draw(leading=(2, 4), kv_heads=2, dtype=np.float64):
    """Weights with a row of zeros, a row whose rest belongs to no key and single zeros; and query, key and value."""
    rng = np.random.default_rng(3)
    weights = rng.dirichlet(np.ones(KV_LEN), size=(*leading, Q_LEN))
    weights[..., 1, :] = 0
    weights[..., 2, :] /= 2
    weights[..., 3, [0, 4]] = 0
    query = np.zeros((*leading, Q_LEN, 0), dtype)
    key = np.zeros((*leading[:-1], kv_heads, KV_LEN, 0), dtype)
    return (
        weights.astype(dtype),
        query,
        key,
        rng.normal(size=(*leading[:-1], kv_heads, KV_LEN, 3)).astype(dtype),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("small", [True, False])
def test_entries_products_and_measures_are_those_of_the_array(dtype, small):
    weights, query, key, value = draw(dtype=dtype)
    A = attention_from_weights(weights, query, key, enable_gqa=True)
    eps = np.finfo(dtype).eps
    with use_tile_sizes(rows=2, columns=3) if small else use_tile_sizes():
        assert A.shape == weights.shape and A.dtype == dtype
        assert (A.to_dense() == weights).all() and (A[0, 1, 2:4, 1] == weights[0, 1, 2:4, 1]).all()
        assert (A.lse == np.where(weights.any(-1), 0, -np.inf)).all() and A.lse.dtype == dtype
        np.testing.assert_allclose(A @ value, weights @ value.repeat(2, 1), atol=8 * eps)
        found = A.measure(Entropy(), Received(), Mass(first(2)), TopK(3), Distance(align="lower_right"))
    total = weights.sum(-1, keepdims=True)
    keys = weights / np.where(total == 0, 1, total)  # what a row lacks to 1 belongs to no key
    shift = np.abs(np.arange(Q_LEN)[:, None] + KV_LEN - Q_LEN - np.arange(KV_LEN))
    for name, expected in {
        "entropy": -(keys * np.log(np.where(keys == 0, 1, keys))).sum(-1),
        "received": weights.sum(-2),
        "mass": weights[..., :2].sum(-1),
        "distance": (keys * shift).sum(-1),
    }.items():
        np.testing.assert_allclose(getattr(found, name), expected, atol=20 * eps, err_msg=name)
    assert (found.topk.values == -np.sort(-weights, -1)[..., :3]).all()


def test_a_score_is_the_logarithm_of_a_weight():
    weights, query, key, _ = draw((1,), 1)
    A = attention_from_weights(weights, query, key)
    with np.errstate(divide="ignore"):
        assert (A.scores[...] == np.log(weights)).all()


def test_a_mask_is_known_and_the_matrix_says_what_it_is():
    weights, query, key, _ = draw((3,), 3)
    weights = weights * causal("lower_right").to_dense(Q_LEN, KV_LEN)
    A = attention_from_weights(weights, query, key, mask=causal("lower_right"))
    assert (A.to_dense() == weights).all() and A.mask == causal("lower_right")
    assert repr(A).endswith("float64, given weights, mask causal(align='lower_right')")
    assert A.plan(Entropy()).startswith("numpy: block loop, ")
    with pytest.raises(ValueError, match="broadcast to"):
        attention_from_weights(np.ones((4, Q_LEN, KV_LEN)), query, key)
