"""Conversion to and from `torch.nn.MultiheadAttention`: weights and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks import Mask, dense
from regard.score_mods import ScoreMod, bias

if TYPE_CHECKING:
    from regard.nn.attention import MultiheadAttention

Tensor = Any  # mypy does not follow torch's types


def build_layer(layer_class: type[MultiheadAttention], module: Any) -> MultiheadAttention:
    """Build a layer from a torch module. See `MultiheadAttention.from_torch`.

    Args:
        layer_class: The class of the layer.
        module: The `torch.nn.MultiheadAttention`.

    Raises:
        ArgumentTypeError: If `module` is anything else.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise ArgumentTypeError(
            "from_torch",
            received=describe_argument(module),
            expected="a torch.nn.MultiheadAttention",
            hint="To convert another module, copy its weights into q_proj, k_proj, v_proj and out_proj of a new layer.",
        )
    like = module.out_proj.weight
    layer = layer_class(
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


def build_torch_module(layer: MultiheadAttention, *, batch_first: bool = True) -> Any:
    """Build a torch module from a layer. See `MultiheadAttention.to_torch`.

    Args:
        layer: The layer.
        batch_first: Whether the module takes (batch, n, embed_dim).

    Raises:
        ArgumentError: If the layer has parts that the module does not support.
    """
    has_zero_sink = isinstance(layer.sink, int | float) and layer.sink == 0
    biases = {x.bias is not None for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)}
    unsupported = {
        "grouped heads": layer.grouped,
        "a head_dim that is not embed_dim / num_heads": layer.head_dim * layer.num_heads != layer.embed_dim,
        "rope": layer.rope is not None,
        "norms of queries and keys": layer.q_norm is not None,
        "a custom scale": layer.scale not in (None, layer.head_dim**-0.5),
        "a sink that is not fixed at 0": layer.sink is not None and not has_zero_sink,
        "a bias for some projections only": len(biases) > 1,
    }
    if any(unsupported.values()):
        raise ArgumentError(
            "to_torch",
            received="a layer with " + ", ".join(name for name, present in unsupported.items() if present),
            expected="only what torch.nn.MultiheadAttention supports: equal heads, the default scale, no positions",
            hint="Keep the layer, or build it without these features.",
        )
    module = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=biases == {True},
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=has_zero_sink,
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
    parameters = (
        [x.weight for x in projections] + [x.bias for x in projections] + [layer.bias_k, layer.bias_v]
    )
    return [x for x in parameters if x is not None]


def _torch_parameters(module: Any) -> list[Tensor]:
    """Return the parameters of a torch module in the order of `_parameters`; parts of a packed one are views."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    parameters = [
        *weights,
        module.out_proj.weight,
        *biases,
        module.out_proj.bias,
        module.bias_k,
        module.bias_v,
    ]
    return [x for x in parameters if x is not None]


def torch_masks(
    num_heads: int, *, attn_mask: Tensor = None, key_padding_mask: Tensor = None
) -> dict[str, Mask | list[ScoreMod] | None]:
    """Convert the masks of `torch.nn.MultiheadAttention`: `layer(x, **torch_masks(8, attn_mask=…))`.

    In torch, True means ignore, and numbers are added to the scores.

    Args:
        num_heads: The number of heads of the layer.
        attn_mask: Booleans or numbers, (q_len, kv_len) or (batch · num_heads, q_len, kv_len).
        key_padding_mask: Booleans or numbers, (batch, kv_len) or (kv_len,).

    Returns:
        The arguments `mask` and `score_mod` of a call of the layer.

    >>> import torch
    >>> torch_masks(2, attn_mask=torch.tensor([[False, True], [False, False]]))["mask"]
    ~dense([[False, True], [False, False]])
    """
    mask: Mask | None = None
    score_mods: list[ScoreMod] = []
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))  # (batch, heads, q_len, kv_len)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[..., None, None, :]  # (batch, heads 1, q_len 1, kv_len)
    for torch_mask in (attn_mask, key_padding_mask):
        if torch_mask is None:
            continue
        if torch_mask.dtype == torch.bool:
            converted = dense(torch_mask, true_means="ignore")
            mask = converted if mask is None else mask & converted
        else:
            score_mods.append(bias(torch_mask))
    return {"mask": mask, "score_mod": score_mods}
