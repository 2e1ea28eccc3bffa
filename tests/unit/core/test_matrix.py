"""The matrix: shapes and heads, dtypes, products, laziness, indexing, reductions and reprs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import regard
from regard import causal, padding, reference
from regard.engines.native import use_instruction_set
from regard.engines.numpy import NumpyEngine
from regard.masks import first
from regard.testing.cases import numpy_dtype
from regard.tiling import use_tile_sizes

HEAD_DIM, VALUE_DIM, Q_LEN, KV_LEN = 5, 19, 11, 13
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


def arrays(
    lead: Any = (), kv_lead: Any = None, *, q_len: int = Q_LEN, kv_len: int = KV_LEN, dtype: Any = float
) -> Any:
    rng = np.random.default_rng(7)
    kv_lead = lead if kv_lead is None else kv_lead
    shapes = (*lead, q_len, HEAD_DIM), (*kv_lead, kv_len, HEAD_DIM), (*kv_lead, kv_len, VALUE_DIM)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def matrix(lead: Any = (), **arguments: Any) -> regard.AttentionMatrix:
    query, key, _ = arrays(lead)
    return regard.attention(query, key, **arguments)


@pytest.fixture
def tiles() -> Iterator[None]:
    """Use tiles of 4 × 4; the scores of a band are cached between its two passes."""
    with use_tile_sizes(rows=4, columns=4, whole=0):
        yield


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Record the shape of every tile of scores that is computed, all by the block loop."""
    shapes: list[tuple[int, ...]] = []
    compute = NumpyEngine.compute_scores

    def scores(self: Any, query: Any, key: Any, scale: float) -> Any:
        tile = compute(self, query, key, scale)
        shapes.append(tile.shape)
        return tile

    monkeypatch.setattr(NumpyEngine, "compute_scores", scores)
    with use_instruction_set(None):
        yield shapes


# Shapes


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 7, 3)])
def test_every_number_of_axes(lead: tuple[int, ...], tiles: None) -> None:
    query, key, value = arrays(lead)
    A, exact = regard.attention(query, key), reference.attention(query, key, value)
    assert A.shape == (*lead, Q_LEN, KV_LEN) and A.ndim == len(lead) + 2 == len(A.shape)
    assert A.nbytes == 8 * np.prod(A.shape) == A.to_dense().nbytes
    assert A.mT.shape == (*lead, KV_LEN, Q_LEN) and A.scores.shape == A.shape
    for found, expected in (
        (A @ value, exact.output), (A.to_dense(), exact.weights), (A.lse, exact.lse), (A.scores[...], exact.scores),
        (A.mT.to_dense(), exact.weights.swapaxes(-1, -2)), (A.sum(-2), exact.weights.sum(-2)),
        (A.topk(3).values, -np.sort(-exact.weights)[..., :3]),
    ):  # fmt: skip
        assert found.shape == expected.shape
        close(found, expected, atol=1e-13)


@pytest.mark.parametrize(
    "lead, kv_lead", [((2, 3), ()), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (7,)), ((1,), (2, 3))]
)
def test_leading_axes_broadcast(lead: Any, kv_lead: Any, tiles: None) -> None:
    query, key, value = arrays(lead, kv_lead)
    both = np.broadcast_shapes(lead, kv_lead)
    A = regard.attention(query, key)
    exact = reference.attention(*(np.broadcast_to(x, (*both, *x.shape[-2:])) for x in (query, key, value)))
    assert A.shape == (*both, Q_LEN, KV_LEN)
    close(A.to_dense(), exact.weights, atol=1e-13)
    close(A @ value, exact.output, atol=1e-13)


def test_the_definition_broadcasts_too() -> None:
    query, key, value = arrays((2, 1), (2, 3))
    found = reference.attention(query, key, value)
    assert found.weights.shape == (2, 3, Q_LEN, KV_LEN)
    close(found.output[:, 1:2], reference.attention(query, key[:, 1:2], value[:, 1:2]).output)


@pytest.mark.parametrize("kv_heads, groups", [(2, 3), (1, 6), (6, 1), (3, 2)])
def test_grouped_heads_equal_repeated_heads(kv_heads: int, groups: int, tiles: None) -> None:
    query, key, value = arrays((2, 6), (2, kv_heads))
    mask = causal("lower_right") & padding([KV_LEN, 7])
    A = regard.attention(query, key, mask=mask, enable_gqa=True)
    repeated = np.repeat(key, groups, axis=1), np.repeat(value, groups, axis=1)
    B = regard.attention(query, repeated[0], mask=mask)
    close(A.to_dense(), B.to_dense(), atol=1e-14)
    close(A @ value, B @ repeated[1], atol=1e-13)
    close(A @ value[0, 0], B @ value[0, 0], atol=1e-13)  # one value for all
    close(A.lse, B.lse)


def test_grouped_heads_require_enable_gqa() -> None:
    query, key, _ = arrays((2, 6), (2, 2))
    with pytest.raises(regard.ArgumentError, match="enable_gqa=True"):
        regard.attention(query, key)
    with pytest.raises(regard.ArgumentError, match="multiple of kv_heads"):
        regard.attention(query[:, :5], key, enable_gqa=True)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_vectors(lead: Any, tiles: None) -> None:
    query, key, value = arrays(lead)
    A = regard.attention(query, key, mask=causal("lower_right"))
    W = A.to_dense()
    one = value[(0,) * len(lead)][:, 0]
    for v, expected in (
        (A @ one, W @ one), (A @ list(one), W @ one), (A.mT @ np.arange(Q_LEN), np.arange(Q_LEN) @ W),
        (np.arange(Q_LEN) @ A, np.arange(Q_LEN) @ W), (list(range(Q_LEN)) @ A, np.arange(Q_LEN) @ W),
    ):  # fmt: skip
        assert v.shape == expected.shape
        close(v, expected, atol=1e-13)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_the_transpose_from_either_side(lead: Any, tiles: None) -> None:
    A = matrix(lead)
    x = np.random.default_rng(3).normal(size=(*lead, Q_LEN, 7))
    close(A.mT @ x, A.to_dense().swapaxes(-1, -2) @ x, atol=1e-13)
    close(x.swapaxes(-1, -2) @ A, x.swapaxes(-1, -2) @ A.to_dense(), atol=1e-13)
    close(A.mT @ x[(0,) * len(lead)], A.to_dense().swapaxes(-1, -2) @ x[(0,) * len(lead)], atol=1e-13)
    assert A.mT.mT is A


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_values_reach_the_rows_that_attend_to_them(poison: float, tiles: None) -> None:
    A = matrix(mask=causal("upper_left"))
    x, value = np.ones((Q_LEN, 7)), np.ones((KV_LEN, 7))
    x[5], value[9] = poison, poison
    close((A.mT @ x)[:, 0], np.where(np.arange(KV_LEN) <= 5, poison, (A.mT @ np.ones(Q_LEN))))
    close((A @ value)[:, 0], np.where(np.arange(Q_LEN) >= 9, poison, 1.0))


@pytest.mark.parametrize("q_len, kv_len, lead", [(0, 13, ()), (11, 0, ()), (0, 0, (3,)), (11, 13, (0, 3))])
def test_any_extent_may_be_zero(q_len: int, kv_len: int, lead: Any) -> None:
    query, key, value = arrays(lead, q_len=q_len, kv_len=kv_len)
    for mask in (None, first(2), causal("lower_right") | ~first(2)):
        A = regard.attention(query, key, mask=mask)
        assert (A @ value).shape == (*lead, q_len, VALUE_DIM) and not (A @ value).any()
        assert A.to_dense().shape == A.scores[...].shape == (*lead, q_len, kv_len)
        assert A.sum(-1).shape == A.entropy().shape == (*lead, q_len) and A.sum(-2).shape == (*lead, kv_len)
        assert A.sum() == 0 and (A.lse == -np.inf).all()


# Dtypes


@pytest.mark.parametrize(
    "dtypes, expected",
    [
        ("float64 float64", "float64"), ("float32 float32", "float32"), ("float32 float64", "float64"),
        ("float16 float16", "float32"), ("bfloat16 bfloat16", "float32"), ("float16 bfloat16", "float32"),
        ("int8 int64", "float64"), ("int32 float32", "float64"), ("longdouble float32", "longdouble"),
    ],
)  # fmt: skip
def test_weights_are_float32_or_wider(dtypes: str, expected: str) -> None:
    query, key, value = arrays()
    of_query, of_key = map(numpy_dtype, dtypes.split())
    query, key = (3 * query).astype(of_query), (3 * key).astype(of_key)
    A = regard.attention(query, key)
    assert A.dtype == A.to_dense().dtype == A.scores[...].dtype == A.lse.dtype == A[0, 0].dtype == expected
    room = 1e-5 if expected == "float32" else 1e-13
    close(A.to_dense(), reference.attention(query, key).weights, atol=room)
    for dtype in map(numpy_dtype, ("float64", "float32", "float16", "bfloat16")):
        assert (A @ value.astype(dtype)).dtype == dtype
        assert (A.mT @ np.ones(Q_LEN, dtype)).dtype == dtype
    assert (A @ np.arange(KV_LEN)).dtype == np.float64


# Laziness: 11 × 13 entries are 3 bands of 4 blocks.


def test_creating_a_matrix_computes_nothing(tiles: None, counted: list[Any]) -> None:
    A = matrix((2, 3), mask=causal("lower_right"))
    assert A.kernel == "numpy: block loop" and A.mask == causal("lower_right")
    assert A.scale == HEAD_DIM**-0.5 and A.dtype == np.float64 and len(A) == 2 and A.nbytes == 8 * 6 * 11 * 13
    assert A.mT.shape == (2, 3, 13, 11) and A.lazy[0, :, 3:7].shape == (3, 4, 13) and "13" in repr(A)
    assert A.scores.shape == A.shape
    assert counted == []
    A.lse  # noqa: B018 - computed on access
    assert counted != []


def test_many_measures_share_one_pass(tiles: None, counted: list[Any]) -> None:
    A = matrix()
    A.measure(
        regard.Entropy(),
        regard.TopK(2),
        regard.Received(),
        top=regard.TopK(3),
        coarse=regard.Coarse(3, "mean"),
    )
    assert len(counted) == 3 * 4 and {shape[1:] for shape in counted} == {(4, 4), (3, 4), (4, 1), (3, 1)}
    assert len(A.lse) == Q_LEN
    assert len(counted) == 3 * 4, "the lse of a pass is cached"
    A.entropy()
    assert len(counted) == 2 * 3 * 4


@use_tile_sizes(rows=4, columns=4, whole=0, cached_scores=0)  # scores are computed in both passes
def test_a_product_caches_the_lse(counted: list[Any]) -> None:
    query, key, value = arrays()
    asks = [
        lambda A: A.entropy(),
        lambda A: A @ value,
        lambda A: A.mT @ np.ones(Q_LEN),
        lambda A: A.argmax(-1),
    ]
    for ask in asks:
        A = regard.attention(query, key)
        counted.clear()
        ask(A)
        assert len(counted) == 2 * 3 * 4, "the first pass computes the lse, the second the weights"
        assert len(A.lse) == Q_LEN and len(counted) == 2 * 3 * 4
        ask(A)
        assert len(counted) == 3 * 3 * 4, "the lse is cached, so one pass is enough"
        A.lazy[[3, 5]].entropy()
        assert len(counted) == 3 * 3 * 4 + 2, (
            "a part uses the cached lse, too, and its tiles of two rows are wider"
        )


def test_masked_and_unindexed_tiles_are_not_computed(tiles: None, counted: list[Any]) -> None:
    query, key, _ = arrays()
    regard.attention(query, key, mask=causal("upper_left")).sum()
    assert len(counted) == 1 + 2 + 3
    counted.clear()
    A = regard.attention(query, key)
    assert A[7].shape == (KV_LEN,) and A[[2, 9], :].shape == (2, KV_LEN)
    assert counted == [(1, 1, KV_LEN), *[(1, 2, 8), (1, 2, 5)]], "a tile of few rows has more columns"
    counted.clear()
    assert A.scores[7, 2:4].shape == (2,) and counted == [(1, 1, 2)]


# Parts: some heads and rows


def test_lazy_parts(tiles: None) -> None:
    query, key, value = arrays((2, 3))
    A = regard.attention(query, key, mask=causal("lower_right") & padding([KV_LEN, 7]))
    W, out = A.to_dense(), A @ value
    rows = [9, 0, 9]
    for part, shape, weights, own, output in (
        (A.lazy[1], (3, Q_LEN, KV_LEN), W[1], value[1], out[1]),
        (A.lazy[1, 2], (Q_LEN, KV_LEN), W[1, 2], value[1, 2], out[1, 2]),
        (A.lazy[:, 1:], (2, 2, Q_LEN, KV_LEN), W[:, 1:], value[:, 1:], out[:, 1:]),
        (A.lazy[..., [2, 0], :, :], (2, 2, Q_LEN, KV_LEN), W[:, [2, 0]], value[:, [2, 0]], out[:, [2, 0]]),
        (A.lazy[1, 2, 7], (1, KV_LEN), W[1, 2, 7:8], value[1, 2], out[1, 2, 7:8]),
        (A.lazy[..., rows, :], (2, 3, 3, KV_LEN), W[:, :, rows], value, out[:, :, rows]),
        (A.lazy[-1, 0, ::-1], (Q_LEN, KV_LEN), W[1, 0, ::-1], value[1, 0], out[1, 0, ::-1]),
        (A.lazy[1].lazy[2].lazy[rows], (3, KV_LEN), W[1, 2, rows], value[1, 2], out[1, 2, rows]),
    ):  # fmt: skip
        assert isinstance(part, regard.AttentionMatrix) and part.shape == shape
        close(part.to_dense(), weights, atol=1e-14)
        close(part @ own, output, atol=1e-13)
        close(part.sum(-2), weights.sum(-2), atol=1e-13)


def test_lazy_parts_of_grouped_heads(tiles: None) -> None:
    query, key, value = arrays((2, 6), (2, 2))
    A = regard.attention(query, key, enable_gqa=True)
    out = A @ value
    # With all heads, the value has the key's heads; with some heads, the heads of a value are ambiguous.
    close(A.lazy[1] @ value[1], out[1])
    close(A.lazy[:, :, 3:] @ value, out[:, :, 3:])
    close(A.lazy[1, 4] @ value[1, 4 // 3], out[1, 4])
    for part in (A.lazy[:, 2:4], A.lazy[:, 1:4]):
        close(part @ value[:, :1], part.to_dense() @ value[:, :1])  # a value of one head is not ambiguous
        with pytest.raises(regard.ArgumentError, match="one head at a time"):
            part @ value


@pytest.mark.parametrize(
    "index", [(..., slice(3)), (0, 0, 0, 0), (..., slice(None, None, -1)), (None,), (0, [[1]])]
)
def test_lazy_requires_every_column_and_adds_no_axis(index: Any) -> None:
    with pytest.raises(regard.ArgumentError, match="keeps all columns"):
        matrix((2, 3)).lazy[index]


@pytest.mark.parametrize(
    "index",
    [0, -1, (1, 2), (slice(None), 1), (0, slice(None), slice(None)), (..., 2, slice(None), slice(None)), [1, 0],
     (..., slice(None, None, 2), slice(None), slice(None)), (slice(None), [2, 0]),
     ..., slice(None), slice(1), (), (0, ...)],
)  # fmt: skip
def test_an_index_that_keeps_both_token_axes_is_lazy(index: Any, tiles: None, counted: list[Any]) -> None:
    A = matrix((2, 3), mask=causal("lower_right"))
    part = A[index]
    assert isinstance(part, regard.AttentionMatrix) and counted == []
    assert part.shape == A.lazy[index].shape
    expected = A.to_dense()[index]
    assert part.shape == expected.shape
    close(part.to_dense(), expected, atol=1e-14)


@pytest.mark.parametrize(
    "index",
    [(0, 0, 0), (..., 0), (..., slice(0, 4), slice(None)), (0, 0, [1, 2]), (None, 0), (..., slice(0, None)),
     (..., slice(None, None, -1)), [[0, 1]], (..., slice(0, 3)), (0, [1, 1, 1], slice(2, 4))],
)  # fmt: skip
def test_any_other_index_is_an_array(index: Any, tiles: None) -> None:
    A = matrix((2, 3))
    found, expected = A[index], A.to_dense()[index]
    assert isinstance(found, np.ndarray) and found.shape == expected.shape
    close(found, expected, atol=1e-14)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    "index",
    [np.s_[::2, 1, ..., [0, 2, 1], :], np.s_[:, [0, 1, 2], ..., 0, :], np.s_[:, 1, 1, ..., [0, 2], :],
     np.s_[:, 1, 2, [1, 0], ..., 3], np.s_[1, 0, 2, [1, 0], 3, ...], np.s_[:, :, 1, ..., [2, 0], 3],
     np.s_[None, 1, 0, ..., [0, 1], 2, :], np.s_[:, 1, ..., [0, 2], :, :], np.s_[:, [0, 1], ..., 1, :, :],
     np.s_[1, ..., [0, 2], :, :], np.s_[[2, 0], ..., 1, :, :], np.s_[1, :, [0, 2], :, :], np.s_[[0, 2], :, 1, :, :]],
)  # fmt: skip
def test_an_ellipsis_of_no_axis_separates_an_array_from_an_integer(index: Any, library: str) -> None:
    ndim = sum(entry is not None and entry is not Ellipsis for entry in index)
    query, key, _ = arrays((3,) * (ndim - 2))
    if library == "torch":
        torch = pytest.importorskip("torch")
        query, key = torch.tensor(query), torch.tensor(key)
    A = regard.attention(query, key, mask=causal("lower_right") & padding(7))
    found, expected = A[index], A.to_dense()[index]
    assert found.shape == expected.shape
    if isinstance(found, regard.AttentionMatrix):
        assert found.entropy().shape == expected.shape[:-1]
        found = found.to_dense()
    close(np.asarray(found), np.asarray(expected), atol=1e-14)


def test_a_lazy_part_shares_the_query(tiles: None) -> None:
    A = matrix((2, 3))
    assert A[0, 1].problem.query is A.problem.query
    assert A[0][1].shape == A[0, 1].shape == (Q_LEN, KV_LEN)


ONE_KEY = {
    "causal": {"mask": causal()},
    "own key": {"mask": regard.masks.dense(np.eye(70, dtype=bool))},
    "one key": {"mask": first(1)},
    "bias": {"score_mod": regard.score_mods.bias(np.where(np.eye(70, dtype=bool), 0.25, -np.inf))},
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("arguments", ONE_KEY)
@pytest.mark.parametrize("before", ["nothing", "entropy", "product", "lse"])
def test_the_only_live_key_of_a_row_has_a_weight_of_exactly_one(
    before: str, arguments: str, library: str
) -> None:
    rng = np.random.default_rng(5)
    query, key = (rng.normal(size=(20, 70, 33)).astype(np.float32) for _ in range(2))
    if library == "torch":
        torch = pytest.importorskip("torch")
        query, key = torch.tensor(query), torch.tensor(key)
    A = regard.attention(2 * query, key, **ONE_KEY[arguments])
    if before != "nothing":
        assert {"entropy": A.entropy, "product": lambda: A @ key, "lse": lambda: A.lse}[before]() is not None
    dense, rows = np.asarray(A.to_dense()), np.arange(70)
    live = np.isfinite(np.asarray(A.scores[...]))
    single = live.sum(-1) == 1
    assert single.any()
    for columns in (slice(0, 1), slice(0, 69), [68, 0, 3], slice(1, None)):
        found = np.asarray(A[..., columns])
        close(found, dense[..., columns], rtol=2e-5, atol=1e-12)
        equal(found[single][live[..., columns][single]], 1)
    for head in range(20):
        for row in rows[single[head]][:2]:
            assert float(A[head, row, int(np.flatnonzero(live[head, row])[0])]) == 1


def test_a_value_with_other_heads_is_refused() -> None:
    query, key, value = arrays((6,), (3,))
    A = regard.attention(query, key, enable_gqa=True)
    with pytest.raises(regard.ArgumentError, match=r"broadcast to \(6,\), its heads repeated 2 times"):
        A @ value[:2]


def test_an_index_with_a_large_result_is_refused(counted: list[Any]) -> None:
    query = np.zeros((3, 9_001, 2), np.float32)
    A = regard.attention(query, query)
    assert A[1].shape == (9_001, 9_001)
    for index, scores, entries in (
        (np.s_[1, 1:], False, 9_000 * 9_001),
        (np.s_[..., :-1], False, 3 * 9_001 * 9_000),
        (np.s_[1], True, 9_001**2),
    ):
        hint = rf"{4 * entries:,} bytes.*fewer rows.*A\.lazy\[index\].*to_dense"
        with pytest.raises(regard.TooLargeError, match=hint):
            (A.scores if scores else A)[index]
    assert counted == []
    assert A[1, :5].shape == (5, 9_001)


@pytest.mark.parametrize("index", [(2, 0), (0, Q_LEN), (0, 0, -KV_LEN - 1), (0, 0, 0, 0), (..., ...), [[5]]])
def test_an_index_past_the_end_is_an_index_error(index: Any) -> None:
    with pytest.raises(IndexError) as caught:
        matrix((2,))[index]
    assert isinstance(caught.value, regard.IndexOutOfRangeError)


@pytest.mark.parametrize("index", [([0], [0]), True, np.array([True, False]), 1.0, "a", (0, [0.5])])
def test_an_index_of_another_type_is_refused(index: Any) -> None:
    with pytest.raises(regard.ArgumentTypeError):
        matrix((2,))[index]


# Reductions


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_reductions_and_their_axes(lead: Any, tiles: None) -> None:
    A = matrix(lead, mask=causal("lower_right"))
    W, n = A.to_dense(), A.ndim
    axes = {-1: -1, -2: -2, None: None, n - 1: -1, n - 2: -2, (-1,): -1, tuple(range(n)): None}
    for axis, dense_axis in axes.items():
        for name in ("sum", "mean", "max", "argmax"):
            found, expected = getattr(A, name)(axis), getattr(W, name)(dense_axis)
            assert np.shape(found) == np.shape(expected), (name, axis)
            close(found, expected, atol=1e-13, err_msg=f"{name} {axis}")
    close(A.sum(), Q_LEN * np.prod(lead))
    wrong = [0, n, -n - 1, (0, 1)] if lead else [2, -3]
    for axis, name in itertools.product(wrong, ("sum", "mean", "max", "argmax")):
        with pytest.raises(regard.ArgumentError, match="axis"):
            getattr(A, name)(axis)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "argmax"])
def test_dim_is_a_synonym_of_axis(name: str, tiles: None) -> None:
    A = matrix((2, 3))
    for dim in (-1, -2, 3, None, (0, 1, 2, 3)):
        equal(getattr(A, name)(dim=dim), getattr(A, name)(dim))
    with pytest.raises(regard.ArgumentError, match="axis=-1 and dim=-1; expected one of the two"):
        getattr(A, name)(-1, dim=-1)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "argmax"])
def test_numpy_functions_call_the_methods(name: str, tiles: None, counted: list[Any]) -> None:
    A, function = matrix((3,)), getattr(np, name)
    W = A.to_dense()
    for axis in (None, -1, -2, 2):
        close(function(A, axis=axis), function(W, axis=axis), atol=1e-13)
        close(function(A, axis=axis, keepdims=True), function(W, axis=axis, keepdims=True), atol=1e-13)
    counted.clear()
    with pytest.raises(regard.ArgumentError, match=r"out=an array of float64.*lazy"):
        function(A, axis=-1, out=np.zeros((3, Q_LEN)))
    with pytest.raises(regard.ArgumentTypeError, match="the keyword where"):
        getattr(A, name)(where=True)
    assert counted == []


def test_an_empty_matrix_has_no_largest_entry() -> None:
    A = regard.attention(np.ones((3, 2)), np.ones((0, 2)))
    for name in ("max", "argmax"):
        with pytest.raises(regard.ArgumentError, match="at least one entry"):
            getattr(A, name)(-1)
    B = regard.attention(np.ones((3, 2)), np.ones((5, 2)), mask=first(0))
    equal(B.max(-1), np.zeros(3))
    equal(B.argmax(-1), np.zeros(3))


# As a Python object


def test_repr() -> None:
    A = regard.attention([[1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1]])
    assert repr(A).splitlines() == [
        "AttentionMatrix(q_len 2, kv_len 3) float64, scale 0.7071", "[0.4011 0.4011 0.1978]", "[0.1978 0.4011 0.4011]"
    ]  # fmt: skip
    query, key, _ = arrays((2, 6), dtype=np.float32)
    more = {"score_mod": [regard.softcap(30.0)], "sink": 1.0, "scale": 2}
    B = regard.attention(query, key, mask=causal("lower_right"), **more)
    assert repr(B) == (
        "AttentionMatrix(batch 2, heads 6, q_len 11, kv_len 13) float32, scale 2, softcap(30.0), "
        "mask causal(align='lower_right'), sink"
    )
    assert repr(B.scores) == f"<scores of {B!r}>" and repr(B.mT) == f"<transpose of {B!r}>"


def test_views_of_a_small_matrix_print_on_one_line() -> None:
    A = regard.attention([[1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1]])
    first = repr(A).splitlines()[0]
    assert (repr(A.scores), repr(A.mT)) == (f"<scores of {first}>", f"<transpose of {first}>")


def test_len_and_iteration() -> None:
    A = matrix((3,))
    assert len(A) == 3 and len(A.lazy[0]) == Q_LEN
    for found, expected in ((list(A), list(A.to_dense())), (list(A.lazy[1]), list(A.to_dense()[1]))):
        assert len(found) == len(expected)
        close(found, expected)


def test_iteration_over_leading_axes_yields_lazy_matrices(counted: list[Any]) -> None:
    query = np.zeros((2, 3, 40_009, 2), np.float32)
    A = regard.attention(query, query)
    parts = [head for entry in A for head in entry]
    assert len(parts) == 6 and counted == []
    assert all(isinstance(head, regard.AttentionMatrix) and head.shape == (40_009, 40_009) for head in parts)
    row = next(iter(parts[0]))
    assert isinstance(row, np.ndarray) and row.shape == (40_009,)


def test_numpy_converts_a_small_matrix_and_refuses_a_large_one() -> None:
    A = matrix()
    equal(np.asarray(A), A.to_dense())
    assert np.asarray(A, dtype=np.float32).dtype == np.float32
    with pytest.raises(regard.ArgumentError, match="copy=False"):
        np.asarray(A, copy=False)
    large = regard.attention(np.zeros((40_009, 2)), np.zeros((40_009, 2)))
    with pytest.raises(MemoryError, match=rf"{8 * 40_009**2:,} bytes.*to_dense\(\).*A\[rows\].*coarsen"):
        np.asarray(large)


@pytest.mark.parametrize(
    "wrong",
    [
        np.exp,
        np.isnan,
        lambda A: A + 1,
        lambda A: np.ones((Q_LEN, KV_LEN)) * A,
        lambda A: A > 0.5,
        lambda A: 1 - A,
    ],
)
def test_ufuncs_are_refused_instead_of_storing_the_matrix(wrong: Any, counted: list[Any]) -> None:
    with pytest.raises(TypeError):
        wrong(matrix())
    assert counted == []
