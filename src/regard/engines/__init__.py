"""Engines: the operations that differ between NumPy, torch and other array libraries; all other code is shared.

`find_engine` returns the engine of some arrays, without importing a library that the caller has not imported;
`register` adds an engine. This package may import masks, score_mods and the modules below them.

Design notes:
- The CPU flash operator has limits, found by the case matrix: it misreads a last axis that is not contiguous;
  a scale of 0 or below turns causal rows into NaN; a mask tile is read in the dtype of the query; a row of NaN scores
  may come back as zeros; an empty row's lse is 0; an empty axis ends the process. Such calls go to the block loop.
- `torch_kernels` is the only module that calls private operators. Each is compared with the formula before first use.
- Rows from the middle of a causal matrix are split at the corner of the diagonal: one full and one causal call.
- Biases are added to the mask tile of a fused call; sinks are merged into output and lse afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from regard._public import set_public_module
from regard.engines.array_api import ArrayEngine
from regard.engines.numpy import NumpyEngine
from regard.errors import ArgumentTypeError, describe_argument
from regard.types import Array, IntArray, Namespace

if TYPE_CHECKING:
    from regard.core.block_loop import LoopMeasure
    from regard.core.problem import Problem
    from regard.masks import Mask

__all__ = ["ArrayEngine", "Engine", "find_engine", "get_engine", "register"]


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
        """Array API namespace that masks, score modifications and measures compute with."""

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
            query keyᵀ − lse, and its exponential times `allowed`: (g, r, c) each.
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
    ) -> tuple[Array, Array, str] | None:
        """Compute `A @ value` with a fused kernel.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            value_index: For each pair of the matrix, its pair in `value`: (pairs,).

        Returns:
            Output (pairs, rows, value_dim), lse (pairs, rows) and the name of the kernel; None if the block loop must
            compute the product.
        """

    def try_fast_product(
        self, query: Array, key: Array, value: object, mask: Mask | None, scale: float
    ) -> tuple[Array, Array, str] | None:
        """Compute `A @ value` directly from the caller's arrays if they are what the fused kernel takes.

        Args:
            query: (…, heads, q_len, head_dim).
            key: (…, kv_heads, kv_len, head_dim).
            value: Argument of `A @ value`, not validated.
            mask: Mask of the matrix.
            scale: Factor of the products.

        Returns:
            Output, lse and the name of the kernel; None if the arguments need validation or conversion first.
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


_TORCH_ENGINES: dict[Any, Engine] = {}
_REGISTERED: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    """Register an engine, so that `regard.attention` accepts the arrays that it owns.

    An engine of the same name is replaced. `regard.testing.check_case(case, inputs, [engine.name])` runs the generated
    cases that the built-in engines are tested with.

    Args:
        engine: Instance of a subclass of `ArrayEngine`, or of a class that implements `Engine`.

    Raises:
        ArgumentTypeError: If a method of `Engine` is missing, or the name is empty, "numpy" or "torch".

    >>> import numpy as np, regard
    >>> from regard.engines import ArrayEngine, register
    >>> class Mine(np.ndarray):  # stands for the array of another library
    ...     pass
    >>> class MyEngine(ArrayEngine):
    ...     name, xp = "mine", np
    ...     def owns(self, array):
    ...         return type(array).__name__ == "Mine"
    ...     def to_numpy(self, array):
    ...         return np.asarray(array)
    >>> register(MyEngine())
    >>> query = np.ones((2, 4)).view(Mine)
    >>> regard.attention(query, query).kernel
    'mine: block loop'
    """
    missing = [name for name in vars(Engine) if not name.startswith("_") and not hasattr(engine, name)]
    valid = not missing and not isinstance(engine, type) and engine.name not in ("", "numpy", "torch")
    if not valid:
        received = f"the class {engine.__name__}" if isinstance(engine, type) else describe_argument(engine)
        if missing:
            received += f" without {', '.join(missing[:3])}" + (" …" if len(missing) > 3 else "")
        elif not isinstance(engine, type):
            received += f" named {engine.name!r}"
        raise ArgumentTypeError(
            "register",
            received=received,
            expected="an engine with a name of its own",
            hint="Subclass regard.engines.ArrayEngine and pass an instance: register(MyEngine()).",
        )
    _REGISTERED[engine.name] = engine


def get_engine(name: str) -> Engine:
    """Return the registered engine of a name.

    Args:
        name: Name of an engine that was passed to `register`.

    Raises:
        ArgumentTypeError: If no engine of that name is registered.

    >>> import numpy as np
    >>> from regard.engines import ArrayEngine, get_engine, register
    >>> class Other(ArrayEngine):
    ...     name, xp = "other", np
    ...     def owns(self, array):
    ...         return False
    >>> register(Other())
    >>> get_engine("other").kernel_name(None)
    'other: block loop'
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    raise ArgumentTypeError(
        "engines.get_engine",
        received=f"the name {name!r}",
        expected=f"one of {', '.join(map(repr, _REGISTERED))}"
        if _REGISTERED
        else "a registered engine; none is registered",
        hint="Register it first: regard.engines.register(MyEngine()).",
    )


def find_engine(operation: str, **arrays: object) -> Engine:
    """Return the engine that some arrays belong to.

    Args:
        operation: Operation that an error message names.
        **arrays: The arrays by argument name.

    Raises:
        ArgumentTypeError: If no engine takes one of the arrays.

    >>> import numpy as np
    >>> from regard.engines import find_engine
    >>> find_engine("example", query=np.ones(2)).name
    'numpy'
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        for array in arrays.values():
            if isinstance(array, torch.Tensor):
                if array.device in _TORCH_ENGINES:
                    return _TORCH_ENGINES[array.device]
                try:
                    from regard.engines.torch import TorchEngine
                except ImportError as error:
                    raise ArgumentTypeError(
                        operation,
                        received=f"torch tensors, without {error.name}",
                        expected="the torch extra installed",
                        hint="pip install 'regard[torch]'",
                    ) from None
                return _TORCH_ENGINES.setdefault(array.device, TorchEngine(array.device))
    for registered in _REGISTERED.values():
        if any(map(registered.owns, arrays.values())):
            return registered
    engine = NumpyEngine()
    for name, array in arrays.items():
        if not engine.owns(array):
            raise ArgumentTypeError(
                operation,
                received=f"{name} as {describe_argument(array)} from {type(array).__module__}",
                expected="NumPy arrays, torch tensors, or nested lists of numbers",
                hint="Convert it first: numpy.asarray(array). Or register an engine for it: regard.engines.register.",
            )
    return engine


set_public_module(globals())
