"""The NumPy engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from regard._errors import KindError, kind_of
from regard._types import ROUGH, Array, IntArray, Namespace, as_array, is_run


class NumpyEngine:
    """Primitives on NumPy arrays; half precision (float16, and bfloat16 of ml_dtypes) is raised to float32."""

    name = "numpy"
    xp: Namespace = np

    def owns(self, array: Any) -> bool:
        """Whether the array is NumPy's, or plain numbers that NumPy takes."""
        return isinstance(array, np.ndarray | list | tuple | int | float | np.generic)

    @property
    def quiet(self) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: np.errstate(all="ignore")

    @property
    def detached(self) -> Callable[[], AbstractContextManager[Any]]:
        return nullcontext

    def kernel(self, problem: Any) -> str:
        return "numpy: streaming tiles"

    def fuses(self, problem: Any) -> bool:
        return False

    def product(self, problem: Any, value: Array, value_of: IntArray) -> None:
        return None

    def is_rough(self, problem: Any) -> bool:
        with np.errstate(all="ignore"):
            longest = [
                np.sqrt((x.astype(problem.dtype) ** 2).sum(-1)).max(initial=0)
                for x in (problem.query, problem.key)
            ]
            return not longest[0] * longest[1] * abs(problem.scale) < ROUGH

    def is_learning(self, problem: Any, *arrays: Array) -> bool:
        return False

    def differentiate(self, problem: Any, measures: Any, bands: Any) -> list[Any]:
        raise TypeError("NumPy has no gradients")

    def again(self, function: Callable[..., Array], *arrays: Array) -> Array:
        return function(*arrays)

    def quick_product(self, query: Array, key: Array, value: Any, mask: Any, scale: float) -> None:
        return None

    def floats(self, array: Any, operation: str, name: str) -> Array:
        array = as_array(array, operation, name)
        if array.dtype.kind in "iu":
            return array.astype(np.float64)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise KindError(
                operation,
                received=f"{name} as {kind_of(array)}",
                expected="real numbers",
                cure=f"Convert it first: {name}.astype(float).",
            )
        return array

    def working_dtype(self, *arrays: Array) -> Any:
        return np.result_type(np.float32, *(self._raised(array.dtype) for array in arrays))

    def _raised(self, dtype: Any) -> Any:
        # np.result_type(bfloat16, float16) does not exist, so halves are raised one by one.
        return np.float32 if dtype.itemsize < 4 else dtype

    def cast(self, array: Array, dtype: Any) -> Array:
        return array.astype(dtype, copy=False)

    def take(self, array: Array, leads: IntArray, positions: IntArray, dtype: Any) -> Array:
        run = slice(int(positions[0]), int(positions[-1]) + 1) if is_run(positions) else positions
        if len(leads) and (leads == leads[0]).all():
            taken = array[int(leads[0]), run][None]
        elif is_run(leads):
            taken = array[int(leads[0]) : int(leads[-1]) + 1, run]
        elif isinstance(run, slice):
            taken = array[:, run][leads]
        else:
            taken = array[leads[:, None], positions]
        return taken.astype(dtype, copy=False)

    def scores(self, query: Array, key: Array, scale: float) -> Array:
        scores = query @ key.swapaxes(-1, -2)
        scores *= scale
        return scores

    def weights(
        self, query: Array, key: Array, shift: Array, allowed: Array | None, room: list[Array]
    ) -> tuple[Array, Array]:
        raise TypeError("NumPy has no kernel whose lse could be used")

    def exponentials(self, scores: Array, shift: Array) -> Array:
        shifted = scores - shift
        return np.exp(shifted, out=shifted)

    def segments(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        ufunc = {"sum": np.add, "max": np.maximum}[reduce]
        return ufunc.reduceat(array, np.cumsum((0, *sizes[:-1])), axis=axis)

    def largest(self, weights: Array, k: int) -> tuple[Array, Array]:
        ranked = np.where(np.isnan(weights), np.inf, weights)
        least = np.partition(ranked, -k, axis=-1)[..., -k, None]
        above, level = ranked > least, ranked == least
        room = k - above.sum(-1, keepdims=True)
        taken = above | (level & (np.cumsum(level, axis=-1) <= room))
        columns = np.nonzero(taken)[-1].reshape(*weights.shape[:-1], k)
        return np.take_along_axis(weights, columns, axis=-1), columns

    def to_numpy(self, array: Array) -> Any:
        return np.asarray(array)
