"""Measures of where the weights of a row are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from regard.accumulators import Accumulator
from regard.engines import find_engine
from regard.measures.base import Measure, RowMean, as_slice, copy_with, get_result_name, share_columns
from regard.problem import Problem
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import check_align


@dataclass(frozen=True, repr=False)
class Distance(RowMean):
    """The mean distance of each row to its keys, Σ w · |q_idx − kv_idx| / Σ w: shape (…, q_len).

    Averaged over the queries it is the mean distance of Vig & Belinkov (1906.04284). A sink has no position and does
    not count; multiplied by `A.sum(axis=-1)`, the result is Σ w · |q_idx − kv_idx|.

    Args:
        align: Which query is at which key if the lengths differ, as in `causal`.

    Raises:
        ArgumentError: If `align` is unknown.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(regard.Distance()).distance
    array([0. , 0.5, 1. ])
    """

    align: Align | None = None
    # Set by `bind`: positions of the rows among the keys, also as an array of the engine; 0, 1, 2, … and reversed.
    _positions: IntArray | None = field(default=None, init=False, compare=False)
    _row_positions: Array = field(default=None, init=False, compare=False)
    _steps: Array = field(default=None, init=False, compare=False)
    _reversed_steps: Array = field(default=None, init=False, compare=False)
    reads_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_align(self.align, get_result_name(self))

    def bind(self, problem: Problem) -> Measure:
        offset = problem.frame.offset(self.align, get_result_name(self))
        positions, xp = problem.positions + offset, problem.engine.xp
        row_positions, steps = (
            xp.asarray(x, dtype=problem.dtype) for x in (positions, np.arange(problem.frame.kv_len))
        )
        return copy_with(
            super().bind(problem),
            _positions=positions,
            _row_positions=row_positions,
            _steps=steps,
            _reversed_steps=xp.flip(steps),
        )

    def accumulator(self, problem: Problem) -> Accumulator | tuple[Accumulator, ...] | None:
        from regard.accumulators import RowSum

        offset = problem.frame.offset(self.align, get_result_name(self))
        return self._describe_state(problem, RowSum("distance", offset=offset))

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        assert self._positions is not None
        rows, columns, width = as_slice(q_idx), as_slice(kv_idx), len(kv_idx)
        first, last = columns.start, columns.stop - 1
        # From a row to the nearest key of the tile, and from there to each key: nothing cancels.
        if self._positions[rows].min() >= last:
            gap, steps = self._row_positions[rows] - last, self._reversed_steps[-width:]
        elif self._positions[rows].max() <= first:
            gap, steps = first - self._row_positions[rows], self._steps[:width]
        else:
            ahead = self._steps[:width] - (self._row_positions[rows] - first)[:, None]
            return self._add(state, q_idx, xp.vecdot(weights, xp.abs(ahead)), weights, xp)
        return self._add(state, q_idx, gap * xp.sum(weights, axis=-1) + weights @ steps, weights, xp)


@dataclass(frozen=True, repr=False)
class Position(RowMean):
    """The mean position of the keys of each row, Σ w · kv_idx / Σ w: shape (…, q_len).

    A sink has no position and does not count; multiplied by `A.sum(axis=-1)`, the result is Σ w · kv_idx.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((1, 2)), np.zeros((5, 2))).measure(regard.Position()).position
    array([2.])
    """

    reads_scores: ClassVar[bool] = False

    def value_columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        positions = np.arange(problem.frame.kv_len)
        return share_columns(
            problem, *((positions, np.ones(len(positions))) if problem.has_sink else (positions,))
        )

    def finish_columns(self, product: Array, lse: Array, problem: Problem) -> Array:
        if not problem.has_sink:
            return product[..., 0]
        return self._normalise(product[..., 0], product[..., 1], self._find_least_sum(problem))

    def accumulator(self, problem: Problem) -> Accumulator | tuple[Accumulator, ...] | None:
        from regard.accumulators import RowSum

        return self._describe_state(problem, RowSum("position"))

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        return self._add(state, q_idx, weights @ xp.astype(kv_idx, weights.dtype), weights, xp)


@dataclass(frozen=True, repr=False)
class Spread(Distance):
    """The standard deviation of kv_idx under the weights of each row, without the sink: shape (…, q_len).

    The state of a row is the sum of its weights, their mean position relative to the query, and the sum of squared
    deviations from that mean. Two states are merged without a difference of large numbers (Chan, Golub & LeVeque,
    1983), so that float32 is enough on devices without float64.

    Args:
        align: Which query is at which key if the lengths differ, as in `causal`.

    Raises:
        ArgumentError: If `align` is unknown.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(regard.Spread()).spread.round(4)
    array([0.    , 0.5   , 0.8165])
    """

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Array:
        return xp.zeros((*shape[:2], 3), dtype=xp.float64)

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        within, weights = (xp.astype(x, xp.float64) for x in (kv_idx - columns.start, weights))
        total = xp.sum(weights, axis=-1)
        mean = weights @ within / self._as_divisor(total, xp)
        deviations = xp.vecdot(weights, (within - mean[..., None]) ** 2)
        start = columns.start - xp.astype(self._row_positions[rows], xp.float64)
        tile = xp.stack([total, mean + start, deviations], axis=-1)
        state[:, rows] = self.merge(state[:, rows], tile)
        return state

    def merge(self, a: Array, b: Array) -> Array:
        xp = find_engine("merge", a=a).xp
        total_a, mean_a, deviations_a = (a[..., i] for i in range(3))
        total_b, mean_b, deviations_b = (b[..., i] for i in range(3))
        total = total_a + total_b
        share = total_b / self._as_divisor(total, xp)
        ahead = mean_b - mean_a
        deviations = deviations_a + deviations_b + ahead**2 * total_a * share
        return xp.stack([total, mean_a + ahead * share, deviations], axis=-1)

    def finish(self, state: Array) -> Array:
        xp = find_engine("finish", state=state).xp
        total, deviations = state[..., 0], state[..., 2]
        variance = deviations / self._as_divisor(total, xp)
        # The square root has no derivative at 0, so it is not taken there.
        spread = xp.sqrt(xp.where(variance <= 0, 1.0, variance))
        return xp.where(variance <= 0, 0.0, spread)

    def _as_divisor(self, total: Array, xp: Namespace) -> Array:
        """Return sums of weights to divide by: 1 instead of one whose square, in the gradient, would be 0."""
        least = max(self._least_sum, float(xp.finfo(total.dtype).tiny) ** 0.5)
        return xp.where(total < least, 1.0, total)
