"""Masks: values that say which keys a query may see. True = attend, always.

Each mask is named for what it lets through, and masks combine with `&`, `|` and `~`:

>>> causal() & padding([3, 5]) & (sliding_window(512) | first(4))
causal() & padding([3, 5]) & (sliding_window(512) | first(4))

No mask is ever built whole: it answers for one block of rows and columns, and tells from the numbers alone
whether a block is empty, full or partial, so that empty blocks are skipped and full ones are not tested.
To write a mask of your own, subclass `Mask` and give it `allows` and `bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from regard._errors import ArgumentError, KindError, kind_of
from regard._types import Align, Array, Frame, IntArray, Namespace, check_window, cut

__all__ = [
    "Mask",
    "causal",
    "dense",
    "document",
    "first",
    "padding",
    "prefix",
    "sliding_window",
    "true_means_ignore",
]


class Bounds(NamedTuple):
    """For consecutive blocks of keys: whether any entry may be let through, and whether every one must be.

    `may` False is an empty block, `must` True a full one. Both err only towards partial.
    """

    may: Array
    must: Array


class Mask:
    """Which keys each query may see; a value that combines with `&`, `|` and `~`."""

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        """True where a query may see a key: `(pairs or 1, len(q_idx), len(kv_idx))` or what broadcasts to it."""
        raise TypeError(f"{type(self).__name__} must define allows(frame, q_idx, kv_idx, xp)")

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        """What is known of the blocks [q_lo, q_hi) × [kv_lo, kv_hi), the latter ascending and adjoining."""
        return Bounds(np.ones(len(kv_lo), bool), np.zeros(len(kv_lo), bool))

    def check(self, frame: Frame) -> None:
        """Refuse, with the cure, a matrix that the mask does not fit."""

    def block(
        self, q_range: range, kv_range: range, *, shape: tuple[int, ...]
    ) -> Literal["empty", "full", "partial"]:
        """What one block of a matrix of `shape` holds, told without building it.

        >>> causal().block(range(0, 4), range(8, 12), shape=(16, 16))
        'empty'
        """
        self.check(frame := Frame.whole(shape))
        may, must = self.bounds(
            frame, q_range.start, q_range.stop, np.array([kv_range.start]), np.array([kv_range.stop])
        )
        return "full" if must[0] else "partial" if may[0] else "empty"

    def to_dense(self, *shape: int) -> Array:
        """The whole mask as a boolean array of `shape`, to look at.

        >>> causal(align="lower_right").to_dense(2, 5).astype(int)
        array([[1, 1, 1, 1, 0],
               [1, 1, 1, 1, 1]])
        """
        self.check(frame := Frame.whole(shape))
        allowed = self.allows(frame, np.arange(frame.q_len), np.arange(frame.kv_len), np)
        pairs = (len(frame.picked), frame.q_len, frame.kv_len)
        return np.broadcast_to(allowed, pairs).reshape(shape).copy()

    def __and__(self, other: object) -> Mask:
        return _combine(AllOf, self, other, "&")

    def __or__(self, other: object) -> Mask:
        return _combine(AnyOf, self, other, "|")

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise KindError(
            "a mask as a truth value",
            received=repr(self),
            expected="masks combined by & | ~",
            cure="Write mask & other, not `mask and other`.",
        )


def _combine(how: type[AllOf] | type[AnyOf], left: Mask, right: object, sign: str) -> Mask:
    if not isinstance(right, Mask):
        raise KindError(
            f"mask {sign} other",
            received=kind_of(right),
            expected="another mask",
            cure="Wrap a boolean array, True = attend, as regard.dense(array).",
        )
    parts: list[Mask] = []
    for mask in (left, right):
        for part in mask.parts if isinstance(mask, how) else (mask,):
            if part not in parts:
                parts.append(part)
    return parts[0] if len(parts) == 1 else how(tuple(parts))


@dataclass(frozen=True, eq=False)
class _Several(Mask):
    parts: tuple[Mask, ...]

    def check(self, frame: Frame) -> None:
        for part in self.parts:
            part.check(frame)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, _Several):
            return NotImplemented
        return len(self.parts) == len(other.parts) and all(part in other.parts for part in self.parts)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(self.parts)))


class AllOf(_Several):
    """What every part lets through."""

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        allowed = self.parts[0].allows(frame, q_idx, kv_idx, xp)
        for part in self.parts[1:]:
            allowed = allowed & part.allows(frame, q_idx, kv_idx, xp)
        return allowed

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        each = [part.bounds(frame, q_lo, q_hi, kv_lo, kv_hi) for part in self.parts]
        return Bounds(np.all([b.may for b in each], 0), np.all([b.must for b in each], 0))

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, AnyOf) else repr(part) for part in self.parts)


class AnyOf(_Several):
    """What at least one part lets through."""

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        allowed = self.parts[0].allows(frame, q_idx, kv_idx, xp)
        for part in self.parts[1:]:
            allowed = allowed | part.allows(frame, q_idx, kv_idx, xp)
        return allowed

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        each = [part.bounds(frame, q_lo, q_hi, kv_lo, kv_hi) for part in self.parts]
        return Bounds(np.any([b.may for b in each], 0), np.any([b.must for b in each], 0))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Not(Mask):
    """What the mask within does not let through."""

    mask: Mask

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        return ~self.mask.allows(frame, q_idx, kv_idx, xp)

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        may, must = self.mask.bounds(frame, q_lo, q_hi, kv_lo, kv_hi)
        return Bounds(~must, ~may)

    def check(self, frame: Frame) -> None:
        self.mask.check(frame)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, _Several) else f"~{self.mask}"


class _Numbers:
    """Numbers of a mask, one or an array of them, that compare and hash by content and print as a list."""

    def __init__(self, numbers: Any) -> None:
        self.array = np.asarray(numbers)
        self.array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Numbers) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))

    def __repr__(self) -> str:
        shown = self.array.tolist()
        return f"<{self.array.shape} numbers>" if self.array.size > 16 else repr(shown)


def _whole_numbers(numbers: Any, operation: str, least: int) -> _Numbers:
    array = np.array(numbers)
    if array.dtype.kind not in "iu" or (array.size and array.min() < least):
        raise ArgumentError(
            operation,
            received=f"{numbers!r}",
            expected=f"whole numbers, {least} or more",
            cure="Sizes and lengths count tokens.",
        )
    return _Numbers(array.astype(np.int64))


def _check_align(align: object, operation: str) -> None:
    if align not in (None, "upper_left", "lower_right"):
        raise ArgumentError(
            operation,
            received=f"align={align!r}",
            expected='"upper_left" or "lower_right"',
            cure='Where queries are the last tokens of the keys, say align="lower_right".',
        )


@dataclass(frozen=True)
class Band(Mask):
    """A band about the diagonal: −left ≤ kv_idx − q_idx ≤ right, without bound where None."""

    left: _Numbers | None
    right: _Numbers | None
    align: Align | None

    def _edges(self, frame: Frame) -> tuple[Any, Any]:
        """The lowest and highest kv_idx − q_idx let through, `(pairs or 1, 1, 1)` each, in plain rows and columns."""
        offset = frame.offset(self.align, self._name)
        low, high = -np.inf, np.inf
        if self.left is not None:
            low = offset - frame.per_head(self.left.array, self._name)[:, None, None]
        if self.right is not None:
            high = offset + frame.per_head(self.right.array, self._name)[:, None, None]
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
        self._edges(frame)

    @property
    def _name(self) -> str:
        return "causal" if self.left is None and self.right == _Numbers(0) else "sliding_window"

    def __repr__(self) -> str:
        align = f"align={self.align!r}" if self.align else ""
        if self.left is None and self.right == _Numbers(0):
            return f"causal({align})"
        if self.left is not None and self.right == _Numbers(0):
            size = _Numbers(self.left.array + 1)
            return f"sliding_window({size}{', ' if align else ''}{align})"
        return f"sliding_window(left={self.left}, right={self.right}{', ' if align else ''}{align})"


def causal(align: Align | None = None) -> Mask:
    """A mask that lets a query see its own position and those before it: kv_idx ≤ q_idx.

    Where q_len ≠ kv_len it must be said which corner is meant: with `align="upper_left"` query 0 stands at
    key 0, with `"lower_right"` the last query stands at the last key (decoding with a cache).

    >>> causal().to_dense(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    >>> causal(align="upper_left").to_dense(2, 5).astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0]])
    """
    _check_align(align, "causal")
    return Band(None, _Numbers(0), align)


def sliding_window(
    size: Any = None, *, left: Any = None, right: Any = None, align: Align | None = None
) -> Mask:
    """A mask that lets a query see the `size` keys that end at its own: q_idx − size < kv_idx ≤ q_idx.

    Or, two-sided, `left` keys before its own and `right` after: q_idx − left ≤ kv_idx ≤ q_idx + right; a side left
    out has no bound. Sizes are numbers, or arrays of shape (heads,) where heads differ. `align` as in `causal`.

    >>> sliding_window(2).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    >>> sliding_window(left=1, right=0, align="lower_right").to_dense(2, 5).astype(int)
    array([[0, 0, 1, 1, 0],
           [0, 0, 0, 1, 1]])
    """
    _check_align(align, "sliding_window")
    if (size is None) == (left is None and right is None):
        raise ArgumentError(
            "sliding_window",
            received=f"size={size!r}, left={left!r}, right={right!r}",
            expected="either size, or left and right",
            cure="sliding_window(4) is sliding_window(left=3, right=0): size counts the query's own key.",
        )
    if size is not None:
        counted = _whole_numbers(size, "sliding_window", 1)
        return Band(_Numbers(counted.array - 1), _Numbers(0), align)
    sides = [None if n is None else _whole_numbers(n, "sliding_window", 0) for n in (left, right)]
    return Band(sides[0], sides[1], align)


@dataclass(frozen=True)
class Keys(Mask):
    """The first (side "right": padding follows) or the last (side "left") `count` keys, for each batch entry."""

    count: _Numbers
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

    def check(self, frame: Frame) -> None:
        count = frame.per_batch(self.count.array, 0, self.word)
        if self.word == "padding" and count.size and count.max() > frame.kv_len:
            raise ArgumentError(
                "padding",
                received=f"a length of {count.max()} for kv_len {frame.kv_len}",
                expected=f"lengths from 0 to {frame.kv_len}",
                cure="Lengths count the real keys of each batch entry, padding left out.",
            )

    def __repr__(self) -> str:
        return f"{self.word}({self.count}{', side=' + repr(self.side) if self.side == 'left' else ''})"


def padding(lengths: Any, side: Literal["left", "right"] = "right") -> Mask:
    """A mask that lets the real keys through and hides the padded ones: kv_idx < length.

    `lengths` is a number or an array of shape (batch,): how many keys are real. With `side="left"` the padding
    comes first: kv_idx ≥ kv_len − length. Queries are not touched: a padded query still has its row.

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
            cure="side is where the padding stands.",
        )
    return Keys(_whole_numbers(lengths, "padding", 0), side, "padding")


def first(n: Any) -> Mask:
    """A mask that lets the first `n` keys through: kv_idx < n. A number, or an array of shape (batch,).

    >>> (sliding_window(2) | first(1)).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """
    return Keys(_whole_numbers(n, "first", 0), "right", "first")


def prefix(length: Any, align: Align | None = None) -> Mask:
    """A mask for prefix language models: everyone sees the prefix, the rest is causal. `first(length) | causal()`.

    `length` is a number, or an array of shape (batch,). `align` as in `causal`.

    >>> prefix(2).to_dense(4, 4).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> prefix(2, align="lower_right").to_dense(2, 5).astype(int)
    array([[1, 1, 1, 1, 0],
           [1, 1, 1, 1, 1]])
    """
    return Keys(_whole_numbers(length, "prefix", 0), "right", "first") | causal(align)


@dataclass(frozen=True)
class Document(Mask):
    """The keys of the query's own document."""

    ids: _Numbers
    query_ids: _Numbers

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

    def check(self, frame: Frame) -> None:
        lengths = self.query_ids.array.shape[-1], self.ids.array.shape[-1]
        if lengths != (frame.q_len, frame.kv_len):
            raise ArgumentError(
                "document",
                received=f"{lengths[0]} query ids and {lengths[1]} ids",
                expected=f"{frame.q_len} (q_len) and {frame.kv_len} (kv_len)",
                cure="Give one id for each key, and query_ids where the queries are other tokens.",
            )
        frame.per_batch(self.ids.array[..., :1], 1, "document")
        frame.per_batch(self.query_ids.array[..., :1], 1, "document")

    def __repr__(self) -> str:
        same = self.ids == self.query_ids
        return f"document({self.ids})" if same else f"document({self.ids}, query_ids={self.query_ids})"


def document(ids: Any, query_ids: Any = None) -> Mask:
    """A mask that lets a query see the keys of its own document, where several are packed into one sequence.

    `ids` has shape (kv_len,) or (batch, kv_len): the document of each key. `query_ids` is the same for the
    queries, and may be left out where they are the same tokens.

    >>> document([0, 0, 1]).to_dense(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    >>> document([0, 0, 1], query_ids=[1, 0]).to_dense(2, 3).astype(int)
    array([[0, 0, 1],
           [1, 1, 0]])
    """
    of_key = _whole_numbers(ids, "document", np.iinfo(np.int64).min)
    of_query = of_key if query_ids is None else _whole_numbers(query_ids, "document", np.iinfo(np.int64).min)
    if of_key.array.ndim == 0 or of_query.array.ndim == 0:
        raise ArgumentError(
            "document", received=f"{ids!r}", expected="one id for each token", cure="Pass a list of ids."
        )
    return Document(of_key, of_query)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """What an array says."""

    array: Array

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        allowed = frame.pick(cut(self.array, q_idx, kv_idx), 2, "dense")
        return xp.broadcast_to(xp.asarray(allowed), (allowed.shape[0], len(q_idx), len(kv_idx)))

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        rows = frame.pick(cut(self.array, np.arange(q_lo, q_hi), np.arange(kv_lo[0], kv_hi[-1])), 2, "dense")
        some, every = rows.any(0).any(0), rows.all(0).all(0)
        if len(some) == 1:
            return Bounds(np.repeat(bool(some[0]), len(kv_lo)), np.repeat(bool(every[0]), len(kv_lo)))
        starts = kv_lo - kv_lo[0]
        return Bounds(
            np.logical_or.reduceat(np.asarray(some), starts),
            np.logical_and.reduceat(np.asarray(every), starts),
        )

    def check(self, frame: Frame) -> None:
        check_window(self.array, frame, "dense")

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


def dense(array: Any) -> Mask:
    """A mask from a boolean array, True = attend, that broadcasts to (…, q_len, kv_len).

    >>> dense([[True, False], [True, True]]).to_dense(2, 2).astype(int)
    array([[1, 0],
           [1, 1]])
    """
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
    if not str(array.dtype).endswith("bool"):
        raise KindError(
            "dense",
            received=kind_of(array),
            expected="booleans, True = attend",
            cure="For 1 = attend write dense(array != 0); "
            "for an additive tensor of 0 and -inf use score_mod=bias(array); "
            "for True = ignore, as in nn.MultiheadAttention, use true_means_ignore(array).",
        )
    return Dense(array)


def true_means_ignore(array: Any) -> Mask:
    """A mask from a boolean array of the opposite polarity, True = ignore, as `nn.MultiheadAttention` takes it.

    >>> true_means_ignore([[False, True]]).to_dense(2, 2).astype(int)
    array([[1, 0],
           [1, 0]])
    """
    return ~dense(array)
