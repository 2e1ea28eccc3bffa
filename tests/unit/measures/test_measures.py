"""Measures: formulas on the dense matrix, published definitions, custom measures, arguments and names."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import regard
from regard import Coarse, Distance, Entropy, Mass, Measure, Position, Received, Spread, TopK, causal
from regard.engines import native
from regard.masks import first
from regard.measures import MaxWeight, Sum, TopKResult
from regard.measures.base import get_result_name
from regard.tiling import use_tile_sizes

HEADS, HEAD_DIM = 3, 5
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    """Small tiles, no length a multiple of them."""
    with use_tile_sizes(rows=4, columns=6, entries=30):
        yield


def matrix(
    q_len: int = 11, kv_len: int = 17, lead: Any = (2, HEADS), **arguments: Any
) -> regard.AttentionMatrix:
    rng = np.random.default_rng(q_len * 100 + kv_len)
    query, key = (rng.normal(size=(*lead, n, HEAD_DIM)) for n in (q_len, kv_len))
    return regard.attention(query, key, **arguments)


def uniform(n: int, **arguments: Any) -> regard.AttentionMatrix:
    return regard.attention(np.zeros((n, HEAD_DIM)), np.zeros((n, HEAD_DIM)), **arguments)


LR = "lower_right"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal(LR)},
    "a band with empty tiles and rows": {"mask": regard.sliding_window(left=1, right=1, align="upper_left")},
    "batch entries that differ": {"mask": causal(LR) & regard.padding([13, 0])},
    "heads that differ": {"mask": regard.sliding_window([1, 4, 30], align=LR)},
    "everything masked": {"mask": first(0)},
    "sink": {"sink": np.array([-1.0, 0.0, 3.0]), "mask": causal(LR)},
    "cold": {"scale": 40.0},
}
SHAPES = [(11, 17), (17, 11), (1, 17), (17, 1), (13, 13)]


def formulas(W: Any, mask: Any) -> dict[str, Any]:
    """Compute each measure from dense weights."""
    q_len, kv_len = W.shape[-2:]
    at, keys = np.arange(q_len)[:, None], np.arange(kv_len)
    P = W / np.where(W.sum(-1) == 0, 1, W.sum(-1))[..., None]  # without the share of a sink
    mean = (P * keys).sum(-1)
    variance = (P * (keys - mean[..., None]) ** 2).sum(-1)
    order = np.argsort(-W, axis=-1, kind="stable")[..., : min(7, kv_len)]
    return {
        "entropy": -(P * np.log(np.where(P > 0, P, 1))).sum(-1),
        "received": W.sum(-2),
        "sum": W.sum(-1),
        "distance": (P * np.abs(keys - at - (kv_len - q_len))).sum(-1),
        "upper": (P * np.abs(keys - at)).sum(-1),
        "position": mean,
        "spread": np.sqrt(variance),
        "mass": (W * mask).sum(-1),
        "topk": (np.take_along_axis(W, order, -1), order),
        "max_weight": (W.max(-1), W.argmax(-1)),
        "highest": (W.max(-2), W.argmax(-2)),
    }


@pytest.mark.parametrize("q_len, kv_len", SHAPES)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_each_measure_equals_its_formula(arguments: str, q_len: int, kv_len: int) -> None:
    if arguments == "batch entries that differ" and kv_len < 13:
        arguments = "causal"
    A = matrix(q_len, kv_len, **ARGUMENTS[arguments])
    near = regard.sliding_window(left=2, right=3, align=LR) | first([1, 0])
    expected = formulas(A.to_dense(), near.to_dense(*A.shape))
    found = A.measure(
        Entropy(), Received(), Sum(), Distance(LR), Spread(LR), Mass(near), TopK(min(7, kv_len)), MaxWeight(),
        Position(), upper=Distance("upper_left"), highest=MaxWeight(-2),
    )  # fmt: skip
    assert set(found._fields) == set(expected)
    for name, formula in expected.items():
        result = getattr(found, name)
        for x, y in zip(result, formula, strict=True) if isinstance(formula, tuple) else [(result, formula)]:
            assert x.shape == y.shape, name
            close(x, y, atol=2e-7 if name == "spread" else 1e-12, err_msg=name)
    close(A.entropy(), expected["entropy"], atol=1e-12)
    close(A.distance(LR), expected["distance"], atol=1e-12)
    close(A.mass(near), expected["mass"], atol=1e-12)
    equal(A.topk(1).indices[..., 0], expected["max_weight"][1])


@pytest.mark.parametrize("topk_columns", [6, 18, 4096])
def test_topk_does_not_depend_on_the_order_of_tiles(topk_columns: int) -> None:
    W = np.full((1, 5, 18), 0.01)
    W[0, 1:, 12:] = 0.1  # in rows after the first the largest are in the last tile
    with use_tile_sizes(topk_columns=topk_columns):
        measure = TopK(3).bind(matrix(5, 18).problem)
    expected = np.argsort(-W, axis=-1, kind="stable")[..., :3]
    for order in ([0, 6, 12], [12, 6, 0], [12, 0, 6], [6, 0, 12]):
        state = measure.init(W.shape, np)
        for rows in (np.arange(4), np.arange(4, 5)):
            for start in order:
                tile = W[:, rows[0] : rows[-1] + 1, start : start + 6].copy()
                state = measure.step(state, tile, None, rows, np.arange(start, start + 6), np)
                tile[:] = np.nan  # the memory of a tile is reused
        top = measure.finish(state)
        equal(top.indices, expected)
        equal(top.values, np.take_along_axis(W, expected, -1))


@use_tile_sizes(topk_columns=6)
def test_a_nan_in_a_late_tile_is_found() -> None:
    query, key = np.ones((4, 2)), np.ones((17, 2))
    query[3] = np.nan
    allowed = np.repeat([[True], [False]], [3, 1], axis=0) == (np.arange(17) < 12)
    top = regard.attention(query, key, mask=regard.masks.dense(allowed)).topk(2)
    equal(top.indices, [[0, 1]] * 3 + [[12, 13]])
    equal(np.isnan(top.values), np.arange(4)[:, None] == [[3, 3]])


@pytest.mark.parametrize("k", [128, 512])
def test_topk_takes_memory_for_its_result_not_for_its_square(k: int) -> None:
    query = np.random.default_rng(3).normal(size=(512, 4)).astype(np.float32)
    A = regard.attention(query, query, mask=causal())
    tracemalloc.start()
    try:
        top = A.topk(k)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    equal(top.indices[0], np.arange(k))  # zeros, masked keys among them, in the order of the keys
    equal(np.sort(top.indices[k - 1]), np.arange(k))
    assert peak < 8 * (top.values.nbytes + top.indices.nbytes)


# Published definitions


@pytest.mark.parametrize("n", [1, 2, 7, 31])
def test_uniform_attention(n: int) -> None:
    A = uniform(n)
    close(A.entropy(), np.full(n, math.log(n)), atol=1e-15)
    close(A.sum(-2), np.ones(n))
    close(A.measure(Spread()).spread, np.full(n, math.sqrt((n**2 - 1) / 12)))
    i = np.arange(n)
    close(A.distance(), (i * (i + 1) / 2 + (n - 1 - i) * (n - i) / 2) / n)
    close(A.max(-1), np.full(n, 1 / n))
    equal(A.argmax(-1), 0)
    equal(A.topk(n).indices, np.broadcast_to(i, (n, n)))


def test_uniform_causal_attention() -> None:
    n = 13
    A = uniform(n, mask=causal())
    i = np.arange(n)
    close(A.entropy(), np.log(i + 1))
    close(A.distance(), i / 2)
    close(A.mass(first(1)), 1 / (i + 1))
    close(A.sum(-2), [sum(1 / (q + 1) for q in range(j, n)) for j in range(n)])


def test_a_row_with_one_key() -> None:
    n = 13
    A = uniform(n, mask=regard.sliding_window(1))
    for result in (A.entropy(), A.distance(), A.measure(Spread()).spread):
        equal(result, np.zeros(n))
    equal(A.mass(causal()), np.ones(n))
    equal(A.argmax(-1), np.arange(n))


def test_a_sink_takes_its_share_and_leaves_means_over_the_keys() -> None:
    A = uniform(7, sink=math.log(7))  # half of every row
    close(A.sum(-1), np.full(7, 0.5))
    close(A.mass(first(7)), np.full(7, 0.5))
    close(A.entropy(), np.full(7, math.log(7)))
    close(A.entropy(include_sink=True), np.full(7, -7 * (1 / 14) * math.log(1 / 14) - 0.5 * math.log(0.5)))
    close(A.measure(Position()).position, np.full(7, 3.0))
    close(A.distance(), uniform(7).distance())
    close(A.measure(Spread()).spread, np.full(7, 2.0))


COMPILED = ["numpy, compiled", "torch, compiled"] if native.list_instruction_sets() else []  # if it is built
ENGINES_OF_SINKS = ["numpy", "torch", "torch, gradients", *COMPILED]


@pytest.mark.parametrize("engine", ENGINES_OF_SINKS)
@pytest.mark.parametrize("share", [-math.inf, -8.0, 0.0, 4.0, 60.0])
@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
def test_means_over_the_keys_do_not_depend_on_a_sink(mask: str, share: float, engine: str) -> None:
    rng, length = np.random.default_rng(8), 13
    query, key = rng.normal(size=(2, 3, length, 6)), rng.normal(size=(2, 3, length, 6))
    documents = regard.masks.document(np.arange(length) // 5)
    masks = {"none": None, "causal": causal() & ~first(1), "documents": documents}
    sink = np.array([share, -1.0, 2.0])
    if engine.startswith("torch"):
        torch = pytest.importorskip("torch")
        query, key, sink = (torch.tensor(x).requires_grad_("gradients" in engine) for x in (query, key, sink))
    measures = {"entropy": Entropy(), "distance": Distance(), "position": Position(), "spread": Spread()}
    with native.use_instruction_set(native.list_instruction_sets()[-1] if "compiled" in engine else None):
        A = regard.attention(query, key, mask=masks[mask], sink=sink)
        together = A.measure(**measures)._asdict()
        apart = {name: A.measure(own=measure).own for name, measure in measures.items()}
        part = A[1].lazy[:, 5:11].measure(**measures)._asdict()
        W, include = A.to_dense(), A.entropy(include_sink=True)
        distance = A.distance() * A.sum(-1)
    if engine.startswith("torch"):
        query, key, sink, W, include, distance = (
            x.detach().numpy() for x in (query, key, sink, W, include, distance)
        )
        together, apart, part = (
            {name: x.detach().numpy() for name, x in own.items()} for own in (together, apart, part)
        )
    keys_only = formulas(regard.attention(query, key, mask=masks[mask]).to_dense(), np.ones((length, length)))
    for name in measures:
        for found in (together[name], apart[name]):
            close(found, keys_only[name], atol=2e-7 if name == "spread" else 1e-10, err_msg=name)
        close(part[name], keys_only[name][1, :, 5:11], atol=2e-7 if name == "spread" else 1e-10, err_msg=name)
    everything = np.concatenate([W, np.clip(1 - W.sum(-1, keepdims=True), 0, None)], -1)
    everything[W.sum(-1) == 0] = 0 if mask == "none" else everything[W.sum(-1) == 0]
    close(include, -(everything * np.log(np.where(everything > 0, everything, 1))).sum(-1), atol=1e-10)
    at = np.arange(length)
    close(distance, (W * np.abs(at[:, None] - at)).sum(-1), atol=1e-10)


@pytest.mark.parametrize("score", [40.0, 80.0, 95.0, 103.0, 1e4])
def test_a_sink_that_takes_everything_leaves_finite_numbers_and_gradients(score: float) -> None:
    torch = pytest.importorskip("torch")
    for measure in (Entropy(), Entropy(include_sink=True), Distance(), Position(), Spread()):
        query = torch.randn(1, 1, 30, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        found = regard.attention(query, query, sink=score).measure(own=measure).own
        assert found.isfinite().all() and (found >= 0).all()
        (gradient,) = torch.autograd.grad(found.sum(), query)
        assert gradient.isfinite().all()


def test_float32_weights_of_many_queries_add_up() -> None:
    A = regard.attention(np.zeros((4000, 1), np.float32), np.zeros((3, 1), np.float32))
    # One tile; NumPy adds the rows of an array one after the other.
    with use_tile_sizes(rows=4000, columns=3, entries=12_000), native.use_instruction_set(None):
        close(A.measure(Received()).received, 4000 / 3, rtol=2 * np.finfo(np.float32).eps)


def test_spread_does_not_cancel_far_from_the_start() -> None:
    n, width = 16_411, 3
    A = regard.attention(
        np.zeros((1, 2), np.float32),
        np.zeros((n, 2), np.float32),
        mask=regard.sliding_window(width, align=LR),
    )
    assert A.dtype == np.float32
    close(A.measure(Spread(LR)).spread, [math.sqrt((width**2 - 1) / 12)], rtol=1e-6)


def test_an_empty_row_measures_zero_and_never_nan() -> None:
    A = matrix(mask=regard.padding([0, 17]))
    found = A.measure(
        Entropy(), Received(), Distance(LR), Spread(LR), Mass(first(3)), TopK(3), Coarse(5, "mean")
    )
    for result in found:
        for array in result if isinstance(result, tuple) else [result]:
            assert np.isfinite(array).all()
            if array.dtype == float:
                assert not array[0].any() and array[1].all()
    equal(found.topk.indices[0], np.broadcast_to([0, 1, 2], (HEADS, 11, 3)))


def test_a_live_nan_is_the_largest_and_shows_in_its_row_only() -> None:
    query, key = np.ones((7, 2)), np.ones((11, 2))
    query[3] = np.nan
    A = regard.attention(query, key, mask=regard.padding(5, side="left"))
    for result in (A.entropy()[..., None], A.topk(2).values, A.max(-1)[..., None], A.sum(-1)[..., None]):
        equal(np.isnan(result).all(-1), np.arange(7) == 3)
        equal(np.isnan(result).any(-1), np.arange(7) == 3)
    equal(A.argmax(-1), np.full(7, 6))
    equal(A.topk(2).indices, np.broadcast_to([6, 7], (7, 2)))
    equal(np.isnan(A.sum(-2)), np.arange(11) >= 6)
    late, early = (TopKResult(np.array([np.nan]), np.array([j])) for j in (8, 6))
    equal([MaxWeight().merge(*pair).indices for pair in ((late, early), (early, late))], [[6], [6]])


# Coarse


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize(
    "q_len, kv_len, cells", [(11, 17, 3), (17, 11, 5), (13, 13, 13), (29, 31, 7), (7, 19, 1)]
)
@pytest.mark.parametrize("arguments", ["plain", "causal", "a band with empty tiles and rows"])
def test_coarse_cells(arguments: str, q_len: int, kv_len: int, cells: int, reduce: str) -> None:
    A = matrix(q_len, kv_len, **ARGUMENTS[arguments])
    W = A.to_dense()
    found = A.coarsen(cells, reduce)
    assert found.shape == (2, HEADS, cells, cells)
    for a in range(cells):
        for b in range(cells):
            rows = [i for i in range(q_len) if i * cells // q_len == a]
            columns = [j for j in range(kv_len) if j * cells // kv_len == b]
            cell = W[..., rows, :][..., columns]
            close(found[..., a, b], getattr(cell, reduce)((-2, -1)), atol=1e-14)


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("cells", [(2, 5), (7, 3), (1, 17), (11, 1)], ids=str)
def test_coarse_cells_of_any_shape(cells: tuple[int, int], reduce: str) -> None:
    A = matrix(11, 17, mask=causal(LR))
    W, found = A.to_dense(), A.coarsen(cells, reduce)
    rows, columns = (np.arange(n) * count // n for n, count in zip((11, 17), cells, strict=True))
    assert found.shape == (2, HEADS, *cells)
    for a, b in np.ndindex(cells):
        cell = W[..., rows == a, :][..., columns == b]
        close(found[..., a, b], getattr(cell, reduce)((-2, -1)), atol=1e-14)


def test_coarse_defaults_to_the_maximum_and_is_the_matrix_at_full_size() -> None:
    A = matrix(13, 13, mask=causal())
    equal(A.coarsen(5), A.coarsen(5, "max"))
    close(A.coarsen(5, reduce="sum").sum((-2, -1)), A.sum(-1).sum(-1))
    for reduce in ("mean", "max", "sum"):
        close(A.coarsen(13, reduce), A.to_dense(), atol=1e-15)


@pytest.mark.parametrize(
    "cells, expected",
    [
        (12, "cells from 1 to 11"),
        ((5, 18), "cells of columns from 1 to 17"),
        ((12, 5), "cells of rows from 1 to 11"),
    ],
)
def test_no_more_cells_than_rows_and_columns(cells: Any, expected: str) -> None:
    with pytest.raises(regard.ArgumentError, match=expected):
        matrix().coarsen(cells)


def test_no_more_keys_than_there_are() -> None:
    with pytest.raises(regard.ArgumentError, match="k from 1 to 17"):
        matrix().topk(18)


INVALID: dict[str, tuple[Any, str]] = {
    "no cell": (lambda: Coarse(0), "coarsen: received cells=0; expected cells of 1 or more"),
    "cells below 0": (lambda: Coarse(-1, "sum"), "cells=-1"),
    "a part of a cell": (lambda: Coarse(2.5), "cells=2.5"),
    "no column of cells": (lambda: Coarse((3, 0)), "cells of columns=0"),
    "three cells": (lambda: Coarse((1, 2, 3)), r"cells=\(1, 2, 3\)"),
    "the median": (lambda: Coarse(5, "median"), 'reduce=\'median\'; expected "mean", "max" or "sum"'),
    "top 0": (lambda: TopK(0), "topk: received k=0; expected k of 1 or more"),
    "top -1": (lambda: TopK(-1), "k=-1"),
    "top True": (lambda: TopK(True), "k=True"),
    "top 2.5": (lambda: TopK(2.5), "k=2.5"),
    "sum over heads": (lambda: Sum(0), "sum: received axis=0; expected axis=-1"),
    "sum over both": (lambda: Sum(None), "axis=None"),
    "received over the keys": (lambda: Received(-1), "received: received axis=-1; expected no argument"),
    "received over True": (lambda: Received(True), "axis=True"),
    "largest over heads": (lambda: MaxWeight(1), "max_weight: received axis=1; expected axis=-1"),
    "no corner": (lambda: Distance("upper"), "distance: received align='upper'"),
    "no corner of a spread": (lambda: Spread("upper"), "spread: received align='upper'"),
    "no mask": (lambda: Mass(first), "mass: received the function first; expected a mask"),
}


@pytest.mark.parametrize("name", INVALID)
def test_arguments_are_validated_at_once(name: str) -> None:
    make, message = INVALID[name]
    with pytest.raises((regard.ArgumentError, regard.ArgumentTypeError), match=message):
        make()


REPRS: dict[str, Measure] = {
    "Entropy()": Entropy(),
    "Received()": Received(),
    "Sum()": Sum(),
    "Sum(axis=-2)": Sum(-2),
    "Distance()": Distance(),
    "Distance(align='lower_right')": Distance(LR),
    "Spread()": Spread(),
    "Position()": Position(),
    "Mass(mask=causal() & first(3))": Mass(causal() & first(3)),
    "TopK(k=3)": TopK(3),
    "MaxWeight()": MaxWeight(),
    "Coarse(cells=5)": Coarse(5),
    "Coarse(cells=(2, 3), reduce='mean')": Coarse((2, 3), "mean"),
}


@pytest.mark.parametrize("text", REPRS)
def test_reprs_show_the_arguments_and_no_bound_state(text: str) -> None:
    measure, A = REPRS[text], matrix(13, 13)
    assert repr(measure) == repr(measure.bind(A.problem)) == text
    assert measure.bind(A.problem) == measure and hash(measure) == hash(measure.bind(A.problem))


def test_the_repr_of_an_output_is_short() -> None:
    assert repr(regard.Output(np.zeros((7, 3)))) == "Output(<value of shape (7, 3)>)"


def test_distance_needs_align_if_lengths_differ() -> None:
    for call in (lambda: matrix().distance(), lambda: matrix().measure(Spread())):
        with pytest.raises(regard.ArgumentError, match="align"):
            call()


# Custom measures


class EvenShare(Measure):
    """The share of each row on even keys."""

    def init(self, shape: Any, xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Any, scores: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        state[:, q_idx] += xp.sum(weights * (kv_idx % 2 == 0), axis=-1)
        return state


class Hottest(Measure):
    """The largest score of each head."""

    def init(self, shape: Any, xp: Any) -> Any:
        return xp.full(shape[:1], -xp.inf)

    def step(self, state: Any, weights: Any, scores: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        return self.merge(state, xp.max(scores, axis=(-2, -1)))

    def merge(self, a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def finish(self, state: Any) -> Any:
        return {"degrees": state}["degrees"]


@pytest.mark.parametrize("lead", [(), (HEADS,), (2, HEADS)])
def test_custom_measures(lead: Any) -> None:
    A = matrix(lead=lead, mask=causal(LR))
    found = A.measure(EvenShare(), Hottest(), Entropy())
    assert found._fields == ("even_share", "hottest", "entropy")
    close(found.even_share, A.to_dense()[..., ::2].sum(-1), atol=1e-14)
    close(found.hottest, A.scores[...].max((-2, -1)))
    assert found.hottest.shape == lead
    a, b = (A.measure(EvenShare()).even_share for _ in range(2))
    equal(EvenShare().merge(a, b), 2 * a)


def test_weights_are_final_when_a_measure_gets_them() -> None:
    tiles = []

    class Watching(EvenShare):
        def step(self, state: Any, weights: Any, scores: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
            assert weights.shape == scores.shape == (len(weights), len(q_idx), len(kv_idx))
            tiles.append((q_idx.tolist(), kv_idx.tolist(), weights.copy()))
            return state

    A = matrix(lead=())
    A.measure(Watching())
    whole = np.full((11, 17), np.nan)
    for rows, columns, weights in tiles:
        assert np.isnan(whole[np.ix_(rows, columns)]).all(), "each tile comes once"
        whole[np.ix_(rows, columns)] = weights[0]
    equal(whole, A.to_dense())


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_mean_over_keys_without_weight_is_zero(library: str) -> None:
    convert = np.asarray if library == "numpy" else pytest.importorskip("torch").as_tensor
    zeros = convert(np.zeros((3, 2), np.float32))
    A = regard.attention(zeros, zeros, sink=convert(np.float32(90)))  # the weights are subnormal numbers
    assert (A.to_dense() > 0).all()
    found = A.measure(Distance(), Entropy(), regard.Position())
    for name, result in found._asdict().items():
        equal(A.problem.engine.to_numpy(result), np.zeros(3), err_msg=name)


@pytest.mark.parametrize("methods", [("init", "step"), ("init", "step", "merge", "finish")])
def test_an_object_that_is_no_measure_is_refused(methods: tuple[str, ...]) -> None:
    parts = {name: getattr(Hottest, name) for name in methods}
    for wrong in (type("Similar", (), parts)(), "entropy"):
        with pytest.raises(regard.ArgumentTypeError, match=r"subclass regard\.measures\.Measure"):
            matrix().measure(wrong)


def test_a_measure_without_step_raises() -> None:
    class Empty(Measure):
        def init(self, shape: Any, xp: Any) -> Any:
            return xp.zeros(shape[:2])

    with pytest.raises(TypeError, match="Empty must define step"):
        matrix().measure(Empty())
    with pytest.raises(TypeError, match="Measure must define init"):
        matrix().measure(Measure())


# Names


def test_results_are_named_after_the_class_or_by_keyword() -> None:
    A = matrix()
    found = A.measure(Entropy(), TopK(2), Mass(first(1)), near=Mass(first(3)), big=TopK(3))
    assert found._fields == ("entropy", "topk", "mass", "near", "big")
    entropy, _, mass, near, big = found
    equal(entropy, found.entropy)
    assert (near > mass).all() and big.values.shape == (2, HEADS, 11, 3)
    assert big._fields == ("values", "indices") and A.topk(3)._fields == ("values", "indices")
    named = [TopK(1), EvenShare(), Received(), type("_XRay", (Entropy,), {})()]
    assert [get_result_name(measure) for measure in named] == ["topk", "even_share", "received", "xray"]
    assert A.measure() == ()


@pytest.mark.parametrize("named", [{}, {"entropy": Entropy()}])
def test_two_results_of_one_name_are_refused(named: Any) -> None:
    twice = [] if named else [Entropy()]
    with pytest.raises(regard.ArgumentError, match="a unique name for each result"):
        matrix().measure(Entropy(), *twice, **named)


# Some rows


@pytest.mark.parametrize("rows", [[3], [9, 0, 5], slice(2, 9, 3), slice(None, None, -1)])
def test_some_rows(rows: Any) -> None:
    A = matrix(mask=causal(LR) & regard.padding([13, 9]) | first([2, 1]))
    near = regard.sliding_window(left=2, right=3, align=LR) & first([6, 8])
    measures = (Entropy(), Sum(), Distance(LR), Spread(LR), Mass(near), MaxWeight())
    part, whole = A.lazy[..., rows, :].measure(*measures), A.measure(*measures)
    for some, every in zip(part[:-1], whole[:-1], strict=True):
        close(some, every[..., rows], atol=1e-12)
    equal(part.max_weight.indices, whole.max_weight.indices[..., rows])
    B = A.lazy[..., rows, :]
    W = A.to_dense()[..., rows, :]
    close(B.sum(-2), W.sum(-2), atol=1e-13)
    equal(B.argmax(-2), W.argmax(-2))
    close(B.coarsen(1, "mean"), W.mean((-2, -1))[..., None, None])
    close(A.lazy[1, 2, rows].mass(near), whole.mass[1, 2, rows], atol=1e-13)
