"""Doubles of CUDA's fused attention operators: their own checks, their layouts, and plain arithmetic on the CPU.

The checks are those of sm80 and newer, from torch's sources: attention.cu and attention_backward.cu, the headers
mem_eff_attention/kernel_forward.h and kernel_backward.h (`check_supported`), which torch ships, flash_api.cpp
(`mha_fwd`, `mha_bwd`), and sdp_utils.cpp (the choice of `F.scaled_dot_product_attention`). A check that fails raises
`IllegalCallError`, a RuntimeError as TORCH_CHECK's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from regard.engines import torch_cuda
from regard.engines import torch_kernels as kernels

HALVES = (torch.float16, torch.bfloat16)
ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}  # kAlignmentQ and kAlignmentK: 128 bits
MINIMUM_ALIGNMENT = 4  # kMinimumAlignment of the backward kernels
LSE_BLOCK = 32  # kAlignLSE
MAX_GRID = 65_535  # of grid.y and grid.z
calls: Counter[str] = Counter()


class IllegalCallError(RuntimeError):
    """A call that the operator's own checks refuse."""


def check(condition: Any, message: str) -> None:
    if not condition:
        raise IllegalCallError(message)


# Arithmetic


def compute_attention(q: Any, k: Any, v: Any, bias: Any, causal: str, scale: float) -> tuple[Any, Any]:
    """Compute output and lse in float32 as the kernels do: the weights are rounded to the dtype of the value."""
    wide = torch.float32
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if bias is not None:
        scores = scores + bias.to(wide)
    if causal:
        offset = k.shape[2] - q.shape[2] if causal == "lower_right" else 0
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + offset)
        scores = scores.masked_fill(hidden, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    weights = (scores - shift).exp()
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1.0, total)
    output = weights.to(q.dtype).to(wide) @ v.to(wide) / safe
    return output, (safe.log() + shift)[..., 0]  # an empty row has an lse of 0


def compute_gradients(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, output: Any, lse: Any, causal: bool, scale: float
) -> list[Any]:
    """Compute the gradients from the given output and lse, which may be those of more keys than these."""
    grad, q, k, v, output = (x.to(torch.float32) for x in (grad, q, k, v, output))
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias.to(torch.float32)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - lse[..., None]).exp()
    delta = (grad * output).sum(-1, keepdim=True)
    inner = weights * (grad @ v.mT - delta) * scale
    return [inner @ k, inner.mT @ q, weights.mT @ grad]


def lay_out(x: Any, dtype: Any) -> Any:
    """Store (batch, heads, length, dim) as (batch, length, heads, dim), as the efficient kernel writes its results."""
    return x.transpose(1, 2).to(dtype).contiguous().transpose(1, 2)


# The efficient operator


def check_efficient(q: Any, k: Any, v: Any, bias: Any, alignment: int, values_too: bool) -> None:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check(q.ndim == k.ndim == v.ndim == 4, "query.dim() == 4")
    check(q.size(0) == k.size(0) == v.size(0), "batch sizes differ")
    check(k.size(1) == v.size(1), "lengths of key and value differ")
    check(q.size(2) == k.size(2) == v.size(2), "numbers of heads differ")
    check(q.size(3) == k.size(3), "head_dim differs")
    for name, x in (("query", q), ("key", k), ("value", v)):
        check(x.stride(-1) == 1, f"{name}: last dimension must be contiguous")
    check(q.dtype in ALIGNMENT, "Only fp32, half & bf16 supported at the moment")
    check(
        q.dtype == k.dtype == v.dtype, "dtypes differ: the kernel would read the memory as the query's dtype"
    )
    check(q.size(2) <= MAX_GRID and q.size(0) <= MAX_GRID, "grid too large")
    for name, x in (("query", q), ("key", k), ("value", v))[: 3 if values_too else 2]:
        check(x.stride(2) % alignment == 0, "cutlass: no kernel found to launch!")
        check(x.data_ptr() % (alignment * x.element_size()) == 0, f"{name}_ptr is not correctly aligned")
        check(x.stride(1) % alignment == 0, f"{name} is not correctly aligned (strideM)")
        check(not values_too or x.size(0) <= 1 or x.stride(0) % alignment == 0, f"{name}: strideB")
    check(v.stride(1) % alignment == 0 and (v.size(2) <= 1 or v.stride(2) % alignment == 0), "value: strides")
    check(v.data_ptr() % (alignment * v.element_size()) == 0, "value_ptr is not correctly aligned")
    if bias is not None:
        check(bias.stride(-1) == 1, "(*bias): last dimension must be contiguous")
        check(bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype")
        check(tuple(bias.shape) == (q.size(0), q.size(2), q.size(1), k.size(1)), "attn_bias: wrong shape")
        check(
            bias.data_ptr() % (alignment * bias.element_size()) == 0, "attn_bias_ptr is not correctly aligned"
        )
        for axis, name in enumerate("BHM"):
            check(bias.size(axis) <= 1 or bias.stride(axis) % alignment == 0, f"attn_bias: stride{name}")


class Efficient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, compute_lse, dropout_p, is_causal, scale):
        check(compute_lse and not dropout_p, "this double knows no dropout, and computes the lse")
        check_efficient(q, k, v, bias, ALIGNMENT.get(q.dtype, 4), values_too=False)
        calls["efficient"] += 1
        output, lse = compute_attention(q, k, v, bias, "upper_left" if is_causal else "", scale)
        output = lay_out(output, q.dtype)
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_BLOCK), value=math.inf)
        ctx.save_for_backward(q, k, v, bias, output, lse)
        ctx.arguments = is_causal, scale
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx, grad, _):
        q, k, v, bias, output, lse = ctx.saved_tensors
        is_causal, scale = ctx.arguments
        seed = torch.zeros((), dtype=torch.int64)
        grads = efficient_backward(
            grad,
            q,
            k,
            v,
            bias,
            output,
            lse,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return *grads[:3], None, None, None, None, None


def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    output, lse = Efficient.apply(q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale)
    return output, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    grad,
    q,
    k,
    v,
    attn_bias,
    output,
    lse,
    seed,
    offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
):
    check_efficient(q, k, v, attn_bias, MINIMUM_ALIGNMENT, values_too=True)
    check(
        not dropout_p and list(grad_input_mask) == [True, True, True, False],
        "no dropout, no gradient of the bias",
    )
    check(grad.shape == (*q.shape[:3], v.shape[3]), "grad_out: wrong shape")
    check(
        output.shape == grad.shape and output.dtype == grad.dtype == q.dtype,
        "out and grad_out: shape and dtype",
    )
    rows = output.transpose(1, 2)
    is_packed = rows.size(1) == 1 or rows.stride(1) == rows.size(2) * rows.size(3)
    check(rows.stride(-1) == 1 and is_packed, "out: strideM is heads · dim")
    check(
        output.data_ptr() % (MINIMUM_ALIGNMENT * output.element_size()) == 0,
        "output_ptr is not correctly aligned",
    )
    check(lse.dtype == torch.float32 and lse.stride(-1) == 1, "lse: float32, contiguous")
    check(lse.shape[:2] == q.shape[:2] and lse.shape[2] >= q.shape[2], "lse: shape")
    check(lse.size(1) <= 1 or lse.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)")
    check(lse.size(0) <= 1 or lse.stride(0) % 8 == 0, "LSE is not correctly aligned (strideB)")
    padded = -(-q.shape[2] // LSE_BLOCK) * LSE_BLOCK
    check(lse.shape[2] >= padded, "lse: the kernel loads whole blocks of it")
    check(bool((lse[..., q.shape[2] :] == math.inf).all()), "lse: padded with inf")
    check(seed.dtype == offset.dtype == torch.int64, "seed and offset: as the forward operator returns them")
    calls["efficient backward"] += 1
    grads = compute_gradients(grad, q, k, v, attn_bias, output, lse[..., : q.shape[2]], is_causal, scale)
    return *(lay_out(x, q.dtype) for x in grads), None


# Flash and cuDNN


def check_flash(q: Any, k: Any, v: Any) -> None:
    check(q.dtype in HALVES, "FlashAttention only support fp16 and bf16 data type")
    check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    for x in (q, k, v):
        check(x.ndim == 4 and x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        # Not asserted by the operator: its loads of 128 bits fail with a misaligned address.
        check(x.data_ptr() % 16 == 0, "misaligned address")
        check(
            all(x.stride(axis) % 8 == 0 for axis in range(3) if x.size(axis) > 1),
            "misaligned address: strides",
        )
    check(q.shape[3] % 8 == 0, "head_size must be a multiple of 8, this is ensured by padding!")
    check(q.shape[3] <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query")
    check(k.shape == v.shape == (q.shape[0], k.shape[1], k.shape[2], q.shape[3]), "shapes")
    check(q.shape[0] <= MAX_GRID and q.shape[1] <= MAX_GRID, "grid too large")


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale):
        check_flash(q, k, v)
        calls["flash"] += 1
        # Causal is counted from the lower right corner, and a single query sees every key.
        causal = "lower_right" if is_causal and q.shape[2] > 1 else ""
        output, lse = compute_attention(q, k, v, None, causal, scale)
        output = torch.empty_like(q).copy_(output)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.arguments = is_causal, scale
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx, grad, _):
        q, k, v, output, lse = ctx.saved_tensors
        is_causal, scale = ctx.arguments
        check(not is_causal or q.shape[2] == k.shape[2], "a square")
        calls["flash backward"] += 1
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
        dq, dk, dv = compute_gradients(grad, q, wide_k, wide_v, None, output, lse, is_causal, scale)
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    check(not dropout_p and not return_debug_mask, "this double knows no dropout")
    output, lse = Flash.apply(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    nothing = torch.zeros(0)
    return output, lse, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing


def cudnn(
    q,
    k,
    v,
    attn_bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    check(
        attn_bias is None and compute_log_sumexp and not dropout_p and not return_debug_mask,
        "as it is called here",
    )
    check(q.dtype in HALVES and q.dtype == k.dtype == v.dtype, "halves")
    check(q.shape[3] % 8 == 0 and q.shape[3] <= 128 and k.shape[2] > 1, "cuDNN: shapes")
    check(not is_causal or q.shape[2] == k.shape[2], "only squares are asked for here")
    check_flash(q, k, v)
    calls["cudnn"] += 1
    output, lse = Flash.apply(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return output, lse[..., None], None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None


def make_choice(prefers_cudnn: bool) -> Any:
    """Return a double of `torch._fused_sdp_choice` on an sm80 (flash first) or an sm90 with a new cuDNN."""
    backend = torch.nn.attention.SDPBackend

    def choose(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        if q.shape[1] != k.shape[1] and enable_gqa is not True:
            return int(backend.MATH.value)
        same_width = q.shape[-1] == k.shape[-1] == v.shape[-1]
        is_dense = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v))
        halves = q.dtype in HALVES and q.dtype == k.dtype == v.dtype and is_dense and same_width
        takes_cudnn = halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and k.shape[2] > 1
        if prefers_cudnn and takes_cudnn:
            return int(backend.CUDNN_ATTENTION.value)
        is_square = not is_causal or q.shape[2] == k.shape[2]
        if halves and attn_mask is None and q.shape[-1] <= 256 and is_square:
            return int(backend.FLASH_ATTENTION.value)
        step = ALIGNMENT.get(q.dtype, 0)
        takes_efficient = step and q.shape[-1] % step == 0 == v.shape[-1] % step and is_dense
        return int((backend.EFFICIENT_ATTENTION if takes_efficient else backend.MATH).value)

    return choose


OPERATORS = SimpleNamespace(
    _scaled_dot_product_efficient_attention=efficient,
    _scaled_dot_product_efficient_attention_backward=efficient_backward,
    _scaled_dot_product_flash_attention=flash,
    _scaled_dot_product_cudnn_attention=cudnn,
)


@contextmanager
def use_cuda_kernels(*, prefers_cudnn: bool = False) -> Iterator[Counter[str]]:
    """Run CUDA's kernels, with these operators, for tensors of the CPU.

    Args:
        prefers_cudnn: Whether `F.scaled_dot_product_attention` would prefer cuDNN to flash.

    Yields:
        The number of calls of each operator.
    """
    calls.clear()
    with (
        mock.patch.object(torch_cuda, "aten", OPERATORS),
        mock.patch.object(torch_cuda, "fused_sdp_choice", make_choice(prefers_cudnn)),
        mock.patch.dict(kernels.KERNELS, {"cpu": (kernels.CUDA_FUSED,)}),
        mock.patch.dict(kernels._checked, clear=True),
    ):
        yield calls
