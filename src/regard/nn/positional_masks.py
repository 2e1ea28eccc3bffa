"""Masks and score modifications of a whole sequence, evaluated for a part of it by token position.

A cache holds some tokens of a sequence, and a call adds the next ones. A mask or score modification of the sequence
(`causal()`, `alibi()`, a window) must hold for that part, so it is evaluated at the positions of its rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from regard.frame import Frame
from regard.masks import Mask
from regard.masks.base import CombinedMask
from regard.masks.kinds import KeyRangeMask, WindowMask
from regard.score_mods import AlibiMod, RelativeBiasMod, ScoreMod, SoftcapMod
from regard.types import Array, IntArray, Namespace

# Positions of columns that stand for no token of the sequence.
NEVER_VISIBLE, ALWAYS_VISIBLE = -1, -2


@dataclass(frozen=True, eq=False)
class TokenPositions:
    """Positions in the whole sequence of the rows and columns of a part.

    Args:
        query_positions: The position of each row, (batch or 1, q_len).
        key_subset: The position of each column, (batch or 1, kv_len); None if all keys are present, in order.
        full_shape: (q_len, kv_len) of the whole sequence.
    """

    query_positions: IntArray
    key_subset: IntArray | None
    full_shape: tuple[int, int]

    @cached_property
    def key_positions(self) -> IntArray:
        """The position of each column, (batch or 1, kv_len)."""
        return np.arange(self.full_shape[1])[None] if self.key_subset is None else self.key_subset

    def append_visible_key(self) -> TokenPositions:
        """Return the positions with one more column at the end, visible to every query."""
        padded = np.pad(self.key_positions, ((0, 0), (0, 1)), constant_values=ALWAYS_VISIBLE)
        return replace(self, key_subset=padded)

    @cached_property
    def is_suffix(self) -> bool:
        """Whether the columns are a whole sequence and the rows are its last tokens."""
        if (
            len(self.query_positions) > 1
            or self.key_subset is not None
            or self.full_shape[0] != self.full_shape[1]
        ):
            return False
        end = self.full_shape[1]
        return bool((self.query_positions[0] == np.arange(end - self.query_positions.shape[1], end)).all())

    def restrict_mask(self, mask: Mask | None) -> Mask | None:
        """Return the mask of the part, from the mask of the whole sequence."""
        if self.is_suffix:
            aligned = None if mask is None else _align_lower_right(mask)
            if aligned is not None or mask is None:
                return aligned
        if mask is None and (self.key_positions != NEVER_VISIBLE).all():
            return None
        return PositionalMask(mask, self)

    def restrict_score_mod(self, score_mod: ScoreMod) -> ScoreMod:
        """Restrict the score modification of the whole sequence to the part."""
        if isinstance(score_mod, SoftcapMod):
            return score_mod
        if self.is_suffix and isinstance(score_mod, AlibiMod | RelativeBiasMod):
            return replace(score_mod, align="lower_right")
        # A fused kernel recognises an additive score modification by its class.
        is_additive = type(score_mod).additive_bias is not ScoreMod.additive_bias
        return (PositionalBias if is_additive else PositionalScoreMod)(score_mod, self)

    def full_frame(self, frame: Frame) -> Frame:
        """Return the frame of the whole sequence, from the frame of the part."""
        return Frame(frame.leading_shape, *self.full_shape, frame.selection)

    def iter_entries(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray
    ) -> Iterator[tuple[Any, Frame, IntArray, IntArray]]:
        """Group the (batch, head) pairs of a frame by batch entry; rows and columns are those of the part.

        Yields indices of pairs with the same positions (`slice(None)` for all), their frame in the whole sequence, and
        the positions of their rows and columns.
        """
        full = self.full_frame(frame)
        if len(self.query_positions) == len(self.key_positions) == 1:
            yield slice(None), full, self.query_positions[0, q_idx], self.key_positions[0, kv_idx]
            return
        batch = max(len(self.query_positions), len(self.key_positions))
        entry_of_pair = frame.selected // (frame.leading_shape[-1] if len(frame.leading_shape) > 1 else 1)
        for entry in range(batch):
            pairs = np.flatnonzero(entry_of_pair == entry)
            if len(pairs):
                rows, columns = (
                    x[min(entry, len(x) - 1)] for x in (self.query_positions, self.key_positions)
                )
                yield pairs, full.select(pairs), rows[q_idx], columns[kv_idx]

    def gather(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, evaluate: Callable[..., Array]
    ) -> Array:
        """Evaluate a function of what `iter_entries` yields, and join the results: (pairs or 1, rows, columns)."""
        found = []
        for pairs, full, rows, columns in self.iter_entries(frame, q_idx, kv_idx):
            values = evaluate(pairs, full, rows, columns)
            if isinstance(pairs, slice):
                return values
            found.append(xp.broadcast_to(values, (len(pairs), len(q_idx), len(kv_idx))))
        return xp.concat(found) if found else xp.empty((0, len(q_idx), len(kv_idx)))


def _align_lower_right(mask: Mask) -> Mask | None:
    """Return the mask of the last rows without positions; None if one of its atoms does not support that."""
    if isinstance(mask, WindowMask):
        return replace(mask, align="lower_right")
    if isinstance(mask, KeyRangeMask):
        return mask
    if isinstance(mask, CombinedMask):
        parts = [_align_lower_right(part) for part in mask.parts]
        return None if None in parts else type(mask)(tuple(part for part in parts if part is not None))
    return None


@dataclass(frozen=True, eq=False)
class PositionalMask(Mask):
    """A mask of a sequence, evaluated for a part of it."""

    mask: Mask | None
    positions: TokenPositions

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        def evaluate(pairs: Any, full: Frame, rows: IntArray, columns: IntArray) -> Array:
            visible = xp.asarray(columns >= 0)[None, None, :]
            if self.mask is not None:
                visible = visible & self.mask.allows(full, rows, np.maximum(columns, 0), xp)
            visible = visible | xp.asarray(columns == ALWAYS_VISIBLE)[None, None, :]
            return xp.broadcast_to(visible, (visible.shape[0], len(rows), len(columns)))

        return self.positions.gather(frame, q_idx, kv_idx, xp, evaluate)

    def check(self, frame: Frame) -> None:
        if self.mask is not None:
            self.mask.check(self.positions.full_frame(frame))

    def __repr__(self) -> str:
        return f"{'every key' if self.mask is None else self.mask} by position"


@dataclass(frozen=True, eq=False)
class PositionalScoreMod(ScoreMod):
    """A score modification of a sequence, evaluated for a part of it."""

    score_mod: ScoreMod
    positions: TokenPositions

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        def evaluate(pairs: Any, full: Frame, rows: IntArray, columns: IntArray) -> Array:
            changed = self.score_mod.apply(scores[pairs], full, rows, np.maximum(columns, 0), xp)
            return xp.where(xp.asarray(columns >= 0), changed, scores[pairs])

        return self.positions.gather(frame, q_idx, kv_idx, xp, evaluate)

    def check(self, frame: Frame) -> None:
        self.score_mod.check(self.positions.full_frame(frame))

    def __repr__(self) -> str:
        return f"{self.score_mod} by position"


class PositionalBias(PositionalScoreMod):
    """A positional score modification that only adds to the scores."""

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array:
        def evaluate(pairs: Any, full: Frame, rows: IntArray, columns: IntArray) -> Array:
            added = self.score_mod.additive_bias(full, rows, np.maximum(columns, 0), xp, dtype)
            return xp.where(xp.asarray(columns >= 0), added, 0.0)

        return self.positions.gather(frame, q_idx, kv_idx, xp, evaluate)
