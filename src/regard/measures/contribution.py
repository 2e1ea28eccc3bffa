"""The largest contributions of each row: weights times the size of what they carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from regard.errors import ArgumentError
from regard.measures.base import Measure, as_slice, copy_with
from regard.measures.topk import TopK, TopKState
from regard.problem import Problem
from regard.types import Array, Namespace


@dataclass(frozen=True, eq=False, repr=False)
class Contribution(TopK):
    """The k largest contributions of each row and their keys, largest first.

    Key j contributes ‖w_ij v_j W_O‖ = w_ij ‖v_j W_O‖ to the output of query i (Kobayashi et al., 2004.10102): its
    weight, times the length of its value after the output projection. One pass computes the largest. The result is a
    `TopKResult` of arrays of shape (…, q_len, k).

    Args:
        k: Number of contributions, at most kv_len.
        norms: ‖v_j W_O‖ of each key, none negative: an array that broadcasts to (…, heads, kv_len). Of a recorded
            model, `recording.value_norms(name)`.

    Raises:
        ArgumentError: If `k` is not a whole number above 0, or the norms do not fit the matrix.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> A.measure(regard.measures.Contribution(2, np.array([1.0, 3, 0, 2]))).contribution
    TopKResult(values=array([[0.75, 0.5 ]]), indices=array([[1, 3]]))
    """

    norms: Array = None
    reads_scores: ClassVar[bool] = False
    result_name: ClassVar[str] = "contribution"

    def bind(self, problem: Problem) -> Measure:
        bound = super().bind(problem)
        norms = problem.engine.as_float(self.norms, "contribution", "norms")
        if not norms.ndim or norms.shape[-1] != problem.frame.kv_len:
            raise ArgumentError(
                "contribution",
                received=f"norms of shape {tuple(norms.shape)}",
                expected=f"(…, heads, kv_len {problem.frame.kv_len})",
                hint="They are the lengths of the values, one for each key.",
            )
        norms = problem.frame.take_pairs(norms, 1, "contribution")
        return copy_with(bound, norms=problem.engine.cast(norms, problem.dtype)[:, None, :])

    def step(
        self, state: TopKState, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> TopKState:
        return super().step(state, weights * self.norms[..., as_slice(kv_idx)], scores, q_idx, kv_idx, xp)

    def __repr__(self) -> str:
        return f"Contribution(k={self.k}, norms=<array of shape {tuple(getattr(self.norms, 'shape', ()))}>)"
