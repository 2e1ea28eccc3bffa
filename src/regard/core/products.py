"""What is stored or multiplied, in the form of measures: the whole matrix, its products; and how outputs merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from regard.core.block_loop import make_finite
from regard.core.problem import Problem
from regard.engines import find_engine
from regard.errors import ArgumentError, describe_argument
from regard.measures import Measure, span
from regard.types import Array, IntArray


@dataclass(frozen=True)
class DenseWeights(Measure):
    """Every weight, stored: (…, q_len, kv_len). The one measure that takes more than O(n) memory."""

    problem: Problem | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        return replace(self, problem=problem)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        assert self.problem is not None
        return xp.zeros(shape, dtype=self.problem.dtype)

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        state[:, span(q_idx), span(kv_idx)] = weights
        return state


@dataclass(frozen=True)
class LogSumExp(Measure):
    """The lse of each row from its weights, (…, q_len): s − ln w is the lse at every live key. For gradients."""

    problem: Problem | None = None

    def bind(self, problem: Problem) -> Measure:
        return replace(self, problem=problem)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 2))

    def step(self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        live = weights > 0
        each = xp.where(live, scores, 0.0) - xp.log(xp.where(live, weights, 1.0))
        sums = (xp.sum(xp.where(live, x, 0.0), axis=-1) for x in (weights * each, weights))
        state[:, q_idx] += xp.stack(list(sums), axis=-1)
        return state

    def finish(self, state: Array) -> Array:
        assert self.problem is not None
        xp, sink = self.problem.engine.xp, self.problem.sink
        # A row without any weight has what its sink has.
        alone = -xp.inf if sink is None else self.problem.frame.per_head(sink, "sink")[:, None]
        empty = state[..., 1] == 0
        return xp.where(empty, alone, state[..., 0] / xp.where(empty, 1.0, state[..., 1]))


@dataclass(frozen=True)
class Product(Measure):
    """The matrix times an array `(own pairs, kv_len, width)`, or its transpose times one `(own pairs, q_len, width)`.

    `of` tells for each pair of the whole matrix which of the array's own pairs serves it.
    """

    array: Array
    of: IntArray
    transposed: bool
    finite: bool
    dtype: Any
    problem: Problem | None = None

    @property
    def reads_scores(self) -> bool:  # type: ignore[override]
        """Scores tell what is hidden from what is zero, where NaN or inf must reach those who see it."""
        return not self.finite

    def bind(self, problem: Problem) -> Measure:
        return replace(self, of=self.of[problem.pair_ids], problem=problem)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        kept = shape[2 if self.transposed else 1]
        return xp.zeros((shape[0], kept, self.array.shape[-1]), dtype=self.dtype)

    def step(self, state: Any, weights: Array, scores: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.problem is not None
        kept, summed = (kv_idx, q_idx) if self.transposed else (q_idx, kv_idx)
        part = self.problem.engine.take(self.array, self.of, self.problem.engine.to_numpy(summed), self.dtype)
        weights = self.problem.engine.cast(weights, self.dtype)  # the array may have more digits
        turn = xp.matrix_transpose if self.transposed else lambda tile: tile
        if self.finite:
            state[:, span(kept)] += turn(weights) @ part
        else:
            state[:, span(kept)] += _literal_product(turn(weights), turn(scores), part, xp)
        return state


def _literal_product(weights: Array, scores: Array, part: Array, xp: Any) -> Array:
    """weights @ part where part holds NaN or inf: they reach the rows that see them, and no others."""
    live = scores != -xp.inf

    def reached(rows: Array, entries: Array) -> Array:
        return xp.astype(rows, weights.dtype) @ xp.astype(entries, weights.dtype) > 0

    product = weights @ xp.where(xp.isfinite(part), part, 0.0)
    lost = reached(live, xp.isnan(part)) | reached(live & (weights == 0), xp.isinf(part))
    for infinity in (xp.inf, -xp.inf):
        product = product + xp.where(reached(weights > 0, part == infinity), infinity, 0.0)
    return xp.where(lost, xp.nan, product)


def merge(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Output and lse over all keys, from those over each shard of the keys, in any order; shards may be empty.

    Each part is `(A @ value, A.lse)` of one shard: (…, q_len, value_dim) and (…, q_len). A sink goes to one shard
    only: its share is in that shard's lse.

    >>> import numpy as np, regard
    >>> query, key, value = np.eye(2), np.eye(2), np.array([[1.0], [3.0]])
    >>> shards = [(A @ value[j : j + 1], A.lse) for j in (0, 1) for A in [regard.attention(query, key[j : j + 1])]]
    >>> np.allclose(regard.merge(shards)[0], regard.attention(query, key) @ value)
    True
    """
    if isinstance(parts, list | tuple) and all(isinstance(part, tuple) and len(part) == 2 for part in parts):
        engine = find_engine("merge", **{f"lse of part {i}": lse for i, (_, lse) in enumerate(parts)})
        shapes = [tuple(np.shape(each)) for part in parts for each in part]
    else:
        shapes = []
    if len(set(shapes[::2])) != 1 or set(shapes[1::2]) != {shapes[0][:-1]}:
        raise ArgumentError(
            "merge",
            received=f"parts of shapes {shapes}" if shapes else describe_argument(parts),
            expected="a list of (output, lse), at least one, of shapes (…, q_len, value_dim) and (…, q_len)",
            hint="Give (A @ value, A.lse) of each shard of the keys, for the same queries.",
        )
    xp = engine.xp
    with engine.suppress_warnings():
        shift = parts[0][1]
        for _, lse in parts[1:]:
            shift = xp.maximum(shift, lse)
        shares = [xp.exp(lse - make_finite(shift, xp)) for _, lse in parts]
        total = sum(shares)
        # Rows that no shard sees have no shares to divide.
        safe = xp.where(total == 0, 1.0, total)
        output = sum(
            (share / safe)[..., None] * output for share, (output, _) in zip(shares, parts, strict=True)
        )
        return output, shift + xp.log(total)
