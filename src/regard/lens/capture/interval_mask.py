"""What models do to scores that the public masks and score modifications have no name for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.frame import Frame
from regard.masks import Mask
from regard.masks.base import BlockKinds
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace


@dataclass(frozen=True, eq=False)
class Span(Mask):
    """Each query's own run of keys, low ≤ kv_idx < high: arrays that broadcast to (…, heads, q_len).

    >>> Span(np.array([0, 0, 1]), np.array([1, 3, 2])).to_dense(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 1],
           [0, 1, 0]])
    """

    low: IntArray
    high: IntArray
    word: str = "a run of keys each"

    def _edges(self, frame: Frame, rows: IntArray | slice) -> tuple[IntArray, IntArray]:
        low, high = (frame.take_pairs(edge[..., rows], 1, "span") for edge in (self.low, self.high))
        return low, high

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        low, high = (xp.asarray(edge)[:, :, None] for edge in self._edges(frame, q_idx))
        keys = xp.asarray(kv_idx)[None, None, :]
        return (keys >= low) & (keys < high)

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        low, high = (edge.reshape(-1, 1) for edge in self._edges(frame, slice(q_lo, q_hi)))
        may = (np.maximum(kv_lo, low) < np.minimum(kv_hi, high)).any(0)
        return BlockKinds(may, ((kv_lo >= low) & (kv_hi <= high)).all(0))

    @property
    def varies_by_batch(self) -> bool:
        return bool(self.low.size > self.low.shape[-1])

    def __repr__(self) -> str:
        return f"<{self.word}: {int((self.low < self.high).sum())}>"


@dataclass(frozen=True, eq=False)
class Flat(ScoreMod):
    """Scores of 0 in some rows: what is left of them beside finfo.min, which swallows every score added to it."""

    rows: Array  # booleans that broadcast to (…, heads, q_len)

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        flat = xp.asarray(frame.take_pairs(self.rows[..., q_idx], 1, "flat"))
        return xp.where(flat[:, :, None], xp.zeros((), dtype=scores.dtype), scores)

    def to_payload(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return {"kind": "flat", "rows": frame.take_pairs(self.rows[..., q_idx], 1, "flat")}

    def __repr__(self) -> str:
        return f"<{int(self.rows.sum())} rows without a live key weigh all alike>"
