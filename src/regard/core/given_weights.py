"""A matrix whose weights are given as an array, for layers that computed them before the matrix was built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.matrix import AttentionMatrix
from regard.engines import find_engine
from regard.frame import Frame, check_matrix_shape, take_block
from regard.masks import Mask
from regard.problem import Problem, Spec, leading_shape
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace


@dataclass(frozen=True, eq=False)
class LogWeights(ScoreMod):
    """Scores that are the logarithms of given weights, −inf for a weight of 0.

    Attributes:
        weights: (…, heads, q_len, kv_len), none negative.
    """

    weights: Array

    def take(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray) -> Array:
        """Return the weights of a block: (pairs or 1, len(q_idx), len(kv_idx))."""
        return frame.take_pairs(take_block(self.weights, q_idx, kv_idx), 2, "weights")

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array:
        weights = xp.astype(xp.asarray(self.take(frame, q_idx, kv_idx)), dtype)
        return xp.where(weights == 0, -xp.inf, xp.log(xp.where(weights == 0, 1.0, weights)))

    def check(self, frame: Frame) -> None:
        check_matrix_shape(self.weights, frame, "weights")

    def __repr__(self) -> str:
        return "given weights"


class GivenWeightsProblem(Problem):
    """A problem without query and key: both have a head_dim of 0, and the only score modification is `LogWeights`."""

    @property
    def can_fuse(self) -> bool:
        return False

    @property
    def kernel(self) -> str:
        return f"{self.engine.name}: block loop (given weights)"

    @property
    def needs_exact_rows(self) -> bool:
        return False  # the lse is exactly 0

    @property
    def title_suffix(self) -> str:
        return " by given weights"

    def describe(self) -> list[str]:
        return [repr(mod) for mod in self.score_mods]

    @property
    def has_sink(self) -> bool:
        return True

    @property
    def given_lse(self) -> Array:
        xp, (_, rows, kv_len) = self.engine.xp, self.shape
        has_weight = xp.any(self.take_given_weights(np.arange(rows), np.arange(kv_len)) != 0, axis=-1)
        return self.engine.cast(xp.where(has_weight, 0.0, -xp.inf), self.dtype)

    def take_given_weights(self, rows: IntArray, columns: IntArray) -> Array:
        (log_weights,) = self.score_mods
        assert isinstance(log_weights, LogWeights)
        weights = log_weights.take(self.frame, self.positions[rows], columns)
        weights = self.engine.cast(self.engine.xp.asarray(weights), self.dtype)
        return self.engine.xp.broadcast_to(weights, (self.shape[0], *weights.shape[1:]))


def attention_from_weights(
    weights: Array, query: Array, key: Array, *, mask: Mask | None = None, enable_gqa: bool = False
) -> AttentionMatrix:
    """Return a matrix with given weights; its entries are bit-equal to them.

    A score is the logarithm of a weight, and the lse of a row is 0. If a row sums to less than 1, the rest belongs to
    no key, as with a sink.

    Args:
        weights: (…, heads, q_len, kv_len), none negative, each row with a sum of at most 1 up to rounding.
        query: (…, heads, q_len, 0): its axes alone count.
        key: (…, kv_heads, kv_len, 0): its axes alone count.
        mask: The keys that each row attends to, as far as is known; weights outside it must be 0.
        enable_gqa: Whether heads / kv_heads consecutive heads share a value head.

    Returns:
        The matrix: (…, heads, q_len, kv_len).
    """
    engine = find_engine("attention", query=query, key=key)
    axes, groups = leading_shape(query, key, enable_gqa)
    spec = Spec(
        engine,
        query,
        key,
        mask,
        (LogWeights(weights),),
        1.0,
        None,
        axes,
        groups,
        problem_class=GivenWeightsProblem,
    )
    for part in (mask, *spec.score_mods):
        if part is not None:
            part.check(Frame.from_shape(spec.shape))
    return AttentionMatrix(spec)
