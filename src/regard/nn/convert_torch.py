"""To and from `torch.nn.MultiheadAttention`: the same weights in the other's places."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks import Mask, dense
from regard.nn.attention import MultiheadAttention
from regard.score_mods import ScoreMod, bias

Tensor = Any  # the types of torch are not followed


def from_torch(module: Any) -> MultiheadAttention:
    """See `MultiheadAttention.from_torch`."""
    if not isinstance(module, nn.MultiheadAttention):
        raise ArgumentTypeError(
            "from_torch",
            received=describe_argument(module),
            expected="a torch.nn.MultiheadAttention",
            hint="For another module copy its weights into q_proj, k_proj, v_proj and out_proj of a new layer.",
        )
    like = module.out_proj.weight
    layer = MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        kdim=module.kdim,
        vdim=module.vdim,
        bias=module.in_proj_bias is not None,
        dropout=module.dropout,
        sink=0.0 if module.add_zero_attn else None,  # a key of zeros scores 0, its value adds nothing
        bias_kv=module.bias_k is not None,
        device=like.device,
        dtype=like.dtype,
    )
    with torch.no_grad():
        for ours, theirs in zip(_parameters(layer), _torch_parameters(module), strict=True):
            ours.copy_(theirs.reshape(ours.shape))
    layer.train(module.training)
    return layer


def to_torch(layer: MultiheadAttention, *, batch_first: bool = True) -> Any:
    """See `MultiheadAttention.to_torch`."""
    zero = isinstance(layer.sink, int | float) and layer.sink == 0
    biases = {x.bias is not None for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)}
    without_a_place = {
        "grouped heads": layer.grouped,
        "a head_dim that is not embed_dim / num_heads": layer.head_dim * layer.num_heads != layer.embed_dim,
        "rope": layer.rope is not None,
        "a norm of queries and keys": layer.q_norm is not None,
        "a scale of its own": layer.scale not in (None, layer.head_dim**-0.5),
        "a sink that is not fixed at 0": layer.sink is not None and not zero,
        "a bias for some projections only": len(biases) > 1,
    }
    if any(without_a_place.values()):
        raise ArgumentError(
            "to_torch",
            received="a layer with " + ", ".join(name for name, there in without_a_place.items() if there),
            expected="what torch.nn.MultiheadAttention has: equal heads, one scale, no positions",
            hint="Keep the layer as it is, or make it without them.",
        )
    module = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=biases == {True},
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=zero,
        kdim=layer.k_proj.in_features,
        vdim=layer.v_proj.in_features,
        batch_first=batch_first,
        device=layer.out_proj.weight.device,
        dtype=layer.out_proj.weight.dtype,
    )
    with torch.no_grad():
        for ours, theirs in zip(_parameters(layer), _torch_parameters(module), strict=True):
            theirs.copy_(ours.reshape(theirs.shape))
    return module.train(layer.training)


def _parameters(layer: MultiheadAttention) -> list[Tensor]:
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    found = [x.weight for x in projections] + [x.bias for x in projections] + [layer.bias_k, layer.bias_v]
    return [x for x in found if x is not None]


def _torch_parameters(module: Any) -> list[Tensor]:
    """The same, in the same order; parts of a packed parameter are views of it."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    found = [*weights, module.out_proj.weight, *biases, module.out_proj.bias, module.bias_k, module.bias_v]
    return [x for x in found if x is not None]


def torch_masks(
    num_heads: int, *, attn_mask: Tensor = None, key_padding_mask: Tensor = None
) -> dict[str, Mask | list[ScoreMod] | None]:
    """The masks of `torch.nn.MultiheadAttention` as regard's: `layer(x, **torch_masks(8, attn_mask=…))`.

    `attn_mask` is (q_len, kv_len) or (batch · num_heads, q_len, kv_len), `key_padding_mask` (batch, kv_len) or
    (kv_len,). Booleans mean True = ignore there, numbers are added to the scores.

    >>> torch_masks(2, attn_mask=torch.tensor([[False, True], [False, False]]))["mask"]
    ~dense([[False, True], [False, False]])
    """
    mask: Mask | None = None
    added: list[ScoreMod] = []
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))  # (batch, heads, q_len, kv_len)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[..., None, None, :]  # (batch, heads 1, q_len 1, kv_len)
    for given in (attn_mask, key_padding_mask):
        if given is None:
            continue
        if given.dtype == torch.bool:
            mask = (
                dense(given, true_means="ignore")
                if mask is None
                else mask & dense(given, true_means="ignore")
            )
        else:
            added.append(bias(given))
    return {"mask": mask, "score_mod": added}
