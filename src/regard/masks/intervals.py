"""A mask as each row's runs of keys: what it lets through, in as many numbers as it has edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from regard.errors import TooLargeError
from regard.frame import Frame
from regard.masks.base import Mask
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace


class Runs(NamedTuple):
    """Runs of keys: those of row i are `edges[offsets[i] : offsets[i + 1]]`, (first, one after the last) each."""

    offsets: IntArray
    edges: IntArray


def runs(
    mask: Mask | None,
    frame: Frame,
    q_idx: IntArray,
    operation: str,
    xp: Namespace = np,
    to_numpy: Callable[[Array], Any] = np.asarray,
) -> Runs:
    """The runs of keys that one pair's rows `q_idx` may see; only blocks that a mask cuts through are tested.

    >>> from regard import causal, first, sliding_window
    >>> found = runs(causal() & (sliding_window(2) | first(1)), Frame((), 4, 4), np.arange(4), "page")
    >>> found.offsets.tolist(), found.edges.tolist()
    ([0, 1, 2, 3, 5], [[0, 1], [0, 2], [0, 3], [0, 1], [2, 4]])
    """
    if mask is None:
        return Runs(np.arange(len(q_idx) + 1), np.tile(np.array([0, frame.kv_len]), (len(q_idx), 1)))
    sizes = tile_sizes()
    counts: list[IntArray] = []
    edges: list[IntArray] = []
    total = 0
    for start in range(0, len(q_idx), sizes.rows):
        band = q_idx[start : start + sizes.rows]
        changes = list(_changes(mask, frame, band, sizes.columns, xp, to_numpy))
        rows = np.concatenate([np.zeros(0, np.int64), *(row for row, _ in changes)])
        places = np.concatenate([np.zeros(0, np.int64), *(place for _, place in changes)])
        order = np.lexsort((places, rows))
        edges.append(
            places[order].reshape(-1, 2)
        )  # a row that begins to see ends it, at the last key at the latest
        counts.append(np.bincount(rows, minlength=len(band)) // 2)
        total += len(edges[-1])
        if total > sizes.intervals:
            raise TooLargeError(
                operation,
                received=f"a mask with more than {sizes.intervals:,} runs of keys, {mask}",
                expected="rows that see a few runs of keys each",
                hint="Take some rows, A.lazy[..., rows, :], or a mask with larger pieces.",
            )
    none = np.zeros((0, 2), np.int64)
    return Runs(np.cumsum(np.concatenate([[0], *counts])), np.concatenate([none, *edges]))


def _changes(
    mask: Mask, frame: Frame, q_idx: IntArray, width: int, xp: Namespace, to_numpy: Callable[[Array], Any]
) -> Iterator[tuple[IntArray, IntArray]]:
    """Rows of a band and the keys at which what they see begins or ends."""
    kv_lo = np.arange(0, frame.kv_len, width)
    kv_hi = np.minimum(kv_lo + width, frame.kv_len)
    may, must = mask.bounds(frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi)
    partial = may & ~must
    before: Array = np.zeros(len(q_idx), bool)
    last = None
    for i in range(len(kv_lo)):
        if not partial[i]:
            if last == must[i]:
                continue  # as the block before it
            here = np.full((len(q_idx), 1), must[i])
        else:
            here = to_numpy(mask.allows(frame, q_idx, np.arange(kv_lo[i], kv_hi[i]), xp))
            here = np.broadcast_to(here.reshape(here.shape[-2:]), (len(q_idx), kv_hi[i] - kv_lo[i]))
        rows, columns = np.nonzero(np.diff(here, axis=1, prepend=before[:, None]))
        yield rows, columns + kv_lo[i]
        before, last = here[:, -1], None if partial[i] else must[i]
    open_rows = np.flatnonzero(before)
    yield open_rows, np.full(len(open_rows), frame.kv_len)
