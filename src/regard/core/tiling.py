"""Tile sizes of the block loop, and how rows and pairs are split into tiles."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from regard.types import IntArray

# Rows and columns of a tile, and entries of a tile over all its pairs: these sizes stay in the cores' caches.
TILE_ROWS, TILE_COLUMNS, TILE_ENTRIES = 512, 512, 1 << 19
# Largest number of scores of a band that are cached between the two passes instead of recomputed.
CACHED_SCORES = 1 << 22


def split_rows(rows: int) -> Iterator[IntArray]:
    """Split `rows` rows into bands of at most `TILE_ROWS`, in order."""
    for start in range(0, rows, TILE_ROWS):
        yield np.arange(start, min(start + TILE_ROWS, rows))


def split_pairs(shape: tuple[int, int, int]) -> Iterator[IntArray]:
    """Split the (batch, head) pairs into groups whose tiles fit into `TILE_ENTRIES`; one empty group for none."""
    pairs, rows, columns = shape
    size = max(1, TILE_ENTRIES // max(1, min(rows, TILE_ROWS) * min(columns, TILE_COLUMNS)))
    for start in range(0, max(pairs, 1), size):
        yield np.arange(start, min(start + size, pairs))
