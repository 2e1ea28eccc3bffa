"""Score modifications: changes of the scaled scores before the mask, applied in the order given.

>>> import numpy as np, regard
>>> query = key = np.ones((1, 3, 2))
>>> regard.attention(query, key, score_mod=[alibi(), softcap(30.0)]).shape
(1, 3, 3)

To write your own, subclass `ScoreMod` and define `apply`.
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
    """A modification of the scaled scores, one block at a time; a subclass defines `apply` or `additive_bias`.

    >>> import numpy as np, regard
    >>> class Doubled(regard.ScoreMod):
    ...     def apply(self, scores, frame, q_idx, kv_idx, xp):
    ...         return 2 * scores
    >>> regard.attention(np.ones((1, 1)), [[1.0], [3.0]], score_mod=Doubled()).scores[0]
    array([2., 6.])
    """

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        """Change the scores of a block.

        Args:
            scores: Scaled scores: (pairs, r, c).
            frame: The (batch, head) pairs and the lengths.
            q_idx: Positions of the queries: (r,).
            kv_idx: Positions of the keys: (c,).
            xp: Array API namespace of the scores.

        Returns:
            The new scores: (pairs, r, c).
        """
        bias = self.additive_bias(frame, q_idx, kv_idx, xp, scores.dtype)
        if bias is None:
            raise TypeError(f"{type(self).__name__} must define apply(scores, frame, q_idx, kv_idx, xp)")
        return scores + bias

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array | None:
        """Return the bias that is added to the scores of a block. Fused kernels support additive biases.

        Args:
            frame: The (batch, head) pairs and the lengths.
            q_idx: Positions of the queries: (r,).
            kv_idx: Positions of the keys: (c,).
            xp: Array API namespace of the result.
            dtype: Dtype of the result.

        Returns:
            An array that broadcasts to (pairs, r, c); None if the modification is not additive.
        """
        return None

    def to_payload(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any] | None:
        """Describe the modification of some rows as numbers and arrays, for a page that computes it.

        Args:
            frame: The (batch, head) pairs and the lengths.
            q_idx: Positions of the queries: (r,).
            xp: Array API namespace of the arrays.
            dtype: Dtype of the arrays.

        Returns:
            {"kind": "softcap", "cap"}; {"kind": "distance", "table"}, a bias for each kv_idx − q_idx, starting at
            1 − q_len; {"kind": "bias", "array"}; or {"kind": "flat", "rows"}, rows whose scores are 0. The first axis
            of each array has one entry for each pair, or one entry. None if only Python can compute the modification.
        """
        bias = self.additive_bias(frame, q_idx, np.arange(frame.kv_len), xp, dtype)
        return None if bias is None else {"kind": "bias", "array": bias}

    def check(self, frame: Frame) -> None:
        """Raise an `ArgumentError` if the modification does not fit a matrix.

        Args:
            frame: The (batch, head) pairs and the lengths of the matrix.
        """


def _convert(array: Array, operation: str, name: str, xp: Namespace, dtype: Any = None) -> Array:
    """Convert the array of a modification to the library and dtype of the scores."""
    return xp.asarray(as_array(array, operation, name) if xp is np else array, dtype=dtype)


class DistanceMod(ScoreMod):
    """A bias that depends on kv_idx − q_idx only."""

    def to_payload(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        # The first column from the last row up, then the rest of the first row.
        first, rows, columns = np.zeros(1, np.int64), np.arange(frame.q_len), np.arange(1, frame.kv_len)
        below = self.additive_bias(frame, rows[::-1], first, xp, dtype)
        above = self.additive_bias(frame, first, columns, xp, dtype)
        assert below is not None and above is not None
        return {"kind": "distance", "table": xp.concat([below[:, :, 0], above[:, 0, :]], axis=1)}


@dataclass(frozen=True)
class SoftcapMod(ScoreMod):
    """cap · tanh(scores / cap)."""

    cap: float

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        return self.cap * xp.tanh(scores / self.cap)

    def to_payload(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return {"kind": "softcap", "cap": self.cap}

    def __repr__(self) -> str:
        return f"softcap({self.cap})"


def softcap(cap: float) -> ScoreMod:
    """Limit the scores to between −cap and cap: cap · tanh(scores / cap), as in Gemma 2.

    Args:
        cap: The limit, above 0.

    Returns:
        The score modification.

    Raises:
        ArgumentError: If `cap` is not a finite number above 0.

    >>> from regard import softcap
    >>> softcap(50.0)
    softcap(50.0)
    """
    if isinstance(cap, bool) or not (isinstance(cap, Real) and math.isfinite(cap) and cap > 0):
        raise ArgumentError(
            "softcap",
            received=f"{cap!r}",
            expected="a number above 0",
            hint="Omit softcap if the scores need no cap.",
        )
    return SoftcapMod(float(cap))


def alibi_slopes(heads: int) -> Array:
    """Return the published ALiBi slope of each head (Press et al., 2108.12409).

    The largest power of two p ≤ `heads` gives a geometric series that starts at 2^(−8/p). The remaining heads take
    every other slope of the series for 2p heads.

    Args:
        heads: Number of heads; it need not be a power of two.

    Returns:
        A float64 array of shape (heads,).

    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    power = 1 << (heads.bit_length() - 1) if heads else 1
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4.0 / power * np.arange(1, 2 * power, 2))
    return np.concatenate([slopes, between])[:heads]


@dataclass(frozen=True, eq=False)
class AlibiMod(DistanceMod):
    """−slope · |q_idx − kv_idx|."""

    slopes: Array | None
    align: Align | None

    def _slopes(self, frame: Frame) -> Array:
        slopes = self.slopes
        if slopes is None:
            slopes = alibi_slopes(frame.leading_shape[-1] if frame.leading_shape else 1)
        return frame.per_head(slopes, "alibi")

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array:
        distance = np.abs(kv_idx[None, :] - q_idx[:, None] - frame.offset(self.align, "alibi"))
        slopes = _convert(self._slopes(frame), "alibi", "slopes", xp, dtype)[:, None, None]
        return -slopes * xp.asarray(distance, dtype=dtype)

    def check(self, frame: Frame) -> None:
        frame.offset(self.align, "alibi")
        self._slopes(frame)

    def __repr__(self) -> str:
        slopes = "" if self.slopes is None else f"slopes={self.slopes.tolist()}"
        align = "" if self.align is None else f"align={self.align!r}"
        return f"alibi({', '.join(filter(None, (slopes, align)))})"


def alibi(slopes: Array | None = None, align: Align | None = None) -> ScoreMod:
    """Subtract a penalty that grows with distance: scores − slope · |q_idx − kv_idx|.

    Args:
        slopes: Slope of each head: (heads,). Default: the published slopes, `alibi_slopes`. Gradients flow to slopes
            that are a tensor.
        align: How queries and keys are aligned if the lengths differ, as in `causal`.

    Returns:
        The score modification.

    Raises:
        ArgumentTypeError: If the slopes are not numbers.
        ArgumentError: If `align` is unknown.

    >>> from regard import alibi
    >>> alibi()
    alibi()
    """
    check_align(align, "alibi")
    if slopes is not None:
        is_tensor = hasattr(slopes, "new_tensor")
        slopes = slopes if is_tensor else as_array(slopes, "alibi", "slopes")
        if not ("float" in str(slopes.dtype) or "int" in str(slopes.dtype)):
            raise ArgumentTypeError(
                "alibi",
                received=describe_argument(slopes),
                expected="one number for each head",
                hint="regard.score_mods.alibi_slopes(heads) returns the published slopes.",
            )
        slopes = slopes if is_tensor else slopes.astype(np.float64)
    return AlibiMod(slopes, align)


@dataclass(frozen=True, eq=False)
class BiasMod(ScoreMod):
    """An array added to the scores."""

    array: Array

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array:
        block = frame.take_pairs(take_block(self.array, q_idx, kv_idx), 2, "bias")
        entries = _convert(block, "bias", "array", xp)
        if entries.dtype == dtype:
            return entries
        bias = xp.astype(entries, dtype)
        # The lowest float64 number becomes −inf in float32, but it must not mask.
        return xp.where((bias == -xp.inf) & (entries != -xp.inf), xp.finfo(dtype).min, bias)

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        bias = self.additive_bias(frame, q_idx, kv_idx, xp, scores.dtype)
        # −inf masks even a NaN score, as a mask does.
        return xp.where(bias == -xp.inf, -xp.inf, scores + bias)

    def check(self, frame: Frame) -> None:
        check_matrix_shape(self.array, frame, "bias")

    def __repr__(self) -> str:
        return f"bias(<array of shape {tuple(self.array.shape)}>)"


def bias(array: Array) -> ScoreMod:
    """Add an array to the scores.

    Args:
        array: Floating-point numbers that broadcast to (…, q_len, kv_len). −inf masks a key; `finfo.min` does not mask
            a key; it is only a very low score.

    Returns:
        The score modification.

    Raises:
        ArgumentTypeError: If the array does not hold floating-point numbers.

    >>> import numpy as np
    >>> from regard.score_mods import bias
    >>> bias(np.zeros((5, 5)))
    bias(<array of shape (5, 5)>)
    """
    if isinstance(array, np.ndarray) or not hasattr(array, "dtype"):
        array = as_array(array, "bias", "array")
    if "float" not in str(array.dtype):
        raise ArgumentTypeError(
            "bias",
            received=describe_argument(array),
            expected="floating-point numbers to add to the scores",
            hint="For booleans, True = attend, use mask=regard.masks.dense(array); for integers, array.astype(float).",
        )
    return BiasMod(array)


def relative_buckets(ahead: IntArray, *, buckets: int, max_distance: int, bidirectional: bool) -> IntArray:
    """Return the T5 bucket of each relative position: exact when near, logarithmic farther out.

    Args:
        ahead: Relative positions kv_idx − q_idx, of any shape.
        buckets: Number of buckets.
        max_distance: From this distance on, all positions share the last bucket.
        bidirectional: Whether keys after the query have separate buckets.

    Returns:
        Bucket numbers, of the same shape.

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
class RelativeBiasMod(DistanceMod):
    """A bias for each head and bucket of distance."""

    table: Array
    bidirectional: bool
    max_distance: int
    align: Align | None

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array:
        ahead = kv_idx[None, :] - q_idx[:, None] - frame.offset(self.align, "relative_bias")
        bucket = relative_buckets(
            ahead,
            buckets=self.table.shape[0],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        per_pair = frame.take_pairs(self.table.T, 1, "relative_bias", "heads")
        return _convert(per_pair[:, bucket], "relative_bias", "table", xp, dtype)

    def check(self, frame: Frame) -> None:
        frame.offset(self.align, "relative_bias")
        frame.take_pairs(self.table.T, 1, "relative_bias", "heads")

    def __repr__(self) -> str:
        buckets, heads = self.table.shape
        align = "" if self.align is None else f", align={self.align!r}"
        return f"relative_bias(<{buckets} buckets, {heads} heads>, bidirectional={self.bidirectional}{align})"


def relative_bias(
    table: Array, *, bidirectional: bool, max_distance: int = 128, align: Align | None = None
) -> ScoreMod:
    """Add T5's relative position bias to the scores: `table[bucket(kv_idx − q_idx), head]`.

    Args:
        table: Bias of each bucket and head, (buckets, heads), as T5 stores it.
        bidirectional: Whether keys after the query have separate buckets: True for encoders, False for decoders.
        max_distance: From this distance on, all positions share the last bucket.
        align: How queries and keys are aligned if the lengths differ, as in `causal`.

    Returns:
        The score modification.

    Raises:
        ArgumentError: If the table does not have two axes or enough buckets, or `max_distance` is too small.

    >>> import numpy as np
    >>> from regard import relative_bias
    >>> relative_bias(np.zeros((32, 8)), bidirectional=True)
    relative_bias(<32 buckets, 8 heads>, bidirectional=True)
    """
    if isinstance(table, np.ndarray) or not hasattr(table, "dtype"):
        table = as_array(table, "relative_bias", "table")
    check_align(align, "relative_bias")
    min_buckets = 4 if bidirectional else 2
    if len(table.shape) != 2 or table.shape[0] < min_buckets or max_distance <= table.shape[0] // min_buckets:
        raise ArgumentError(
            "relative_bias",
            received=f"a table of shape {tuple(table.shape)}, max_distance={max_distance!r}",
            expected=f"(buckets, heads), at least {min_buckets} buckets, and a max_distance above the number of exact "
            f"distances",
            hint="T5's relative_attention_bias.weight has this shape.",
        )
    return RelativeBiasMod(table, bidirectional, max_distance, align)
