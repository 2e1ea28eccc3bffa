"""The attention function and the mask function that transformers calls for a model with a policy's cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)

from regard.errors import ArgumentError
from regard.policy.cache_layer import NAME, PolicyLayer
from regard.policy.head_attention import ScoreOptions
from regard.transformers.attention_function import REFUSED_ARGUMENTS, attention_forward, supports_sdpa

Tensor = Any  # the types of torch are not followed


def register() -> None:
    """Register the attention function and the mask function with transformers."""
    AttentionInterface.register(NAME, policy_attention)
    AttentionMaskInterface.register(NAME, policy_mask)


def policy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask of a model, without the n² booleans where it consists of causality and padding.

    Args:
        batch_size: Number of batch entries.
        q_length: Number of queries.
        kv_length: Number of positions.
        q_offset: Position of the first query.
        kv_offset: First position.
        mask_function: Mask by batch entry, head, query and key.
        attention_mask: Tokens that are not padding, (batch, positions).
        **kwargs: Arguments of the mask function of `sdpa`.

    Returns:
        None if nothing is masked but later positions; (batch, 1, 1, positions) if padding is, too;
        (batch, 1, queries, positions) for other masks.
    """
    is_causal = mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True)
    # Layers of a family without `sdpa` do not declare that they are causal, and need the mask with another cache.
    is_causal = is_causal and supports_sdpa(kwargs.get("config"))
    if is_causal and kv_offset == 0 and isinstance(q_offset, int) and q_offset + q_length == kv_length:
        if attention_mask is None:
            return None
        padding = attention_mask[:, :kv_length].bool()
        if padding.shape[1] == kv_length:
            return None if bool(padding.all()) else padding[:, None, None]
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs | {"allow_is_causal_skip": False},
    )


def policy_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute the attention of a layer over the tokens that its cache keeps, or over all without such a cache.

    Args:
        module: The layer.
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, q_len, head_dim), as `PolicyLayer.update` returned it.
        value: (batch, kv_heads, q_len, value_dim), alike.
        attention_mask: As `policy_mask` returned it, or a mask of the caller over all positions.
        dropout: Dropout probability of the weights.
        scaling: Factor of the scores; None for 1/√head_dim.
        **kwargs: Further arguments of the model; `softcap` and `s_aux` have a meaning.

    Returns:
        The output, (batch, q_len, heads, value_dim), and None.

    Raises:
        ArgumentError: If the model needs an argument that only `sdpa` supports, or weights are requested.
    """
    layer = getattr(key, "policy_layer", None)
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not isinstance(layer, PolicyLayer) or not layer.is_staged(key, value):
        if is_causal:
            attention_mask = _add_causality(attention_mask, query, key)
        others = kwargs | {"dropout": dropout, "scaling": scaling}
        return attention_forward(module, query, key, value, attention_mask, **others)
    if not is_causal:
        raise ArgumentError(
            "policy.cache",
            received=f"{type(module).__name__}, which attends to later tokens",
            expected="a decoder, whose tokens attend to earlier ones",
            hint="Set is_decoder=True in the configuration if the model has it.",
        )
    refused = REFUSED_ARGUMENTS | {"position_bias": "a bias for each pair of positions"}
    if kwargs.get("output_attentions"):
        refused = refused | {"output_attentions": "output_attentions=True"}
    for name, meaning in refused.items():
        if kwargs.get(name) is not None:
            raise ArgumentError(
                "policy.cache",
                received=f"{meaning} in {type(module).__name__}",
                expected="a model that passes a mask",
                hint="Apply the policy as masks instead: regard.interventions.restrict.",
            )
    sink = kwargs.get("s_aux")
    softcap = kwargs.get("softcap")
    if dropout and (sink is not None or softcap is not None):
        raise ArgumentError(
            "policy.cache",
            received=f"dropout of {dropout:g} in a layer with a soft cap or a sink",
            expected="no dropout of the weights",
            hint="Call model.eval().",
        )
    options = ScoreOptions(scaling, dropout, softcap, None if sink is None else sink.detach().reshape(-1))
    return layer.attend(query, attention_mask, options), None


def _add_causality(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Add to a mask the causality that `policy_mask` left out, for another cache or none."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    is_short = mask is not None and mask.dtype == torch.bool and mask.shape[-2] == 1
    if q_len == 1 or not (is_short or (mask is None and kv_len > q_len)):
        return mask
    causal = torch.ones((q_len, kv_len), dtype=torch.bool, device=query.device).tril(kv_len - q_len)
    return causal if mask is None else mask & causal
