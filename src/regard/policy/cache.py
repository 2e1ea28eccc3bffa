"""`build_cache`: a transformers cache that stores the tokens a policy keeps, and nothing else."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.policy.attention_function import register
from regard.policy.cache_layer import NAME, Handover, PolicyLayer
from regard.policy.tested_families import TESTED_FAMILIES
from regard.policy.window_sizes import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from regard.policy.policy import CachePolicy

Tensor = Any  # the types of torch are not followed

# Layer types with keys and values of every token.
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Layer types without: their own cache layer is used.
STATE_TYPES = ("conv", "linear_attention", "mlp", "moe")

# Families that read or build their cache in a way of their own: what they have, and why it cannot be served.
OWN_CACHES = {
    "minimax": ("a cache of its own", "it accepts no other class"),
    "whisper": ("the decoder of Whisper", "its outputs in chunks were not those of the masks"),
    "mllama_text_model": (
        "cross-attention in its decoder",
        "its cross-attention keys have no distance to a query",
    ),
}


class PolicyCache(Cache):  # type: ignore[misc]
    """Cache whose attention layers store what a policy keeps; `policy.cache(model)` returns one.

    Args:
        layers: One cache layer for each layer of the model.
    """

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of keys and values."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, PolicyLayer))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all layers, or of none.

        Args:
            tokens_to_remove: Minus their number; 0 releases what `activate_past_recording` keeps.

        Raises:
            ArgumentError: If the number is positive, or tokens of a window were evicted since.
        """
        blocked = [
            layer
            for layer in self.layers
            if isinstance(layer, PolicyLayer) and not layer.can_crop(-tokens_to_remove)
        ]
        for layer in [*blocked, *self.layers]:
            layer.crop(tokens_to_remove)


def build_cache(policy: CachePolicy, model: PreTrainedModel) -> Cache:
    """Return an empty cache for a model.

    Args:
        policy: The windows and sinks of each kv head.
        model: A decoder of transformers.

    Returns:
        A `DynamicCache` of transformers if the configuration of the model says what the policy says. Otherwise a
        `PolicyCache`, and the attention implementation of the model is set to "regard_policy".

    Raises:
        ArgumentError: If the policy has another number of layers or heads, or the family cannot be served.
        ArgumentTypeError: If the model is none of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(
            "policy.cache",
            received=describe_argument(model),
            expected="a model of transformers",
            hint="Apply the policy to other models as masks: regard.interventions.restrict.",
        )
    if model.config.is_encoder_decoder:
        raise _refuse(
            model, "an encoder and a decoder", "its cross-attention keys have no distance to a query"
        )
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise _refuse(model, "no argument past_key_values", "its state is not a cache of keys and values")
    config = model.config.get_text_config(decoder=True)
    if config.model_type in OWN_CACHES:
        raise _refuse(model, *OWN_CACHES[config.model_type])
    layer_types, settings = _read_layer_types(model, config)
    rows = _match_layers(policy, model, layer_types)
    if says_config(policy, config, layer_types, rows):
        return DynamicCache(config=config)
    _set_implementation(model, config)
    if config.model_type not in TESTED_FAMILIES:
        warnings.warn(
            f"policy.cache: the family {config.model_type!r} has not been tested. Compare its outputs with those of "
            "the policy as masks: regard.interventions.restrict.",
            stacklevel=3,
        )
    handover = Handover(config, type(model).__name__)
    layers = []
    for index, (layer_type, options) in enumerate(zip(layer_types, settings, strict=True)):
        if index not in rows:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**options))
            continue
        windows = [None if window == FULL else int(window) for window in policy.windows[rows[index]]]
        # The mask of the model hides what is behind its own window.
        if layer_type == "sliding_attention":
            own = options["sliding_window"]
            windows = [own if window is None else min(window, own) for window in windows]
        layers.append(PolicyLayer(windows, [int(count) for count in policy.sinks[rows[index]]], handover))
    return PolicyCache(layers=layers)


def says_config(
    policy: CachePolicy, config: PreTrainedConfig, layer_types: list[str], rows: dict[int, int]
) -> bool:
    """Return whether the sliding layers of a configuration are exactly the windows of a policy.

    Args:
        policy: The policy.
        config: Configuration of the decoder.
        layer_types: Type of each layer.
        rows: Row of the policy for each attention layer.
    """
    windows = np.asarray(policy.windows)
    if getattr(config, "layer_types", None) is None or (np.asarray(policy.sinks)[windows != FULL] != 0).any():
        return False
    for index, row in rows.items():
        own = config.sliding_window if layer_types[index] == "sliding_attention" else FULL
        if layer_types[index] == "chunked_attention" or (windows[row] != own).any():
            return False
    return True


def _read_layer_types(
    model: PreTrainedModel, config: PreTrainedConfig
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the type of each layer and the arguments of its cache layer; raise if a type cannot be served."""
    if getattr(config, "num_kv_shared_layers", None):
        raise _refuse(
            model, "layers that share keys and values", "a policy per layer cannot evict shared keys"
        )
    if getattr(config, "kv_lora_rank", None):
        raise _refuse(
            model, "multi-head latent attention", "all heads share one cached latent for each token"
        )
    layer_types, settings = get_layer_types_and_kwargs(config)
    for layer_type in layer_types:
        if layer_type not in (*ATTENTION_TYPES, *STATE_TYPES):
            raise _refuse(
                model, f"layers of type {layer_type!r}", "their cache holds more than keys and values"
            )
    if not any(layer_type in ATTENTION_TYPES for layer_type in layer_types):
        raise _refuse(model, "no attention layer", "it has no cache of keys and values")
    return layer_types, settings


def _match_layers(policy: CachePolicy, model: PreTrainedModel, layer_types: list[str]) -> dict[int, int]:
    """Return the row of the policy for each attention layer, by the module's own index or in order."""
    expected = [index for index, layer_type in enumerate(layer_types) if layer_type in ATTENTION_TYPES]
    modules = dict(model.named_modules())
    named = [getattr(modules.get(name), "layer_idx", -1) for name in policy.layers]
    found = named if sorted(named) == expected else expected
    if len(found) != len(policy.windows):
        raise ArgumentError(
            "policy.cache",
            received=f"a policy of {len(policy.windows)} layers for {len(expected)} attention layers",
            expected="a policy with one row for each attention layer of the model",
            hint="Make the policy from a survey of this model.",
        )
    return {index: row for row, index in enumerate(found)}


def _set_implementation(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Let the decoder use the attention function of the policy; other parts of the model keep theirs."""
    register()
    if config._attn_implementation == NAME:
        return
    reason = "its attention code does not use the AttentionInterface of transformers"
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is config]
    try:
        model.set_attn_implementation({names[0]: NAME} if names else NAME)
    except ValueError as error:
        raise _refuse(model, "its own attention", reason) from error
    if config._attn_implementation != NAME:
        raise _refuse(model, "its own attention", reason)


def _refuse(model: PreTrainedModel, received: str, reason: str) -> ArgumentError:
    return ArgumentError(
        "policy.cache",
        received=f"{type(model).__name__} with {received}",
        expected="a decoder that computes attention through the AttentionInterface of transformers",
        hint=f"It cannot be served, because {reason}. Apply the policy as masks: regard.interventions.restrict.",
    )
