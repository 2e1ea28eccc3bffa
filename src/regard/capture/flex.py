"""Read the arguments of torch's `flex_attention`: a `BlockMask` as intervals or in tiles, and a `score_mod`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from regard.capture.compact_mask import CompactMask
from regard.capture.mask_recognition import find_intervals, merge_equal_axes, split_rows
from regard.errors import ArgumentError, format_shape
from regard.frame import Frame
from regard.masks import Mask
from regard.masks.base import BlockKinds
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace

Tensor = Any  # the types of torch are not followed

_EMPTY, _PARTIAL, _FULL = 0, 1, 2


def recognise_block_mask(
    block_mask: BlockMask, batch: int, heads: int, q_len: int, kv_len: int
) -> CompactMask:
    """Recognise a `BlockMask`: its function is evaluated in the blocks that are neither empty nor full.

    Args:
        block_mask: The mask.
        batch: Number of batch entries to evaluate it for; 1 if all are equal.
        heads: Number of heads to evaluate it for; 1 if all are equal.
        q_len: Number of queries.
        kv_len: Number of keys.

    Returns:
        Intervals if the rows consist of them, else the mask as a function that is evaluated in tiles.
    """
    mask = FlexMask(block_mask, batch, heads, q_len, kv_len)
    rows = FlexMaskRows(mask)
    compact = find_intervals(rows, q_len, kv_len)
    return compact if compact is not None else replace(_find_hull(rows), tiled_mask=mask)


def _find_hull(rows: FlexMaskRows) -> CompactMask:
    """Return intervals from the first to the last key of each row, and the number of its keys."""
    kv_len, starts, stops, counts = rows.shape[-1], [], [], []
    for part in split_rows(rows):
        visible = rows[..., part, :]
        counts.append(visible.sum(-1))
        live, visible = visible.any(-1), visible.to(torch.uint8)
        starts.append(torch.where(live, visible.argmax(-1), 0))
        stops.append(torch.where(live, kv_len - visible.flip(-1).argmax(-1), 0))
    start, stop, count = (
        merge_equal_axes(torch.cat(parts, -1).cpu().numpy()) for parts in (starts, stops, counts)
    )
    return CompactMask(start, stop, visible_counts=count)


@dataclass(frozen=True, eq=False)
class FlexMask(Mask):
    """A `BlockMask`, evaluated one tile at a time.

    Empty blocks are masked, full ones are not, and in the others its `mask_mod` decides, as in the kernel.

    Args:
        block_mask: The mask of torch.
        batch: Number of batch entries to evaluate it for; 1 if all are equal.
        heads: Number of heads to evaluate it for; 1 if all are equal.
        q_len: Number of queries.
        kv_len: Number of keys.
    """

    block_mask: BlockMask
    batch: int
    heads: int
    q_len: int
    kv_len: int

    @cached_property
    def kinds(self) -> IntArray:
        """Which blocks are empty, partial and full: (batch, heads, rows of blocks, columns of blocks)."""
        mask = self.block_mask
        kinds = _mark_blocks(mask.kv_num_blocks, mask.kv_indices) * _PARTIAL
        if mask.full_kv_num_blocks is not None:
            kinds = np.maximum(kinds, _mark_blocks(mask.full_kv_num_blocks, mask.full_kv_indices) * _FULL)
        return np.broadcast_to(kinds, (self.batch, self.heads, *kinds.shape[2:]))

    def evaluate(self, batch_idx: IntArray, head_idx: IntArray, q_idx: IntArray, kv_idx: IntArray) -> Tensor:
        """Evaluate the mask: (pairs, r, c), for pairs of batch entry and head and for rows and columns."""
        device, (block_rows, block_columns) = self.block_mask.kv_indices.device, self.block_mask.BLOCK_SIZE
        kinds = self.kinds[batch_idx, head_idx][:, q_idx // block_rows][:, :, kv_idx // block_columns]
        visible = torch.from_numpy(kinds == _FULL).to(device)
        columns = (kinds == _PARTIAL).any((0, 1)).nonzero()[0]
        if len(columns):
            partial = torch.from_numpy(kinds[..., columns] == _PARTIAL).to(device)
            indices = (
                torch.as_tensor(index, device=device)
                for index in (batch_idx, head_idx, q_idx, kv_idx[columns])
            )
            with torch.no_grad():
                tile = _map_over_entries(self.block_mask.mask_mod, 0)(*indices)
            visible[..., torch.from_numpy(columns).to(device)] |= partial & tile
        return visible

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        batch_idx, head_idx = _split_pairs(frame)
        if self.batch == self.heads == 1:
            batch_idx = head_idx = np.zeros(1, np.int64)
        visible = self.evaluate(
            batch_idx if self.batch > 1 else np.zeros_like(batch_idx),
            head_idx if self.heads > 1 else np.zeros_like(head_idx),
            np.asarray(q_idx),
            np.asarray(kv_idx),
        )
        return xp.asarray(visible.cpu().numpy())

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        block_rows, block_columns = self.block_mask.BLOCK_SIZE
        kinds = self.kinds[:, :, q_lo // block_rows : -(-q_hi // block_rows)]
        first, end = kv_lo // block_columns, -(-kv_hi // block_columns)
        nonempty, partial = (
            np.concatenate([[0], np.cumsum(flags.any((0, 1, 2)))])
            for flags in (kinds > _EMPTY, kinds < _FULL)
        )
        return BlockKinds(nonempty[end] > nonempty[first], partial[end] == partial[first])

    def check(self, frame: Frame) -> None:
        if (frame.q_len, frame.kv_len) != (self.q_len, self.kv_len):
            raise ArgumentError(
                "flex mask",
                received=f"a matrix of {format_shape(q_len=frame.q_len, kv_len=frame.kv_len)}",
                expected=format_shape(q_len=self.q_len, kv_len=self.kv_len),
                hint="A mask that was read from a BlockMask fits the matrix of its call only.",
            )

    @property
    def varies_by_batch(self) -> bool:
        return self.batch > 1

    def __repr__(self) -> str:
        return f"<BlockMask of {_name_function(self.block_mask.mask_mod)}>"


class FlexMaskRows:
    """The rows of a `FlexMask`, indexed as the rows of a mask tensor are: `rows[..., start:stop, :]`.

    Args:
        mask: The mask.
    """

    dtype = torch.bool

    def __init__(self, mask: FlexMask) -> None:
        self._mask = mask
        self.shape = (mask.batch, mask.heads, mask.q_len, mask.kv_len)
        self.ndim = 4

    def numel(self) -> int:
        """Return the number of entries."""
        return int(np.prod(self.shape))

    def __getitem__(self, index: tuple[Any, slice, slice]) -> Tensor:
        batch, heads, q_len, kv_len = self.shape
        batch_idx, head_idx = (axis.ravel() for axis in np.mgrid[:batch, :heads])
        rows = np.arange(q_len)[index[1]]
        visible = self._mask.evaluate(batch_idx, head_idx, rows, np.arange(kv_len))
        return visible.reshape(batch, heads, len(rows), kv_len)


@dataclass(frozen=True, eq=False)
class FlexScoreMod(ScoreMod):
    """A `score_mod` of `flex_attention`, mapped over the entries of each tile.

    Args:
        function: Function of score, batch entry, head, q_idx and kv_idx.
    """

    function: Callable[..., Tensor]

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        indices = (
            torch.as_tensor(index, device=scores.device) for index in (*_split_pairs(frame), q_idx, kv_idx)
        )
        return _map_over_entries(self.function, 1)(scores, *indices).to(scores.dtype)

    def __repr__(self) -> str:
        return f"<score_mod {_name_function(self.function)}>"


def _mark_blocks(num_blocks: Tensor, indices: Tensor) -> IntArray:
    """Return 1 for the blocks that are listed, else 0: (batch, heads, rows of blocks, columns of blocks)."""
    count = indices.shape[-1]
    is_listed = torch.arange(count, device=indices.device) < num_blocks[..., None]
    marks = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.uint8, device=indices.device)
    marks.scatter_(-1, torch.where(is_listed, indices, count).long(), 1)
    marked: IntArray = marks[..., :count].cpu().numpy()
    return marked


def _map_over_entries(function: Callable[..., Tensor], num_scores: int) -> Callable[..., Tensor]:
    """Map a function of scores, batch entry, head, q_idx and kv_idx over pairs, rows and columns."""
    scores = (0,) * num_scores
    for axes in ((None, None, None, 0), (None, None, 0, None), (0, 0, None, None)):
        function = torch.vmap(function, in_dims=scores + axes)
    return function


def _split_pairs(frame: Frame) -> tuple[IntArray, IntArray]:
    """Return batch entry and head of each selected pair."""
    heads = frame.leading_shape[-1] if frame.leading_shape else 1
    return frame.selected // heads, frame.selected % heads


def _name_function(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
