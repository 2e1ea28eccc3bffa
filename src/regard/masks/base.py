"""What a mask is, and how masks combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.frame import Frame
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace


class Bounds(NamedTuple):
    """For consecutive blocks of keys: whether any entry may be let through, and whether every one must be.

    `may` False is an empty block, `must` True a full one. Both err only towards partial.
    """

    may: Array
    must: Array


class Cuts(NamedTuple):
    """Positions at which rows and columns are best cut, ascending, 0 among them."""

    rows: IntArray
    columns: IntArray


class Mask:
    """Which keys each query may see; a value that combines with `&`, `|` and `~`.

    >>> from regard import causal, first, sliding_window
    >>> mask = causal() & (sliding_window(2) | first(1))
    >>> mask
    causal() & (sliding_window(2) | first(1))
    >>> mask.to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        """True where a query may see a key: `(pairs or 1, len(q_idx), len(kv_idx))` or what broadcasts to it."""
        raise TypeError(f"{type(self).__name__} must define allows(frame, q_idx, kv_idx, xp)")

    def bounds(self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray) -> Bounds:
        """What is known of the blocks [q_lo, q_hi) × [kv_lo, kv_hi), the latter ascending and adjoining."""
        return Bounds(np.ones(len(kv_lo), bool), np.zeros(len(kv_lo), bool))

    def check(self, frame: Frame) -> None:
        """Refuse, with the hint, a matrix that the mask does not fit."""

    def within(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        """The mask as it is on one block: True where it is full, False where empty, else what is left to test."""
        may, must = self.bounds(
            frame, rows.start, rows.stop, np.array([columns.start]), np.array([columns.stop])
        )
        return True if must[0] else self if may[0] else False

    def cuts(self, frame: Frame) -> Cuts:
        """Where to cut rows and columns so that most blocks are full, empty or causal; any cuts are right."""
        return Cuts(np.arange(0, frame.q_len, tile_sizes().mask_rows), np.array([0]))

    def diagonal(self, frame: Frame) -> int | None:
        """kv_idx − q_idx of the last key let through, where that is the only edge and the same for every head."""
        return None

    def diagonals(self, frame: Frame) -> set[int]:
        """The `diagonal` of each part that has one."""
        edge = self.diagonal(frame)
        return set() if edge is None else {edge}

    @property
    def slides(self) -> bool:
        """Whether it depends on kv_idx − q_idx alone, so that blocks along a diagonal are alike."""
        return False

    @property
    def by_key(self) -> bool:
        """Whether it lets the same keys through for every query."""
        return False

    @property
    def ragged(self) -> bool:
        """Whether batch entries differ in how far they reach, so that each is better taken by itself."""
        return False

    def block(
        self, q_range: range, kv_range: range, *, shape: tuple[int, ...]
    ) -> Literal["empty", "full", "partial"]:
        """What one block of a matrix of `shape` holds, told without building it.

        >>> import regard
        >>> regard.causal().block(range(0, 4), range(8, 12), shape=(16, 16))
        'empty'
        """
        self.check(frame := Frame.from_shape(shape))
        if not (len(q_range) and len(kv_range)):
            return "empty"
        may, must = self.bounds(
            frame, q_range.start, q_range.stop, np.array([kv_range.start]), np.array([kv_range.stop])
        )
        return "full" if must[0] else "partial" if may[0] else "empty"

    def to_dense(self, *shape: int) -> Array:
        """The whole mask as a boolean array of `shape`, to look at.

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
        return _combine(AllOf, self, other, "&")

    def __or__(self, other: object) -> Mask:
        return _combine(AnyOf, self, other, "|")

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise ArgumentTypeError(
            "a mask as a truth value",
            received=repr(self),
            expected="masks combined by & | ~",
            hint="Write mask & other, not `mask and other`.",
        )


def _combine(how: type[AllOf] | type[AnyOf], left: Mask, right: object, sign: str) -> Mask:
    if not isinstance(right, Mask):
        raise ArgumentTypeError(
            f"mask {sign} other",
            received=describe_argument(right),
            expected="another mask",
            hint="Wrap a boolean array, True = attend, as regard.dense(array).",
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

    def cuts(self, frame: Frame) -> Cuts:
        each = [part.cuts(frame) for part in self.parts]
        rows, columns = (np.unique(np.concatenate(positions)) for positions in zip(*each, strict=True))
        for edge in self.diagonals(frame):
            # Corners on the diagonal make causal blocks.
            rows, columns = np.union1d(rows, columns - edge), np.union1d(columns, rows + edge)
        return Cuts(*(x[(x >= 0) & (x < n)] for x, n in ((rows, frame.q_len), (columns, frame.kv_len))))

    def diagonals(self, frame: Frame) -> set[int]:
        return {edge for part in self.parts for edge in part.diagonals(frame)}

    @property
    def slides(self) -> bool:
        return all(part.slides for part in self.parts)

    @property
    def by_key(self) -> bool:
        return all(part.by_key for part in self.parts)

    @property
    def ragged(self) -> bool:
        return any(part.ragged for part in self.parts)

    def _left_within(self, frame: Frame, rows: range, columns: range, settled: bool) -> Mask | bool:
        """The parts that a block does not settle; `settled` alone decides the whole."""
        left: list[Mask] = []
        for part in self.parts:
            here = part.within(frame, rows, columns)
            if here is settled:
                return settled
            if isinstance(here, Mask) and here not in left:
                left.append(here)
        if not left:
            return not settled
        return left[0] if len(left) == 1 else type(self)(tuple(left))

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

    def within(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        return self._left_within(frame, rows, columns, settled=False)

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

    def within(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        return self._left_within(frame, rows, columns, settled=True)

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

    def within(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        here = self.mask.within(frame, rows, columns)
        return ~here if isinstance(here, Mask) else not here

    def cuts(self, frame: Frame) -> Cuts:
        return self.mask.cuts(frame)

    def diagonals(self, frame: Frame) -> set[int]:
        return self.mask.diagonals(frame)

    @property
    def slides(self) -> bool:
        return self.mask.slides

    @property
    def by_key(self) -> bool:
        return self.mask.by_key

    @property
    def ragged(self) -> bool:
        return self.mask.ragged

    def check(self, frame: Frame) -> None:
        self.mask.check(frame)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, _Several) else f"~{self.mask}"
