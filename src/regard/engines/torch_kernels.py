"""Fused kernels of torch, checked before use: with `torch_cuda`, the only file that calls its private operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from regard.engines import torch_cuda as cuda
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
        takes_tiles: Whether it takes a mask tile, and causal calls that are not square.
        dtypes: Dtypes that it takes; None for all.
        has_float32_lse: Whether its lse of half-precision inputs is as exact as in float32.
        alternatives: By `torch.nn.attention.SDPBackend`, kernels that run instead if the public function would run
            them, without a mask tile.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    takes_groups: bool = False
    is_public: bool = False
    takes_tiles: bool = True
    dtypes: tuple[Any, ...] | None = None
    has_float32_lse: bool = False
    alternatives: Mapping[int, Kernel] = field(default_factory=dict)

    def select(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Kernel:
        """Return the kernel for a call without a mask tile: an alternative if the public function would run it."""
        if not self.alternatives or (is_causal and q.shape[2] != k.shape[2]):
            return self
        chosen = self.alternatives.get(cuda.choose_backend(q, k, v, is_causal, scale), self)
        return chosen if chosen.dtypes is None or q.dtype in chosen.dtypes else self

    @property
    def is_cpu_flash(self) -> bool:
        """Whether it is the CPU's flash kernel, whose lse of a row without live keys is 0."""
        return self.forward is _cpu_forward

    @cached_property
    def masked_name(self) -> str:
        """Name of one call with a mask tile."""
        return f"torch: {self.name}, masked"

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
PUBLIC = Kernel("scaled_dot_product_attention, lse streamed", _public_forward, None, is_public=True)

MAX_PAIRS = cuda.MAX_PAIRS
_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)  # CUDA's kernels take no float64
_FLASH, _CUDNN = (
    int(getattr(torch.nn.attention.SDPBackend, f"{name}_ATTENTION").value) for name in ("FLASH", "CUDNN")
)
CUDA_FLASH = Kernel(
    "flash on CUDA", cuda.run_flash, None, takes_tiles=False, dtypes=_HALVES, has_float32_lse=True
)
CUDA_CUDNN = replace(CUDA_FLASH, name="cuDNN on CUDA", forward=cuda.run_cudnn)
CUDA_FUSED = Kernel(
    "efficient on CUDA", cuda.run_efficient, cuda.run_efficient_backward, dtypes=_FLOATS, has_float32_lse=True,
    alternatives={_FLASH: CUDA_FLASH, _CUDNN: CUDA_CUDNN},
)  # fmt: skip

# In order of preference. A private operator may change or disappear in any release; the public function stays.
KERNELS = {"cpu": (CPU_FLASH, PUBLIC), "cuda": (CUDA_FUSED, replace(PUBLIC, dtypes=_FLOATS))}
# If all fail, nothing is stored: the cause may be the state of the process.
_checked: dict[str, Kernel] = {}


def get_kernel(device_type: str) -> Kernel | None:
    """Return the first kernel of a device type whose results are right, or None if there is none."""
    checked = _checked.get(device_type)
    if checked is None and device_type in KERNELS:
        results = (check_kernel(kernel, device_type) for kernel in KERNELS[device_type])
        checked = next((kernel for kernel in results if kernel is not None), None)
        if checked is not None:
            _checked[device_type] = checked
    return checked


def check_kernel(kernel: Kernel, device_type: str) -> Kernel | None:
    """Compare the results of a kernel with the definition, whatever modes and default dtype are set.

    Returns:
        The kernel, with `takes_groups`, and the dtypes and alternatives whose results are right; None if all are wrong.
    """
    if kernel.dtypes is not None:
        right = tuple(
            x for x in kernel.dtypes if not find_fault(replace(kernel, dtypes=(x,)), device_type, 1)
        )
        kernel = replace(kernel, dtypes=right)
    if kernel.dtypes == () or find_fault(kernel, device_type, groups=1):
        return None
    checked = {x: check_kernel(alternative, device_type) for x, alternative in kernel.alternatives.items()}
    alternatives = {x: found for x, found in checked.items() if found is not None and found.takes_groups}
    takes_groups = not find_fault(kernel, device_type, groups=2)
    return replace(kernel, takes_groups=takes_groups, alternatives=alternatives)


_SQUARES = ((5, 5), (70, 70))  # below and above the shortest block of the CPU kernel
_OBLONGS = ((5, 9), (9, 5))  # a causal mask starts from the upper left corner
# The weights are rounded to the dtype of the value before they are multiplied by it; an lse is float32.
_CHECK_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def find_fault(kernel: Kernel, device_type: str, groups: int) -> str:
    """Compare output and lse of a kernel with the definition: without a mask, causal and with a mask tile.

    Returns:
        What is wrong, or "" if all results are right.
    """
    # Fake tensors, default devices and subclasses act through these modes.
    with (
        torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(),
        use_full_precision(device_type),
    ):  # fmt: skip
        faults = (
            _find_fault_at(kernel, device_type, dtype, shape, groups)
            for dtype in kernel.dtypes or (torch.float32,)
            for shape in (*_SQUARES, *(_OBLONGS if kernel.takes_tiles else ()))
        )
        return next(filter(None, faults), "")


def _find_fault_at(kernel: Kernel, device_type: str, dtype: Any, shape: tuple[int, int], groups: int) -> str:
    (rows, columns), heads, dim, scale = shape, 4, 8, 0.5
    length = max(shape)
    try:
        numbers = torch.arange(3 * heads * length * dim, dtype=torch.float32, device="cpu")
        all_q, all_k, all_v = (numbers * 0.7).sin().reshape(3, 1, heads, length, dim).to(dtype).unbind()
        # A kernel that takes each query head's own key head reads past the end: wrong numbers instead of a crash.
        device_q, device_k, device_v = (x.to(device_type) for x in (all_q, all_k, all_v))
        device_q = device_q[:, :, :rows]
        device_k, device_v = (x[:, : heads // groups, :columns] for x in (device_k, device_v))
        q = all_q.double()[:, :, :rows]
        k, v = (
            x.double()[:, : heads // groups, :columns].repeat_interleave(groups, 1) for x in (all_k, all_v)
        )
        tile = (numbers[: rows * columns] * 0.3).cos().reshape(1, 1, rows, columns)
        causal = torch.full((rows, columns), -math.inf, dtype=torch.float64, device="cpu").triu(1)
        masks: list[Any] = [("no mask", None, 0.0), ("causal", None, causal)]
        if kernel.takes_tiles:
            masks.append(("mask tile", tile.to(device_type), tile))
        for mask, own_tile, bias in masks:
            scores = scale * q @ k.mT + bias
            output, lse = kernel.forward(device_q, device_k, device_v, mask == "causal", own_tile, scale)
            exact = {"output": scores.softmax(-1) @ v, "lse": scores.logsumexp(-1)}
            for name, result in (("output", output.cpu().double()), ("lse", lse.cpu().double())):
                tolerance = _CHECK_TOLERANCE[dtype] if name == "output" else 1e-5
                if not torch.allclose(result, exact[name], atol=tolerance):
                    error = float((result - exact[name]).abs().max())
                    tokens = f"{rows} tokens" if rows == columns else f"{rows} queries, {columns} keys"
                    used = "" if dtype == torch.float32 else f" of {str(dtype).removeprefix('torch.')}"
                    return f"{name} off by {error:.1e} with {mask}, {tokens}{used}, {groups} query heads per key head"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
    if not is_plain or not _takes_cpu_flash(query, key, value):
        return None
    return rerun_flash_with_lse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def rerun_flash_with_lse(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Do what `run_flash_with_lse` does if all but settings of torch is known to allow it; arguments as there."""
    if not _choose_flash_now(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return None
    bias = make_flash_bias(attn_mask, query.dtype)
    output, lse = _cpu_operator()(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)
    is_exact = query.dtype is torch.float64 or has_ieee_products("cpu")
    return output, lse if is_exact else None


def chooses_cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> bool:  # fmt: skip
    """Return whether `F.scaled_dot_product_attention` would run flash on the CPU; arguments as in it."""
    return _takes_cpu_flash(query, key, value) and _choose_flash_now(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def _takes_cpu_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the operator of flash on the CPU takes such tensors."""
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return False
    if not query.ndim == key.ndim == value.ndim == 4:
        return False  # the operator takes nothing else, and may not check it
    kernel = get_kernel("cpu")
    if kernel is None or kernel.is_public:
        return False
    return bool(query.shape[1] == key.shape[1] or kernel.takes_groups)


def _choose_flash_now(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> bool:  # fmt: skip
    """Return whether torch chooses flash under its present settings."""
    if torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack():
        return False  # autocast, and a user's `TorchFunctionMode`, apply to the public function only
    backend = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return bool(backend == _FLASH)


def make_flash_bias(attn_mask: Tensor | None, dtype: Any) -> Tensor | None:
    """Return a mask of `F.scaled_dot_product_attention` as the flash kernel of the CPU takes it."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    bias = torch.zeros(attn_mask.shape, dtype=dtype)
    return bias.masked_fill_(attn_mask.logical_not(), -math.inf)


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
