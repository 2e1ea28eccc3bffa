"""Engines: what differs between NumPy and other array libraries, and nothing else.

An engine is about a dozen primitives on canonical arguments; everything above it is written once. The engine is
found from the array itself, without importing a library that the caller has not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from regard._public import set_public_module
from regard.engines.array_api import ArrayEngine
from regard.engines.numpy import NumpyEngine
from regard.errors import ArgumentTypeError, describe_argument
from regard.types import Array, IntArray, Namespace

__all__ = ["ArrayEngine", "Engine", "find_engine", "get_engine", "register"]


class Engine(Protocol):
    """What the block loop asks of an array library. Shapes: g pairs of (batch, head), r rows, c columns.

    >>> import numpy as np
    >>> engine = find_engine("here", query=np.ones(2))
    >>> engine.compute_scores(np.ones((1, 2, 4)), np.ones((1, 3, 4)), scale=0.5)
    array([[[2., 2., 2.],
            [2., 2., 2.]]])
    """

    @property
    def name(self) -> str:
        """The library, as it is written in messages."""

    def owns(self, array: Any) -> bool:
        """Whether the array is this library's."""

    def kernel_name(self, problem: Any) -> str:
        """What runs for `A @ value`."""

    def can_fuse(self, problem: Any) -> bool:
        """Whether a fused kernel may be called."""

    def fused_product(
        self, problem: Any, value: Array, value_of: IntArray
    ) -> tuple[Array, Array, str] | None:
        """Output, lse and what ran, from a fused kernel; None where the block loop must do it."""

    def needs_exact_rows(self, problem: Any) -> bool:
        """Whether weights must not be recomputed from the lse of a fused kernel, but from their own row's sum."""

    def requires_grad(self, problem: Any, *arrays: Array) -> bool:
        """Whether a gradient is wanted of what the matrix is made of, or of these."""

    def differentiate(self, problem: Any, measures: Any, bands: Any) -> list[Any]:
        """The results of measures, with gradients."""

    def checkpoint(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """function(*arrays), for a gradient computed again on the way back rather than kept."""

    def try_fast_product(self, query: Array, key: Array, value: Any, mask: Any, scale: float) -> Any:
        """Output and lse of the plainest call, without settling anything; None where it is not so plain."""

    @property
    def xp(self) -> Namespace:
        """The array API namespace that masks, score modifications and measures compute with."""

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which NaN and inf pass without a warning, and no dtype is lowered."""

    @property
    def no_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context without gradients: the loop writes into its states."""

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        """The array as floating point numbers of this engine, or a refusal that names it."""

    def working_dtype(self, *arrays: Array) -> Any:
        """The dtype scores are computed in: float32 at least, whatever the arrays are kept in."""

    def cast(self, array: Array, dtype: Any) -> Array:
        """The array in another dtype, itself where it has it already."""

    def take(self, array: Array, leads: IntArray, positions: IntArray, dtype: Any) -> Array:
        """`(g, len(positions), dim)` of an array `(own, length, dim)`; `(1, …)` where all leads are the same."""

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        """scale · query keyᵀ: `(g, r, c)`."""

    def compute_weights(
        self, query: Array, key: Array, shift: Array, allowed: Array | None, buffers: list[Array]
    ) -> tuple[Array, Array]:
        """query keyᵀ − shift, and its exponential times `allowed` (1 or 0): `(g, r, c)`; `buffers` is to use again.

        Asked only where the shift is the lse of a fused kernel.
        """

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        """exp(scores − shift), a shift for each row; the scores are left as they are."""

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        """The "sum" or "max" of each of the runs, of these sizes, that an axis is cut into."""

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        """The k largest of each row and their columns, in any order: NaN above all, of equals (not 0) the first."""

    def to_numpy(self, array: Array) -> Any:
        """The array as NumPy's, for indices."""


_TORCH_ENGINES: dict[Any, Engine] = {}
_REGISTERED: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    """Make `regard.attention` take the arrays of another library: those that `engine.owns`.

    Most engines subclass `ArrayEngine`, which needs four things of them; `Engine` says what one may do by itself. An
    engine of the same name is replaced. `regard.testing.check(case, inputs, [engine.name])` holds it to the cases that
    the engines here are held to.

    >>> import numpy as np, regard
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
    'mine: streaming tiles'
    """
    missing = [name for name in vars(Engine) if not name.startswith("_") and not hasattr(engine, name)]
    named = not missing and not isinstance(engine, type) and engine.name not in ("", "numpy", "torch")
    if not named:
        what = f"the class {engine.__name__}" if isinstance(engine, type) else describe_argument(engine)
        if missing:
            what += f" without {', '.join(missing[:3])}" + (" …" if len(missing) > 3 else "")
        elif not isinstance(engine, type):
            what += f" named {engine.name!r}"
        raise ArgumentTypeError(
            "register",
            received=what,
            expected="an engine with a name of its own",
            hint="Subclass regard.engines.ArrayEngine, and give an instance: register(MyEngine()).",
        )
    _REGISTERED[engine.name] = engine


def get_engine(name: str) -> Engine:
    """The engine that was registered by a name.

    >>> import numpy as np
    >>> class Other(ArrayEngine):
    ...     name, xp = "other", np
    ...     def owns(self, array):
    ...         return False
    >>> register(Other())
    >>> get_engine("other").kernel_name(None)
    'other: streaming tiles'
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    raise ArgumentTypeError(
        "engines.get_engine",
        received=f"the name {name!r}",
        expected=f"one of {', '.join(map(repr, _REGISTERED))}"
        if _REGISTERED
        else "an engine, and there is none",
        hint="Register it first: regard.engines.register(MyEngine()).",
    )


def find_engine(operation: str, **arrays: Any) -> Engine:
    """The engine that all these arrays belong to.

    >>> import numpy as np
    >>> find_engine("here", query=np.ones(2)).name
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
    for own in _REGISTERED.values():
        if any(map(own.owns, arrays.values())):
            return own
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
