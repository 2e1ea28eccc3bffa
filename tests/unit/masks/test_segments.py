"""Segments of masks: together they are the whole mask, full runs are joined, and nothing has the size of the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regard import causal, padding, sliding_window
from regard.frame import Frame
from regard.masks import Mask, dense, document, first
from regard.masks.segments import FULL, build_segments, iterate_segments

RNG = np.random.default_rng(3)
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal("lower_right"),
    "window": sliding_window(9, align="lower_right"),
    "sinks and window": causal("lower_right") & (sliding_window(20, align="lower_right") | first(3)),
    "padding": padding([31, 45]),
    "nothing": first(0),
    "random": dense(RNG.random((37, 45)) < 0.5),
    "random by head": dense(RNG.random((2, 3, 37, 45)) < 0.5),
    "by head, in a few rows": ~dense((np.arange(3)[:, None, None] == 1) & (np.arange(37) > 30)[:, None]),
    "inverse": ~(padding([31, 45]) | first(8)),
}


class RowParity(Mask):
    """A mask of a user: without `classify_blocks`, and with axes of size one."""

    def allows(self, frame, q_idx, kv_idx, xp):
        return xp.asarray(q_idx % 2 == 0)[:, None]


def rebuild(segments: Any, rows: int, kv_len: int, block_rows: int, pack: str) -> Any:
    """Build the dense mask of some rows from its segments."""
    mask = np.zeros((rows, kv_len), bool)
    for block in range(len(segments.offsets) - 1):
        start = block * block_rows
        for lo, hi, tile in segments.segments[segments.offsets[block] : segments.offsets[block + 1]]:
            part = mask[start : start + block_rows, lo:hi]
            assert not part.any(), "segments overlap"
            if tile == FULL:
                part[...] = True
                continue
            bits = np.unpackbits(segments.tiles[tile], axis=1, bitorder="little").astype(bool)
            bits = bits.T if pack == "rows" else bits
            part[...] = bits[: part.shape[0], : part.shape[1]]
            outside = bits.copy()
            outside[: part.shape[0], : part.shape[1]] = False
            assert not outside.any(), "bits outside the matrix are set"
    return mask


@pytest.mark.parametrize("pack", ["columns", "rows"])
@pytest.mark.parametrize("name", [*MASKS, "of a user"])
def test_segments_are_the_whole_mask(name: str, pack: Any) -> None:
    mask = MASKS.get(name, RowParity()) if name != "none" else None
    frame = Frame((2, 3), 37, 45)
    whole = np.ones((6, 37, 45), bool)
    if mask is not None:
        allowed = mask.allows(frame, np.arange(37), np.arange(45), np)
        whole = np.broadcast_to(allowed, whole.shape)
    for q_idx in (np.arange(37), np.arange(5, 30), np.array([30, 4, 17, 36, 5, 2, 9, 11, 12, 13])):
        for block_rows, block_columns in ((8, 8), (16, 8), (8, 24), (64, 64)):
            distinct, pair_index = build_segments(mask, frame, q_idx, block_rows, block_columns, pack=pack)
            for pair in range(6):
                found = rebuild(distinct[pair_index[pair]], len(q_idx), 45, block_rows, pack)
                np.testing.assert_array_equal(found, whole[pair, q_idx])


@pytest.mark.parametrize("name", [*MASKS, "of a user"])
@pytest.mark.parametrize("max_tile_bytes", [0, 20, 100])
def test_ranges_of_rows_are_the_whole_mask_and_keep_the_limit(name: str, max_tile_bytes: int) -> None:
    mask = MASKS.get(name, RowParity()) if name != "none" else None
    frame, whole = Frame((2, 3), 37, 45), np.ones((6, 37, 45), bool)
    if mask is not None:
        whole = np.broadcast_to(mask.allows(frame, np.arange(37), np.arange(45), np), whole.shape)
    next_block = np.zeros(6, int)
    for part in iterate_segments(mask, frame, np.arange(37), 8, 16, max_tile_bytes=max_tile_bytes):
        assert (next_block[part.pairs] == part.first_block).all() and part.last_block > part.first_block
        next_block[part.pairs] = part.last_block
        rows = slice(8 * part.first_block, min(8 * part.last_block, 37))
        found = rebuild(part.segments, rows.stop - rows.start, 45, 8, "columns")
        for pair in part.pairs:
            np.testing.assert_array_equal(found, whole[pair, rows])
        row_block = 3 * 16  # bytes of a block of rows with three tiles
        assert part.segments.tiles.nbytes <= max_tile_bytes + row_block
    assert (next_block == 5).all()


def test_equal_pairs_share_their_segments() -> None:
    frame = Frame((2, 3), 37, 45)
    counts = {
        name: len(build_segments(mask, frame, np.arange(37), 8, 8).distinct) for name, mask in MASKS.items()
    }
    assert counts["causal"] == counts["random"] == counts["none"] == 1
    assert counts["padding"] == 2
    assert counts["random by head"] == counts["by head, in a few rows"] == 6


def test_runs_of_full_blocks_are_joined_and_equal_tiles_stored_once() -> None:
    n = 1024
    (segments,), _ = build_segments(causal(), Frame((), n, n), np.arange(n), 32, 32)
    assert len(segments.segments) == 2 * n // 32 - 1
    assert len(segments.tiles) == 1
    ids = np.repeat(np.arange(n // 32), 32)
    (segments,), _ = build_segments(document(ids), Frame((), n, n), np.arange(n), 32, 32)
    assert len(segments.segments) == n // 32 and len(segments.tiles) == 0


@pytest.mark.parametrize("mask", [causal(), causal() & (sliding_window(512) | first(4))], ids=repr)
def test_the_description_grows_with_the_length_only(mask: Mask) -> None:
    sizes = []
    for n in (16_384, 65_536):
        (segments,), _ = build_segments(mask, Frame((), n, n), np.arange(n), 256, 64)
        sizes.append(sum(array.nbytes for array in segments))
    assert sizes[1] < 4.2 * sizes[0] < 2**20


@pytest.mark.parametrize("q_len, kv_len", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_axis_has_no_segments(q_len: int, kv_len: int) -> None:
    for mask in (None, causal("lower_right")):
        (segments,), _ = build_segments(mask, Frame((), q_len, kv_len), np.arange(q_len), 8, 8)
        assert len(segments.segments) == 0 and len(segments.offsets) == len(range(0, q_len, 8)) + 1
