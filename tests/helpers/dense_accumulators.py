"""What each accumulator stands for, computed from dense weights and scores in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.accumulators import (
    Accumulator,
    CellReduction,
    ColumnSum,
    DiagonalSum,
    DistanceSum,
    RowMaxScore,
    RowMoments,
    RowSum,
    RowTopK,
)


def accumulate_dense(accumulator: Accumulator, weights: Any, scores: Any, q_idx: Any) -> Any:
    """Compute an accumulator by its definition.

    Args:
        accumulator: The description.
        weights: (pairs, rows, kv_len).
        scores: −inf where masked: (pairs, rows, kv_len).
        q_idx: Position of each row: (rows,).
    """
    weights = np.asarray(weights, np.float64)
    rows, keys = np.asarray(q_idx)[:, None], np.arange(weights.shape[-1])
    match accumulator:
        case RowSum("one", _, None):
            return weights.sum(-1)
        case RowSum("one", _, intervals):
            counted = np.zeros(len(keys), bool)
            for start, stop in intervals or ():
                counted[start:stop] = True
            return (weights * counted).sum(-1)
        case RowSum("surprisal"):
            return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
        case RowSum("distance", offset):
            return (weights * np.abs(rows + offset - keys)).sum(-1)
        case RowSum("position"):
            return (weights * keys).sum(-1)
        case RowMoments(offset):
            ahead, total = keys - rows - offset, weights.sum(-1)
            mean = (weights * ahead).sum(-1) / np.where(total == 0, 1, total)
            deviations = (weights * (ahead - mean[..., None]) ** 2).sum(-1)
            empty = total == 0  # the mean of no keys is that of key 0
            mean = np.where(empty, -(rows[:, 0] + offset), mean)
            return np.stack([total, mean, deviations], axis=-1)
        case DistanceSum(least, most, query_labels, key_labels):
            counted = (keys - rows >= least) & (keys - rows <= most)
            if query_labels is not None:
                counted = counted & (query_labels[..., :, None] == key_labels[..., None, :])
            return (weights * counted).sum(-1)
        case DiagonalSum():
            own = np.arange(weights.shape[1])[:, None]
            at = weights.shape[1] - 1 + keys - own
            return np.stack([np.bincount(at.ravel(), part.ravel(), sum(part.shape) - 1) for part in weights])
        case ColumnSum():
            return weights.sum(-2)
        case RowMaxScore():
            return scores.max(-1)
        case RowTopK(k):
            order = np.argsort(-np.where(np.isnan(weights), np.inf, weights), axis=-1, kind="stable")[..., :k]
            values = np.take_along_axis(weights, order, -1)
            return values, np.where(values == 0, 0, order)
        case CellReduction(cells, reduce):
            function = np.max if reduce == "max" else np.sum
            owner = [np.arange(n) * count // n for n, count in zip(weights.shape[1:], cells, strict=True)]
            return np.stack(
                [
                    [
                        [function(part[owner[0] == a][:, owner[1] == b]) for b in range(cells[1])]
                        for a in range(cells[0])
                    ]
                    for part in weights
                ]
            )
    raise AssertionError(accumulator)
