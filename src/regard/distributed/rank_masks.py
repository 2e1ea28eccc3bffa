"""Masks and score modifications of one rank, in its own rows and columns, as those of the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.frame import Frame
from regard.masks import Mask
from regard.masks.base import BlockKinds
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace


@dataclass(frozen=True, eq=False)
class RankNumbering:
    """How a rank numbers the tokens that its layer computed with.

    Attributes:
        rows: Position in the whole sequence of each of its rows, ascending: (rows,).
        columns: Its column for each position of the whole sequence, −1 if it has none: (kv_len,). Positions that
            adjoin within the tokens of one rank have columns that adjoin.
        num_columns: Number of its columns.
    """

    rows: IntArray
    columns: IntArray
    num_columns: int

    def view(self, frame: Frame) -> Frame:
        """Return the frame of the rank's own rows and columns."""
        return Frame(frame.leading_shape, len(self.rows), self.num_columns, frame.selection)

    def find_rows(self, q_idx: IntArray) -> IntArray:
        """Return the rows of positions that the rank holds."""
        return np.searchsorted(self.rows, q_idx)


@dataclass(frozen=True, eq=False)
class RankMask(Mask):
    """The mask of one rank's rows; it says nothing about other rows.

    Attributes:
        mask: Mask in the rank's rows and columns; None allows all columns.
        numbering: Rows and columns of the rank.
    """

    mask: Mask | None
    numbering: RankNumbering

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        columns = self.numbering.columns[kv_idx]
        known = xp.asarray(columns >= 0)[None, None, :]
        if self.mask is None:
            return xp.broadcast_to(known, (1, len(q_idx), len(kv_idx)))
        rows = self.numbering.find_rows(q_idx)
        allowed = self.mask.allows(self.numbering.view(frame), rows, np.maximum(columns, 0), xp)
        return allowed & known

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        columns = self.numbering.columns
        first, last = columns[kv_lo], columns[kv_hi - 1]
        # Blocks of the tokens of one rank; others are called partial.
        adjoins = (first >= 0) & (last - first == kv_hi - 1 - kv_lo)
        missing = (first < 0) & (last < 0) & (kv_hi - kv_lo == 1)
        if not adjoins.all():
            absent = np.array([(columns[a:b] < 0).all() for a, b in zip(kv_lo, kv_hi, strict=True)])
            return BlockKinds(~(missing | absent), np.zeros(len(kv_lo), bool))
        if self.mask is None:
            return BlockKinds(np.ones(len(kv_lo), bool), np.ones(len(kv_lo), bool))
        rows = self.numbering.find_rows(np.array([q_lo, q_hi]))
        return self.mask.classify_blocks(
            self.numbering.view(frame), int(rows[0]), int(rows[1]), first, last + 1
        )

    @property
    def varies_by_batch(self) -> bool:
        return self.mask is not None and self.mask.varies_by_batch

    def check(self, frame: Frame) -> None:
        if self.mask is not None:
            self.mask.check(self.numbering.view(frame))

    def __repr__(self) -> str:
        return f"{self.mask} of {len(self.numbering.rows)} rows"


@dataclass(frozen=True, eq=False)
class RankScoreMod(ScoreMod):
    """A score modification of one rank's rows.

    Attributes:
        mod: Modification in the rank's rows and columns.
        numbering: Rows and columns of the rank.
    """

    mod: ScoreMod
    numbering: RankNumbering

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        rows, columns = self.numbering.find_rows(q_idx), np.maximum(self.numbering.columns[kv_idx], 0)
        return self.mod.apply(scores, self.numbering.view(frame), rows, columns, xp)

    def check(self, frame: Frame) -> None:
        self.mod.check(self.numbering.view(frame))

    def __repr__(self) -> str:
        return repr(self.mod)
