"""Masks and score modifications of a sequence, asked of a part of it: rows and columns by their positions.

A cache holds some tokens of a sequence, and a call brings its next ones. What is said of the sequence (`causal()`,
`alibi()`, a window) holds for the part; so a mask is asked at the positions of the part's rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from regard.frame import Frame
from regard.masks import Mask
from regard.masks.atoms import Band, Keys
from regard.masks.base import AllOf, AnyOf, Not
from regard.score_mods import Alibi, RelativeBias, ScoreMod, Softcap
from regard.types import Array, IntArray, Namespace

# Columns without a position: nobody sees the one, everybody the other.
NOBODY, EVERYBODY = -1, -2


@dataclass(frozen=True, eq=False)
class Places:
    """Rows and columns of a part by their positions in the whole: (batch or 1, q_len) and (batch or 1, kv_len).

    `shape` is that of the whole, (q_len, kv_len); `some` is None where its columns are all there, in order.
    """

    rows: IntArray
    some: IntArray | None
    shape: tuple[int, int]

    @cached_property
    def columns(self) -> IntArray:
        """The position of each column."""
        return np.arange(self.shape[1])[None] if self.some is None else self.some

    def one_more(self) -> Places:
        """With a last column that everybody sees."""
        return replace(self, some=np.pad(self.columns, ((0, 0), (0, 1)), constant_values=EVERYBODY))

    @cached_property
    def at_the_end(self) -> bool:
        """Whether the columns are all of a sequence, and the rows its last tokens."""
        if len(self.rows) > 1 or self.some is not None or self.shape[0] != self.shape[1]:
            return False
        end = self.shape[1]
        return bool((self.rows[0] == np.arange(end - self.rows.shape[1], end)).all())

    def mask(self, mask: Mask | None) -> Mask | None:
        """The mask of the part."""
        if self.at_the_end:
            ended = None if mask is None else _ended(mask)
            if ended is not None or mask is None:
                return ended
        return None if mask is None and (self.columns != NOBODY).all() else Placed(mask, self)

    def score_mod(self, change: ScoreMod) -> ScoreMod:
        """The score modification of the part."""
        if isinstance(change, Softcap):
            return change
        if self.at_the_end and isinstance(change, Alibi | RelativeBias):
            return replace(change, align="lower_right")
        # Whether a fused kernel can take it along is told from the class.
        adds = type(change).added is not ScoreMod.added
        learnt = next((array for array in vars(change).values() if hasattr(array, "requires_grad")), None)
        return (PlacedAdded if adds else PlacedChange)(change, self, learnt)

    def whole(self, frame: Frame) -> Frame:
        """The frame of the whole."""
        return Frame(frame.leading_shape, *self.shape, frame.selection)

    def entries(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray
    ) -> Iterator[tuple[Any, Frame, IntArray, IntArray]]:
        """For pairs of the same positions: which they are, their frame in the whole, and where rows and columns are."""
        whole = self.whole(frame)
        if len(self.rows) == len(self.columns) == 1:
            yield slice(None), whole, self.rows[0, q_idx], self.columns[0, kv_idx]
            return
        batch = max(len(self.rows), len(self.columns))
        entry = frame.selected // (frame.leading_shape[-1] if len(frame.leading_shape) > 1 else 1)
        for each in range(batch):
            which = np.flatnonzero(entry == each)
            if len(which):
                rows, columns = (x[min(each, len(x) - 1)] for x in (self.rows, self.columns))
                yield which, whole.select(which), rows[q_idx], columns[kv_idx]

    def gather(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, ask: Callable[..., Array]
    ) -> Array:
        """`(pairs or 1, rows, columns)` from what `ask(which, frame, rows, columns)` answers for each entry."""
        found = []
        for which, whole, rows, columns in self.entries(frame, q_idx, kv_idx):
            answer = ask(which, whole, rows, columns)
            if isinstance(which, slice):
                return answer
            found.append(xp.broadcast_to(answer, (len(which), len(q_idx), len(kv_idx))))
        return xp.concat(found) if found else xp.empty((0, len(q_idx), len(kv_idx)))


def _ended(mask: Mask) -> Mask | None:
    """The mask of the last rows, without asking by position, where it is made of kinds that know how."""
    if isinstance(mask, Band):
        return replace(mask, align="lower_right")
    if isinstance(mask, Keys):
        return mask
    if isinstance(mask, Not):
        inner = _ended(mask.mask)
        return None if inner is None else ~inner
    if isinstance(mask, AllOf | AnyOf):
        parts = [_ended(part) for part in mask.parts]
        return None if None in parts else type(mask)(tuple(part for part in parts if part is not None))
    return None


@dataclass(frozen=True, eq=False)
class Placed(Mask):
    """A mask of a sequence, for a part of it."""

    mask: Mask | None
    places: Places

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        def ask(which: Any, whole: Frame, rows: IntArray, columns: IntArray) -> Array:
            there = xp.asarray(columns >= 0)[None, None, :]
            if self.mask is not None:
                there = there & self.mask.allows(whole, rows, np.maximum(columns, 0), xp)
            there = there | xp.asarray(columns == EVERYBODY)[None, None, :]
            return xp.broadcast_to(there, (there.shape[0], len(rows), len(columns)))

        return self.places.gather(frame, q_idx, kv_idx, xp, ask)

    def check(self, frame: Frame) -> None:
        if self.mask is not None:
            self.mask.check(self.places.whole(frame))

    def __repr__(self) -> str:
        return f"{'every key' if self.mask is None else self.mask} by position"


@dataclass(frozen=True, eq=False)
class PlacedChange(ScoreMod):
    """A score modification of a sequence, for a part of it."""

    change: ScoreMod
    places: Places
    array: Any  # what may be learnt of it, for those who look for gradients

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        def ask(which: Any, whole: Frame, rows: IntArray, columns: IntArray) -> Array:
            changed = self.change.apply(scores[which], whole, rows, np.maximum(columns, 0), xp)
            return xp.where(xp.asarray(columns >= 0), changed, scores[which])

        return self.places.gather(frame, q_idx, kv_idx, xp, ask)

    def check(self, frame: Frame) -> None:
        self.change.check(self.places.whole(frame))

    def __repr__(self) -> str:
        return f"{self.change} by position"


class PlacedAdded(PlacedChange):
    """One that adds and does no more."""

    def added(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any) -> Array:
        def ask(which: Any, whole: Frame, rows: IntArray, columns: IntArray) -> Array:
            added = self.change.added(whole, rows, np.maximum(columns, 0), xp, dtype)
            return xp.where(xp.asarray(columns >= 0), added, 0.0)

        return self.places.gather(frame, q_idx, kv_idx, xp, ask)
