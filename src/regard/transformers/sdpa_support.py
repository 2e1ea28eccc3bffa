"""Whether the models of a family support `sdpa`, which decides what a call without a mask means."""

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
    name = type(part).__module__
    if not isinstance(part, nn.Module):
        name = name.replace(".configuration_", ".modeling_")
    return bool(_find_support(name))


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
