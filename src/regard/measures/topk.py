"""The largest weights and where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from regard.engines import Engine, find_engine
from regard.measures.base import Measure, span
from regard.tiling import tile_sizes
from regard.types import Array
from regard.validation import check_count

if TYPE_CHECKING:
    from regard.core.problem import Problem


class Top(NamedTuple):
    """The largest weights and where they are; both (…, q_len, k) for `TopK`, without the last axis for `MaxWeight`.

    >>> import regard
    >>> from regard.learn import cat
    >>> values, keys = regard.attention(cat.Q, cat.K).topk(2)
    >>> keys[0]
    array([1, 4])
    """

    values: Array
    indices: Array


@dataclass(frozen=True)
class MaxWeight(Measure):
    """The largest weight of each row (axis −1) or column (axis −2) and its index, the lowest where several tie.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.eye(2), np.eye(2))
    >>> A.measure(MaxWeight()).max_weight.indices
    array([0, 1])
    """

    axis: int = -1
    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Any) -> Top:
        kept = (shape[0], shape[2 if self.axis == -2 else 1])
        return Top(xp.zeros(kept), xp.zeros(kept, dtype=xp.int64))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        kept, searched = (kv_idx, q_idx) if self.axis == -2 else (q_idx, kv_idx)
        here = Top(xp.max(weights, axis=self.axis), searched[xp.argmax(weights, axis=self.axis)])
        better = self.merge(Top(state.values[:, kept], state.indices[:, kept]), here)
        state.values[:, kept], state.indices[:, kept] = better
        return state

    def merge(self, a: Top, b: Top) -> Top:
        a_nan, b_nan = a.values != a.values, b.values != b.values
        # Zeros carry index 0 from the start, as in the dense matrix, where hidden keys are zeros too.
        tie = ((a.values == b.values) & (b.values > 0)) | (a_nan & b_nan)
        take = ((b.values > a.values) & ~a_nan) | (b_nan & ~a_nan) | (tie & (b.indices < a.indices))
        where = find_engine("merge", values=a.values).xp.where
        return Top(*(where(take, y, x) for x, y in zip(a, b, strict=True)))


class Waiting(NamedTuple):
    """A tile that has not been searched yet."""

    rows: slice
    kv_idx: Array


class Found(NamedTuple):
    """The state of `TopK`: the largest of what was searched, the tiles that were not, and room for their weights."""

    top: Top
    waiting: list[Waiting]
    room: list[Array]


@dataclass(frozen=True)
class TopK(Measure):
    """The k largest weights of each row and their keys, largest first, ties to the lowest index.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.array([[1.0, 0]]), np.array([[0.0, 0], [9, 0], [5, 0]]))
    >>> A.measure(TopK(2)).top_k.indices
    array([[1, 2]])
    """

    k: int
    engine: Engine | None = None
    most: int = 0
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        kv_len = problem.shape[2]
        check_count(
            self.k,
            1,
            kv_len,
            "topk",
            "k",
            f" for kv_len {kv_len}",
            "Ask for at most as many keys as there are.",
        )
        return replace(self, engine=problem.engine, most=tile_sizes().topk_columns)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Found:
        kept = (*shape[:2], self.k)
        return Found(Top(xp.zeros(kept), xp.zeros(kept, dtype=xp.int64)), [], [])

    def step(self, state: Found, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Found:
        rows, width = span(q_idx), len(kv_idx)
        # Tiles of the same rows wait for each other: one search among many columns is cheaper than many searches.
        start = sum(len(tile.kv_idx) for tile in state.waiting)
        if state.waiting and (state.waiting[0].rows != rows or start + width > self.most):
            self._search(state, xp)
            start = 0
        if not state.room or state.room[0].shape[1] < len(q_idx) or state.room[0].shape[2] < start + width:
            room = xp.empty((len(weights), len(q_idx), max(self.most, width)), dtype=weights.dtype)
            state.room[:] = [room]
        state.room[0][:, : len(q_idx), start : start + width] = weights
        state.waiting.append(Waiting(rows, kv_idx))
        return state

    def _search(self, state: Found, xp: Any) -> None:
        """Bring what is waiting into what was found."""
        assert self.engine is not None
        rows = state.waiting[0].rows
        kv_idx = xp.concat([tile.kv_idx for tile in state.waiting])
        weights = state.room[0][:, : rows.stop - rows.start, : len(kv_idx)]
        state.waiting.clear()
        if xp.any(kv_idx[1:] < kv_idx[:-1]):
            order = xp.argsort(kv_idx)  # of equal weights the first is found
            weights, kv_idx = weights[..., order], kv_idx[order]
        kept = tuple(each[:, rows] for each in state.top)
        where: Any = ...
        if xp.any(kept[0][..., -1] > 0):
            # Most rows of a long matrix hold nothing larger here than what was found before.
            peak = xp.max(weights, axis=-1)
            better = (peak > 0) & (peak >= kept[0][..., -1]) | (peak != peak)
            where = better if xp.count_nonzero(better) * 2 < math.prod(better.shape) else ...
        weights = weights[where]
        if len(kv_idx) > self.k:
            weights, columns = self.engine.topk(weights, self.k)
            columns = kv_idx[columns]
        else:
            columns = xp.broadcast_to(kv_idx, weights.shape)
        found = self._together(Top(*(each[where] for each in kept)), Top(weights, columns))
        for each, new in zip(kept, found, strict=True):
            each[where] = new

    def merge(self, a: Found, b: Found) -> Found:
        for state in (a, b):
            if state.waiting:
                self._search(state, find_engine("merge", values=state.top.values).xp)
        return Found(self._together(a.top, b.top), [], [])

    def _together(self, a: Top, b: Top) -> Top:
        xp = find_engine("merge", values=a.values).xp
        indices = xp.concat([a.indices, b.indices], axis=-1)
        values = xp.concat([xp.astype(x.values, a.values.dtype) for x in (a, b)], axis=-1)
        # By index, then by value: both sorts are stable, so equal weights stay in the order of their keys.
        by_index = xp.argsort(indices, axis=-1, stable=True)
        ranked = xp.take_along_axis(xp.where(values != values, xp.inf, values), by_index, axis=-1)
        order = xp.take_along_axis(by_index, xp.argsort(-ranked, axis=-1, stable=True), axis=-1)[
            ..., : self.k
        ]
        return Top(xp.take_along_axis(values, order, axis=-1), xp.take_along_axis(indices, order, axis=-1))

    def finish(self, state: Found) -> Top:
        """Zeros, hidden keys among them, tie: they get the lowest indices that no larger weight has."""
        xp = find_engine("finish", values=state.top.values).xp
        if state.waiting:
            self._search(state, xp)
        top = state.top
        rows = xp.any(top.values == 0, axis=-1)
        if not xp.any(rows):
            return top
        indices = top.indices[rows]  # (rows with zeros, k)
        missing = top.values[rows] == 0
        candidate = xp.arange(self.k)[:, None]
        free = ~xp.any((indices[..., None, :] == candidate) & ~missing[..., None, :], axis=-1)
        lowest = xp.argsort(xp.astype(~free, xp.int8), axis=-1, stable=True)
        rank = xp.astype(xp.cumulative_sum(xp.astype(missing, xp.int64), axis=-1), xp.int64) - 1
        filled = xp.take_along_axis(lowest, xp.where(rank < 0, 0, rank), axis=-1)
        top.indices[rows] = xp.where(missing, filled, indices)
        return top
