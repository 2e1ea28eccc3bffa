"""Find the engine of some arrays, and register engines of other array libraries."""

from __future__ import annotations

import sys
from typing import Any

from regard.engines.numpy import NumpyEngine
from regard.errors import ArgumentTypeError, describe_argument
from regard.problem import Engine

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
            expected="an engine instance with its own name",
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
                    is_old = str(error.name).startswith("torch.")
                    lacking = f", which has no {error.name}" if is_old else f", without {error.name}"
                    raise ArgumentTypeError(
                        operation,
                        received=f"tensors of torch {torch.__version__}{lacking}",
                        expected="torch 2.9 or newer" if is_old else "the torch extra installed",
                        hint=f"pip install {'--upgrade ' * is_old}'regard[torch]'",
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
