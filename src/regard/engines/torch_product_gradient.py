"""The product of a matrix and a value, with the gradients that no fused kernel has, in O(n) memory.

A learned bias, a softcap or a score modification of your own has no fused gradient. The weights of some rows at a time
are computed in the forward pass, and again in the backward pass, which applies the formula of the softmax's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.frame import as_index, is_contiguous, take_block
from regard.problem import Problem, find_arrays
from regard.score_mods import BiasMod
from regard.tiling import tile_sizes
from regard.types import IntArray

Tensor = Any  # torch's types are not checked
MIN_BAND_ROWS = 16  # rows of a block, however long they are


class _GradientBlock(NamedTuple):
    """Rows of some pairs, with all keys between their first and their last live one."""

    part: Problem
    pairs: IntArray  # among those of the matrix
    rows: IntArray
    columns: IntArray
    is_full: bool


def differentiate_product(
    problem: Problem, product: Any, compute_slowly: Callable[[], Tensor]
) -> Tensor | None:
    """Compute A @ value with gradients.

    Args:
        problem: Matrix in canonical form.
        product: The measure `Product`, bound to the matrix.
        compute_slowly: Computes the same product; its gradient has gradients, too.

    Returns:
        (pairs, rows, value_dim); None if the matrix has given weights, or if numbers are not finite.
    """
    is_plain = problem.is_softmax and is_contiguous(problem.positions) and 0 not in problem.shape
    arrays = (problem.query, problem.key, product.array)
    if not is_plain or not all(math.isfinite(array.detach().sum()) for array in arrays):
        return None
    output = _DifferentiableProduct.apply(problem, product, compute_slowly, *_list_tensors(problem, product))
    # NaN or inf must reach exactly the rows that depend on them.
    return output if math.isfinite(output.detach().sum()) else None


class _DifferentiableProduct(torch.autograd.Function):  # type: ignore[misc]  # torch's types are not checked
    """A @ value; the backward pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, product: Any, compute_slowly: Any, *inputs: Tensor) -> Tensor:
        shape = (*problem.shape[:2], product.array.shape[-1])
        output = torch.zeros(shape, dtype=product.dtype, device=problem.query.device)
        with problem.engine.suppress_warnings():
            for block in _list_blocks(problem):
                weights, _ = _compute_weights(
                    block, block.part.scores(block.rows, block.columns, block.is_full)
                )
                value = _take_value(block, product)
                output[as_index(block.pairs), as_index(block.rows)] = _multiply(
                    weights.to(product.dtype), value
                )
        ctx.problem, ctx.product, ctx.compute_slowly = problem, product, compute_slowly
        ctx.save_for_backward(
            output, *inputs
        )  # inputs too, so that torch notices if they are changed in place
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output = ctx.saved_tensors[0]
        originals = _list_tensors(ctx.problem, ctx.product)
        if torch.is_grad_enabled():  # a gradient of the gradient
            result = ctx.compute_slowly()
            grads = torch.autograd.grad(result, originals, grad, create_graph=True, allow_unused=True)
            return None, None, None, *grads
        totals = {
            id(tensor): torch.zeros(tensor.shape, dtype=ctx.problem.dtype, device=tensor.device)
            for tensor in originals
        }
        with ctx.problem.engine.suppress_warnings():
            for block in _list_blocks(ctx.problem):
                _add_gradients(block, ctx.problem, ctx.product, output, grad, totals)
        return None, None, None, *(totals[id(x)].to(x.dtype) for x in originals)


def _list_tensors(problem: Problem, product: Any) -> list[Tensor]:
    """List the tensors that get a gradient."""
    arrays = [problem.query, problem.key, product.array, problem.sink, *find_arrays(problem.score_mods)]
    tensors = [array for array in arrays if isinstance(array, torch.Tensor) and array.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _list_blocks(problem: Problem) -> Iterator[_GradientBlock]:
    sizes = tile_sizes(on_device=problem.engine.is_asynchronous)
    pairs, rows, kv_len = problem.shape
    height = min(rows, sizes.rows, max(MIN_BAND_ROWS, sizes.entries // kv_len))
    size = max(1, sizes.entries // (height * kv_len))
    for first in range(0, pairs, size):
        own = np.arange(first, min(first + size, pairs))
        part = problem.select_pairs(own)
        for start in range(0, rows, height):
            band = np.arange(start, min(start + height, rows))
            found = part.live_blocks(band, sizes.columns)
            if found:
                columns = np.arange(found[0][0][0], found[-1][0][-1] + 1)
                is_full = all(full for _, full in found) and sum(len(x) for x, _ in found) == len(columns)
                yield _GradientBlock(part, own, band, columns, is_full)


def _compute_weights(block: _GradientBlock, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the weights of a block, and the share of the sink, (pairs, rows); rows without live keys are zeros."""
    problem = block.part
    if problem.sink is not None:
        sink = problem.frame.per_head(problem.sink.detach(), "sink").to(problem.dtype)[:, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:2], 1)], -1)
    weights = torch.softmax(scores, -1)
    if problem.mask is not None or problem.score_mods or problem.sink is not None:
        is_empty = scores.amax(-1, keepdim=True) == -math.inf
        if problem.engine.is_asynchronous or is_empty.any():
            weights = weights.masked_fill(is_empty, 0.0)
    return (weights, None) if problem.sink is None else (weights[..., :-1], weights[..., -1])


def _take_value(block: _GradientBlock, product: Any) -> Tensor:
    index = product.pair_index[block.pairs]
    return block.part.engine.take(
        product.array.detach(), index, block.columns - block.part.first_key, product.dtype
    )


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of the pairs, of which `b` may have one for all."""
    return torch.bmm(a, b.expand(len(a), -1, -1))


def _add_gradients(
    block: _GradientBlock,
    problem: Problem,
    product: Any,
    output: Tensor,
    grad: Tensor,
    totals: dict[int, Tensor],
) -> None:
    part, rows, columns = block.part, block.rows, block.columns
    engine, frame, q_idx = part.engine, part.frame, part.positions[rows]
    own_columns = columns - part.first_key
    query = engine.take(part.query.detach(), part.query_index, rows, part.dtype).expand(
        len(block.pairs), -1, -1
    )
    key = engine.take(part.key.detach(), part.key_index, own_columns, part.dtype).expand(
        len(block.pairs), -1, -1
    )
    raw = engine.compute_scores(query, key, part.scale)
    mods, are_biases = part.score_mods, all(type(mod) is BiasMod for mod in part.score_mods)
    learned = [array for array in find_arrays(mods) if id(array) in totals]
    with torch.set_grad_enabled(not are_biases):
        scores = raw if are_biases else raw.requires_grad_()
        for mod in mods:
            scores = mod.apply(scores, frame, q_idx, columns, engine.xp)
    allowed = (
        None if part.mask is None or block.is_full else part.mask.allows(frame, q_idx, columns, engine.xp)
    )
    masked = scores.detach() if allowed is None else torch.where(allowed, scores.detach(), -math.inf)
    weights, share = _compute_weights(block, masked)
    lead = as_index(block.pairs), as_index(rows)
    own_grad = grad[lead]
    inner = (own_grad * output[lead]).sum(-1, keepdim=True).to(part.dtype)
    value = _take_value(block, product)
    d_scores = _multiply(own_grad, value.mT).to(part.dtype).sub_(inner).mul_(weights)
    if id(product.array) in totals:
        own = _multiply(weights.mT.to(product.dtype), own_grad)
        _add(totals[id(product.array)], product.pair_index[block.pairs], own_columns, own)
    if share is not None and id(problem.sink) in totals:
        _add_to_sink(totals[id(problem.sink)], frame, -(share * inner[..., 0]).sum(-1))
    if are_biases:
        for mod in mods:
            if isinstance(mod, BiasMod) and id(mod.array) in totals:
                _add_to_bias(totals[id(mod.array)], frame, q_idx, columns, d_scores)
    else:
        found = torch.autograd.grad(scores, [raw, *learned], d_scores, allow_unused=True)
        for array, own in zip(learned, found[1:], strict=True):
            if own is not None:
                totals[id(array)] += own
        d_scores = torch.zeros_like(d_scores) if found[0] is None else found[0]
    d_scores = d_scores * part.scale
    if id(problem.query) in totals:
        _add(totals[id(problem.query)], part.query_index, rows, torch.bmm(d_scores, key))
    if id(problem.key) in totals:
        _add(totals[id(problem.key)], part.key_index, own_columns, torch.bmm(d_scores.mT, query))


def _add(total: Tensor, index: IntArray, positions: IntArray, part: Tensor) -> None:
    """Add gradients (pairs, positions, dim) to those of the pairs' arrays, which pairs may share."""
    _add_own(total[:, as_index(positions)], index, part)


def _add_to_bias(total: Tensor, frame: Any, q_idx: IntArray, columns: IntArray, part: Tensor) -> None:
    for axis in (-2, -1):
        if total.shape[axis] == 1:
            part = part.sum(axis, keepdim=True)
    index = _find_own(total.shape[:-2], frame)
    _add_own(take_block(total.view(-1, *total.shape[-2:]), q_idx, columns), index, part)


def _add_to_sink(total: Tensor, frame: Any, part: Tensor) -> None:
    _add_own(total.view(-1), _find_own(total.shape, frame), part)


def _find_own(own: tuple[int, ...], frame: Any) -> IntArray:
    """Return which entry of an array with these leading axes each selected pair uses."""
    numbers = np.arange(math.prod(own)).reshape(own)
    index: IntArray = np.broadcast_to(numbers, frame.leading_shape).ravel()[frame.selected]
    return index


def _add_own(total: Tensor, index: IntArray, part: Tensor) -> None:
    if is_contiguous(index):
        total[as_index(index)] += part
    else:
        for own, gradient in zip(index.tolist(), part, strict=True):
            total[own] += gradient
