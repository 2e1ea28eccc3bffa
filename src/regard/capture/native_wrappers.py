"""Wrap the fast paths of torch's own layers, which compute projections and attention in one operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.nn import functional as F

from regard.capture.captured_args import CapturedArgs
from regard.capture.patching import unwrap_original
from regard.capture.wrappers import (
    find_obstacle,
    find_running_module,
    notify,
    probe,
    project,
    report_uncaptured,
)

Tensor = Any  # the types of torch are not followed


def wrap_native_multi_head_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch._native_multi_head_attention`, the fast path of `nn.MultiheadAttention`."""

    @wraps(original)
    def native_multi_head_attention(*args: Any) -> Any:
        result = original(*args)
        module = find_running_module()
        if module is not None:
            x, mask, mask_type = args[0], args[9], args[12] if len(args) > 12 else None
            weights = result[1] if result[1] is not None and result[1].numel() else None
            captured = _notify_fast_path(module, "", x, args[3:9], mask, mask_type, weights)
            if captured is not None and captured.edited_output is not None:
                weights = result[1] if captured.edited_weights is None else captured.edited_weights
                return project(captured.edited_output, *args[7:9]), weights
        return result

    return native_multi_head_attention


def wrap_encoder_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch._transformer_encoder_layer_fwd`, the fast path of `nn.TransformerEncoderLayer`."""

    @wraps(original)
    def encoder_layer(*args: Any) -> Any:
        result = original(*args)
        module = find_running_module()
        if module is not None:
            x, mask, mask_type = args[0], args[18], args[19]
            if args[8] and not x.is_nested:  # norm_first
                x = F.layer_norm(x, x.shape[-1:], args[10], args[11], args[9])
            captured = _notify_fast_path(module, "self_attn", x, args[1:7], mask, mask_type)
            if captured is not None and captured.edited_output is not None:
                return _finish_encoder_layer(captured.edited_output, args)
        return result

    return encoder_layer


def _finish_encoder_layer(attended: Tensor, args: Any) -> Tensor:
    """Compute a `nn.TransformerEncoderLayer` from the edited output of its attention and the fused call's arguments."""
    x, out_weight, out_bias, use_gelu, norm_first, eps = (args[i] for i in (0, 5, 6, 7, 8, 9))
    linear1, linear2 = args[14:16], args[16:18]

    def normalise(x: Tensor, first: int) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], args[first], args[first + 1], eps)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, *linear1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), *linear2)

    x = x + project(attended, out_weight, out_bias)
    if norm_first:
        return x + feed_forward(normalise(x, 12))
    x = normalise(x, 10)
    return normalise(x + feed_forward(x), 12)


def _notify_fast_path(
    module: nn.Module,
    submodule: str,
    x: Tensor,
    projections: Any,
    mask: Any,
    mask_type: Any,
    weights: Tensor = None,
) -> CapturedArgs | None:
    """Compute the projections of a fused layer again, and notify the watchers of its query, key and mask.

    Args:
        module: The running module.
        submodule: Name of the attention layer in it.
        x: Its input.
        projections: Width, number of heads, and weights and biases of the projections.
        mask: The mask.
        mask_type: Kind of the mask, as the fused operators define it.
        weights: Attention weights that the layer returns, if it does.

    Returns:
        The arguments after all interventions, with the edited output and weights; None if nothing was captured.
    """
    obstacle = find_obstacle(x)
    if obstacle is not None:
        report_uncaptured(module, *obstacle, submodule)
        return None
    if x.is_nested:
        report_uncaptured(
            module,
            "nn.TransformerEncoder converted the padded batch to nested tensors",
            "Build it with nn.TransformerEncoder(…, enable_nested_tensor=False).",
            submodule,
        )
        return None
    width, heads, in_weight, in_bias, out_weight, out_bias = projections
    key_padding_mask, attn_mask = (mask, None) if mask_type == 1 else (None, mask)
    if attn_mask is not None and attn_mask.ndim == 4:
        attn_mask = attn_mask.expand(x.shape[0], heads, -1, -1).flatten(0, 1)
    sequence_first = x.transpose(0, 1)
    captured = probe(
        module, unwrap_original(F.multi_head_attention_forward), sequence_first, sequence_first, sequence_first, width,
        heads,
        in_weight, in_bias, None, None, False, 0.0, out_weight, out_bias, training=False,
        key_padding_mask=key_padding_mask, need_weights=False, attn_mask=attn_mask,
    )  # fmt: skip
    if captured is None:
        return None
    captured = captured._replace(kernel="torch: fused encoder layer (fast path)", weights=weights)
    return notify(module, captured, submodule)
