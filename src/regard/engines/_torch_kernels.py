"""Fused kernels: the one file that calls torch's private operators, behind a check of what they return."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

Tensor = Any  # the types of torch are not followed


@dataclass(frozen=True)
class Kernel:
    """A fused kernel on (1, heads, length, dim): output and lse, and the gradients given the final output and lse."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None

    @cached_property
    def causal(self) -> str:
        """What ran, where it was one causal call."""
        return f"torch: {self.name}, causal"

    @cached_property
    def unmasked(self) -> str:
        """What ran, where it was one call without a mask."""
        return f"torch: {self.name}, no mask"


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return _cpu_operator()(q, k, v, 0.0, causal, attn_mask=tile, scale=scale)  # type: ignore[no-any-return]


@cache
def _cpu_operator() -> Any:
    # The overload itself: finding it anew would cost microseconds at every call.
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
    # Written after the operator's schema; no CUDA device has run it.
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = None if tile is None else tile.to(q.dtype).expand(1, q.shape[1], q.shape[2], k.shape[2])
    output, lse, *_ = operator(q, k, v, bias, True, 0.0, causal, scale=scale)
    return output, lse[..., : q.shape[2]]


CPU_FLASH = Kernel("flash on CPU", _cpu_forward, _cpu_backward)
CUDA_EFFICIENT = Kernel("efficient on CUDA (never run by us)", _cuda_forward, None)


@cache
def kernel_on(device_type: str) -> Kernel | None:
    """The fused kernel of a kind of device, if it is there and its answers are right."""
    kernel = {"cpu": CPU_FLASH, "cuda": CUDA_EFFICIENT}.get(device_type)
    if kernel is None:
        return None
    q, k, v = torch.linspace(-1, 1, 2 * 3 * 3 * 8, device=device_type).sin().reshape(3, 1, 2, 3, 8)
    scores = 0.5 * q @ k.mT + torch.full((3, 3), -math.inf, device=device_type).triu(1)
    try:
        output, lse = kernel.forward(q, k, v, True, None, 0.5)
        right = torch.allclose(output, scores.softmax(-1) @ v, atol=1e-5)
        return kernel if right and torch.allclose(lse, scores.logsumexp(-1), atol=1e-5) else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
