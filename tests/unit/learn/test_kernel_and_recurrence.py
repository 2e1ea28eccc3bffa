"""Attention as kernel smoothing and as a Markov chain, and the recurrent network before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regard.learn import (
    RecurrentNetwork,
    cat,
    create_causal_mask,
    gaussian_kernel,
    kernel_attention,
    scaled_dot_product_attention,
    unit_vectors,
)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def test_exponential_kernel_gives_attention() -> None:
    mask = create_causal_mask(5)
    for got, want in zip(
        kernel_attention(cat.Q, cat.K, cat.V, mask),
        scaled_dot_product_attention(cat.Q, cat.K, cat.V, mask),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=1e-15)


def test_gaussian_kernel_gives_attention_for_keys_of_equal_length() -> None:
    Q, K, V = draw(2, 5, 3), 2.5 * unit_vectors(draw(2, 7, 3, seed=1)), draw(2, 7, 4)
    same = kernel_attention(Q, K, V, kernel=gaussian_kernel)
    want = scaled_dot_product_attention(Q, K, V)
    np.testing.assert_allclose(same[1], want[1], atol=1e-14)
    np.testing.assert_allclose(same[0], want[0], atol=1e-14)
    other = kernel_attention(Q, K * [[1], [2], [3], [4], [5], [6], [7]], V, kernel=gaussian_kernel)
    assert np.abs(other[1] - want[1]).max() > 0.1
    narrow = kernel_attention(K, K, V, kernel=lambda q, k: gaussian_kernel(q, k, width=0.01))
    np.testing.assert_allclose(
        narrow[0], V, atol=1e-14
    )  # a narrow kernel is a lookup: each key finds its own value


def test_powers_of_the_weights_are_a_markov_chain() -> None:
    _, weights = scaled_dot_product_attention(cat.Q, cat.K, cat.V)
    for power in (2, 3, 50):
        np.testing.assert_allclose(np.linalg.matrix_power(weights, power).sum(axis=1), 1, rtol=1e-13)
    far = np.linalg.matrix_power(weights, 50)
    np.testing.assert_allclose(far, np.broadcast_to(far[0], (5, 5)), atol=1e-12)


def test_influence_is_the_derivative_of_the_last_state() -> None:
    network, x, step = RecurrentNetwork(3, 5, seed=2), draw(7, 3), 1e-5
    found = network.compute_influence(x)
    for t in range(7):
        slopes = []
        for c in range(3):
            nudge = np.zeros((7, 3))
            nudge[t, c] = step
            slopes.append((network(x + nudge)[-1] - network(x - nudge)[-1]) / (2 * step))
        assert found[t] == pytest.approx(np.linalg.norm(slopes), abs=1e-8)


def test_a_recurrent_state_forgets_and_attention_does_not() -> None:
    x = draw(60, 8)
    found = RecurrentNetwork(8, 8).compute_influence(x)
    assert found[0] < 1e-3 * found[-1]
    # Moved to the end, the first token gets the same weight from the same query: attention ignores distance.
    query = x[-1:]
    near, far = (
        scaled_dot_product_attention(query, order, order)[1][0, place]
        for order, place in ((np.roll(x, -1, axis=0), -1), (x, 0))
    )
    assert near == pytest.approx(far, rel=1e-12)
    states = RecurrentNetwork(8, 8)(x)
    np.testing.assert_allclose(states[20], RecurrentNetwork(8, 8)(x[:21])[-1], atol=1e-15)  # no look ahead
