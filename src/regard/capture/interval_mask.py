"""A mask with one interval of keys per query row, and the scores of rows that a model masks completely."""

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
class IntervalMask(Mask):
    """Let each query attend to its own interval of keys, start ≤ kv_idx < stop.

    Args:
        start: First key of each row; broadcasts to (…, heads, q_len).
        stop: End of each row's interval, exclusive; broadcasts to (…, heads, q_len).
        label: What `repr` calls it.

    >>> IntervalMask(np.array([0, 0, 1]), np.array([1, 3, 2])).to_dense(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 1],
           [0, 1, 0]])
    """

    start: IntArray
    stop: IntArray
    label: str = "one interval of keys per row"

    def _intervals(self, frame: Frame, rows: IntArray | slice) -> tuple[IntArray, IntArray]:
        start, stop = (
            frame.take_pairs(edge[..., rows], 1, "interval mask") for edge in (self.start, self.stop)
        )
        return start, stop

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        start, stop = (xp.asarray(edge)[:, :, None] for edge in self._intervals(frame, q_idx))
        keys = xp.asarray(kv_idx)[None, None, :]
        return (keys >= start) & (keys < stop)

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        start, stop = (edge.reshape(-1, 1) for edge in self._intervals(frame, slice(q_lo, q_hi)))
        may = (np.maximum(kv_lo, start) < np.minimum(kv_hi, stop)).any(0)
        return BlockKinds(may, ((kv_lo >= start) & (kv_hi <= stop)).all(0))

    @property
    def varies_by_batch(self) -> bool:
        return bool(self.start.size > self.start.shape[-1])

    def __repr__(self) -> str:
        return f"<{self.label}: {int((self.start < self.stop).sum())}>"


@dataclass(frozen=True, eq=False)
class UniformRows(ScoreMod):
    """Set the scores of some rows to 0, so that their keys get equal weights.

    Models that mask by adding `torch.finfo(dtype).min` do this to a fully masked row: the sum absorbs every score.

    Args:
        rows: Booleans that broadcast to (…, heads, q_len), True for the rows to set to 0.
    """

    rows: Array

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        rows = xp.asarray(frame.take_pairs(self.rows[..., q_idx], 1, "uniform rows"))
        return xp.where(rows[:, :, None], xp.zeros((), dtype=scores.dtype), scores)

    def to_payload(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return {"kind": "flat", "rows": frame.take_pairs(self.rows[..., q_idx], 1, "uniform rows")}

    def __repr__(self) -> str:
        return f"<{int(self.rows.sum())} fully masked rows with equal weights>"
