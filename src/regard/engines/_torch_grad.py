"""Gradients where no fused kernel has them: measures, caps, learnt biases. O(n) memory, a band at a time.

Each band of rows is a checkpoint: nothing of it is kept but its result, and it is computed again on the way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from regard._types import IntArray

Tensor = Any  # the types of torch are not followed


def differentiate(problem: Any, measures: Sequence[Any], bands: Sequence[IntArray]) -> list[Any]:
    """The results of measures over a `regard._stream.Problem`, with gradients to all it is made of."""
    xp = problem.engine.xp
    bound = [measure.bind(problem) if hasattr(measure, "bind") else measure for measure in measures]
    states = [measure.init(problem.shape, xp) for measure in bound]

    def of_band(band: IntArray) -> list[Any]:
        blocks = problem.live_blocks(band)
        tiles = [problem.scores(band, columns, full) for columns, full in blocks]
        found = [measure.init(problem.shape, xp) for measure in bound]
        for (columns, _), tile, weights in zip(blocks, tiles, _softmax(tiles, problem), strict=True):
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
    return [each / total for each in exponentials]
