"""The rotary positions that a configuration states: the angles of the pairs, and the factor of queries and keys."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.capture.module_hints import read_setting

Tensor = Any  # the types of torch are not followed


@dataclass(frozen=True)
class ConfiguredRotary:
    """Rotary positions of one layer.

    Args:
        rope_type: "default", "linear", "llama3", "yarn", … as transformers names them.
        theta: Base of the frequencies.
        angles: Radians per token of each pair, float64.
        size: How many numbers of a head turn.
        is_size_stated: Whether that is certain. A class of transformers may turn another share than a configuration
            that states none.
        factor: What queries and keys are multiplied with, each.
    """

    rope_type: str
    theta: float
    angles: Tensor
    size: int
    is_size_stated: bool
    factor: float = 1.0


def compute_angles(theta: float, size: int) -> Tensor:
    """Return the angles without scaling, (size / 2,), float64.

    Args:
        theta: Base of the frequencies.
        size: How many numbers of a head turn.
    """
    return theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def find_configured(config: Any, owner: nn.Module, num_tokens: int, dim: int) -> list[ConfiguredRotary]:
    """Return the rotary positions that a layer may have by its configuration.

    Args:
        config: Configuration of the model, or None. The layer's own comes first.
        owner: The attention layer.
        num_tokens: Length of the sequence, on which some types depend.
        dim: head_dim of the layer.

    Returns:
        One entry, or several if it is not clear which applies. None if there is none, or if it is not understood.
    """
    own = getattr(owner, "config", None)
    config = own if own is not None else getattr(config, "text_config", None) or config
    parameters = read_setting(config, "rope_parameters")
    if not isinstance(parameters, Mapping):
        return []
    by_type = {name: entry for name, entry in parameters.items() if isinstance(entry, Mapping)}
    is_plain = "rope_theta" in parameters or "rope_type" in parameters
    sets: dict[str, Any] = {"": parameters} if is_plain else by_type
    layer_type = find_layer_type(owner, config)
    if layer_type in sets:
        sets = {layer_type: sets[layer_type]}
    is_own_class = not type(owner).__module__.startswith("transformers.")
    try:
        return [
            configured
            for name, entry in sets.items()
            for configured in _build(config, entry, name, num_tokens, dim, is_own_class)
        ]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError, RuntimeError):
        return []  # parameters that differ between layers, or that this version of transformers does not know


def find_layer_type(owner: nn.Module, config: Any) -> str | None:
    """Return the type of a layer, such as "sliding_attention", by its configuration or itself; None if unknown.

    Args:
        owner: The attention layer.
        config: Its configuration.
    """
    types, index = read_setting(config, "layer_types"), getattr(owner, "layer_idx", None)
    if isinstance(types, list | tuple) and isinstance(index, int) and index < len(types):
        return str(types[index])
    named = getattr(owner, "layer_type", None) or getattr(owner, "attention_type", None)
    return named if isinstance(named, str) else None


def _build(
    config: Any, parameters: Any, layer_type: str, num_tokens: int, dim: int, is_own_class: bool
) -> Iterator[ConfiguredRotary]:
    """Yield the rotary positions of one set of parameters; several if the size of the head or the length is unclear."""
    share = parameters.get("partial_rotary_factor")
    # With latent attention, a part of the head turns, which some configurations also call head_dim.
    stated = [getattr(config, name, None) for name in ("qk_rope_head_dim", "head_dim")]
    head_dims = [int(head_dim) for head_dim in stated if head_dim]
    for head_dim in dict.fromkeys(head_dims or [config.hidden_size // config.num_attention_heads]):
        size = int(head_dim * (share or 1.0))
        if not 1 < size <= dim:
            continue
        is_size_stated = is_own_class or share is not None
        for angles, factor in _compute(config, parameters, layer_type, num_tokens, head_dim, size):
            rope_type, theta = parameters.get("rope_type", "default"), float(parameters["rope_theta"])
            yield ConfiguredRotary(rope_type, theta, angles, size, is_size_stated, factor)


def _compute(
    config: Any, parameters: Any, layer_type: str, num_tokens: int, head_dim: int, size: int
) -> Iterator[tuple[Tensor, float]]:
    """Yield angles and factor, by the functions of transformers if they are scaled; twice for LongRoPE."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        yield compute_angles(float(parameters["rope_theta"]), size), 1.0
        return
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(config, transformers.PreTrainedConfig):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(config)  # the functions complete its parameters in place
    config.head_dim = head_dim
    lengths = [num_tokens]
    if rope_type == "longrope":  # other factors for long texts, which some models keep for short ones
        limit = int(parameters["original_max_position_embeddings"])
        lengths.append(limit if num_tokens > limit else limit + 1)
    options = {"layer_type": layer_type} if layer_type else {}
    for length in lengths:
        angles, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu", seq_len=length, **options)
        yield angles.double(), float(factor)
