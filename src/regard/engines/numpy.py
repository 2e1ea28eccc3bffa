"""The NumPy engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.engines.array_api import ArrayEngine
from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import is_contiguous
from regard.types import Array, IntArray, Namespace
from regard.validation import as_array


class NumpyEngine(ArrayEngine):
    """Primitives on NumPy arrays; half precision (float16, and bfloat16 of ml_dtypes) is raised to float32."""

    name = "numpy"
    xp: Namespace = np

    def owns(self, array: Any) -> bool:
        """Whether the array is NumPy's, or plain numbers that NumPy takes."""
        return isinstance(array, np.ndarray | list | tuple | int | float | np.generic)

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

    def take(self, array: Array, leads: IntArray, positions: IntArray, dtype: Any) -> Array:
        run = slice(int(positions[0]), int(positions[-1]) + 1) if is_contiguous(positions) else positions
        if len(leads) and (leads == leads[0]).all():
            taken = array[int(leads[0]), run][None]
        elif is_contiguous(leads):
            taken = array[int(leads[0]) : int(leads[-1]) + 1, run]
        elif isinstance(run, slice):
            taken = array[:, run][leads]
        else:
            taken = array[leads[:, None], positions]
        return taken.astype(dtype, copy=False)

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

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        ranked = np.where(np.isnan(weights), np.inf, weights)
        least = np.partition(ranked, -k, axis=-1)[..., -k, None]
        above, level = ranked > least, ranked == least
        room = k - above.sum(-1, keepdims=True)
        taken = above | (level & (np.cumsum(level, axis=-1) <= room))
        columns = np.nonzero(taken)[-1].reshape(*weights.shape[:-1], k)
        return np.take_along_axis(weights, columns, axis=-1), columns

    def to_numpy(self, array: Array) -> Any:
        return np.asarray(array)
