"""The weight that a cache with a window evicts: at a distance of the window or more, and not on the first keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from regard.accumulators import Accumulator, DiagonalSum
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import GroupMass
from regard.measures import Measure
from regard.measures.base import as_slice
from regard.problem import Problem
from regard.types import Array


@dataclass(frozen=True)
class Offsets(Measure):
    """The weight at each offset between query and key, summed over rows: (…, q_len + kv_len − 1).

    Offset 0, a row's own key, is at index `q_len − 1 + first`, earlier keys to its left; `first` is the key of row 0.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Offsets()).offsets.round(4)
    array([0.3333, 0.8333, 1.8333, 0.    , 0.    ])
    """

    rows: Array | None = None  # (…, q_len): the weight of each row; None counts each once
    lengths: tuple[int, int] = (0, 0)
    buffers: dict[tuple[int, int, int], Array] = field(default_factory=dict)
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows = self.rows
        if rows is not None:
            picked = problem.frame.take_pairs(rows, 1, "offsets")
            rows = problem.engine.xp.asarray(picked, dtype=problem.dtype)[..., None]
        return replace(self, rows=rows, lengths=(problem.shape[1], problem.shape[2]), buffers={})

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return DiagonalSum() if self.rows is None else None

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], shape[1] + shape[2] - 1))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        if self.rows is not None:
            weights = weights * self.rows[:, as_slice(q_idx)]
        pairs, height, width = weights.shape
        wide = height + width
        if (pairs, height, width) not in self.buffers:
            self.buffers[pairs, height, width] = xp.zeros((pairs, height * (wide + 1)), dtype=weights.dtype)
        buffer = self.buffers[pairs, height, width]
        # Written in rows of `wide`, read in rows of `wide + 1`: each row shifts one to the left of the row above it.
        xp.reshape(buffer[:, : height * wide], (pairs, height, wide))[..., height:] = weights
        diagonals = xp.sum(xp.reshape(buffer, (pairs, height, wide + 1)), axis=1)[:, 1:wide]
        start = int(kv_idx[0]) - int(q_idx[-1]) + self.lengths[0] - 1
        state[:, start : start + wide - 1] += diagonals
        return state


def build_first_masses(token_rows: TokenRows, count: int) -> GroupMass:
    """Build the measure of each row's weight on each of the first keys, (…, q_len, count)."""
    labels = np.arange(token_rows.keys.shape[-1]) - token_rows.keys.argmax(-1)[..., None]
    return GroupMass(labels, count)


def compute_evicted(offsets: Array, first: Array, token_rows: TokenRows, sinks: int) -> Array:
    """Compute the share of each head's weight that a window evicts, for every window at once.

    Args:
        offsets: Weight at each offset, as `Offsets` returns it: (…, heads, q_len + kv_len − 1).
        first: Weight on each of the first keys, as `build_first_masses` measures it: (…, heads, q_len, count).
        token_rows: The tokens of the call.
        sinks: Number of first keys that are kept, at most `count`.

    Returns:
        (heads, windows): at index w the mean over rows of the weight at a distance of w or more, without the sinks. The
        last column is 0, and so is any larger window.
    """
    own, rows = token_rows.own_keys, token_rows.rows
    heads = offsets.shape[-2]
    count = max(1, int(rows.sum()))
    zero = len(own) - 1 + (token_rows.query_offset or 0)
    distances = np.abs(np.arange(offsets.shape[-1]) - zero)
    bins = int(distances.max(initial=0)) + 2
    by_distance = _sum_by_distance(offsets.reshape(-1, heads, offsets.shape[-1]).sum(0), distances, bins)
    for sink in range(sinks):
        to_sink = np.abs(own - (token_rows.keys.argmax(-1)[..., None] + sink))  # (…, 1, q_len)
        weights = np.where(rows, first[..., sink], 0.0).reshape(-1, heads, len(own))
        to_sink = np.broadcast_to(to_sink, (*first.shape[:-3], 1, len(own))).reshape(-1, len(own))
        for entry_distances, entry in zip(to_sink, weights, strict=True):
            by_distance -= _sum_by_distance(entry, entry_distances, bins)
    return np.maximum(np.cumsum(by_distance[::-1], 0)[::-1].T, 0.0) / count


def _sum_by_distance(values: Array, distances: Array, bins: int) -> Array:
    """Sum the columns of values, (heads, n), that have the same distance, (n,): (bins, heads)."""
    heads = len(values)
    index = distances + bins * np.arange(heads)[:, None]
    return np.bincount(index.ravel(), values.ravel(), bins * heads).reshape(heads, bins).T
