"""The base class of masks, and how masks combine with `&`, `|` and `~`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.frame import Frame
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace


class BlockKinds(NamedTuple):
    """Which of several blocks are non-empty and which are full; an inexact mask may report any block as partial.

    Attributes:
        nonempty: False if no entry of the block is allowed: (blocks,).
        full: True if every entry of the block is allowed: (blocks,).

    >>> import numpy as np, regard
    >>> from regard.frame import Frame
    >>> kinds = regard.causal().classify_blocks(Frame.from_shape((8, 8)), 0, 4, np.array([0, 4]), np.array([4, 8]))
    >>> kinds.nonempty.tolist(), kinds.full.tolist()
    ([True, False], [False, False])
    """

    nonempty: Array
    full: Array


def classify_blocks(
    mask: Mask | None, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
) -> BlockKinds:
    """Classify blocks as `Mask.classify_blocks` does; without a mask, all are full."""
    if mask is None or not len(kv_lo):
        return BlockKinds(np.ones(len(kv_lo), bool), np.ones(len(kv_lo), bool))
    return mask.classify_blocks(frame, q_lo, q_hi, kv_lo, kv_hi)


class SplitPoints(NamedTuple):
    """Positions at which rows and columns are best split, ascending, with 0 first."""

    rows: IntArray
    columns: IntArray


class Mask:
    """Which keys each query may attend to; a value that combines with `&`, `|` and `~`.

    A subclass defines `allows`, and `classify_blocks` if it can recognise empty and full blocks without building them;
    `regard.masks` has an example.

    >>> from regard import causal, sliding_window
    >>> from regard.masks import first
    >>> mask = causal() & (sliding_window(2) | first(1))
    >>> mask
    causal() & (sliding_window(2) | first(1))
    >>> mask.to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """

    # Whether equal masks always allow the same entries: the mask holds no array that could be changed in place.
    is_constant: ClassVar[bool] = False

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        """Evaluate the mask on a block of rows and columns.

        Args:
            frame: The (batch, head) pairs and the lengths.
            q_idx: Positions of the queries: (r,).
            kv_idx: Positions of the keys: (c,).
            xp: Array API namespace of the result.

        Returns:
            Booleans, True where a query may attend to a key, that broadcast to (pairs, r, c).
        """
        raise TypeError(f"{type(self).__name__} must define allows(frame, q_idx, kv_idx, xp)")

    def allows_all(self, frame: Frame, xp: Namespace) -> Array:
        """Evaluate the mask on a small matrix: (pairs or 1, q_len, kv_len), one row if it is equal for all queries.

        Args:
            frame: The (batch, head) pairs and the lengths.
            xp: Array API namespace of the result.
        """
        return self.allows(
            frame, np.arange(1 if self.is_key_only else frame.q_len), np.arange(frame.kv_len), xp
        )

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        """Classify the blocks [q_lo, q_hi) × [kv_lo[i], kv_hi[i]) as empty, full or partial.

        Args:
            frame: The (batch, head) pairs and the lengths.
            q_lo: First row.
            q_hi: Row after the last.
            kv_lo: First column of each block; blocks are adjacent and in ascending order.
            kv_hi: Column after the last of each block.

        Returns:
            Which blocks are not empty, and which are full. A block that is neither empty nor full for all pairs is
            partial; the default calls every block partial.
        """
        return BlockKinds(np.ones(len(kv_lo), bool), np.zeros(len(kv_lo), bool))

    def check(self, frame: Frame) -> None:
        """Raise an `ArgumentError` if the mask does not fit a matrix.

        Args:
            frame: The (batch, head) pairs and the lengths of the matrix.
        """

    def restrict(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        """Simplify the mask on one block.

        Args:
            frame: The (batch, head) pairs and the lengths.
            rows: Rows of the block.
            columns: Columns of the block.

        Returns:
            True if the block is full, False if it is empty, else a mask that is equal to this one on the block.
        """
        nonempty, full = self.classify_blocks(
            frame, rows.start, rows.stop, np.array([columns.start]), np.array([columns.stop])
        )
        return True if full[0] else self if nonempty[0] else False

    def split_points(self, frame: Frame) -> SplitPoints:
        """Return where to split rows and columns so that most blocks are full, empty or causal.

        Args:
            frame: The (batch, head) pairs and the lengths.
        """
        return SplitPoints(np.arange(0, frame.q_len, tile_sizes().mask_rows), np.array([0]))

    def intersect(self, other: Mask) -> Mask | None:
        """Return one mask that is equal to `self & other` and cheaper to evaluate; None if there is no such mask.

        Args:
            other: Another mask.
        """
        return None

    def diagonal(self, frame: Frame) -> int | None:
        """Return the highest allowed kv_idx − q_idx if that is the only limit, and equal for all heads; else None.

        Args:
            frame: The (batch, head) pairs and the lengths.
        """
        return None

    def diagonals(self, frame: Frame) -> set[int]:
        """Return the `diagonal` of each part of a combined mask that has one.

        Args:
            frame: The (batch, head) pairs and the lengths.
        """
        diagonal = self.diagonal(frame)
        return set() if diagonal is None else {diagonal}

    @property
    def is_relative(self) -> bool:
        """Whether the mask depends on kv_idx − q_idx only, so that blocks along a diagonal are equal."""
        return False

    @property
    def is_key_only(self) -> bool:
        """Whether the mask is the same for every query."""
        return False

    @property
    def varies_by_batch(self) -> bool:
        """Whether the mask differs between batch entries, so that they are better computed one by one."""
        return False

    @property
    def varies_by_head(self) -> bool:
        """Whether the mask may differ between the heads of a batch entry."""
        return True

    def classify(
        self, q_range: range, kv_range: range, *, shape: tuple[int, ...]
    ) -> Literal["empty", "full", "partial"]:
        """Classify one block of a matrix without building it.

        Args:
            q_range: Rows of the block.
            kv_range: Columns of the block.
            shape: Shape of the matrix, (…, q_len, kv_len).

        Returns:
            "empty" if the block has no allowed entry, "full" if all entries are allowed, else "partial".

        Raises:
            ArgumentError: If the mask does not fit the shape.

        >>> import regard
        >>> regard.causal().classify(range(0, 4), range(8, 12), shape=(16, 16))
        'empty'
        """
        self.check(frame := Frame.from_shape(shape))
        if not (len(q_range) and len(kv_range)):
            return "empty"
        nonempty, full = self.classify_blocks(
            frame, q_range.start, q_range.stop, np.array([kv_range.start]), np.array([kv_range.stop])
        )
        return "full" if full[0] else "partial" if nonempty[0] else "empty"

    def to_dense(self, *shape: int) -> Array:
        """Build the whole mask as a boolean NumPy array.

        Args:
            *shape: Lengths of the axes: …, q_len, kv_len.

        Returns:
            Booleans of that shape, True where a query may attend to a key.

        Raises:
            ArgumentError: If there are fewer than two lengths, or the mask does not fit them.

        >>> import regard
        >>> regard.causal(align="lower_right").to_dense(2, 5).astype(int)
        array([[1, 1, 1, 1, 0],
               [1, 1, 1, 1, 1]])
        """
        if len(shape) < 2 or not all(isinstance(n, int) for n in shape):
            raise ArgumentError(
                "mask.to_dense",
                received=", ".join(map(repr, shape)),
                expected="the lengths of the axes, q_len and kv_len last",
                hint="causal().to_dense(5, 5) is a mask of five queries and five keys.",
            )
        self.check(frame := Frame.from_shape(shape))
        allowed = self.allows(frame, np.arange(frame.q_len), np.arange(frame.kv_len), np)
        pairs = (len(frame.selected), frame.q_len, frame.kv_len)
        return np.broadcast_to(allowed, pairs).reshape(shape).copy()

    def __and__(self, other: object) -> Mask:
        return _combine(AndMask, self, other, "&")

    def __or__(self, other: object) -> Mask:
        return _combine(OrMask, self, other, "|")

    # An array or a function on the left is refused like one on the right.
    __rand__, __ror__ = __and__, __or__
    __array_ufunc__ = None

    def __invert__(self) -> Mask:
        return NotMask((self,))

    def __bool__(self) -> bool:
        raise ArgumentTypeError(
            "a mask as a truth value",
            received=repr(self),
            expected="masks combined by & | ~",
            hint="Write mask & other, not `mask and other`.",
        )


def _combine(kind: type[AndMask] | type[OrMask], left: Mask, right: object, sign: str) -> Mask:
    """Combine two masks; nested combinations of the same kind are flattened, and equal parts kept once."""
    if not isinstance(right, Mask):
        raise ArgumentTypeError(
            f"mask {sign} other",
            received=describe_argument(right),
            expected="another mask",
            hint="Wrap a function of the indices: regard.mask(function)."
            if callable(right)
            else "Wrap a boolean array (True = attend): regard.masks.dense(array).",
        )
    parts: list[Mask] = []
    for mask in (left, right):
        for part in mask.parts if isinstance(mask, kind) else (mask,):
            if part not in parts:
                parts.append(part)
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


@dataclass(frozen=True, eq=False)
class CombinedMask(Mask):
    """A mask made of others; a part that is `decisive` on a block decides the whole block."""

    parts: tuple[Mask, ...]
    decisive: ClassVar[bool]

    @property
    def _evaluated(self) -> Sequence[Mask]:
        """The masks to evaluate in place of the parts."""
        return self.parts

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        combine = operator.or_ if self.decisive else operator.and_
        first, *others = self._evaluated
        allowed = first.allows(frame, q_idx, kv_idx, xp)
        for part in others:
            allowed = combine(allowed, part.allows(frame, q_idx, kv_idx, xp))
        return allowed

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        combine = operator.or_ if self.decisive else operator.and_
        first, *others = self._evaluated
        nonempty, full = first.classify_blocks(frame, q_lo, q_hi, kv_lo, kv_hi)
        for part in others:
            is_nonempty, is_full = part.classify_blocks(frame, q_lo, q_hi, kv_lo, kv_hi)
            nonempty, full = combine(nonempty, is_nonempty), combine(full, is_full)
        return BlockKinds(nonempty, full)

    def restrict(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        rest: list[Mask] = []
        for part in self._evaluated:
            restricted = part.restrict(frame, rows, columns)
            if restricted is self.decisive:
                return self.decisive
            if isinstance(restricted, Mask) and restricted not in rest:
                rest.append(restricted)
        if not rest:
            return not self.decisive
        return rest[0] if len(rest) == 1 else type(self)(tuple(rest))

    def check(self, frame: Frame) -> None:
        for part in self.parts:
            part.check(frame)

    def split_points(self, frame: Frame) -> SplitPoints:
        splits = [part.split_points(frame) for part in self._evaluated]
        rows, columns = (np.unique(np.concatenate(positions)) for positions in zip(*splits, strict=True))
        for diagonal in self.diagonals(frame):
            # Corners on the diagonal make causal blocks.
            rows, columns = np.union1d(rows, columns - diagonal), np.union1d(columns, rows + diagonal)
        return SplitPoints(
            *(x[(x >= 0) & (x < n)] for x, n in ((rows, frame.q_len), (columns, frame.kv_len)))
        )

    def diagonals(self, frame: Frame) -> set[int]:
        return {diagonal for part in self._evaluated for diagonal in part.diagonals(frame)}

    @property
    def is_relative(self) -> bool:
        return all(part.is_relative for part in self._evaluated)

    @property
    def is_key_only(self) -> bool:
        return all(part.is_key_only for part in self.parts)

    @property
    def varies_by_batch(self) -> bool:
        return any(part.varies_by_batch for part in self.parts)

    @property
    def varies_by_head(self) -> bool:
        return any(part.varies_by_head for part in self.parts)

    @cached_property
    def is_constant(self) -> bool:  # type: ignore[override]
        return all([part.is_constant for part in self.parts])

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, CombinedMask):
            return NotImplemented
        return len(self.parts) == len(other.parts) and all(part in other.parts for part in self.parts)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(self.parts)))


class AndMask(CombinedMask):
    """Mask of the entries that every part allows."""

    decisive = False

    @cached_property
    def _evaluated(self) -> Sequence[Mask]:
        masks: list[Mask] = []
        for part in self.parts:
            for i, mask in enumerate(masks):
                if (both := mask.intersect(part)) is not None:
                    masks[i] = both
                    break
            else:
                masks.append(part)
        return masks

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, OrMask) else repr(part) for part in self.parts)


class OrMask(CombinedMask):
    """Mask of the entries that at least one part allows."""

    decisive = True

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


class NotMask(CombinedMask):
    """Mask of the entries that its only part does not allow."""

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        return ~self.parts[0].allows(frame, q_idx, kv_idx, xp)

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        nonempty, full = self.parts[0].classify_blocks(frame, q_lo, q_hi, kv_lo, kv_hi)
        return BlockKinds(~full, ~nonempty)

    def restrict(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        rest = self.parts[0].restrict(frame, rows, columns)
        return ~rest if isinstance(rest, Mask) else not rest

    def __invert__(self) -> Mask:
        return self.parts[0]

    def __repr__(self) -> str:
        is_and_or = isinstance(self.parts[0], AndMask | OrMask)
        return f"~({self.parts[0]})" if is_and_or else f"~{self.parts[0]}"


def sort_splits(positions: IntArray, length: int) -> IntArray:
    """Return the positions inside an axis in ascending order, with 0 first."""
    inside = positions[(positions > 0) & (positions < length)]
    return np.unique(np.concatenate([[0], inside])).astype(np.int64)
