"""The largest weights, contributions and scores, and where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple

from regard.accumulators import Accumulator, RowMaxScore, RowTopK
from regard.engines import Engine, find_engine
from regard.errors import ArgumentError
from regard.measures.base import Measure, as_slice, copy_with
from regard.measures.sums import check_axis
from regard.problem import Problem
from regard.tiling import tile_sizes
from regard.types import Array, ArrayT, Namespace
from regard.validation import check_count

# k up to which a compiled pass collects the largest weights: it keeps twice as many for each of 64 rows.
MAX_COLLECTED = 4096


class TopKResult(NamedTuple, Generic[ArrayT]):
    """The largest weights and their indices: (…, q_len, k) for `TopK`, without the last axis for `MaxWeight`.

    Attributes:
        values: The weights.
        indices: The key index of each weight; for `MaxWeight(-2)`, the query index.

    >>> import regard
    >>> from regard.learn import cat
    >>> values, keys = regard.attention(cat.Q, cat.K).topk(2)
    >>> keys[0]
    array([1, 4])
    """

    values: ArrayT
    indices: ArrayT


@dataclass(frozen=True, repr=False)
class MaxWeight(Measure):
    """The largest weight of each row or column and its index; ties go to the lowest index.

    The result is a `TopKResult` of arrays of shape (…, q_len) or (…, kv_len).

    Args:
        axis: −1 for the largest weight of each row, −2 for the largest weight of each column.

    Raises:
        ArgumentError: If `axis` is neither −1 nor −2.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.eye(2), np.eye(2))
    >>> A.measure(regard.MaxWeight()).max_weight.indices
    array([0, 1])
    """

    axis: int = -1
    reads_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_axis(self.axis, "max_weight")

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return RowTopK(1) if self.axis == -1 and problem.shape[2] else None

    def restore_state(self, accumulated: Any) -> TopKResult:
        return TopKResult(*(array[..., 0] for array in accumulated))

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> TopKResult:
        kept = (shape[0], shape[2 if self.axis == -2 else 1])
        return TopKResult(xp.zeros(kept, dtype=xp.float64), xp.zeros(kept, dtype=xp.int64))

    def step(
        self, state: TopKResult, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> TopKResult:
        kept, searched = (kv_idx, q_idx) if self.axis == -2 else (q_idx, kv_idx)
        tile = TopKResult(xp.max(weights, axis=self.axis), searched[xp.argmax(weights, axis=self.axis)])
        own = as_slice(kept)
        merged = self.merge(TopKResult(state.values[:, own], state.indices[:, own]), tile)
        state.values[:, own], state.indices[:, own] = merged
        return state

    def merge(self, a: TopKResult, b: TopKResult) -> TopKResult:
        a_nan, b_nan = a.values != a.values, b.values != b.values
        # Zeros have index 0 from the start, as in the dense matrix, where masked keys are zeros too.
        tied = ((a.values == b.values) & (b.values > 0)) | (a_nan & b_nan)
        take_b = ((b.values > a.values) & ~a_nan) | (b_nan & ~a_nan) | (tied & (b.indices < a.indices))
        where = find_engine("measure", values=a.values).xp.where
        return TopKResult(*(where(take_b, y, x) for x, y in zip(a, b, strict=True)))


@dataclass(frozen=True, repr=False)
class MaxScore(Measure):
    """The largest score of each row, before the softmax: shape (…, q_len); −inf for a row without live keys.

    Scores that grow without bound are an early sign of unstable training. The score of a sink does not count.

    >>> import numpy as np, regard
    >>> A = regard.attention(2 * np.eye(2), np.eye(2), scale=1.0)
    >>> A.measure(regard.MaxScore()).max_score
    array([2., 2.])
    """

    reads_scores: ClassVar[bool] = True

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return RowMaxScore()

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Array:
        return xp.full(shape[:2], -xp.inf)

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        rows = as_slice(q_idx)
        state[:, rows] = xp.maximum(state[:, rows], xp.astype(xp.max(scores, axis=-1), state.dtype))
        return state

    def merge(self, a: Array, b: Array) -> Array:
        return find_engine("measure", a=a).xp.maximum(a, b)


class PendingTile(NamedTuple):
    """A tile whose weights are in the buffer and not yet searched."""

    rows: slice
    kv_idx: Array


class TopKState(NamedTuple):
    """The state of `TopK`: the result of the searched tiles, the pending tiles, and a buffer for their weights."""

    top: TopKResult
    pending: list[PendingTile]
    buffers: list[Array]


@dataclass(frozen=True, repr=False)
class TopK(Measure):
    """The k largest weights of each row and their keys, largest first; ties go to the lowest index.

    The result is a `TopKResult` of arrays of shape (…, q_len, k).

    Args:
        k: Number of weights, at most kv_len.

    Raises:
        ArgumentError: If `k` is not a positive integer.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.array([[1.0, 0]]), np.array([[0.0, 0], [9, 0], [5, 0]]))
    >>> A.measure(regard.TopK(2)).topk.indices
    array([[1, 2]])
    """

    k: int
    _engine: Engine | None = field(default=None, init=False, compare=False)
    _max_pending: int = field(default=0, init=False, compare=False)
    reads_scores: ClassVar[bool] = False
    result_name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        self._check_k(None, "")

    def _check_k(self, most: int | None, of: str) -> None:
        check_count(self.k, 1, most, self.result_name, "k", of, "Ask for at most as many keys as there are.")

    def bind(self, problem: Problem) -> Measure:
        kv_len = problem.shape[2]
        self._check_k(kv_len, f" for kv_len {kv_len}")
        sizes = tile_sizes(on_device=problem.engine.is_asynchronous)
        return copy_with(self, _engine=problem.engine, _max_pending=sizes.topk_columns)

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return RowTopK(self.k) if self.k <= MAX_COLLECTED else None

    def restore_state(self, accumulated: Any) -> TopKState:
        return TopKState(TopKResult(*accumulated), [], [])

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> TopKState:
        kept = (*shape[:2], self.k)
        top = TopKResult(xp.zeros(kept, dtype=xp.float64), xp.zeros(kept, dtype=xp.int64))
        return TopKState(top, [], [])

    def step(
        self, state: TopKState, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> TopKState:
        rows, width = as_slice(q_idx), len(kv_idx)
        # Tiles of the same rows are collected: one search among many columns is cheaper than many searches.
        start = sum(len(tile.kv_idx) for tile in state.pending)
        if state.pending and (state.pending[0].rows != rows or start + width > self._max_pending):
            self._search(state, xp)
            start = 0
        buffers = state.buffers
        if not buffers or buffers[0].shape[1] < len(q_idx) or buffers[0].shape[2] < start + width:
            shape = (len(weights), len(q_idx), max(self._max_pending, width))
            buffers[:] = [xp.empty(shape, dtype=weights.dtype)]
        buffers[0][:, : len(q_idx), start : start + width] = weights
        state.pending.append(PendingTile(rows, kv_idx))
        return state

    def _search(self, state: TopKState, xp: Namespace) -> None:
        """Search the pending tiles and update the result of their rows."""
        assert self._engine is not None
        rows = state.pending[0].rows
        starts = [as_slice(tile.kv_idx).start for tile in state.pending]
        kv_idx = xp.concat([tile.kv_idx for tile in state.pending])
        weights = state.buffers[0][:, : rows.stop - rows.start, : len(kv_idx)]
        state.pending.clear()
        if starts != sorted(starts):
            order = xp.argsort(kv_idx)  # of equal weights the search returns the first
            weights, kv_idx = weights[..., order], kv_idx[order]
        kept = TopKResult(*(array[:, rows] for array in state.top))
        where: Any = ...
        if not self._engine.is_asynchronous and xp.any(kept.values[..., -1] > 0):
            # Most rows of a long matrix have nothing larger here than what was found before.
            peak = xp.max(weights, axis=-1)
            better = (peak > 0) & (peak >= kept.values[..., -1]) | (peak != peak)
            where = better if xp.count_nonzero(better) * 2 < math.prod(better.shape) else ...
        weights = weights[where]
        if len(kv_idx) > self.k:
            weights, columns = self._engine.topk(weights, self.k)
            columns = kv_idx[columns]
        else:
            columns = xp.broadcast_to(kv_idx, weights.shape)
        merged = self._merge_results(
            TopKResult(*(array[where] for array in kept)), TopKResult(weights, columns)
        )
        for array, new in zip(kept, merged, strict=True):
            array[where] = new

    def compact(self, state: TopKState) -> TopKState:
        if state.pending:
            self._search(state, find_engine("compact", values=state.top.values).xp)
        return TopKState(state.top, [], [])

    def merge(self, a: TopKState, b: TopKState) -> TopKState:
        return TopKState(self._merge_results(self.compact(a).top, self.compact(b).top), [], [])

    def _merge_results(self, a: TopKResult, b: TopKResult) -> TopKResult:
        xp = find_engine("measure", values=a.values).xp
        indices = xp.concat([a.indices, b.indices], axis=-1)
        values = xp.concat([xp.astype(x.values, a.values.dtype) for x in (a, b)], axis=-1)
        # By index, then by value: both sorts are stable, so equal weights stay in the order of their keys.
        by_index = xp.argsort(indices, axis=-1, stable=True)
        ranked = xp.take_along_axis(xp.where(values != values, xp.inf, values), by_index, axis=-1)
        by_value = xp.argsort(-ranked, axis=-1, stable=True)
        order = xp.take_along_axis(by_index, by_value, axis=-1)[..., : self.k]
        return TopKResult(*(xp.take_along_axis(array, order, axis=-1) for array in (values, indices)))

    def finish(self, state: TopKState) -> TopKResult:
        """Return the result; zeros, including masked keys, have the lowest indices that are not yet used.

        Args:
            state: State after all tiles.
        """
        xp = find_engine("finish", values=state.top.values).xp
        top = self.compact(state).top
        rows = xp.any(top.values == 0, axis=-1)
        if not xp.any(rows):
            return top
        indices = top.indices[rows]  # (rows with zeros, k)
        is_zero = top.values[rows] == 0
        # Whether each of the k lowest keys has a weight above 0; the last column takes the indices that do not matter.
        taken = xp.zeros((len(indices), self.k + 1), dtype=xp.bool)
        columns = xp.where(is_zero | (indices > self.k), self.k, indices)
        taken[xp.arange(len(indices))[:, None], columns] = True
        free = ~taken[:, : self.k]
        lowest = xp.argsort(xp.astype(~free, xp.int8), axis=-1, stable=True)
        zeros_first = xp.argsort(xp.astype(~is_zero, xp.int8), axis=-1, stable=True)
        rank = xp.argsort(zeros_first, axis=-1)  # of each zero among the zeros of its row
        filled = xp.take_along_axis(lowest, rank, axis=-1)
        top.indices[rows] = xp.where(is_zero, filled, indices)
        return top


@dataclass(frozen=True, eq=False, repr=False)
class Contribution(TopK):
    """The k largest contributions of each row and their keys, largest first.

    Key j contributes ‖w_ij v_j W_O‖ = w_ij ‖v_j W_O‖ to the output of query i (Kobayashi et al., 2004.10102): its
    weight times the norm of its value after the output projection. One pass finds the largest. The result is a
    `TopKResult` of arrays of shape (…, q_len, k).

    Args:
        k: Number of contributions, at most kv_len.
        norms: ‖v_j W_O‖ of each key, not negative: an array that broadcasts to (…, heads, kv_len). For a recorded
            model, `recording.value_norms(name)`.

    Raises:
        ArgumentError: If `k` is not a positive integer, or the shape of the norms does not match the matrix.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> A.measure(regard.measures.Contribution(2, np.array([1.0, 3, 0, 2]))).contribution
    TopKResult(values=array([[0.75, 0.5 ]]), indices=array([[1, 3]]))
    """

    norms: Array = None
    reads_scores: ClassVar[bool] = False
    result_name: ClassVar[str] = "contribution"

    def bind(self, problem: Problem) -> Measure:
        bound = super().bind(problem)
        norms = problem.engine.as_float(self.norms, "contribution", "norms")
        if not norms.ndim or norms.shape[-1] != problem.frame.kv_len:
            raise ArgumentError(
                "contribution",
                received=f"norms of shape {tuple(norms.shape)}",
                expected=f"(…, heads, kv_len {problem.frame.kv_len})",
                hint="Pass the norms of the values, one for each key.",
            )
        norms = problem.frame.take_pairs(norms, 1, "contribution")
        return copy_with(bound, norms=problem.engine.cast(norms, problem.dtype)[:, None, :])

    def step(
        self, state: TopKState, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> TopKState:
        return super().step(state, weights * self.norms[..., as_slice(kv_idx)], scores, q_idx, kv_idx, xp)

    def __repr__(self) -> str:
        return f"Contribution(k={self.k}, norms=<array of shape {tuple(getattr(self.norms, 'shape', ()))}>)"
