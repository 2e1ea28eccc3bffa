"""An engine in the words of the array API: what NumPy's and those from outside begin with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import EXACT_ROWS_LIMIT, is_contiguous
from regard.types import Array, IntArray, Namespace
from regard.validation import as_array


class ArrayEngine:
    """Primitives in the words of the array API; a subclass says what its arrays are.

    It has `name`, `xp` (the library, or a namespace around it), `owns(array)` and `to_numpy(array)`, and may do the
    rest faster. Arrays must be as NumPy's are where the standard leaves room: they can be written into, are indexed by
    NumPy's integer arrays, and have `reshape` and `swapaxes`. `xp.asarray` takes NumPy's arrays; new arrays of
    `xp.zeros` and `xp.full` are float64 unless said. There are no gradients.

    >>> import numpy as np
    >>> class Mine(ArrayEngine):
    ...     name, xp = "mine", np
    >>> Mine().compute_scores(np.ones((1, 1, 4)), np.ones((1, 2, 4)), scale=0.5)
    array([[[2., 2.]]])
    """

    name: str = ""
    xp: Namespace = None

    def owns(self, array: Any) -> bool:
        """Whether the array is this library's."""
        raise TypeError(f"{type(self).__name__} must define owns(array)")

    def to_numpy(self, array: Array) -> Any:
        """The array as NumPy's; what is NumPy's already, as it is."""
        raise TypeError(f"{type(self).__name__} must define to_numpy(array)")

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which NaN and inf pass without a warning."""
        return lambda: np.errstate(all="ignore")  # for a library that NumPy works for, too

    @property
    def no_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context without gradients: there are none."""
        return nullcontext

    # Neither fused kernels nor gradients

    def kernel_name(self, problem: Any) -> str:
        """What runs for `A @ value`: the block loop."""
        return f"{self.name}: streaming tiles"

    def can_fuse(self, problem: Any) -> bool:
        """Whether a fused kernel may be called: there is none, unless a subclass has one."""
        return False

    def fused_product(
        self, problem: Any, value: Array, value_of: IntArray
    ) -> tuple[Array, Array, str] | None:
        """None: the block loop does it. A subclass may give output, lse and what ran."""
        return None

    def try_fast_product(self, query: Array, key: Array, value: Any, mask: Any, scale: float) -> Any:
        """None: there is no shorter way."""
        return None

    def compute_weights(
        self, query: Array, key: Array, shift: Array, allowed: Array | None, buffers: list[Array]
    ) -> tuple[Array, Array]:
        """A refusal: it is asked only where the lse of a fused kernel is known."""
        raise TypeError(f"{self.name} has no kernel whose lse could be used")

    def needs_exact_rows(self, problem: Any) -> bool:
        """Whether weights must not be recomputed from the lse of another computation."""
        xp = self.xp
        with self.suppress_warnings():
            squares = [
                xp.sum(self.cast(x, problem.dtype) ** 2, axis=-1) for x in (problem.query, problem.key)
            ]
            longest = [float(xp.sqrt(xp.max(x))) if min(x.shape) else 0.0 for x in squares]
        return not longest[0] * longest[1] * abs(problem.scale) < EXACT_ROWS_LIMIT

    def requires_grad(self, problem: Any, *arrays: Array) -> bool:
        """Whether a gradient is wanted: never."""
        return False

    def differentiate(self, problem: Any, measures: Any, bands: Any) -> list[Any]:
        """A refusal: there are no gradients."""
        raise TypeError(f"{self.name} has no gradients")

    def checkpoint(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """function(*arrays)."""
        return function(*arrays)

    # Arrays

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        """The array as floating point numbers of this library, or a refusal that names it."""
        array = array if self.owns(array) else self.xp.asarray(as_array(array, operation, name))
        if self.xp.isdtype(array.dtype, "integral"):
            return self.xp.astype(array, self.xp.float64)
        if not self.xp.isdtype(array.dtype, "real floating"):
            raise ArgumentTypeError(
                operation,
                received=f"{name} as {describe_argument(array)}",
                expected="real numbers",
                hint="Convert it first to floating point numbers.",
            )
        return array

    def working_dtype(self, *arrays: Array) -> Any:
        """The dtype scores are computed in: float32 at least."""
        float32 = self.xp.float32
        # Two kinds of half precision have no common one, so halves are raised one by one.
        return self.xp.result_type(float32, *(a.dtype for a in arrays if a.dtype.itemsize >= 4))

    def cast(self, array: Array, dtype: Any) -> Array:
        """The array in another dtype, itself where it has it already."""
        return self.xp.astype(array, dtype, copy=False)

    def take(self, array: Array, leads: IntArray, positions: IntArray, dtype: Any) -> Array:
        """`(g, len(positions), dim)` of an array `(own, length, dim)`; `(1, …)` where all leads are the same."""
        if len(leads) and (leads == leads[0]).all():
            array = array[int(leads[0]) : int(leads[0]) + 1]
        elif is_contiguous(leads):
            array = array[int(leads[0]) : int(leads[-1]) + 1]
        else:
            array = array[leads]
        run = slice(int(positions[0]), int(positions[-1]) + 1) if is_contiguous(positions) else positions
        return self.cast(array[:, run], dtype)

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        """scale · query keyᵀ: `(g, r, c)`."""
        return query @ key.swapaxes(-1, -2) * scale

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        """exp(scores − shift), a shift for each row; the scores are left as they are."""
        return self.xp.exp(scores - shift)

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        """The "sum" or "max" of each of the runs, of these sizes, that an axis is cut into."""
        fold = self.xp.max if reduce == "max" else self.xp.sum
        stops = np.cumsum(sizes).tolist()
        runs = (slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
        rest = (slice(None),) * (-1 - axis)
        return self.xp.stack([fold(array[(..., run, *rest)], axis=axis) for run in runs], axis=axis)

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        """The k largest of each row and their columns, largest first: NaN above all, of equals the first."""
        xp = self.xp
        ranked = xp.where(xp.isnan(weights), xp.inf, weights)
        columns = xp.argsort(-ranked, axis=-1, stable=True)[..., :k]
        return xp.take_along_axis(weights, columns, axis=-1), columns
