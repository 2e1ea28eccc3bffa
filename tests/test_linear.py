"""Linear attention: the same matrix by another road, held against its definition, and linear."""

from __future__ import annotations

import math
import time
import tracemalloc

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
    _linear,
    _stream,
    attention,
    linear_attention,
    reference,
)
from regard.features import elu, random_features, relu
from regard.masks import causal, dense, document, first, padding, prefix, sliding_window
from regard.testing import assert_matches, epsilon

torch = pytest.importorskip("torch")
ENGINES = {"numpy": np.asarray, "torch": torch.from_numpy}

HEADS, N, D, V = 3, 29, 5, 7
SOME = np.random.default_rng(5).random((N, N)) < 0.6
MASKS = {
    "none": None,
    "causal": causal(),
    "window": sliding_window(6),
    "two-sided": sliding_window(left=9, right=3),
    "windows of heads": sliding_window([1, 8, 40]),
    "padding": padding(21),
    "left padding": padding(21, side="left"),
    "document": document(np.arange(N) // 11),
    "scattered documents": document(np.arange(N) % 3),
    "prefix": prefix(7),
    "all of it": causal() & padding(23) & (sliding_window(9) | first(2)),
    "not": ~sliding_window(left=9, right=9),
    "dense": dense(SOME),
    "nothing": padding(0),
}
MAPS = {"elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), "relu": lambda x: np.maximum(x, 0)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, small):
    """Chunks so small that a few dozen tokens meet many of them; features would make them larger."""
    monkeypatch.setattr(_linear, "CHUNK", 4)


def draw(seed, q_len=N, kv_len=N, lead=(HEADS,), dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = ((q_len, D), (kv_len, D), (kv_len, V))
    return [rng.normal(size=(*lead, *shape)).astype(dtype) for shape in shapes]


def dense_mask(mask, *shape):
    return True if mask is None else mask.to_dense(*shape)


def define(query, key, value, mask, feature_map="elu"):
    """The definition at better than the dtype, and a naive computation at the dtype itself."""
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
    """Output, lse, scores and weights against the definition, under the error rule."""
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
    return ENGINES[A._problem.engine.name](array)


# -- Held against the definition --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_mask_gives_the_definition(mask, feature_map, engine):
    query, key, value = draw(1)
    A = linear_attention(*map(ENGINES[engine], (query, key)), mask=mask, feature_map=feature_map)
    agree(A, query, key, value, dense_mask(mask, HEADS, N, N), feature_map)
    assert A.kernel.startswith(f"{engine}: linear attention")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_lower_precision_keeps_the_rule(dtype, engine):
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
def test_any_lengths_alignment_and_chunks_give_the_definition(data):
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_linear, "CHUNK", data.draw(st.integers(1, 11)))
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
    sums = _linear.Sums.__init__
    monkeypatch.setattr(
        _linear.Sums,
        "__init__",
        lambda self, each: (sums(self, each), made.append(len(self.levels[0][0])))[0],
    )
    rng = np.random.default_rng(4)
    linear_attention(rng.normal(size=(8, N, D)), rng.normal(size=(2, N, D)), enable_gqa=True) @ rng.normal(
        size=(2, N, V)
    )
    assert made == [2]


@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_it_is_the_recurrence_it_is_known_as(mask):
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
def test_sums_of_runs_are_sums_of_few(count, data):
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, count))
    additions = []

    class Counted(int):
        def __add__(self, other):
            additions.append(1)
            return Counted(int(self) + int(other))

    sums = _linear.Sums([Counted(1 << i) for i in range(count)])
    assert len(additions) <= count
    additions.clear()
    assert sums(first, stop) == (1 << stop) - (1 << first)
    assert len(additions) <= 2 * math.log2(count + 1)


# -- What is promised of every matrix ---------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30], ids=str)
@pytest.mark.parametrize("mask", [padding(21), dense(SOME & (np.arange(N) < 21))], ids=["padding", "dense"])
def test_what_is_masked_cannot_matter(mask, bad, engine):
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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_live_nan_reaches_exactly_the_rows_that_see_it(engine):
    query, key, value = draw(8, lead=())
    key[9, 2] = np.nan
    make = ENGINES[engine]
    A = linear_attention(make(query), make(key), mask=causal())
    reached = np.isnan(np.asarray(A @ make(value))).all(-1)
    assert np.array_equal(np.flatnonzero(reached), np.arange(9, N))
    lower = np.tril(np.ones((N, N), bool)) & (np.arange(N) >= 9)[:, None]
    assert np.array_equal(np.isnan(np.asarray(A.to_dense())), lower)
    assert "something is not finite" in A.kernel
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


def test_features_without_anything_in_common_hide_the_key():
    query, key = np.array([[1.0, -1.0], [-1.0, -1.0]]), np.array([[2.0, 0.0], [0.0, 3.0]])
    A = linear_attention(query, key, feature_map="relu")
    assert np.array_equal(A.scores[...], [[math.log(2), -np.inf], [-np.inf, -np.inf]])
    assert np.array_equal(A @ np.array([[5.0], [np.nan]]), [[5.0], [0.0]])  # hidden is hidden
    assert np.array_equal(A.lse, [math.log(2), -np.inf])
    assert np.array_equal(A.to_dense(), [[1, 0], [0, 0]])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("known", [False, True], ids=["fresh", "multiplied"])
def test_an_index_is_that_of_the_dense_matrix(engine, known):
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
def test_measures_are_those_of_the_dense_matrix(mask, engine):
    query, key, value = map(ENGINES[engine], draw(11))
    A = linear_attention(query, key, mask=mask)
    found = A.measure(
        Entropy(), Distance(), Mass(first(2)), Position(), Received(), Coarse(3), TopK(2), Output(value)
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
    assert np.allclose(found.top_k.values, np.sort(W, axis=-1)[..., :-3:-1], rtol=1e-12)
    cell = (np.arange(N) * 3 // N)[:, None] == np.arange(3)
    sizes = cell.sum(0)
    assert np.allclose(found.coarse, cell.T @ W @ cell / np.outer(sizes, sizes), rtol=1e-11)


def test_shards_of_the_keys_merge():
    query, key, value = draw(12)
    shards = [linear_attention(query, key[:, part]) for part in (np.s_[:11], np.s_[11:])]
    parts = [(A @ value[:, part], A.lse) for A, part in zip(shards, (np.s_[:11], np.s_[11:]), strict=True)]
    whole = linear_attention(query, key)
    output, lse = regard.merge(parts)
    assert np.allclose(output, whole @ value, rtol=1e-13) and np.allclose(lse, whole.lse, rtol=1e-13)


def test_without_features_nothing_is_seen():
    A = linear_attention(np.ones((2, 0)), np.ones((3, 0)))
    assert not (A @ np.ones(3)).any() and np.isneginf(A.lse).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_empty_axes(shape):
    A = linear_attention(np.ones((2, shape[0], 3)), np.ones((2, shape[1], 3)))
    assert (A @ np.ones((2, shape[1], 4))).shape == (2, shape[0], 4) and A.lse.shape == (2, shape[0])
    assert A.kernel == "numpy: streaming tiles (an axis is empty)"
    assert (linear_attention(np.ones((2, 5, 3)), np.ones((2, 5, 3))) @ np.ones((2, 5, 0))).shape == (2, 5, 0)


# -- Numbers far from one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", [-60.0, -30.0, 1e25])
def test_features_far_from_one_neither_underflow_nor_overflow(at, engine):
    query, key, value = draw(13, dtype=np.float32)
    query[:, ::2] += np.float32(at)
    key += np.float32(min(at, 1e12))
    A = linear_attention(*map(ENGINES[engine], (query, key)), mask=causal())
    # The naive computation loses these rows, so they are held against the definition alone.
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
    part = A.lazy[1, 3:9]
    assert np.all(np.abs(np.asarray(part.lse) - exact.lse[1, 3:9]) <= error[1, 3:9, 0])


def test_sums_that_overflow_go_to_the_block_loop():
    key = np.full((9, 2), 1e38, np.float32)
    A = linear_attention(np.full((9, 2), 1.0, np.float32), key, feature_map="relu")
    value = np.arange(9, dtype=np.float32)
    assert np.allclose(A @ value, 4.0) and "something is not finite" in A.kernel
    assert np.allclose(A.lse, np.log(2e38) + np.log(9), rtol=1e-6)


# -- Gradients --------------------------------------------------------------------------------------------


def learnt(*arrays):
    return [torch.tensor(array, requires_grad=True) for array in arrays]


GRADIENTS = {
    "none": (None, "elu"),
    "causal": (causal(), "elu"),
    "window": (sliding_window(3), "relu"),
    "dense": (dense(SOME[:7, :7]), "elu"),
    "random": (causal(), random_features(4)),
}


@pytest.mark.parametrize(("mask", "feature_map"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_through_the_product(mask, feature_map):
    rng = np.random.default_rng(14)
    query, key, value = learnt(*(rng.normal(size=(7, width)) for width in (3, 3, 2)))

    def product(query, key, value):
        return linear_attention(query, key, mask=mask, feature_map=feature_map) @ value

    assert torch.autograd.gradcheck(product, (query, key, value))


@pytest.mark.parametrize("what", ["entries", "lse", "streamed", "scores"])
def test_gradients_through_the_rest_agree_also_where_a_product_is_zero(what):
    # Features are given, some of them zeros, so that a zero product has a gradient.
    rng = np.random.default_rng(15)
    features = [rng.uniform(0.5, 2.0, size=(5, 4)) * (rng.random((5, 4)) < 0.4) for _ in range(2)]
    features[0][0], features[1][0] = [1, 0, 0, 0], [0, 1, 0, 0]
    value = torch.tensor(rng.normal(size=(5, 2)))
    query, key = learnt(*features)
    mask = causal()
    A = linear_attention(query, key, mask=mask | first(2), feature_map=lambda x: x)
    products = torch.where(torch.tensor((mask | first(2)).to_dense(5, 5)), query @ key.T, 0.0)
    total = products.sum(-1, keepdim=True)
    weights = products / torch.where(total == 0, 1.0, total)
    assert bool((products == 0)[:, :2].any()) and bool((total > 0).any())
    if what == "entries":
        ours, theirs = (A[...] @ value).sum(), (weights @ value).sum()
    elif what == "streamed":
        poisoned = torch.cat([value, torch.full((1, 2), math.nan)])
        more = torch.cat([key, torch.ones((1, 4), dtype=key.dtype)])
        B = linear_attention(
            query, more, mask=(causal("upper_left") | first(2)) & padding(5), feature_map=lambda x: x
        )
        ours, theirs = (B @ poisoned).sum(), (weights @ value).sum()
        assert "streaming" in B.kernel
    elif what == "lse":
        live = (total > 0)[:, 0]
        ours, theirs = A.lse[live].sum(), total[live].log().sum()
    else:
        live = products > 0
        ours, theirs = A.scores[...][live].sum(), products[live].log().sum()
    assert torch.allclose(ours, theirs)
    mine, its = (torch.autograd.grad(x, (query, key)) for x in (ours, theirs))
    for a, b in zip(mine, its, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_an_empty_row_has_no_gradient():
    query, key, value = learnt(*draw(16, 9, 4, lead=()))
    A = linear_attention(query, key, mask=causal("lower_right"))
    (A @ value).sum().backward()
    assert not query.grad[:5].any() and query.grad[6:].any()
    assert all(bool(x.grad.isfinite().all()) for x in (query, key, value))


@pytest.mark.parametrize("mask", [causal(), "half"], ids=str)
def test_what_is_kept_for_a_gradient_grows_with_the_length(mask, monkeypatch):
    monkeypatch.setattr(_linear, "CHUNK", 16)

    def kept(n):
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        some = dense(np.arange(n)[:, None] % 2 == np.arange(n) % 2) if mask == "half" else mask
        query, key, value = learnt(*draw(17, n, n, lead=()))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = linear_attention(query, key, mask=some) @ value
        assert output.grad_fn is not None
        return sum(sizes.values())

    assert kept(240) <= 5 * kept(60)  # n² would be 16


def test_it_learns_at_half_precision_and_under_autocast():
    query, key, value = (torch.tensor(x, dtype=torch.bfloat16, requires_grad=True) for x in draw(18))
    with torch.autocast("cpu", torch.bfloat16):
        A = linear_attention(query, key, mask=causal())
        output = A @ value
    assert A.dtype == torch.float32 and output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and bool(x.grad.isfinite().all()) for x in (query, key, value))
    wide = [x.detach().float() for x in (query, key, value)]
    assert torch.equal(output, (linear_attention(*wide[:2], mask=causal()) @ wide[2]).bfloat16())


# -- Linear -----------------------------------------------------------------------------------------------

LINEAR = {
    "none": lambda n: None,
    "causal": lambda n: causal(),
    "window": lambda n: sliding_window(40),
    "wide window": lambda n: sliding_window(n // 2),
    "documents": lambda n: document(np.arange(n) // 50),
    "long documents": lambda n: document(np.arange(n) // (n // 3)),
    "padding": lambda n: padding([n - 7, n // 2]),
    "prefix": lambda n: prefix(n // 3),
    "several": lambda n: causal() & padding([n, n // 3]) & (sliding_window(n // 4) | first(4)),
}


def multiplied_out(kernel):
    words = kernel.split()
    return int(words[words.index("of") - 1]), int(words[words.index("of") + 1])


@pytest.mark.parametrize("mask", LINEAR.values(), ids=LINEAR)
def test_tiles_multiplied_out_grow_with_the_length(mask):
    def tiles(n):
        return multiplied_out(linear_attention(*np.ones((2, 2, 1, n, D)), mask=mask(n)).kernel)

    (few, of_few), (many, of_many) = tiles(400), tiles(1600)
    assert of_many == 16 * of_few
    assert many <= 5 * few
    assert many <= of_many / 8


def test_the_kernel_says_what_was_multiplied_out(monkeypatch):
    ran = []
    tile = _linear.Linear._multiplied_out
    monkeypatch.setattr(
        _linear.Linear, "_multiplied_out", lambda self, *given: (ran.append(1), tile(self, *given))[1]
    )
    query, key, value = draw(19, lead=())
    for mask in MASKS.values():
        if mask is None or getattr(mask, "left", None) is MASKS["windows of heads"].left:
            continue
        A = linear_attention(query, key, mask=mask)
        before = A.kernel
        ran.clear()
        A @ value
        assert A.kernel == before and multiplied_out(before)[0] == len(ran)
    n = -(-N // 5)  # five features make chunks of five
    assert linear_attention(query, key, mask=dense(SOME)).kernel == (
        f"numpy: linear attention, {n * n} of {n * n} tiles multiplied out"
    )


@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_time_grows_with_the_length(mask, monkeypatch):
    monkeypatch.setattr(_linear, "CHUNK", 128)
    rng = np.random.default_rng(20)

    def seconds(n):
        query, key, value = rng.normal(size=(3, n, 16)).astype(np.float32)
        A = linear_attention(query, key, mask=mask)
        start = time.process_time()
        A @ value
        return time.process_time() - start

    pairs = [(seconds(4096), seconds(32768)) for _ in range(3)]
    assert min(long for _, long in pairs) <= 24 * min(
        short for short, _ in pairs
    )  # eight times; n² would be 64


@pytest.mark.parametrize("mask", [None, causal()], ids=str)
def test_memory_at_65536_tokens_is_a_few_times_that_of_the_inputs(mask, monkeypatch):
    monkeypatch.setattr(_linear, "CHUNK", 256)
    n, width = 65536, 16
    query, key, value = np.random.default_rng(21).normal(size=(3, n, width)).astype(np.float32)
    tracemalloc.start()
    try:
        A = linear_attention(query, key, mask=mask)
        output, lse = A @ value, A.lse
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.shape == (n, width) and np.isfinite(lse).all()
    assert peak < 10 * 3 * n * width * 4  # 126 MB; the matrix would be 17 GB


# -- What a reader sees -----------------------------------------------------------------------------------


def test_repr_plan_and_explanation_say_what_it_is():
    A = linear_attention([[1.0, 0.0]], [[1.0, 0.0], [0.0, -1.0]])
    assert repr(A).splitlines()[0] == "AttentionMatrix(q_len 1, kv_len 2) float64, linear attention (elu)"
    masked = linear_attention(*np.zeros((2, 15, 2)), mask=causal(), feature_map=random_features(8, seed=3))
    assert repr(masked) == (
        "AttentionMatrix(q_len 15, kv_len 15) float64, linear attention (random_features(8, seed=3)), mask causal()"
    )
    assert masked.plan(Position()) == (
        "one linear product (numpy: linear attention, 2 of 4 tiles multiplied out): "
        "position as columns of the value; lse"
    )
    assert "weights from the lse: entropy" in masked.plan(Entropy())
    told = A.explain(0, value=[[1.0], [2.0]])
    assert np.allclose(told.raw_scores, [5, 2 + math.exp(-1)])
    assert np.allclose(told.scores, np.log(told.raw_scores)) and np.allclose(told.output, A @ [1.0, 2.0])
    assert "attends by the features elu of query and key" in str(told) and "Scale: × 1, then log" in str(told)


def test_causal_asks_for_an_alignment():
    with pytest.raises(regard.ArgumentError, match="align"):
        linear_attention(np.ones((3, 2)), np.ones((4, 2)), mask=causal())


# -- Feature maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [elu, relu, random_features(16)], ids=str)
def test_a_feature_map_is_the_same_on_both_engines(given):
    x = np.random.default_rng(22).normal(size=(2, 7, 5))
    made = given(x)
    assert (made >= 0).all() and made.shape[:-1] == x.shape[:-1]
    assert np.allclose(given(torch.tensor(x)), made, rtol=1e-12)


def test_elu_is_that_of_torch_plus_one():
    x = torch.linspace(-20, 5, 101, dtype=torch.float64, requires_grad=True)
    ours, theirs = elu(x), torch.nn.functional.elu(x) + 1
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    assert torch.allclose(*grads)


def test_random_features_are_softmax_attention_on_the_average():
    rng = np.random.default_rng(23)
    query, key = rng.normal(size=(2, 6, 4)) * 0.7
    features = [random_features(6, seed) for seed in range(600)]
    found = np.array([each(query) @ each(key).T for each in features])
    error = (found.mean(0) - np.exp(query @ key.T / 2)) / (found.std(0) / math.sqrt(len(features)))
    assert np.abs(error).max() < 4.5 and 0.5 < error.std() < 2  # in standard errors of the mean
    assert random_features(9) == random_features(9, seed=0) != random_features(9, seed=1)
    assert not np.array_equal(random_features(9)(query), random_features(9, seed=1)(query))


def test_more_random_features_are_nearer_to_softmax_attention():
    query, key, value = (x / 2 for x in draw(25, lead=()))
    exact = attention(query, key) @ value

    def error(count):
        maps = [random_features(count, seed) for seed in range(8)]
        return np.mean([np.abs(linear_attention(query, key, feature_map=m) @ value - exact) for m in maps])

    assert error(1024) < 0.5 * error(32)


def test_a_map_of_ones_own_may_have_any_number_of_features():
    query, key, value = draw(24)

    def polynomial(x):
        return np.concatenate([np.ones_like(x[..., :1]), x**2, np.abs(x)], axis=-1)

    A = linear_attention(query, key, feature_map=polynomial, mask=causal())
    products = np.tril(polynomial(query) @ polynomial(key).swapaxes(-1, -2))
    assert np.allclose(A @ value, products @ value / products.sum(-1, keepdims=True), rtol=1e-12)
    assert "linear attention (polynomial)" in repr(A)


def test_a_learnt_map_learns():
    torch.manual_seed(0)
    learnt_map = torch.nn.Sequential(torch.nn.Linear(D, 6, dtype=torch.float64), torch.nn.Softplus())
    query, key, value = map(torch.tensor, draw(26))
    A = linear_attention(query, key, feature_map=learnt_map, mask=causal())
    assert "linear attention (Sequential)" in repr(A)
    products = torch.tril(learnt_map(query) @ learnt_map(key).mT)
    grads = [
        torch.autograd.grad((output**2).sum(), list(learnt_map.parameters()))
        for output in (A @ value, products / products.sum(-1, keepdim=True) @ value)
    ]
    assert all(torch.allclose(ours, theirs, rtol=1e-10) for ours, theirs in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("feature_map", "kind", "words"),
    [
        ("gelu", ValueError, "received feature_map='gelu'; expected \"elu\" or \"relu\", or a function"),
        (3, TypeError, "received int 3"),
        (random_features, TypeError, "Call it: random_features()."),
        (lambda x: x, ValueError, "<lambda> of query with features down to -1; expected features that are never"),
        (lambda x: x[..., 0], ValueError, "A feature map works on the last axis"),
        (lambda x: torch.ones(x.shape), ValueError, "of numpy"),
        (lambda x: np.ones((len(x), len(x))), ValueError, "2 features of query and 3 of key"),
        (lambda x: x > 0, TypeError, "the features of query"),
    ],
    ids=["name", "number", "factory", "negative", "shape", "library", "counts", "booleans"],
)  # fmt: skip
def test_a_feature_map_that_is_none_is_refused_with_its_cure(feature_map, kind, words):
    with pytest.raises(kind) as refusal:
        linear_attention(np.array([[1.0, -1.0]] * 2), np.ones((3, 2)), feature_map=feature_map)
    assert isinstance(refusal.value, regard.RegardError) and words in str(refusal.value)
    assert str(refusal.value).startswith("linear_attention: ")


def test_shapes_that_do_not_fit_are_told_by_its_name():
    with pytest.raises(regard.ArgumentError, match=r"^linear_attention: .*the same head_dim"):
        linear_attention(np.ones((3, 2)), np.ones((4, 5)))
    with pytest.raises(regard.KindError, match=r"^mask: "):
        linear_attention(np.ones((3, 2)), np.ones((3, 2)), mask=np.ones((3, 3), bool))


def test_tiles_are_those_of_the_block_loop():
    assert _linear.TILE == _stream.TILE
