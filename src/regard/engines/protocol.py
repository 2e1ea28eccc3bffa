"""The engine protocol: the operations of an array library that the matrix is computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from regard.types import Array, IntArray, Namespace

if TYPE_CHECKING:
    from regard.core.block_loop import LoopMeasure
    from regard.core.problem import Problem
    from regard.engines.accumulators import Accumulator
    from regard.masks import Mask


class Engine(Protocol):
    """The operations of an array library that the matrix is computed with.

    In the shapes, g is the number of (batch, head) pairs, r of rows (queries) and c of columns (keys) of a tile. Most
    engines subclass `ArrayEngine`, which implements everything but `name`, `xp`, `owns` and `to_numpy`.

    >>> import numpy as np
    >>> from regard.engines import find_engine
    >>> engine = find_engine("example", query=np.ones(2))
    >>> engine.compute_scores(np.ones((1, 2, 4)), np.ones((1, 3, 4)), scale=0.5)
    array([[[2., 2., 2.],
            [2., 2., 2.]]])
    """

    @property
    def name(self) -> str:
        """Name of the library, as messages and `A.kernel` show it."""

    @property
    def xp(self) -> Namespace:
        """Array API namespace that masks, score modifications and measures compute with.

        `xp.zeros(shape)` without a dtype returns an accumulator: float64, or sums with compensated rounding errors if
        the device has no float64, where `xp.float64` is float32.
        """

    @property
    def is_asynchronous(self) -> bool:
        """Whether a device computes while Python goes on, so that reading a number of an array waits for it."""

    # Arrays

    def owns(self, array: object) -> bool:
        """Return whether an object is an array of this library.

        Args:
            array: Any object.
        """

    def to_numpy(self, array: Array) -> Any:
        """Convert an array to NumPy, for indices and for printing.

        Args:
            array: Array of this library, or a NumPy array, which is returned unchanged.
        """

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        """Convert an argument to a floating point array of this library.

        Args:
            array: Array of this library, NumPy array, or nested lists of numbers.
            operation: Operation that an error message names.
            name: Argument that an error message names.

        Raises:
            ArgumentTypeError: If the argument does not hold real numbers, or is on another device.
        """

    def count_changes(self, arrays: Sequence[Any]) -> list[int]:
        """Return how often each array was changed in place; nothing for those whose changes the library does not count.

        Args:
            arrays: Arrays and any other objects.
        """

    def working_dtype(self, *arrays: Array) -> Any:
        """Return the dtype that scores are computed in: the widest of the arrays' dtypes, float32 at least.

        Args:
            *arrays: Query, key and possibly value.
        """

    def cast(self, array: Array, dtype: Any) -> Array:
        """Convert an array to another dtype; return it unchanged if it has that dtype.

        Args:
            array: Array of this library.
            dtype: Dtype of this library.
        """

    def take(self, array: Array, pairs: IntArray, positions: IntArray, dtype: Any) -> Array:
        """Take some pairs and positions of an array, as a view if possible.

        Args:
            array: (own pairs, length, dim).
            pairs: Index into the own pairs: (g,).
            positions: Index into the length: (n,).
            dtype: Dtype of the result.

        Returns:
            (g, n, dim), or (1, n, dim) if all entries of `pairs` are equal.
        """

    # The block loop

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        """Compute scale · query keyᵀ.

        Args:
            query: (g or 1, r, head_dim).
            key: (g or 1, c, head_dim).
            scale: Factor of the products.

        Returns:
            (g, r, c).
        """

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        """Compute exp(scores − shift) without changing the scores.

        Args:
            scores: (g, r, c).
            shift: Shift of each row: (g, r, 1).
        """

    def compute_weights(
        self, query: Array, key: Array, lse: Array, allowed: Array | None, buffers: list[Array]
    ) -> tuple[Array, Array]:
        """Compute the weights of a tile from the lse of a fused kernel.

        Args:
            query: Scaled queries: (g or 1, r, head_dim).
            key: (g or 1, c, head_dim).
            lse: Logsumexp of each row: (g, r, 1).
            allowed: 1 where a query may attend to a key and 0 elsewhere, (g or 1, r, c); None for 1 everywhere.
            buffers: Memory to reuse; empty at the first call, filled by the engine.

        Returns:
            query keyᵀ − lse, at most 0, and its exponential times `allowed`: (g, r, c) each.
        """

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        """Reduce consecutive segments of an axis.

        Args:
            array: (g, r, c).
            sizes: Length of each segment; they add up to the length of the axis.
            axis: −1 or −2.
            reduce: "sum" or "max".

        Returns:
            The array with `len(sizes)` entries along the axis.
        """

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        """Find the k largest weights of each row, in any order. NaN ranks highest.

        Args:
            weights: (…, c).
            k: Number of weights, at most c.

        Returns:
            The weights and their columns, (…, k) each. Of equal weights above 0, the lowest columns.
        """

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager in which NaN and inf raise no warning and no dtype is lowered (autocast)."""

    # The compiled pass

    def name_compiled_pass(self, problem: Problem) -> str:
        """Return the name of the compiled pass for built-in measures; empty if the block loop must compute them.

        Args:
            problem: Matrix in canonical form.
        """

    def can_accumulate(self, problem: Problem, accumulator: Accumulator) -> bool:
        """Return whether the compiled pass of a problem has an accumulator; the block loop computes the others.

        Args:
            problem: Matrix in canonical form.
            accumulator: What to accumulate.
        """

    def accumulate(
        self,
        problem: Problem,
        accumulators: Sequence[Accumulator],
        known_max: Array | None,
        known_sum: Array | None,
    ) -> tuple[list[Any], Array, Array | None] | None:
        """Run the compiled pass; called only if `name_compiled_pass` returns a name.

        Args:
            problem: Matrix in canonical form.
            accumulators: What to accumulate; if empty, only the statistics are computed.
            known_max: Largest score of each row, or its lse if `known_sum` is None: (g, r). None if unknown.
            known_sum: Σ exp(score − max) of each row: (g, r).

        Returns:
            The array, or the pair of arrays, of each accumulator, and the largest score and the sum of each row. None
            if the block loop must compute them after all.
        """

    def prefers_compiled_pass(self, problem: Problem) -> bool:
        """Return whether the compiled pass is faster than a fused product of the upcast arrays, and needs no lse of it.

        Args:
            problem: Matrix in canonical form.
        """

    def name_measured_product(
        self, problem: Problem, value: Array, accumulators: Sequence[Accumulator]
    ) -> str:
        """Return the name of the kernel that computes `A @ value` and accumulators at once; empty if there is none.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            accumulators: What to accumulate.
        """

    def run_measured_product(
        self, problem: Problem, value: Array, value_index: IntArray, accumulators: Sequence[Accumulator]
    ) -> tuple[Array, list[Any], Array, Array] | None:
        """Compute `A @ value` and accumulators at once; called only if `name_measured_product` returns a name.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            value_index: For each pair of the matrix, its pair in `value`: (pairs,).
            accumulators: What to accumulate.

        Returns:
            Output (pairs, rows, value_dim), the array of each accumulator, and the largest score and the sum of each
            row. None if they must be computed apart after all.
        """

    # Fused kernels

    def can_fuse(self, problem: Problem) -> bool:
        """Return whether a fused kernel may be called for a problem.

        Args:
            problem: Matrix in canonical form.
        """

    def kernel_name(self, problem: Problem) -> str:
        """Return the name of the kernel that `A @ value` runs.

        Args:
            problem: Matrix in canonical form.
        """

    def run_fused_product(
        self, problem: Problem, value: Array, value_index: IntArray
    ) -> tuple[Array, Array | None, str] | None:
        """Compute `A @ value` with a fused kernel.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            value_index: For each pair of the matrix, its pair in `value`: (pairs,).

        Returns:
            Output (pairs, rows, value_dim), lse (pairs, rows) and the name of the kernel; None if the block loop must
            compute the product. The lse is None if the kernel computed it with reduced precision.
        """

    def prepare_fast_product(
        self, query: Array, key: Array, mask: Mask | None, scale: float
    ) -> Callable[[Any, bool], tuple[Array, Array | None, str] | None] | None:
        """Check once whether `A @ value` can run directly on the caller's arrays, in one call of the fused kernel.

        Args:
            query: (…, heads, q_len, head_dim).
            key: (…, kv_heads, kv_len, head_dim).
            mask: Mask of the matrix.
            scale: Factor of the products.

        Returns:
            None if the arguments need conversion first. Otherwise a function of the value, not validated, and of
            whether the lse is used. It returns output, lse and the name of the kernel, or None if the value needs
            validation or conversion. The lse is None if it is not used, or was computed with reduced precision.
        """

    def needs_exact_rows(self, problem: Problem) -> bool:
        """Return whether weights must be normalised by their own row's sum, not by the lse of a fused kernel.

        Args:
            problem: Matrix in canonical form.
        """

    # Gradients

    def requires_grad(self, problem: Problem, *arrays: Array) -> bool:
        """Return whether a gradient is required of the problem's arrays, or of these.

        Args:
            problem: Matrix in canonical form.
            *arrays: Further arrays, such as a value.
        """

    def differentiate(
        self, problem: Problem, measures: Sequence[LoopMeasure], bands: Sequence[IntArray]
    ) -> list[Any]:
        """Compute measures with gradients.

        Args:
            problem: Matrix in canonical form.
            measures: Measures that share the pass.
            bands: Row indices of each band.

        Returns:
            The result of each measure.
        """

    def checkpoint(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """Call function(*arrays); if a gradient is required, recompute it in the backward pass.

        Args:
            function: Function of arrays that returns an array.
            *arrays: Its arguments.
        """

    @property
    def no_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager without gradients: the block loop writes into its states."""

    @property
    def enable_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager with gradients, for views that are kept and used again."""
