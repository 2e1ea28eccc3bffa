"""The NumPy engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regard.accumulators import Accumulator
from regard.engines.array_api import ArrayEngine
from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import Frame, is_contiguous
from regard.masks import Mask
from regard.problem import Problem
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace
from regard.validation import as_array


class NumpyEngine(ArrayEngine):
    """Operations on NumPy arrays; half precision (float16, and bfloat16 of ml_dtypes) is upcast to float32."""

    name = "numpy"
    xp: Namespace = np

    def owns(self, array: object) -> bool:
        """Return whether an object is a NumPy array, or plain numbers that NumPy converts."""
        return isinstance(array, np.ndarray | list | tuple | int | float | np.generic)

    def to_numpy(self, array: Array) -> Any:
        return np.asarray(array)

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        array = as_array(array, operation, name)
        if array.dtype.kind in "iu":
            return array.astype(np.float64)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise ArgumentTypeError(
                operation,
                received=f"{name} as {describe_argument(array)}",
                expected="real numbers",
                hint=f"Convert it first: {name}.astype(float).",
            )
        return array

    def cast(self, array: Array, dtype: Any) -> Array:
        return array.astype(dtype, copy=False)

    def take(self, array: Array, pairs: IntArray, positions: IntArray, dtype: Any) -> Array:
        index = slice(int(positions[0]), int(positions[-1]) + 1) if is_contiguous(positions) else positions
        if len(pairs) and (pairs == pairs[0]).all():
            block = array[int(pairs[0]), index][None]
        elif is_contiguous(pairs):
            block = array[int(pairs[0]) : int(pairs[-1]) + 1, index]
        elif isinstance(index, slice):
            block = array[:, index][pairs]
        else:
            block = array[pairs[:, None], positions]
        return block.astype(dtype, copy=False)

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        scores = query @ key.swapaxes(-1, -2)
        scores *= scale
        return scores

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        shifted = scores - shift
        return np.exp(shifted, out=shifted)

    def softmax(self, scores: Array) -> Array | None:
        weights = scores - scores.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        return weights if math.isfinite(weights.sum()) else None

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        ufunc = {"sum": np.add, "max": np.maximum}[reduce]
        return ufunc.reduceat(array, np.cumsum((0, *sizes[:-1])), axis=axis)

    def name_compiled_pass(self, problem: Problem) -> str:
        from regard.engines import native  # on first use: `import regard` would take longer by a third

        return native.describe_pass(problem) if problem.dtype in (np.float32, np.float64) else ""

    def accumulate(
        self,
        problem: Problem,
        accumulators: Sequence[Accumulator],
        known_max: Array | None,
        known_sum: Array | None,
    ) -> tuple[list[Any], Array, Array | None]:
        from regard.engines import native

        query, key = (self.cast(array, problem.dtype) for array in (problem.query, problem.key))
        return native.accumulate(
            problem, query, key, accumulators, known_max, known_sum, native.count_processors()
        )

    def prepare_fast_product(
        self, query: Array, key: Array, mask: Mask | None, scale: float
    ) -> Callable[[Any, bool], tuple[Array, None, str] | None] | None:
        leading, (rows, columns), dtype = query.shape[:-2], (query.shape[-2], key.shape[-2]), query.dtype
        sizes = tile_sizes()
        is_tile = (
            rows <= sizes.rows and columns <= sizes.columns and dtype == key.dtype and dtype.char in "fd"
        )
        if not (is_tile and key.shape[:-2] == leading):
            return None
        if not 0 < math.prod(leading) * rows * columns <= sizes.entries:
            return None
        frame = Frame(leading, rows, columns)
        transposed, name = key.swapaxes(-1, -2), f"{self.name}: block loop"

        def multiply(value: Any, needs_lse: bool) -> tuple[Array, None, str] | None:
            is_plain = type(value) is np.ndarray and value.dtype == dtype and value.ndim > 1
            if not is_plain or value.shape[:-2] != leading or value.shape[-2] != columns:
                return None
            with np.errstate(all="ignore"):
                scores = query @ transposed
                scores *= scale
                if mask is not None:
                    allowed = mask.allows_all(frame, np)
                    shape = leading if len(allowed) > 1 else (1,) * len(leading)
                    scores = np.where(allowed.reshape(*shape, *allowed.shape[1:]), scores, -np.inf)
                weights = self.softmax(scores)
                if weights is None:
                    return None
                output = weights @ value
                # 0 · NaN of a masked value shows here; the block loop decides which rows get it.
                return (output, None, name) if math.isfinite(output.sum()) else None

        return multiply

    def keeps_exponentials(self, problem: Problem) -> bool:
        from regard.engines import native

        return bool(self.name_compiled_pass(problem)) and native.keeps_exponentials(problem)

    def name_measured_product(
        self, problem: Problem, value: Array, accumulators: Sequence[Accumulator]
    ) -> str:
        is_plain = self.working_dtype(value) == problem.dtype and value.size
        return self.name_compiled_pass(problem) if is_plain and self.keeps_exponentials(problem) else ""

    def run_measured_product(
        self, problem: Problem, value: Array, value_index: IntArray, accumulators: Sequence[Accumulator]
    ) -> tuple[Array, list[Any], Array, Array] | None:
        from regard.engines import native

        query, key, wide = (self.cast(array, problem.dtype) for array in (problem.query, problem.key, value))
        threads = native.count_processors()
        found = native.multiply(problem, query, key, wide, value_index, accumulators, threads)
        return None if found is None else (self.cast(found[0], value.dtype), *found[1:])

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        ranked = np.where(np.isnan(weights), np.inf, weights)
        smallest = np.partition(ranked, -k, axis=-1)[..., -k, None]
        above, tied = ranked > smallest, ranked == smallest
        free = k - above.sum(-1, keepdims=True)
        chosen = above | (tied & (np.cumsum(tied, axis=-1) <= free))
        columns = np.nonzero(chosen)[-1].reshape(*weights.shape[:-1], k)
        return np.take_along_axis(weights, columns, axis=-1), columns
