"""Masks of keys that are the same for every query: padding, the first keys, and the prefix of a prefix model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from regard.errors import ArgumentError
from regard.frame import Frame
from regard.masks.base import BlockKinds, Mask, SplitPoints
from regard.masks.parameters import IntParameter, as_int_parameter, as_limit, sort_splits
from regard.masks.window import causal
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import check_align


def padding(lengths: int | Array, side: Literal["left", "right"] = "right") -> Mask:
    """Return a mask that allows the real keys and masks the padded ones: kv_idx < length.

    Queries are not affected: a padded query still has its row.

    Args:
        lengths: Number of real keys. An integer, or an array of shape (batch,).
        side: Where the padding is. With "left" it comes first, and the mask is kv_idx ≥ kv_len − length.

    Returns:
        The mask.

    Raises:
        ArgumentError: If a length is not a whole number, or `side` is unknown.

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
            hint="side says where the padding is.",
        )
    return KeyRangeMask(as_int_parameter(lengths, "padding", 0), side, "padding")


def first(n: int | Array) -> Mask:
    """Return a mask that allows the first `n` keys: kv_idx < n.

    Args:
        n: Number of keys. An integer, or an array of shape (batch,).

    Returns:
        The mask.

    Raises:
        ArgumentError: If `n` is not a whole number.

    >>> from regard import first, sliding_window
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
        ArgumentError: If `length` is not a whole number, or `align` is unknown.

    >>> from regard import prefix
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
