"""The lazy matrix of a page: the weights that JavaScript computes from a payload are those of the library."""

from __future__ import annotations

import base64
import json
import math
import zlib

import numpy as np
import pytest

import regard
from regard import alibi, attention, causal, padding, relative_bias, sliding_window, softcap
from regard.capture.compact_mask import IntervalMask, UniformRows
from regard.core.block_loop import run_block_loop
from regard.core.matrix_page import build_payload
from regard.core.products import DenseWeights
from regard.errors import ArgumentError, TooLargeError
from regard.masks import dense, first
from regard.pages import encoding, html
from regard.score_mods import ScoreMod, bias
from regard.tiling import use_tile_sizes
from tests.helpers.interval_masks import KEYS, LOWER, MASKS, ROWS, drawn
from tests.helpers.pages import run_in_node

WIDTH = 6


def normal(*shape, seed=0, by=2.0):
    return np.random.default_rng(seed).normal(size=shape) * by


# -- Arrays -----------------------------------------------------------------------------------------------


ARRAYS = [
    np.array([[0.0, -0.0, 1.0, -2.5, 65504.0, 6e-8, 6.1e-5, np.inf, -np.inf, np.nan]]).astype(np.float16),
    normal(64, 33).astype(np.float16),
    np.array([1.5, -np.inf, 3e38], np.float32),
    np.array([1e-300, np.pi]),
    np.arange(255, -1, -1).astype(np.uint8).reshape(2, 128),
    np.arange(-128, 128).astype(np.int8),
    np.array([[5, -7], [2**31 - 1, 0]]),
    np.zeros((0, 4), np.float16),
    np.zeros(0, np.int64),
]


def test_arrays_are_decoded_in_node():
    encoded = [encoding.encode_array(array) for array in ARRAYS]
    given = json.dumps([[array.encoding, array.text] for array in encoded])
    output = run_in_node(
        f"""
        const arrays = [];
        for (const [encoding, text] of {given}) arrays.push(Array.from(await decodeArray(encoding, text), String));
        console.log(JSON.stringify(arrays));
        """,
        "matrix/payload",
    )
    for array, own, found in zip(ARRAYS, encoded, json.loads(output), strict=True):
        assert own.shape == array.shape
        np.testing.assert_array_equal(np.array(found, float), array.ravel().astype(float))


def test_planes_of_halves_compress_better():
    halves = normal(4096, 64).astype(np.float16)
    assert len(encoding.encode_array(halves).text) < 0.87 * halves.nbytes * 4 / 3
    assert len(encoding.encode_array(np.arange(1 << 17)).text) < 2000


@pytest.mark.parametrize("by", [1e-30, 1e-5, 1.0, 1e5, 1e30])
def test_rounding_to_halves_keeps_eleven_bits_at_any_size(by):
    array = normal(50, 8, by=by)
    rounded = encoding.round_to_half(array, np.ones(50, bool)).to_dtype(np.float64)
    assert np.abs(rounded / array - 1).max() <= 2.0**-11


def test_masked_vectors_do_not_limit_the_precision_of_the_others():
    array = normal(4, 3)
    array[1], array[2] = 1e30, np.nan
    rounded = encoding.round_to_half(array, np.array([True, False, False, True])).to_dtype(np.float64)
    assert (rounded[1:3] == 0).all()
    np.testing.assert_allclose(rounded[[0, 3]], array[[0, 3]], rtol=2.0**-11)


@use_tile_sizes(intervals=100)
def test_a_mask_of_too_many_pieces_is_refused():
    A = attention(normal(40, 2), normal(40, 2), mask=dense(drawn((40, 40), 0.5)))
    with pytest.raises(
        TooLargeError, match=r"page: received a mask with more than 100 intervals .* A.lazy\[..., rows, :\]"
    ):
        build_payload(A.problem, "page")


# -- Weights ----------------------------------------------------------------------------------------------


def one(mask=None, **options):
    return attention(normal(ROWS, WIDTH), normal(KEYS, WIDTH, seed=1), mask=mask, **options)


def poisoned():
    key = normal(KEYS, WIDTH, seed=1)
    key[35], key[36], key[20] = 1e30, np.nan, np.nan
    mask = padding(35) & (sliding_window(7, **LOWER) | first(1))
    return attention(normal(ROWS, WIDTH), key, mask=mask)


def grouped():
    query, key = normal(2, 4, ROWS, WIDTH), normal(2, 2, KEYS, WIDTH, seed=1)
    mask = padding([30, 41]) & sliding_window(np.array([2, 4, 8, 41]), **LOWER)
    return attention(query, key, mask=mask, score_mod=alibi(**LOWER), sink=normal(4), enable_gqa=True)


CASES = {name: lambda mask=mask: one(mask) for name, mask in MASKS.items()} | {
    "softcap": lambda: one(score_mod=softcap(1.5)),
    "span": lambda: one(
        IntervalMask(np.arange(ROWS) // 2, np.minimum(np.arange(ROWS) + 3, KEYS) * (np.arange(ROWS) % 5 > 0))
    ),
    "alibi": lambda: one(score_mod=alibi([0.3], **LOWER)),
    "alibi, then a cap": lambda: one(causal(**LOWER), score_mod=[alibi([0.3], **LOWER), softcap(2.0)]),
    "a table by distance": lambda: one(
        score_mod=relative_bias(normal(8, 1), bidirectional=True, max_distance=20, align="upper_left")
    ),
    "a bias": lambda: one(score_mod=bias(np.where(drawn((ROWS, KEYS), 0.2), -np.inf, normal(ROWS, KEYS)))),
    "a bias by key": lambda: one(score_mod=bias(normal(1, KEYS))),
    "flat rows": lambda: one(causal(**LOWER), score_mod=UniformRows(drawn(ROWS, 0.3))),
    "a sink": lambda: one(causal(**LOWER), sink=1.0),
    "a scale below 0": lambda: one(scale=-0.7),
    "large scores": lambda: attention(normal(ROWS, WIDTH, by=60), normal(KEYS, WIDTH, seed=1, by=60)),
    "tiny": lambda: attention(normal(ROWS, WIDTH, by=1e-9), normal(KEYS, WIDTH, seed=1, by=1e9)),
    "large scores, whose lse has few digits": lambda: attention(
        normal(ROWS, WIDTH, by=900), normal(KEYS, WIDTH, seed=1, by=9)
    ),
    "one key": lambda: attention(normal(ROWS, WIDTH), normal(1, WIDTH, seed=1)),
    "one key and a sink": lambda: attention(normal(ROWS, WIDTH), normal(1, WIDTH, seed=1), sink=1.0),
    "one key and a cap": lambda: attention(
        normal(ROWS, WIDTH), normal(1, WIDTH, seed=1), score_mod=softcap(5.0), sink=1.0
    ),
    "masked keys are not numbers": poisoned,
    "some rows": lambda: one(causal(**LOWER), score_mod=alibi([0.2], **LOWER)).lazy[[30, 2, 17, 17]],
    "heads, grouped": grouped,
    "one head of them": lambda: grouped().lazy[1, 2],
}


def weights_in_node(*payloads) -> list[np.ndarray]:
    """All weights as a page computes them: by cell, by row, as a tile, as a picture; the mask; and by steps."""
    given = []
    for payload in payloads:
        arrays: list[encoding.EncodedArray] = []
        record = html.encode_record(payload.record, arrays)
        given.append(f"[{record}, {json.dumps([array.text for array in arrays])}, {len(payload.intervals)}]")
    output = run_in_node(
        f"""
        const found = [];
        for (const [record, texts, pairs] of [{", ".join(given)}]) {{
          const load = ({{ array, encoding }}) => decodeArray(encoding, texts[array]), [rows, keys] = record.size;
          const all = [[], [], [], [], [], []];
          for (let pair = 0; pair < pairs; pair++) {{
            const head = await loadHead(record, pair, load);
            for (let i = 0; i < rows; i++) {{
              all[1].push(...rowWeights(head, i));
              for (let j = 0; j < keys; j++) {{
                const {{ weight, masked }} = cellWeight(head, i, j);
                all[0].push(weight);
                all[4].push(Number(masked));
                all[5].push(explainCell(head, i, j).weight);
              }}
            }}
            all[2].push(...tileWeights(head, 0, 1, rows, 0, 1, keys));
            all[3].push(...pooledPicture(head, 0, 1, rows, 0, 1, keys, 4, "max"));
          }}
          found.push(all.map((x) => x.map(String)));
        }}
        console.log(JSON.stringify(found));
        """,
        "matrix/payload",
        "matrix/weights",
    )
    return [
        np.array(numbers, float).reshape(6, *payload.problem.shape)
        for numbers, payload in zip(json.loads(output), payloads, strict=True)
    ]


def dense_weights(payload):
    """The weights of the rounded query and key: (pairs, rows, keys)."""
    (weights,), _ = run_block_loop(payload.problem, [DenseWeights()])
    return weights


@pytest.fixture(scope="module")
def answers():
    """For each case the matrix, its payload and the weights in Node, from one run for all."""
    matrices = [make() for make in CASES.values()]
    payloads = [build_payload(matrix.problem, "page") for matrix in matrices]
    return dict(zip(CASES, zip(matrices, payloads, weights_in_node(*payloads), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_weights_in_node_are_within_the_stated_error(answers, case):
    matrix, payload, (cells, rows, tile, picture, masked, explained) = answers[case]
    error, wanted = payload.error, matrix.to_dense().reshape(cells.shape)
    assert np.isfinite(error.relative) and error.found_relative <= error.relative
    assert error.found_absolute <= error.absolute <= 1 and error.compared >= wanted.size / 64
    np.testing.assert_array_equal(np.isnan(cells), np.isnan(wanted))
    good = np.isfinite(wanted)
    apart = np.abs(cells - wanted)[good]
    assert (apart <= error.relative * wanted[good] + 1e-30).all()
    assert (apart <= error.absolute).all()
    live = matrix.scores[...].reshape(cells.shape) != -np.inf
    if not matrix.problem.score_mods:  # a bias of −inf is a score, in the page
        np.testing.assert_array_equal(masked == 0, live)
    assert (cells[~live] == 0).all()
    # Steps divide by the sum of the row, which is exact, not by the lse, which is stored as float32.
    assert (np.abs(explained - wanted)[good] <= error.relative * wanted[good] + 1e-30).all()
    assert matrix.problem.has_sink or (
        explained.sum(-1)[live.any(-1) & good.all(-1)] == pytest.approx(1, abs=1e-9)
    )
    for other in (rows, tile, np.where(masked == 1, 0, picture)):
        np.testing.assert_allclose(other, cells, rtol=1e-7, atol=1e-37)  # they are float32
    assert ((picture == -1) == (masked == 1)).all()


def test_the_bound_is_of_the_size_of_the_error():
    # A matrix that halves can represent has only the error of the arithmetic.
    error = build_payload(one().problem, "page").error
    assert not error.exact and error.found_relative > error.relative / 50 > 1e-5
    query = normal(ROWS, WIDTH).astype(np.float16)
    assert not build_payload(attention(query, normal(1, WIDTH)).problem, "page").error.exact
    exact = build_payload(attention(query, query).problem, "page").error
    assert exact.exact and exact.relative < 1e-4 and exact.found_relative <= exact.relative


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds(seed):
    rng = np.random.default_rng(seed)
    rows, keys, width = rng.integers(1, 40, size=3)
    dtype = np.float64 if seed % 2 else np.float32
    # Keys around a distant centre, which changes all scores of a row alike, and numbers that halves represent.
    query = rng.normal(size=(rows, width)) * 10 ** rng.uniform(-2, 1.5)
    key = rng.normal(size=(keys, width)) * 10 ** rng.uniform(-2, 1) + rng.normal(size=width) * (seed % 3) * 10
    query = (np.round(query * 8) / 8 if seed % 5 == 0 else query).astype(dtype)
    mask = dense(rng.random((rows, keys)) < 0.7) if seed % 4 else None
    error = build_payload(
        attention(query, key.astype(dtype), mask=mask, sink=1.0 if seed % 3 else None).problem, "page"
    ).error
    assert error.compared == rows * keys
    assert error.found_relative <= error.relative and error.found_absolute <= error.absolute


def test_the_error_in_words():
    far = {"relative": math.inf, "absolute": 0.25, "found_relative": 1.5, "compared": 10, "exact": False}
    near = {"relative": 0.0123, "absolute": 0.1, "found_relative": 0.00045, "compared": 12345, "exact": False}
    same = {"relative": 4e-6, "absolute": 1e-6, "found_relative": 2.5e-9, "compared": 7, "exact": True}
    given = html.encode_record([far, near, same])
    script = f"console.log(JSON.stringify({given}.map(describeError)));"
    sentences = json.loads(run_in_node(script, "components/errorStatement"))
    half = "This page stores query and key in half precision, and computes every weight from them. "
    exact = "This page stores query and key exactly; only the arithmetic rounds. "
    seen = "weights that were compared with the original, none differs by more than"
    assert sentences == [
        f"{half}Of 10 {seen} 150 % of the weight. The bound for every weight is a difference of 0.25.",
        f"{half}Of 12,345 {seen} 0.045 %. The bound for every weight is 1.3 %.",
        f"{exact}Of 7 {seen} 2.5e−7 %. The bound for every weight is 0.0004 %.",
    ]


def test_the_lse_is_that_of_the_rounded_query_and_key():
    payload = build_payload(one(causal(**LOWER)).problem, "page")
    np.testing.assert_allclose(dense_weights(payload).sum(-1), 1, rtol=1e-12)
    assert np.abs(payload.stats.lse(np) - one(causal(**LOWER)).lse).max() > 1e-5


def test_a_picture_reads_small_cells_completely_and_samples_large_ones():
    matrix = one(causal(**LOWER))
    payload = build_payload(matrix.problem, "page")
    arrays: list[encoding.EncodedArray] = []
    record = html.encode_record(payload.record, arrays)
    output = run_in_node(
        f"""
        const record = {record}, texts = {json.dumps([array.text for array in arrays])};
        const head = await loadHead(record, 0, ({{ array, encoding }}) => decodeArray(encoding, texts[array]));
        const picture = (...options) => Array.from(pooledPicture(head, 0, 4, 10, 0, 4, 11, ...options));
        console.log(JSON.stringify([picture(4, "mean"), picture(2, "mean"), picture(2, "max")]));
        """,
        "matrix/payload",
        "matrix/weights",
    )
    whole, sample, maxima = np.array(json.loads(output)).reshape(3, 10, 11)
    dense = np.full((40, 44), np.nan)
    dense[:ROWS, :KEYS] = dense_weights(payload)
    blocks = dense.reshape(10, 4, 11, 4)
    means = np.nanmean(blocks, axis=(1, 3))
    np.testing.assert_allclose(np.where(whole == -1, 0, whole), means, rtol=1e-5)
    assert not np.allclose(sample, whole)
    assert (sample >= np.nanmin(blocks, axis=(1, 3)) - 1.0001).all()
    assert (sample <= np.nanmax(blocks, axis=(1, 3)) + 1e-7).all()
    # A maximum is never sampled.
    np.testing.assert_allclose(np.where(maxima == -1, 0, maxima), np.nanmax(blocks, axis=(1, 3)), rtol=1e-5)
    assert ((maxima == -1) == (whole == -1)).all()


@pytest.mark.parametrize("size", [(7, 11), (12, 12), (1, 9), (9, 1), (64, 30)])
def test_cells_of_a_picture_are_combined_and_none_is_left_out(size):
    rng = np.random.default_rng(sum(size))
    weights = np.where(rng.random(size) < 0.3, -1.0, rng.random(size))
    shapes = [(max(1, size[0] // by), max(1, size[1] // by)) for by in (1, 2, 3, 5)]
    shapes += [(rng.integers(1, size[0] + 1), rng.integers(1, size[1] + 1)) for _ in range(5)]
    shapes = [tuple(map(int, shape)) for shape in shapes]
    output = run_in_node(
        f"""
        const pool = ([height, width], reduce) =>
          Array.from(poolCells(Float64Array.from({weights.ravel().tolist()}), {list(size)}, height, width, reduce));
        const shapes = {json.dumps(shapes)};
        console.log(JSON.stringify(shapes.map((shape) => [pool(shape, "max"), pool(shape, "mean")])));
        """,
        "matrix/overview",
    )
    for (height, width), (maxima, means) in zip(shapes, json.loads(output), strict=True):
        rows, columns = np.arange(size[0]) * height // size[0], np.arange(size[1]) * width // size[1]
        blocks = [[weights[np.ix_(rows == i, columns == j)] for j in range(width)] for i in range(height)]
        np.testing.assert_array_equal(maxima, [block.max() for line in blocks for block in line])
        expected = [block.clip(0).mean() if block.max() >= 0 else -1 for line in blocks for block in line]
        np.testing.assert_allclose(means, expected, rtol=1e-12)


def test_an_aborted_request_is_not_started_and_the_newest_comes_first():
    arrays: list[encoding.EncodedArray] = []
    record = html.encode_record(build_payload(one(causal(**LOWER)).problem, "page").record, arrays)
    output = run_in_node(
        f"""
        const texts = {json.dumps([array.text for array in arrays])}, removed = [], order = [];
        globalThis.document = {{
          readyState: "complete",
          getElementById: (id) => ({{ textContent: texts[id.slice(5)], remove: () => removed.push(id) }}),
        }};
        const matrix = openMatrix({record});  // Node has no Worker: the page itself answers
        const first = await matrix.cell(0, 30, 2), stop = new AbortController();
        const log = (name, promise) => promise.then((value) => order.push([name, value === null]));
        const picture = (options) => matrix.picture(0, 0, 1, 4, 0, 1, 4, 4, "max", options);
        const all = [log("started", picture()), log("aborted", picture({{ signal: stop.signal }})),
          log("old", picture()), log("new", picture()), log("cell", matrix.cell(0, 1, 0)),
          log("aborted before", picture({{ signal: AbortSignal.abort() }}))];
        await new Promise((done) => setImmediate(done));
        stop.abort();
        await Promise.all(all);
        console.log(JSON.stringify([first.weight, order, removed.length]));
        """,
        "matrix/matrixClient",
    )
    weight, order, removed = json.loads(output)
    assert weight == pytest.approx(one(causal(**LOWER))[30, 2], rel=0.01)
    assert dict(order) == {
        "started": False, "aborted": True, "old": False, "new": False, "cell": False, "aborted before": True
    }  # fmt: skip
    assert [name for name, aborted in order if not aborted] == ["started", "cell", "new", "old"]
    assert removed == len(arrays)  # the page drops the arrays that the worker has


@pytest.mark.parametrize("edge", [5, 64])
def test_overviews_are_maxima_and_means_of_blocks(edge):
    payload = build_payload(grouped().problem, "page")
    overviews = payload.overviews(edge)
    cells = min(edge, ROWS), min(edge, KEYS)
    assert len(overviews) == 8 and overviews[0]["size"] == cells
    weights = dense_weights(payload).reshape(8, ROWS, KEYS)
    rows, columns = np.arange(ROWS) * cells[0] // ROWS, np.arange(KEYS) * cells[1] // KEYS
    for own, overview in zip(weights, overviews, strict=True):
        assert overview["max"]["levels"].early and (overview["mean"] is None) == (edge == 64)
        for reduce in ("max", "mean") if edge == 5 else ("max",):
            blocks = (
                [own[np.ix_(rows == i, columns == j)] for j in range(cells[1])] for i in range(cells[0])
            )
            check_levels(
                overview[reduce], np.array([[getattr(x, reduce)() for x in line] for line in blocks])
            )


def check_levels(picture, expected):
    """Check that the levels of a picture stand for the expected weights."""
    levels = np.frombuffer(inflate(picture["levels"]), np.uint8).reshape(expected.shape)
    lowest, top = picture["floor"], picture["top"]
    back = np.where(levels > 1, lowest * (top / lowest) ** ((levels - 2.0) / 253), 0)
    assert top == pytest.approx(expected.max(), rel=1e-12)
    step = math.log(top / lowest) / 253
    np.testing.assert_allclose(back[expected > lowest], expected[expected > lowest], rtol=0.51 * step)
    assert (levels[expected > 0] > 0).all()


def inflate(array):
    return zlib.decompress(base64.b64decode(array.text))


def test_the_overview_reads_every_row():
    """A single weight of 1.0 among 8,192 rows is the maximum of its cell, wherever it is."""
    rng = np.random.default_rng(0)
    query, key = np.zeros((8192, 2), np.float32), np.zeros((8192, 2), np.float32)
    row, column = rng.integers(8192, size=2)
    query[row, 0] = key[column, 0] = 40
    (overview,) = build_payload(attention(query, key).problem, "page").overviews(16)
    levels = np.frombuffer(inflate(overview["max"]["levels"]), np.uint8).reshape(16, 16)
    assert overview["max"]["top"] == 1 and (levels == 255).sum() == 1
    assert levels[row * 16 // 8192, column * 16 // 8192] == 255


# -- Unsupported matrices ---------------------------------------------------------------------------------


class Wave(ScoreMod):
    def apply(self, scores, frame, q_idx, kv_idx, xp):
        return xp.sin(scores)

    def __repr__(self):
        return "wave()"


def test_unsupported_matrices_are_refused(monkeypatch):
    with pytest.raises(
        ArgumentError, match=r"page: received the score modification wave\(\); .* softcap, alibi"
    ):
        build_payload(one(score_mod=Wave()).problem, "page")
    linear = regard.linear_attention(np.ones((3, 2)), np.ones((3, 2)))
    with pytest.raises(ArgumentError, match=r"received linear attention .* A.coarsen\(512\)"):
        build_payload(linear.problem, "page")
    monkeypatch.setattr("regard.core.matrix_page.MAX_BIAS_SIZE", 100)
    with pytest.raises(
        TooLargeError, match=r"bias\(<array of shape \(37, 41\)>\), 1,517 numbers; expected at most 100"
    ):
        build_payload(one(score_mod=bias(normal(ROWS, KEYS))).problem, "page")
    build_payload(one(score_mod=bias(normal(1, KEYS))).problem, "page")


# -- torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_tensors_have_the_same_payload(dtype):
    torch = pytest.importorskip("torch")
    query, key = (
        torch.tensor(normal(2, n, WIDTH, seed=n), dtype=getattr(torch, dtype)) for n in (ROWS, KEYS)
    )
    table = torch.nn.Parameter(torch.tensor(normal(8, 2), dtype=torch.float32))
    mods = [relative_bias(table, bidirectional=False, max_distance=20, align="lower_right"), softcap(4.0)]
    matrix = attention(query, key.requires_grad_(), mask=causal(**LOWER), score_mod=mods)
    payload = build_payload(matrix.problem, "page")
    assert payload.error.exact == (dtype in ("bfloat16", "float16"))
    if dtype == "bfloat16":  # one run of Node is enough
        ((cells, *_),) = weights_in_node(payload)
        wanted = matrix.to_dense().detach().numpy()
        assert (np.abs(cells - wanted) <= payload.error.relative * wanted + 1e-30).all()
