"""Describe a mask by segments: for each block of rows, the runs of keys that a compiled pass reads.

A run of full blocks is one segment without a mask. A partial block is a segment with a tile of bits. Empty blocks have
no segment, equal tiles are stored once, and only partial blocks are evaluated. The tiles of an irregular mask have one
bit for each entry of the matrix, so `iterate_segments` describes as many rows at a time as a limit of bytes allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from regard.errors import TooLargeError
from regard.frame import Frame, is_contiguous
from regard.masks.base import Mask, classify_blocks
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace

FULL = -1  # the tile of a segment that the mask allows as a whole
MAX_TILE_BYTES = 1 << 23  # of tiles that are converted to intervals at a time
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


class SegmentRange(NamedTuple):
    """The segments of some row blocks for (batch, head) pairs whose masks are equal there.

    Attributes:
        pairs: Numbers of the pairs.
        first_block: First row block.
        last_block: Row block after the last.
        segments: The segments; entry 0 of `offsets` belongs to `first_block`.
    """

    pairs: IntArray
    first_block: int
    last_block: int
    segments: MaskSegments


def build_segments(
    mask: Mask | None, frame: Frame, q_idx: IntArray, block_rows: int, block_columns: int, **options: Any
) -> PairSegments:
    """Describe a mask by the segments of all its rows, with the parameters of `iterate_segments`.

    >>> from regard import causal
    >>> (causal_segments,), _ = build_segments(causal(), Frame((), 24, 24), np.arange(24), 8, 8)
    >>> causal_segments.segments.tolist()
    [[0, 8, 0], [0, 8, -1], [8, 16, 0], [0, 16, -1], [16, 24, 0]]
    >>> causal_segments.tiles[0, :, 0].tolist()
    [1, 3, 7, 15, 31, 63, 127, 255]
    """
    distinct: list[MaskSegments] = []
    pair_index = np.zeros(len(frame.selected), np.int64)
    for part in iterate_segments(mask, frame, q_idx, block_rows, block_columns, **options):
        pair_index[part.pairs] = len(distinct)
        distinct.append(part.segments)
    return PairSegments(distinct, pair_index)


def iterate_segments(
    mask: Mask | None,
    frame: Frame,
    q_idx: IntArray,
    block_rows: int,
    block_columns: int,
    *,
    max_tile_bytes: float = float("inf"),
    pack: Literal["columns", "rows"] = "columns",
    kv_range: range | None = None,
    xp: Namespace = np,
    to_numpy: Callable[[Array], Any] = np.asarray,
) -> Iterator[SegmentRange]:
    """Describe a mask by segments, some row blocks at a time.

    Args:
        mask: The mask; None allows every key.
        frame: The (batch, head) pairs and the lengths.
        q_idx: Positions of the rows: (rows,).
        block_rows: Rows of a block, a multiple of 8.
        block_columns: Keys of a block, a multiple of 8.
        max_tile_bytes: Bytes of tiles after which a range ends; it has one row block at least.
        pack: Axis along which the bits of a tile are packed.
        kv_range: The keys to describe; None for all.
        xp: Array API namespace to evaluate the mask with.
        to_numpy: Conversion of its arrays to NumPy.
    """
    keys = range(frame.kv_len) if kv_range is None else kv_range
    builder = _SegmentBuilder(mask, q_idx, keys, block_rows, block_columns, pack, xp, to_numpy)
    pairs = len(frame.selected)
    remaining = [(np.arange(pairs), 0)] if pairs else []
    if mask is not None and mask.varies_by_batch and pairs > 1:
        remaining = [(group, 0) for group in frame.split_batch()]
    while remaining:
        group, first_block = remaining.pop(0)
        built = builder.build(frame.select(group), first_block, max_tile_bytes)
        if built is None:
            remaining[:0] = [(group[i : i + 1], first_block) for i in range(len(group))]
            continue
        segments, last_block = built
        yield SegmentRange(group, first_block, last_block, segments)
        if last_block * block_rows < len(q_idx):
            remaining.insert(0, (group, last_block))


@dataclass(frozen=True)
class _SegmentBuilder:
    """Builds the segments of one mask and set of rows for several frames."""

    _mask: Mask | None
    _q_idx: IntArray
    _keys: range
    _rows: int
    _columns: int
    _pack: str
    _xp: Namespace
    _to_numpy: Callable[[Array], Any]

    def build(self, frame: Frame, first_block: int, max_tile_bytes: float) -> tuple[MaskSegments, int] | None:
        """Build segments from a row block to the one where the tiles exceed a limit; return them and the block after.

        Return None if the mask differs between the pairs of the frame.
        """
        kv_lo = np.arange(self._keys.start, self._keys.stop, self._columns)
        kv_hi = np.minimum(kv_lo + self._columns, self._keys.stop)
        tiles = _TileStore()
        segments: list[IntArray] = []
        counts = [0]
        last_block = first_block
        for start in range(first_block * self._rows, len(self._q_idx), self._rows):
            if tiles.nbytes > max_tile_bytes:
                break
            last_block += 1
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
        built = MaskSegments(
            np.cumsum(counts),
            np.concatenate([np.zeros((0, 3), np.int64), *segments]),
            tiles.join().reshape(-1, shape[0], shape[1] // 8),
        )
        return built, last_block

    def _classify(
        self, frame: Frame, q_idx: IntArray, kv_lo: IntArray, kv_hi: IntArray
    ) -> tuple[IntArray, Array]:
        """Return the blocks that are not empty, and which of them are full."""
        nonempty, full = classify_blocks(
            self._mask, frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi
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
        self.nbytes = 0
        self.by_diagonal: dict[tuple[int, int, int] | None, int] = {}
        self._by_bits: dict[bytes, int] = {}

    def add(self, block: Array, size: int, axis: int) -> int:
        """Return the number of a tile, stored if it is new; `FULL` or `EMPTY` if all or none of its entries are set."""
        count = np.count_nonzero(block)
        if count in (0, size):
            return FULL if count else EMPTY
        bits = np.packbits(block if axis else block.T, axis=1, bitorder="little").tobytes()
        if bits not in self._by_bits:
            self._by_bits[bits] = len(self._by_bits)
            self.nbytes += len(bits)
        return self._by_bits[bits]

    def join(self) -> Array:
        """Return the bytes of all tiles, in the order of their numbers."""
        return np.frombuffer(bytearray().join(self._by_bits), np.uint8)


def _join_runs(blocks: IntArray, tiles: IntArray, kv_lo: IntArray, kv_hi: IntArray) -> IntArray:
    """Join adjoining full blocks into one segment each: (segments, 3)."""
    if not len(blocks):
        return np.zeros((0, 3), np.int64)
    joins = (np.diff(blocks) == 1) & (tiles[1:] == FULL) & (tiles[:-1] == FULL)
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    last = np.append(first[1:], len(blocks)) - 1
    return np.stack([kv_lo[blocks[first]], kv_hi[blocks[last]], tiles[first]], axis=1).astype(np.int64)


# Intervals of single rows


class KeyIntervals(NamedTuple):
    """Intervals of keys of some rows.

    Attributes:
        offsets: The intervals of row i are `edges[offsets[i] : offsets[i + 1]]`: (rows + 1,).
        edges: First key of each interval, and the key after its last: (intervals, 2).
    """

    offsets: IntArray
    edges: IntArray


def find_intervals(
    mask: Mask | None,
    frame: Frame,
    q_idx: IntArray,
    operation: str,
    xp: Namespace = np,
    to_numpy: Callable[[Array], Any] = np.asarray,
) -> KeyIntervals:
    """Find the intervals of keys that the rows of one (batch, head) pair may attend to.

    Args:
        mask: The mask; None allows every key.
        frame: Frame of one pair.
        q_idx: Positions of the rows: (rows,).
        operation: Operation that an error message names.
        xp: Array API namespace to evaluate the mask with.
        to_numpy: Conversion of its arrays to NumPy.

    >>> from regard import causal, sliding_window
    >>> from regard.masks import first
    >>> mask = causal() & (sliding_window(2) | first(1))
    >>> intervals = find_intervals(mask, Frame((), 4, 4), np.arange(4), "page")
    >>> intervals.offsets.tolist(), intervals.edges.tolist()
    ([0, 1, 2, 3, 5], [[0, 1], [0, 2], [0, 3], [0, 1], [2, 4]])
    """
    sizes = tile_sizes()
    rows, columns = (-(-size // 8) * 8 for size in (sizes.rows, sizes.columns))
    counts, edges, total = [np.zeros(1, np.int64)], [np.zeros((0, 2), np.int64)], 0
    for part in iterate_segments(
        mask, frame, q_idx, rows, columns, max_tile_bytes=MAX_TILE_BYTES, xp=xp, to_numpy=to_numpy
    ):
        offsets, segments, tiles = part.segments
        for block in range(part.last_block - part.first_block):
            num_rows = min(rows, len(q_idx) - (part.first_block + block) * rows)
            changes = [np.zeros(0, np.int64)]
            for start, stop, tile in segments[offsets[block] : offsets[block + 1]]:
                allowed, ends = np.ones((num_rows, 1), np.int8), np.array([start, stop])
                if tile != FULL:
                    bits = np.unpackbits(tiles[tile], axis=1, bitorder="little")
                    allowed, ends = (
                        bits[:num_rows, : stop - start].astype(np.int8),
                        np.arange(start, stop + 1),
                    )
                row, column = np.nonzero(np.diff(allowed, axis=1, prepend=0, append=0))
                changes.append(row * (frame.kv_len + 1) + ends[column])
            # Where one segment ends and the next begins, an interval goes on.
            found, times = np.unique(np.concatenate(changes), return_counts=True)
            row, key = np.divmod(found[times == 1], frame.kv_len + 1)
            edges.append(key.reshape(-1, 2))
            counts.append(np.bincount(row, minlength=num_rows) // 2)
            total += len(edges[-1])
            if total > sizes.intervals:
                raise TooLargeError(
                    operation,
                    received=f"a mask with more than {sizes.intervals:,} intervals of keys, {mask}",
                    expected="rows that each attend to a few intervals of keys",
                    hint="Select fewer rows with A.lazy[..., rows, :], or use a mask with larger blocks.",
                )
    return KeyIntervals(np.cumsum(np.concatenate(counts)), np.concatenate(edges))
