"""Describe a mask by segments: for each block of rows, the runs of keys that a compiled pass reads.

A run of full blocks is one segment without a mask. A partial block is a segment with a tile of bits. Empty blocks have
no segment, equal tiles are stored once, and only partial blocks are evaluated: nothing has the size of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from regard.frame import Frame, is_contiguous
from regard.masks.base import Mask
from regard.types import Array, IntArray, Namespace

FULL = -1  # the tile of a segment that the mask allows as a whole
EMPTY = -2  # the tile of a block without allowed entries, which has no segment


class MaskSegments(NamedTuple):
    """The segments of a mask for one or several equal (batch, head) pairs.

    Attributes:
        offsets: The segments of row block i are `segments[offsets[i] : offsets[i + 1]]`: (row blocks + 1,).
        segments: First key, the key after the last, and the tile or `FULL` of each segment; in the order of the keys
            within a row block: (segments, 3), int64.
        tiles: Bits of the partial blocks, 1 = attend, the lowest bit first, 0 outside the matrix. Packed along the
            columns: (tiles, block_rows, block_columns // 8); along the rows: (tiles, block_columns, block_rows // 8).
    """

    offsets: IntArray
    segments: IntArray
    tiles: Array


class PairSegments(NamedTuple):
    """The segments of a mask for all (batch, head) pairs of a matrix.

    Attributes:
        distinct: The segments of pairs whose masks differ.
        pair_index: For each pair, its entry in `distinct`: (pairs,).
    """

    distinct: list[MaskSegments]
    pair_index: IntArray


def build_segments(
    mask: Mask | None,
    frame: Frame,
    q_idx: IntArray,
    block_rows: int,
    block_columns: int,
    *,
    pack: Literal["columns", "rows"] = "columns",
    kv_range: range | None = None,
    xp: Namespace = np,
    to_numpy: Callable[[Array], Any] = np.asarray,
) -> PairSegments:
    """Describe a mask by segments.

    Args:
        mask: The mask; None allows every key.
        frame: The (batch, head) pairs and the lengths.
        q_idx: Positions of the rows: (rows,).
        block_rows: Rows of a block, a multiple of 8.
        block_columns: Keys of a block, a multiple of 8.
        pack: Axis along which the bits of a tile are packed.
        kv_range: The keys to describe; None for all.
        xp: Array API namespace to evaluate the mask with.
        to_numpy: Conversion of its arrays to NumPy.

    Returns:
        The segments of each pair.

    >>> from regard import causal
    >>> (causal_segments,), _ = build_segments(causal(), Frame((), 24, 24), np.arange(24), 8, 8)
    >>> causal_segments.segments.tolist()
    [[0, 8, 0], [0, 8, -1], [8, 16, 0], [0, 16, -1], [16, 24, 0]]
    >>> causal_segments.tiles[0, :, 0].tolist()
    [1, 3, 7, 15, 31, 63, 127, 255]
    """
    keys = range(frame.kv_len) if kv_range is None else kv_range
    builder = _SegmentBuilder(mask, q_idx, keys, block_rows, block_columns, pack, xp, to_numpy)
    pairs = len(frame.selected)
    distinct: list[MaskSegments] = []
    pair_index = np.zeros(pairs, np.int64)
    groups = [np.arange(pairs)]
    if mask is not None and mask.varies_by_batch and pairs > 1:
        heads = frame.leading_shape[-1] if frame.leading_shape else 1
        groups = np.split(np.arange(pairs), np.flatnonzero(np.diff(frame.selected // max(heads, 1))) + 1)
    for group in groups:
        shared = builder.build(frame.select(group))
        for i, pair in enumerate(group):
            if shared is None or i == 0:
                own = builder.build(frame.select(group[i : i + 1])) if shared is None else shared
                assert own is not None
                distinct.append(own)
            pair_index[pair] = len(distinct) - 1
    return PairSegments(distinct, pair_index)


class _SegmentBuilder:
    """Builds the segments of one mask and set of rows for several frames."""

    def __init__(
        self, mask: Mask | None, q_idx: IntArray, keys: range, block_rows: int, block_columns: int, pack: str,
        xp: Namespace, to_numpy: Callable[[Array], Any],
    ) -> None:  # fmt: skip
        self._mask, self._q_idx, self._pack, self._xp, self._to_numpy = mask, q_idx, pack, xp, to_numpy
        self._keys = keys
        self._rows, self._columns = block_rows, block_columns

    def build(self, frame: Frame) -> MaskSegments | None:
        """Build the segments of the pairs of a frame; return None if the mask differs between them."""
        kv_lo = np.arange(self._keys.start, self._keys.stop, self._columns)
        kv_hi = np.minimum(kv_lo + self._columns, self._keys.stop)
        tiles = _TileStore()
        segments: list[IntArray] = []
        counts = [0]
        for start in range(0, len(self._q_idx), self._rows):
            q_idx = self._q_idx[start : start + self._rows]
            live, full = self._classify(frame, q_idx, kv_lo, kv_hi)
            tile_of_block = np.full(len(live), FULL)
            for i in np.flatnonzero(~full):
                found = self._find_tile(frame, q_idx, int(kv_lo[live[i]]), int(kv_hi[live[i]]), tiles)
                if found is None:
                    return None
                tile_of_block[i] = found
            kept = tile_of_block >= FULL
            segments.append(_join_runs(live[kept], tile_of_block[kept], kv_lo, kv_hi))
            counts.append(len(segments[-1]))
        shape = (self._rows, self._columns) if self._pack == "columns" else (self._columns, self._rows)
        return MaskSegments(
            np.cumsum(counts),
            np.concatenate([np.zeros((0, 3), np.int64), *segments]),
            np.array(tiles.bits, np.uint8).reshape(-1, shape[0], shape[1] // 8),
        )

    def _classify(
        self, frame: Frame, q_idx: IntArray, kv_lo: IntArray, kv_hi: IntArray
    ) -> tuple[IntArray, Array]:
        """Return the blocks that are not empty, and which of them are full."""
        if self._mask is None or not len(kv_lo):
            return np.arange(len(kv_lo)), np.ones(len(kv_lo), bool)
        nonempty, full = self._mask.classify_blocks(
            frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi
        )
        live = np.flatnonzero(nonempty)
        return live, np.asarray(full)[live]

    def _find_tile(
        self, frame: Frame, q_idx: IntArray, start: int, stop: int, tiles: _TileStore
    ) -> int | None:
        """Return the tile of a partial block, `FULL`, or `EMPTY`; None if the mask differs between the pairs."""
        assert self._mask is not None
        diagonal = None
        if self._mask.is_relative and is_contiguous(q_idx):
            diagonal = (start - int(q_idx[0]), len(q_idx), stop - start)
        if diagonal in tiles.by_diagonal:
            return tiles.by_diagonal[diagonal]
        allowed = self._to_numpy(self._mask.allows(frame, q_idx, np.arange(start, stop), self._xp))
        allowed = allowed.reshape((1,) * (3 - allowed.ndim) + allowed.shape)
        if len(allowed) > 1 and not (allowed == allowed[:1]).all():
            return None
        block = np.zeros((self._rows, self._columns), bool)
        block[: len(q_idx), : stop - start] = allowed[0]
        tile = tiles.add(block, len(q_idx) * (stop - start), 1 if self._pack == "columns" else 0)
        if diagonal is not None:
            tiles.by_diagonal[diagonal] = tile
        return tile


class _TileStore:
    """The distinct tiles of a mask, found by their bits, or by their diagonal if the mask slides along it."""

    def __init__(self) -> None:
        self.bits: list[Any] = []
        self.by_diagonal: dict[tuple[int, int, int] | None, int] = {}
        self._by_bits: dict[bytes, int] = {}

    def add(self, block: Array, size: int, axis: int) -> int:
        """Return the number of a tile, stored if it is new; `FULL` or `EMPTY` if all or none of its entries are set."""
        count = np.count_nonzero(block)
        if count in (0, size):
            return FULL if count else EMPTY
        bits = np.packbits(block if axis else block.T, axis=1, bitorder="little")
        tile = self._by_bits.setdefault(bits.tobytes(), len(self.bits))
        if tile == len(self.bits):
            self.bits.append(bits)
        return tile


def _join_runs(blocks: IntArray, tiles: IntArray, kv_lo: IntArray, kv_hi: IntArray) -> IntArray:
    """Join adjoining full blocks into one segment each: (segments, 3)."""
    if not len(blocks):
        return np.zeros((0, 3), np.int64)
    joins = (np.diff(blocks) == 1) & (tiles[1:] == FULL) & (tiles[:-1] == FULL)
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    last = np.append(first[1:], len(blocks)) - 1
    return np.stack([kv_lo[blocks[first]], kv_hi[blocks[last]], tiles[first]], axis=1).astype(np.int64)
