"""Measures: what can be said of the whole matrix in one streaming pass and O(n) memory.

A measure is about ten lines. This one finds the share of each row that falls on even positions:

>>> import numpy as np, regard
>>> class EvenShare(Measure):
...     def init(self, shape, xp):
...         return xp.zeros(shape[:2])
...     def step(self, state, weights, scores, q_idx, kv_idx, xp):
...         state[:, q_idx] += xp.sum(weights * (kv_idx % 2 == 0), axis=-1)
...         return state
>>> A = regard.attention(np.zeros((4, 2)), np.zeros((4, 2)), mask=regard.causal())
>>> A.measure(EvenShare()).even_share
array([1.        , 0.5       , 0.66666667, 0.5       ])
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from regard._errors import ArgumentError, KindError, kind_of
from regard._stream import Problem
from regard._types import Align, Array, IntArray, check_count
from regard.engines import Engine, engine_of
from regard.masks import Mask

__all__ = [
    "Coarse",
    "Distance",
    "Entropy",
    "Largest",
    "Mass",
    "Measure",
    "Received",
    "Spread",
    "Sum",
    "Top",
    "TopK",
]


class Measure:
    """Base of measures: give it `init` and `step`, and `merge` and `finish` where the ones here do not fit.

    (batch, head) pairs are on one axis: a tile of weights is `(pairs, rows, columns)`, and the arrays that
    `finish` returns begin with the axis of pairs. Weights are final when `step` sees them, so nothing is ever
    rescaled; tiles that the mask leaves empty are not shown.
    """

    # Whether `step` looks at the scores. Where no measure does, it may get None for them, and weights whose memory
    # is used again for the next tile: what is to be kept must be copied.
    reads_scores: ClassVar[bool] = True

    def bind(self, problem: Problem) -> Measure:
        """The measure for one matrix, before the first tile; for those that need more than the tile."""
        return self

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        """The state before any tile, for a matrix of shape (pairs, q_len, kv_len)."""
        raise TypeError(f"{type(self).__name__} must define init(shape, xp)")

    def step(self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        """The state after one more tile; `q_idx` and `kv_idx` are the rows and columns it covers."""
        raise TypeError(f"{type(self).__name__} must define step(state, weights, scores, q_idx, kv_idx, xp)")

    def merge(self, a: Any, b: Any) -> Any:
        """The state of two sets of tiles together: of tiles, ranks or documents alike. Associative up to rounding."""
        return a + b

    def finish(self, state: Any) -> Any:
        """The result from the last state."""
        return state


def span(indices: Array) -> slice:
    """The indices of a tile's rows or columns, which follow each other, as a slice."""
    first = int(indices[0])
    return slice(first, first + len(indices))


def name_of(measure: Any) -> str:
    """The field of `A.measure(…)` that holds a measure's result: its class name in small letters.

    >>> name_of(TopK(8))
    'top_k'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(measure).__name__.lstrip("_")).lower()


@dataclass(frozen=True)
class Entropy(Measure):
    """The entropy of each row in nats, −Σ w ln w: shape (…, q_len); 0 for a row on one key or on none.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((1, 2)), np.zeros((4, 2))).measure(Entropy()).entropy.round(4)
    array([1.3863])
    """

    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Any) -> Array:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        logs = xp.log(xp.clip(weights, float(xp.finfo(weights.dtype).tiny), None))  # 0 · ln tiny is 0
        return self.step_logs(state, weights, logs, q_idx, kv_idx, xp)

    def step_logs(self, state: Any, weights: Array, logs: Array, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        """`step` where the loop has the logarithms of the weights at hand; finite, for a weight of 0 too."""
        state[:, span(q_idx)] -= xp.vecdot(weights, logs)
        return state


@dataclass(frozen=True)
class Sum(Measure):
    """The sum of each row (axis −1: 1, less the sink's share) or each column (axis −2: what the key received).

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((3, 2)), np.zeros((2, 2))).measure(Sum(-2)).sum
    array([1.5, 1.5])
    """

    axis: int = -1
    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Any) -> Array:
        return xp.zeros((shape[0], shape[2 if self.axis == -2 else 1]))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        state[:, span(kv_idx if self.axis == -2 else q_idx)] += xp.sum(weights, axis=self.axis)
        return state


@dataclass(frozen=True)
class Received(Sum):
    """What each key received, summed over the queries: shape (…, kv_len). H2O's heavy hitters are its largest.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((3, 2)), np.zeros((2, 2))).measure(Received()).received
    array([1.5, 1.5])
    """

    axis: int = -2


class Top(NamedTuple):
    """The largest weights and where they are; both (…, q_len, k) for `TopK`, without the last axis for `Largest`."""

    values: Array
    indices: Array


@dataclass(frozen=True)
class Largest(Measure):
    """The largest weight of each row (axis −1) or column (axis −2) and its index, the lowest where several tie.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.eye(2), np.eye(2))
    >>> A.measure(Largest()).largest.indices
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
        where = engine_of("merge", values=a.values).xp.where
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
    reads_scores: ClassVar[bool] = False
    WAITING: ClassVar[int] = 4096

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
        return replace(self, engine=problem.engine)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Found:
        kept = (*shape[:2], self.k)
        return Found(Top(xp.zeros(kept), xp.zeros(kept, dtype=xp.int64)), [], [])

    def step(self, state: Found, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Found:
        rows, width = span(q_idx), len(kv_idx)
        # Tiles of the same rows wait for each other: one search among many columns is cheaper than many searches.
        start = sum(len(tile.kv_idx) for tile in state.waiting)
        if state.waiting and (state.waiting[0].rows != rows or start + width > self.WAITING):
            self._search(state, xp)
            start = 0
        if not state.room or state.room[0].shape[1] < len(q_idx) or state.room[0].shape[2] < start + width:
            room = xp.empty((len(weights), len(q_idx), max(self.WAITING, width)), dtype=weights.dtype)
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
            weights, columns = self.engine.largest(weights, self.k)
            columns = kv_idx[columns]
        else:
            columns = xp.broadcast_to(kv_idx, weights.shape)
        found = self._together(Top(*(each[where] for each in kept)), Top(weights, columns))
        for each, new in zip(kept, found, strict=True):
            each[where] = new

    def merge(self, a: Found, b: Found) -> Found:
        for state in (a, b):
            if state.waiting:
                self._search(state, engine_of("merge", values=state.top.values).xp)
        return Found(self._together(a.top, b.top), [], [])

    def _together(self, a: Top, b: Top) -> Top:
        xp = engine_of("merge", values=a.values).xp
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
        xp = engine_of("finish", values=state.top.values).xp
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
    steps: Array | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        offset = problem.frame.offset(self.align, name_of(self))
        steps = problem.engine.xp.asarray(np.arange(problem.frame.kv_len), dtype=problem.dtype)
        return replace(self, positions=problem.positions + offset, steps=steps)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.positions is not None and self.steps is not None
        rows, columns = span(q_idx), span(kv_idx)
        at, (first, last) = self.positions[rows], (columns.start, columns.stop - 1)
        # From a row to the nearest key of the tile, and on from there to each key: nothing cancels.
        if at.min() >= last:
            gap, on = at - last, xp.flip(self.steps[: len(kv_idx)])
        elif at.max() <= first:
            gap, on = first - at, self.steps[: len(kv_idx)]
        else:
            ahead = self.steps[: len(kv_idx)] - xp.asarray(at - first, dtype=weights.dtype)[:, None]
            state[:, rows] += xp.vecdot(weights, xp.abs(ahead))
            return state
        state[:, rows] += xp.asarray(gap, dtype=weights.dtype) * xp.sum(weights, axis=-1) + weights @ on
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
        xp = engine_of("finish", state=state).xp
        total, first, second = (state[..., i] for i in range(3))
        safe = xp.where(total == 0, 1.0, total)
        variance = second / safe - (first / safe) ** 2
        # The root has no slope at 0, so it is not taken there.
        spread = xp.sqrt(xp.where(variance <= 0, 1.0, variance))
        return xp.where(variance <= 0, 0.0, spread)


@dataclass(frozen=True)
class Mass(Measure):
    """The share of each row that falls on the keys a mask lets through: shape (…, q_len).

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Mass(regard.first(1))).mass
    array([1.        , 0.5       , 0.33333333])
    """

    mask: Mask
    problem: Problem | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        if not isinstance(self.mask, Mask):
            raise KindError(
                "mass",
                received=kind_of(self.mask),
                expected="a mask such as regard.first(1)",
                cure="Wrap it: dense(array) for booleans.",
            )
        self.mask.check(problem.frame)
        return replace(self, problem=problem)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.problem is not None
        to_numpy = self.problem.engine.to_numpy
        positions = self.problem.positions[to_numpy(q_idx)]
        allowed = self.mask.allows(self.problem.frame, positions, to_numpy(kv_idx), xp)
        state[:, span(q_idx)] += xp.sum(xp.where(allowed, weights, 0.0), axis=-1)
        return state


@dataclass(frozen=True)
class Coarse(Measure):
    """The matrix as a picture of `block` × `block` cells, (…, block, block), by their mean, "max" or "sum".

    Entry (i, j) falls into cell (i · block // q_len, j · block // kv_len).

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((4, 2)), np.zeros((4, 2))).measure(Coarse(2)).coarse
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """

    block: int
    reduce: str = "mean"
    problem: Problem | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows, columns = problem.shape[1:]
        of = f" for a matrix of ({rows}, {columns})"
        cells = "block is the number of cells along an edge, at most one for each row and column."
        check_count(self.block, 1, min(rows, columns), "coarsen", "block", of, cells)
        if self.reduce not in ("mean", "max", "sum"):
            raise ArgumentError(
                "coarsen",
                received=f"reduce={self.reduce!r}",
                expected='"mean", "max" or "sum"',
                cure="It says how the weights of one of the cells become one number.",
            )
        return replace(self, problem=problem)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], self.block, self.block))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.problem is not None
        how = "max" if self.reduce == "max" else "sum"
        where = [slice(None)]
        for axis, indices in ((-2, q_idx), (-1, kv_idx)):
            at = span(indices)
            cells, sizes = _cells(at.start, at.stop, self.problem.shape[axis], self.block)
            weights = self.problem.engine.segments(weights, sizes, axis, how)
            where.append(cells)
        part = state[tuple(where)]
        part[...] = xp.maximum(part, xp.astype(weights, part.dtype)) if how == "max" else part + weights
        return state

    def merge(self, a: Array, b: Array) -> Array:
        return engine_of("merge", a=a).xp.maximum(a, b) if self.reduce == "max" else a + b

    def finish(self, state: Array) -> Array:
        if self.reduce != "mean":
            return state
        assert self.problem is not None
        rows, columns = (np.array(_cells(0, n, n, self.block)[1]) for n in self.problem.shape[1:])
        return state / self.problem.engine.xp.asarray(rows[:, None] * columns[None, :])


@lru_cache(maxsize=1024)
def _cells(start: int, stop: int, length: int, block: int) -> tuple[slice, tuple[int, ...]]:
    """The cells that indices start … stop of an axis fall into, of `block` along it, and how many fall into each."""
    cells = range(start * block // length, (stop - 1) * block // length + 1)
    edges = [start, *(-(-cell * length // block) for cell in cells[1:]), stop]
    return slice(cells.start, cells.stop), tuple(np.diff(edges).tolist())
