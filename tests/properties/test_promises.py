"""Known failures of attention implementations that must not occur here: masks and empty rows (rows 1 to 11).

Each test has the number of its row in the table of failures. The later rows are in test_promises_numbers.py, the
guarantees of the design in test_promises_design.py. Rows 5, 10, 17, 18 and 24 need gradients, layers or running models
and are tested with the PyTorch engine; row 14, the matrix of 70,000 × 70,000, is in test_large.py.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import regard
from regard import Coarse, Distance, Entropy, Mass, Received, Spread, TopK, attention, reference
from regard.masks import causal, dense, document, first, padding, prefix, sliding_window
from regard.measures import MaxWeight, Sum
from regard.score_mods import alibi, bias, relative_bias
from regard.testing import CaseInputs, check_case
from regard.tiling import use_tile_sizes

ROWS, COLUMNS = 8, 16


@pytest.fixture(autouse=True)
def small_tiles():
    """Use tiles so small that a few dozen tokens are split into many of them."""
    with use_tile_sizes(rows=ROWS, columns=COLUMNS, entries=2 * ROWS * COLUMNS, cached_scores=700):
        yield


def draw(seed: int, q_len: int, kv_len: int, head_dim: int = 3, value_dim: int = 5, lead=()):
    rng = np.random.default_rng(seed)
    shapes = ((q_len, head_dim), (kv_len, head_dim), (kv_len, value_dim))
    return [rng.normal(size=(*lead, *shape)) for shape in shapes]


def agree(query, key, value, arguments, definition, dtype="float64") -> None:
    """Compare output, lse, weights and measures with the definition, under the error rule."""
    with np.errstate(over="ignore"):
        arrays = (x.astype(dtype) for x in (query, key, value))
    assert (
        check_case(SimpleNamespace(dtype=dtype), CaseInputs(*arrays, arguments, definition, ordinary=False))
        == []
    )


def everything(A, value) -> dict[str, np.ndarray]:
    """Compute every result of a matrix in a few passes."""
    found = A.measure(
        Entropy(), Distance("lower_right"), Spread("lower_right"), Mass(first(2)), Sum(), MaxWeight(), TopK(3),
        Received(), Coarse(2, "mean"), peaks=Coarse(2, "max"),
    )._asdict()  # fmt: skip
    (found["max"], found["argmax"]), (found["top"], found["keys"]) = (
        found.pop("max_weight"),
        found.pop("topk"),
    )
    rows = {"output": A @ value, "weights": A.to_dense(), "scores": A.scores[...], "lse": A.lse}
    return {**rows, **found}


OVER_KEYS = ("received", "coarse", "peaks")  # results without an axis of queries


N = 2 * COLUMNS + 3
CODES = np.arange(N) // 5 % 3
SOME = np.random.default_rng(5).random((N, N)) < 0.6
MASKS = {
    "causal": causal(),
    "sliding_window": sliding_window(4),
    "two-sided": sliding_window(left=2, right=3),
    "padding": padding(COLUMNS + 2),
    "left padding": padding(COLUMNS + 2, side="left"),
    "document": document(CODES),
    "prefix": prefix(5),
    "first": first(7),
    "dense": dense(SOME),
    "not": ~sliding_window(left=9, right=9),
    "or": sliding_window(3) | first(2),
    "none": None,
}
# Masks that leave some rows empty by themselves, for 35 queries and 19 keys.
EMPTYING = {
    "causal": causal("lower_right"),
    "sliding_window": sliding_window(2, align="upper_left"),
    "two-sided": sliding_window(left=3, right=1, align="upper_left"),
    "padding": padding(0),
    "left padding": padding(0, side="left"),
    "document": document(np.arange(19) // 3, query_ids=np.arange(N) % 9),
    "prefix": prefix(0, "lower_right"),
    "first": first(0),
    "dense": dense(np.arange(N)[:, None] % 3 > 0),
    "not": ~first(19),
    "and": causal("lower_right") & ~sliding_window(4, align="lower_right"),
    "or": sliding_window(1, align="upper_left") | first(0),
}


def assert_rows_are_empty(A, value, rows) -> None:
    found = everything(A, value)
    assert (found.pop("lse")[rows] == -np.inf).all()
    assert (found.pop("scores")[rows] == -np.inf).all()
    found["keys"] = found["keys"] - np.arange(3)  # zeros tie, so the lowest keys
    for name in found.keys() - OVER_KEYS:
        assert (found[name][rows] == 0).all(), name


@pytest.mark.parametrize("kind", EMPTYING)
def test_01_rows_with_no_key_to_attend_to_are_zeros(kind):
    query, key, value = draw(1, N, 19)
    mask = EMPTYING[kind]
    allowed = mask.to_dense(N, 19)
    empty = ~allowed.any(-1)
    assert empty.any()
    A = attention(query, key, mask=mask)
    assert_rows_are_empty(A, value, empty)
    assert np.isfinite(A.lse[~empty]).all() and np.allclose(A.sum(-1)[~empty], 1)
    agree(query, key, value, {"mask": mask}, {"mask": allowed})


@pytest.mark.parametrize("kind", MASKS)
def test_01_an_empty_row_is_zeros_at_every_position(kind):
    query, key, value = draw(2, N, N)
    whole = everything(attention(query, key, mask=MASKS[kind]), value)
    for row in range(N):
        without = dense((np.arange(N) != row)[:, None])
        A = attention(query, key, mask=without if MASKS[kind] is None else MASKS[kind] & without)
        output, others = A @ value, np.arange(N) != row
        assert output[row].tolist() == [0.0] * 5
        assert A.lse[row] == -np.inf and not A[row].any()
        assert np.array_equal(output[others], whole["output"][others])
        assert np.array_equal(A.lse[others], whole["lse"][others])


def test_02_finfo_min_is_a_score_and_a_mask_is_not():
    query, key, value = draw(3, 5, 9)
    lowest = np.zeros((5, 9), np.float32)
    lowest[2] = np.finfo(np.float32).min
    lowest[4, :7] = np.finfo(np.float32).min
    as_bias = attention(query, key, score_mod=bias(lowest))
    as_mask = attention(query, key, mask=dense(lowest == 0))
    # A whole row of finfo.min is uniform, as plain addition makes it; a masked row is empty.
    assert np.allclose(as_bias[2], 1 / 9, rtol=1e-15) and np.isfinite(as_bias.lse[2])
    assert not as_mask[2].any() and as_mask.lse[2] == -np.inf
    # Next to other keys a score of finfo.min has weight 0, so both agree.
    assert np.array_equal(as_bias[4] > 0, as_mask[4] > 0) and np.allclose(as_bias[4], as_mask[4])
    agree(query, key, value, {"score_mod": bias(lowest)}, {"biases": [lowest]})
    hiding = np.where(lowest == 0, 0.0, -np.inf)
    assert np.array_equal(attention(query, key, score_mod=bias(hiding)).to_dense(), as_mask.to_dense())


@pytest.mark.parametrize("kept_in", ["float64", "float32", "float16"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_02_finfo_min_is_a_score_in_any_dtype(dtype, kept_in):
    query, key, value = draw(4, 4, 6)
    lowest = np.full((4, 6), np.finfo(kept_in).min, kept_in)
    A = attention(query.astype(dtype), key.astype(dtype), score_mod=bias(lowest))
    assert (A.lse > -np.inf).all() and np.allclose(A.sum(-1), 1)
    # A score cannot be lower than the lowest number of the dtype that scores are computed in.
    score = np.maximum(lowest, np.finfo(np.result_type(dtype, np.float32)).min)
    agree(query, key, value, {"score_mod": bias(lowest)}, {"biases": [score]}, dtype)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", MASKS)
def test_03_a_live_nan_shows_in_the_rows_that_depend_on_it(kind, wrong):
    mask = MASKS[kind]
    allowed = np.ones((N, N), bool) if mask is None else mask.to_dense(N, N)
    for which, at in ((0, 17), (1, 6), (2, 33)):
        arrays = draw(5, N, N)
        arrays[which][at, 1] = wrong
        agree(*arrays, {"mask": mask}, {"mask": allowed})


def test_03_a_live_nan_shows_in_no_other_row():
    for at in (0, ROWS, COLUMNS - 1, COLUMNS, N - 1):
        query, key, value = draw(6, N, N)
        live, column = np.arange(N) >= at, np.arange(5) == 2
        spoilt = value.copy()
        spoilt[at, 2] = np.nan
        A = attention(query, key, mask=causal())
        assert np.array_equal(np.isnan(A @ spoilt), live[:, None] & column)
        key[at, 0] = np.nan
        A = attention(query, key, mask=causal())
        for rows in (A.lse, A.entropy(), A.sum(-1), A.max(-1), (A @ value)[:, 0], A.topk(2).values[:, 0]):
            assert np.array_equal(np.isnan(rows), live)
        assert np.array_equal(np.isnan(A.to_dense()), causal().to_dense(N, N) & live[:, None])


def test_03_a_weight_of_zero_is_live_where_it_is_not_masked():
    """exp(−1000) is 0, and 0 · NaN and 0 · inf are NaN: only a mask removes a key."""
    query, key = np.ones((1, 1)), np.array([[1000.0], [0.0], [0.0]])
    for wrong in (np.nan, np.inf, -np.inf):
        value = np.array([[1.0, 1.0], [2.0, wrong], [3.0, 3.0]])
        assert np.array_equal(attention(query, key) @ value, [[1.0, np.nan]], equal_nan=True)
        assert (attention(query, key, mask=dense([[True, False, True]])) @ value).tolist() == [[1.0, 1.0]]
        assert (attention(query, key[1:], mask=first(1)) @ value[1:])[0, 1] == pytest.approx(
            wrong, nan_ok=True
        )


POISON = [np.nan, 1e30, np.inf, -1e30, -np.inf]


@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("kind", MASKS)
def test_04_a_fully_masked_key_cannot_matter(kind, turn):
    query, key, value = draw(7, N, N)
    unseen = dense(~np.isin(np.arange(N), [0, 3, COLUMNS - 1, COLUMNS, N - 1])[None, :])
    mask = unseen if MASKS[kind] is None else MASKS[kind] & unseen
    clean = everything(attention(query, key, mask=mask), value)
    masked = ~mask.to_dense(N, N).any(0)
    poison = np.resize(np.roll(POISON, turn), (masked.sum(), 1))
    for spoil_key, spoil_value in ((1, 0), (0, 1), (1, 1)):
        k, v = key.copy(), value.copy()
        k[masked], v[masked] = poison if spoil_key else k[masked], poison if spoil_value else v[masked]
        for name, result in everything(attention(query, k, mask=mask), v).items():
            assert np.array_equal(result, clean[name]), name


@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "none"])
def test_04_a_masked_key_cannot_matter_to_its_row(kind):
    query, key, value = draw(8, N, N)
    mask, allowed = MASKS[kind], MASKS[kind].to_dense(N, N)
    clean = everything(attention(query, key, mask=mask), value)
    for at, poison in zip((0, ROWS + 1, COLUMNS - 1, COLUMNS, N - 1), POISON, strict=True):
        k, v = key.copy(), value.copy()
        k[at] = v[at] = poison
        blind = ~allowed[:, at]
        found = everything(attention(query, k, mask=mask), v)
        for name in found.keys() - OVER_KEYS:
            assert np.array_equal(found[name][blind], clean[name][blind]), name


@pytest.mark.parametrize("poison", POISON)
def test_04_a_query_with_an_empty_row_cannot_matter(poison):
    query, key, value = draw(9, N, N)
    mask = dense((np.arange(N) % 4 > 0)[:, None])
    clean = everything(attention(query, key, mask=mask), value)
    query[::4] = poison
    A = attention(query, key, mask=mask)
    for name, result in everything(A, value).items():
        assert np.array_equal(result, clean[name]), name
    x = np.ones((N, 2))
    expected = A.mT @ x
    x[::4] = poison
    assert np.array_equal(A.mT @ x, expected)


def test_04_a_bias_of_minus_inf_masks_like_a_mask():
    query, key, value = draw(10, N, N)
    hiding = np.where(np.arange(N) % 3 == 0, -np.inf, 0.0)[None, :]
    clean = attention(query, key, score_mod=bias(hiding)) @ value
    key[::3] = value[::3] = np.nan
    assert np.array_equal(attention(query, key, score_mod=bias(hiding)) @ value, clean)


@pytest.mark.parametrize("level", [90.0, -90.0, 1e3, -1e3, 1e4, -1e4])
@pytest.mark.parametrize("kv_len", [COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 1])
def test_06_a_padded_tile_does_not_overflow(level, kv_len):
    for q_len in (ROWS - 1, ROWS + 1):
        rng = np.random.default_rng(11)
        query, value = np.ones((q_len, 1)), rng.normal(size=(kv_len, 2))
        key = level + rng.normal(size=(kv_len, 1))
        for dtype in ("float64", "float32"):
            A = attention(query.astype(dtype), key.astype(dtype))
            assert np.isfinite(A @ value).all() and (abs(A.lse - level) < 10).all()
            agree(query, key, value, {}, {}, dtype)
            agree(query, key, value, {"mask": first(kv_len - 1)}, {"mask": np.arange(kv_len) < kv_len - 1})


LONG = 5 * COLUMNS + 3
TILES_EMPTY = {
    "late window": sliding_window(3),
    "far keys": ~sliding_window(left=2 * COLUMNS, right=2 * COLUMNS),
    "left padding": padding(5, side="left"),
    "first": first(2),
    "documents": document(np.arange(LONG) // 20),
    "documents in turn": document(np.arange(LONG) // COLUMNS % 2),
    # The leading tiles are empty for odd rows only, which no block bound detects.
    "odd rows": dense((np.arange(LONG)[:, None] % 2 == 0) | (np.arange(LONG) >= 2 * COLUMNS)),
}


@pytest.mark.parametrize("kind", TILES_EMPTY)
def test_07_empty_tiles_before_between_and_after_do_not_matter(kind):
    query, key, value = draw(12, LONG, LONG)
    allowed = TILES_EMPTY[kind].to_dense(LONG, LONG)
    agree(query, key, value, {"mask": TILES_EMPTY[kind]}, {"mask": allowed})
    A = attention(query, key, mask=TILES_EMPTY[kind])
    for order in (slice(None, None, -1), np.random.default_rng(13).permutation(LONG)):
        B = attention(query, key[order], mask=dense(allowed[:, order]))
        assert np.allclose(B @ value[order], A @ value, rtol=1e-12, atol=1e-14)
        assert np.allclose(B.lse, A.lse, rtol=1e-13)


def test_08_true_means_attend():
    attend = np.array([[True, False, False], [True, True, False]])
    A = attention(np.zeros((2, 1)), np.zeros((3, 1)), mask=dense(attend))
    assert A.to_dense().tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    B = attention(np.zeros((2, 1)), np.zeros((3, 1)), mask=regard.masks.dense(~attend, true_means="ignore"))
    assert B.to_dense().tolist() == A.to_dense().tolist()
    assert regard.masks.dense(attend, true_means="ignore") == ~dense(attend)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32", "float64"])
def test_08_a_mask_of_numbers_is_refused_with_a_hint(dtype):
    numbers = np.ones((2, 2), dtype)
    for make in (dense, partial(dense, true_means="ignore")):
        with pytest.raises(TypeError) as refusal:
            make(numbers)
        for hint in ("array != 0", "score_mods.bias(array)", 'dense(array, true_means="ignore")', dtype):
            assert hint in str(refusal.value)
    for array in (numbers, numbers > 0):
        with pytest.raises(TypeError, match="dense"):
            attention(np.eye(2), np.eye(2), mask=array)


LITERAL = {
    ("causal", "upper_left"): (["10000", "11000"], ["10", "11", "11", "11", "11"]),
    ("causal", "lower_right"): (["11110", "11111"], ["00", "00", "00", "10", "11"]),
    ("window", "upper_left"): (["10000", "11000"], ["10", "11", "01", "00", "00"]),
    ("window", "lower_right"): (["00110", "00011"], ["00", "00", "00", "10", "11"]),
    ("two-sided", "upper_left"): (["11000", "11100"], ["11", "11", "01", "00", "00"]),
    ("two-sided", "lower_right"): (["00111", "00011"], ["00", "00", "10", "11", "11"]),
    ("prefix", "upper_left"): (["10000", "11000"], ["10", "11", "11", "11", "11"]),
    ("prefix", "lower_right"): (["11110", "11111"], ["10", "10", "10", "10", "11"]),
}
ALIGNED = {
    "causal": causal,
    "window": lambda align=None: sliding_window(2, align=align),
    "two-sided": lambda align=None: sliding_window(left=1, right=1, align=align),
    "prefix": lambda align=None: prefix(1, align),
}


@pytest.mark.parametrize("kind, align", LITERAL)
def test_09_alignment_is_as_given(kind, align):
    for rows, (q_len, kv_len) in zip(LITERAL[kind, align], ((2, 5), (5, 2)), strict=True):
        mask = ALIGNED[kind](align)
        expected = [[char == "1" for char in row] for row in rows]
        assert mask.to_dense(q_len, kv_len).tolist() == expected
        A = attention(np.zeros((q_len, 1)), np.zeros((kv_len, 1)), mask=mask)
        assert (A.to_dense() > 0).tolist() == expected


@pytest.mark.parametrize("kind", ALIGNED)
@pytest.mark.parametrize("q_len, kv_len", [(2, 5), (5, 2)])
def test_09_alignment_is_never_guessed(kind, q_len, kv_len):
    query, key, _ = draw(14, q_len, kv_len)
    with pytest.raises(ValueError, match=r'align="upper_left" or align="lower_right"'):
        attention(query, key, mask=ALIGNED[kind]())
    with pytest.raises(ValueError, match="upper_left"):
        ALIGNED[kind]("upper left")


@pytest.mark.parametrize("align", [None, "upper left"])
def test_09_alignment_of_distances_is_never_guessed(align):
    query, key, _ = draw(14, 2, 5)
    for ask in (
        lambda: attention(query, key, score_mod=alibi(align=align)),
        lambda: attention(
            query, key, score_mod=relative_bias(np.ones((32, 1)), bidirectional=True, align=align)
        ),
        lambda: attention(query, key).distance(align),
        lambda: attention(query, key).measure(Spread(align)),
    ):
        with pytest.raises(ValueError, match="upper_left"):
            ask()


@pytest.mark.parametrize("q_len, kv_len", [(0, 5), (5, 0), (0, 0), (5, 7)])
@pytest.mark.parametrize("lead", [(), (0,), (0, 3), (2, 0), (2, 3)])
def test_11_any_extent_may_be_zero(lead, q_len, kv_len):
    for head_dim, value_dim in ((3, 5), (0, 0)):
        query, key, value = draw(15, q_len, kv_len, head_dim, value_dim, lead)
        window = sliding_window(2, align="upper_left")
        for mask in (None, causal("lower_right"), first(2), padding(0), ~first(1), window):
            A = attention(query, key, mask=mask)
            allowed = np.ones(A.shape, bool) if mask is None else mask.to_dense(*A.shape)
            defined = reference.attention(query, key, value, mask=allowed, scale=A.scale)
            assert (A @ value).shape == defined.output.shape and np.allclose(A @ value, defined.output)
            assert np.array_equal(A.lse == -np.inf, ~allowed.any(-1)) and A.lse.shape == (*lead, q_len)
            assert np.allclose(A.to_dense(), defined.weights) and A.scores[...].shape == A.shape
            assert (A.mT @ query).shape == (*lead, kv_len, head_dim)
            assert np.allclose(A.sum(-2), defined.weights.sum(-2)) and np.isclose(
                A.sum(), defined.weights.sum()
            )
            for rows in (A.entropy(), A.distance("lower_right"), A.mass(first(1)), A.sum(-1)):
                assert rows.shape == (*lead, q_len) and np.isfinite(rows).all()
            assert repr(A).startswith("AttentionMatrix(") and A[..., :0].shape == (*lead, q_len, 0)
