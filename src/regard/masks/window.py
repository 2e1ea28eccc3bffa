"""Masks along the diagonal: causal attention and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.errors import ArgumentError
from regard.frame import Frame
from regard.masks.base import BlockKinds, Mask, SplitPoints
from regard.masks.parameters import IntParameter, as_int_parameter, as_limit, sort_splits
from regard.tiling import tile_sizes
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import check_align


def causal(align: Align | None = None) -> Mask:
    """Return a mask that lets a query attend to its own position and earlier ones: kv_idx ≤ q_idx.

    Args:
        align: Which corner the diagonal starts from; required if q_len ≠ kv_len. With "upper_left", query 0 is at
            key 0. With "lower_right", the last query is at the last key, as in decoding with a cache.

    Returns:
        The mask.

    Raises:
        ArgumentError: If `align` is not one of these.

    >>> from regard import causal
    >>> causal().to_dense(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    >>> causal(align="upper_left").to_dense(2, 5).astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0]])
    """
    check_align(align, "causal")
    return BandMask(None, IntParameter(0), align)


def sliding_window(
    size: int | Array | None = None,
    *,
    left: int | Array | None = None,
    right: int | Array | None = None,
    align: Align | None = None,
) -> Mask:
    """Return a mask that lets a query attend to the keys near its own position.

    Pass either `size`, for the `size` keys that end at the query's own (q_idx − size < kv_idx ≤ q_idx), or `left` and
    `right`, for a two-sided window (q_idx − left ≤ kv_idx ≤ q_idx + right).

    Args:
        size: Number of keys, the query's own included. An integer, or an array of shape (heads,).
        left: Number of keys before the query's own; None for no limit. An integer, or an array of shape (heads,).
        right: Number of keys after the query's own; None for no limit. An integer, or an array of shape (heads,).
        align: Which corner the diagonal starts from, as in `causal`.

    Returns:
        The mask.

    Raises:
        ArgumentError: If both forms or neither are given, or a size is not a whole number.

    >>> from regard import sliding_window
    >>> sliding_window(2).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    >>> sliding_window(left=1, right=0, align="lower_right").to_dense(2, 5).astype(int)
    array([[0, 0, 1, 1, 0],
           [0, 0, 0, 1, 1]])
    """
    check_align(align, "sliding_window")
    if (size is None) == (left is None and right is None):
        raise ArgumentError(
            "sliding_window",
            received=f"size={size!r}, left={left!r}, right={right!r}",
            expected="either size, or left and right",
            hint="sliding_window(4) is sliding_window(left=3, right=0): size counts the query's own key.",
        )
    if size is not None:
        counts = as_int_parameter(size, "sliding_window", 1)
        return BandMask(IntParameter(counts.array - 1), IntParameter(0), align)
    sides = [None if side is None else as_int_parameter(side, "sliding_window", 0) for side in (left, right)]
    return BandMask(sides[0], sides[1], align)


@dataclass(frozen=True)
class BandMask(Mask):
    """A band along the diagonal: −left ≤ kv_idx − q_idx ≤ right, where None is no limit."""

    left: IntParameter | None
    right: IntParameter | None
    align: Align | None

    def resolve(self, frame: Frame) -> tuple[Array, Array]:
        """Return the lowest and the highest allowed kv_idx − q_idx, (pairs or 1, 1) each."""
        offset = frame.offset(self.align, self._name)
        largest = frame.q_len + frame.kv_len  # no window is wider, and sums stay in range
        left, right = (
            np.full((1, 1), largest)
            if side is None
            else np.minimum(frame.per_head(side.array, self._name), largest)[:, None]
            for side in (self.left, self.right)
        )
        return offset - left, offset + right

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        low, high = (as_limit(limit[..., None], xp) for limit in frame.resolve(self))
        ahead = xp.asarray(kv_idx)[None, None, :] - xp.asarray(q_idx)[None, :, None]
        if self.left is None:
            return ahead <= high
        if self.right is None:
            return ahead >= low
        return (ahead >= low) & (ahead <= high)

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        low, high = frame.resolve(self)
        lowest, highest = kv_lo - (q_hi - 1), (kv_hi - 1) - q_lo
        nonempty = (np.maximum(lowest, low) <= np.minimum(highest, high)).any(0)
        return BlockKinds(nonempty, ((lowest >= low) & (highest <= high)).all(0))

    def check(self, frame: Frame) -> None:
        if self.align is not None or frame.q_len != frame.kv_len:
            frame.offset(self.align, self._name)
        for side in (self.left, self.right):
            if side is not None and side.array.ndim:
                frame.per_head(side.array, self._name)

    def restrict(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        rest = super().restrict(frame, rows, columns)
        low, _ = frame.resolve(self)
        if rest is self and columns.start - (rows.stop - 1) >= np.max(low):
            # The left limit is outside this block.
            return BandMask(None, self.right, self.align) if self.right is not None else True
        return rest

    def split_points(self, frame: Frame) -> SplitPoints:
        _, high = frame.resolve(self)
        if np.size(high) > 1 or (self.right is None):
            return super().split_points(frame)
        diagonal = int(np.min(high))  # the last column of row r is r + diagonal
        rows = (
            np.arange(max(0, -diagonal), frame.q_len, tile_sizes().mask_rows)
            if self.left is not None
            else np.array([max(0, -diagonal)])
        )
        columns = rows + diagonal
        return SplitPoints(sort_splits(rows, frame.q_len), sort_splits(columns, frame.kv_len))

    def intersect(self, other: Mask) -> Mask | None:
        if not isinstance(other, BandMask) or other.align != self.align:
            return None
        left, right = (
            own or given if own is None or given is None else IntParameter(np.minimum(own.array, given.array))
            for own, given in ((self.left, other.left), (self.right, other.right))
        )
        return BandMask(left, right, self.align)

    def diagonal(self, frame: Frame) -> int | None:
        if self.left is not None or self.right is None or self.right.array.ndim:
            return None
        return frame.offset(self.align, self._name) + int(self.right.array)

    @property
    def is_relative(self) -> bool:
        return True

    @property
    def _name(self) -> str:
        """Name of the constructor, for error messages."""
        return "causal" if self.left is None and self.right == IntParameter(0) else "sliding_window"

    def __repr__(self) -> str:
        align = f"align={self.align!r}" if self.align else ""
        if self.left is None and self.right == IntParameter(0):
            return f"causal({align})"
        if self.left is not None and self.right == IntParameter(0):
            size = IntParameter(self.left.array + 1)
            return f"sliding_window({size}{', ' if align else ''}{align})"
        return f"sliding_window(left={self.left}, right={self.right}{', ' if align else ''}{align})"
