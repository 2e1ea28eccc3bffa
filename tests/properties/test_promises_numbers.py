"""Known failures of attention implementations that must not occur here: numbers (rows 12 to 26).

Each test has the number of its row in the table of failures; test_promises.py lists the rows that are elsewhere.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from regard import Spread, attention, merge_states, reference, rope
from regard.masks import causal, dense, first, padding, sliding_window
from regard.score_mods import alibi, alibi_slopes, bias, softcap
from regard.testing import CaseInputs, assert_matches, check_case
from regard.testing.tolerance import epsilon
from regard.tiling import use_tile_sizes

ROWS, COLUMNS = 8, 16
N = 2 * COLUMNS + 3


@pytest.fixture
def small_tiles():
    """Use tiles so small that a few dozen tokens are split into many of them."""
    with use_tile_sizes(rows=ROWS, columns=COLUMNS, entries=2 * ROWS * COLUMNS, cached_scores=700):
        yield


def draw(seed: int, q_len: int, kv_len: int, head_dim: int = 3, value_dim: int = 5, lead=(), kv_lead=None):
    rng = np.random.default_rng(seed)
    kv_lead = lead if kv_lead is None else kv_lead
    shapes = ((*lead, q_len, head_dim), (*kv_lead, kv_len, head_dim), (*kv_lead, kv_len, value_dim))
    return [rng.normal(size=shape) for shape in shapes]


def agree(query, key, value, arguments, definition, dtype="float64") -> None:
    """Compare output, lse, weights and measures with the definition, under the error rule."""
    assert (
        check_case(
            SimpleNamespace(dtype=dtype), CaseInputs(query, key, value, arguments, definition, ordinary=False)
        )
        == []
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_12_the_largest_half_precision_inputs_do_not_overflow(dtype):
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        kind, largest = (
            np.dtype(ml_dtypes.bfloat16),
            1e18,
        )  # the square of a larger number overflows float32, too
    else:
        kind, largest = np.dtype(np.float16), 65504.0
    rng = np.random.default_rng(16)
    query, key = (largest * np.sign(rng.normal(size=(n, 64))).astype(kind) for n in (11, N))
    value = np.where(rng.random((N, 4)) < 0.5, 65504.0, -65504.0).astype(kind)
    query, key = query.astype(kind), key.astype(kind)
    for mask in (None, causal("lower_right")):
        A = attention(query, key, mask=mask)
        output = A @ value
        assert A.dtype == np.float32 and output.dtype == kind
        assert np.isfinite(A.lse).all() and np.isfinite(output.astype(float)).all()
        assert np.allclose(A.sum(-1), 1)
        allowed = True if mask is None else mask.to_dense(*A.shape)
        defined = reference.attention(query, key, value, mask=allowed)
        # Two keys may have the same exact score; rounded in float32, either may be the larger.
        found = np.take_along_axis(defined.scores, A.argmax(-1)[:, None], -1)[:, 0]
        assert np.array_equal(found, defined.scores.max(-1))
        agree(query, key, value, {"mask": mask}, {"mask": allowed}, dtype)


@pytest.mark.parametrize("scale", [0, 0.0, -1, 1e-30, -1e-30, 1e3, np.float32(0.25)])
def test_13_any_finite_scale(scale):
    query, key, value = draw(17, 9, N)
    for dtype in ("float64", "float32"):
        arrays = (x.astype(dtype) for x in (query, key, value))
        agree(*arrays, {"scale": scale}, {"scale": float(scale)}, dtype)
    A = attention(query, key, scale=scale)
    assert A.scale == float(scale)
    if abs(scale) < 1e-20:
        assert np.allclose(A.to_dense(), 1 / N, rtol=1e-15)


def test_13_a_scale_of_zero_is_uniform_over_the_live_keys():
    A = attention(*draw(18, 5, 5)[:2], mask=causal(), scale=0)
    assert A.to_dense().tolist() == [[1 / (i + 1) if j <= i else 0 for j in range(5)] for i in range(5)]


def test_13_a_negative_scale_reverses_the_scores():
    query, key, value = draw(19, N, N)
    assert np.array_equal(attention(query, key, scale=-1) @ value, attention(-query, key, scale=1) @ value)


def layouts(array):
    """Yield an array in every memory layout that slicing and transposing can give."""
    wide = np.full((*array.shape[:-1], 3 * array.shape[-1]), np.nan)
    wide[..., 1::3] = array
    long = np.full((*array.shape[:-2], 2 * array.shape[-2] + 3, array.shape[-1]), np.nan)
    long[..., 2:-1:2, :] = array
    heads_last = np.moveaxis(np.moveaxis(array, 0, -2).copy(), -2, 0)
    return {
        "contiguous": array,
        "transposed": array.swapaxes(-1, -2).copy().swapaxes(-1, -2),
        "heads within tokens": heads_last,
        "sliced columns": wide[..., 1::3],
        "sliced rows": long[..., 2:-1:2, :],
        "negative step": array[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
        "negative heads": array[::-1].copy()[::-1],
        "Fortran": np.asfortranarray(array),
        "other byte order": array.astype(">f8"),
        "read-only": np.broadcast_to(array, array.shape),
    }


@pytest.mark.parametrize("layout", list(layouts(np.ones((2, 2, 2)))))
def test_15_layout_never_changes_a_value(layout, small_tiles):
    plain = draw(20, N, N, lead=(3,))
    query, key, value = (layouts(array)[layout] for array in plain)
    for before, after in zip(plain, (query, key, value), strict=True):
        assert np.array_equal(before, after)
    expected, found = (attention(q, k, mask=causal()) for q, k in ((plain[0], plain[1]), (query, key)))
    for ask in (
        lambda A: A @ (plain[2] if A is expected else value),
        lambda A: A.mT @ (plain[2] if A is expected else value),
        lambda A: A.lse,
        lambda A: A.entropy(),
        lambda A: A[1, 5:30:7],
    ):
        assert np.allclose(ask(found), ask(expected), rtol=1e-13, atol=1e-15)
    agree(query, key, value, {"mask": causal()}, {"mask": causal().to_dense(N, N)})


def test_15_an_expanded_axis_equals_copies(small_tiles):
    query, key, value = draw(21, N, N, lead=(2, 3))
    key, value = key[:1, :1], value[:1, :1]
    expanded = [np.broadcast_to(array, (2, 3, *array.shape[2:])) for array in (key, value)]
    assert expanded[0].strides[:2] == (0, 0)
    outputs = [
        attention(query, k, mask=sliding_window(9)) @ v
        for k, v in ((key, value), expanded, [array.copy() for array in expanded])
    ]
    assert np.array_equal(outputs[0], outputs[1]) and np.array_equal(outputs[0], outputs[2])
    same_row = np.broadcast_to(query[..., :1, :], query.shape)
    assert np.allclose(np.ptp(attention(same_row, key).lse, axis=-1), 0, atol=1e-14)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_16_grouped_heads_map_by_repeat_interleave(kv_heads, small_tiles):
    query, key, value = draw(22, N, N, lead=(2, 6), kv_lead=(2, kv_heads))
    repeated = [np.repeat(array, 6 // kv_heads, axis=1) for array in (key, value)]
    mask = sliding_window(np.arange(3, 9)) & padding([N, 20])
    A = attention(query, key, mask=mask, enable_gqa=True)
    B = attention(query, repeated[0], mask=mask)
    assert np.allclose(A @ value, B @ repeated[1], rtol=1e-13, atol=1e-15)
    assert np.allclose(A.to_dense(), B.to_dense(), rtol=1e-13, atol=0)
    assert np.allclose(A.lse, B.lse, rtol=1e-14) and np.allclose(A.entropy(), B.entropy())
    # Some batch entries, all heads: the grouping stays.
    assert np.allclose(A.lazy[1:] @ value[1:], (B @ repeated[1])[1:], rtol=1e-13, atol=1e-15)
    assert A.kernel == B.kernel == "numpy: block loop"
    agree(query, key, value, {"mask": mask, "enable_gqa": True}, {"mask": mask.to_dense(2, 6, N, N)})


def turned(x, positions, layout, base=10_000.0):
    """Rotate by complex numbers: pair i is multiplied by exp(1j · position · base^(−2i/d))."""
    dim = x.shape[-1]
    pairs = [(i, i + dim // 2) if layout == "half" else (2 * i, 2 * i + 1) for i in range(dim // 2)]
    out = np.empty(x.shape, np.longdouble)
    for i, (a, b) in enumerate(pairs):
        angle = np.longdouble(positions) * np.longdouble(base) ** (np.longdouble(-2 * i) / dim)
        z = (x[..., a] + np.clongdouble(1j) * x[..., b]) * np.exp(np.clongdouble(1j) * angle)
        out[..., a], out[..., b] = z.real, z.imag
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    "positions", [range(1000, 1007), [4095, 8191, 16384, 131071, 1000, 65536, 1_000_000]]
)
def test_19_rotary_layouts_far_from_the_start(layout, positions):
    x = np.random.default_rng(23).normal(size=(2, 3, 7, 8))
    positions = np.asarray(positions)
    for base in (10_000.0, 500_000.0):
        expected = turned(x, positions, layout, base)
        found = rope(x, positions, layout=layout, base=base)
        # The rounding error of an angle grows with the position.
        assert (abs(found - expected) < 8 * epsilon("float64") * positions.max() * abs(x).max()).all()
        half = rope(x.astype(np.float32), positions, layout=layout, base=base)
        assert half.dtype == np.float32 and np.allclose(half, expected.astype(float), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_19_rotated_scores_depend_on_the_distance_alone(layout):
    query, key, _ = draw(24, 5, 5, head_dim=8)
    near, far = (
        attention(*(rope(x, start + np.arange(5), layout=layout) for x in (query, key))).scores[...]
        for start in (0, 5000)
    )
    assert np.allclose(near, far, rtol=1e-9, atol=1e-9)
    other = {"half": "interleaved", "interleaved": "half"}[layout]
    assert not np.allclose(rope(query, layout=layout), rope(query, layout=other))


def test_19_the_rotary_layout_must_be_given():
    with pytest.raises(TypeError, match="layout"):
        rope(np.ones((2, 4)))


FOUR = [0.25, 0.0625, 0.015625, 0.00390625]
EIGHT = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
NEXT = [
    0.7071067811865476, 0.35355339059327373, 0.17677669529663687, 0.08838834764831843,
    0.044194173824159216, 0.022097086912079608, 0.011048543456039804,
]  # fmt: skip
SLOPES = {
    1: [0.00390625],
    2: [0.0625, 0.00390625],
    3: [0.0625, 0.00390625, 0.25],
    4: FOUR,
    5: [*FOUR, 0.5],
    6: [*FOUR, 0.5, 0.125],
    7: [*FOUR, 0.5, 0.125, 0.03125],
    8: EIGHT,
    **{heads: EIGHT + NEXT[: heads - 8] for heads in range(9, 16)},
    16: [
        0.7071067811865476, 0.5, 0.35355339059327373, 0.25, 0.17677669529663687, 0.125, 0.08838834764831843,
        0.0625, 0.044194173824159216, 0.03125, 0.022097086912079608, 0.015625, 0.011048543456039804, 0.0078125,
        0.005524271728019902, 0.00390625,
    ],
}  # fmt: skip


@pytest.mark.parametrize("heads", range(1, 17))
def test_20_alibi_slopes_come_in_the_published_order(heads):
    assert np.allclose(alibi_slopes(heads), SLOPES[heads], rtol=1e-14, atol=0)
    A = attention(np.zeros((heads, 4, 1)), np.zeros((heads, 4, 1)), score_mod=alibi())
    away = abs(np.arange(4)[:, None] - np.arange(4))
    assert np.allclose(A.scores[...], -np.reshape(SLOPES[heads], (-1, 1, 1)) * away, rtol=1e-14, atol=0)


@pytest.mark.parametrize("sink", [-1e4, -5.0, 0.0, 30.0, 1e4])
def test_21_a_sink_is_in_the_maximum_and_in_the_sum(sink, small_tiles):
    query, key, value = draw(25, N, N, lead=(3,))
    empty = np.arange(N) % 5 == 0
    mask = causal() & dense(~empty[:, None])
    sinks = sink + np.array([0.0, 1.0, -2.0])
    A = attention(query, key, mask=mask, sink=sinks)
    share = np.exp(sinks[:, None] - A.lse)
    assert np.isfinite(A.lse).all() and np.allclose(A.sum(-1), 1 - share, atol=1e-12)
    # With all keys masked only the sink is left.
    assert np.allclose(A.lse[:, empty], sinks[:, None], rtol=1e-15)
    assert not A.to_dense()[:, empty].any() and not (A @ value)[:, empty].any()
    agree(
        query,
        key,
        value,
        {"mask": mask, "sink": sinks},
        {"mask": mask.to_dense(N, N), "sink": sinks},
    )


def test_21_a_sink_of_minus_inf_changes_nothing(small_tiles):
    query, key, value = draw(26, N, N)
    mask = sliding_window(4) & dense((np.arange(N) > 2)[:, None])
    with_sink, without = (attention(query, key, mask=mask, sink=sink) for sink in (-np.inf, None))
    assert np.array_equal(with_sink @ value, without @ value)
    assert np.array_equal(with_sink.lse, without.lse)


def test_22_scale_then_cap_then_mask_then_softmax():
    query, key = [[2.0]], [[3.0], [-3.0], [0.5], [100.0]]
    allowed = [[True, True, True, False]]
    A = attention(query, key, scale=0.5, score_mod=softcap(2.0), mask=dense(allowed))
    # 2 tanh(3/2), −2 tanh(3/2), 2 tanh(0.5/2), and masked: a cap after the mask would make it −2.
    assert A.scores[0].tolist() == pytest.approx(
        [1.8102965072897329, -1.8102965072897329, 0.4898373248074184, -np.inf]
    )
    assert A[0].tolist() == pytest.approx([0.7729292566, 0.0206888418, 0.2063819016, 0.0], abs=1e-9)


def test_22_score_modifications_apply_in_the_order_given():
    def scores(*score_mods, **more):
        return attention([[2.0]], [[3.0]], scale=0.5, score_mod=score_mods, **more).scores[0, 0]

    one = bias([[1.0]])
    assert scores(softcap(2.0), one) == pytest.approx(2.8102965072897329)  # 2 tanh(3/2) + 1
    assert scores(one, softcap(2.0)) == pytest.approx(1.9280551601516338)  # 2 tanh((3 + 1)/2)
    assert scores(one, one) == 5.0
    assert scores(bias([[1e30]]), mask=dense([[False]])) == -np.inf


def shards(query, key, value, cuts, mask=None):
    """Compute output and lse over each shard of the keys, from the matrix of that shard."""
    allowed = np.ones((len(query), len(key)), bool) if mask is None else mask
    edges = [0, *cuts, len(key)]
    return [
        (A @ value[a:b], A.lse)
        for a, b in itertools.pairwise(edges)
        for A in [attention(query, key[a:b], mask=dense(allowed[:, a:b]))]
    ]


@pytest.mark.parametrize("cuts", [[], [17], [0, 5, 5, 30, N], [1, 2, 3, 4], list(range(1, N))])
@pytest.mark.parametrize("level", [0.0, 300.0])
def test_23_shards_merge_in_any_order_empty_ones_too(cuts, level, small_tiles):
    query, key, value = draw(27, 6, N)
    key[:, 0] *= 1 + level  # large scores: most shards have almost no weight
    mask = np.random.default_rng(28).random((6, N)) < 0.5
    mask[2], mask[3, :20] = False, False
    parts = shards(query, key, value, cuts, mask)
    exact, naive = (
        reference.attention(query, key, value, mask=mask, dtype=dtype)
        for dtype in (np.longdouble, np.float64)
    )
    largest = np.max(abs(np.where(mask, exact.scores, 0)), axis=-1)
    drift = 4 * epsilon("float64") * (1 + largest)
    folded = parts[0]
    for part in parts[1:]:
        folded = merge_states([folded, part])
    shuffled = [parts[i] for i in np.random.default_rng(29).permutation(len(parts))]
    middle = len(parts) // 2
    in_two = merge_states([merge_states(half) for half in (parts[:middle], parts[middle:]) if half])
    for output, lse in (
        merge_states(parts),
        merge_states(parts[::-1]),
        merge_states(shuffled),
        folded,
        in_two,
    ):
        magnitude = exact.weights @ abs(value)
        assert_matches(
            output,
            exact.output,
            naive.output,
            magnitude=magnitude,
            score_error=drift[:, None],
            dtype="float64",
        )
        assert_matches(lse, exact.lse, naive.lse, magnitude=1 + largest, dtype="float64")


def test_23_empty_shards_merge_to_empty_rows():
    empty = (np.zeros((2, 3)), np.full(2, -np.inf))
    output, lse = merge_states([empty, empty, empty])
    assert not output.any() and (lse == -np.inf).all()
    part = (np.ones((2, 3)), np.array([5.0, -1e4]))
    for parts in ([part], [empty, part], [part, empty, empty]):
        output, lse = merge_states(parts)
        assert np.array_equal(output, part[0]) and np.array_equal(lse, part[1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_23_merging_keeps_float32_and_does_not_drift_along_a_ring(dtype):
    query, key, value = (x.astype(dtype) for x in draw(30, 4, 512, 8, 5))
    parts = shards(query, key, value.astype(np.float32), range(2, 512, 2))
    folded = parts[0]
    for part in parts[1:]:
        folded = merge_states([folded, part])
    exact = reference.attention(query, key, value)
    for output, lse in (folded, merge_states(parts)):
        assert output.dtype == lse.dtype == np.float32
        assert abs(output - exact.output).max() < 2e-6 and abs(lse - exact.lse).max() < 4e-6
    narrow = merge_states([(output.astype(dtype), lse) for output, lse in parts])
    assert narrow[0].dtype == narrow[1].dtype == np.float32


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_25_lse_is_the_natural_logarithm(dtype, small_tiles):
    query, key, _ = (x.astype(dtype) for x in draw(31, N, N, 8))
    mask = sliding_window(5) & dense((np.arange(N) % 7 > 0)[:, None])
    A = attention(query, key, mask=mask)
    allowed = mask.to_dense(N, N)
    exact = reference.attention(query, key, mask=allowed).lse
    assert np.array_equal(A.lse == -np.inf, ~allowed.any(-1))
    assert np.allclose(A.lse, exact, rtol=0, atol=1e-12 if dtype == "float64" else 2e-6)
    uniform = attention(np.zeros((1, 2), dtype), np.ones((4, 2), dtype))
    assert uniform.lse[0] == pytest.approx(1.3862943611198906, rel=1e-7)  # ln 4
    assert attention(np.zeros((1, 2), dtype), np.ones((4, 2), dtype), mask=first(0)).lse[0] == -np.inf


@pytest.mark.parametrize("n", [16_384, 131_072])
@pytest.mark.parametrize("variance", [94.0, 1e6])
def test_26_spread_does_not_cancel(n, variance):
    """Check a known spread at the end and in the middle of the sequence, for queries everywhere."""
    rng, keys, rows = np.random.default_rng(32), np.arange(n), [0, 1, n // 3, n - 1]
    zeros = np.zeros((n, 2), np.float32)
    for centre in (rng.integers(n // 2), n - 1):
        bump = np.maximum(-((keys - centre) ** 2) / (2 * variance), -80).astype(np.float32)[None, :]
        spread = attention(zeros, zeros, score_mod=bias(bump)).lazy[rows].measure(Spread()).spread
        exact, naive = (
            spread_of(reference.attention(zeros[:1], zeros, biases=[bump], dtype=dtype).weights)
            for dtype in (np.float64, np.float32)
        )
        drift = 4 * epsilon("float32") * (1 + abs(bump).max())
        assert_matches(spread, [exact] * 4, [naive] * 4, score_error=drift, dtype="float32", what="spread")
        if centre < n - 1:
            assert spread == pytest.approx([variance**0.5] * 4, rel=1e-3)


@pytest.mark.parametrize("n", [16_384, 131_072])
def test_26_spread_of_ordinary_rows(n):
    rng, rows = np.random.default_rng(33), [0, 77, n // 2, n - 1]
    query, key = (rng.normal(size=(n, 4)).astype(np.float32) for _ in range(2))
    spread = attention(query, key, mask=causal()).lazy[rows].measure(Spread()).spread
    defined = reference.attention(query[rows], key, mask=np.arange(n) <= np.array(rows)[:, None])
    assert spread == pytest.approx([spread_of(row) for row in defined.weights], rel=1e-5, abs=1e-5)
    assert spread[0] == 0.0


def spread_of(weights):
    """Compute the standard deviation of the position under the weights, in float64."""
    weights = np.asarray(weights, np.float64).ravel()
    weights = weights / weights.sum()
    keys = np.arange(len(weights))
    return np.sqrt((weights * (keys - (weights * keys).sum()) ** 2).sum())
