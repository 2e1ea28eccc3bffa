"""Tile sizes: how large the blocks are that a matrix, a mask or a product is split into.

Results do not depend on them beyond rounding; time and memory do. `tile_sizes()` returns the current ones and
`use_tile_sizes` changes them for a block of code. Code that splits something reads them once per pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from regard.types import IntArray

# A long matrix of fewer rows, such as a step of decoding, is read in the block loop, in wide tiles.
FEW_ROWS, MANY_COLUMNS = 16, 2048


def has_few_rows(shape: tuple[int, int, int]) -> bool:
    """Return whether a matrix (pairs, rows, columns) is long and has few rows."""
    return shape[1] < FEW_ROWS and shape[2] >= MANY_COLUMNS


@dataclass(frozen=True)
class TileSizes:
    """Sizes of the blocks that work is split into; the defaults keep a tile in the cores' caches.

    Attributes:
        rows: Rows (queries) of a tile of the block loop.
        columns: Columns (keys) of a tile of the block loop; of fewer rows than `rows`, a tile has more columns.
        entries: Entries of a tile over all the (batch, head) pairs that are computed together.
        whole: Weights up to which a matrix is computed as a single tile, if they fit into `rows` × `columns`.
        cached_scores: Scores of a band up to which they are cached between the two passes, not recomputed.
        mask_rows: Rows at which a mask without larger structure is split.
        mask_tile_rows: Rows of a band of a fused call that needs a mask tile.
        mask_tile_entries: Entries of a mask tile, above which a band has fewer rows, but not fewer than 32.
        joined_columns: Columns up to which adjoining blocks of a band are joined into one fused call.
        linear_chunk: Queries and keys of a chunk of linear attention.
        topk_columns: Columns that top-k collects before it searches them.
        intervals: Most intervals of keys that a mask may be converted to.
    """

    rows: int = 512
    columns: int = 512
    entries: int = 1 << 19
    whole: int = 1 << 13
    cached_scores: int = 1 << 22
    mask_rows: int = 256
    mask_tile_rows: int = 512
    mask_tile_entries: int = 1 << 21
    joined_columns: int = 2048
    linear_chunk: int = 256
    topk_columns: int = 4096
    intervals: int = 1 << 22

    def widen(self, shape: tuple[int, int, int]) -> TileSizes:
        """Return sizes for a matrix (pairs, rows, columns): with few rows, a tile has as many columns as fit."""
        if not has_few_rows(shape):
            return self
        return replace(self, columns=max(self.columns, self.entries // max(1, shape[0] * shape[1])))

    def limit_tile_rows(self, columns: int) -> int:
        """Return the most rows of a band whose mask tile has some columns."""
        return min(self.mask_tile_rows, max(32, self.mask_tile_entries // max(1, columns)))

    def split_rows(self, count: int) -> Iterator[IntArray]:
        """Split `count` rows into bands of at most `rows` each, in order."""
        for start in range(0, count, self.rows):
            yield np.arange(start, min(start + self.rows, count))

    def is_whole(self, shape: tuple[int, int, int]) -> bool:
        """Return whether a matrix of shape (pairs, rows, columns) is small enough for a single tile, and not empty."""
        return 0 < math.prod(shape) <= min(self.whole, self.entries, self.rows * self.columns)

    def split_pairs(self, shape: tuple[int, int, int]) -> Iterator[IntArray]:
        """Split the (batch, head) pairs of a matrix into groups whose tiles have at most `entries` entries.

        `shape` is (pairs, rows, columns). Without pairs there is one empty group.
        """
        pairs, rows, columns = shape
        size = max(1, self.entries // max(1, min(rows, self.rows) * min(columns, self.columns)))
        for start in range(0, max(pairs, 1), size):
            yield np.arange(start, min(start + size, pairs))


_DEFAULT = TileSizes()
_ON_DEVICE = TileSizes(rows=1024, columns=2048, entries=1 << 24, cached_scores=1 << 26)
_CHANGES: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("tile_sizes", default=())


def tile_sizes(*, on_device: bool = False) -> TileSizes:
    """Return the tile sizes that are in effect for this thread or task.

    >>> tile_sizes().columns, tile_sizes(on_device=True).columns
    (512, 2048)
    """
    return _change_sizes(on_device, _CHANGES.get())


@lru_cache(maxsize=64)
def _change_sizes(on_device: bool, changes: tuple[tuple[str, int], ...]) -> TileSizes:
    return replace(_ON_DEVICE if on_device else _DEFAULT, **dict(changes))


@contextmanager
def use_tile_sizes(**changes: int) -> Iterator[TileSizes]:
    """Change some tile sizes inside a `with` block, for this thread or task only, on every device.

    >>> with use_tile_sizes(rows=128, columns=256):
    ...     tile_sizes().rows, tile_sizes().columns
    (128, 256)
    """
    merged = {**dict(_CHANGES.get()), **changes}
    sizes = replace(_DEFAULT, **merged)  # raises for unknown names
    token = _CHANGES.set(tuple(sorted(merged.items())))
    try:
        yield sizes
    finally:
        _CHANGES.reset(token)
