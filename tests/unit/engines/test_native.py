"""The compiled measure pass: every accumulator, mask, dtype and instruction set against the dense definition."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

import regard
from regard import attention, causal, padding, sliding_window
from regard.accumulators import (
    CellReduction,
    ColumnSum,
    DiagonalSum,
    DistanceSum,
    RowMaxScore,
    RowMoments,
    RowSum,
    RowTopK,
)
from regard.engines.native import accumulate, measure_pass, multiply, use_instruction_set
from regard.engines.native import library as library_module
from regard.engines.native.library import INSTRUCTION_SETS, list_instruction_sets, load_library
from regard.masks import dense, document, first
from regard.measures import MaxScore
from tests.helpers.dense_accumulators import accumulate_dense

pytestmark = pytest.mark.skipif(load_library() is None, reason="the compiled library is not built")
LR = "lower_right"
RNG = np.random.default_rng(7)
SHAPES = [
    (1, 1),
    (5, 3),
    (63, 64),
    (64, 65),
    (65, 63),
    (255, 15),
    (256, 16),
    (257, 17),
    (300, 513),
    (513, 70),
]


def list_accumulators(pairs: int, rows: int, kv_len: int) -> list[Any]:
    few, many = min(rows, kv_len, 7), (rows, kv_len)
    rng = np.random.default_rng(rows)
    labels = [(rng.integers(-2, 5, (n, rows)), rng.integers(-2, 5, (n, kv_len))) for n in (1, pairs)]
    return [
        RowSum("one"), RowSum("surprisal"), RowSum("distance"), RowSum("distance", offset=kv_len - rows),
        RowSum("position"), RowSum("one", intervals=((0, 1),)), RowSum("one", intervals=()),
        RowSum("one", intervals=((0, kv_len // 3), (kv_len // 2, kv_len))), ColumnSum(),
        CellReduction((few, few), "sum"), CellReduction((1, kv_len), "sum"), CellReduction((rows, 1), "max"),
        CellReduction(many if rows * kv_len < 5000 else (1, 2), "max"), RowTopK(1),
        RowTopK(min(8, kv_len)), RowMaxScore(), DiagonalSum(), DistanceSum(-1, -1), DistanceSum(-20, 19),
        DistanceSum(1, np.inf), DistanceSum(-np.inf, kv_len - rows), DistanceSum(5, 3),
        DistanceSum(-np.inf, -1, *labels[0]), DistanceSum(-30, 40, *labels[1]),
        RowMoments(), RowMoments(kv_len - rows), RowTopK(min(40, kv_len)),
    ]  # fmt: skip


def check(A: Any, *, known: str = "", threads: int = 1, rtol: float, atol: float) -> None:
    """Compare the compiled pass over a matrix of NumPy arrays with the dense definition."""
    problem = A.problem
    with use_instruction_set(None):
        weights, scores = (np.asarray(x).reshape(problem.shape) for x in (A.to_dense(), A.scores[...]))
        stats = A._require_stats()
        with np.errstate(divide="ignore"):
            lse = stats.lse(np)
    given = {"": (None, None), "lse": (lse, None), "max and sum": tuple(stats[:2])}[known]
    accumulators = list_accumulators(*problem.shape)
    query, key = (np.asarray(x, problem.dtype) for x in (problem.query, problem.key))
    found = accumulate(problem, query, key, accumulators, *given, threads)
    accumulated, largest, total = found
    with np.errstate(divide="ignore"):
        found_lse = largest if total is None else largest + np.log(total)
    np.testing.assert_allclose(found_lse, lse, rtol=rtol, atol=atol)
    for accumulator, result in zip(accumulators, accumulated, strict=True):
        expected = accumulate_dense(accumulator, weights, scores, problem.positions)
        if isinstance(accumulator, RowTopK):
            np.testing.assert_allclose(result[0], expected[0], rtol=rtol, atol=atol)
            at = np.take_along_axis(weights, result[1], -1)
            np.testing.assert_allclose(np.where(result[0] == 0, 0, at), result[0], rtol=rtol, atol=atol)
            continue
        size = np.max(np.abs(np.where(np.isfinite(expected), expected, 0)), initial=1)
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol * size, err_msg=str(accumulator))


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Any:
    if request.param not in list_instruction_sets():
        pytest.skip(f"this processor or build has no {request.param}")
    with use_instruction_set(request.param):
        yield request.param


def draw(rows: int, kv_len: int, dim: int, dtype: Any, heads: int = 2) -> Any:
    rng = np.random.default_rng(rows * 1000 + kv_len)
    return (rng.normal(size=(heads, n, dim)).astype(dtype) for n in (rows, kv_len))


TOLERANCE: dict[Any, Any] = {
    np.float32: {"rtol": 3e-5, "atol": 2e-6},
    np.float64: {"rtol": 1e-12, "atol": 1e-13},
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, kv_len", SHAPES)
def test_every_accumulator_equals_its_definition(
    instruction_set: str, rows: int, kv_len: int, dtype: Any
) -> None:
    query, key = draw(rows, kv_len, 1 + rows % 9, dtype)
    for mask, known in ((None, ""), (causal(LR), "lse"), (sliding_window(20, align=LR), "max and sum")):
        check(attention(query, key, mask=mask), known=known, **TOLERANCE[dtype])


MASKS: dict[str, Any] = {
    "nothing": first(0),
    "padding": padding([130, 300]),
    "documents": document(np.arange(300) // 37) & causal(),
    "window and first": causal() & (sliding_window(70) | first(3)),
    "random": dense(RNG.random((300, 300)) < 0.5),
    "random by head": dense(RNG.random((2, 2, 300, 300)) < 0.5),
    "some rows empty": dense((np.arange(300) % 3 > 0)[:, None]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_mask(instruction_set: str, mask: str, dtype: Any) -> None:
    query, key = (x.reshape(2, 2, 300, 8) for x in draw(300, 300, 8, dtype, heads=4))
    for sink in (None, np.array([0.5, -np.inf])):
        check(attention(query, key, mask=MASKS[mask], sink=sink), **TOLERANCE[dtype])


@pytest.mark.parametrize(
    "mask",
    [
        document(RNG.integers(0, 3, 330), query_ids=RNG.integers(0, 3, 700)),
        document(RNG.integers(0, 3, (2, 330)), query_ids=RNG.integers(0, 3, (2, 700))),
        dense(RNG.random((2, 2, 700, 330)) < 0.5),
        # The heads differ in the last rows alone.
        dense((RNG.random((700, 330)) < 0.5) & (np.arange(700) < np.array([600, 700])[:, None])[:, :, None]),
        causal(LR) & padding([200, 330]),
    ],
    ids=["documents", "documents by batch", "by head", "by head in some rows", "regular"],
)
def test_a_mask_that_is_described_a_few_rows_at_a_time(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_pass, "MAX_TILE_BYTES", 3000)
    query, key = (RNG.normal(size=(2, 2, n, 5)) for n in (700, 330))
    A = attention(query, key, mask=mask)
    check(A, **TOLERANCE[np.float64])
    check(A, known="max and sum", threads=3, **TOLERANCE[np.float64])


def test_an_irregular_mask_takes_no_memory_of_the_size_of_the_matrix() -> None:
    n = 20_000
    query = np.ones((n, 2), np.float32)
    A = attention(query, query, mask=document(np.random.default_rng(1).integers(0, 50, n)))
    tracemalloc.start()
    try:
        assert (A.entropy() > 0).all()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.8 * n * n / 8, "a bit for each entry"


def test_rows_out_of_order_grouped_heads_and_layouts(instruction_set: str) -> None:
    query, key = draw(300, 300, 8, np.float32, heads=4)
    A = attention(query[None], key[None, :2, ::-1], mask=causal(), enable_gqa=True)
    check(A, **TOLERANCE[np.float32])
    check(A.lazy[0, 1:3, [270, 3, 200, 77, 299], :], **TOLERANCE[np.float32])
    check(
        attention(query.transpose(0, 2, 1)[:, :, :200], key.transpose(0, 2, 1)[:, :, 100:]),
        **TOLERANCE[np.float32],
    )


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_results_do_not_depend_on_the_number_of_threads(instruction_set: str, threads: int) -> None:
    query, key = draw(2000, 700, 16, np.float32)
    problem = attention(query, key, mask=sliding_window(left=400, right=100, align="upper_left")).problem
    accumulators = list_accumulators(2, 2000, 700)
    first_result, again = (
        accumulate(problem, query, key, accumulators, None, None, count) for count in (1, threads)
    )
    for x, y in zip(first_result[0], again[0], strict=True):
        for a, b in zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]:
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first_result[2], again[2])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_numbers_do_not_matter_and_live_ones_reach_their_rows(
    instruction_set: str, value: float
) -> None:
    query, key = draw(100, 130, 4, np.float32)
    mask = ~first(1) & (causal(LR) & sliding_window(90, align=LR))
    clean = attention(query, key, mask=mask)
    key[:, 0] = value
    poisoned = attention(query, key, mask=mask)
    accumulators = list_accumulators(2, 100, 130)
    clean_result, result = (
        accumulate(A.problem, query, A.problem.key, accumulators, None, None, 1) for A in (clean, poisoned)
    )
    for x, y in zip(clean_result[0], result[0], strict=True):
        for a, b in zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]:
            np.testing.assert_array_equal(a, b)
    key[:, 60] = np.nan
    result = accumulate(poisoned.problem, query, key, accumulators, None, None, 1)
    sees = mask.to_dense(100, 130)[:, 60]
    for accumulator, found in zip(accumulators, result[0], strict=True):
        if accumulator in (RowSum("one"), RowSum("surprisal"), RowSum("position"), RowMaxScore()):
            np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(sees, (2, 100)))
        if isinstance(accumulator, RowTopK):
            np.testing.assert_array_equal(np.isnan(found[0][..., 0]), np.broadcast_to(sees, (2, 100)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_exponentials_are_within_two_ulps(instruction_set: str, dtype: Any) -> None:
    lowest = -104.5 if dtype == np.float32 else -746.0
    near = -np.logspace(-30, 0, 20_001)
    x = np.concatenate([np.linspace(lowest, 0, 400_001), near, [0.0, -0.0, lowest, -1e30, -np.inf]]).astype(
        dtype
    )
    y = np.empty_like(x)
    library = load_library()
    number = INSTRUCTION_SETS.index(instruction_set)
    assert library.regard_exp(number, dtype == np.float64, x.ctypes.data, y.ctypes.data, len(x)) == 0
    exact = np.exp(x.astype(np.longdouble))
    ulp = np.spacing(np.maximum(exact.astype(dtype), np.finfo(dtype).smallest_subnormal))
    errors = np.abs(y - exact) / ulp
    print(f"{instruction_set} {np.dtype(dtype).name}: {errors.max():.3f} ulp")
    assert errors.max() <= 2
    assert (y[-5:] == [1, 1, 0, 0, 0]).all() and (y <= 1).all()
    nan = np.full(3, np.nan, dtype)
    library.regard_exp(number, dtype == np.float64, nan.ctypes.data, nan.ctypes.data, 3)
    assert np.isnan(nan).all()


@pytest.mark.parametrize("rows, kv_len", [(200, 17), (257, 90), (1000, 90)])
def test_the_sum_of_a_cell_is_within_four_ulps(instruction_set: str, rows: int, kv_len: int) -> None:
    query, key, cells = np.zeros((1, rows, 2)), np.zeros((1, kv_len, 2)), (4, 4)
    A = attention(query, key)
    found = accumulate(A.problem, query, key, [CellReduction(cells, "sum")], None, None, 1)[0][0][0]
    cell_rows, cell_columns = (np.arange(n) * 4 // n for n in (rows, kv_len))
    for i, j in np.ndindex(*cells):
        exact = math.fsum(A.to_dense()[0][np.ix_(cell_rows == i, cell_columns == j)].ravel())
        assert abs(found[i, j] - exact) <= 4 * np.spacing(exact)


def test_ties_go_to_the_lowest_index(instruction_set: str) -> None:
    query, key = np.zeros((1, 70, 2), np.float32), np.zeros((1, 150, 2), np.float32)
    problem = attention(query, key, mask=~first(3)).problem
    found = accumulate(problem, query, key, [RowTopK(5)], None, None, 1)
    np.testing.assert_array_equal(found[0][0][1], np.broadcast_to(np.arange(3, 8), (1, 70, 5)))


def test_an_instruction_set_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction set 'AVX-1024'"), use_instruction_set("AVX-1024"):
        pass


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_an_empty_axis(shape: tuple[int, int, int]) -> None:
    pairs, rows, kv_len = shape
    query, key = np.zeros((pairs, rows, 4)), np.zeros((pairs, kv_len, 4))
    problem = attention(query, key).problem
    accumulated, largest, total = accumulate(problem, query, key, [RowSum("one"), ColumnSum()], None, None, 2)
    assert [x.shape for x in accumulated] == [(pairs, rows), (pairs, kv_len)]
    assert (largest == -np.inf).all() and (total == 0).all()


def test_no_thread_count_changes_while_the_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 1500, 32, generator=generator)
    before = torch.get_num_threads()
    setters = [(torch, "set_num_threads"), (torch, "set_num_interop_threads")]
    for module, name in setters:
        monkeypatch.setattr(module, name, lambda count: pytest.fail("a thread count was changed"))
    seen: set[int] = set()
    stop = threading.Event()

    def observe() -> None:
        while not stop.is_set():
            seen.add(torch.get_num_threads())

    observer = threading.Thread(target=observe)
    observer.start()
    environment = dict(os.environ)
    try:
        for _ in range(3):
            A = attention(query, key)
            assert "compiled pass" in A.plan(regard.Received())
            A.measure(regard.Received(), regard.TopK(8))
    finally:
        stop.set()
        observer.join()
    assert seen == {before} and torch.get_num_threads() == before
    assert dict(os.environ) == environment


def test_the_pass_runs_in_threads_of_its_own_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = draw(3000, 600, 8, np.float32)
    problem = attention(query, key).problem
    started: list[Any] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread))[1])
    accumulate(problem, query, key, [ColumnSum()], None, None, 3)
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)
    assert all(thread.daemon for thread in started), "a process must be able to end while the pass runs"
    accumulate(problem, query, key, [ColumnSum()], None, None, 1)
    assert len(started) == 2


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_matrix_gets_its_measures_from_the_pass(library: str) -> None:
    query, key = convert_to(library, *draw(200, 150, 8, np.float32))
    lens = pytest.importorskip("regard.lens.weight_measures", exc_type=ImportError)  # needs torch
    bands = lens.DistanceBands([(-5, 0), (-1, 1)])
    measures = [regard.Entropy(), regard.Received(), regard.TopK(3), bands]
    with use_instruction_set(None):
        before = attention(query, key)
        expected = before.measure(*measures)
    A = attention(query, key)
    plan = A.plan(*measures)
    assert "compiled pass" in plan and plan.endswith("entropy, received, topk, distance_bands")
    B = attention(query, key)
    found = [
        A.measure(*measures),
        [A.measure(each)[0] for each in measures],  # with the statistics of the pass before
        [B.measure(each)[0] for each in measures[::-1]][::-1],
        before.measure(*measures),  # the block loop rounds its statistics in another way
    ]
    for results in found:
        for result, right, first_result in zip(results, expected, found[0], strict=True):
            for part, right_part, first_part in zip(
                *map(as_parts, (result, right, first_result)), strict=True
            ):
                np.testing.assert_allclose(part, right_part, rtol=3e-5, atol=2e-6)
                np.testing.assert_array_equal(part, first_part)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_engine_passes_known_statistics_on(library: str) -> None:
    problem = attention(*convert_to(library, *draw(200, 150, 8, np.float32))).problem
    accumulators = [RowSum("surprisal"), ColumnSum()]
    found = problem.engine.accumulate(problem, accumulators, None, None)
    again = problem.engine.accumulate(problem, accumulators, *found[1:])
    for part, expected in zip(again[1:], found[1:], strict=True):
        np.testing.assert_array_equal(part, expected)
    for part, expected in zip(again[0], found[0], strict=True):  # without them, exponentials are kept
        np.testing.assert_allclose(part, expected, rtol=1e-6)


def convert_to(library: str, *arrays: Any) -> Any:
    """Convert NumPy arrays to those of a library."""
    return arrays if library == "numpy" else map(pytest.importorskip("torch").from_numpy, arrays)


def as_parts(result: Any) -> tuple[Any, ...]:
    """Return the arrays of a result."""
    return tuple(result) if isinstance(result, tuple) else (result,)


def test_a_failure_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = draw(3000, 600, 8, np.float32)
    library = load_library()
    monkeypatch.setattr(library, "regard_run", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory for a block of rows"):
        accumulate(attention(query, key).problem, query, key, [ColumnSum()], None, None, 3)


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "hash_sources", lambda: "another")
    assert library_module.load_library.__wrapped__() is None
    monkeypatch.setattr(library_module, "LIBRARY_FILE", library_module.SOURCE_FOLDER / "measures.c")
    assert library_module.load_library.__wrapped__() is None, "not a library at all"


READ_ENTROPY = """
import sys
from pathlib import Path
import numpy as np
from regard.engines.native import library
library.LIBRARY_FILE = Path(sys.argv[1])
import regard
A = regard.attention(np.zeros((170, 8)), np.zeros((170, 8)))
print(A.entropy().round(9).tolist() == [round(np.log(170), 9)] * 170, A.plan(regard.Entropy()).split(",")[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse truncated libraries")
@pytest.mark.parametrize("share", [0.0, 0.00003, 0.0002, 0.02, 0.5, 0.9, 0.9999, 1.0])
def test_a_truncated_library_is_not_loaded(tmp_path, share):
    whole = library_module.LIBRARY_FILE.read_bytes()
    file = tmp_path / library_module.LIBRARY_FILE.name
    file.write_bytes(whole[: int(len(whole) * share)])
    done = subprocess.run([sys.executable, "-c", READ_ENTROPY, str(file)], capture_output=True, text=True)
    kernel = f"compiled pass ({list_instruction_sets()[-1]})" if share == 1 else "block loop"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"True numpy: {kernel}\n"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_scan_finds_nan_inf_and_an_lse_of_zero_at_any_place(dtype):
    largest, smallest = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal

    def scan(numbers, lse):
        addresses = numbers.ctypes.data, len(numbers), lse.ctypes.data, len(lse)
        return load_library().regard_is_sound(dtype is np.float64, *addresses)

    for count in (0, 1, 7, 512):
        numbers, lse = np.full(count, largest, dtype), np.full(count, smallest, dtype)
        assert scan(numbers, lse)
        for place in range(count):
            for poison in (np.nan, np.inf, -np.inf):
                numbers[place] = poison
                assert not scan(numbers, lse)
            numbers[place] = -largest
            for zero in (0.0, -0.0):
                lse[place] = zero
                assert not scan(numbers, lse)
            lse[place] = -smallest


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_query_gets_a_nan_only_in_the_column_of_its_value(poison):
    torch = pytest.importorskip("torch")
    query, key, value = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    A = attention(query, key)
    clean = A @ value
    assert A.kernel == "torch: flash on CPU, no mask"
    value[0, 1, 50, 3] = poison
    found = A @ value
    assert "block loop" in A.kernel
    assert not found[0, 1, 0, 3].isfinite()
    found[0, 1, 0, 3] = clean[0, 1, 0, 3]
    torch.testing.assert_close(found, clean)


PRODUCT_SHAPES = [(65, 70, 3, 17), (130, 300, 17, 3)]


def measures_of(kv_len: int) -> dict[str, Any]:
    return {
        "entropy": regard.Entropy(), "received": regard.Received(), "distance": regard.Distance(LR),
        "spread": regard.Spread(LR), "coarse": regard.Coarse((5, 4), "mean"), "score": MaxScore(),
        "few": regard.TopK(3), "many": regard.TopK(min(kv_len, 60)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, kv_len, dim, width", PRODUCT_SHAPES)
def test_an_output_and_measures_in_one_pass_equal_their_definitions(
    instruction_set: str, rows: int, kv_len: int, dim: int, width: int, dtype: Any
) -> None:
    rng = np.random.default_rng(rows)
    query = rng.normal(size=(2, 4, rows, 2 * dim)).astype(dtype)[..., ::2]
    key, value = (rng.normal(size=(2, 2, kv_len, n)).astype(dtype) for n in (dim, width))
    masks = {
        "none": None, "causal": causal(LR), "lengths": padding([kv_len // 2, kv_len]),
        "random": dense(rng.random((rows, kv_len)) < 0.3), "rows empty": dense((np.arange(rows) % 3 > 0)[:, None]),
    }  # fmt: skip
    for name, mask in masks.items():
        for sink in (None, np.array([0.5, -np.inf, 20, -3])):
            A = attention(query, key, mask=mask, sink=sink, enable_gqa=True)
            measures = measures_of(kv_len)
            kernel = f"numpy: compiled pass ({instruction_set})"
            assert A.plan(output=regard.Output(value), **measures).startswith(f"{kernel}, one pass: output, ")
            found = A.measure(output=regard.Output(value), **measures)
            assert A.kernel == kernel
            wide = [np.asarray(x, np.float64) for x in (query, key, value)]
            with use_instruction_set(None):
                exact = attention(*wide[:2], mask=mask, sink=sink, enable_gqa=True)
                expected = exact.measure(output=regard.Output(wide[2]), **measures)
            is_float32 = dtype == np.float32
            np.testing.assert_allclose(A.lse, exact.lse, rtol=3e-6 if is_float32 else 1e-13, atol=1e-6)
            for field, part, right in zip(found._fields, found, expected, strict=True):
                part, right = (x[0] if isinstance(x, tuple) else x for x in (part, right))
                size = np.abs(right, where=np.isfinite(right), out=np.ones(right.shape)).max()
                limit = (
                    (1e-3 if field == "spread" else 3e-5) if is_float32 else 1e-10
                )  # a root of a small variance
                np.testing.assert_allclose(
                    part, right, rtol=limit, atol=limit * size, err_msg=f"{name} {field}"
                )


@pytest.mark.parametrize("threads", [2, 5])
def test_an_output_does_not_depend_on_the_number_of_threads(instruction_set: str, threads: int) -> None:
    query, key = draw(600, 500, 24, np.float32)
    problem, accumulators = attention(query, key, mask=causal(LR)).problem, list_accumulators(2, 600, 500)
    first_found, found = (
        multiply(problem, query, key, key, np.arange(2), accumulators, n) for n in (1, threads)
    )
    for part, other in zip(as_leaves(first_found), as_leaves(found), strict=True):
        np.testing.assert_array_equal(part, other)


def as_leaves(result: Any) -> list[Any]:
    return [leaf for x in result for leaf in as_leaves(x)] if isinstance(result, tuple | list) else [result]


@pytest.mark.parametrize("place", ["query", "key", "value", "masked key", "masked value"])
def test_nan_reaches_the_rows_of_an_output_that_depend_on_it(instruction_set: str, place: str) -> None:
    query, key = draw(80, 90, 8, np.float32)
    value = key[..., :5].copy()
    array = {"query": query, "key": key, "value": value}[place.split()[-1]]
    array[1, -1 if "masked" in place else 3, 2] = np.nan
    A = attention(query, key, mask=padding(89))
    found = A.measure(regard.Output(value), regard.Received())
    with use_instruction_set(None):
        expected = attention(query, key, mask=padding(89)).measure(regard.Output(value), regard.Received())
    for part, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(part, right, rtol=3e-5, atol=2e-6)
    if "masked" in place:
        assert np.isfinite(found.output).all()


@pytest.mark.parametrize("k", [33, 100, 257])
@pytest.mark.parametrize("kind", ["random", "ties", "rising", "falling", "NaN"])
def test_many_largest_weights(instruction_set: str, kind: str, k: int) -> None:
    query, key = draw(70, 257, 5, np.float32)
    if kind == "ties":
        key = np.repeat(key[:, :37], 7, axis=1)[:, :257]
    elif kind in ("rising", "falling"):
        query, key = abs(query), np.sort(key, axis=1)[:, :: 1 if kind == "rising" else -1].copy()
    elif kind == "NaN":
        key[0, 5], query[1, 7] = np.nan, np.nan
    mask = causal(LR) if kind == "NaN" else None
    A = attention(query, key, mask=mask)
    assert "compiled pass" in A.plan(regard.TopK(k))
    values, indices = A.topk(k)
    with use_instruction_set(None):
        B = attention(query, key, mask=mask)
        expected, weights = B.topk(k).values, B.to_dense()
    np.testing.assert_allclose(values, expected, rtol=3e-5, atol=2e-6)
    np.testing.assert_allclose(np.take_along_axis(weights, indices, -1), values, rtol=3e-5, atol=2e-6)
    tied = (values[..., 1:] == values[..., :-1]) & (values[..., 1:] > 0)
    assert (np.diff(indices)[tied] > 0).all()
    assert all(len(set(row)) == k for row in indices.reshape(-1, k).tolist())
