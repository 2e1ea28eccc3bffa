"""Load a model from a function of the user: `module:function`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.models.loaded_model import LoadedModel, model_info
from regard.models.optional_imports import first_line, import_optional


def import_function(path: str, operation: str = "load") -> Callable[..., Any]:
    """Import the function that `module:function` names; the module may lie in the current directory.

    Args:
        path: Module and function, separated by a colon.
        operation: Name of the calling function, for error messages.

    Returns:
        The function.

    Raises:
        ArgumentError: If there is no colon, the module cannot be imported, or it has no such function.

    >>> import_function("regard:attention").__name__
    'attention'
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(
            operation,
            received=repr(path),
            expected="module:function, e.g. my_package.attention:forward",
            hint="Write the module path, a colon and the name of the function.",
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(
            operation,
            received=f"{path!r} ({error})",
            expected="a module that can be imported",
            hint="Run from the directory that contains it, omit .py, and install its dependencies.",
        ) from error
    try:
        return functools.reduce(getattr, name.split("."), module)  # type: ignore[no-any-return]
    except AttributeError:
        public = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise ArgumentError(
            operation,
            received=repr(path),
            expected=f"a function of {module_name}, which has {', '.join(public[:12]) or 'none'}",
            hint="Check the name after the colon.",
        ) from None


def load_from_function(name: str, dtype: str | None) -> LoadedModel:
    """Call `module:function`, which returns a model or (model, tokenizer).

    Args:
        name: Module and function, separated by a colon.
        dtype: Convert the weights to this dtype; None and "auto" leave them as they are.

    Returns:
        The model in eval mode.

    Raises:
        ArgumentError: If the function cannot be imported, or raises.
        ArgumentTypeError: If the function returns something else.
    """
    torch = import_optional("torch", "torch")
    function = import_function(name)
    try:
        returned = function()
    except Exception as error:
        raise ArgumentError(
            "load",
            received=f"{name}, which raised {type(error).__name__}: {first_line(error)}",
            expected="a function without arguments that returns a model, or (model, tokenizer)",
            hint="Call it in Python to see where it fails.",
        ) from error
    model, tokenizer = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            "load",
            received=f"{describe_argument(model)} from {name}()",
            expected="a torch.nn.Module, or (model, tokenizer)",
            hint="Return the model itself; a pipeline has it as pipeline.model.",
        )
    if tokenizer is not None and not callable(tokenizer) and not hasattr(tokenizer, "encode"):
        raise ArgumentTypeError(
            "load",
            received=f"a tokenizer that is {describe_argument(tokenizer)} from {name}()",
            expected="a transformers tokenizer, an object with encode and decode, or a function that maps text to ids",
            hint="Return (model, tokenizer), or the model alone if it reads bytes.",
        )
    if dtype not in ("auto", None):
        model = model.to(getattr(torch, dtype))
    return LoadedModel(name, model.eval(), tokenizer, (), model_info(model))
