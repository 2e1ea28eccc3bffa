"""Sums over the weights: of a row, of a column, of a cell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regard.engines import find_engine
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks import Mask
from regard.measures.base import Measure, for_all, span
from regard.types import Array, IntArray
from regard.validation import check_count

if TYPE_CHECKING:
    from regard.core.problem import Problem


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

    def columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        # Without anything else in them, the mean score of a row is its query times the mean of its keys.
        return None if problem.score_mods or problem.sink is not None else (problem.key, problem.key_index)

    def from_columns(self, product: Array, lse: Array, problem: Problem) -> Array:
        engine, xp = problem.engine, problem.engine.xp
        query = engine.take(problem.query, problem.query_index, np.arange(problem.shape[1]), problem.dtype)
        entropy = lse - problem.scale * xp.vecdot(product, query)
        return xp.where(lse == -xp.inf, 0.0, xp.clip(entropy, 0.0, None))  # a difference may round to below 0

    def step_logs(self, state: Any, weights: Array, logs: Array, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        """`step` where the logarithms of the weights are at hand, finite for a weight of 0 too; it uses them up."""
        logs *= weights
        state[:, span(q_idx)] -= xp.sum(logs, axis=-1)
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

    def columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        return None if self.axis == -2 else for_all(np.ones(problem.frame.kv_len), problem)

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


@dataclass(frozen=True, eq=False)
class Output(Measure):
    """The product `A @ value` beside other measures, which share its kernel or its pass: (…, q_len, value_dim).

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> A.measure(Output(np.array([[1.0], [2], [3], [4]])), regard.Position())
    Measures(output=array([[2.5]]), position=array([1.5]))
    """

    value: Array

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        raise TypeError("Output is made by A.measure(Output(value), …) alone")


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
            raise ArgumentTypeError(
                "mass",
                received=describe_argument(self.mask),
                expected="a mask such as regard.first(1)",
                hint="Wrap it: dense(array) for booleans.",
            )
        self.mask.check(problem.frame)
        return replace(self, problem=problem)

    def columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        self.bind(problem)
        if not self.mask.is_key_only:
            return None
        kv_idx, xp = np.arange(problem.frame.kv_len), problem.engine.xp
        allowed = self.mask.allows(problem.frame, np.zeros(1, np.int64), kv_idx, xp)
        of = np.arange(len(allowed)) if len(allowed) > 1 else np.zeros(problem.shape[0], np.int64)
        return xp.astype(allowed[:, 0, :, None], problem.dtype), of

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

    Entry (i, j) falls into cell (i · block // q_len, j · block // kv_len). `block` may be (rows, columns), too.

    >>> import numpy as np, regard
    >>> regard.attention(np.zeros((4, 2)), np.zeros((4, 2))).measure(Coarse(2)).coarse
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """

    block: int | tuple[int, int]
    reduce: str = "mean"
    problem: Problem | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows, columns = problem.shape[1:]
        of = f" for a matrix of ({rows}, {columns})"
        cells = "block is the number of cells along an edge, at most one for each row and column."
        if isinstance(self.block, tuple) and len(self.block) == 2:
            for block, length, name in zip(self.block, (rows, columns), ("rows", "columns"), strict=True):
                check_count(block, 1, length, "coarsen", f"block of {name}", of, cells)
        else:
            check_count(self.block, 1, min(rows, columns), "coarsen", "block", of, cells)
        if self.reduce not in ("mean", "max", "sum"):
            raise ArgumentError(
                "coarsen",
                received=f"reduce={self.reduce!r}",
                expected='"mean", "max" or "sum"',
                hint="It says how the weights of one of the cells become one number.",
            )
        return replace(self, problem=problem)

    @property
    def _blocks(self) -> tuple[int, int]:
        """How many cells there are along the rows and along the columns."""
        return self.block if isinstance(self.block, tuple) else (self.block, self.block)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], *self._blocks))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.problem is not None
        how = "max" if self.reduce == "max" else "sum"
        where = [slice(None)]
        for axis, indices, block in zip((-2, -1), (q_idx, kv_idx), self._blocks, strict=True):
            at = span(indices)
            cells, sizes = _cells(at.start, at.stop, self.problem.shape[axis], block)
            weights = self.problem.engine.segment_reduce(weights, sizes, axis, how)
            where.append(cells)
        part = state[tuple(where)]
        part[...] = xp.maximum(part, xp.astype(weights, part.dtype)) if how == "max" else part + weights
        return state

    def merge(self, a: Array, b: Array) -> Array:
        return find_engine("merge", a=a).xp.maximum(a, b) if self.reduce == "max" else a + b

    def finish(self, state: Array) -> Array:
        if self.reduce != "mean":
            return state
        assert self.problem is not None
        lengths = zip(self.problem.shape[1:], self._blocks, strict=True)
        rows, columns = (np.array(_cells(0, n, n, block)[1]) for n, block in lengths)
        return state / self.problem.engine.xp.asarray(rows[:, None] * columns[None, :])


@lru_cache(maxsize=1024)
def _cells(start: int, stop: int, length: int, block: int) -> tuple[slice, tuple[int, ...]]:
    """The cells that indices start … stop of an axis fall into, of `block` along it, and how many fall into each."""
    cells = range(start * block // length, (stop - 1) * block // length + 1)
    edges = [start, *(-(-cell * length // block) for cell in cells[1:]), stop]
    return slice(cells.start, cells.stop), tuple(np.diff(edges).tolist())
