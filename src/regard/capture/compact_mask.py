"""A mask and bias of q_len × kv_len in O(q_len) memory, and its name in terms of `regard.masks`.

Nearly every mask in use lets each query attend to one interval of keys: causal, padded on either side, sliding window,
packed, chunked. So a mask is stored as the intervals of its rows. Rows of several calls concatenate by their intervals,
and the name is derived from the intervals alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from regard.capture.interval_mask import IntervalMask, UniformRows
from regard.masks import Mask, causal, dense, padding, sliding_window
from regard.score_mods import ScoreMod
from regard.types import Align, IntArray

Tensor = Any  # the types of torch are not followed
BoolArray = Any


@dataclass(frozen=True)
class CompactMask:
    """The keys that each row attends to, and the bias added to the scores.

    Args:
        start: First key of each row's interval; broadcasts to (…, heads, q_len).
        stop: End of each row's interval, exclusive; broadcasts to (…, heads, q_len).
        visible_keys: (…, kv_len), False for keys inside intervals that are masked in every row; None if there are
            none.
        uniform_keys: Integers that broadcast to (…, heads, q_len). A row with n > 0 is fully masked, and gives equal
            weights to its first n keys, or to all if there are fewer.
        dense_mask: A boolean mask, True = attend, of rows that are not intervals.
        bias: What is added to the scores, or another modification of them.
        tiled_mask: A mask of rows that are not intervals, evaluated in tiles; `start` and `stop` contain its keys.
        visible_counts: Number of keys that each row of such a mask attends to; broadcasts to (…, heads, q_len).
    """

    start: IntArray
    stop: IntArray
    visible_keys: BoolArray | None = None
    uniform_keys: IntArray | None = None
    dense_mask: Tensor | None = None
    bias: ScoreMod | None = None
    tiled_mask: Mask | None = None
    visible_counts: IntArray | None = None

    @cached_property
    def last_key(self) -> int:
        """End of the last interval, exclusive: no row attends to a key from there on."""
        return int(self.stop.max(initial=0))

    @cached_property
    def nbytes(self) -> int:
        """The bytes of arrays of q_len × kv_len, which intervals could not replace."""
        return sum(int(array.nbytes) for array in self.stored_arrays)

    @property
    def stored_arrays(self) -> list[Tensor]:
        """The arrays of q_len × kv_len: the dense mask and the array of the bias, as far as there are any."""
        arrays = (self.dense_mask, getattr(self.bias, "array", None))
        return [array for array in arrays if array is not None]

    def mask(self, q_len: int, kv_len: int) -> Mask | None:
        """Return the mask by its name, or None if nothing is masked."""
        if self.tiled_mask is not None:
            return self.tiled_mask
        mask = name_mask(self.start, self.stop, q_len, kv_len)
        if self.uniform_keys is not None and mask is not None:
            stop = np.minimum(self.uniform_keys, kv_len)
            mask |= IntervalMask(np.zeros_like(self.uniform_keys), stop, "fully masked rows")
        keys = None if self.visible_keys is None else torch.as_tensor(self.visible_keys)[..., None, :]
        for array in (keys, self.dense_mask):
            if array is not None:
                mask = dense(array) if mask is None else mask & dense(array)
        return mask

    def score_mods(self) -> tuple[ScoreMod, ...]:
        """Return the score modifications: the bias, and zero scores in fully masked rows with equal weights."""
        uniform = None if self.uniform_keys is None else UniformRows(self.uniform_keys > 0)
        return tuple(mod for mod in (self.bias, uniform) if mod is not None)

    @property
    def empty_rows(self) -> BoolArray | None:
        """Rows whose weights are all zero, broadcasting to (…, heads, q_len); None if there are none."""
        if self.dense_mask is not None:
            empty = ~self.dense_mask.any(-1).cpu().numpy()
        else:
            empty = self.start >= self.stop
            if self.uniform_keys is not None:
                empty = empty & (self.uniform_keys == 0)
        return empty if empty.any() else None


def name_mask(start: IntArray, stop: IntArray, q_len: int, kv_len: int) -> Mask | None:
    """Name the mask with these intervals: causal, sliding window and padding where they express it.

    Args:
        start: First key of each row, (…, q_len).
        stop: End of each row's interval, exclusive, (…, q_len).
        q_len: Number of queries.
        kv_len: Number of keys.

    Returns:
        The mask with the shortest repr, or an `IntervalMask`; None if every row attends to every key.
    """
    if not q_len or not ((start > 0) | (stop < kv_len)).any():
        return None
    shape = np.broadcast_shapes(start.shape, stop.shape)
    start, stop = np.broadcast_to(start, shape), np.broadcast_to(stop, shape)
    masks = []
    if len(shape) < 2 or shape[-2] == 1:  # the heads share the mask
        offsets = dict.fromkeys((kv_len - q_len, 0))
        masks = [
            mask
            for offset in offsets
            if (mask := _name_banded_mask(start, stop, q_len, kv_len, offset)) is not None
        ]
    return min(masks, key=lambda mask: len(repr(mask))) if masks else IntervalMask(start, stop)


def _name_banded_mask(start: IntArray, stop: IntArray, q_len: int, kv_len: int, offset: int) -> Mask | None:
    """Name a band about the diagonal with padding on either side; None if the intervals are something else."""
    position = np.arange(q_len) + offset  # of each query among the keys
    live = start < stop
    first = np.where(live, start, kv_len).min(-1, keepdims=True)
    last = np.where(live, stop, 0).max(-1, keepdims=True)
    first = np.minimum(first, last)
    lefts = np.broadcast_to(position - start, start.shape)[live & (start > first)]
    rights = np.broadcast_to(stop - 1 - position, start.shape)[live & (stop < last)]
    left, right = (int(widths.flat[0]) if widths.size else None for widths in (lefts, rights))
    if min(left or 0, right or 0) < 0:
        return None
    # Try without padding first: the band alone may mask the first and the last keys.
    for pads_left, pads_right in product((False, True), repeat=2):
        low, high = first if pads_left else 0, last if pads_right else kv_len
        low = low if left is None else np.maximum(low, position - left)
        high = high if right is None else np.minimum(high, position + 1 + right)
        if np.where(live, (low == start) & (high == stop), low >= high).all():
            break
    else:
        return None
    align: Align | None = None if q_len == kv_len else "lower_right" if offset else "upper_left"
    parts: list[Mask] = []
    if left is None and right == 0:
        parts.append(causal(align))
    elif right == 0 and left is not None:
        parts.append(sliding_window(left + 1, align=align))
    elif (left, right) != (None, None):
        parts.append(sliding_window(left=left, right=right, align=align))
    batch = start.shape[:-2]
    if pads_right:
        parts.append(padding(_as_lengths(last, batch)))
    if pads_left:
        parts.append(padding(_as_lengths(kv_len - first, batch), side="left"))
    mask = parts[0] if parts else None
    for part in parts[1:]:
        mask = part if mask is None else mask & part
    return mask


def _as_lengths(lengths: IntArray, batch: tuple[int, ...]) -> Any:
    return int(lengths.item()) if lengths.size == 1 else lengths.reshape(batch)
