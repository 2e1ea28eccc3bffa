"""Faults planted in tiny models of transformers: each function builds a model, clean or with one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.tiny_models import TINY

SOFTCAP = 0.5  # low, since the scores of a tiny model are small


def build(name: str, plant: Callable[[Any], None] | None = None) -> Any:
    """Build a tiny model in eval mode, and plant a fault."""
    model = TINY[name].build()
    if name == "Gemma 2":
        model.config.attn_logit_softcapping = SOFTCAP
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = SOFTCAP
    if plant is not None:
        plant(model)
    return model


def drop_sinks(model: Any) -> None:
    """Let GPT-OSS run an attention function that does not know sinks, as a forced implementation does."""
    model.config._attn_implementation = "sdpa"
    model.config._attn_implementation_internal = "sdpa"


def drop_softcap(model: Any) -> None:
    """Forget the soft cap in the second layer of Gemma 2."""
    model.model.layers[1].self_attn.attn_logit_softcapping = None


def change_frequencies(model: Any) -> None:
    """Compute rotary frequencies from another base than the configuration's."""
    rotary = model.model.rotary_emb
    dim = 2 * len(rotary.inv_freq)
    rotary.inv_freq.copy_(1e6 ** (-torch.arange(0, dim, 2) / dim))


def widen_window(model: Any) -> None:
    """Let every token of Mistral attend to one key more than the configuration's window."""

    def widen(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None:
            shifted = torch.nn.functional.pad(mask[..., 1:], (0, 1))
            mask = mask | shifted
        return args, kwargs | {"attention_mask": mask}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(widen, with_kwargs=True)


def change_encoder_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a fault that passes changed encoder states to the decoder of T5 or BART."""

    def plant(model: Any) -> None:
        def change_states(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"encoder_hidden_states": change(kwargs["encoder_hidden_states"])}

        model.get_decoder().register_forward_pre_hook(change_states, with_kwargs=True)

    return plant


def drop_encoder_mask(model: Any) -> None:
    """Forget the padding of the encoder in the cross-attention of BART."""

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"encoder_attention_mask": None}

    model.get_decoder().register_forward_pre_hook(drop, with_kwargs=True)


def forget_causality(model: Any) -> None:
    """Pass every layer of Llama an empty mask and no is_causal, as an attention without mask function does."""

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": None, "is_causal": False}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(drop, with_kwargs=True)


def break_weight(model: Any) -> None:
    """Put a NaN into a weight between two attention layers of Llama."""
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan


def positions_without_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return position ids that do not count padding, (batch, n)."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)
