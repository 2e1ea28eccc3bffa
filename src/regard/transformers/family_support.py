"""What the models of a family support, which decides the masks that its layers get, and what none means."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# By an implementation and the name of a module of Python: whether every model in it supports the implementation.
_support: dict[tuple[str, str], bool] = {}


def supports_sdpa(part: Any) -> bool:
    """Return whether every model of a family supports `sdpa`.

    `sdpa` gets no mask where a layer that declares `is_causal` can do without. The layers of a family that does not
    support `sdpa` declare nothing, so they need every mask, and a call without one attends to every key.

    Args:
        part: A layer of the family, or its configuration.

    Returns:
        True for layers and configurations outside transformers' families, too.
    """
    return bool(_supports("sdpa", _find_module_name(part)))


def needs_added_mask(part: Any) -> bool:
    """Return whether a family supports `eager` alone: its layers may add the mask to their scores, or extend it.

    Args:
        part: A layer of the family, or its configuration.
    """
    name = _find_module_name(part)
    return not any(_supports(implementation, name) for implementation in ("sdpa", "flash_attn", "flex_attn"))


def _find_module_name(part: Any) -> str:
    """Return the name of the module of Python that defines the layers of a family."""
    name = type(part).__module__
    return name if isinstance(part, nn.Module) else name.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled model does not trace it
def _supports(implementation: str, module_name: str) -> bool:
    key = implementation, module_name
    if key not in _support:
        names = vars(sys.modules.get(module_name, object)).values()
        models: list[Any] = [
            found
            for found in names
            if isinstance(found, type)
            and issubclass(found, PreTrainedModel)
            and found.__module__ == module_name
        ]
        _support[key] = all(getattr(model, f"_supports_{implementation}", False) for model in models)
    return _support[key]
