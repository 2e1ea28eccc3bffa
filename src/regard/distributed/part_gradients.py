"""Gradients of a product that no fused kernel computes, such as with a softcap: tile by tile, from the final lse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.frame import as_index
from regard.problem import Problem
from regard.tiling import tile_sizes
from regard.types import IntArray

Tensor = Any  # torch's types are not checked


def differentiate_part(
    problem: Problem, value: Tensor, value_index: IntArray, grad: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value for some rows and a block of keys.

    A score has the gradient weight · (grad · value − grad · output), and the weight is exp(score − lse).

    Args:
        problem: The rows, with the keys of the block.
        value: Values of these keys: (own pairs, keys, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).
        grad: Gradient of the output: (pairs, rows, value_dim).
        output: Output of each row over all keys: (pairs, rows, value_dim).
        lse: Logsumexp of each row over all keys, with the sink: (pairs, rows).

    Returns:
        The gradients, of the shapes of query, key and value.
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
