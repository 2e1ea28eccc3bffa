"""An engine written against the array API standard; the base of NumPy's engine and of registered ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import is_contiguous
from regard.problem import Engine
from regard.types import Array, IntArray, Namespace
from regard.validation import as_array


class ArrayEngine(Engine):
    """Base class of engines: every operation of `Engine` in terms of the array API.

    A subclass defines `name`, `xp` (the library, or a namespace around it), `owns(array)` and `to_numpy(array)`, and
    may override the rest with faster versions. Where the standard leaves a choice, arrays must behave like NumPy's:
    they are writable, can be indexed by NumPy integer arrays, and have `reshape` and `swapaxes`. `xp.asarray` takes
    NumPy arrays; `xp.zeros` and `xp.full` return float64 by default. There are no gradients and no fused kernels.

    >>> import numpy as np
    >>> from regard.engines import ArrayEngine
    >>> class Mine(ArrayEngine):
    ...     name, xp = "mine", np
    >>> Mine().compute_scores(np.ones((1, 1, 4)), np.ones((1, 2, 4)), scale=0.5)
    array([[[2., 2.]]])
    """

    name: str = ""
    xp: Namespace = None

    # Arrays

    def owns(self, array: object) -> bool:
        """Return whether an object is an array of this library; a subclass must define it."""
        raise TypeError(f"{type(self).__name__} must define owns(array)")

    def to_numpy(self, array: Array) -> Any:
        """Convert an array to NumPy; a subclass must define it."""
        raise TypeError(f"{type(self).__name__} must define to_numpy(array)")

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        """Convert an argument to a floating point array of this library; integers become float64."""
        array = array if self.owns(array) else self.xp.asarray(as_array(array, operation, name))
        if self.xp.isdtype(array.dtype, "integral"):
            return self.xp.astype(array, self.xp.float64)
        if not self.xp.isdtype(array.dtype, "real floating"):
            raise ArgumentTypeError(
                operation,
                received=f"{name} as {describe_argument(array)}",
                expected="real numbers",
                hint="Convert it to a floating-point dtype first.",
            )
        return array

    def working_dtype(self, *arrays: Array) -> Any:
        """Return the widest dtype of the arrays, float32 at least."""
        float32 = self.xp.float32
        # float16 and bfloat16 have no common dtype, so both are left out of the promotion.
        return self.xp.result_type(float32, *(a.dtype for a in arrays if a.dtype.itemsize >= 4))

    def cast(self, array: Array, dtype: Any) -> Array:
        """Convert an array to another dtype; return it unchanged if it has that dtype."""
        return self.xp.astype(array, dtype, copy=False)

    def take(self, array: Array, pairs: IntArray, positions: IntArray, dtype: Any) -> Array:
        """Take some pairs and positions of an array (own pairs, length, dim)."""
        if len(pairs) and (pairs == pairs[0]).all():
            array = array[int(pairs[0]) : int(pairs[0]) + 1]
        elif is_contiguous(pairs):
            array = array[int(pairs[0]) : int(pairs[-1]) + 1]
        else:
            array = array[pairs]
        index = slice(int(positions[0]), int(positions[-1]) + 1) if is_contiguous(positions) else positions
        return self.cast(array[:, index], dtype)

    # The block loop

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        """Compute scale · query keyᵀ: (g, r, c)."""
        return query @ key.swapaxes(-1, -2) * scale

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        """Compute exp(scores − shift) without changing the scores."""
        return self.xp.exp(scores - shift)

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        """Reduce consecutive segments of an axis by "sum" or "max"."""
        function = self.xp.max if reduce == "max" else self.xp.sum
        stops = np.cumsum(sizes).tolist()
        segments = (slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
        rest = (slice(None),) * (-1 - axis)
        return self.xp.stack(
            [function(array[(..., segment, *rest)], axis=axis) for segment in segments], axis=axis
        )

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        """Find the k largest weights of each row, largest first; NaN ranks highest, ties go to the lowest column."""
        xp = self.xp
        ranked = xp.where(xp.isnan(weights), xp.inf, weights)
        columns = xp.argsort(-ranked, axis=-1, stable=True)[..., :k]
        return xp.take_along_axis(weights, columns, axis=-1), columns

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager in which NaN and inf raise no warning."""
        return lambda: np.errstate(all="ignore")  # a library may compute with NumPy inside

    def find_largest_norm(self, array: Array, dtype: Any) -> float:
        """Return the largest Euclidean norm along the last axis, computed in a dtype; 0 for an empty array."""
        if 0 in array.shape:
            return 0.0
        with self.suppress_warnings():
            return float(self.xp.sqrt(self.xp.max(self.xp.sum(self.cast(array, dtype) ** 2, axis=-1))))
