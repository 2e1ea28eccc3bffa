"""Lower a mask to calls that a fused kernel takes: no mask, `is_causal`, or blocks of such calls.

The matrix is split into bands of rows, and a band into blocks of columns: each block is full, causal, or has a small
mask tile of its own. Nothing of size q_len × kv_len is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.frame import Frame
from regard.masks import Mask
from regard.masks.base import classify_blocks
from regard.problem import Problem
from regard.tiling import TileSizes, tile_sizes
from regard.types import IntArray

Tensor = Any  # torch's types are not checked
TileBuilder = Callable[[range, range], Tensor]


class KernelBlock(NamedTuple):
    """Columns of a band that one kernel call takes: full, causal from its first corner, or with a mask tile."""

    columns: range
    is_causal: bool
    has_tile: bool


class LoweredBand(NamedTuple):
    """A band of rows and the blocks of columns that are not empty in it."""

    rows: range
    blocks: tuple[KernelBlock, ...]


def lower_mask(
    frame: Frame, mask: Mask | None, q_range: range, kv_range: range, has_bias: bool
) -> list[LoweredBand]:
    """Split the rows `q_range` of a matrix into bands, and each band into blocks that a kernel call takes.

    Args:
        frame: The (batch, head) pairs and the lengths.
        mask: Mask of the matrix.
        q_range: Positions of the rows.
        kv_range: Positions of the keys: all, or a block of them.
        has_bias: Whether numbers are added to the scores, so that every block needs a tile.
    """
    sizes = tile_sizes()
    if mask is None and not has_bias:
        return [LoweredBand(q_range, (KernelBlock(kv_range, False, False),))]
    row_splits = np.arange(0, frame.q_len, sizes.mask_tile_rows)
    column_splits = np.array([kv_range.start])
    if mask is not None:
        splits = mask.split_points(frame)
        row_splits = np.union1d(row_splits, splits.rows) if has_bias else splits.rows
        inside = (splits.columns > kv_range.start) & (splits.columns < kv_range.stop)
        column_splits = np.append(column_splits, splits.columns[inside])
    bands: list[LoweredBand] = []
    inner_rows = row_splits[(row_splits > q_range.start) & (row_splits < q_range.stop)]
    starts = [q_range.start, *inner_rows.tolist()]
    diagonals = set() if mask is None else mask.diagonals(frame)
    for start, stop in zip(starts, [*starts[1:], q_range.stop], strict=True):
        # If rows begin in the middle, columns split at the same corner leave a full and a causal block.
        corners = []
        for diagonal in diagonals:
            ends = (start + diagonal, stop + diagonal)
            corners += [corner for corner in ends if kv_range.start < corner < kv_range.stop]
        columns = np.union1d(column_splits, corners) if corners else column_splits
        band = _lower_band(frame, mask, range(start, stop), columns, kv_range.stop, has_bias, sizes)
        tile_columns = max([len(block.columns) for block in band.blocks if block.has_tile], default=0)
        max_rows = sizes.limit_tile_rows(tile_columns)
        if tile_columns and len(band.rows) > max_rows:
            parts = [range(row, min(row + max_rows, stop)) for row in range(start, stop, max_rows)]
            bands += [
                _lower_band(frame, mask, part, column_splits, kv_range.stop, has_bias, sizes)
                for part in parts
            ]
        else:
            bands.append(band)
    return bands


def _lower_band(
    frame: Frame, mask: Mask | None, rows: range, starts: IntArray, end: int, has_bias: bool, sizes: TileSizes
) -> LoweredBand:
    """Lower the blocks of one band; `starts` are the first columns of the blocks, and `end` follows the last."""
    stops = np.append(starts[1:], end)
    nonempty, full = classify_blocks(mask, frame, rows.start, rows.stop, starts, stops)
    live = np.flatnonzero(nonempty)
    adjoining = len(live) > 1 and live[-1] - live[0] == len(live) - 1
    if adjoining and len(rows) <= sizes.mask_tile_rows and not full[live].all():
        columns = range(int(starts[live[0]]), int(stops[live[-1]]))
        if len(columns) <= sizes.joined_columns:  # one more call would cost more than a larger tile
            return LoweredBand(rows, (KernelBlock(columns, False, True),))
    blocks: list[KernelBlock] = []
    for i in live:
        columns = range(int(starts[i]), int(stops[i]))
        block = KernelBlock(columns, False, has_bias)
        if not full[i] and mask is not None:
            rest = mask.restrict(frame, rows, columns)
            if rest is False:
                continue
            is_causal = isinstance(rest, Mask) and rest.diagonal(frame) == columns.start - rows.start
            has_tile = has_bias or not (is_causal or rest is True)
            block = KernelBlock(columns, is_causal and not has_bias, has_tile)
        previous = blocks[-1] if blocks else None
        same_kind = (
            previous and not (previous.is_causal or block.is_causal) and previous.has_tile == block.has_tile
        )
        if previous and same_kind and previous.columns.stop == columns.start:
            blocks[-1] = block._replace(columns=range(previous.columns.start, columns.stop))
        else:
            blocks.append(block)
    return LoweredBand(rows, tuple(blocks))


def describe_bands(bands: list[LoweredBand], num_calls: int) -> str:
    """Describe lowered bands in a few words, for `A.kernel`."""
    if num_calls == 1 and len(bands) == 1 and bands[0].blocks:
        block = bands[0].blocks[0]
        return "causal" if block.is_causal else "masked" if block.has_tile else "no mask"
    num_tiles = sum([block.has_tile for band in bands for block in band.blocks])
    return f"{num_calls} blocks" + (f", {num_tiles} with a mask tile" if num_tiles else "")


def make_tile_builder(problem: Problem) -> TileBuilder:
    """Return a function that builds the mask tile of a block of rows and columns."""
    xp, dtype = problem.engine.xp, problem.dtype
    is_cacheable = problem.mask is not None and problem.mask.is_relative and not problem.score_mods
    cache: dict[tuple[int, int, int], Tensor] = {}  # blocks along a diagonal share a tile

    def build_tile(rows: range, columns: range) -> Tensor:
        """Build the numbers to add to the scores of a block, −inf where masked: (1, heads or 1, rows, columns)."""
        position = (columns.start - rows.start, len(rows), len(columns))
        if position in cache:
            return cache[position]
        q_idx, kv_idx = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        total: Any = 0.0
        masked: Any = False
        for score_mod in problem.score_mods:
            bias = score_mod.additive_bias(problem.frame, q_idx, kv_idx, xp, dtype)
            assert bias is not None
            bias = bias.detach()
            masked = masked | (bias == -math.inf)
            total = total + bias
        rest = True if problem.mask is None else problem.mask.restrict(problem.frame, rows, columns)
        if isinstance(rest, Mask):
            masked = masked | ~rest.allows(problem.frame, q_idx, kv_idx, xp)
        if not isinstance(total, torch.Tensor):
            total = torch.zeros((1, 1, 1), dtype=dtype, device=problem.query.device)
        if isinstance(masked, torch.Tensor):
            total = torch.where(masked, -math.inf, total)
        tile = total.expand(-1, len(q_idx), len(kv_idx))[None]
        if is_cacheable:
            cache[position] = tile
        return tile

    return build_tile
