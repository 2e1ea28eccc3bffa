"""Gradients where no fused kernel has them: measures, caps, learnt biases. O(n) memory, a band at a time.

Each band of rows is a checkpoint: nothing of it is kept but its result, and it is computed again on the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from regard.tiling import tile_sizes
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed


def differentiate(problem: Any, measures: Sequence[Any], bands: Sequence[IntArray]) -> list[Any]:
    """The results of measures over a `regard.core.problem.Problem`, with gradients to all it is made of."""
    xp = problem.engine.xp
    problem = replace(problem, key=_cleaned(problem, problem.key, problem.key_index, bands))
    measures = [
        replace(measure, array=_cleaned(problem, measure.array, measure.of, bands))
        if getattr(measure, "transposed", None) is False
        else measure
        for measure in measures
    ]
    bound = [measure.bind(problem) if hasattr(measure, "bind") else measure for measure in measures]
    states = [measure.init(problem.shape, xp) for measure in bound]
    width = tile_sizes().columns  # the backward pass must meet the same tiles

    def of_band(band: IntArray) -> list[Any]:
        with problem.engine.suppress_warnings():
            return in_band(band)

    def in_band(band: IntArray) -> list[Any]:
        blocks = problem.live_blocks(band, width)
        tiles = [problem.scores(band, columns, full) for columns, full in blocks]
        found = [measure.init(problem.shape, xp) for measure in bound]
        shares = [problem.unnormalised_weights(band, columns, full) for columns, full in blocks]
        exponential = not shares or shares[0] is None
        normalised = _softmax(tiles, problem) if exponential else _divided(shares)
        for (columns, _), tile, weights in zip(blocks, tiles, normalised, strict=True):
            q_idx, kv_idx = xp.asarray(band), xp.asarray(columns)
            found = [
                measure.step(state, weights, tile, q_idx, kv_idx, xp)
                for measure, state in zip(bound, found, strict=True)
            ]
        return found

    for band in bands:
        found = checkpoint(of_band, band, use_reentrant=False)
        states = [measure.merge(a, b) for measure, a, b in zip(bound, states, found, strict=True)]
    return [measure.finish(state) for measure, state in zip(bound, states, strict=True)]


def _softmax(tiles: list[Tensor], problem: Any) -> list[Tensor]:
    """The weights of a band's tiles, the sink's share left out; rows that see nothing are zeros."""
    if not tiles:
        return []
    peaks = [tile.detach().amax(-1, keepdim=True) for tile in tiles]
    sink = None
    if problem.sink is not None:
        sink = problem.frame.per_head(problem.sink, "sink").to(problem.dtype)[:, None, None]
        peaks.append(sink.detach().expand_as(peaks[0]))
    shift = torch.cat(peaks, -1).amax(-1, keepdim=True)
    shift = torch.where(shift == -math.inf, 0.0, shift)
    exponentials = [torch.exp(tile - shift) for tile in tiles]
    total = sum(each.sum(-1, keepdim=True) for each in exponentials)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    total = torch.where(total == 0, 1.0, total)
    # A NaN row is NaN where it is live only.
    return [
        torch.where(tile == -math.inf, 0.0, each / total)
        for tile, each in zip(tiles, exponentials, strict=True)
    ]


def _divided(shares: list[Tensor]) -> list[Tensor]:
    """The weights of a band's tiles from what they are shares of; by way of a logarithm, 0 would have no gradient."""
    if not shares:
        return []
    zero = [share == 0 for share in shares]
    peak = torch.cat([share.detach().amax(-1, keepdim=True) for share in shares], -1).amax(-1, keepdim=True)
    shares = [share / torch.where(peak == 0, 1.0, peak) for share in shares]
    total = sum(share.sum(-1, keepdim=True) for share in shares)
    lost, total = total.isnan(), torch.where(total == 0, 1.0, total)
    # A NaN row is NaN where it is live only.
    return [torch.where(lost & none, 0.0, share / total) for share, none in zip(shares, zero, strict=True)]


def _cleaned(problem: Any, array: Tensor, of: IntArray, bands: Sequence[IntArray]) -> Tensor:
    """Keys or values with zeros where they are not finite and no query sees them: 0 · NaN would reach gradients."""
    bad = ~array.isfinite().all(-1)  # (own pairs, kv_len)
    if problem.mask is None or not bad.any():
        return array
    columns = bad.any(0).nonzero()[:, 0].cpu().numpy()
    seen = torch.zeros((len(of), len(columns)), dtype=torch.bool, device=array.device)
    for band in bands:
        allowed = problem.mask.allows(problem.frame, problem.positions[band], columns, problem.engine.xp)
        seen |= allowed.any(-2)
    owner = torch.tensor(of, device=array.device)
    unseen = torch.ones_like(bad)
    unseen[:, columns] = ~torch.zeros_like(bad[:, columns]).index_put((owner,), seen, accumulate=True)
    return torch.where((bad & unseen)[..., None], 0.0, array)
