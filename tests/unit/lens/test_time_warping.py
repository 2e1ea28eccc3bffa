"""Dynamic time warping: known paths, the cheapest of all paths, and the functions of transformers."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("torch")

from regard.lens.alignment import (
    filter_median,
    find_cheapest_path,
    standardise_columns,
)


def attend_in_order(boundaries, frames, rng):
    """Return weights of tokens that attend to their own frames: token i from boundaries[i] to the next one."""
    weights = rng.random((len(boundaries), frames)) * 0.01 / frames
    for row, (start, stop) in enumerate(zip(boundaries, [*boundaries[1:], frames], strict=True)):
        weights[row, start:stop] += 1.0
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(("tokens", "frames"), [(1, 1), (1, 40), (7, 7), (23, 199), (60, 1500)])
def test_tokens_that_attend_in_order_start_where_they_attend(tokens, frames):
    rng = np.random.default_rng(tokens)
    inner = np.sort(rng.choice(np.arange(1, frames), tokens - 1, replace=False))
    boundaries = [0, *inner.tolist()]
    weights = attend_in_order(boundaries, frames, rng)
    rows, columns = find_cheapest_path(-standardise_columns(weights))
    assert columns[np.searchsorted(rows, np.arange(tokens))].tolist() == boundaries


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (3, 5), (5, 3), (4, 4)])
def test_no_path_is_cheaper(shape):
    def list_paths(row, column):
        if (row, column) == (0, 0):
            return [[(0, 0)]]
        before = [(row - 1, column - 1), (row - 1, column), (row, column - 1)]
        return [[*path, (row, column)] for cell in before if min(cell) >= 0 for path in list_paths(*cell)]

    paths = list_paths(shape[0] - 1, shape[1] - 1)
    rng = np.random.default_rng(3)
    for costs in [rng.standard_normal(shape) for _ in range(10)] + [
        rng.integers(0, 3, shape).astype(float)
        for _ in range(30)  # ties
    ]:
        rows, columns = find_cheapest_path(costs)
        assert list(zip(rows.tolist(), columns.tolist(), strict=True)) in paths
        cheapest = min(sum(costs[cell] for cell in path) for path in paths)
        assert costs[rows, columns].sum() == pytest.approx(cheapest, abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (31, 67), (80, 40)])
def test_the_path_is_that_of_transformers(shape):
    whisper = pytest.importorskip("transformers.models.whisper.generation_whisper")
    rng = np.random.default_rng(0)
    for scale in (1.0, 0.01):
        costs = rng.standard_normal(shape) * scale
        for ours, theirs in zip(find_cheapest_path(costs), whisper._dynamic_time_warping(costs), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("length", "width"), [(40, 7), (40, 1), (4, 7), (3, 7), (9, 3), (40, 11)])
def test_the_median_filter_is_that_of_transformers(length, width):
    whisper = pytest.importorskip("transformers.models.whisper.generation_whisper")
    import torch

    rows = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length))
    expected = whisper._median_filter(rows, width)
    np.testing.assert_array_equal(filter_median(rows.numpy(), width), expected.numpy())


def test_a_window_of_30_seconds_takes_a_fraction_of_a_second():
    matrix = np.random.default_rng(0).standard_normal((448, 1500))
    start = time.process_time()
    rows, columns = find_cheapest_path(filter_median(matrix, 7))
    assert time.process_time() - start < 2.0  # 0.2 s here; the loop over all cells takes 2 s
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, 447, 1499)
