"""The masks that a user can name: along the diagonal, of keys, documents, arrays, functions, and single edges."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.frame import Frame, check_matrix_shape, take_block
from regard.masks.base import BlockKinds, Mask, SplitPoints, sort_splits
from regard.tiling import tile_sizes
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import as_array, check_align

Positions = int | slice | Array | None
# (b, h, q_idx, kv_idx) → booleans, as in FlexAttention.
MaskFunction = Callable[[Any, Any, Any, Any], Any]

# With more runs of positions than this, blocks are not split at their edges: each split is a kernel call.
MAX_RUNS = 16


class IntParameter:
    """One integer or an array of integers of a mask: read-only, with equality and hash by content."""

    def __init__(self, values: int | Array) -> None:
        self.array = np.asarray(values)
        self.array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntParameter):
            return False
        if self.array.ndim == other.array.ndim == 0:  # causal masks are compared in every call
            return bool(self.array.item() == other.array.item())
        if self.array.size > 4096 or self.array.dtype != other.array.dtype:
            return np.array_equal(self.array, other.array)
        return self.array.shape == other.array.shape and self.array.tobytes() == other.array.tobytes()

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))

    def __repr__(self) -> str:
        values = self.array.tolist()
        return f"<{self.array.shape} numbers>" if self.array.size > 16 else repr(values)


def as_int_parameter(values: int | Array, operation: str, minimum: int | None) -> IntParameter:
    """Validate token counts of at least `minimum`, or document ids if `minimum` is None."""
    array = as_array(values, operation, "numbers")
    if not array.size:
        array = array.astype(np.int64)  # NumPy makes an empty list an array of floats
    if array.dtype.kind not in "iu" or (minimum is not None and array.size and array.min() < minimum):
        raise ArgumentError(
            operation,
            received=f"{values!r}",
            expected="integers" + ("" if minimum is None else f", {minimum} or more"),
            hint="Number the documents: 0, 1, 2, …" if minimum is None else "Sizes and lengths count tokens.",
        )
    if minimum is not None:
        array = np.minimum(array, 1 << 62)  # no sequence is longer, and positions can be added to it
    return IntParameter(array.astype(np.int64))


def as_limit(limits: IntArray, xp: Namespace) -> Array | int:
    """Return limits (pairs or 1, 1, 1) as an array; one limit as a number, which needs no copy to a device."""
    return int(limits.flat[0]) if limits.size == 1 else xp.asarray(limits)


# Along the diagonal


def causal(align: Align | None = None) -> Mask:
    """Return a mask that lets a query attend to its own position and earlier ones: kv_idx ≤ q_idx.

    Args:
        align: Corner of the matrix where the diagonal starts; required if q_len ≠ kv_len. With "upper_left", query 0 is
            aligned with key 0. With "lower_right", the last query is aligned with the last key, as in decoding with a
            cache.

    Returns:
        The mask.

    Raises:
        ArgumentError: If `align` is unknown.

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
    return _CAUSAL[align]


def sliding_window(
    size: int | Array | None = None,
    *,
    left: int | Array | None = None,
    right: int | Array | None = None,
    align: Align | None = None,
) -> Mask:
    """Return a mask that lets a query attend to the keys near its own position.

    Pass either `size`, for the last `size` keys up to the query's own position (q_idx − size < kv_idx ≤ q_idx), or
    `left` and `right`, for a two-sided window (q_idx − left ≤ kv_idx ≤ q_idx + right).

    Args:
        size: Number of keys, including the key at the query's own position. An integer, or an array of shape (heads,).
        left: Number of keys before the query's own position; None for no limit. An integer, or an array of shape
            (heads,).
        right: Number of keys after the query's own position; None for no limit. An integer, or an array of shape
            (heads,).
        align: Which corner the diagonal starts from, as in `causal`.

    Returns:
        The mask.

    Raises:
        ArgumentError: If both forms or neither form is given, or a size is not an integer.

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
        return WindowMask(IntParameter(counts.array - 1), IntParameter(0), align)
    sides = [None if side is None else as_int_parameter(side, "sliding_window", 0) for side in (left, right)]
    return WindowMask(sides[0], sides[1], align)


@dataclass(frozen=True)
class WindowMask(Mask):
    """A band along the diagonal: −left ≤ kv_idx − q_idx ≤ right, where None is no limit."""

    is_constant = True
    left: IntParameter | None
    right: IntParameter | None
    align: Align | None

    def resolve(self, frame: Frame) -> tuple[Array, Array]:
        """Return the lowest and the highest allowed kv_idx − q_idx, (pairs or 1, 1) each."""
        offset = self._find_offset(frame)
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
        self._find_offset(frame)
        for side in (self.left, self.right):
            if side is not None and side.array.ndim:
                frame.per_head(side.array, self._name)

    def restrict(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        rest = super().restrict(frame, rows, columns)
        low, _ = frame.resolve(self)
        if rest is self and columns.start - (rows.stop - 1) >= np.max(low):
            # The left limit is outside this block.
            return WindowMask(None, self.right, self.align) if self.right is not None else True
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
        if not isinstance(other, WindowMask) or other.align != self.align:
            return None
        left, right = (
            own or given if own is None or given is None else IntParameter(np.minimum(own.array, given.array))
            for own, given in ((self.left, other.left), (self.right, other.right))
        )
        return WindowMask(left, right, self.align)

    def diagonal(self, frame: Frame) -> int | None:
        if self.left is not None or self.right is None or self.right.array.ndim:
            return None
        return self._find_offset(frame) + int(self.right.array)

    def _find_offset(self, frame: Frame) -> int:
        """Return the number to add to `q_idx` to get the position of the query among the keys."""
        return 0 if frame.q_len == frame.kv_len else frame.offset(self.align, self._name)

    @property
    def is_relative(self) -> bool:
        return True

    @property
    def varies_by_head(self) -> bool:
        return any(side is not None and side.array.ndim > 0 for side in (self.left, self.right))

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


_CAUSAL: dict[Align | None, Mask] = {
    align: WindowMask(None, IntParameter(0), align) for align in (None, "upper_left", "lower_right")
}

# Keys, the same for every query


def padding(lengths: int | Array, side: Literal["left", "right"] = "right") -> Mask:
    """Return a mask that allows real keys and masks padding: kv_idx < length.

    Queries are not affected: a padded query still has its row.

    Args:
        lengths: Number of real keys. An integer, or an array of shape (batch,).
        side: The side of the padding. With "left", the mask is kv_idx ≥ kv_len − length.

    Returns:
        The mask.

    Raises:
        ArgumentError: If a length is not an integer, or `side` is unknown.

    >>> from regard import padding
    >>> padding([2, 3]).to_dense(2, 1, 1, 4).astype(int).reshape(2, 4)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0]])
    >>> padding(2, side="left").to_dense(1, 4).astype(int)
    array([[0, 0, 1, 1]])
    """
    if side not in ("left", "right"):
        raise ArgumentError(
            "padding",
            received=f"side={side!r}",
            expected='"left" or "right"',
            hint="Pass the side of the sequence that is padded.",
        )
    return KeyRangeMask(as_int_parameter(lengths, "padding", 0), side, "padding")


def first(n: int | Array) -> Mask:
    """Return a mask that allows the first `n` keys: kv_idx < n.

    Args:
        n: Number of keys. An integer, or an array of shape (batch,).

    Returns:
        The mask.

    Raises:
        ArgumentError: If `n` is not an integer.

    >>> from regard import sliding_window
    >>> from regard.masks import first
    >>> (sliding_window(2) | first(1)).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """
    return KeyRangeMask(as_int_parameter(n, "first", 0), "right", "first")


def prefix(length: int | Array, align: Align | None = None) -> Mask:
    """Return the mask of a prefix language model: every query attends to the prefix, and the rest is causal.

    It equals `first(length) | causal(align)`.

    Args:
        length: Length of the prefix. An integer, or an array of shape (batch,).
        align: Which corner the diagonal starts from, as in `causal`.

    Returns:
        The mask.

    Raises:
        ArgumentError: If `length` is not an integer, or `align` is unknown.

    >>> from regard.masks import prefix
    >>> prefix(2).to_dense(4, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> prefix(2, align="lower_right").to_dense(2, 5).astype(int)
    array([[1, 1, 1, 1, 0],
           [1, 1, 1, 1, 1]])
    """
    check_align(align, "prefix")
    return KeyRangeMask(as_int_parameter(length, "prefix", 0), "right", "first") | causal(align)


@dataclass(frozen=True)
class KeyRangeMask(Mask):
    """The first `count` keys (side "right": the padding follows) or the last ones (side "left") of each batch entry."""

    is_constant = True
    count: IntParameter
    side: Literal["left", "right"]
    constructor: str = field(compare=False)

    def resolve(self, frame: Frame) -> tuple[IntArray, IntArray]:
        """Return the first allowed key and the one after the last, (pairs or 1, 1) each."""
        count = frame.per_batch(self.count.array, 0, self.constructor)[:, None]
        if self.side == "right":
            return np.zeros_like(count), count
        return frame.kv_len - count, np.full_like(count, frame.kv_len)

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        start, stop = (limit[..., None] for limit in frame.resolve(self))
        keys = xp.asarray(kv_idx)[None, None, :]
        allowed = keys < as_limit(stop, xp) if self.side == "right" else keys >= as_limit(start, xp)
        return xp.broadcast_to(allowed, (allowed.shape[0], len(q_idx), len(kv_idx)))

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        start, stop = frame.resolve(self)
        nonempty = (np.maximum(kv_lo, start) < np.minimum(kv_hi, stop)).any(0)
        return BlockKinds(nonempty, ((kv_lo >= start) & (kv_hi <= stop)).all(0))

    def split_points(self, frame: Frame) -> SplitPoints:
        limits = np.concatenate([limit.ravel() for limit in frame.resolve(self)])
        return SplitPoints(np.array([0]), sort_splits(limits, frame.kv_len))

    @property
    def is_key_only(self) -> bool:
        return True

    @property
    def varies_by_batch(self) -> bool:
        return self.count.array.ndim > 0

    @property
    def varies_by_head(self) -> bool:
        return False

    def check(self, frame: Frame) -> None:
        count = frame.per_batch(self.count.array, 0, self.constructor)
        if self.constructor == "padding" and count.size and count.max() > frame.kv_len:
            raise ArgumentError(
                "padding",
                received=f"a length of {count.max()} for kv_len {frame.kv_len}",
                expected=f"lengths from 0 to {frame.kv_len}",
                hint="Lengths count the real keys of each batch entry, without the padding.",
            )

    def __repr__(self) -> str:
        return f"{self.constructor}({self.count}{', side=' + repr(self.side) if self.side == 'left' else ''})"


# Packed documents


def document(ids: Array, query_ids: Array | None = None) -> Mask:
    """Return a mask that lets a query attend only to the keys of its own document, for packed sequences.

    Args:
        ids: Document of each key: integers of shape (kv_len,) or (batch, kv_len).
        query_ids: Document of each query: integers of shape (q_len,) or (batch, q_len). The default is `ids`.

    Returns:
        The mask.

    Raises:
        ArgumentError: If the ids are not integers, or are a single integer.

    >>> from regard.masks import document
    >>> document([0, 0, 1]).to_dense(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    >>> document([0, 0, 1], query_ids=[1, 0]).to_dense(2, 3).astype(int)
    array([[0, 0, 1],
           [1, 1, 0]])
    """
    key_ids = as_int_parameter(ids, "document", None)
    own_ids = key_ids if query_ids is None else as_int_parameter(query_ids, "document", None)
    if key_ids.array.ndim == 0 or own_ids.array.ndim == 0:
        raise ArgumentError(
            "document", received=f"{ids!r}", expected="one id for each token", hint="Pass a list of ids."
        )
    return DocumentMask(key_ids, own_ids)


@dataclass(frozen=True)
class DocumentMask(Mask):
    """Mask that allows each query to attend to the keys of its own document."""

    is_constant = True
    ids: IntParameter
    query_ids: IntParameter

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        query_ids = frame.per_batch(self.query_ids.array[..., q_idx], 1, "document")
        key_ids = frame.per_batch(self.ids.array[..., kv_idx], 1, "document")
        return xp.asarray(query_ids)[:, :, None] == xp.asarray(key_ids)[:, None, :]

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        rows = frame.per_batch(self.query_ids.array[..., q_lo:q_hi], 1, "document")
        keys = frame.per_batch(self.ids.array[..., kv_lo[0] : kv_hi[-1]], 1, "document")
        q_min, q_max = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        starts = kv_lo - kv_lo[0]
        kv_min, kv_max = np.minimum.reduceat(keys, starts, 1), np.maximum.reduceat(keys, starts, 1)
        nonempty = ((q_min <= kv_max) & (kv_min <= q_max)).any(0)
        return BlockKinds(nonempty, ((q_min == kv_max) & (kv_min == q_max)).all(0))

    def split_points(self, frame: Frame) -> SplitPoints:
        splits = []
        for ids in (self.query_ids, self.ids):
            changes = np.flatnonzero(np.diff(frame.per_batch(ids.array, 1, "document")).any(0)) + 1
            if len(changes) > ids.array.shape[-1] // 8:  # documents too short, or not contiguous
                return super().split_points(frame)
            splits.append(sort_splits(changes, ids.array.shape[-1]))
        return SplitPoints(*splits)

    @property
    def varies_by_batch(self) -> bool:
        return self.ids.array.ndim > 1 or self.query_ids.array.ndim > 1

    @property
    def varies_by_head(self) -> bool:
        return False

    def check(self, frame: Frame) -> None:
        lengths = self.query_ids.array.shape[-1], self.ids.array.shape[-1]
        if lengths != (frame.q_len, frame.kv_len):
            raise ArgumentError(
                "document",
                received=f"{lengths[0]} query ids and {lengths[1]} key ids",
                expected=f"{frame.q_len} (q_len) and {frame.kv_len} (kv_len)",
                hint="Pass one id for each key. If the queries are different tokens, also pass query_ids.",
            )
        frame.per_batch(self.ids.array[..., :1], 1, "document")
        frame.per_batch(self.query_ids.array[..., :1], 1, "document")

    def __repr__(self) -> str:
        if self.ids == self.query_ids:
            return f"document({self.ids})"
        return f"document({self.ids}, query_ids={self.query_ids})"


# Boolean arrays


def dense(array: Array, true_means: Literal["attend", "ignore"] = "attend") -> Mask:
    """Return a mask from a boolean array.

    Args:
        array: Booleans that broadcast to (…, q_len, kv_len).
        true_means: Meaning of True. The default, "attend", is the convention of regard and
            `F.scaled_dot_product_attention`; "ignore" is the convention of `nn.MultiheadAttention`.

    Returns:
        A mask; with `true_means="ignore"` it equals `~dense(array)`.

    Raises:
        ArgumentTypeError: If the array does not hold booleans.
        ArgumentError: If `true_means` is neither "attend" nor "ignore".

    >>> from regard.masks import dense
    >>> dense([[True, False], [True, True]]).to_dense(2, 2).astype(int)
    array([[1, 0],
           [1, 1]])
    >>> dense([[False, True]], true_means="ignore").to_dense(2, 2).astype(int)
    array([[1, 0],
           [1, 0]])
    """
    if true_means not in ("attend", "ignore"):
        raise ArgumentError(
            "dense",
            received=f"true_means={true_means!r}",
            expected='"attend" or "ignore"',
            hint='Pass true_means="ignore" for an nn.MultiheadAttention mask, "attend" for an SDPA mask.',
        )
    if not hasattr(array, "dtype"):
        array = as_array(array, "dense", "array")
    if not str(array.dtype).endswith("bool"):
        raise ArgumentTypeError(
            "dense",
            received=describe_argument(array),
            expected="booleans, True = attend",
            hint="For 1 = attend, use regard.masks.dense(array != 0); "
            "for an additive tensor of 0 and -inf, use score_mod=regard.score_mods.bias(array); "
            'for True = ignore, as in nn.MultiheadAttention, write regard.masks.dense(array, true_means="ignore").',
        )
    return DenseMask(array) if true_means == "attend" else ~DenseMask(array)


@dataclass(frozen=True, eq=False)
class DenseMask(Mask):
    """Mask from a boolean array, True = attend."""

    array: Array

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        return self._expand(take_block(self.array, q_idx, kv_idx), frame, (len(q_idx), len(kv_idx)), xp)

    def allows_all(self, frame: Frame, xp: Namespace) -> Array:
        return self._expand(self.array, frame, (frame.q_len, frame.kv_len), xp)

    @staticmethod
    def _expand(array: Array, frame: Frame, lengths: tuple[int, int], xp: Namespace) -> Array:
        """Give an array one leading axis for the pairs, and both token axes their full length."""
        allowed = frame.take_pairs(array, 2, "dense")
        allowed = as_array(allowed, "dense", "array") if xp is np else xp.asarray(allowed)
        if tuple(allowed.shape[1:]) == lengths:
            return allowed
        return xp.broadcast_to(allowed, (allowed.shape[0], *lengths))

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        band = take_block(self.array, np.arange(q_lo, q_hi), np.arange(kv_lo[0], kv_hi[-1]))
        rows = frame.take_pairs(band, 2, "dense")
        any_row, every_row = (
            as_array(row, "dense", "array") for row in (rows.any(0).any(0), rows.all(0).all(0))
        )
        if len(any_row) == 1:
            counts = len(kv_lo)
            return BlockKinds(np.repeat(bool(any_row[0]), counts), np.repeat(bool(every_row[0]), counts))
        starts = kv_lo - kv_lo[0]
        return BlockKinds(
            np.logical_or.reduceat(any_row, starts),
            np.logical_and.reduceat(every_row, starts),
        )

    def check(self, frame: Frame) -> None:
        check_matrix_shape(self.array, frame, "dense")

    @property
    def varies_by_head(self) -> bool:
        return len(self.array.shape) > 2 and self.array.shape[-3] > 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DenseMask):
            return NotImplemented
        mine, theirs = self.array, other.array
        if type(mine) is not type(theirs) or getattr(mine, "device", "") != getattr(theirs, "device", ""):
            mine, theirs = (as_array(array, "dense", "array") for array in (mine, theirs))
        return tuple(mine.shape) == tuple(theirs.shape) and bool((mine == theirs).all())

    def __hash__(self) -> int:
        return hash(tuple(self.array.shape))

    def __repr__(self) -> str:
        shape = tuple(self.array.shape)
        if int(np.prod(shape)) > 16:
            return f"dense(<array of shape {shape}>)"
        return f"dense({self.array.tolist()})"


# A function of the indices


def mask(function: MaskFunction) -> Mask:
    """Return a mask from a function of the indices, as in FlexAttention: True = attend.

    The function is called with whole blocks of indices, so it must work elementwise: write `&`, `|` and `~` rather than
    `and`, `or` and `not`. All blocks are evaluated, because nothing is known about them in advance. To skip blocks,
    combine the function with a named mask: `causal() & mask(function)` skips every block above the diagonal.

    The matrix does not track arrays that the function reads: it does not notice if they change, and does not copy or
    move them. `to_dense` of the mask calls the function with NumPy arrays. A lambda cannot be pickled.

    Args:
        function: Called as `function(b, h, q_idx, kv_idx)`, with integer arrays that broadcast: the indices of the
            batch entry and the head, (pairs, 1, 1) each, of the query, (1, rows, 1), and of the key, (1, 1, columns).
            If query and key are torch tensors, the indices are tensors on the same device. Returns booleans that
            broadcast to (pairs, rows, columns).

    Returns:
        The mask. Two masks are equal if they have the same function.

    Raises:
        ArgumentTypeError: If `function` cannot be called with four arguments, or does not return booleans.

    >>> from regard import mask
    >>> mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0).to_dense(3, 4).astype(int)
    array([[1, 0, 1, 0],
           [0, 1, 0, 1],
           [1, 0, 1, 0]])
    """
    try:
        inspect.signature(function).bind(0, 0, 0, 0)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            "mask",
            received=describe_argument(function),
            expected="a function of four arguments, b, h, q_idx and kv_idx",
            hint="For example regard.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx). "
            "For an array of booleans, use regard.masks.dense(array).",
        ) from None
    return FunctionMask(function)


@dataclass(frozen=True)
class FunctionMask(Mask):
    """Mask from a function of the indices."""

    function: MaskFunction

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        batch, head = np.divmod(frame.selected, frame.leading_shape[-1] if frame.leading_shape else 1)
        indices = (batch[:, None, None], head[:, None, None], q_idx[None, :, None], kv_idx[None, None, :])
        try:
            allowed = self.function(*(xp.asarray(index.copy()) for index in indices))  # it may change them
        except (TypeError, ValueError, RuntimeError) as error:
            if not re.search("truth value|Boolean value|scalar|one element", str(error)):
                raise
            raise ArgumentTypeError(
                "mask",
                received=f"{self!r}, which uses an array as a single truth value",
                expected="a function that works on arrays of indices",
                hint="Replace `and`, `or`, `not` and `if` with `&`, `|`, `~` and `where`.",
            ) from error
        kind = str(getattr(allowed, "dtype", type(allowed).__name__))
        if not kind.removeprefix("torch.").startswith("bool"):
            raise ArgumentTypeError(
                "mask",
                received=f"{self!r}, which returns {kind}",
                expected="booleans, True = attend",
                hint="Compare the indices, as in q_idx >= kv_idx. To add numbers to the scores, pass score_mod=.",
            )
        allowed = as_array(allowed, "mask", "result") if xp is np else xp.asarray(allowed)
        pairs, rows, columns = len(frame.selected), len(q_idx), len(kv_idx)
        own = allowed.shape[0] if allowed.ndim > 2 else 1  # one entry for all pairs if b and h are not used
        if own in (1, pairs):
            with suppress(ValueError, RuntimeError):
                return xp.broadcast_to(allowed, (own, rows, columns))
        raise ArgumentError(
            "mask",
            received=f"{self!r}, which returns an array of shape {tuple(allowed.shape)}",
            expected=f"a shape that broadcasts to {(pairs, rows, columns)}",
            hint="Use q_idx and kv_idx unchanged: they broadcast against each other.",
        )

    def __repr__(self) -> str:
        return f"mask({getattr(self.function, '__qualname__', self.function)})"


# Chosen edges


def between(queries: Positions = None, keys: Positions = None) -> Mask:
    """Return a mask that allows only the edges between the given queries and keys.

    Its complement `~between(queries, keys)` removes these edges from another mask.

    Args:
        queries: Rows of the matrix: an integer, a slice, or a list of integers. Negative positions count from the end.
            Default: all.
        keys: Columns of the matrix, in the same form.

    Returns:
        The mask.

    Raises:
        ArgumentTypeError: If positions are not integers.

    >>> from regard import causal
    >>> from regard.masks import between
    >>> (causal() & ~between(queries=2, keys=[0, 1])).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [1, 1, 1, 1]])
    """
    return EdgeMask(PositionSet(queries, "queries"), PositionSet(keys, "keys"))


class PositionSet:
    """Positions along one axis, with equality and hash by content.

    Args:
        positions: An integer, a slice, integers, or None for all.
        parameter: Name of the parameter, for error messages.
    """

    def __init__(self, positions: Positions, parameter: str) -> None:
        self.parameter = parameter
        self.chosen: slice | IntArray = slice(None) if positions is None else _check(positions, parameter)

    @property
    def is_all(self) -> bool:
        """Whether every position is chosen."""
        return isinstance(self.chosen, slice) and self.chosen == slice(None)

    def count_before(self, length: int) -> IntArray:
        """Return how many positions are chosen before each one: (length + 1,)."""
        flags = np.zeros(length, np.int64)
        flags[self.chosen] = 1
        return np.concatenate([[0], np.cumsum(flags)])

    def check(self, length: int) -> None:
        """Raise an `IndexOutOfRangeError` if a position is outside the axis."""
        if isinstance(self.chosen, slice) or not self.chosen.size:
            return
        lowest, highest = int(self.chosen.min()), int(self.chosen.max())
        if lowest < -length or highest >= length:
            raise IndexOutOfRangeError(
                "between",
                received=f"{self.parameter} with position {highest if highest >= length else lowest}",
                expected=f"positions from 0 to {length - 1}, or from −{length} to −1 from the end",
                hint="Queries are rows of the matrix, keys are columns.",
            )

    def _key(self) -> tuple[Any, ...]:
        if isinstance(self.chosen, slice):
            return self.chosen.start, self.chosen.stop, self.chosen.step
        return (self.chosen.tobytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionSet) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        if isinstance(self.chosen, slice):
            return "all" if self.is_all else repr(self.chosen)
        positions = self.chosen.tolist()
        if len(positions) == 1:
            return repr(positions[0])
        return repr(positions) if len(positions) <= 16 else f"<{len(positions)} positions>"


def _check(positions: Any, parameter: str) -> slice | IntArray:
    if isinstance(positions, slice):
        return positions
    if hasattr(positions, "tolist"):
        positions = positions.tolist()
    entries = np.asarray([] if isinstance(positions, str) else positions)
    is_whole = entries.dtype.kind in "iu" or not entries.size
    if isinstance(positions, str) or not is_whole or entries.ndim > 1:
        raise ArgumentTypeError(
            "between",
            received=f"{parameter} as {describe_argument(positions)}",
            expected="an integer, a slice, or a list of integers",
            hint="For example regard.masks.between(queries=slice(8, None), keys=[0, 1]).",
        )
    return np.unique(entries.astype(np.int64))


@dataclass(frozen=True)
class EdgeMask(Mask):
    """The edges between some queries and some keys."""

    queries: PositionSet
    keys: PositionSet

    def resolve(self, frame: Frame) -> tuple[IntArray, IntArray]:
        """Return how many queries and keys are chosen before each position: (q_len + 1,) and (kv_len + 1,)."""
        return self.queries.count_before(frame.q_len), self.keys.count_before(frame.kv_len)

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        queries, keys = frame.resolve(self)
        rows, columns = queries[q_idx + 1] > queries[q_idx], keys[kv_idx + 1] > keys[kv_idx]
        return xp.asarray(rows)[None, :, None] & xp.asarray(columns)[None, None, :]

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        rows, columns = frame.resolve(self)
        num_rows, num_columns = rows[q_hi] - rows[q_lo], columns[kv_hi] - columns[kv_lo]
        return BlockKinds(
            (num_columns > 0) & (num_rows > 0), (num_columns == kv_hi - kv_lo) & (num_rows == q_hi - q_lo)
        )

    def split_points(self, frame: Frame) -> SplitPoints:
        # Where a run of chosen positions begins or ends.
        rows, columns = (np.flatnonzero(np.diff(counts, n=2, prepend=0)) for counts in frame.resolve(self))
        if len(rows) > 2 * MAX_RUNS:
            rows = np.arange(0, frame.q_len, tile_sizes().mask_rows)
        if len(columns) > 2 * MAX_RUNS:
            columns = np.zeros(0, np.int64)
        return SplitPoints(sort_splits(rows, frame.q_len), sort_splits(columns, frame.kv_len))

    @property
    def is_key_only(self) -> bool:
        return self.queries.is_all

    @property
    def varies_by_head(self) -> bool:
        return False

    def check(self, frame: Frame) -> None:
        self.queries.check(frame.q_len)
        self.keys.check(frame.kv_len)

    def __repr__(self) -> str:
        given = [
            f"{name}={chosen}"
            for name, chosen in (("queries", self.queries), ("keys", self.keys))
            if not chosen.is_all
        ]
        return f"between({', '.join(given)})"
