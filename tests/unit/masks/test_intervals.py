"""The intervals of keys of each row are the mask."""

from __future__ import annotations

import numpy as np
import pytest

from regard import TooLargeError, padding
from regard.frame import Frame
from regard.masks import dense, first
from regard.masks.segments import find_intervals
from regard.tiling import use_tile_sizes
from tests.helpers.interval_masks import KEYS, MASKS, ROWS, drawn


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("block", [4, 512])
def test_intervals_are_the_mask(mask, block):
    frame, rows = Frame((), ROWS, KEYS), np.arange(ROWS)[::-2].copy()
    with use_tile_sizes(rows=block, columns=block + 1):
        found = find_intervals(mask, frame, rows, "page")
    built = np.zeros((len(rows), KEYS), bool)
    for i in range(len(rows)):
        own = found.edges[found.offsets[i] : found.offsets[i + 1]]
        assert (own[:, 0] < own[:, 1]).all() and (own[1:, 0] > own[:-1, 1]).all()
        for low, high in own:
            built[i, low:high] = True
    whole = np.ones((ROWS, KEYS), bool) if mask is None else mask.to_dense(ROWS, KEYS)
    np.testing.assert_array_equal(built, whole[rows])


@use_tile_sizes(rows=8, columns=8)
def test_a_mask_is_read_in_parts_that_fit_in_memory(monkeypatch):
    mask = dense(drawn((40, 40), 0.5))
    whole = find_intervals(mask, Frame((), 40, 40), np.arange(40), "page")
    monkeypatch.setattr("regard.masks.segments.MAX_TILE_BYTES", 64)  # two rows of blocks do not fit
    parts = find_intervals(mask, Frame((), 40, 40), np.arange(40), "page")
    np.testing.assert_array_equal(parts.offsets, whole.offsets)
    np.testing.assert_array_equal(parts.edges, whole.edges)


@use_tile_sizes(intervals=100)
def test_a_mask_of_too_many_intervals_is_refused():
    with pytest.raises(TooLargeError) as caught:
        find_intervals(dense(drawn((40, 40), 0.5)), Frame((), 40, 40), np.arange(40), "page")
    assert caught.value.operation == "page" and "A.lazy[..., rows, :]" in caught.value.hint
    assert all(part in caught.value.received for part in ("100 intervals", "dense(", "(40, 40)"))


@use_tile_sizes(rows=8, columns=8)
@pytest.mark.parametrize(
    ("mask", "expected"), [(first(8), [0, 8]), (padding(8, side="left"), [8, 16]), (~first(16), [])]
)
def test_blocks_that_are_full_or_empty_are_not_evaluated(mask, expected):
    def refuse(array):
        raise AssertionError("evaluated")

    found = find_intervals(mask, Frame((), 5, 16), np.arange(5), "page", to_numpy=refuse)
    assert found.edges.ravel().tolist() == expected * 5
