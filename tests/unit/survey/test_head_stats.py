"""The numbers of a survey, compared with the lens and with the dense matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

import regard
from examples.induction import encode, load
from regard.jobs.shards import EVICTION_WINDOWS
from regard.lens.head_table import measure_heads
from regard.lens.watch import watch
from regard.survey.head_stats import Offsets, measure_call
from regard.survey.schema import DISTANCE_BINS, SINKS, WINDOWS, list_columns

TEXT = "Everything should be made as simple as possible. Everything should be said once. " * 3


@pytest.fixture(scope="module")
def model():
    return load("text")


@pytest.fixture(scope="module")
def recording(model):
    with torch.no_grad(), watch(model) as recording:
        model(encode(TEXT))
    return recording


def test_numbers_equal_those_of_recording_heads(recording):
    ids = encode(TEXT)[0].tolist()
    table, copies = recording.heads(ids, windows=WINDOWS), {}
    found = [measure_call(recording.calls(name)[0], [ids], copies) for name in recording]
    assert list(found[0]) == list(list_columns())
    # Both recompute weights from an lse in float32, by which the error rule allows each this relative error.
    scores = torch.stack([recording[name].scores[...] for name in recording])
    largest = float(scores[scores.isfinite()].abs().max())
    rtol = 2 * 4 * np.finfo(np.float32).eps * (1 + largest)
    for name in ("entropy", "first", "previous", "distance", "heavy", "duplicate", "induction"):
        ours = np.concatenate([columns[name] for columns in found])
        np.testing.assert_allclose(ours, table.column(name), rtol=rtol, err_msg=name)
    for window in WINDOWS:
        ours = np.concatenate([columns[f"within_{window}"] for columns in found])
        np.testing.assert_allclose(ours, table.column(f"within_{window}"), rtol=rtol)


def test_with_a_sink_entropy_and_distance_are_those_of_the_keys(recording):
    (name, *_) = recording
    call = recording.calls(name)[0]
    heads = call.query.shape[-3]
    sunk = replace(call, sink=torch.linspace(-2.0, 3.0, heads), lse=None)
    weights = sunk.matrix.to_dense().double().numpy()[0]  # (heads, n, n)
    assert (weights.sum(-1) < 0.99).any()
    keys = weights / weights.sum(-1, keepdims=True)
    i, j = np.indices(weights.shape[1:])
    table, _ = measure_heads(sunk, None, (8,), {})
    found = measure_call(sunk, None, {})
    entropy = -(keys * np.log(np.where(keys > 0, keys, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(table["entropy"], entropy, rtol=1e-4)
    np.testing.assert_allclose(found["entropy"], entropy, rtol=1e-4)
    np.testing.assert_allclose(table["distance"], (keys * (i - j)).sum(-1).mean(-1), rtol=1e-4)
    by_weight = (weights * (i - j)).sum((1, 2)) / weights.sum((1, 2))
    np.testing.assert_allclose(found["distance"], by_weight, rtol=1e-4)
    np.testing.assert_allclose(table["within_8"], np.where(i - j < 8, weights, 0).sum(-1).mean(-1), rtol=1e-4)


def test_histograms_and_kept_windows_equal_those_of_the_dense_matrix(recording):
    (name, *_) = recording
    call = recording.calls(name)[0]
    found = measure_call(call, None, {})
    weights = call.matrix.to_dense().double().numpy()[0]  # (heads, n, n)
    rows, keys = np.indices(weights.shape[1:])
    distance = rows - keys
    for number in range(DISTANCE_BINS):
        low = 0 if number == 0 else 2 ** (number - 1)
        high = 1 if number == 0 else 2**number if number < DISTANCE_BINS - 1 else 10**9
        inside = (distance >= low) & (distance < high)
        expected = np.where(inside, weights, 0.0).sum((1, 2)) / weights.shape[1]
        np.testing.assert_allclose(found["distance_histogram"][:, number], expected, atol=1e-6)
    for window in WINDOWS[:3]:
        kept = (distance < window) | (keys == 0)
        expected = np.where(kept, weights, 0.0).sum((1, 2)) / weights.shape[1]
        np.testing.assert_allclose(found[f"kept_{window}"], expected, atol=1e-6)
    for sinks in SINKS:
        for number, window in enumerate(EVICTION_WINDOWS):
            evicted = (distance >= window) & (keys >= sinks)
            expected = np.where(evicted, weights, 0.0).sum((1, 2)) / weights.shape[1]
            np.testing.assert_allclose(found[f"evicted_{sinks}"][:, number], expected, atol=1e-6)
    bits = call.matrix.entropy().double().numpy()[0] / np.log(2)
    for head, own in enumerate(bits):
        expected = np.histogram(own, bins=[-1, *range(1, 17), 99])[0] / own.size
        np.testing.assert_allclose(found["entropy_histogram"][head], expected)
    for name in ("distance_histogram", "entropy_histogram"):
        np.testing.assert_allclose(found[name].sum(-1), 1.0, rtol=1e-6)


def test_the_lookback_ratio_equals_that_of_span_mass(recording):
    """A document with a prompt is an answer whose tokens were all read: the last row predicts none of them."""
    prompt = 100
    for name, own in recording.span_mass({"prompt": (0, prompt)}, prompt=prompt).lookback.items():
        columns = measure_call(recording.calls(name)[0], None, {}, ("lookback",), prompt)
        np.testing.assert_allclose(columns["lookback"], np.nanmean(own[0, :, :-1], -1), rtol=1e-6)
        weights = recording[name].to_dense().double().numpy()[0]  # (heads, n, n)
        rows = range(prompt, weights.shape[1] - 1)
        context = np.stack([weights[:, i, :prompt].mean(-1) for i in rows], -1)
        answer = np.stack([weights[:, i, prompt : i + 1].mean(-1) for i in rows], -1)
        np.testing.assert_allclose(columns["lookback"], (context / (context + answer)).mean(-1), rtol=1e-5)
        undefined = measure_call(recording.calls(name)[0], None, {}, ("lookback",), 0)
        assert list(undefined) == ["lookback"] and np.isnan(undefined["lookback"]).all()


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.sliding_window(4)])
@pytest.mark.parametrize("xp", [np.asarray, torch.tensor])
def test_offsets_are_sums_along_diagonals_for_any_tiling(xp, mask, small):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 11, 5)), rng.normal(size=(2, 3, 11, 5))
    A = regard.attention(xp(query), xp(key), mask=mask)
    dense = np.asarray(A.to_dense())
    selected = rng.integers(0, 2, (2, 1, 11)).astype(bool)
    for rows in (None, selected):
        kept = dense if rows is None else dense * rows[..., None]
        expected = np.stack([np.trace(kept, n, -2, -1) for n in range(-10, 11)], -1)
        np.testing.assert_allclose(np.asarray(A.measure(Offsets(rows)).offsets), expected, atol=1e-12)


def test_cross_attention_has_no_distances():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad(), watch(torch.nn.ModuleDict({"cross_attn": layer})) as recording:
        layer(torch.randn(1, 3, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8))
    found = measure_call(recording.calls("cross_attn")[0], [[1, 2, 3, 4, 5]], {})
    assert np.isfinite(found["entropy"]).all() and np.isfinite(found["first"]).all()
    for name in (
        "distance",
        "previous",
        "within_64",
        "kept_64",
        "evicted_4",
        "distance_histogram",
        "induction",
    ):
        assert np.isnan(found[name]).all()


def test_watch_passes_each_call_to_a_function(model):
    with (
        torch.no_grad(),
        watch(model, measures=lambda call: {"rows": call.shape[-2]}) as recording,
    ):
        model(encode("seven b"))
    assert [recording.calls(name)[0].measures for name in recording] == [{"rows": 7}] * len(recording)
