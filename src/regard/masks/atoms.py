"""The kinds of mask that are not made of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from regard.errors import ArgumentError
from regard.frame import Frame, check_matrix_shape, take_block
from regard.masks.base import Bounds, Cuts, Mask
from regard.tiling import tile_sizes
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import as_array


def _from_zero(positions: IntArray, length: int) -> IntArray:
    """Positions inside an axis, ascending, 0 among them."""
    inside = positions[(positions > 0) & (positions < length)]
    return np.unique(np.concatenate([[0], inside])).astype(np.int64)


class Numbers:
    """Numbers of a mask, one or an array of them, that compare and hash by content and print as a list."""

    def __init__(self, numbers: Any) -> None:
        self.array = np.asarray(numbers)
        self.array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))

    def __repr__(self) -> str:
        shown = self.array.tolist()
        return f"<{self.array.shape} numbers>" if self.array.size > 16 else repr(shown)


def whole_numbers(numbers: Any, operation: str, least: int | None) -> Numbers:
    """Numbers that count tokens, `least` or more; or, without a least, that name documents."""
    array = as_array(numbers, operation, "numbers")
    if not array.size:
        array = array.astype(np.int64)  # of no batch entries; NumPy takes an empty list for floats
    if array.dtype.kind not in "iu" or (least is not None and array.size and array.min() < least):
        raise ArgumentError(
            operation,
            received=f"{numbers!r}",
            expected="whole numbers" + ("" if least is None else f", {least} or more"),
            hint="Number the documents: 0, 1, 2, …" if least is None else "Sizes and lengths count tokens.",
        )
    return Numbers(array.astype(np.int64))


@dataclass(frozen=True)
class Band(Mask):
    """A band about the diagonal: −left ≤ kv_idx − q_idx ≤ right, without bound where None."""

    left: Numbers | None
    right: Numbers | None
    align: Align | None

    def _edges(self, frame: Frame) -> tuple[Any, Any]:
        """The lowest and highest kv_idx − q_idx let through, `(pairs or 1, 1, 1)` each, in plain rows and columns."""
        offset = frame.offset(self.align, self._name)
        low, high = -np.inf, np.inf
        most = frame.q_len + frame.kv_len  # no window reaches farther, and sums stay in range
        if self.left is not None:
            low = offset - np.minimum(frame.per_head(self.left.array, self._name), most)[:, None, None]
        if self.right is not None:
            high = offset + np.minimum(frame.per_head(self.right.array, self._name), most)[:, None, None]
        return low, high

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        low, high = self._edges(frame)
        ahead = xp.asarray(kv_idx)[None, None, :] - xp.asarray(q_idx)[None, :, None]
        if self.left is None:
            return ahead <= xp.asarray(high)
        if self.right is None:
            return ahead >= xp.asarray(low)
        return (ahead >= xp.asarray(low)) & (ahead <= xp.asarray(high))

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        low, high = (np.reshape(edge, (-1, 1)) for edge in self._edges(frame))
        least, most = kv_lo - (q_hi - 1), (kv_hi - 1) - q_lo
        may = (np.maximum(least, low) <= np.minimum(most, high)).any(0)
        return Bounds(may, ((least >= low) & (most <= high)).all(0))

    def check(self, frame: Frame) -> None:
        if self.align is not None or frame.q_len != frame.kv_len:
            frame.offset(self.align, self._name)
        for side in (self.left, self.right):
            if side is not None and side.array.ndim:
                frame.per_head(side.array, self._name)

    def within(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        here = super().within(frame, rows, columns)
        low, _ = self._edges(frame)
        if here is self and columns.start - (rows.stop - 1) >= np.max(low):
            # The left edge does not cut this block.
            return Band(None, self.right, self.align) if self.right is not None else True
        return here

    def cuts(self, frame: Frame) -> Cuts:
        _, high = self._edges(frame)
        if np.size(high) > 1 or (self.right is None):
            return super().cuts(frame)
        edge = int(np.min(high))  # the highest column of row r is r + edge
        rows = (
            np.arange(max(0, -edge), frame.q_len, tile_sizes().mask_rows)
            if self.left is not None
            else np.array([max(0, -edge)])
        )
        columns = rows + edge
        return Cuts(_from_zero(rows, frame.q_len), _from_zero(columns, frame.kv_len))

    def diagonal(self, frame: Frame) -> int | None:
        if self.left is not None or self.right is None or self.right.array.ndim:
            return None
        return frame.offset(self.align, self._name) + int(self.right.array)

    @property
    def slides(self) -> bool:
        return True

    @property
    def _name(self) -> str:
        return "causal" if self.left is None and self.right == Numbers(0) else "sliding_window"

    def __repr__(self) -> str:
        align = f"align={self.align!r}" if self.align else ""
        if self.left is None and self.right == Numbers(0):
            return f"causal({align})"
        if self.left is not None and self.right == Numbers(0):
            size = Numbers(self.left.array + 1)
            return f"sliding_window({size}{', ' if align else ''}{align})"
        return f"sliding_window(left={self.left}, right={self.right}{', ' if align else ''}{align})"


@dataclass(frozen=True)
class Keys(Mask):
    """The first (side "right": padding follows) or the last (side "left") `count` keys, for each batch entry."""

    count: Numbers
    side: Literal["left", "right"]
    word: str = field(compare=False)

    def _range(self, frame: Frame) -> tuple[Any, Any]:
        """The first key let through and the one after the last, `(pairs or 1, 1, 1)` each."""
        count = frame.per_batch(self.count.array, 0, self.word)[:, None, None]
        if self.side == "right":
            return np.zeros_like(count), count
        return frame.kv_len - count, np.full_like(count, frame.kv_len)

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        start, stop = self._range(frame)
        keys = xp.asarray(kv_idx)[None, None, :]
        allowed = keys < xp.asarray(stop) if self.side == "right" else keys >= xp.asarray(start)
        return xp.broadcast_to(allowed, (allowed.shape[0], len(q_idx), len(kv_idx)))

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        start, stop = (edge[:, 0] for edge in self._range(frame))
        may = (np.maximum(kv_lo, start) < np.minimum(kv_hi, stop)).any(0)
        return Bounds(may, ((kv_lo >= start) & (kv_hi <= stop)).all(0))

    def cuts(self, frame: Frame) -> Cuts:
        edges = np.concatenate([edge.ravel() for edge in self._range(frame)])
        return Cuts(np.array([0]), _from_zero(edges, frame.kv_len))

    @property
    def by_key(self) -> bool:
        return True

    @property
    def ragged(self) -> bool:
        return self.count.array.ndim > 0

    def check(self, frame: Frame) -> None:
        count = frame.per_batch(self.count.array, 0, self.word)
        if self.word == "padding" and count.size and count.max() > frame.kv_len:
            raise ArgumentError(
                "padding",
                received=f"a length of {count.max()} for kv_len {frame.kv_len}",
                expected=f"lengths from 0 to {frame.kv_len}",
                hint="Lengths count the real keys of each batch entry, padding left out.",
            )

    def __repr__(self) -> str:
        return f"{self.word}({self.count}{', side=' + repr(self.side) if self.side == 'left' else ''})"


@dataclass(frozen=True)
class Document(Mask):
    """The keys of the query's own document."""

    ids: Numbers
    query_ids: Numbers

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        of_query = frame.per_batch(self.query_ids.array[..., q_idx], 1, "document")
        of_key = frame.per_batch(self.ids.array[..., kv_idx], 1, "document")
        return xp.asarray(of_query)[:, :, None] == xp.asarray(of_key)[:, None, :]

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        rows = frame.per_batch(self.query_ids.array[..., q_lo:q_hi], 1, "document")
        keys = frame.per_batch(self.ids.array[..., kv_lo[0] : kv_hi[-1]], 1, "document")
        q_min, q_max = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        starts = kv_lo - kv_lo[0]
        kv_min, kv_max = np.minimum.reduceat(keys, starts, 1), np.maximum.reduceat(keys, starts, 1)
        may = ((q_min <= kv_max) & (kv_min <= q_max)).any(0)
        return Bounds(may, ((q_min == kv_max) & (kv_min == q_max)).all(0))

    def cuts(self, frame: Frame) -> Cuts:
        found = []
        for ids in (self.query_ids, self.ids):
            changes = np.flatnonzero(np.diff(frame.per_batch(ids.array, 1, "document")).any(0)) + 1
            if len(changes) > ids.array.shape[-1] // 8:  # documents too short, or not in one piece each
                return super().cuts(frame)
            found.append(_from_zero(changes, ids.array.shape[-1]))
        return Cuts(*found)

    @property
    def ragged(self) -> bool:
        return self.ids.array.ndim > 1 or self.query_ids.array.ndim > 1

    def check(self, frame: Frame) -> None:
        lengths = self.query_ids.array.shape[-1], self.ids.array.shape[-1]
        if lengths != (frame.q_len, frame.kv_len):
            raise ArgumentError(
                "document",
                received=f"{lengths[0]} query ids and {lengths[1]} ids",
                expected=f"{frame.q_len} (q_len) and {frame.kv_len} (kv_len)",
                hint="Give one id for each key, and query_ids where the queries are other tokens.",
            )
        frame.per_batch(self.ids.array[..., :1], 1, "document")
        frame.per_batch(self.query_ids.array[..., :1], 1, "document")

    def __repr__(self) -> str:
        same = self.ids == self.query_ids
        return f"document({self.ids})" if same else f"document({self.ids}, query_ids={self.query_ids})"


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """What an array says."""

    array: Array

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        allowed = frame.take_pairs(take_block(self.array, q_idx, kv_idx), 2, "dense")
        return xp.broadcast_to(xp.asarray(allowed), (allowed.shape[0], len(q_idx), len(kv_idx)))

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        rows = frame.take_pairs(
            take_block(self.array, np.arange(q_lo, q_hi), np.arange(kv_lo[0], kv_hi[-1])), 2, "dense"
        )
        some, every = rows.any(0).any(0), rows.all(0).all(0)
        if len(some) == 1:
            return Bounds(np.repeat(bool(some[0]), len(kv_lo)), np.repeat(bool(every[0]), len(kv_lo)))
        starts = kv_lo - kv_lo[0]
        return Bounds(
            np.logical_or.reduceat(np.asarray(some), starts),
            np.logical_and.reduceat(np.asarray(every), starts),
        )

    def check(self, frame: Frame) -> None:
        check_matrix_shape(self.array, frame, "dense")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dense):
            return NotImplemented
        mine, theirs = self.array, other.array
        return tuple(mine.shape) == tuple(theirs.shape) and bool((mine == theirs).all())

    def __hash__(self) -> int:
        return hash(tuple(self.array.shape))

    def __repr__(self) -> str:
        shape = tuple(self.array.shape)
        if int(np.prod(shape)) > 16:
            return f"dense(<array of shape {shape}>)"
        return f"dense({self.array.tolist()})"
