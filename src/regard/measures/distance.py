"""Where the weights of a row lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regard.engines import find_engine
from regard.measures.base import Measure, for_all, name_of, span
from regard.types import Align, Array, IntArray

if TYPE_CHECKING:
    from regard.core.problem import Problem


@dataclass(frozen=True)
class Distance(Measure):
    """The mean distance of each row, Σ w · |q_idx − kv_idx|: shape (…, q_len). `align` as in `causal`.

    Averaged over the queries it is the mean distance of Vig & Belinkov (1906.04284).

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Distance()).distance
    array([0. , 0.5, 1. ])
    """

    align: Align | None = None
    positions: IntArray | None = None
    at: Array | None = None
    steps: Array | None = None
    steps_back: Array | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        offset = problem.frame.offset(self.align, name_of(self))
        positions, xp = problem.positions + offset, problem.engine.xp
        at, steps = (xp.asarray(x, dtype=problem.dtype) for x in (positions, np.arange(problem.frame.kv_len)))
        return replace(self, positions=positions, at=at, steps=steps, steps_back=xp.flip(steps))

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.positions is not None and self.at is not None
        assert self.steps is not None and self.steps_back is not None
        rows, columns, width = span(q_idx), span(kv_idx), len(kv_idx)
        first, last = columns.start, columns.stop - 1
        # From a row to the nearest key of the tile, and on from there to each key: nothing cancels.
        if self.positions[rows].min() >= last:
            gap, on = self.at[rows] - last, self.steps_back[-width:]
        elif self.positions[rows].max() <= first:
            gap, on = first - self.at[rows], self.steps[:width]
        else:
            ahead = self.steps[:width] - (self.at[rows] - first)[:, None]
            state[:, rows] += xp.vecdot(weights, xp.abs(ahead))
            return state
        state[:, rows] += gap * xp.sum(weights, axis=-1) + weights @ on
        return state


@dataclass(frozen=True)
class Position(Measure):
    """The mean position of each row, Σ w · kv_idx: shape (…, q_len).

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((1, 2)), np.zeros((5, 2))).measure(Position()).position
    array([2.])
    """

    reads_scores: ClassVar[bool] = False

    def columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        return for_all(np.arange(problem.frame.kv_len), problem)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        state[:, span(q_idx)] += weights @ xp.astype(kv_idx, weights.dtype)
        return state


@dataclass(frozen=True)
class Spread(Distance):
    """How far apart the keys of a row lie: the standard deviation of kv_idx under its weights, (…, q_len).

    Moments are taken relative to the query, in float64: summed over squared positions they would cancel.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Spread()).spread.round(4)
    array([0.    , 0.5   , 0.8165])
    """

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 3))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.positions is not None
        within = xp.astype(kv_idx - kv_idx[0], xp.float64)
        powers = xp.stack([within**0, within, within**2], axis=-1)
        total, first, second = xp.moveaxis(xp.astype(weights, xp.float64) @ powers, -1, 0)
        rows = span(q_idx)
        start = xp.asarray(int(kv_idx[0]) - self.positions[rows], dtype=xp.float64)
        moments = [total, first + start * total, second + 2 * start * first + start**2 * total]
        state[:, rows] += xp.stack(moments, axis=-1)
        return state

    def finish(self, state: Array) -> Array:
        xp = find_engine("finish", state=state).xp
        total, first, second = (state[..., i] for i in range(3))
        safe = xp.where(total == 0, 1.0, total)
        variance = second / safe - (first / safe) ** 2
        # The root has no slope at 0, so it is not taken there.
        spread = xp.sqrt(xp.where(variance <= 0, 1.0, variance))
        return xp.where(variance <= 0, 0.0, spread)
