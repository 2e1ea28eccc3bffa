"""Attention by loops: agreement, counts of every operation, and the multiplications one at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.learn import (
    attention_by_loops,
    create_causal_mask,
    iter_multiplications,
    scaled_dot_product_attention,
)
from tests.helpers.attention_ways import by_class, draw_qkv


@given(
    n_q=st.integers(0, 7),
    n_k=st.integers(0, 7),
    d_k=st.integers(1, 5),
    d_v=st.integers(0, 5),
    seed=st.integers(0),
)
def test_loops_agree_with_the_class_and_count_operations(
    n_q: int, n_k: int, d_k: int, d_v: int, seed: int
) -> None:
    Q, K, V = draw_qkv(n_q, n_k, d_k, d_v, seed=seed)
    mask = np.random.default_rng(seed).random((n_q, n_k)) < 0.5
    for may_see in (np.ones_like(mask), mask):
        result = attention_by_loops(Q, K, V, may_see)
        output, weights = by_class(Q, K, V, may_see)
        np.testing.assert_allclose(result.weights, weights, atol=1e-14)
        np.testing.assert_allclose(result.output, output, atol=1e-14)
        np.testing.assert_allclose(
            result.scores, np.where(may_see, Q @ K.T / math.sqrt(d_k), -np.inf), atol=1e-13
        )

        pairs, counts = int(may_see.sum()), result.counts
        rows = int(may_see.any(axis=1).sum())
        assert counts.score_multiply_adds == pairs * d_k
        assert counts.value_multiply_adds == pairs * d_v
        assert counts.multiply_adds == pairs * (d_k + d_v)
        assert counts.exponentials == pairs
        assert counts.divisions == counts.additions == 2 * pairs
        assert counts.comparisons == pairs - rows
        assert counts.bytes_scores == result.scores.nbytes
        assert counts.bytes_weights == result.weights.nbytes
        assert counts.bytes_output == result.output.nbytes
        assert counts.bytes_exponentials == 8 * pairs
        assert counts.bytes_written == 8 * (2 * n_q * n_k + pairs + n_q * d_v)


class CountingFloat(float):
    """A float that counts the products it takes part in, to check the counts independently."""

    products = 0

    def __mul__(self, other: float) -> float:
        CountingFloat.products += 1
        return float(self) * float(other)


def test_counts_match_the_products_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.learn import cost

    class Table:
        def __init__(self, rows: Any) -> None:
            self.rows, self.shape = rows, rows.shape

        def tolist(self) -> Any:
            return [[CountingFloat(x) for x in row] for row in self.rows]

    Q, K, V = draw_qkv(5, 7, 3, 2)
    monkeypatch.setattr(cost, "_read_head", lambda _name, *arrays: (*map(Table, arrays[:3]), arrays[3]))
    CountingFloat.products = 0
    counts = attention_by_loops(Q, K, V, create_causal_mask(7)[:5]).counts
    assert CountingFloat.products == counts.score_multiply_adds == 15 * 3
    assert counts.value_multiply_adds == 15 * 2


def test_twice_the_tokens_cost_four_times_as_much() -> None:
    one, two = (attention_by_loops(*draw_qkv(n, n, 3, 2)).counts for n in (6, 12))
    assert two.multiply_adds == 4 * one.multiply_adds
    assert two.exponentials == 4 * one.exponentials
    assert two.bytes_scores == 4 * one.bytes_scores
    assert two.bytes_output == 2 * one.bytes_output


def test_counts_print() -> None:
    result = attention_by_loops(*draw_qkv(5, 7, 3, 2))
    lines = dict(line.split() for line in str(result.counts).splitlines())
    assert lines["multiply_adds"] == str(5 * 7 * (3 + 2)) == "175"
    assert lines["bytes_scores"] == "280"
    assert lines["bytes_written"] == str(result.counts.bytes_written)
    assert str(result).startswith("attention by loops: q_len 5, kv_len 7, d_v 2\n")
    assert str(result.counts) in str(result)


@pytest.mark.parametrize(("n_q", "n_k", "d_k", "d_v"), [(3, 3, 3, 3), (2, 3, 5, 7), (2, 0, 1, 2)])
def test_every_multiplication_is_yielded_once(n_q: int, n_k: int, d_k: int, d_v: int) -> None:
    Q, K, V = draw_qkv(n_q, n_k, d_k, d_v)
    steps = list(iter_multiplications(Q, K, V))
    counts = attention_by_loops(Q, K, V).counts
    assert [step.number for step in steps] == list(range(1, counts.multiply_adds + 1))
    assert [step.table for step in steps] == ["scores"] * counts.score_multiply_adds + [
        "output"
    ] * counts.value_multiply_adds
    scores, output = np.zeros((n_q, n_k)), np.zeros((n_q, d_v))
    for step in steps:
        table = scores if step.table == "scores" else output
        table[step.row, step.column] += step.left * step.right
        assert table[step.row, step.column] == step.total
    np.testing.assert_allclose(scores, Q @ K.T, atol=1e-14)
    np.testing.assert_allclose(output, scaled_dot_product_attention(Q, K, V)[0], atol=1e-14)


def test_masked_multiplications_are_skipped() -> None:
    Q, K, V = draw_qkv(3, 5, 2, 7)
    for mask in (create_causal_mask(5)[:3], np.array([[True] * 5, [False] * 5, [True, False] * 2 + [False]])):
        steps = list(iter_multiplications(Q, K, V, mask))
        loops = attention_by_loops(Q, K, V, mask)
        assert len(steps) == loops.counts.multiply_adds < 3 * 5 * (2 + 7)
        output = np.zeros((3, 7))
        for step in steps:
            if step.table == "scores":
                assert mask[step.row, step.column]
            else:
                output[step.row, step.column] = step.total
        np.testing.assert_allclose(output, loops.output, rtol=1e-14)
