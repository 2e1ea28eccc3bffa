"""Fused kernels of torch: the only file that calls its private operators, and checks their results before use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from regard.engines.torch_precision import has_ieee_products, use_full_precision

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
        takes_groups: Whether key and value may have fewer heads than the query; `check_kernel` finds it out.
        is_public: Whether it calls `F.scaled_dot_product_attention`, and no private operator.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    takes_groups: bool = False
    is_public: bool = False

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
    # The function of torch's own namespace costs microseconds less at every call than the operator.
    function = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)
    return function or torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


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


SDPA = torch._C._nn.scaled_dot_product_attention
_STREAMED_SCORES = 1 << 21  # scores held at once while the lse is computed


def _public_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    with use_full_precision(q.device.type):  # autocast applies to the public function
        output = SDPA(q, k, v, tile, 0.0, causal, scale=scale)
        with torch.no_grad():
            lse = _stream_lse(q, k, causal, tile, scale)
    return output.masked_fill((lse == -math.inf)[..., None], 0.0), lse


def _stream_lse(q: Tensor, k: Tensor, causal: bool, tile: Tensor | None, scale: float) -> Tensor:
    """Compute the lse, (batch, heads, rows), a few rows at a time: the public function does not return it."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide_k = k.to(dtype).mT
    step = max(1, _STREAMED_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    parts = []
    for start in range(0, q.shape[2], step):
        rows = slice(start, start + step)
        scores = (q[:, :, rows].to(dtype) @ wide_k).mul_(scale)
        if tile is not None:
            scores = scores + tile[..., rows, :]
        if causal:
            shape = scores.shape[-2:]
            scores = scores.masked_fill(
                torch.ones(shape, dtype=torch.bool, device=q.device).triu(start + 1), -math.inf
            )
        parts.append(scores.logsumexp(-1))
    return torch.cat(parts, -1)


CPU_FLASH = Kernel("flash on CPU", _cpu_forward, _cpu_backward)
CUDA_EFFICIENT = Kernel("efficient on CUDA (untested)", _cuda_forward, None)
PUBLIC = Kernel("scaled_dot_product_attention, lse streamed", _public_forward, None, is_public=True)

# In order of preference. A private operator may change or disappear in any release; the public function stays.
KERNELS = {"cpu": (CPU_FLASH, PUBLIC), "cuda": (CUDA_EFFICIENT, PUBLIC)}
# If all fail, nothing is stored: the cause may be the state of the process.
_checked: dict[str, Kernel] = {}


def get_kernel(device_type: str) -> Kernel | None:
    """Return the first kernel of a device type whose results are right, or None if there is none.

    Args:
        device_type: "cpu", "cuda", …
    """
    checked = _checked.get(device_type)
    if checked is None and device_type in KERNELS:
        results = (check_kernel(kernel, device_type) for kernel in KERNELS[device_type])
        checked = next((kernel for kernel in results if kernel is not None), None)
        if checked is not None:
            _checked[device_type] = checked
    return checked


def check_kernel(kernel: Kernel, device_type: str) -> Kernel | None:
    """Compare the results of a kernel with the definition, whatever modes and default dtype are set.

    Args:
        kernel: The kernel.
        device_type: Device type to run it on.

    Returns:
        The kernel, with `takes_groups` set by the check; None if a result is wrong.
    """
    if find_fault(kernel, device_type, groups=1):
        return None
    return replace(kernel, takes_groups=not find_fault(kernel, device_type, groups=2))


_CHECKED_LENGTHS = (5, 70)  # below and above the shortest block of the CPU kernel


def find_fault(kernel: Kernel, device_type: str, groups: int) -> str:
    """Compare output and lse of a kernel with the definition: without a mask, causal and with a mask tile.

    Args:
        kernel: The kernel.
        device_type: Device type to run it on.
        groups: Number of query heads that share a key head.

    Returns:
        What is wrong, or "" if all results are right.
    """
    # Fake tensors, default devices and subclasses act through these modes.
    with (
        torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(),
        use_full_precision(device_type),
    ):  # fmt: skip
        faults = (_find_fault_at(kernel, device_type, length, groups) for length in _CHECKED_LENGTHS)
        return next(filter(None, faults), "")


def _find_fault_at(kernel: Kernel, device_type: str, length: int, groups: int) -> str:
    heads, dim, scale = 4, 8, 0.5
    try:
        numbers = torch.arange(3 * heads * length * dim, dtype=torch.float32, device=device_type)
        q, all_k, all_v = (numbers * 0.7).sin().reshape(3, 1, heads, length, dim).unbind()
        # A kernel that takes each query head's own key head reads past the end: wrong numbers instead of a crash.
        k, v = (x[:, : heads // groups] for x in (all_k, all_v))
        wide_q, wide_k, wide_v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
        tile = (numbers[: length * length] * 0.3).cos().reshape(1, 1, length, length)
        causal = torch.full((length, length), -math.inf, dtype=torch.float64, device=device_type).triu(1)
        for mask, own_tile, bias in (
            ("no mask", None, 0.0),
            ("causal", None, causal),
            ("mask tile", tile, tile),
        ):
            scores = scale * wide_q @ wide_k.mT + bias
            output, lse = kernel.forward(q, k, v, mask == "causal", own_tile, scale)
            exact = {"output": scores.softmax(-1) @ wide_v, "lse": scores.logsumexp(-1)}
            for name, result in (("output", output), ("lse", lse)):
                if not torch.allclose(result.double(), exact[name], atol=1e-5):
                    error = float((result.double() - exact[name]).abs().max())
                    return f"{name} off by {error:.1e} with {mask}, {length} tokens, {groups} query heads per key head"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def run_flash_with_lse(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
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
        The output, bit-identical to the public function's, and the lse; None if another kernel would run. The lse is
        None if torch computed it with reduced precision.
    """
    is_plain = type(query) is type(key) is type(value) is torch.Tensor
    if not is_plain or not query.is_cpu or query.dtype not in (torch.float32, torch.float64):
        return None
    if not query.ndim == key.ndim == value.ndim == 4:
        return None  # the operator takes nothing else, and may not check it
    if torch.is_autocast_enabled("cpu"):
        return None  # autocast applies to the public function only
    kernel = get_kernel("cpu")
    if kernel is None or kernel.is_public or (query.shape[1] != key.shape[1] and not kernel.takes_groups):
        return None
    backend = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if backend != _FLASH:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), -math.inf)
    output, lse = _cpu_operator()(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    is_exact = query.dtype == torch.float64 or has_ieee_products("cpu")
    return output, lse if is_exact else None


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
