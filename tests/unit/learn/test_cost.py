"""Costs: formulas against counted loops, published sizes, measurements and fitted exponents."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.learn import (
    Cost,
    PublishedModel,
    attention_by_loops,
    cat,
    cost_table,
    fit_exponent,
    model_table,
    profile,
    published_models,
)

COSTS = json.loads((Path(__file__).parents[2] / "data/worked_examples.json").read_text("utf-8"))["costs"]


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(("n_q", "n_k", "d_k", "d_v"), [(2, 3, 5, 7), (7, 5, 3, 2), (1, 11, 4, 4)])
def test_formulas_agree_with_counted_loops(n_q: int, n_k: int, d_k: int, d_v: int) -> None:
    cost, counted = (
        Cost(n_q, n_k, d_k, d_v, itemsize=8),
        attention_by_loops(draw(n_q, d_k), draw(n_k, d_k), draw(n_k, d_v)),
    )
    assert cost.entries == counted.scores.size == counted.counts.exponentials
    assert cost.bytes == counted.counts.bytes_scores == counted.counts.bytes_weights
    assert cost.score_multiply_adds == counted.counts.score_multiply_adds
    assert cost.value_multiply_adds == counted.counts.value_multiply_adds
    assert cost.multiply_adds == counted.counts.multiply_adds == n_q * n_k * (d_k + d_v)


@pytest.mark.parametrize(("n_q", "n_k", "d_k", "d_v"), [(2, 3, 5, 7), (7, 5, 3, 2), (1, 11, 4, 4)])
def test_the_four_steps_have_the_counted_operations(n_q: int, n_k: int, d_k: int, d_v: int) -> None:
    counts = attention_by_loops(draw(n_q, d_k), draw(n_k, d_k), draw(n_k, d_v)).counts
    compare, scale, normalise, aggregate = Cost(n_q, n_k, d_k, d_v).by_step().rows
    assert compare.operations == counts.score_multiply_adds
    assert aggregate.operations == counts.value_multiply_adds
    rest = counts.additions + counts.comparisons + counts.exponentials + counts.divisions
    assert scale.operations + normalise.operations == rest
    assert [8 * row.numbers for row in (compare, normalise, aggregate)] == [
        counts.bytes_scores,
        counts.bytes_weights,
        counts.bytes_output,
    ]


def test_a_table_of_models_has_the_width_of_heads_and_the_example_of_the_book() -> None:
    book = PublishedModel(layers=1, heads=1, length=len(cat.Q), d_k=cat.Q.shape[-1])
    assert book.multiply_adds == attention_by_loops(cat.Q, cat.K, cat.V).counts.multiply_adds == 200
    large = PublishedModel(layers=32, heads=32, length=8192, d_k=128)
    assert round(large.entries / 1e9) == 69  # scores; each takes d_k multiply-adds, and so does its weight
    assert large.multiply_adds == 256 * large.entries
    header, first, *rest = str(model_table({"this book": book, **published_models})).splitlines()
    assert header.split()[3] == "d_k"
    assert first.split() == ["this", "book", "1", "1", "4", "5", "25", "200", "100", "B"]
    assert [line.split()[3] for line in rest] == ["128", "128", "64", "32"]


def test_cost_table_has_the_published_numbers() -> None:
    found = cost_table([int(n) for n in COSTS["matrix_kib_fp32"]])
    assert [row.bytes // 1024 for row in found.rows] == list(COSTS["matrix_kib_fp32"].values())
    for name, entries in COSTS["score_entries"].items():
        assert cost_table([int(name.removeprefix("n="))]).rows[0].entries == entries
    headings, *lines = str(found).splitlines()
    assert headings.split() == ["length", "entries", "growth", "memory", "multiply-adds"]
    assert lines[-1].split() == ["2,048", "4,194,304", "×", "64", "16.8", "MB", "536,870,912"]
    assert sum("× 4" in line for line in lines) == 4
    assert cost_table(3) == cost_table([3])
    assert cost_table([3], d_k=5, d_v=7, dtype=np.float16).rows == (Cost(3, 3, 5, 7, itemsize=2),)


def test_published_models_have_the_published_numbers() -> None:
    for line, entries in COSTS["layers_heads_n2"].items():
        name, sizes = line.rsplit(" ", 1)
        model = published_models[name]
        assert [model.layers, model.heads, model.length] == [int(x) for x in sizes.split("x")]
        assert model.entries == entries
        assert re.search(r" 20\d\d, ", model.source), "a published size says where"
    assert len(published_models) == len(COSTS["layers_heads_n2"])
    n8192 = COSTS["forward_score_computations_32_layers_32_heads_n8192"]
    assert PublishedModel(layers=32, heads=32, length=8192, d_k=128).entries == n8192
    batch = {"batch of 32, one layer": PublishedModel(layers=32, heads=96, length=2048, d_k=128)}
    assert batch["batch of 32, one layer"].entries * 4 == COSTS["weights_bytes_fp32_batch32_heads96_n2048"]
    assert str(model_table(batch)).endswith("12,884,901,888       3.30e+12  51.5 GB")


@pytest.mark.parametrize("exponent", [-1, 0, 0.5, 1, 2, 3])
def test_fit_recovers_the_exponent(exponent: float) -> None:
    lengths = [3, 7, 20, 90]
    assert fit_exponent(lengths, [5 * n**exponent for n in lengths]) == pytest.approx(exponent, abs=1e-12)
    noisy = [5 * n**exponent * factor for n, factor in zip(lengths, [1.1, 0.9, 0.95, 1.05], strict=True)]
    slope, _ = np.polyfit(np.log(lengths), np.log(noisy), 1)
    assert fit_exponent(lengths, noisy) == pytest.approx(slope, abs=1e-12)


def test_profile_measures_and_fits() -> None:
    lengths = [64, 128, 256, 512]
    found = profile(lengths, d_k=16, d_v=8)
    assert [row.cost for row in found.rows] == list(cost_table(lengths, d_k=16, d_v=8, dtype=np.float64).rows)
    assert list(found.exponents) == ["entries", "bytes", "multiply_adds", "seconds", "peak_bytes"]
    for name in ("entries", "bytes", "multiply_adds"):
        assert found.exponents[name] == pytest.approx(2, abs=1e-12)
    assert all(row.seconds > 0 for row in found.rows)
    assert found.exponents["seconds"] > 0.3  # a loose bound, for a busy machine
    assert all(
        row.peak_bytes >= 2 * row.cost.bytes for row in found.rows
    )  # scores and weights are both stored
    assert 1.7 < found.exponents["peak_bytes"] < 2.2
    headings, *lines, last = str(found).splitlines()
    assert headings.split()[0] == "length"
    assert [line.split()[0] for line in lines] == [str(n) for n in lengths]
    assert last.split()[2:6] == ["n^2.00", "n^2.00", "n^2.00", f"n^{found.exponents['seconds']:.2f}"]


def test_profile_calls_the_function_with_inputs_of_each_length() -> None:
    seen: list[Any] = []

    def linear(Q: Any, K: Any, V: Any) -> Any:
        seen.append((Q.shape, K.shape, V.shape))
        return np.zeros((len(Q), 1000))

    found = profile([100, 200, 400], d_k=3, d_v=5, attend=linear, repeats=2)
    assert seen == [((n, 3), (n, 3), (n, 5)) for n in (100, 200, 400) for _ in range(3)]
    assert found.exponents["peak_bytes"] == pytest.approx(1, abs=0.05)
    assert not tracemalloc.is_tracing()


def test_untracked_memory_has_no_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.learn.cost._measure_peak_bytes", lambda call: 0)
    found = profile([8, 16], repeats=1)
    assert math.isnan(found.exponents["peak_bytes"])
    assert str(found).endswith("n^nan")


def test_lazy_matrix_needs_less_memory_than_a_stored_one() -> None:
    stored = profile([256, 1024], d_k=8, repeats=1)
    lazy = profile([256, 1024], d_k=8, repeats=1, attend=lambda Q, K, V: regard.attention(Q, K) @ V)
    assert lazy.rows[1].peak_bytes < stored.rows[1].peak_bytes / 2
    assert lazy.exponents["peak_bytes"] < stored.exponents["peak_bytes"]


def test_profile_keeps_tracing_that_was_already_on() -> None:
    tracemalloc.start()
    try:
        profile([8, 16], repeats=1)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("q_len", "kv_len", "d_k", "d_v", "rows"), [(7, 11, 3, 5, 2), (8, 8, 4, 4, 8), (5, 13, 2, 3, 9)]
)
def test_bytes_moved_are_those_of_the_arrays_that_are_read_and_written(q_len, kv_len, d_k, d_v, rows):
    Q, K, V = (np.ones(shape, np.float16) for shape in ((q_len, d_k), (kv_len, d_k), (kv_len, d_v)))
    scores = Q @ K.T
    weights = scores / scores.sum(axis=1, keepdims=True)
    steps = [Q, K, scores, scores, weights, weights, V, weights @ V]
    fused = []
    for start in range(0, q_len, rows):
        tile = Q[start : start + rows]
        fused += [tile, K, V, weights[start : start + rows] @ V]
    cost = Cost(q_len, kv_len, d_k, d_v, itemsize=2)
    assert cost.bytes_moved == sum(array.nbytes for array in steps)
    assert cost.bytes_moved_fused(rows) == sum(array.nbytes for array in fused)
