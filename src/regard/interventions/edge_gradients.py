"""Weights times their gradients, tile by tile: dL/dA = dL/dO · Vᵀ, so the gradient of no weight is ever stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from regard.measures import Measure, as_slice
from regard.measures.base import copy_with
from regard.problem import Problem, broadcast_index
from regard.types import Array, IntArray, Namespace


class EdgeSums(NamedTuple):
    """What `EdgeGradients` computes of a matrix, for each head.

    Attributes:
        magnitude: Σ |weight · gradient| over all edges: (…, heads), float64 if the device has it.
        received: Σ weight · gradient over the queries of each key: (…, heads, kv_len), likewise.
        queries: Query of each of the k edges with the largest |weight · gradient|, largest first; −1 if a head has
            fewer edges whose product is not 0: (…, heads, k).
        keys: Their keys: (…, heads, k).
        weights: Their weights: (…, heads, k).
        gradients: Their gradients: (…, heads, k).
    """

    magnitude: Array
    received: Array
    queries: Array
    keys: Array
    weights: Array
    gradients: Array


@dataclass(frozen=True, eq=False, repr=False)
class EdgeGradients(Measure):
    """Sums of weight · gradient, and the edges of each head where it is largest, in one pass and O(n) memory.

    The result is an `EdgeSums`.

    Args:
        value: (…, kv_heads, kv_len, value_dim).
        gradient: dL/dO, the gradient of the output, (…, heads, q_len, value_dim).
        k: Number of edges of each head.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> sums = A.measure(EdgeGradients(np.array([[1.0], [-3], [0], [2]]), np.array([[2.0]]), 2)).edge_gradients
    >>> sums.magnitude, sums.keys, sums.gradients
    (array(3.), array([1, 3]), array([-6.,  4.]))
    """

    value: Array
    gradient: Array
    k: int
    _problem: Problem | None = None
    _value_index: IntArray | None = None
    _gradient_index: IntArray | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        leading = problem.frame.leading_shape
        indices = []
        for array in (self.value, self.gradient):
            heads = array.shape[-3] if array.ndim > 2 else 1
            groups = leading[-1] // heads if leading and array.ndim > 2 else 1
            indices.append(broadcast_index(array, leading, groups, "attribution", "array")[problem.pair_ids])
        flat = [array.reshape((-1, *array.shape[-2:])) for array in (self.value, self.gradient)]
        return copy_with(
            self,
            value=flat[0],
            gradient=flat[1],
            _problem=problem,
            _value_index=indices[0],
            _gradient_index=indices[1],
        )

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> EdgeSums:
        pairs, _, kv_len = shape
        places = (xp.full((pairs, self.k), -1, dtype=xp.int64) for _ in range(2))
        numbers = (xp.zeros((pairs, self.k)) for _ in range(2))
        return EdgeSums(xp.zeros(pairs), xp.zeros((pairs, kv_len)), *places, *numbers)

    def step(
        self, state: EdgeSums, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> EdgeSums:
        problem = self._problem
        assert problem is not None and self._value_index is not None and self._gradient_index is not None
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        take = problem.engine.take
        gradient = take(self.gradient, self._gradient_index, np.arange(rows.start, rows.stop), problem.dtype)
        value = take(self.value, self._value_index, np.arange(columns.start, columns.stop), problem.dtype)
        gradients = problem.engine.compute_scores(gradient, value, 1.0)  # dL/dA of the tile
        gradients = xp.broadcast_to(gradients, weights.shape)
        products = gradients * weights
        sizes = xp.abs(products)
        state.magnitude[...] += xp.sum(sizes, axis=(-2, -1))
        state.received[:, columns] += xp.sum(products, axis=-2)
        self._insert(state, sizes, weights, gradients, rows.start, columns.start, xp)
        return state

    def _insert(
        self,
        state: EdgeSums,
        sizes: Array,
        weights: Array,
        gradients: Array,
        row: int,
        column: int,
        xp: Namespace,
    ) -> None:
        """Merge the largest edges of a tile, whose first entry is (row, column), into those found before."""
        assert self._problem is not None
        found = xp.abs(state.weights * state.gradients)  # 0 where there is no edge yet
        is_better = xp.max(sizes, axis=(-2, -1)) > found[:, -1]
        if not xp.any(is_better):
            return
        pairs = xp.nonzero(is_better)[0]
        width = sizes.shape[-1]
        flat = [array[pairs].reshape((len(pairs), -1)) for array in (sizes, weights, gradients)]
        top, places = self._problem.engine.topk(flat[0], min(self.k, flat[0].shape[-1]))
        is_edge = top > 0
        tile = (
            xp.where(is_edge, row + places // width, -1),
            xp.where(is_edge, column + places % width, -1),
            *(xp.astype(xp.take_along_axis(array, places, axis=-1), found.dtype) for array in flat[1:]),
        )
        both = [xp.concat([old[pairs], new], axis=-1) for old, new in zip(state[2:], tile, strict=True)]
        ranks = xp.concat([found[pairs], xp.astype(top, found.dtype)], axis=-1)
        order = xp.argsort(-ranks, axis=-1, stable=True)[:, : self.k]
        for old, new in zip(state[2:], both, strict=True):
            old[pairs] = xp.take_along_axis(new, order, axis=-1)

    def merge(self, a: EdgeSums, b: EdgeSums) -> EdgeSums:
        raise TypeError("EdgeGradients has no gradients of its own, and is not merged")
