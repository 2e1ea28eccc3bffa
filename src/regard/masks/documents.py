"""Masks of documents that are packed into one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.errors import ArgumentError
from regard.frame import Frame
from regard.masks.base import BlockKinds, Mask, SplitPoints
from regard.masks.parameters import IntParameter, as_int_parameter, sort_splits
from regard.types import Array, IntArray, Namespace


def document(ids: Array, query_ids: Array | None = None) -> Mask:
    """Return a mask that lets a query attend only to the keys of its own document, for packed sequences.

    Args:
        ids: Document of each key: integers of shape (kv_len,) or (batch, kv_len).
        query_ids: Document of each query: integers of shape (q_len,) or (batch, q_len). The default is `ids`.

    Returns:
        The mask.

    Raises:
        ArgumentError: If the ids are not whole numbers, or a single one.

    >>> from regard import document
    >>> document([0, 0, 1]).to_dense(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    >>> document([0, 0, 1], query_ids=[1, 0]).to_dense(2, 3).astype(int)
    array([[0, 0, 1],
           [1, 1, 0]])
    """
    key_ids = as_int_parameter(ids, "document", None)
    own_ids = key_ids if query_ids is None else as_int_parameter(query_ids, "document", None)
    if key_ids.array.ndim == 0 or own_ids.array.ndim == 0:
        raise ArgumentError(
            "document", received=f"{ids!r}", expected="one id for each token", hint="Pass a list of ids."
        )
    return DocumentMask(key_ids, own_ids)


@dataclass(frozen=True)
class DocumentMask(Mask):
    """Mask that allows each query to attend to the keys of its own document."""

    ids: IntParameter
    query_ids: IntParameter

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        query_ids = frame.per_batch(self.query_ids.array[..., q_idx], 1, "document")
        key_ids = frame.per_batch(self.ids.array[..., kv_idx], 1, "document")
        return xp.asarray(query_ids)[:, :, None] == xp.asarray(key_ids)[:, None, :]

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        rows = frame.per_batch(self.query_ids.array[..., q_lo:q_hi], 1, "document")
        keys = frame.per_batch(self.ids.array[..., kv_lo[0] : kv_hi[-1]], 1, "document")
        q_min, q_max = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        starts = kv_lo - kv_lo[0]
        kv_min, kv_max = np.minimum.reduceat(keys, starts, 1), np.maximum.reduceat(keys, starts, 1)
        nonempty = ((q_min <= kv_max) & (kv_min <= q_max)).any(0)
        return BlockKinds(nonempty, ((q_min == kv_max) & (kv_min == q_max)).all(0))

    def split_points(self, frame: Frame) -> SplitPoints:
        splits = []
        for ids in (self.query_ids, self.ids):
            changes = np.flatnonzero(np.diff(frame.per_batch(ids.array, 1, "document")).any(0)) + 1
            if len(changes) > ids.array.shape[-1] // 8:  # documents too short, or not contiguous
                return super().split_points(frame)
            splits.append(sort_splits(changes, ids.array.shape[-1]))
        return SplitPoints(*splits)

    @property
    def varies_by_batch(self) -> bool:
        return self.ids.array.ndim > 1 or self.query_ids.array.ndim > 1

    def check(self, frame: Frame) -> None:
        lengths = self.query_ids.array.shape[-1], self.ids.array.shape[-1]
        if lengths != (frame.q_len, frame.kv_len):
            raise ArgumentError(
                "document",
                received=f"{lengths[0]} query ids and {lengths[1]} key ids",
                expected=f"{frame.q_len} (q_len) and {frame.kv_len} (kv_len)",
                hint="Pass one id for each key. If the queries are different tokens, pass query_ids too.",
            )
        frame.per_batch(self.ids.array[..., :1], 1, "document")
        frame.per_batch(self.query_ids.array[..., :1], 1, "document")

    def __repr__(self) -> str:
        if self.ids == self.query_ids:
            return f"document({self.ids})"
        return f"document({self.ids}, query_ids={self.query_ids})"
