"""What `regard.learn` promises: the same attention by class, function, heads and counted loops."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import learn
from regard.learn import (
    MultiHeadAttention,
    ScaledDotProductAttention,
    attention_by_loops,
    create_causal_mask,
    create_padding_mask,
    examples,
    scaled_dot_product_attention,
)


def draw(n_q: int, n_k: int, d_k: int, d_v: int, *lead: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = [(*lead, n_q, d_k), (*lead, n_k, d_k), (*lead, n_k, d_v)]
    Q, K, V = (rng.normal(size=shape) for shape in shapes)
    return Q, K, V


def by_class(Q: Any, K: Any, V: Any, mask: Any = None) -> tuple[Any, Any]:
    return ScaledDotProductAttention(d_k=np.shape(Q)[-1])(Q, K, V, mask)


def by_function(Q: Any, K: Any, V: Any, mask: Any = None) -> tuple[Any, Any]:
    return scaled_dot_product_attention(Q, K, V, mask)


def by_loops(Q: Any, K: Any, V: Any, mask: Any = None) -> tuple[Any, Any]:
    result = attention_by_loops(Q, K, V, mask)
    return result.output, result.weights


every_way = pytest.mark.parametrize("attend", [by_class, by_function, by_loops])


def definition(Q: Any, K: Any, V: Any, mask: Any) -> tuple[Any, Any]:
    """The softmax written as one quotient, over the visible keys alone, in long double."""
    n_q, n_k = len(Q), len(K)
    Q, K, V = (x.astype(np.longdouble) for x in (Q, K, V))
    weights = np.zeros((n_q, n_k), dtype=np.longdouble)
    for i, j in np.argwhere(mask):
        own = Q[i] @ K[j]
        seen = [Q[i] @ K[m] for m in range(n_k) if mask[i, m]]
        weights[i, j] = 1 / sum(np.exp((s - own) / np.sqrt(np.longdouble(Q.shape[1]))) for s in seen)
    output = np.zeros((n_q, V.shape[1]), dtype=np.longdouble)
    for i, j in np.argwhere(mask):
        output[i] += weights[i, j] * V[j]
    return output, weights


# The four steps


@every_way
@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_the_definition(attend: Any, seed: int) -> None:
    Q, K, V = draw(5, 7, 3, 2, seed=seed)
    mask = np.random.default_rng(seed).random((5, 7)) < 0.6
    for rows in (np.ones((5, 7), dtype=bool), mask):
        for got, want in zip(attend(Q, K, V, rows), definition(Q, K, V, rows), strict=True):
            np.testing.assert_allclose(got, want.astype(float), rtol=1e-13, atol=1e-15)
    for got, want in zip(attend(Q, K, V), attend(Q, K, V, np.ones((5, 7), dtype=bool)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_forward_is_the_four_steps_in_order() -> None:
    Q, K, V = draw(5, 7, 3, 2)
    attention = ScaledDotProductAttention(d_k=3)
    scores = attention.compute_scores(Q, K)
    scaled = attention.scale_scores(scores)
    weights = attention.compute_weights(scaled)
    output = attention.compute_output(weights, V)
    np.testing.assert_allclose(scores, np.einsum("id,jd->ij", Q, K), rtol=1e-13)
    np.testing.assert_allclose(scaled * math.sqrt(3), scores, rtol=1e-15)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-15)
    for way in (attention.forward, attention):
        got_output, got_weights = way(Q, K, V)
        np.testing.assert_array_equal(got_weights, weights)
        np.testing.assert_array_equal(got_output, output)


@every_way
def test_the_output_comes_first_and_the_weights_second(attend: Any) -> None:
    output, weights = attend(*draw(5, 7, 3, 2))
    assert output.shape == (5, 2)
    assert weights.shape == (5, 7)


@pytest.mark.parametrize("lead", [(2,), (2, 3), (2, 1, 3)])
def test_leading_axes_are_worked_through_side_by_side(lead: tuple[int, ...]) -> None:
    Q, K, V = draw(5, 7, 3, 2, *lead)
    mask = np.random.default_rng(1).random((*lead, 5, 7)) < 0.7
    output, weights = by_class(Q, K, V, mask)
    assert weights.shape == (*lead, 5, 7)
    assert output.shape == (*lead, 5, 2)
    for where in np.ndindex(*lead):
        one_output, one_weights = by_loops(Q[where], K[where], V[where], mask[where])
        np.testing.assert_allclose(weights[where], one_weights, atol=1e-14)
        np.testing.assert_allclose(output[where], one_output, atol=1e-14)


def test_one_set_of_keys_serves_every_head() -> None:
    Q, K, V = draw(5, 7, 3, 2, 4)
    output, weights = by_class(Q, K[:1], V[0])
    for h in range(4):
        np.testing.assert_array_equal(weights[h], by_class(Q[h], K[0], V[0])[1])
        np.testing.assert_allclose(output[h], by_class(Q[h], K[0], V[0])[0], atol=1e-15)


@every_way
@pytest.mark.parametrize("size", [1e4, 1e8, 1e150])
def test_large_scores_do_not_overflow(attend: Any, size: float) -> None:
    output, weights = attend([[size]], [[1.0], [2.0], [2.0]], [[1.0], [2.0], [4.0]])
    np.testing.assert_array_equal(weights, [[0, 0.5, 0.5]])
    np.testing.assert_array_equal(output, [[3]])


@every_way
def test_integers_and_half_precision_are_computed_in_float64(attend: Any) -> None:
    Q, K, V = (np.round(x * 4).astype(np.float16) for x in draw(5, 7, 3, 2))
    for kind in (np.int64, np.float16, np.float32):
        for got, want in zip(
            attend(*(x.astype(kind) for x in (Q, K, V))),
            attend(*(x.astype(float) for x in (Q, K, V))),
            strict=True,
        ):
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, want)
    _, weights = attend(*[np.full((1, 1), 60000, dtype=np.float16)] * 3)  # a score float16 cannot hold
    np.testing.assert_array_equal(weights, [[1]])


@every_way
@pytest.mark.parametrize(("n_q", "n_k", "d_v"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_any_extent_but_d_k_may_be_zero(attend: Any, n_q: int, n_k: int, d_v: int) -> None:
    output, weights = attend(np.ones((n_q, 4)), np.ones((n_k, 4)), np.ones((n_k, d_v)))
    assert weights.shape == (n_q, n_k)
    np.testing.assert_array_equal(output, np.full((n_q, d_v), 1.0 if n_k else 0.0))


# Masks


@every_way
@pytest.mark.parametrize("row", range(5))
def test_a_row_that_sees_nothing_is_zeros(attend: Any, row: int) -> None:
    Q, K, V = draw(5, 7, 3, 2)
    mask = np.ones((5, 7), dtype=bool)
    mask[row] = False
    output, weights = attend(Q, K, V, mask)
    others = np.arange(5) != row
    np.testing.assert_array_equal(weights[row], np.zeros(7))
    np.testing.assert_array_equal(output[row], np.zeros(2))
    for got, full in zip((output, weights), attend(Q, K, V), strict=True):
        np.testing.assert_array_equal(got[others], full[others])


@every_way
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, 1e308])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.filterwarnings("error")
def test_what_is_masked_cannot_matter(attend: Any, poison: float, where: str) -> None:
    Q, K, V = draw(5, 5, 3, 2)
    mask = create_causal_mask(5)
    mask[:, 2] = False  # hidden from all, besides the future that is hidden from some
    clean = attend(Q, K, V, mask)
    if where != "value":
        K[2] = poison
    if where != "key":
        V[2, 0] = poison
    for got, want in zip(attend(Q, K, V, mask), clean, strict=True):
        np.testing.assert_array_equal(got, want)


@every_way
def test_a_live_nan_shows_in_the_rows_that_see_it_and_in_no_other(attend: Any) -> None:
    Q, K, V = draw(5, 5, 3, 2)
    clean_output, clean_weights = attend(Q, K, V, create_causal_mask(5))
    V[3, 1] = math.nan
    output, weights = attend(Q, K, V, create_causal_mask(5))
    np.testing.assert_array_equal(weights, clean_weights)
    assert np.isnan(output).tolist() == [[False, False]] * 3 + [[False, True]] * 2
    np.testing.assert_allclose(output[:, 0], clean_output[:, 0], atol=1e-15)

    K[3, 0] = math.nan
    output, weights = attend(Q, K, V, create_causal_mask(5))
    assert np.isnan(output).all(axis=1).tolist() == [False, False, False, True, True]
    assert np.isnan(weights).tolist() == [[False] * 5] * 3 + [[True] * 4 + [False], [True] * 5]
    np.testing.assert_array_equal(weights[3, 4], 0)
    for row in (3, 4):  # the loops must not take a row of NaN for an empty one
        alone = np.zeros((5, 5), dtype=bool)
        alone[row, 3] = True
        assert np.isnan(attend(Q, K, V, alone)[1][row, 3])


@every_way
@pytest.mark.parametrize("kind", [int, float, np.uint8, object])
def test_a_mask_that_is_not_boolean_is_refused(attend: Any, kind: Any) -> None:
    Q, K, V = draw(3, 3, 2, 2)
    with pytest.raises(TypeError) as caught:
        attend(Q, K, V, create_causal_mask(3).astype(kind))
    for part in (
        "received mask, an array of",
        "expected a boolean mask, True = attend",
        "mask != 0",
        "mask == 0",
    ):
        assert part in str(caught.value)


@every_way
def test_true_means_attend(attend: Any) -> None:
    output, weights = attend([[1.0]], [[1.0], [1.0]], [[10.0], [20.0]], [[True, False]])
    np.testing.assert_array_equal(weights, [[1, 0]])
    np.testing.assert_array_equal(output, [[10]])


@every_way
def test_a_mask_broadcasts(attend: Any) -> None:
    Q, K, V = draw(5, 7, 3, 2)
    some = np.arange(7) < 4
    for small in (some, some[None, :], np.arange(5)[:, None] < 3, np.array(True)):
        for got, want in zip(
            attend(Q, K, V, small), attend(Q, K, V, np.broadcast_to(small, (5, 7))), strict=True
        ):
            np.testing.assert_array_equal(got, want)


def test_causal_mask_is_the_lower_triangle() -> None:
    for n in (0, 1, 2, 7):
        mask = create_causal_mask(n)
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, np.tril(np.ones((n, n), dtype=bool)))


def test_padding_mask_lets_the_real_tokens_through() -> None:
    mask = create_padding_mask([0, 2, 5], max_length=5)
    assert mask.shape == (3, 1, 1, 5)
    assert mask.dtype == bool
    assert mask[:, 0, 0].tolist() == [[False] * 5, [True] * 2 + [False] * 3, [True] * 5]
    assert create_padding_mask([], max_length=5).shape == (0, 1, 1, 5)


def test_padding_and_causal_together_hide_padding_and_future() -> None:
    Q, K, V = draw(5, 5, 3, 2, 3, 2)
    lengths = np.array([0, 2, 5])
    output, weights = by_class(Q, K, V, create_causal_mask(5) & create_padding_mask(lengths, 5))
    for b, i, j in np.ndindex(3, 5, 5):
        assert (weights[b, :, i, j] > 0).all() == (j <= i and j < lengths[b])
        assert (weights[b, :, i, j] == 0).all() == (j > i or j >= lengths[b])
    np.testing.assert_array_equal(output[0], np.zeros((2, 5, 2)))


# Loops and their counts


@given(
    n_q=st.integers(0, 7),
    n_k=st.integers(0, 7),
    d_k=st.integers(1, 5),
    d_v=st.integers(0, 5),
    seed=st.integers(0),
)
def test_loops_agree_with_the_class_and_count_what_they_do(
    n_q: int, n_k: int, d_k: int, d_v: int, seed: int
) -> None:
    Q, K, V = draw(n_q, n_k, d_k, d_v, seed=seed)
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


class Tallied(float):
    """A number that notes every product it takes part in, to check the tally from outside."""

    products = 0

    def __mul__(self, other: float) -> float:
        Tallied.products += 1
        return float(self) * float(other)


def test_the_tally_is_of_products_that_were_really_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.learn import loops

    class Table:
        def __init__(self, rows: Any) -> None:
            self.rows, self.shape = rows, rows.shape

        def tolist(self) -> Any:
            return [[Tallied(x) for x in row] for row in self.rows]

    Q, K, V = draw(5, 7, 3, 2)
    monkeypatch.setattr(loops, "_check_table", lambda _name, array, *_axes: Table(array))
    Tallied.products = 0
    counts = attention_by_loops(Q, K, V, create_causal_mask(7)[:5]).counts
    assert Tallied.products == counts.score_multiply_adds == 15 * 3
    assert counts.value_multiply_adds == 15 * 2


def test_doubling_the_tokens_quadruples_the_work() -> None:
    one, two = (attention_by_loops(*draw(n, n, 3, 2)).counts for n in (6, 12))
    assert two.multiply_adds == 4 * one.multiply_adds
    assert two.exponentials == 4 * one.exponentials
    assert two.bytes_scores == 4 * one.bytes_scores
    assert two.bytes_output == 2 * one.bytes_output


def test_the_tally_prints() -> None:
    result = attention_by_loops(*draw(5, 7, 3, 2))
    lines = dict(line.split() for line in str(result.counts).splitlines())
    assert lines["multiply_adds"] == str(5 * 7 * (3 + 2)) == "175"
    assert lines["bytes_scores"] == "280"
    assert lines["bytes_written"] == str(result.counts.bytes_written)
    assert str(result).startswith("attention by loops: q_len 5, kv_len 7, d_v 2\n")
    assert str(result.counts) in str(result)


# Many heads


def explicit_heads(
    layer: MultiHeadAttention, query: Any, key: Any, value: Any, mask: Any = None
) -> tuple[Any, Any]:
    """One sequence, head by head, each with its own columns of the projections."""
    outputs, weights = [], []
    for h in range(layer.num_heads):
        own = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        o, w = by_loops(query @ layer.W_Q[:, own], key @ layer.W_K[:, own], value @ layer.W_V[:, own], mask)
        outputs.append(o)
        weights.append(w)
    return np.concatenate(outputs, axis=1) @ layer.W_O, np.stack(weights)


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(6, 1), (6, 2), (6, 3), (6, 6), (15, 5)])
def test_many_heads_equal_each_head_by_itself(embed_dim: int, num_heads: int) -> None:
    rng = np.random.default_rng(0)
    layer = MultiHeadAttention(embed_dim, num_heads, seed=3)
    x, y, z = (
        rng.normal(size=(5, embed_dim)),
        rng.normal(size=(7, embed_dim)),
        rng.normal(size=(7, embed_dim)),
    )
    causal = create_causal_mask(5)
    for got, want in [
        (layer(x), explicit_heads(layer, x, x, x)),
        (layer(x, mask=causal), explicit_heads(layer, x, x, x, causal)),
        (layer(x, y), explicit_heads(layer, x, y, y)),
        (layer.forward(x, y, z), explicit_heads(layer, x, y, z)),
    ]:
        np.testing.assert_allclose(got[0], want[0], atol=1e-13)
        np.testing.assert_allclose(got[1], want[1], atol=1e-14)


def test_many_heads_over_a_padded_batch() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 6))
    lengths = [2, 5, 3]
    layer = MultiHeadAttention(embed_dim=6, num_heads=2)
    output, weights = layer(x, mask=create_padding_mask(lengths, 5))
    assert output.shape == (3, 5, 6)
    assert weights.shape == (3, 2, 5, 5)
    for b, length in enumerate(lengths):
        alone, _ = layer(x[b, :length])
        np.testing.assert_allclose(output[b, :length], alone, atol=1e-14)
        x[b, length:] = math.inf
    poisoned, _ = layer(x, mask=create_padding_mask(lengths, 5))
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(poisoned[b, :length], output[b, :length], atol=1e-14)


def test_many_heads_agree_with_torch() -> None:
    import torch

    layer = MultiHeadAttention(embed_dim=6, num_heads=3, seed=5)
    theirs = torch.nn.MultiheadAttention(6, 3, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        stacked = np.concatenate([layer.W_Q.T, layer.W_K.T, layer.W_V.T])
        theirs.in_proj_weight.copy_(torch.from_numpy(stacked))
        theirs.out_proj.weight.copy_(torch.from_numpy(layer.W_O.T.copy()))
        x = np.random.default_rng(0).normal(size=(2, 5, 6))
        drop = torch.from_numpy(~create_causal_mask(5))  # there True hides
        tensor = torch.from_numpy(x)
        want, want_weights = theirs(tensor, tensor, tensor, attn_mask=drop, average_attn_weights=False)
    output, weights = layer(x, mask=create_causal_mask(5))
    np.testing.assert_allclose(output, want.numpy(), atol=1e-13)
    np.testing.assert_allclose(weights, want_weights.numpy(), atol=1e-14)


@pytest.mark.parametrize("lead", [(), (2,), (2, 4)])
def test_split_and_merge_are_each_others_inverse(lead: tuple[int, ...]) -> None:
    layer = MultiHeadAttention(embed_dim=15, num_heads=5)
    x = np.random.default_rng(0).normal(size=(*lead, 7, 15))
    split = layer.split_heads(x)
    assert split.shape == (*lead, 5, 7, 3)
    for h in range(5):
        np.testing.assert_array_equal(split[..., h, :, :], x[..., 3 * h : 3 * h + 3])
    np.testing.assert_array_equal(layer.merge_heads(split), x)
    np.testing.assert_array_equal(layer.split_heads(layer.merge_heads(split)), split)


def test_projections_come_from_the_seed() -> None:
    first, again, other = (MultiHeadAttention(embed_dim=64, num_heads=4, seed=s) for s in (1, 1, 2))
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        W = getattr(first, name)
        np.testing.assert_array_equal(W, getattr(again, name))
        assert (getattr(other, name) != W).any()
        assert W.std() == pytest.approx(1 / 8, rel=0.05)
    assert (first.W_Q != first.W_K).any()


# Errors


X32, X34, X52 = np.ones((3, 2)), np.ones((3, 4)), np.ones((5, 2))
CALLS: list[tuple[Any, str, str, str, str]] = [
    (
        lambda: ScaledDotProductAttention(0),
        "ScaledDotProductAttention",
        "d_k 0",
        "at least 1",
        "shape of an array",
    ),
    (
        lambda: ScaledDotProductAttention(2.0),  # type: ignore[arg-type]
        "ScaledDotProductAttention",
        "float 2.0",
        "whole number",
        "int(d_k)",
    ),
    (
        lambda: by_class(X32, X34, X32),
        "ScaledDotProductAttention",
        "K of shape (3, 4)",
        "since d_k is 2",
        "d_k=4",
    ),
    (lambda: ScaledDotProductAttention(4)(X32, X34, X34), "", "Q of shape (3, 2)", "(…, q_len, 4)", "d_k=2"),
    (
        lambda: by_class(X32, X32, X52),
        "compute_output",
        "3 keys and V with 5",
        "one value for each key",
        "sequence",
    ),
    (lambda: by_function(X32[0], X32, X32), "", "Q of shape (2,)", "(…, q_len, d_k)", "Q[None, :]"),
    (lambda: by_class(X32, X32, X32 > 0), "compute_output", "V, an array of bool", "real numbers", "mask="),
    (lambda: by_class(X32, X32 * 1j, X32), "", "K, an array of complex128", "real numbers", "dtype=float"),
    (
        lambda: by_class(np.ones((2, 3, 4)), np.ones((5, 3, 4)), X32),
        "compute_scores",
        "(2, 3, 4) and K of shape (5, 3, 4)",
        "axes of one",
        "same batch",
    ),
    (
        lambda: by_class(X32, X32, X32, create_causal_mask(5)),
        "compute_weights",
        "mask of shape (5, 5) for scores (q_len 3, kv_len 3)",
        "broadcasts to the shape of the scores",
        "(batch, 1, 1, kv_len)",
    ),
    (
        lambda: by_class(X32, X32, X32, create_padding_mask([2, 3], 3)),
        "compute_weights",
        "mask of shape (2, 1, 1, 3)",
        "broadcasts",
        "axes of one",
    ),
    (lambda: create_causal_mask(-1), "create_causal_mask", "seq_len -1", "at least 0", "shape of an array"),
    (lambda: create_causal_mask(3.0), "create_causal_mask", "float 3.0", "whole number", "int(seq_len)"),  # type: ignore[arg-type]
    (
        lambda: create_padding_mask([2, 9], 5),
        "create_padding_mask",
        "from 2 to 9",
        "0 and max_length",
        "to 9",
    ),
    (lambda: create_padding_mask([-1], 5), "create_padding_mask", "from -1 to -1", "0 and max_length", "cut"),
    (
        lambda: create_padding_mask([[1, 1]], 5),
        "create_padding_mask",
        "(1, 2)",
        "shape (batch,)",
        "sum(axis=1)",
    ),
    (
        lambda: create_padding_mask([1.5], 5),
        "create_padding_mask",
        "float64",
        "whole numbers",
        "Count the real",
    ),
    (lambda: MultiHeadAttention(10, 4), "MultiHeadAttention", "num_heads 4", "equal parts", "[1, 2, 5, 10]"),
    (lambda: MultiHeadAttention(10, 4), "MultiHeadAttention", "embed_dim 10", "divides", "embed_dim 12"),
    (
        lambda: MultiHeadAttention(4, 0),
        "MultiHeadAttention",
        "num_heads 0",
        "at least 1",
        "shape of an array",
    ),
    (
        lambda: MultiHeadAttention(6, 2)(X34),
        "MultiHeadAttention, query",
        "(3, 4)",
        "embed_dim 6",
        "fits the array",
    ),
    (
        lambda: MultiHeadAttention(4, 2)(X34, value=X34),
        "MultiHeadAttention",
        "without a key",
        "a key",
        "key=",
    ),
    (lambda: MultiHeadAttention(4, 2).split_heads(X32), "split_heads", "(3, 2)", "embed_dim 4", "that shape"),
    (
        lambda: MultiHeadAttention(4, 2).merge_heads([X34] * 3),
        "merge_heads",
        "(3, 3, 4)",
        "num_heads 2",
        "shape",
    ),
    (
        lambda: by_loops(X32[None], X32, X32),
        "attention_by_loops",
        "Q of shape (1, 3, 2)",
        "one head",
        "Q[0, 3]",
    ),
    (
        lambda: by_loops(X32, X34, X32),
        "attention_by_loops",
        "K of shape (3, 4)",
        "K (kv_len, d_k)",
        "same d_k",
    ),
    (
        lambda: by_loops(X32, X32, X52),
        "attention_by_loops",
        "V of shape (5, 2)",
        "V (kv_len, d_v)",
        "same sequence",
    ),
    (
        lambda: by_loops(X32, X32, X32, create_causal_mask(5)),
        "attention_by_loops",
        "mask of shape (5, 5)",
        "broadcasts",
        "axes of one",
    ),
]


@pytest.mark.parametrize(("call", "operation", "received", "expected", "hint"), CALLS)
def test_wrong_calls_are_told_what_came_what_was_expected_and_the_cure(
    call: Any, operation: str, received: str, expected: str, hint: str
) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    error: Any = caught.value
    assert operation in error.operation
    assert received in error.received
    assert expected in error.expected
    assert hint in error.hint
    assert (
        str(error) == f"{error.operation}: received {error.received}; expected {error.expected}. {error.hint}"
    )


def test_a_projection_of_the_wrong_shape_is_refused() -> None:
    layer = MultiHeadAttention(4, 2)
    layer.W_K = np.eye(3)
    with pytest.raises(ValueError, match=r"MultiHeadAttention, W_K: received an array of shape \(3, 3\)"):
        layer(X34)


# Explanations, examples, names


def test_explain_traces_one_query() -> None:
    attention = ScaledDotProductAttention(d_k=4)
    Q, K, V, tokens = examples.cat.Q, examples.cat.K, examples.cat.V, examples.cat.tokens
    output, weights = attention(Q, K, V)
    for i, token in enumerate(tokens):
        steps: Any = attention.explain(Q, K, V, tokens, i)
        np.testing.assert_allclose(steps.weights, weights[i], atol=1e-15)
        np.testing.assert_allclose(steps.output, output[i], atol=1e-15)
        trace = str(steps)
        assert token in trace
        shown = {float(number) for number in re.findall(r"\d+\.\d+", trace)}
        assert shown >= set(weights[i].round(4).tolist())
    with pytest.raises(ValueError, match="since d_k is 3"):
        ScaledDotProductAttention(d_k=3).explain(Q, K, V, tokens, 0)


def test_examples_are_shared_and_cannot_be_written_to() -> None:
    found = 0
    for example in vars(examples).values():
        for array in vars(example).values() if type(example).__module__ == examples.__name__ else ():
            if isinstance(array, np.ndarray):
                found += 1
                assert array.dtype == np.float64
                with pytest.raises(ValueError, match="read-only"):
                    array[0, 0] = 1
    assert found == 5 * 3 + 2 + 4
    with pytest.raises(AttributeError):
        examples.cat.Q = np.ones((5, 4))  # type: ignore[misc]


def test_examples_fit_together() -> None:
    for name in ("cat", "tiny_head", "pronoun", "three_by_three", "three_tokens"):
        example = getattr(examples, name)
        assert getattr(learn, name) is example
        assert example.Q.shape[1] == example.K.shape[1]
        assert len(example.tokens) == len(example.K) == len(example.V)
    assert len(examples.magnitude.tokens) == len(examples.magnitude.K)
    for W in (examples.projection.W_Q, examples.projection.W_K, examples.projection.W_V):
        assert (examples.projection.X @ W).shape == (len(examples.projection.tokens), 4)


def test_the_public_names() -> None:
    assert learn.__all__ == sorted(learn.__all__)
    for name in learn.__all__:
        thing = getattr(learn, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__
            assert thing.__module__.startswith("regard.learn.")
    wanted = {
        "MultiHeadAttention",
        "ScaledDotProductAttention",
        "attention_by_loops",
        "create_causal_mask",
        "create_padding_mask",
        "scaled_dot_product_attention",
    }
    assert set(learn.__all__) >= wanted
