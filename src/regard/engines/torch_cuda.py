"""CUDA's private attention operators, called as their own checks demand.

The operators refuse what the kernel on the CPU takes: strides and pointers that are not whole vectors, a mask tile of
another dtype, fewer key heads than query heads. The functions here pad, align and regroup first, and return output and
lse as the CPU's kernel does. `tests/helpers/cuda_double.py` restates the checks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

Tensor = Any  # torch's types are not checked

aten = torch.ops.aten
fused_sdp_choice = torch._fused_sdp_choice

VECTOR = 8  # numbers that a load reads at most: 16 bytes at half precision
LSE_BLOCK = 32  # rows of the lse that the backward kernel loads at once
MAX_PAIRS = 65_535  # blocks along the second and third axis of a grid


def choose_backend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> int:
    """Return the `torch.nn.attention.SDPBackend` that `F.scaled_dot_product_attention` would run, as a number.

    Args:
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, kv_len, head_dim).
        v: (batch, kv_heads, kv_len, head_dim).
        is_causal: Whether the mask is causal from the upper left corner.
        scale: Factor of the products.
    """
    has_groups = q.shape[1] != k.shape[1]
    return int(fused_sdp_choice(q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=has_groups))


def run_flash(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run FlashAttention 2: float16 and bfloat16, no mask tile; causal calls must be square.

    Args:
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, kv_len, head_dim).
        v: (batch, kv_heads, kv_len, head_dim).
        is_causal: Whether the mask is causal; this operator counts from the lower right corner.
        tile: None.
        scale: Factor of the products.

    Returns:
        Output (batch, heads, q_len, head_dim) and float32 lse (batch, heads, q_len).
    """
    _check_square(q, k, is_causal, tile)
    width = v.shape[-1]
    q, k, v = map(_align, (q, k, v))
    output, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return output[..., :width], lse


def run_cudnn(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run cuDNN's attention; arguments and results are those of `run_flash`."""
    _check_square(q, k, is_causal, tile)
    width = v.shape[-1]
    q, k, v = map(_align, (q, k, v))
    output, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return output[..., :width], lse.reshape(q.shape[:3])


def run_efficient(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the memory-efficient operator: float32, float16 and bfloat16, any mask tile, any lengths.

    Args:
        q: (batch, heads, q_len, head_dim).
        k: (batch, kv_heads, kv_len, head_dim).
        v: (batch, kv_heads, kv_len, value_dim).
        is_causal: Whether the mask is causal from the upper left corner.
        tile: Numbers to add to the scores, (1, heads or 1, q_len, kv_len). If its dtype is wider than that of q, the
            call runs in that dtype.
        scale: Factor of the products.

    Returns:
        Output (batch, heads, q_len, value_dim) and float32 lse (batch, heads, q_len).
    """
    batch, heads, rows, _ = q.shape
    width = v.shape[-1]
    q, k, v, bias = _fold_groups(q, k, v, tile)
    output, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=scale
    )
    return output[..., :width].reshape(batch, heads, rows, width), lse[..., :rows].reshape(batch, heads, rows)


def run_efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, is_causal: bool, tile: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of `run_efficient`.

    Args:
        grad: Gradient of the output: (batch, heads, q_len, value_dim).
        q: As in the forward call.
        k: As in the forward call.
        v: As in the forward call.
        output: Output over all keys, of which k may be a part.
        lse: The lse over all keys, finite.
        is_causal: As in the forward call.
        tile: As in the forward call.
        scale: As in the forward call.
    """
    rows, kv_heads = q.shape[2], k.shape[1]
    has_groups = q.shape[1] != kv_heads
    folded_q, folded_k, folded_v, bias = _fold_groups(q, k, v, tile)
    lead, groups = folded_q.shape[:2]
    grad, output = (
        _lay_out_rows(pad(x.to(folded_q.dtype), (0, folded_v.shape[-1] - x.shape[-1])), lead, groups)
        for x in (grad, output)
    )
    padded_lse = lse.new_full(
        (lead, groups, -(-rows // LSE_BLOCK) * LSE_BLOCK), math.inf, dtype=torch.float32
    )
    padded_lse[..., :rows] = lse.reshape(lead, groups, rows)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, folded_q, folded_k, folded_v, bias, output, padded_lse, unused, unused, 0.0,
        [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    dq = grads[0].reshape(*q.shape[:3], -1)
    dk, dv = grads[1:3]
    if has_groups:  # a group shares its key head
        dk, dv = (x.sum(1).unflatten(0, (-1, kv_heads)) for x in (dk, dv))
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _check_square(q: Tensor, k: Tensor, is_causal: bool, tile: Tensor | None) -> None:
    # Flash counts a causal mask from the lower right corner, cuDNN from the upper left: only in a square they agree.
    if tile is not None or (is_causal and q.shape[2] != k.shape[2]):
        raise ValueError("this operator takes no mask tile and only square causal calls")


def _align(x: Tensor) -> Tensor:
    """Return a tensor whose rows are whole vectors: padded with zeros, or copied if its strides are not."""
    short = -x.shape[-1] % VECTOR
    if short:
        return pad(x, (0, short))
    is_aligned = (
        x.stride(-1) == 1
        and not any(stride % VECTOR for stride in x.stride()[:-1])
        and x.storage_offset() * x.element_size() % (VECTOR * 2) == 0
    )
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _fold_groups(
    q: Tensor, k: Tensor, v: Tensor, tile: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Align the arguments of the efficient operator, with key heads as the batch and their query heads as heads.

    The keys and values of a group are views with a stride of 0: nothing is repeated.
    """
    if tile is not None and tile.dtype != q.dtype:
        q, k, v = (
            x.to(tile.dtype) for x in (q, k, v)
        )  # the operator takes a tile in the dtype of the query only
    shape = (*q.shape[:3], k.shape[2])
    q, k, v = map(_align, (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        q = _align(q.unflatten(1, (-1, groups)).flatten(0, 1))
        k, v = (_align(x.flatten(0, 1))[:, None].expand(-1, groups, -1, -1) for x in (k, v))
    if tile is None:
        return q, k, v, None
    columns = tile.shape[-1]
    room = tile.new_zeros((*tile.shape[:-1], columns + -columns % VECTOR))
    room[..., :columns] = tile
    bias = room[..., :columns].expand(shape)
    if groups > 1:
        bias = bias.unflatten(1, (-1, groups)).flatten(0, 1)
    return q, k, v, bias


def _lay_out_rows(x: Tensor, lead: int, groups: int) -> Tensor:
    """Copy to (lead, groups, rows, dim), stored as (lead, rows, groups, dim), which the backward kernel assumes."""
    return x.reshape(lead, groups, *x.shape[2:]).transpose(1, 2).contiguous().transpose(1, 2)
