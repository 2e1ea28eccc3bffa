"""Measures of the kinds of head that have names: the weight at one key of each row, near it, and where tokens match."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from regard._stream import Problem
from regard._types import Align, Array, IntArray
from regard.measures import Distance, Measure, span


@dataclass(frozen=True, eq=False)
class At(Measure):
    """The weight that each row puts on one key of its own: (…, q_len). `keys` (…, q_len) has −1 for none, which is 0.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(At(np.array([-1, 0, 1]))).at.round(4)
    array([0.    , 0.5   , 0.3333])
    """

    keys: IntArray
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        return replace(self, keys=problem.frame.pick(self.keys, 1, "at"))

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        rows, columns = span(q_idx), span(kv_idx)
        keys = self.keys[:, rows]
        inside = (keys >= columns.start) & (keys < columns.stop)
        if inside.any():
            local = xp.asarray(np.where(inside, keys - columns.start, 0))
            local = xp.broadcast_to(local, weights.shape[:2])
            found = xp.take_along_axis(weights, local[..., None], axis=-1)[..., 0]
            state[:, rows] += xp.where(xp.asarray(inside), found, 0.0)
        return state


@dataclass(frozen=True)
class Away(Distance):
    """The mean distance of each row from its own key, Σ w · |place − kv_idx|: (…, q_len). Row 0 stands at key `first`.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((1, 2)), np.zeros((5, 2))).measure(Away(first=4)).away
    array([2.])
    """

    align: Align | None = "upper_left"
    first: int = 0

    def bind(self, problem: Problem) -> Measure:
        return super().bind(replace(problem, positions=problem.positions + self.first))


@dataclass(frozen=True)
class Between(Measure):
    """The share of each row on keys from `least` to `most` after its own, which is negative before it: (…, q_len).

    Row 0 stands at key `first`; a bound left out is none.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Between(-1, 1)).between.round(4)
    array([1.    , 1.    , 0.6667])
    """

    least: float = -math.inf
    most: float = math.inf
    first: int = 0
    alike: dict[Any, Array] | None = None  # tiles along a diagonal share what lies between in them
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        return replace(self, alike={})

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.alike is not None
        rows, columns = span(q_idx), span(kv_idx)
        low = columns.start - (self.first + rows.stop - 1)
        high = columns.stop - 1 - (self.first + rows.start)
        if high < self.least or low > self.most:
            return state
        if low >= self.least and high <= self.most:
            state[:, rows] += xp.sum(weights, axis=-1)
            return state
        tile = (low, high, len(q_idx))
        if tile not in self.alike:
            after = kv_idx[None, :] - (q_idx + self.first)[:, None]
            self.alike[tile] = xp.astype((after >= self.least) & (after <= self.most), weights.dtype)[None]
        state[:, rows] += xp.vecdot(weights, self.alike[tile])
        return state


@dataclass(frozen=True, eq=False)
class Copies(Measure):
    """The share of each row on earlier copies of its token, and on what came after them: (…, q_len, 2).

    `of_query` (…, q_len) and `of_key` (…, kv_len) are the tokens as numbers; row 0 stands at key `first`. A copy lies
    before the row, what came after it there or before.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Copies(np.array([7, 8, 7]), np.array([7, 8, 7]))).copies[2].round(4)
    array([0.3333, 0.3333])
    """

    of_query: IntArray
    of_key: IntArray
    first: int = 0
    sorted: IntArray | None = None  # the keys by token, then by position, as one number each
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        ids = [problem.frame.pick(each, 1, "copies") for each in (self.of_query, self.of_key)]
        if all((each == each[:1]).all() for each in ids):
            ids = [each[:1] for each in ids]  # heads of one batch entry have the same tokens
        most = max(map(len, ids))
        of_query, of_key = (np.broadcast_to(each, (most, each.shape[1])) for each in ids)
        length = of_key.shape[1]
        found = np.sort(of_key * length + np.arange(length), -1)
        return replace(self, of_query=of_query * length, of_key=of_key, sorted=found)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 2))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.sorted is not None
        rows, columns = span(q_idx), span(kv_idx)
        place = np.arange(rows.start, rows.stop) + self.first
        if columns.start > place[-1]:
            return state
        for one, (own, keys) in enumerate(zip(self.of_query, self.sorted, strict=True)):
            pairs = slice(None) if len(self.of_query) == 1 else slice(one, one + 1)
            for kind in (0, 1):  # the copy itself, and the key after it
                ends = own[rows] + np.minimum(columns.stop - kind, place)
                start = own[rows] + max(columns.start - kind, 0)
                low, high = np.searchsorted(keys, start), np.searchsorted(keys, ends)
                count = np.maximum(high - low, 0)
                if not count.any():
                    continue
                row = np.repeat(np.arange(len(count)), count)
                before = np.cumsum(count) - count
                copy = keys[low[row] + np.arange(len(row)) - before[row]] - own[rows][row]
                taken = weights[pairs][:, xp.asarray(row), xp.asarray(copy + kind - columns.start)]
                sums = xp.cumulative_sum(xp.astype(taken, xp.float64), axis=-1, include_initial=True)
                state[pairs, rows, kind] += sums[:, xp.asarray(before + count)] - sums[:, xp.asarray(before)]
        return state


@dataclass(frozen=True, eq=False)
class Collected(Measure):
    """What each key received from some rows: (…, kv_len). `rows` (…, q_len) is how much each row counts.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((2, 2)))
    >>> A.measure(Collected(np.array([1, 1, 0]))).collected
    array([1., 1.])
    """

    rows: Array
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows = problem.frame.pick(self.rows, 1, "collected")
        return replace(self, rows=problem.engine.xp.asarray(rows, dtype=problem.dtype)[:, None, :])

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], shape[2]))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        state[:, span(kv_idx)] += (self.rows[..., span(q_idx)] @ weights)[:, 0]
        return state
