"""Choose the weights of a matrix that a notebook shows, within a fixed amount of work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regard.render.notebook import WeightSample

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix

# Up to this many tokens every weight is shown.
SMALL = 16
# Rows and columns shown of a larger matrix.
SIDE = 12
# Maximum number of weights and multiply-adds to compute; rows are left out to stay below it.
ENTRIES, MULTIPLY_ADDS = 1 << 21, 1 << 28


def sample_weights(matrix: AttentionMatrix) -> WeightSample | None:
    """Sample the first head of a matrix that is not empty.

    A small matrix is shown whole. Of a large one some rows are computed, each summed over runs of keys.

    Returns:
        The sample, or None if a single row would already exceed the limits.
    """
    q_len, kv_len = matrix.shape[-2:]
    head_dim = max(1, matrix.problem.query.shape[-1])
    small = max(q_len, kv_len) <= SMALL
    max_rows = q_len if small else min(SIDE, q_len, ENTRIES // kv_len, MULTIPLY_ADDS // (kv_len * head_dim))
    if not max_rows:
        return None
    rows = np.linspace(0, q_len - 1, max_rows).round().astype(int)
    engine = matrix.problem.engine
    with engine.no_grad():
        part = matrix.lazy[(*[0] * (matrix.ndim - 2), rows)]
        weights, scores = (engine.to_numpy(x) for x in (part.to_dense(), part.scores[...]))
    columns = kv_len if small else min(SIDE, kv_len)
    starts = np.arange(columns) * kv_len // columns
    caption = "All weights, queries down and keys across."
    if not small:
        sampled = "Every row" if max_rows == q_len else f"{max_rows} of {q_len:,} rows, the others not read"
        caption = (
            f"{sampled}. Each number is the share of its row's weight on the keys from its column's up to the next "
            "column's."
        )
    masked = np.logical_and.reduceat(scores == -np.inf, starts, axis=-1)
    caption += " – marks masked keys." if masked.any() else ""
    numbers = np.add.reduceat(weights.astype(np.float64), starts, axis=-1)
    return WeightSample(part.problem.positions.tolist(), starts.tolist(), numbers, masked, caption)
