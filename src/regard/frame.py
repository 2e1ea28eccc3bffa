"""The frame in which masks and score modifications are evaluated: which (batch, head) pairs, which lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from regard.errors import ArgumentError, format_named_shape, format_shape
from regard.types import Align, Array, IntArray
from regard.validation import check_align

# |query| · |key| · scale beyond which a weight must not be recomputed from the lse of another computation: a score
# then errs by eps times this, and its weight by as much, relative.
EXACT_ROWS_LIMIT = 64


@dataclass(frozen=True)
class Frame:
    """Where masks and score modifications are asked: which (batch, head) pairs, and how long the sequences are.

    `lead` is the shape of the axes before q_len and kv_len; `some` are the flat indices into it that the question
    is about (None: all), so every answer has one leading axis, `(len(picked) or 1, rows, columns)`.
    """

    leading_shape: tuple[int, ...]
    q_len: int
    kv_len: int
    selection: IntArray | None = field(default=None, compare=False)

    @classmethod
    def from_shape(cls, shape: tuple[int, ...]) -> Frame:
        """The frame of a whole matrix of shape `(*lead, q_len, kv_len)`."""
        return cls(tuple(shape[:-2]), shape[-2], shape[-1])

    @cached_property
    def selected(self) -> IntArray:
        """The flat indices into `lead` that questions are about."""
        return np.arange(math.prod(self.leading_shape)) if self.selection is None else self.selection

    def select(self, which: IntArray) -> Frame:
        """The frame of some of the picked pairs."""
        return Frame(self.leading_shape, self.q_len, self.kv_len, self.selected[which])

    def offset(self, align: Align | None, operation: str) -> int:
        """What to add to `q_idx` so that it counts in the positions of the keys."""
        check_align(align, operation)
        if align == "lower_right":
            return self.kv_len - self.q_len
        if align is None and self.q_len != self.kv_len:
            raise ArgumentError(
                operation,
                received=format_shape(q_len=self.q_len, kv_len=self.kv_len) + " and no align",
                expected='align="upper_left" or align="lower_right" where the lengths differ',
                hint='Queries at the end of the keys (a cache) are "lower_right"; '
                '"upper_left" is what is_causal of F.scaled_dot_product_attention means.',
            )
        return 0

    def per_head(self, sizes: Array, operation: str) -> Array:
        """One number for each picked pair, from a number or an array of shape `(heads,)` or `(…, heads)`."""
        return self.take_pairs(sizes, 0, operation, "heads")

    def per_batch(self, array: Array, extra: int, operation: str) -> Array:
        """The picked rows of an array of shape `(*batch, …)` whose last `extra` axes are not batch axes."""
        shape = tuple(array.shape)
        lead = shape[: len(shape) - extra]
        heads_of_one = (1,) if lead else ()
        return self.take_pairs(
            array.reshape(lead + heads_of_one + shape[len(lead) :]), extra, operation, "batch"
        )

    def take_pairs(self, array: Array, extra: int, operation: str, over: str = "lead") -> Array:
        """`(len(picked) or 1, *extra)` from an array whose axes but the last `extra` broadcast to `lead`."""
        shape = tuple(array.shape)
        own, rest = shape[: len(shape) - extra], shape[len(shape) - extra :]
        count = math.prod(own)
        if count == 1:
            return array.reshape((1, *rest))
        try:
            which = np.broadcast_to(np.arange(count).reshape(own), self.leading_shape).ravel()[self.selected]
        except ValueError:
            raise ArgumentError(
                operation,
                received=f"an array of shape {shape} for a matrix of shape "
                + format_named_shape((*self.leading_shape, self.q_len, self.kv_len), "q_len", "kv_len"),
                expected=f"axes over {over} that broadcast to {self.leading_shape}",
                hint="Give the query a heads axis of one where there are no heads: query[:, None]."
                if over == "batch"
                else "Give one entry for each head, or a single one for all.",
            ) from None
        return array.reshape((count, *rest))[which]


def is_contiguous(positions: IntArray) -> bool:
    """Whether positions count up by one, so that a slice can stand for them."""
    return len(positions) > 0 and bool(np.all(np.diff(positions) == 1))


def take_block(array: Array, q_idx: IntArray, kv_idx: IntArray) -> Array:
    """The rows `q_idx` and columns `kv_idx` of the last two axes; an axis of one stands for all positions.

    >>> take_block(np.arange(12).reshape(3, 4), np.array([0, 2]), np.array([1, 2]))
    array([[ 1,  2],
           [ 9, 10]])
    """
    for axis, positions in ((-2, q_idx), (-1, kv_idx)):
        if array.shape[axis] == 1:
            continue
        taken = slice(int(positions[0]), int(positions[-1]) + 1) if is_contiguous(positions) else positions
        array = array[..., taken, :] if axis == -2 else array[..., taken]
    return array


def check_matrix_shape(array: Array, frame: Frame, operation: str) -> None:
    """Refuse an array whose last two axes are neither (q_len, kv_len) nor one."""
    shape = tuple(array.shape)
    if len(shape) < 2 or shape[-2] not in (1, frame.q_len) or shape[-1] not in (1, frame.kv_len):
        raise ArgumentError(
            operation,
            received=f"an array of shape {shape}",
            expected="one that broadcasts to "
            + format_named_shape((*frame.leading_shape, frame.q_len, frame.kv_len), "q_len", "kv_len"),
            hint="The last two axes are q_len and kv_len, each of full length or 1.",
        )
    frame.take_pairs(array[..., :1, :1], 2, operation)
