"""Sums and means over the weights: of a row, of a column, of a cell, of distances."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from regard.accumulators import Accumulator, CellReduction, ColumnSum, RowMoments, RowSum
from regard.engines import find_engine
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks import Mask
from regard.measures.base import (
    BoundMeasure,
    Measure,
    RowMean,
    as_slice,
    copy_with,
    get_result_name,
    share_columns,
)
from regard.problem import Problem
from regard.types import Align, Array, IntArray, Namespace
from regard.validation import check_align, check_count

# Intervals of keys up to which a compiled pass adds up a share; with more, the mask is evaluated on every tile.
MAX_INTERVALS = 8


@dataclass(frozen=True, repr=False)
class Entropy(RowMean):
    """The entropy of each row in nats, −Σ p ln p: shape (…, q_len); 0 for a row with one live key or none.

    p is the vector of the row's weights. If there is a sink, the weights are divided by their sum.

    Args:
        include_sink: Whether the sink counts as one more key: p then consists of the share of the sink and the
            undivided weights.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((1, 2)), np.zeros((4, 2))).measure(regard.Entropy()).entropy.round(4)
    array([1.3863])
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)), sink=0.0)  # a fifth for each key and the sink
    >>> A.entropy().round(4), A.entropy(include_sink=True).round(4)
    (array([1.3863]), array([1.6094]))
    """

    include_sink: bool = field(default=False, kw_only=True)
    reads_scores: ClassVar[bool] = False

    def accumulator(self, problem: Problem) -> Accumulator | tuple[Accumulator, ...] | None:
        return self._describe_state(problem, RowSum("surprisal"))

    def _normalise(self, total: Array, weight: Array, least_sum: float) -> Array:
        xp = find_engine("finish", total=total).xp
        if self.include_sink:
            share = xp.clip(1.0 - weight, 0.0, None)
            return total - share * xp.log(xp.where(share > 0, share, 1.0))
        total, weight = (xp.where(weight < least_sum, x, y) for x, y in ((0.0, total), (1.0, weight)))
        return xp.clip(total / weight + xp.log(weight), 0.0, None)  # a difference may round to below 0

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        logs = xp.log(xp.clip(weights, _find_tiny(xp, weights.dtype), None))  # 0 · ln tiny is 0
        return self.step_logs(state, weights, logs, q_idx, kv_idx, xp)

    def value_columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        # If scores are only scaled products, the mean score of a row is its query times the mean of its keys.
        return None if problem.score_mods or problem.sink is not None else (problem.key, problem.key_index)

    def finish_columns(self, product: Array, lse: Array, problem: Problem) -> Array:
        engine, xp = problem.engine, problem.engine.xp
        query = engine.take(problem.query, problem.query_index, np.arange(problem.shape[1]), problem.dtype)
        entropy = lse - problem.scale * xp.vecdot(product, query)
        return xp.where(lse == -xp.inf, 0.0, xp.clip(entropy, 0.0, None))  # a difference may round to below 0

    def step_logs(
        self, state: Array, weights: Array, logs: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        """Add one tile to the state, given the logarithms of its weights.

        Args:
            state: State after the previous tiles.
            weights: Weights of the tile: (pairs, r, c).
            logs: Logarithms of the weights, finite even for a weight of 0; overwritten.
            q_idx: Rows of the tile: (r,).
            kv_idx: Columns of the tile: (c,).
            xp: Array API namespace of the engine.

        Returns:
            The state after the tile.
        """
        logs *= weights
        return self._add(state, q_idx, -xp.sum(logs, axis=-1), weights, xp)


@lru_cache(maxsize=16)
def _find_tiny(xp: Namespace, dtype: Any) -> float:
    """Return the smallest normal number of a dtype; asking the namespace takes longer than a small tile."""
    return float(xp.finfo(dtype).tiny)


@dataclass(frozen=True, repr=False)
class Sum(Measure):
    """The sum of each row or of each column.

    Args:
        axis: −1 sums over the keys, shape (…, q_len): 1 minus the share of the sink. −2 sums over the queries, shape
            (…, kv_len): the weight that each key received.

    Raises:
        ArgumentError: If `axis` is neither −1 nor −2.

    >>> import numpy as np, regard
    >>> from regard.measures import Sum
    >>> regard.attention(np.zeros((3, 2)), np.zeros((2, 2))).measure(Sum(-2)).sum
    array([1.5, 1.5])
    """

    axis: int = -1
    reads_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_axis(self.axis, get_result_name(self))

    def value_columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        return None if self.axis == -2 else share_columns(problem, np.ones(problem.frame.kv_len))

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return ColumnSum() if self.axis == -2 else RowSum("one")

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Array:
        return xp.zeros((shape[0], shape[2 if self.axis == -2 else 1]))

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        # NumPy adds rows one after the other, so float32 is not enough; torch adds them in parts.
        dtype = state.dtype if xp is np else None
        total = xp.sum(weights, axis=self.axis, dtype=dtype)
        state[:, as_slice(kv_idx if self.axis == -2 else q_idx)] += total
        return state


def check_axis(axis: object, operation: str) -> None:
    """Raise an `ArgumentError` unless `axis` is −1 or −2."""
    if isinstance(axis, bool) or axis not in (-1, -2):
        raise ArgumentError(
            operation,
            received=f"axis={axis!r}",
            expected="axis=-1 (over the keys) or axis=-2 (over the queries)",
            hint="The batch and head axes are kept; reduce the result over them.",
        )


@dataclass(frozen=True, repr=False)
class Received(Sum):
    """The weight that each key received, summed over the queries: shape (…, kv_len).

    The keys with the largest values are the heavy hitters of H2O. The measure has no arguments: its axis is −2.

    Raises:
        ArgumentError: If another axis is given.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((3, 2)), np.zeros((2, 2))).measure(regard.Received()).received
    array([1.5, 1.5])
    """

    axis: int = -2

    def __post_init__(self) -> None:
        if isinstance(self.axis, bool) or self.axis != -2:
            raise ArgumentError(
                "received",
                received=f"axis={self.axis!r}",
                expected="no argument: a key receives weight from all queries, axis=-2",
                hint="For the sum of each row, use regard.measures.Sum(-1).",
            )


@dataclass(frozen=True, eq=False, repr=False)
class Output(Measure):
    """The product `A @ value`, computed in the same kernel or pass as other measures: (…, q_len, value_dim).

    Args:
        value: (…, kv_heads, kv_len, value_dim) or (kv_len,), as in `A @ value`.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> A.measure(regard.Output(np.array([[1.0], [2], [3], [4]])), regard.Position())
    Measures(output=array([[2.5]]), position=array([1.5]))
    """

    value: Array

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        raise TypeError("Output is computed by A.measure(Output(value), …) only")

    def __repr__(self) -> str:
        return f"Output(<value of shape {tuple(np.shape(self.value))}>)"


@dataclass(frozen=True, repr=False)
class Mass(BoundMeasure):
    """The share of each row's weight on the keys that a mask allows: shape (…, q_len).

    Args:
        mask: Which keys count for each query.

    Raises:
        ArgumentTypeError: If `mask` is not a mask.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(regard.Mass(regard.masks.first(1))).mass
    array([1.        , 0.5       , 0.33333333])
    """

    mask: Mask
    reads_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ArgumentTypeError(
                "mass",
                received=describe_argument(self.mask),
                expected="a mask such as regard.masks.first(1)",
                hint="Wrap booleans, True = attend: regard.masks.dense(array).",
            )

    def bind(self, problem: Problem) -> Measure:
        self.mask.check(problem.frame)
        return super().bind(problem)

    def value_columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        self.mask.check(problem.frame)
        allowed = self._find_keys(problem)
        if allowed is None:
            return None
        index = np.arange(len(allowed)) if len(allowed) > 1 else np.zeros(problem.shape[0], np.int64)
        return problem.engine.xp.astype(allowed[..., None], problem.dtype), index

    def _find_keys(self, problem: Problem) -> Array | None:
        """Return which keys the mask allows, (pairs or 1, kv_len); None if that depends on the query."""
        if not self.mask.is_key_only or 0 in problem.shape:
            return None
        first, kv_idx = np.zeros(1, np.int64), np.arange(problem.frame.kv_len)
        return self.mask.allows(problem.frame, first, kv_idx, problem.engine.xp)[:, 0]

    def accumulator(self, problem: Problem) -> Accumulator | None:
        allowed = self._find_keys(problem)
        if allowed is None:
            return None
        allowed = problem.engine.to_numpy(allowed)
        if not (allowed == allowed[:1]).all():
            return None  # the heads differ
        edges = np.flatnonzero(np.diff(allowed[0], prepend=False, append=False)).reshape(-1, 2)
        if len(edges) > MAX_INTERVALS:
            return None
        return RowSum("one", intervals=tuple((int(start), int(stop)) for start, stop in edges))

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Array:
        return xp.zeros(shape[:2])

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        positions = self.problem.positions[rows]
        kv_range = np.arange(columns.start, columns.stop)
        allowed = self.mask.allows(self.problem.frame, positions, kv_range, xp)
        state[:, rows] += xp.sum(xp.where(allowed, weights, 0.0), axis=-1)
        return state


@dataclass(frozen=True, repr=False)
class Coarse(BoundMeasure):
    """The matrix as a picture of cells, each the maximum, the mean or the sum of its weights.

    With `cells` cells along each edge, entry (i, j) is in cell (i · cells // q_len, j · cells // kv_len).

    Args:
        cells: Number of cells along each edge, or (rows, columns). At most one cell for each row and column.
        reduce: "max", which keeps every large weight visible, "mean" or "sum".

    Raises:
        ArgumentError: If `cells` is not a positive integer, or `reduce` is unknown.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((4, 2)), np.zeros((4, 2))).measure(regard.Coarse(2)).coarse
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """

    cells: int | tuple[int, int]
    reduce: Literal["mean", "max", "sum"] = "max"
    reads_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_cells(None, None, "")
        if self.reduce not in ("mean", "max", "sum"):
            raise ArgumentError(
                "coarsen",
                received=f"reduce={self.reduce!r}",
                expected='"mean", "max" or "sum"',
                hint="reduce combines the weights of a cell; the first argument is the number of cells.",
            )

    def _check_cells(self, max_rows: int | None, max_columns: int | None, of: str) -> None:
        hint = "cells is the number of cells along an edge, at most one for each row and column."
        if isinstance(self.cells, tuple) and len(self.cells) == 2:
            for cells, most, name in zip(
                self.cells, (max_rows, max_columns), ("rows", "columns"), strict=True
            ):
                check_count(cells, 1, most, "coarsen", f"cells of {name}", of, hint)
        else:
            most = None if max_rows is None or max_columns is None else min(max_rows, max_columns)
            check_count(self.cells, 1, most, "coarsen", "cells", of, hint)

    def bind(self, problem: Problem) -> Measure:
        rows, columns = problem.shape[1:]
        self._check_cells(rows, columns, f" for a matrix of ({rows}, {columns})")
        return super().bind(problem)

    @property
    def _grid(self) -> tuple[int, int]:
        """Number of cells along the rows and along the columns."""
        return self.cells if isinstance(self.cells, tuple) else (self.cells, self.cells)

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return CellReduction(self._grid, "max" if self.reduce == "max" else "sum")

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Array:
        return xp.zeros((shape[0], *self._grid))

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        reduce = "max" if self.reduce == "max" else "sum"
        index = [slice(None)]
        for axis, indices, count in zip((-2, -1), (q_idx, kv_idx), self._grid, strict=True):
            tile = as_slice(indices)
            cells, sizes = _find_cells(tile.start, tile.stop, self.problem.shape[axis], count)
            weights = self.problem.engine.segment_reduce(weights, sizes, axis, reduce)
            index.append(cells)
        if reduce == "sum":
            state[tuple(index)] += weights
            return state
        part = state[tuple(index)]
        part[...] = xp.maximum(part, xp.astype(weights, part.dtype))
        return state

    def merge(self, a: Array, b: Array) -> Array:
        return find_engine("measure", a=a).xp.maximum(a, b) if self.reduce == "max" else a + b

    def finish(self, state: Array) -> Array:
        if self.reduce != "mean":
            return state
        lengths = zip(self.problem.shape[1:], self._grid, strict=True)
        rows, columns = (np.array(_find_cells(0, n, n, count)[1]) for n, count in lengths)
        return state / self.problem.engine.xp.asarray(rows[:, None] * columns[None, :])


@lru_cache(maxsize=1024)
def _find_cells(start: int, stop: int, length: int, count: int) -> tuple[slice, tuple[int, ...]]:
    """Return the cells, of `count` along an axis, that indices start … stop are in, and how many are in each."""
    cells = range(start * count // length, (stop - 1) * count // length + 1)
    edges = [start, *(-(-cell * length // count) for cell in cells[1:]), stop]
    return slice(cells.start, cells.stop), tuple(np.diff(edges).tolist())


# Where the weights of a row are


@dataclass(frozen=True, repr=False)
class Distance(RowMean):
    """The mean distance of each row to its keys, Σ w · |q_idx − kv_idx| / Σ w: shape (…, q_len).

    Averaged over the queries, the result is the mean distance of Vig & Belinkov (1906.04284). A sink has no position
    and does not count; multiplied by `A.sum(axis=-1)`, the result is Σ w · |q_idx − kv_idx|.

    Args:
        align: How queries and keys are aligned if the lengths differ, as in `causal`.

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
        return self._describe_state(problem, RowSum("position"))

    def step(
        self, state: Array, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Array:
        return self._add(state, q_idx, weights @ xp.astype(kv_idx, weights.dtype), weights, xp)


@dataclass(frozen=True, repr=False)
class Spread(Distance):
    """The standard deviation of kv_idx under the weights of each row, without the sink: shape (…, q_len).

    The state of a row is the sum of its weights, their mean position relative to the query, and the sum of squared
    deviations from that mean. Two states are merged without subtracting large numbers (Chan, Golub & LeVeque, 1983), so
    that float32 is enough on devices without float64.

    Args:
        align: How queries and keys are aligned if the lengths differ, as in `causal`.

    Raises:
        ArgumentError: If `align` is unknown.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(regard.Spread()).spread.round(4)
    array([0.    , 0.5   , 0.8165])
    """

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return RowMoments(problem.frame.offset(self.align, get_result_name(self)))

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
        xp = find_engine("measure", a=a).xp
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
