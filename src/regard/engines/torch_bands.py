"""Run the kernel calls that a mask was lowered to, forwards and backwards, and merge their outputs by their lse."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from regard.engines.torch_kernels import Kernel
from regard.engines.torch_lowering import KernelBlock, LoweredBand, TileBuilder

Tensor = Any  # torch's types are not checked

UPCAST = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class KernelCall(NamedTuple):
    """Arguments of the kernel calls for one group of pairs, beside the tensors."""

    kernel: Kernel
    bands: list[LoweredBand]
    first_row: int
    first_key: int
    build_tile: TileBuilder
    scale: float
    names: set[str]  # of the kernels that ran


def run_bands(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: KernelCall
) -> tuple[Tensor, Tensor]:
    """Compute output and lse, (1, heads, rows, …), of all bands."""
    outputs, lses = [], []
    # Under a causal mask the last rows have the largest tiles: the allocator reuses their memory for all others.
    for rows, blocks in reversed(call.bands):
        band_q = q[:, :, rows.start - call.first_row : rows.stop - call.first_row]
        results = [_run_block(band_q, k, v, rows, block, call) for block in blocks]
        if not results:
            shape = band_q.shape[:-1]
            results = [(band_q.new_zeros((*shape, v.shape[-1])), _empty_lse(band_q, shape))]
        output, lse = results[0]
        for block_output, block_lse in results[1:]:
            output, lse = _merge_outputs(output, lse, block_output, block_lse)
        lse = lse.to(results[0][1].dtype)
        if sink is not None:
            total = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None])
            output, lse = output * compute_share(lse, total)[..., None].to(output.dtype), total
        outputs.append(output)
        lses.append(lse)
    if len(outputs) == 1:
        return outputs[0], lses[0]
    return torch.cat(outputs[::-1], 2), torch.cat(lses[::-1], 2)


def _run_block(
    q: Tensor, k: Tensor, v: Tensor, rows: range, block: KernelBlock, call: KernelCall
) -> tuple[Tensor, Tensor]:
    """Compute output and lse of one block of columns."""
    columns = slice(block.columns.start - call.first_key, block.columns.stop - call.first_key)
    tile = call.build_tile(rows, block.columns) if block.has_tile else None
    k, v = k[:, :, columns], v[:, :, columns]
    kernel = call.kernel if block.has_tile else call.kernel.select(q, k, v, block.is_causal, call.scale)
    call.names.add(kernel.name)
    output, lse = kernel.forward(q, k, v, block.is_causal, tile, call.scale)
    # The kernel returns an lse of 0 for a row without live keys. Asking whether there is one makes a GPU wait.
    if tile is not None and (not q.is_cpu or (lse == 0).any()):
        is_empty = (tile == -math.inf).all(-1)
        if not q.is_cpu or is_empty.any():
            lse = lse.masked_fill(is_empty, -math.inf)
            output = output.masked_fill(is_empty[..., None], 0.0)
    return output, lse


def _empty_lse(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full(shape, -math.inf, dtype=dtype, device=q.device)


def compute_share(lse: Tensor, total: Tensor) -> Tensor:
    """Compute exp(lse − total), the share of a part of a row in the whole row."""
    return torch.exp(lse - torch.where(total == -math.inf, 0.0, total))


def _merge_outputs(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the outputs of the same rows over two blocks of columns."""
    # Rounded to float32 at every block, the lse would err by one ulp per block.
    lse = torch.logaddexp(a_lse.double(), b_lse.double())
    wide = UPCAST.get(a.dtype, a.dtype)
    parts = (
        x.to(wide) * compute_share(x_lse, lse)[..., None].to(wide) for x, x_lse in ((a, a_lse), (b, b_lse))
    )
    return sum(parts), lse


def differentiate_bands(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, output: Tensor, lse: Tensor, call: KernelCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value from the final output and lse, which may be over more keys.

    Args:
        q: (1, heads, rows, width).
        k: (1, key heads, keys, width).
        v: (1, key heads, keys, width).
        grad: Gradient of the output: (1, heads, rows, width).
        output: (1, heads, rows, width).
        lse: (1, heads, rows).
        call: The kernel calls.
    """
    assert call.kernel.backward is not None
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    finite_lse = torch.where(lse == -math.inf, 0.0, lse)
    for rows, blocks in reversed(call.bands):
        r = slice(rows.start - call.first_row, rows.stop - call.first_row)
        for block in blocks:
            c = slice(block.columns.start - call.first_key, block.columns.stop - call.first_key)
            tile = call.build_tile(rows, block.columns) if block.has_tile else None
            grads = call.kernel.backward(
                grad[:, :, r].contiguous(), q[:, :, r], k[:, :, c], v[:, :, c],
                output[:, :, r], finite_lse[:, :, r], block.is_causal, tile, call.scale,
            )  # fmt: skip
            dq[:, :, r] += grads[0]
            dk[:, :, c] += grads[1]
            dv[:, :, c] += grads[2]
    return dq, dk, dv


class BlockwiseProduct(torch.autograd.Function):  # type: ignore[misc]
    """`run_bands` with its gradient, which the kernel computes for each block from the final output and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: KernelCall
    ) -> tuple[Tensor, Tensor]:
        output, lse = run_bands(q, k, v, sink, call)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, output, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        q, k, v, sink, output, lse = ctx.saved_tensors
        call: KernelCall = ctx.call
        dq, dk, dv = differentiate_bands(q, k, v, grad, output, lse, call)
        dsink = None
        if sink is not None:
            inner = (grad * output).sum(-1).to(lse.dtype)  # (1, heads, rows)
            share = compute_share(sink[None, :, None], lse)
            dsink = -(share * inner).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, dsink, None
