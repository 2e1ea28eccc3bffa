"""The guarantees of the design about the matrix and its measures that no other test covers."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from regard import (
    Coarse,
    Distance,
    Entropy,
    Mass,
    Measure,
    Received,
    Spread,
    TopK,
    attention,
    reference,
)
from regard.engines.native import use_instruction_set
from regard.masks import Mask, causal, dense, first, padding, sliding_window
from regard.measures import MaxWeight, Sum, TopKResult
from regard.problem import Problem
from regard.score_mods import alibi, bias, softcap
from regard.tiling import use_tile_sizes

ROWS, COLUMNS = 8, 16
N = 2 * COLUMNS + 3
SIZES = {"rows": ROWS, "columns": COLUMNS, "entries": 2 * ROWS * COLUMNS, "cached_scores": 700}


@pytest.fixture
def small_tiles():
    """Use tiles so small that a few dozen tokens are split into many of them."""
    with use_tile_sizes(**SIZES):
        yield


@pytest.fixture
def computed(monkeypatch):
    """Record the shapes of the computed tiles of scores, in order."""
    shapes, scores = [], Problem.scores

    def recording(*arguments, **more):
        tile = scores(*arguments, **more)
        shapes.append(tile.shape)
        return tile

    monkeypatch.setattr(Problem, "scores", recording)
    return shapes


def draw(seed: int, *lead: int, q_len: int = N, kv_len: int = N, dim: int = 3):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(*lead, length, dim)) for length in (q_len, kv_len, kv_len)]


# 1. Order of operations


def test_scores_are_scaled_modified_masked_and_sunk_in_this_order(small_tiles):
    query, key, value = draw(1, 2)
    added = np.random.default_rng(2).normal(size=(N, N))
    sink = np.array([0.5, -1.0])
    A = attention(query, key, mask=causal(), score_mod=[softcap(1.5), bias(added)], scale=0.7, sink=sink)
    scores = np.where(np.tri(N, dtype=bool), 1.5 * np.tanh(query @ key.mT * 0.7 / 1.5) + added, -np.inf)
    total = np.exp(scores).sum(-1) + np.exp(sink)[:, None]
    assert np.allclose(A.scores[...], scores) and np.allclose(A.lse, np.log(total))
    assert np.allclose(A.to_dense(), np.exp(scores) / total[..., None])
    assert np.allclose(A @ value, np.exp(scores) @ value / total[..., None])


@pytest.mark.parametrize("head_dim, scale", [(1, 1.0), (4, 0.5), (64, 0.125), (2, 0.7071067811865475)])
def test_the_scale_is_one_over_the_root_of_head_dim(head_dim, scale):
    A = attention(np.ones((1, head_dim)), np.ones((2, head_dim)))
    assert A.scale == pytest.approx(scale, rel=1e-15)
    assert A.scores[0, 0] == pytest.approx(head_dim * scale)


# 2. and 11. The product and its kernel


def test_the_product_caches_the_lse(small_tiles, computed):
    query, key, value = draw(3)
    A = attention(query, key, mask=causal())
    A @ value
    tiles = len(computed)
    assert tiles > 0 and np.isfinite(A.lse).all()
    assert len(computed) == tiles
    assert A.kernel == "numpy: block loop"


def test_earlier_calls_do_not_change_results(small_tiles):
    query, key, value = draw(4)
    asks = [
        lambda A: A.lse,
        lambda A: A @ value,
        lambda A: A.entropy(),
        lambda A: A.to_dense(),
        lambda A: A.topk(3).values,
        lambda A: A[3:9],
    ]
    fresh = [ask(attention(query, key, mask=causal())) for ask in asks]
    for before, (after, expected) in itertools.product(asks, zip(asks, fresh, strict=True)):
        A = attention(query, key, mask=causal())
        before(A)
        assert np.array_equal(after(A), expected)


def test_whole_rows_of_a_part_sum_to_one_after_any_earlier_call():
    """Whole rows are divided by their own sum: at scores of 1e4 a cached lse would cost three digits."""
    rng = np.random.default_rng(5)
    query, key = (100 * rng.normal(size=(300, 64)).astype(np.float32) for _ in range(2))
    A = attention(query, key)
    assert np.abs(A.lse).max() > 1e4
    for row in range(0, 300, 10):
        assert A.lazy[[row]].sum(-1) == pytest.approx([1.0], abs=1e-5)


# 3. Indices

INDICES = [
    np.s_[...], np.s_[0], np.s_[-1, 2], np.s_[1, -3, 5], np.s_[1, 2, 3, 4], np.s_[:, 1:, ::3, ::-2],
    np.s_[..., 0], np.s_[0, ..., 3], np.s_[..., 4:30, 7], np.s_[..., -2:, :], np.s_[:, :, 40:, 3:1],
    np.s_[..., [0, 33, 7]], np.s_[:, [2, 0]], np.s_[:, [2, 0], 5], np.s_[0, :, [1, 2]], np.s_[:, 0, :, [3, -1]],
    np.s_[..., np.array([[1, 2], [3, 4]]), :], np.s_[..., np.array([], int), :], np.s_[:, np.int8(1)],
    np.s_[None, 0], np.s_[0, None, :, None, 5], np.s_[..., None], np.s_[[1, 1, 0, -1], ..., 2:3], np.s_[..., [3], ::-1],
    np.s_[np.array(1), np.array([0, 2]), 4], [1, 0], (), np.uint64(1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=lambda index: repr(index).replace("slice", ""))
@pytest.mark.parametrize("lse_first", [False, True])
def test_indexing_the_matrix_equals_indexing_the_dense_matrix(index, lse_first, small_tiles):
    query, key, _ = draw(6, 2, 3)
    arguments = {"mask": sliding_window([3, 20, 30]) & padding([N, 11]), "sink": np.array([0.0, 1.0, 2.0])}
    A = attention(query, key, **arguments)
    defined = reference.attention(query, key, mask=A.mask.to_dense(*A.shape), sink=arguments["sink"])
    if lse_first:
        assert A.lse.shape == (2, 3, N)
    for found, whole, expected in (
        (A[index], A.to_dense()[index], defined.weights[index]),
        (A.scores[index], A.scores[...][index], defined.scores[index]),
    ):
        assert np.shape(found) == np.shape(expected)
        assert np.allclose(found, whole, rtol=1e-13, atol=0) and np.allclose(
            found, expected, rtol=1e-12, atol=0
        )


def test_a_part_is_the_matrix_of_those_heads_and_rows(small_tiles):
    query, key, value = draw(7, 2, 3)
    A = attention(query, key, mask=causal() & padding([N, 20]), score_mod=alibi(), sink=[0.0, 1.0, 2.0])
    dense_A, output = A.to_dense(), A @ value
    for index, lead in (
        (np.s_[0, 1], np.s_[0, 1]), (np.s_[1], np.s_[1]), (np.s_[:, [2, 0]], np.s_[:, [2, 0]]),
        (np.s_[..., [30, 2, 2], :], np.s_[:, :]), (np.s_[1, 2, 9:], np.s_[1, 2]), (np.s_[::-1], np.s_[::-1]),
    ):  # fmt: skip
        part = A.lazy[index]
        assert part.shape == dense_A[index].shape
        assert np.allclose(part.to_dense(), dense_A[index], rtol=1e-13, atol=0)
        assert np.allclose(part @ value[lead], output[index], rtol=1e-13, atol=1e-15)
        near = sliding_window(3)
        for found, rows in (
            (part.lse, A.lse),
            (part.distance(), A.distance()),
            (part.mass(near), A.mass(near)),
            (part.topk(1).values[..., 0], A.max(-1)),
        ):
            assert np.allclose(found, np.broadcast_to(rows[..., None], A.shape)[index][..., 0], rtol=1e-12)
    assert A.lazy[1, 2, 5].shape == (1, N)


def test_a_part_with_some_grouped_heads_refuses_a_value_with_heads(small_tiles):
    query, key, value = draw(23, 6)
    A = attention(query, key[:3], enable_gqa=True)
    output = A @ value[:3]
    assert np.allclose(A.lazy[5] @ value[2], output[5], rtol=1e-13, atol=1e-15)
    for chosen in ([1, 5, 2], slice(1, 4)):
        with pytest.raises(ValueError, match="grouped heads"):
            A.lazy[chosen] @ value[:3]


def test_products_with_the_transpose_and_with_a_row_vector(small_tiles):
    query, key, value = draw(8, 3, kv_len=20)
    A = attention(query, key, mask=causal("lower_right"))
    whole = A.to_dense()
    x = np.random.default_rng(9).normal(size=(3, N, 4))
    assert A.mT.shape == (3, 20, N) and np.array_equal(A.mT.to_dense(), whole.mT)
    assert np.allclose(A.mT @ x, whole.mT @ x, rtol=1e-12, atol=1e-14)
    assert np.allclose(x.mT @ A, x.mT @ whole, rtol=1e-12, atol=1e-14)
    assert np.allclose(A.mT @ x[0, :, 0], whole.mT @ x[0, :, 0]) and np.allclose(
        A @ value[0, :, 0], whole @ value[0, :, 0]
    )
    assert np.isclose(np.vdot(A @ value, x[..., :3]), np.vdot(value, A.mT @ x[..., :3]))


# 4. Measures


@use_instruction_set(None)  # of the block loop
def test_reductions_equal_those_of_the_dense_matrix(small_tiles):
    query, key, _ = draw(10, 2, 3, kv_len=N - 6)
    at = {"align": "lower_right"}
    A = attention(query, key, mask=sliding_window(left=5, right=9, **at), sink=0.3)
    W = A.to_dense()
    for axis in (-1, -2, 3, 2, None, (0, 1, 2, 3)):
        for name in ("sum", "mean", "max"):
            expected = getattr(W, name)(axis)
            assert np.allclose(getattr(A, name)(axis), expected, rtol=1e-12, atol=0), (name, axis)
        if not isinstance(axis, tuple):
            assert np.array_equal(A.argmax(axis), W.argmax(axis))
    i, j = np.arange(N)[:, None] - 6, np.arange(N - 6)
    P = W / W.sum(-1, keepdims=True)  # without the share of the sink
    assert np.allclose(A.entropy(), -(P * np.log(np.where(P > 0, P, 1))).sum(-1))
    assert np.allclose(A.distance(**at), (P * abs(i - j)).sum(-1))
    near = (j < 4) | ((j <= i) & (j > i - 2))
    assert np.allclose(A.mass(first(4) | sliding_window(2, **at)), (W * near).sum(-1))
    order = np.argsort(-W, axis=-1, kind="stable")[..., :7]
    assert np.array_equal(A.topk(7).indices, order)
    assert np.array_equal(A.topk(7).values, np.take_along_axis(W, order, -1))
    rows, columns = (np.arange(n) * 6 // n for n in W.shape[-2:])
    for how in ("mean", "max", "sum"):
        cells = [
            [getattr(W[..., rows == a, :][..., columns == b], how)((-2, -1)) for b in range(6)]
            for a in range(6)
        ]
        assert np.allclose(A.coarsen(6, reduce=how), np.moveaxis(cells, (0, 1), (-2, -1)))


@use_instruction_set(None)  # of the block loop
def test_measures_share_one_pass_and_come_named(small_tiles, computed):
    query, key, _ = draw(11, 2)
    alone = attention(query, key).measure(Entropy())
    tiles = len(computed)
    A = attention(query, key)
    together = A.measure(Entropy(), Received(), top=TopK(8), near=Mass(sliding_window(4)))
    assert len(computed) == 2 * tiles
    assert together._fields == ("entropy", "received", "top", "near") and isinstance(together, tuple)
    assert np.array_equal(together.entropy, alone.entropy) and np.array_equal(
        together.top.values, A.topk(8).values
    )


@pytest.mark.parametrize("mask", [None, causal(), dense(np.arange(N)[None, :] % 3 > 0)])
def test_ties_go_to_the_lowest_index(mask, small_tiles):
    A = attention(np.zeros((N, 2)), np.zeros((N, 2)), mask=mask)
    W = A.to_dense()
    ranked = np.argsort(-W, axis=-1, kind="stable")
    for k in (1, 3, COLUMNS, COLUMNS + 1, N):
        assert np.array_equal(A.topk(k).indices, ranked[:, :k])
    assert np.array_equal(A.argmax(-1), W.argmax(-1)) and np.array_equal(A.argmax(-2), W.argmax(-2))
    assert A.argmax() == W.argmax()


class MergedInParts(Measure):
    """A measure that distributes tiles over several states and merges them in a given order."""

    def __init__(self, inner, parts, order):
        self.inner, self.parts, self.order = inner, parts, order

    def bind(self, problem):
        return MergedInParts(self.inner.bind(problem), self.parts, self.order)

    def init(self, shape, xp):
        return [0, [self.inner.init(shape, xp) for _ in range(self.parts)]]

    def step(self, state, *tile):
        at = state[0] * 5 % self.parts
        state[0], state[1][at] = state[0] + 1, self.inner.step(state[1][at], *tile)
        return state

    def finish(self, state):
        states, merge = state[1], self.inner.merge
        if self.order == "tree":
            states = [merge(states[0], states[1]), merge(states[2], states[3])]
        merged = states[0]
        for other in states[1:]:
            merged = merge(other, merged) if self.order == "swapped" else merge(merged, other)
        return self.inner.finish(merged)


MEASURES = [
    Entropy(), Sum(-1), Sum(-2), Received(), MaxWeight(-1), MaxWeight(-2), TopK(1), TopK(5), TopK(N), Distance(),
    Spread(), Mass(first(3)), Coarse(4, "mean"), Coarse(5, "max"), Coarse(3, "sum"),
]  # fmt: skip


@pytest.mark.parametrize("measure", MEASURES, ids=repr)
@pytest.mark.parametrize("order", ["in order", "swapped", "tree"])
@use_instruction_set(None)  # of the block loop
def test_states_of_tiles_merge_in_any_grouping(measure, order, small_tiles):
    for seed, mask in (
        (12, None),
        (13, sliding_window(5)),
        (14, padding(20) & dense((np.arange(N) % 4 > 0)[:, None])),
    ):
        query, key, _ = draw(seed, 2)
        if seed == 13:
            query = 0 * query  # many ties
        A = attention(query, key, mask=mask)
        parted, whole = A.measure(parted=MergedInParts(measure, 4, order), whole=measure)
        if isinstance(whole, TopKResult):
            assert np.array_equal(parted.values, whole.values) and np.array_equal(
                parted.indices, whole.indices
            )
        else:
            assert np.allclose(parted, whole, rtol=1e-12, atol=1e-13)


class Above(Measure):
    """The number of weights of each row above a threshold: a custom measure."""

    def __init__(self, threshold):
        self.threshold = threshold

    def init(self, shape, xp):
        return xp.zeros(shape[:2], dtype=int)

    def step(self, state, weights, scores, q_idx, kv_idx, xp):
        state[:, q_idx] += xp.sum(weights > self.threshold, axis=-1)
        return state


def test_a_custom_measure(small_tiles):
    query, key, _ = draw(15, 2, 3)
    A = attention(query, key, mask=causal())
    assert np.array_equal(A.measure(Above(0.1)).above, (A.to_dense() > 0.1).sum(-1))


# 5. Memory


def test_only_to_dense_stores_the_matrix():
    n = 4096
    rng = np.random.default_rng(16)
    query, key = (rng.normal(size=(n, 8)).astype(np.float32) for _ in range(2))
    A = attention(query, key, mask=causal())
    assert A.nbytes == n * n * 4
    tracemalloc.start()
    try:
        A.entropy()
        A @ key
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < A.nbytes / 4


class RecordingMask(Mask):
    """A mask that records its largest evaluated block."""

    def __init__(self):
        self.largest = 0

    def allows(self, frame, q_idx, kv_idx, xp):
        self.largest = max(self.largest, len(q_idx) * len(kv_idx))
        return (kv_idx[None, :] <= q_idx[:, None])[None]


@use_instruction_set(None)  # of the block loop
def test_a_mask_is_never_evaluated_as_a_whole(small_tiles):
    query, key, value = draw(17)
    mask = RecordingMask()
    A = attention(query, key, mask=mask)
    for ask in (
        A.entropy,
        A.lazy[3:30].lse.sum,
        A.to_dense,
        lambda: A @ value,
        lambda: A.scores[...],
        lambda: A[:, 5:],
    ):
        ask()
    assert mask.largest == ROWS * COLUMNS
    assert np.array_equal(A.to_dense(), attention(query, key, mask=causal()).to_dense())


def test_numpy_converts_a_small_matrix_and_refuses_a_large_one():
    small = attention(*draw(18)[:2])
    assert np.array_equal(np.asarray(small), small.to_dense())
    assert np.asarray(small, dtype=np.float32).dtype == np.float32
    zeros = np.zeros((1, 20_000, 1), np.float32)
    for convert in (np.asarray, np.array, lambda A: np.stack([A, A]), lambda A: np.dot(A, zeros[0])):
        with pytest.raises(MemoryError, match=r"1,600,000,000 bytes.*to_dense\(\).*A\[rows\].*coarsen"):
            convert(attention(zeros, zeros))
    with pytest.raises(TypeError):
        np.exp(small)
