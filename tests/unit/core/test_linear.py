"""Linear attention: compared with its definition, and the guarantees that hold for every matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import (
    AttentionMatrix,
    Coarse,
    Distance,
    Entropy,
    Mass,
    Output,
    Position,
    Received,
    TopK,
    linear_attention,
    reference,
)
from regard.core import linear as _linear
from regard.masks import causal, dense, document, first, padding, sliding_window
from regard.testing import assert_matches
from regard.testing.tolerance import epsilon
from regard.tiling import use_tile_sizes
from tests.helpers.linear_cases import HEADS, MASKS, SOME, D, N, V, draw

torch = pytest.importorskip("torch")
ENGINES = {"numpy": np.asarray, "torch": torch.from_numpy}

MAPS = {"elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), "relu": lambda x: np.maximum(x, 0)}


@pytest.fixture(autouse=True)
def small_chunks(small):
    """Use chunks so small that a few dozen tokens are split into many; more features would make them larger."""
    with use_tile_sizes(linear_chunk=4):
        yield


def dense_mask(mask, *shape):
    return True if mask is None else mask.to_dense(*shape)


def define(query, key, value, mask, feature_map="elu"):
    """Compute the definition in a wider dtype, and naively in the dtype itself."""
    dtype = np.dtype(query.dtype).type
    wide, own = (np.longdouble, np.float64) if dtype is np.float64 else (np.float64, np.float32)
    found = (
        reference.linear_attention(
            query, key, value, feature_map=MAPS[feature_map], mask=mask, dtype=each
        )
        for each in (wide, own)
    )  # fmt: skip
    return *found, own


def agree(A, query, key, value, mask=True, feature_map="elu", product=None):
    """Compare output, lse, scores and weights with the definition, under the error rule."""
    exact, naive, dtype = define(query, key, value, mask, feature_map)
    with np.errstate(all="ignore"):
        largest = np.max(np.abs(np.where(np.isfinite(exact.scores), exact.scores, 0)), axis=-1, initial=0)
        summed = exact.weights @ np.abs(reference.repeat_heads(value, query))
    drift = 4 * epsilon(dtype) * (1 + largest)
    output = A @ to_engine_of(A, value) if product is None else product
    rows = {"dtype": dtype, "score_error": drift[..., None]}
    assert_matches(output, exact.output, naive.output, magnitude=summed, **rows)
    assert_matches(A.lse, exact.lse, naive.lse, dtype=dtype, magnitude=1 + largest, what="lse")
    assert_matches(A.to_dense(), exact.weights, naive.weights, **rows, what="weights")
    size = 1 + np.abs(np.where(np.isfinite(exact.scores), exact.scores, 0))
    assert_matches(A.scores[...], exact.scores, naive.scores, dtype=dtype, magnitude=size, what="scores")


def to_engine_of(A, array):
    return ENGINES[A.problem.engine.name](array)


# -- Compared with the definition -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_mask_matches_the_definition(mask, feature_map, engine):
    query, key, value = draw(1)
    A = linear_attention(*map(ENGINES[engine], (query, key)), mask=mask, feature_map=feature_map)
    agree(A, query, key, value, dense_mask(mask, HEADS, N, N), feature_map)
    assert A.kernel.startswith(f"{engine}: linear attention")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_lower_precision_stays_within_the_error_rule(dtype, engine):
    query, key, value = draw(2, dtype=dtype)
    A = linear_attention(*map(ENGINES[engine], (query, key)), mask=causal())
    assert str(A.dtype).endswith("float32")
    output = A @ ENGINES[engine](value)
    assert str(output.dtype).endswith(np.dtype(dtype).name)
    wide = A @ ENGINES[engine](value.astype(np.float32))
    agree(A, query, key, value.astype(np.float32), dense_mask(causal(), N, N), product=wide)
    assert np.array_equal(np.asarray(output), np.asarray(wide).astype(dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_lengths_alignment_and_chunks_match_the_definition(data):
    q_len, kv_len = (data.draw(st.integers(1, 23)) for _ in range(2))
    align = data.draw(st.sampled_from(["upper_left", "lower_right"]))
    mask = data.draw(
        st.sampled_from(
            [
                causal(align),
                sliding_window(data.draw(st.integers(1, 9)), align=align),
                sliding_window(left=data.draw(st.integers(0, 9)), right=2, align=align),
                padding(data.draw(st.integers(0, kv_len))) & causal(align),
                document(np.arange(kv_len) // 4, np.arange(q_len) // 3),
                None,
            ]
        )
    )
    query, key, value = draw(3, q_len, kv_len)
    with use_tile_sizes(linear_chunk=data.draw(st.integers(1, 11))):
        agree(linear_attention(query, key, mask=mask), query, key, value, dense_mask(mask, q_len, kv_len))


def test_leading_axes_broadcast_and_heads_are_grouped():
    rng = np.random.default_rng(4)
    query, key, value = (rng.normal(size=s) for s in ((2, 6, 13, D), (2, 3, 11, D), (2, 3, 11, V)))
    mask = causal("lower_right") & padding([4, 11])
    whole = np.broadcast_to(mask.to_dense(2, 6, 13, 11), (2, 6, 13, 11))
    for make in ENGINES.values():
        A = linear_attention(make(query), make(key), mask=mask, enable_gqa=True)
        agree(A, query, key, value, whole)
        assert np.allclose((A @ make(value[0, 0])), A.to_dense() @ make(value[0, 0]))  # one value for all
    query, key = rng.normal(size=(4, 1, 13, D)), rng.normal(size=(3, 11, D))
    A = linear_attention(query, key)
    assert A.shape == (4, 3, 13, 11)
    agree(A, np.broadcast_to(query, (4, 3, 13, D)), key, rng.normal(size=(3, 11, V)))


def test_sums_are_shared_by_heads_that_share_keys(monkeypatch):
    made = []
    sums = _linear.RangeSums.__init__
    monkeypatch.setattr(
        _linear.RangeSums,
        "__init__",
        lambda self, each: (sums(self, each), made.append(len(self.levels[0][0])))[0],
    )
    rng = np.random.default_rng(4)
    linear_attention(rng.normal(size=(8, N, D)), rng.normal(size=(2, N, D)), enable_gqa=True) @ rng.normal(
        size=(2, N, V)
    )
    assert made == [2]


def test_pairs_are_split_so_that_their_tiles_fit(monkeypatch):
    sizes, sum_values = [], _linear.LinearProblem.sum_values

    def count_pairs(self, *arguments):
        sizes.append(len(self.pair_ids))
        return sum_values(self, *arguments)

    monkeypatch.setattr(_linear.LinearProblem, "sum_values", count_pairs)
    query, key, value = np.random.default_rng(4).normal(size=(3, 7, N, 2))
    with use_tile_sizes(entries=50):  # three tiles of 4 × 4
        linear_attention(query, key) @ value
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_causal_linear_attention_equals_its_recurrence(mask):
    query, key, value = draw(6, lead=())
    features_q, features_k = MAPS["elu"](query), MAPS["elu"](key)
    state, norm, rows = np.zeros((D, V)), np.zeros(D), []
    for i in range(N):
        state += np.outer(features_k[i], value[i])
        norm += features_k[i]
        rows.append(features_q[i] @ state / (features_q[i] @ norm))
    if mask is None:
        rows = features_q @ state / (features_q @ norm)[:, None]
    assert np.allclose(linear_attention(query, key, mask=mask) @ value, rows, rtol=1e-13)


@given(count=st.integers(1, 40), data=st.data())
def test_range_sums_use_few_additions(count, data):
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, count))
    additions = []

    class Counted(int):
        def __add__(self, other):
            additions.append(1)
            return Counted(int(self) + int(other))

    sums = _linear.RangeSums([Counted(1 << i) for i in range(count)])
    assert len(additions) <= count
    additions.clear()
    assert sums(first, stop) == (1 << stop) - (1 << first)
    assert len(additions) <= 2 * math.log2(count + 1)


# -- Guarantees of every matrix ---------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30], ids=str)
@pytest.mark.parametrize("mask", [padding(21), dense(SOME & (np.arange(N) < 21))], ids=["padding", "dense"])
def test_masked_input_cannot_matter(mask, bad, engine):
    query, key, value = draw(7)
    make = ENGINES[engine]
    clean = linear_attention(make(query), make(key), mask=mask)
    output, lse = clean @ make(value), clean.lse
    for poisoned_key, poisoned_value in (
        (key.copy(), value),
        (key, value.copy()),
        (key.copy(), value.copy()),
    ):
        for array in (poisoned_key, poisoned_value):
            if array is not key and array is not value:
                array[:, 21:] = bad
        A = linear_attention(make(query), make(poisoned_key), mask=mask)
        for product in (A @ make(poisoned_value), A.measure(Output(make(poisoned_value))).output):
            assert np.allclose(product, output, rtol=1e-12)
        assert np.allclose(A.lse, lse, rtol=1e-12)
        assert np.allclose(A.entropy(), clean.entropy(), rtol=1e-10)
        assert np.allclose(A.to_dense(), clean.to_dense(), rtol=1e-12)


def test_fully_masked_chunks_are_not_read():
    query, key, value = draw(7)
    key[:, 20:], value[:, 20:] = np.nan, np.inf
    A = linear_attention(query, key, mask=padding(20))  # five features make chunks of five
    output = linear_attention(query, key[:, :20]) @ value[:, :20]
    assert np.allclose(A @ value, output, rtol=1e-13) and "linear attention" in A.kernel


@pytest.mark.parametrize("engine", ENGINES)
def test_a_live_nan_reaches_exactly_the_rows_that_attend_to_it(engine):
    query, key, value = draw(8, lead=())
    key[9, 2] = np.nan
    make = ENGINES[engine]
    A = linear_attention(make(query), make(key), mask=causal())
    reached = np.isnan(np.asarray(A @ make(value))).all(-1)
    assert np.array_equal(np.flatnonzero(reached), np.arange(9, N))
    lower = np.tril(np.ones((N, N), bool)) & (np.arange(N) >= 9)[:, None]
    assert np.array_equal(np.isnan(np.asarray(A.to_dense())), lower)
    assert "non-finite values" in A.kernel
    value[4, 0] = np.inf
    B = linear_attention(make(query), make(draw(8, lead=())[1]), mask=causal())
    assert np.array_equal(np.isinf(np.asarray(B @ make(value))[:, 0]), np.arange(N) >= 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_see_nothing_are_zeros(engine):
    query, key, value = map(ENGINES[engine], draw(9, 31, 19, lead=()))
    A = linear_attention(query, key, mask=causal("lower_right"))
    for output in (A @ value, A.measure(Output(value)).output):
        assert not output[:12].any() and output[12:].all()
    lse = np.asarray(A.lse)
    assert np.isneginf(lse[:12]).all() and np.isfinite(lse[12:]).all()
    assert not A.to_dense()[:12].any() and not A.entropy()[:12].any()


def test_features_with_nothing_in_common_mask_the_key():
    query, key = np.array([[1.0, -1.0], [-1.0, -1.0]]), np.array([[2.0, 0.0], [0.0, 3.0]])
    A = linear_attention(query, key, feature_map="relu")
    assert np.array_equal(A.scores[...], [[math.log(2), -np.inf], [-np.inf, -np.inf]])
    assert np.array_equal(A @ np.array([[5.0], [np.nan]]), [[5.0], [0.0]])  # a masked value does not matter
    assert np.array_equal(A.lse, [math.log(2), -np.inf])
    assert np.array_equal(A.to_dense(), [[1, 0], [0, 0]])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("known", [False, True], ids=["fresh", "multiplied"])
def test_indexing_equals_indexing_the_dense_matrix(engine, known):
    query, key, value = map(ENGINES[engine], draw(10))
    A = linear_attention(query, key, mask=causal() | first(3))
    if known:
        A @ value
    whole = A.to_dense()
    for index in (
        np.s_[0], np.s_[1, 4:9], np.s_[..., 5], np.s_[:, ::-3, 2:20:5], np.s_[2, [7, 1, 7]], np.s_[0, 3, 2],
        np.s_[..., [5, 0]], np.s_[None, 1],
    ):  # fmt: skip
        positive = index if engine == "numpy" or index != np.s_[:, ::-3, 2:20:5] else np.s_[:, ::3, 2:20:5]
        assert np.allclose(A[positive], whole[positive], rtol=1e-12, atol=0)
        assert np.allclose(A.scores[positive], A.scores[...][positive], rtol=1e-12)
    part = A.lazy[1, [9, 2, 5]]
    assert isinstance(part, AttentionMatrix) and part.kernel.startswith(f"{engine}: linear attention")
    assert np.allclose(part @ value[1], (A @ value)[1, [9, 2, 5]], rtol=1e-12)
    assert np.allclose(part.to_dense(), whole[1, [9, 2, 5]], rtol=1e-12)
    x = ENGINES[engine](np.random.default_rng(0).normal(size=(HEADS, N, 2)))
    assert np.allclose(A.mT @ x, whole.swapaxes(-1, -2) @ x, rtol=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", [None, causal(), padding(21)], ids=str)
def test_measures_equal_those_of_the_dense_matrix(mask, engine):
    query, key, value = map(ENGINES[engine], draw(11))
    A = linear_attention(query, key, mask=mask)
    found = A.measure(
        Entropy(),
        Distance(),
        Mass(first(2)),
        Position(),
        Received(),
        Coarse(3, "mean"),
        TopK(2),
        Output(value),
    )
    W = np.asarray(A.to_dense())
    q_idx, kv_idx = np.arange(N)[:, None], np.arange(N)
    logs = np.log(np.where(W > 0, W, 1))
    expected = {
        "entropy": -(W * logs).sum(-1), "distance": (W * abs(q_idx - kv_idx)).sum(-1), "mass": W[..., :2].sum(-1),
        "position": W @ kv_idx, "received": W.sum(-2), "output": W @ np.asarray(value),
    }  # fmt: skip
    for name, array in expected.items():
        assert np.allclose(getattr(found, name), array, rtol=1e-11, atol=1e-12), name
    assert np.allclose(found.topk.values, np.sort(W, axis=-1)[..., :-3:-1], rtol=1e-12)
    cell = (np.arange(N) * 3 // N)[:, None] == np.arange(3)
    sizes = cell.sum(0)
    assert np.allclose(found.coarse, cell.T @ W @ cell / np.outer(sizes, sizes), rtol=1e-11)


def test_shards_of_the_keys_merge():
    query, key, value = draw(12)
    shards = [linear_attention(query, key[:, part]) for part in (np.s_[:11], np.s_[11:])]
    parts = [(A @ value[:, part], A.lse) for A, part in zip(shards, (np.s_[:11], np.s_[11:]), strict=True)]
    whole = linear_attention(query, key)
    output, lse = regard.merge_states(parts)
    assert np.allclose(output, whole @ value, rtol=1e-13) and np.allclose(lse, whole.lse, rtol=1e-13)


def test_without_features_every_row_is_empty():
    A = linear_attention(np.ones((2, 0)), np.ones((3, 0)))
    assert not (A @ np.ones(3)).any() and np.isneginf(A.lse).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_empty_axes(shape):
    A = linear_attention(np.ones((2, shape[0], 3)), np.ones((2, shape[1], 3)))
    assert (A @ np.ones((2, shape[1], 4))).shape == (2, shape[0], 4) and A.lse.shape == (2, shape[0])
    assert A.kernel == "numpy: block loop (an axis is empty)"
    assert (linear_attention(np.ones((2, 5, 3)), np.ones((2, 5, 3))) @ np.ones((2, 5, 0))).shape == (2, 5, 0)


# -- Numbers far from one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", [-60.0, -30.0, 1e25])
def test_features_far_from_one_neither_underflow_nor_overflow(at, engine):
    query, key, value = draw(13, dtype=np.float32)
    query[:, ::2] += np.float32(at)
    key += np.float32(min(at, 1e12))
    A = linear_attention(*map(ENGINES[engine], (query, key)), mask=causal())
    # The naive computation loses these rows, so they are compared with the definition only.
    exact = reference.linear_attention(
        query, key, value, feature_map=MAPS["elu"], mask=dense_mask(causal(), N, N)
    )
    size = 1 + np.abs(np.where(np.isfinite(exact.scores), exact.scores, 0)).max(-1, keepdims=True)
    error = 8 * np.finfo(np.float32).eps * size
    assert np.all(
        np.abs(np.asarray(A @ ENGINES[engine](value)) - exact.output) <= error * np.abs(value).max()
    )
    assert np.all(np.abs(np.asarray(A.to_dense()) - exact.weights) <= error)
    assert np.all(np.abs(np.asarray(A.lse) - exact.lse) <= error[..., 0])
    live = np.isfinite(exact.scores)
    scores = np.asarray(A.scores[...])[live] - exact.scores[live]
    assert np.all(np.abs(scores) <= np.broadcast_to(error, live.shape)[live])
    part = A.lazy[1, 3:9]
    assert np.all(np.abs(np.asarray(part.lse) - exact.lse[1, 3:9]) <= error[1, 3:9, 0])


def test_sums_that_overflow_go_to_the_block_loop():
    key = np.full((9, 2), 1e38, np.float32)
    A = linear_attention(np.full((9, 2), 1.0, np.float32), key, feature_map="relu")
    value = np.arange(9, dtype=np.float32)
    assert np.allclose(A @ value, 4.0) and "non-finite values" in A.kernel
    assert np.allclose(A.lse, np.log(2e38) + np.log(9), rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 4, 0), (2, 3, 0, 4)])
def test_features_of_nothing_are_not_rescaled(shape):
    features = np.ones(shape)
    rescaled, divisor = _linear.rescale_features(features, regard.engines.find_engine("test", array=features))
    assert rescaled is features and divisor is None
