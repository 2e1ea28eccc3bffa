"""`A @ value` over many ranks: products with each block of keys, merged by their lse; its gradient is another ring."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.core.block_loop import run_block_loop
from regard.core.planner import upcast
from regard.core.products import Product
from regard.distributed.ring import KeyBlock, RingPass, RingProblem, split_parts, take_block_part
from regard.engines.torch_bands import compute_share
from regard.engines.torch_fused import run_fused_backward
from regard.frame import as_index
from regard.problem import Problem
from regard.tiling import tile_sizes
from regard.types import IntArray

Tensor = Any  # torch's types are not checked


def multiply(
    ring: RingProblem, value: Tensor, value_index: IntArray, requires_grad: bool
) -> tuple[Tensor, Tensor, str]:
    """Compute the rows of this rank of `A @ value`.

    Args:
        value: Values of this rank's keys: (own pairs, keys, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).

    Returns:
        Output (pairs, rows, value_dim) in the dtype of the scores or wider, lse (pairs, rows), and the name of the
        kernel.
    """
    names: list[str] = []
    problem = ring.problem
    if requires_grad:
        output, lse = _RingProduct.apply(
            problem.query, problem.key, value, problem.sink, ring, value_index, names
        )
    else:
        with torch.no_grad():
            output, lse = _run_forward(ring, value, value_index, names)
    return output, lse, names[-1] if names else "no keys"


class _Rows:
    """Output and lse of the rows of a rank over the blocks that have passed."""

    def __init__(self, pairs: int, rows: int, width: int, dtype: Any, device: Any) -> None:
        self.output = torch.zeros((pairs, rows, width), dtype=dtype, device=device)
        # Rounded to float32 at every block, the lse would err by one ulp per block.
        self.lse = torch.full((pairs, rows), -math.inf, dtype=torch.float64, device=device)

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """Merge the output and lse of some rows over further keys."""
        before, lse = self.lse[:, rows], lse.double()
        total = torch.logaddexp(before, lse)
        dtype = self.output.dtype
        own_share, share = (compute_share(x, total)[..., None].to(dtype) for x in (before, lse))
        # In place, as outputs are as large as the values.
        self.output[:, rows].mul_(own_share).add_(output.to(dtype).mul_(share))
        before.copy_(total)

    def add_sink(self, sink: Tensor) -> None:
        """Include the sink's score (pairs or 1,): it takes its share and adds nothing."""
        total = torch.logaddexp(self.lse, sink.double()[:, None].expand_as(self.lse))
        self.output *= compute_share(self.lse, total)[..., None].to(self.output.dtype)
        self.lse = total


def _run_forward(
    ring: RingProblem, value: Tensor, value_index: IntArray, names: list[str]
) -> tuple[Tensor, Tensor]:
    key, problem = ring.take_keys()
    dtype = problem.engine.working_dtype(problem.query, problem.key, value)
    pairs, rows, _ = problem.shape
    done = _Rows(pairs, rows, value.shape[-1], dtype, value.device)
    kernel = _BlockKernel(names)

    def compute(block: KeyBlock) -> None:
        block_key, block_value = block.tensors
        for part in split_parts(problem, ring.keys.chunks[block.owner]):
            own = take_block_part(problem, block_key, part)
            done.add(part.rows, *kernel.multiply(own, block_value[:, part.keys], value_index))

    same = {"value": _describe(value), "dtype of the value": str(value.dtype)}
    with ring.operate("A @ value", same) as (travel, _):
        RingPass(ring, travel, [key, value], compute).run()
    if problem.sink is not None:
        done.add_sink(problem.frame.per_head(problem.sink, "sink"))
    return done.output, done.lse.to(problem.dtype)


class _BlockKernel:
    """Multiplies blocks by the fused kernel, or by the block loop where the kernel cannot."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._is_upcast = False

    def multiply(self, block: Problem, value: Tensor, value_index: IntArray) -> tuple[Tensor, Tensor]:
        """Return output and lse of the rows over the keys of a block."""
        if block.can_fuse:
            fused = self._run_fused(block, value, value_index)
            if fused is not None and fused[1] is None and not self._is_upcast:
                # The lse of half precision would merge the blocks with wrong shares.
                self._is_upcast = True
                fused = self._run_fused(block, value, value_index)
            if fused is not None and fused[1] is not None:
                self._names.append(fused[2])
                return fused[0], fused[1]
        (output,), stats = run_block_loop(block, [Product(value, value_index)])
        assert stats is not None
        self._names.append(block.fallback_kernel)
        return output, stats.lse(block.engine.xp)

    def _run_fused(self, block: Problem, value: Tensor, value_index: IntArray) -> Any:
        return (upcast(block) if self._is_upcast else block).product(value, value_index)


class _RingProduct(torch.autograd.Function):  # type: ignore[misc]
    """The product with its gradient: keys, values and their gradients travel together."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, ring: RingProblem,
        value_index: IntArray, names: list[str],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        output, lse = _run_forward(ring, value, value_index, names)
        ctx.save_for_backward(query, key, value, sink, output, lse)
        ctx.ring, ctx.value_index = ring, value_index
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        query, key, value, sink, output, lse = ctx.saved_tensors
        ring = replace(ctx.ring, problem=replace(ctx.ring.problem, query=query, key=key, sink=sink))
        with torch.no_grad():
            dq, dk, dv = _run_backward(ring, value, ctx.value_index, grad, output, lse)
        dsink = None
        if sink is not None and sink.requires_grad:
            dsink = _differentiate_sink(ring.problem, sink, grad, output, lse)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dsink, None, None, None


def _run_backward(
    ring: RingProblem, value: Tensor, value_index: IntArray, grad: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of this rank's query, key and value."""
    key, problem = ring.take_keys()
    dtype = output.dtype
    grad = grad.to(dtype)
    dq = torch.zeros(problem.query.shape, dtype=dtype, device=grad.device)

    def compute(block: KeyBlock) -> list[Tensor]:
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=grad.device) for x in block.tensors)
        block_key, block_value = (x.to(dtype) for x in block.tensors)
        wide = replace(problem, query=problem.query.to(dtype), dtype=dtype)
        for part in split_parts(problem, ring.keys.chunks[block.owner]):
            own = take_block_part(wide, block_key, part)
            rows = (x[:, part.rows] for x in (grad, output, lse))
            arguments = (own, block_value[:, part.keys], value_index, *rows)
            grads = run_fused_backward(*arguments) or differentiate_part(*arguments)
            for total, index, found in (
                (dq, part.rows, grads[0]), (dk, part.keys, grads[1]), (dv, part.keys, grads[2]),
            ):  # fmt: skip
                total[:, index] += found
        return [dk, dv]

    def returns(owner: int) -> list[tuple[tuple[int, ...], Any]]:
        length = ring.keys.lengths[owner]
        return [((len(x), length, x.shape[-1]), dtype) for x in (key, value)]

    same = {"gradient": _describe(grad), "dtype of the gradient": str(grad.dtype)}
    with ring.operate("gradient of A @ value", same) as (travel, _):
        dk, dv = RingPass(ring, travel, [key, value], compute, returns).run()
    if len(dk) != len(ring.problem.key):  # only some heads were used
        whole = torch.zeros(ring.problem.key.shape, dtype=dtype, device=grad.device)
        whole[ring.key_pairs] = dk
        dk = whole
    return dq, dk, dv


def _differentiate_sink(problem: Problem, sink: Tensor, grad: Tensor, output: Tensor, lse: Tensor) -> Tensor:
    """Compute the gradient of the sink from the rows of this rank."""
    with torch.enable_grad():
        leaf = sink.detach().requires_grad_()
        scores = problem.frame.per_head(leaf, "sink").to(lse.dtype)[:, None].expand_as(lse)
        share = compute_share(scores, lse).detach()
        weight = -share * (grad.to(output.dtype) * output).sum(-1).to(lse.dtype)
        (found,) = torch.autograd.grad((scores * weight).sum(), leaf)
    return found


def _describe(tensor: Tensor) -> str:
    """Describe the shape of a tensor but for its length, which is the rank's own."""
    return f"({len(tensor)}, own, {tensor.shape[-1]})"


def differentiate_part(
    problem: Problem, value: Tensor, value_index: IntArray, grad: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value for some rows and a block of keys.

    A score has the gradient weight · (grad · value − grad · output), and the weight is exp(score − lse).

    Args:
        value: Values of these keys: (own pairs, keys, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).
        grad: Gradient of the output: (pairs, rows, value_dim).
        output: Output of each row over all keys: (pairs, rows, value_dim).
        lse: Logsumexp of each row over all keys, with the sink: (pairs, rows).
    """
    engine = problem.engine
    sizes = tile_sizes(on_device=engine.is_asynchronous)
    totals = [torch.zeros_like(x) for x in (problem.query, problem.key, value)]
    first = problem.first_key
    with engine.suppress_warnings():
        for pairs in sizes.split_pairs(problem.shape):
            part, own = problem.select_pairs(pairs), as_index(pairs)
            for band in sizes.split_rows(problem.shape[1]):
                rows = as_index(band)
                row_grad, row_output = grad[own][:, rows], output[own][:, rows]
                inner = (row_grad * row_output).sum(-1, keepdim=True)
                shift = lse[own][:, rows, None]
                for columns, full in part.live_blocks(band, sizes.columns):
                    keys = slice(int(columns[0]) - first, int(columns[-1]) + 1 - first)
                    tile = replace(
                        part, query=part.query[:, rows], positions=part.positions[band],
                        key=part.key[:, keys], first_key=int(columns[0]),
                    )  # fmt: skip
                    found = _differentiate_tile(
                        tile, full, value[:, keys], value_index[part.pair_ids], row_grad, inner, shift
                    )
                    for total, index, gradient in zip(totals, (rows, keys, keys), found, strict=True):
                        total[:, index] += gradient
    return totals[0], totals[1], totals[2]


def _differentiate_tile(
    tile: Problem, full: bool, value: Tensor, value_index: IntArray, grad: Tensor, inner: Tensor, lse: Tensor
) -> Any:
    """Compute the gradients of the query, key and value of a tile."""
    engine, columns = tile.engine, np.arange(tile.kv_range.start, tile.kv_range.stop)
    if not full and tile.mask is not None:
        # 0 · NaN is NaN: what the mask hides from all rows must not reach a gradient.
        allowed = tile.mask.allows(tile.frame, tile.positions, columns, engine.xp).any(1)
        key, value = (
            torch.where(_hides(x, index, allowed)[..., None], 0.0, x)
            for x, index in ((tile.key, tile.key_index), (value, value_index))
        )
        tile = replace(tile, key=key)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (tile.query, tile.key, value)]
        own = replace(tile, query=leaves[0], key=leaves[1])
        scores = own.scores(np.arange(len(tile.positions)), columns, full)
        tile_value = engine.take(leaves[2], value_index, columns - columns[0], tile.dtype)
        with torch.no_grad():
            weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse))
            weights = torch.where(scores == -math.inf, 0.0, weights)
            score_grad = weights * (grad @ tile_value.mT - inner)
            score_grad = torch.where(scores == -math.inf, 0.0, score_grad)
        finite = torch.where(scores == -math.inf, 0.0, scores)
        total = (score_grad * finite).sum() + ((weights @ tile_value) * grad).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if x is None else x for leaf, x in zip(leaves, found, strict=True)]


def _hides(array: Tensor, index: IntArray, allowed: Tensor) -> Tensor:
    """Return which keys of an array (own pairs, keys, width) are not finite, and allowed (pairs, keys) to no row."""
    bad = ~array.isfinite().all(-1)
    seen = torch.zeros(bad.shape, dtype=torch.int64, device=array.device)
    owner = torch.as_tensor(index, device=array.device)
    seen.index_add_(0, owner, allowed.expand(len(index), -1).to(torch.int64))
    return bad & (seen == 0)
