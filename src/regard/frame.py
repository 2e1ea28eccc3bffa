"""The frame in which masks and score modifications are evaluated: (batch, head) pairs and sequence lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from regard.errors import ArgumentError, format_named_shape, format_shape
from regard.types import Align, Array, IntArray
from regard.validation import check_align


class Resolvable(Protocol):
    """A mask or a score modification that resolves some of its numbers for a frame."""

    def resolve(self, frame: Frame) -> Any: ...


@dataclass(frozen=True)
class Frame:
    """The (batch, head) pairs and the lengths for which masks and score modifications are evaluated.

    Results have one leading axis for the selected pairs: (len(selected) or 1, rows, columns).

    Attributes:
        leading_shape: Axes of the matrix before q_len and kv_len.
        q_len: Number of queries.
        kv_len: Number of keys.
        selection: Flat indices of the selected pairs in `leading_shape`; None for all.
    """

    leading_shape: tuple[int, ...]
    q_len: int
    kv_len: int
    selection: IntArray | None = field(default=None, compare=False)

    @classmethod
    def from_shape(cls, shape: tuple[int, ...]) -> Frame:
        """Return the frame of a matrix of shape (…, q_len, kv_len), with all its pairs selected."""
        return cls(tuple(shape[:-2]), shape[-2], shape[-1])

    @cached_property
    def selected(self) -> IntArray:
        """Flat indices of the selected pairs in `leading_shape`: (pairs,)."""
        return np.arange(math.prod(self.leading_shape)) if self.selection is None else self.selection

    def select(self, which: IntArray) -> Frame:
        """Return the frame of some of the selected pairs."""
        return Frame(self.leading_shape, self.q_len, self.kv_len, self.selected[which])

    def split_batch(self) -> list[IntArray]:
        """Split the numbers of the selected pairs, from 0 on, by batch entry."""
        heads = self.leading_shape[-1] if self.leading_shape else 1
        entry = self.selected // max(heads, 1)
        return np.split(np.arange(len(entry)), np.flatnonzero(np.diff(entry)) + 1)

    @cached_property
    def _resolved(self) -> dict[int, tuple[Resolvable, Any]]:
        return {}

    def resolve(self, part: Resolvable) -> Any:
        """Return what a mask or a score modification needs in every block of this frame, computed once."""
        known = self._resolved.get(id(part))
        if known is None or known[0] is not part:  # a copy of the frame holds copies of its parts
            known = self._resolved[id(part)] = part, part.resolve(self)
        return known[1]

    def offset(self, align: Align | None, operation: str) -> int:
        """Return the number to add to `q_idx` to get the position of the query among the keys."""
        check_align(align, operation)
        if align == "lower_right":
            return self.kv_len - self.q_len
        if align is None and self.q_len != self.kv_len:
            raise ArgumentError(
                operation,
                received=format_shape(q_len=self.q_len, kv_len=self.kv_len) + " and no align",
                expected='align="upper_left" or align="lower_right" if the lengths differ',
                hint='If the queries are the last tokens of the keys (a cache), pass "lower_right"; to match '
                'is_causal of F.scaled_dot_product_attention, pass "upper_left".',
            )
        return 0

    def per_head(self, sizes: Array, operation: str) -> Array:
        """Return one number for each selected pair: (len(selected) or 1,).

        Args:
            sizes: A number, or an array of shape (heads,) or (…, heads).
            operation: Name of the operation in errors.
        """
        return self.take_pairs(sizes, 0, operation, "heads")

    def per_batch(self, array: Array, extra: int, operation: str) -> Array:
        """Return the rows of an array without a heads axis for each selected pair: (len(selected) or 1, …).

        Args:
            array: (*batch, …).
            extra: Number of last axes that are not batch axes.
            operation: Name of the operation in errors.
        """
        shape = tuple(array.shape)
        batch = shape[: len(shape) - extra]
        heads = (1,) if batch else ()
        return self.take_pairs(array.reshape(batch + heads + shape[len(batch) :]), extra, operation, "batch")

    def take_pairs(self, array: Array, extra: int, operation: str, over: str = "leading axes") -> Array:
        """Return the entries of an array for each selected pair: (len(selected) or 1, …)."""
        shape = tuple(array.shape)
        own, rest = shape[: len(shape) - extra], shape[len(shape) - extra :]
        count = math.prod(own)
        if count == 1:
            return array.reshape((1, *rest))
        try:
            which = np.broadcast_to(np.arange(count).reshape(own), self.leading_shape).ravel()[self.selected]
        except ValueError:
            matrix_shape = format_named_shape(
                (*self.leading_shape, self.q_len, self.kv_len), "q_len", "kv_len"
            )
            raise ArgumentError(
                operation,
                received=f"an array of shape {shape} for a matrix of shape {matrix_shape}",
                expected=f"axes over {over} that broadcast to {self.leading_shape}",
                hint="If there are no heads, give the query a heads axis of size one: query[:, None]."
                if over == "batch"
                else "Pass one entry for each head, or a single entry for all heads.",
            ) from None
        return array.reshape((count, *rest))[as_index(which)]


def is_contiguous(positions: IntArray) -> bool:
    """Return whether positions increase by one, so that a slice can replace them.

    >>> is_contiguous(np.array([3, 4, 5])), is_contiguous(np.array([3, 5]))
    (True, False)
    """
    if len(positions) < 2:
        return len(positions) == 1
    return bool((positions[1:] - positions[:-1] == 1).all())


def as_index(positions: IntArray) -> IntArray | slice:
    """Return contiguous positions as a slice, which gives a view and needs no copy to a device; others unchanged.

    >>> as_index(np.array([3, 4, 5])), as_index(np.array([3, 5]))
    (slice(3, 6, None), array([3, 5]))
    """
    return slice(int(positions[0]), int(positions[-1]) + 1) if is_contiguous(positions) else positions


def take_range(positions: Array, start: int, stop: int, first: int = 0) -> Array:
    """Return the positions start, …, stop − 1; a tensor carries the slice, so that its device need not be asked."""
    taken = positions[start - first : stop - first]
    try:
        taken.tile_slice = slice(start, stop)
    except AttributeError:  # NumPy arrays take no attributes, and need none
        return taken
    return taken


def take_block(array: Array, q_idx: IntArray, kv_idx: IntArray) -> Array:
    """Return the rows `q_idx` and columns `kv_idx` of the last two axes; an axis of size one is kept as it is.

    >>> take_block(np.arange(12).reshape(3, 4), np.array([0, 2]), np.array([1, 2]))
    array([[ 1,  2],
           [ 9, 10]])
    """
    for axis, positions in ((-2, q_idx), (-1, kv_idx)):
        if array.shape[axis] == 1:
            continue
        taken = as_index(positions)
        array = array[..., taken, :] if axis == -2 else array[..., taken]
    return array


def check_matrix_shape(array: Array, frame: Frame, operation: str) -> None:
    """Refuse an array that does not broadcast to the shape of the matrix, (…, q_len, kv_len)."""
    shape = tuple(array.shape)
    if len(shape) < 2 or shape[-2] not in (1, frame.q_len) or shape[-1] not in (1, frame.kv_len):
        matrix_shape = format_named_shape(
            (*frame.leading_shape, frame.q_len, frame.kv_len), "q_len", "kv_len"
        )
        raise ArgumentError(
            operation,
            received=f"an array of shape {shape}",
            expected=f"one that broadcasts to {matrix_shape}",
            hint="The last two axes are q_len and kv_len, each of full length or 1.",
        )
    if math.prod(shape[:-2]) != 1:
        frame.take_pairs(array[..., :1, :1], 2, operation)
