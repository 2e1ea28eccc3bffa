"""Fused kernels of torch: the only file that calls its private operators, and checks their results before use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

Tensor = Any  # torch's types are not checked


@dataclass(frozen=True)
class Kernel:
    """A fused attention kernel.

    Args:
        name: Name that `A.kernel` shows.
        forward: Function of query, key, value (batch, heads, length, dim), is_causal, mask tile and scale that returns
            the output and the lse.
        backward: Function of the output's gradient, query, key, value, output, lse, is_causal, mask tile and scale that
            returns the gradients of query, key and value; None if there is none.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None

    @cached_property
    def causal_name(self) -> str:
        """Name of one causal call."""
        return f"torch: {self.name}, causal"

    @cached_property
    def unmasked_name(self) -> str:
        """Name of one call without a mask."""
        return f"torch: {self.name}, no mask"


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return _cpu_operator()(q, k, v, 0.0, causal, attn_mask=tile, scale=scale)  # type: ignore[no-any-return]


@cache
def _cpu_operator() -> Any:
    # The overload is cached: looking it up would cost microseconds at every call.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, tile: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = operator(grad, q, k, v, output, lse, 0.0, causal, attn_mask=tile, scale=scale)
    return dq, dk, dv


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    # Written from the operator's schema; not yet run on a CUDA device.
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = None if tile is None else tile.to(q.dtype).expand(1, q.shape[1], q.shape[2], k.shape[2])
    output, lse, *_ = operator(q, k, v, bias, True, 0.0, causal, scale=scale)
    return output, lse[..., : q.shape[2]]


CPU_FLASH = Kernel("flash on CPU", _cpu_forward, _cpu_backward)
CUDA_EFFICIENT = Kernel("efficient on CUDA (untested)", _cuda_forward, None)


@cache
def get_kernel(device_type: str) -> Kernel | None:
    """Return the fused kernel of a device type, or None if it is missing or its results are wrong.

    Args:
        device_type: "cpu", "cuda", …
    """
    kernel = {"cpu": CPU_FLASH, "cuda": CUDA_EFFICIENT}.get(device_type)
    if kernel is None:
        return None
    q, k, v = torch.linspace(-1, 1, 2 * 3 * 3 * 8, device=device_type).sin().reshape(3, 1, 2, 3, 8)
    scores = 0.5 * q @ k.mT + torch.full((3, 3), -math.inf, device=device_type).triu(1)
    try:
        output, lse = kernel.forward(q, k, v, True, None, 0.5)
        is_right = torch.allclose(output, scores.softmax(-1) @ v, atol=1e-5)
        return kernel if is_right and torch.allclose(lse, scores.logsumexp(-1), atol=1e-5) else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


SDPA = torch._C._nn.scaled_dot_product_attention
_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def run_flash_with_lse(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Run a call of `F.scaled_dot_product_attention` and return its lse as well, if it would run flash on the CPU.

    Args:
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        value: (batch, kv_heads, kv_len, value_dim).
        attn_mask: Boolean or additive mask that broadcasts to (batch, heads, q_len, kv_len).
        dropout_p: Dropout probability.
        is_causal: Whether the mask is causal from the upper left corner.
        scale: Factor of the products; None for 1/√head_dim.
        enable_gqa: Whether several query heads share a key head.

    Returns:
        The output, bit-identical to the public function's, and the lse; None if another kernel would run.
    """
    is_plain = type(query) is type(key) is type(value) is torch.Tensor
    if not is_plain or not query.is_cpu or query.dtype not in (torch.float32, torch.float64):
        return None
    if torch.is_autocast_enabled("cpu") or get_kernel("cpu") is None:
        return None  # autocast applies to the public function only
    backend = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if backend != _FLASH:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), -math.inf)
    output, lse = _cpu_operator()(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return output, lse


def find_sdpa_backend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> str:  # fmt: skip
    """Return the name of the kernel that `F.scaled_dot_product_attention` would run.

    Args:
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        value: (batch, kv_heads, kv_len, value_dim).
        attn_mask: Boolean or additive mask that broadcasts to (batch, heads, q_len, kv_len).
        dropout_p: Dropout probability.
        is_causal: Whether the mask is causal from the upper left corner.
        scale: Factor of the products; None for 1/√head_dim.
        enable_gqa: Whether several query heads share a key head.

    Returns:
        "math", "flash", "efficient" or "cudnn"; "scaled_dot_product_attention" if torch does not say.
    """
    try:
        backend = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        name = torch.nn.attention.SDPBackend(backend).name
    except (RuntimeError, TypeError, ValueError):
        return "scaled_dot_product_attention"
    return str(name).removesuffix("_ATTENTION").lower()
