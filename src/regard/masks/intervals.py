"""Convert a mask to the intervals of keys that each row may attend to: as many numbers as the mask has edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from regard.errors import TooLargeError
from regard.frame import Frame
from regard.masks.base import Mask
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace


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

    Only partial blocks of the mask are evaluated.

    Args:
        mask: The mask; None allows every key.
        frame: Frame of one pair.
        q_idx: Positions of the rows: (rows,).
        operation: Operation that an error message names.
        xp: Array API namespace to evaluate the mask with.
        to_numpy: Conversion of its arrays to NumPy.

    Returns:
        The intervals of each row.

    Raises:
        TooLargeError: If there are more intervals than `tile_sizes().intervals`.

    >>> from regard import causal, first, sliding_window
    >>> mask = causal() & (sliding_window(2) | first(1))
    >>> intervals = find_intervals(mask, Frame((), 4, 4), np.arange(4), "page")
    >>> intervals.offsets.tolist(), intervals.edges.tolist()
    ([0, 1, 2, 3, 5], [[0, 1], [0, 2], [0, 3], [0, 1], [2, 4]])
    """
    if mask is None:
        return KeyIntervals(np.arange(len(q_idx) + 1), np.tile(np.array([0, frame.kv_len]), (len(q_idx), 1)))
    sizes = tile_sizes()
    counts: list[IntArray] = []
    edges: list[IntArray] = []
    total = 0
    for start in range(0, len(q_idx), sizes.rows):
        band = q_idx[start : start + sizes.rows]
        changes = list(_find_changes(mask, frame, band, sizes.columns, xp, to_numpy))
        rows = np.concatenate([np.zeros(0, np.int64), *(row for row, _ in changes)])
        keys = np.concatenate([np.zeros(0, np.int64), *(key for _, key in changes)])
        order = np.lexsort((keys, rows))
        edges.append(keys[order].reshape(-1, 2))  # every interval ends, after the last key at the latest
        counts.append(np.bincount(rows, minlength=len(band)) // 2)
        total += len(edges[-1])
        if total > sizes.intervals:
            raise TooLargeError(
                operation,
                received=f"a mask with more than {sizes.intervals:,} intervals of keys, {mask}",
                expected="rows that attend to a few intervals of keys each",
                hint="Select fewer rows with A.lazy[..., rows, :], or use a mask with larger blocks.",
            )
    none = np.zeros((0, 2), np.int64)
    return KeyIntervals(np.cumsum(np.concatenate([[0], *counts])), np.concatenate([none, *edges]))


def _find_changes(
    mask: Mask,
    frame: Frame,
    q_idx: IntArray,
    width: int,
    xp: Namespace,
    to_numpy: Callable[[Array], Any],
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield rows of a band, and the keys at which an interval of theirs begins or ends."""
    kv_lo = np.arange(0, frame.kv_len, width)
    kv_hi = np.minimum(kv_lo + width, frame.kv_len)
    nonempty, full = mask.classify_blocks(frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi)
    partial = nonempty & ~full
    before: Array = np.zeros(len(q_idx), bool)
    last_kind = None
    for i in range(len(kv_lo)):
        if not partial[i]:
            if last_kind == full[i]:
                continue  # like the block before it
            allowed = np.full((len(q_idx), 1), full[i])
        else:
            allowed = to_numpy(mask.allows(frame, q_idx, np.arange(kv_lo[i], kv_hi[i]), xp))
            allowed = np.broadcast_to(allowed.reshape(allowed.shape[-2:]), (len(q_idx), kv_hi[i] - kv_lo[i]))
        rows, columns = np.nonzero(np.diff(allowed, axis=1, prepend=before[:, None]))
        yield rows, columns + kv_lo[i]
        before, last_kind = allowed[:, -1], None if partial[i] else full[i]
    open_rows = np.flatnonzero(before)
    yield open_rows, np.full(len(open_rows), frame.kv_len)
