"""What the models of a family declare: whether they support `sdpa`, and whether they call attention functions."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# By the name of a module of Python.
_support: dict[str, bool] = {}


def supports_sdpa(part: Any) -> bool:
    """Return whether every model of a family supports `sdpa`.

    `sdpa` gets no mask where a layer that declares `is_causal` can do without. The layers of a family that does not
    support `sdpa` declare nothing, so they need every mask, and a call without one attends to every key.

    Args:
        part: A layer of the family, or its configuration.

    Returns:
        True for layers and configurations outside transformers' families, too.
    """
    return bool(_find_support(_find_module_name(part)))


def calls_attention_functions(part: Any) -> bool:
    """Return whether layers of a family call the attention function that `attn_implementation` names.

    A family whose layers compute their own softmax adds the mask to its scores, whatever the mask function returns: a
    boolean one would be wrong there.

    Args:
        part: A layer of the family, or its configuration.

    Returns:
        True for layers and configurations outside transformers' families, too.
    """
    return bool(_find_calls(_find_module_name(part)))


def _find_module_name(part: Any) -> str:
    """Return the name of the module of Python that defines the layers of a family."""
    name = type(part).__module__
    return name if isinstance(part, nn.Module) else name.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled model does not trace it
def _find_calls(module_name: str) -> bool:
    module = sys.modules.get(module_name)
    return module is None or ".modeling_" not in module_name or hasattr(module, "ALL_ATTENTION_FUNCTIONS")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled model does not trace it
def _find_support(module_name: str) -> bool:
    if module_name not in _support:
        names = vars(sys.modules.get(module_name, object)).values()
        models: list[Any] = [
            found
            for found in names
            if isinstance(found, type)
            and issubclass(found, PreTrainedModel)
            and found.__module__ == module_name
        ]
        _support[module_name] = all(model._supports_sdpa for model in models)
    return _support[module_name]
