"""Additive attention: scores from the definition, counted operations, batches and masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from regard.learn import (
    AdditiveAttention,
    attention_by_loops,
    create_padding_mask,
    softmax,
)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def test_additive_scores_from_the_definition() -> None:
    layer = AdditiveAttention(d_q=3, d_k=2, hidden_dim=11, seed=4)
    Q, K, V = draw(5, 3), draw(7, 2), draw(7, 13)
    want = [[layer.w @ np.tanh(q @ layer.W_Q + k @ layer.W_K) for k in K] for q in Q]
    np.testing.assert_allclose(layer.compute_scores(Q, K), want, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(layer.score_by_loops(Q, K).scores, want, rtol=1e-13, atol=1e-14)
    mask = draw(5, 7, seed=1) < 0.5
    mask[1] = False
    output, weights = layer(Q, K, V, mask)
    np.testing.assert_allclose(weights, softmax(want, mask), atol=1e-14)
    np.testing.assert_allclose(output, weights @ V, atol=1e-14)
    assert (np.abs(layer.compute_scores(1e6 * Q, K)) <= np.abs(layer.w).sum() + 1e-12).all()


@pytest.mark.parametrize(("n_q", "n_k", "d_q", "d_k", "hidden"), [(5, 7, 3, 2, 11), (1, 3, 2, 2, 5)])
def test_additive_operations_are_counted(n_q: int, n_k: int, d_q: int, d_k: int, hidden: int) -> None:
    counts = AdditiveAttention(d_q, d_k, hidden).score_by_loops(draw(n_q, d_q), draw(n_k, d_k)).counts
    assert counts.projection_multiply_adds == (n_q * d_q + n_k * d_k) * hidden
    assert counts.pair_multiply_adds == counts.additions == counts.tanh_calls == n_q * n_k * hidden
    assert f"{counts.tanh_calls:,}" == str(counts).split()[-1]


def test_additive_costs_more_than_the_dot_product_of_the_same_size() -> None:
    Q, K, V = draw(3, 6, 4)
    dot = attention_by_loops(Q, K, V).counts
    additive = AdditiveAttention(4, 4, hidden_dim=4).score_by_loops(Q, K).counts
    assert additive.pair_multiply_adds == dot.score_multiply_adds
    assert (
        additive.tanh_calls == additive.additions == dot.score_multiply_adds
    )  # in addition to the multiply-adds
    assert additive.projection_multiply_adds > 0


def test_additive_attention_over_batches_and_masked_keys() -> None:
    layer = AdditiveAttention(3, 2, 5)
    Q, K, V = draw(2, 5, 3), draw(2, 7, 2), draw(2, 7, 4)
    mask = create_padding_mask([4, 6], 7)[:, 0]
    output, weights = layer(Q, K, V, mask)
    for b, length in enumerate([4, 6]):
        alone = layer(Q[b], K[b, :length], V[b, :length])
        np.testing.assert_allclose(output[b], alone[0], atol=1e-14)
        np.testing.assert_allclose(weights[b, :, :length], alone[1], atol=1e-14)
        K[b, length:] = V[b, length:] = math.nan
    np.testing.assert_allclose(layer(Q, K, V, mask)[0], output, atol=1e-14)


def test_a_row_by_hand_has_the_additive_scores_and_no_scale() -> None:
    rng = np.random.default_rng(0)
    attention = AdditiveAttention(d_q=2, d_k=3, hidden_dim=5)
    Q, K, V = rng.normal(size=(4, 2)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    row = attention.explain(Q, K, V, query_idx=1)
    scores = [float(np.tanh(Q[1] @ attention.W_Q + key @ attention.W_K) @ attention.w) for key in K]
    for line, score in zip(row.steps[0].lines, scores, strict=True):
        assert float(line.rpartition("= ")[2].replace("−", "-")) == pytest.approx(score, abs=6e-5)
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(row.weights, weights, rtol=1e-12)
    np.testing.assert_allclose(row.output, weights @ V, rtol=1e-12)
    assert "No scaling" in row.steps[1].title
