"""Products and the dense matrix as measures of the block loop, and the merge of outputs over shards of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from regard.core.block_loop import make_finite
from regard.engines import find_engine
from regard.errors import ArgumentError, describe_argument, format_named_shape
from regard.measures import Measure
from regard.measures.base import BoundMeasure, as_slice, copy_with
from regard.problem import Problem, Spec, broadcast_index, num_pairs
from regard.types import Array, IntArray, Namespace


@dataclass(frozen=True)
class DenseWeights(BoundMeasure):
    """Every weight, stored: (…, q_len, kv_len). The only measure that takes more than O(n) memory."""

    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        return xp.zeros(shape, dtype=self.problem.dtype)

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Namespace) -> Any:
        state[:, as_slice(q_idx), as_slice(kv_idx)] = weights
        return state


@dataclass(frozen=True, eq=False)
class SelectedWeights(BoundMeasure):
    """The weights at some columns, from the tiles of their whole rows: (…, q_len, len(columns)).

    Attributes:
        columns: Columns in any order: (n,).
    """

    columns: IntArray
    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        return xp.zeros((*shape[:2], len(self.columns)), dtype=self.problem.dtype)

    def step(
        self, state: Any, weights: Array, scores: Any, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        tile = as_slice(kv_idx)
        inside = np.flatnonzero((self.columns >= tile.start) & (self.columns < tile.stop))
        if len(inside):
            chosen = weights[..., xp.asarray(self.columns[inside] - tile.start)]
            state[:, as_slice(q_idx), xp.asarray(inside)] = chosen
        return state


@dataclass(frozen=True, eq=False)
class SelectedScores(SelectedWeights):
    """The scores at some columns, −inf where masked, for gradients: (…, q_len, len(columns))."""

    reads_scores: ClassVar[bool] = True

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        return super().init(shape, xp) - xp.inf

    def step(
        self, state: Any, weights: Array, scores: Any, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        return super().step(state, scores, None, q_idx, kv_idx, xp)

    def merge(self, a: Array, b: Array) -> Array:
        return self.problem.engine.xp.maximum(a, b)


@dataclass(frozen=True)
class Diagonal(BoundMeasure):
    """The weights of row r at column r + offset, for all rows that have this column: (…, entries)."""

    offset: int
    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        first, after = max(0, -self.offset), min(shape[1], shape[2] - self.offset)
        return xp.zeros((shape[0], max(0, after - first)), dtype=self.problem.dtype)

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Namespace) -> Any:
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        start = max(rows.start, columns.start - self.offset)
        chosen = np.arange(start, max(start, min(rows.stop, columns.stop - self.offset)))
        if len(chosen):
            inside = xp.asarray(chosen - rows.start), xp.asarray(chosen + self.offset - columns.start)
            state[:, xp.asarray(chosen - max(0, -self.offset))] = weights[:, inside[0], inside[1]]
        return state


@dataclass(frozen=True)
class MinWeight(BoundMeasure):
    """The smallest weight of each row (axis −1) or column (−2): (…, q_len) or (…, kv_len)."""

    axis: int
    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        kept = (shape[0], shape[2 if self.axis == -2 else 1])
        # The weights counted tell whether a block was skipped, whose weights are zeros.
        return xp.full(kept, xp.inf, dtype=self.problem.dtype), xp.zeros(kept, dtype=xp.int64)

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Namespace) -> Any:
        smallest, counted = state
        own = as_slice(kv_idx if self.axis == -2 else q_idx)
        smallest[:, own] = xp.minimum(smallest[:, own], xp.min(weights, axis=self.axis))
        counted[:, own] += weights.shape[self.axis]
        return state

    def merge(self, a: Any, b: Any) -> Any:
        return self.problem.engine.xp.minimum(a[0], b[0]), a[1] + b[1]

    def finish(self, state: Any) -> Array:
        smallest, counted = state
        xp, length = self.problem.engine.xp, self.problem.shape[self.axis]
        return xp.where(counted < length, xp.minimum(smallest, xp.zeros_like(smallest)), smallest)


@dataclass(frozen=True)
class LogSumExp(BoundMeasure):
    """The lse of each row of a matrix without a sink, for gradients: score − ln weight at any live key, (…, q_len).

    A sink may leave so little weight to the keys that the gradient of its logarithm overflows.
    """

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        return xp.zeros((*shape[:2], 2))

    def step(
        self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        live = weights > 0
        lse = xp.where(live, scores, 0.0) - xp.log(xp.where(live, weights, 1.0))
        sums = (xp.sum(xp.where(live, x, 0.0), axis=-1) for x in (weights * lse, weights))
        state[:, as_slice(q_idx)] += xp.stack(list(sums), axis=-1)
        return state

    def finish(self, state: Array) -> Array:
        xp = self.problem.engine.xp
        empty = state[..., 1] == 0
        return xp.where(empty, -xp.inf, state[..., 0] / xp.where(empty, 1.0, state[..., 1]))


@dataclass(frozen=True, eq=False)
class Product(BoundMeasure):
    """The product of the matrix, or of its transpose, with an array.

    Attributes:
        array: (own pairs, kv_len, width), the values of the keys here, or (own pairs, q_len, width) if `transposed`.
        pair_index: For each pair of the whole matrix, its pair in `array`.
        transposed: Whether the transpose is multiplied.
        is_vector: Whether the array was given without a width axis, so that the result has none.
    """

    array: Array
    pair_index: IntArray
    transposed: bool = False
    is_vector: bool = False
    # Set by `bind`: whether all entries of the array are finite, and the dtype of the sums.
    finite: bool = True
    dtype: Any = None

    @classmethod
    def from_operand(cls, array: Any, spec: Spec, operation: str, *, transposed: bool = False) -> Product:
        """Check the array of `A @ array`, or of `A.mT @ array` if `transposed`, and convert it to canonical form."""
        name, axis = ("x", "q_len") if transposed else ("value", "kv_len")
        array = spec.engine.as_float(array, operation, name)
        is_vector = array.ndim == 1
        if is_vector:
            array = array[:, None]
        length = spec.shape[-2] if transposed else spec.key.shape[-2]
        if array.ndim < 2 or array.shape[-2] != length:
            matrix = format_named_shape(spec.shape, "q_len", "kv_len")
            raise ArgumentError(
                operation,
                received=f"{name} of shape {tuple(array.shape[:-1] if is_vector else array.shape)}",
                expected=f"(…, {axis} {length}, width) for a matrix of {matrix}",
                hint=f"The second-to-last axis must have one entry for each {'query' if transposed else 'key'}.",
            )
        if not transposed and spec.groups == 0 and array.ndim > 2 and array.shape[-3] > 1:
            raise ArgumentError(
                operation,
                received=f"value of shape {tuple(array.shape)} for some heads of a matrix with grouped heads",
                expected="a value without a heads axis, or a product with the whole matrix",
                hint="Use (A @ value)[:, heads], or multiply one head at a time: A[0, 3] @ value[0, 1].",
            )
        groups = 1 if transposed else spec.groups or 1
        pair_index = broadcast_index(array, spec.leading_shape, groups, operation, name)
        return cls(array.reshape((num_pairs(array), *array.shape[-2:])), pair_index, transposed, is_vector)

    @property
    def reads_scores(self) -> bool:  # type: ignore[override]
        """Whether scores are needed to tell masked keys from weights of zero: if NaN or inf must reach live rows."""
        return not self.finite

    def bind(self, problem: Problem) -> Measure:
        engine = problem.engine
        return copy_with(
            self,
            pair_index=self.pair_index[problem.pair_ids],
            problem=problem,
            finite=bool(engine.xp.all(engine.xp.isfinite(self.array))),
            dtype=engine.working_dtype(problem.query, problem.key, self.array),
        )

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        kept = shape[2 if self.transposed else 1]
        return xp.zeros((shape[0], kept, self.array.shape[-1]), dtype=self.dtype)

    def step(
        self, state: Any, weights: Array, scores: Any, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        engine = self.problem.engine
        kept, summed = (kv_idx, q_idx) if self.transposed else (q_idx, kv_idx)
        columns, first = as_slice(summed), 0 if self.transposed else self.problem.first_key
        positions = np.arange(columns.start - first, columns.stop - first)
        part = engine.take(self.array, self.pair_index, positions, self.dtype)
        weights = engine.cast(weights, self.dtype)  # the array may have a wider dtype
        transpose = xp.matrix_transpose if self.transposed else lambda tile: tile
        if self.finite:
            state[:, as_slice(kept)] += transpose(weights) @ part
        else:
            state[:, as_slice(kept)] += _multiply_non_finite(transpose(weights), transpose(scores), part, xp)
        return state


def _multiply_non_finite(weights: Array, scores: Array, part: Array, xp: Namespace) -> Array:
    """Compute weights @ part for a part with NaN or inf, which reach exactly the rows in which they are live."""
    live = scores != -xp.inf

    def reaches(rows: Array, entries: Array) -> Array:
        return xp.astype(rows, weights.dtype) @ xp.astype(entries, weights.dtype) > 0

    product = weights @ xp.where(xp.isfinite(part), part, 0.0)
    is_nan = reaches(live, xp.isnan(part)) | reaches(live & (weights == 0), xp.isinf(part))
    for infinity in (xp.inf, -xp.inf):
        product = product + xp.where(reaches(weights > 0, part == infinity), infinity, 0.0)
    return xp.where(is_nan, xp.nan, product)


def merge_states(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merge outputs and lse of several shards of the keys into the result over all keys.

    Args:
        parts: `(A @ value, A.lse)` of each shard, in any order: (…, q_len, value_dim) and (…, q_len). Shards may be
            empty. Pass a sink to one shard only; it is included in the lse of that shard.

    Returns:
        Output (…, q_len, value_dim) and lse (…, q_len) over all keys.

    Raises:
        ArgumentError: If `parts` is empty, or the shapes differ.
        ArgumentTypeError: If no engine supports the arrays.

    >>> import numpy as np, regard
    >>> query, key, value = np.eye(2), np.eye(2), np.array([[1.0], [3.0]])
    >>> shards = [(A @ value[j : j + 1], A.lse) for j in (0, 1) for A in [regard.attention(query, key[j : j + 1])]]
    >>> np.allclose(regard.merge_states(shards)[0], regard.attention(query, key) @ value)
    True
    """
    if isinstance(parts, list | tuple) and all(isinstance(part, tuple) and len(part) == 2 for part in parts):
        engine = find_engine("merge_states", **{f"lse of part {i}": lse for i, (_, lse) in enumerate(parts)})
        shapes = [tuple(np.shape(array)) for part in parts for array in part]
    else:
        shapes = []
    if len(set(shapes[::2])) != 1 or set(shapes[1::2]) != {shapes[0][:-1]}:
        raise ArgumentError(
            "merge_states",
            received=f"parts of shapes {shapes}" if shapes else describe_argument(parts),
            expected="a list of (output, lse), at least one, of shapes (…, q_len, value_dim) and (…, q_len)",
            hint="Pass (A @ value, A.lse) for each shard of the keys, with the same queries.",
        )
    xp = engine.xp
    with engine.suppress_warnings():
        largest = parts[0][1]
        for _, lse in parts[1:]:
            largest = xp.maximum(largest, lse)
        exponentials = [xp.exp(lse - make_finite(largest, xp)) for _, lse in parts]
        total = sum(exponentials)
        # Rows with no live key in any shard have a total of zero.
        safe = xp.where(total == 0, 1.0, total)
        output = sum(
            (exponential / safe)[..., None] * output
            for exponential, (output, _) in zip(exponentials, parts, strict=True)
        )
        return output, largest + xp.log(total)
