"""Score modifications: what happens to the scaled scores before the mask, in the order given.

>>> import regard
>>> query = key = np.ones((1, 3, 2))
>>> regard.attention(query, key, score_mod=[alibi(), softcap(30.0)]).shape
(1, 3, 3)

To write one of your own, subclass `ScoreMod` and give it `apply`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.frame import Frame, check_matrix_shape, take_block
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import as_array, check_align

__all__ = ["ScoreMod", "alibi", "alibi_slopes", "bias", "relative_bias", "relative_buckets", "softcap"]


class ScoreMod:
    """A change to the scaled scores, block by block; to write your own, give it `apply`.

    >>> import numpy as np, regard
    >>> class Doubled(ScoreMod):
    ...     def apply(self, scores, frame, q_idx, kv_idx, xp):
    ...         return 2 * scores
    >>> regard.attention(np.ones((1, 1)), [[1.0], [3.0]], score_mod=Doubled()).scores[0]
    array([2., 6.])
    """

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        """New scores for old, both `(pairs, len(q_idx), len(kv_idx))`."""
        added = self.added(frame, q_idx, kv_idx, xp, scores.dtype)
        if added is None:
            raise TypeError(f"{type(self).__name__} must define apply(scores, frame, q_idx, kv_idx, xp)")
        return scores + added

    def added(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array | None:
        """What is added to the scores, where adding is all that is done; fused kernels take that along."""
        return None

    def record(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any] | None:
        """What a page needs to do the same to the rows `q_idx`, in numbers and arrays; None: only Python can do it.

        One of {"kind": "softcap", "cap"}; {"kind": "distance", "table"}, added by kv_idx − q_idx, from 1 − q_len on;
        {"kind": "bias", "array"}, added; {"kind": "flat", "rows"}, set to 0. Arrays begin with the pairs, or with 1.
        """
        added = self.added(frame, q_idx, np.arange(frame.kv_len), xp, dtype)
        return None if added is None else {"kind": "bias", "array": added}

    def check(self, frame: Frame) -> None:
        """Refuse, with the hint, a matrix that the modification does not fit."""


def _by_distance(mod: ScoreMod, frame: Frame, xp: Namespace, dtype: Any) -> dict[str, Any]:
    """The record of what is added by distance alone: its first column upwards, then the rest of its first row."""
    first, rows, columns = np.zeros(1, np.int64), np.arange(frame.q_len), np.arange(1, frame.kv_len)
    below = mod.added(frame, rows[::-1], first, xp, dtype)
    above = mod.added(frame, first, columns, xp, dtype)
    assert below is not None and above is not None
    return {"kind": "distance", "table": xp.concat([below[:, :, 0], above[:, 0, :]], axis=1)}


@dataclass(frozen=True)
class Softcap(ScoreMod):
    """cap · tanh(scores / cap)."""

    cap: float

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        return self.cap * xp.tanh(scores / self.cap)

    def record(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return {"kind": "softcap", "cap": self.cap}

    def __repr__(self) -> str:
        return f"softcap({self.cap})"


def softcap(cap: float) -> ScoreMod:
    """Scores held between −cap and cap: cap · tanh(scores / cap), as in Gemma 2.

    >>> softcap(50.0)
    softcap(50.0)
    """
    if isinstance(cap, bool) or not (isinstance(cap, Real) and math.isfinite(cap) and cap > 0):
        raise ArgumentError(
            "softcap", received=f"{cap!r}", expected="a number above 0", hint="Leave it out for no cap."
        )
    return Softcap(float(cap))


def alibi_slopes(heads: int) -> Array:
    """The published ALiBi slope of each head, shape (heads,); also where heads is not a power of two.

    The first power of two below `heads` gives a geometric series from 2^(−8/p); what is missing is every other
    slope of the next power's series (Press et al., 2108.12409).

    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    power = 1 << (heads.bit_length() - 1) if heads else 1
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power, 2))
    return np.concatenate([slopes, between])[:heads]


@dataclass(frozen=True, eq=False)
class Alibi(ScoreMod):
    """−slope · |q_idx − kv_idx|."""

    slopes: Array | None
    align: Align | None

    def _slopes(self, frame: Frame) -> Array:
        slopes = self.slopes
        if slopes is None:
            slopes = alibi_slopes(frame.leading_shape[-1] if frame.leading_shape else 1)
        return frame.per_head(slopes, "alibi")

    def added(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any) -> Array:
        away = np.abs(kv_idx[None, :] - q_idx[:, None] - frame.offset(self.align, "alibi"))
        slopes = xp.asarray(self._slopes(frame), dtype=dtype)[:, None, None]
        return -slopes * xp.asarray(away, dtype=dtype)

    def record(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return _by_distance(self, frame, xp, dtype)

    def check(self, frame: Frame) -> None:
        frame.offset(self.align, "alibi")
        self._slopes(frame)

    def __repr__(self) -> str:
        slopes = "" if self.slopes is None else f"slopes={np.asarray(self.slopes).tolist()}"
        align = "" if self.align is None else f"align={self.align!r}"
        return f"alibi({', '.join(filter(None, (slopes, align)))})"


def alibi(slopes: Any = None, align: Align | None = None) -> ScoreMod:
    """Scores that fall off with distance: scores − slope · |q_idx − kv_idx|, a slope for each head.

    `slopes` has shape (heads,); left out, they are the published ones (`alibi_slopes`). `align` as in `causal`.

    >>> alibi()
    alibi()
    """
    check_align(align, "alibi")
    if slopes is not None:
        slopes = as_array(slopes, "alibi", "slopes")
        if slopes.dtype.kind not in "iuf":
            raise ArgumentTypeError(
                "alibi",
                received=describe_argument(slopes),
                expected="a number for each head",
                hint="alibi_slopes(heads) has them.",
            )
        slopes = slopes.astype(np.float64)
    return Alibi(slopes, align)


@dataclass(frozen=True, eq=False)
class Bias(ScoreMod):
    """An array added to the scores."""

    array: Array

    def added(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any) -> Array:
        given = xp.asarray(frame.take_pairs(take_block(self.array, q_idx, kv_idx), 2, "bias"))
        added = xp.astype(given, dtype)
        # float64's lowest number is −inf in float32, but it was a number.
        return xp.where((added == -xp.inf) & (given != -xp.inf), xp.finfo(dtype).min, added)

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        added = self.added(frame, q_idx, kv_idx, xp, scores.dtype)
        # −inf hides even a NaN score, as a mask does.
        return xp.where(added == -xp.inf, -xp.inf, scores + added)

    def check(self, frame: Frame) -> None:
        check_matrix_shape(self.array, frame, "bias")

    def __repr__(self) -> str:
        return f"bias(<array of shape {tuple(self.array.shape)}>)"


def bias(array: Any) -> ScoreMod:
    """Scores plus an array that broadcasts to (…, q_len, kv_len), taken literally.

    −inf hides a key as a mask does; `finfo.min` does not, it is only a very low score.

    >>> import numpy as np
    >>> bias(np.zeros((5, 5)))
    bias(<array of shape (5, 5)>)
    """
    if not hasattr(array, "dtype"):
        array = as_array(array, "bias", "array")
    if "float" not in str(array.dtype):
        raise ArgumentTypeError(
            "bias",
            received=describe_argument(array),
            expected="floating point numbers to add to the scores",
            hint="For booleans, True = attend, use mask=dense(array); for whole numbers, array.astype(float).",
        )
    return Bias(array)


def relative_buckets(ahead: IntArray, *, buckets: int, max_distance: int, bidirectional: bool) -> IntArray:
    """The T5 bucket of each relative position kv_idx − q_idx: exact when near, logarithmic farther out.

    >>> relative_buckets(np.array([-3, 0, 3, 500]), buckets=32, max_distance=128, bidirectional=True)
    array([ 3,  0, 19, 31])
    """
    base = np.zeros_like(ahead)
    if bidirectional:
        buckets //= 2
        base = np.where(ahead > 0, buckets, 0)
        distance = np.abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    exact = buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = np.minimum(exact + (growth * (buckets - exact)).astype(np.int64), buckets - 1)
    return base + np.where(distance < exact, distance, far)


@dataclass(frozen=True, eq=False)
class RelativeBias(ScoreMod):
    """A learned number for each head and bucket of distance."""

    table: Array
    bidirectional: bool
    max_distance: int
    align: Align | None

    def added(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any) -> Array:
        ahead = kv_idx[None, :] - q_idx[:, None] - frame.offset(self.align, "relative_bias")
        bucket = relative_buckets(
            ahead,
            buckets=self.table.shape[0],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        per_pair = frame.take_pairs(self.table.T, 1, "relative_bias", "heads")
        return xp.asarray(per_pair[:, bucket], dtype=dtype)

    def record(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return _by_distance(self, frame, xp, dtype)

    def check(self, frame: Frame) -> None:
        frame.offset(self.align, "relative_bias")
        frame.take_pairs(self.table.T, 1, "relative_bias", "heads")

    def __repr__(self) -> str:
        buckets, heads = self.table.shape
        align = "" if self.align is None else f", align={self.align!r}"
        return f"relative_bias(<{buckets} buckets, {heads} heads>, bidirectional={self.bidirectional}{align})"


def relative_bias(
    table: Any, *, bidirectional: bool, max_distance: int = 128, align: Align | None = None
) -> ScoreMod:
    """Scores plus T5's relative position bias: `table[bucket(kv_idx − q_idx), head]`.

    `table` has shape (buckets, heads), as T5 keeps it; encoders are bidirectional, decoders are not.
    `align` as in `causal`.

    >>> import numpy as np
    >>> relative_bias(np.zeros((32, 8)), bidirectional=True)
    relative_bias(<32 buckets, 8 heads>, bidirectional=True)
    """
    if not hasattr(table, "dtype"):
        table = as_array(table, "relative_bias", "table")
    check_align(align, "relative_bias")
    least = 4 if bidirectional else 2
    if len(table.shape) != 2 or table.shape[0] < least or max_distance <= table.shape[0] // least:
        raise ArgumentError(
            "relative_bias",
            received=f"a table of shape {tuple(table.shape)}, max_distance={max_distance!r}",
            expected=f"(buckets, heads), {least} buckets at least, and a max_distance beyond the exact buckets",
            hint="T5's relative_attention_bias.weight has this shape.",
        )
    return RelativeBias(table, bidirectional, max_distance, align)
