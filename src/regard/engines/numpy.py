"""The NumPy engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.accumulators import Accumulator
from regard.engines.array_api import ArrayEngine
from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import is_contiguous
from regard.problem import Problem
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

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        ranked = np.where(np.isnan(weights), np.inf, weights)
        smallest = np.partition(ranked, -k, axis=-1)[..., -k, None]
        above, tied = ranked > smallest, ranked == smallest
        free = k - above.sum(-1, keepdims=True)
        chosen = above | (tied & (np.cumsum(tied, axis=-1) <= free))
        columns = np.nonzero(chosen)[-1].reshape(*weights.shape[:-1], k)
        return np.take_along_axis(weights, columns, axis=-1), columns
