"""Masks from boolean arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.frame import Frame, check_matrix_shape, take_block
from regard.masks.base import BlockKinds, Mask
from regard.types import Array, IntArray, Namespace
from regard.validation import as_array


def dense(array: Array, true_means: Literal["attend", "ignore"] = "attend") -> Mask:
    """Return a mask from a boolean array.

    Args:
        array: Booleans that broadcast to (…, q_len, kv_len).
        true_means: What True stands for. The default, "attend", is the library's own convention and that of
            `F.scaled_dot_product_attention`; "ignore" is the convention of `nn.MultiheadAttention`.

    Returns:
        A mask; with `true_means="ignore"` it equals `~dense(array)`.

    Raises:
        ArgumentTypeError: If the array does not hold booleans.
        ArgumentError: If `true_means` is neither "attend" nor "ignore".

    >>> from regard import dense
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
            hint='Pass true_means="ignore" for a mask of nn.MultiheadAttention, "attend" for one of SDPA.',
        )
    if not hasattr(array, "dtype"):
        array = as_array(array, "dense", "array")
    if not str(array.dtype).endswith("bool"):
        raise ArgumentTypeError(
            "dense",
            received=describe_argument(array),
            expected="booleans, True = attend",
            hint="For 1 = attend use dense(array != 0); "
            "for an additive tensor of 0 and -inf use score_mod=bias(array); "
            'for True = ignore, as in nn.MultiheadAttention, write dense(array, true_means="ignore").',
        )
    return DenseMask(array) if true_means == "attend" else ~DenseMask(array)


@dataclass(frozen=True, eq=False)
class DenseMask(Mask):
    """Mask from a boolean array, True = attend."""

    array: Array

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        allowed = frame.take_pairs(take_block(self.array, q_idx, kv_idx), 2, "dense")
        allowed = as_array(allowed, "dense", "array") if xp is np else xp.asarray(allowed)
        return xp.broadcast_to(allowed, (allowed.shape[0], len(q_idx), len(kv_idx)))

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
