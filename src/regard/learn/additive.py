"""Additive attention, the predecessor of the dot product (Bahdanau, Cho & Bengio, 1409.0473).

    dot product    score = query · key / √d_k
    additive       score = w · tanh(query W_Q + key W_K)

The additive score is a small network with one hidden layer. Queries and keys may have different sizes, and the scores
are bounded, since tanh stays between −1 and 1. Each pair costs hidden_dim additions, tanh calls and multiply-adds; the
dot product costs d_k multiply-adds, and all pairs are one matrix product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.validation import Floats, TrueMeans, as_count, as_floats, check_leading_axes, read_mask
from regard.render.table import format_table


class AdditiveAttention:
    """Attention with additive scores, and the methods of `ScaledDotProductAttention`.

    A model learns `W_Q` (d_q, hidden_dim), `W_K` (d_k, hidden_dim) and `w` (hidden_dim,); here they are random, and you
    can assign others.

    Args:
        d_q: Number of entries in each query.
        d_k: Number of entries in each key.
        hidden_dim: Number of entries in the hidden layer.
        seed: Seed of the random parameters.

    >>> attention = AdditiveAttention(d_q=2, d_k=3, hidden_dim=5)
    >>> output, weights = attention(Q=[[1, 0]], K=[[1, 0, 0], [0, 1, 0]], V=[[10, 0], [0, 10]])
    >>> weights.shape, output.shape
    ((1, 2), (1, 2))
    >>> weights.sum().round(12), (output - 10 * weights).round(12)
    (np.float64(1.0), array([[0., 0.]]))
    """

    def __init__(self, d_q: int, d_k: int, hidden_dim: int, *, seed: int = 0) -> None:
        self.d_q = as_count("AdditiveAttention", "d_q", d_q, minimum=1)
        self.d_k = as_count("AdditiveAttention", "d_k", d_k, minimum=1)
        self.hidden_dim = as_count("AdditiveAttention", "hidden_dim", hidden_dim, minimum=1)
        rng = np.random.default_rng(seed)
        # A variance of 1 / (number of terms) keeps a sum of products about as large as its factors.
        self.W_Q: Floats = rng.normal(scale=self.d_q**-0.5, size=(self.d_q, self.hidden_dim))
        self.W_K: Floats = rng.normal(scale=self.d_k**-0.5, size=(self.d_k, self.hidden_dim))
        self.w: Floats = rng.normal(scale=self.hidden_dim**-0.5, size=self.hidden_dim)

    def forward(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        """Compare, normalise and aggregate; only the comparison differs from the dot product.

        Args:
            Q: Queries (…, q_len, d_q).
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len). Or of 0 and 1, with `true_means`.
            true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
                True means attend.

        Returns:
            The output (…, q_len, d_v) and the weights (…, q_len, kv_len).

        >>> attention = AdditiveAttention(d_q=1, d_k=1, hidden_dim=4)
        >>> output, weights = attention.forward([[1], [2]], [[0], [0]], [[5], [7]], mask=[[True, False], [True, True]])
        >>> weights
        array([[1. , 0. ],
               [0.5, 0.5]])
        """
        mask = read_mask("AdditiveAttention", mask, true_means)
        scores = self.compute_scores(Q, K)
        weights = self.compute_weights(scores, mask)
        return self.compute_output(weights, V, mask), weights

    __call__ = forward

    def compute_scores(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
        """Compare: compute w · tanh(query W_Q + key W_K) for every query and key.

        Args:
            Q: Queries (…, q_len, d_q).
            K: Keys (…, kv_len, d_k).

        Returns:
            Scores (…, q_len, kv_len).

        >>> attention = AdditiveAttention(d_q=1, d_k=1, hidden_dim=1)
        >>> attention.W_Q, attention.W_K, attention.w = np.ones((1, 1)), np.ones((1, 1)), np.array([2.0])
        >>> attention.compute_scores([[0.5]], [[-0.5], [0.5]]).round(3)  # 2 tanh(0) and 2 tanh(1)
        array([[0.   , 1.523]])
        """
        Q, K, W_Q, W_K, w = self._check_arrays(Q, K)
        with np.errstate(invalid="ignore", over="ignore"):  # a masked key may be infinite
            from_query = (Q @ W_Q)[..., :, None, :]  # (…, q_len, 1, hidden_dim)
            from_key = (K @ W_K)[..., None, :, :]  # (…, 1, kv_len, hidden_dim)
            # Every pair has its own hidden layer: hidden_dim times the memory of the scores.
            return np.tanh(from_query + from_key) @ w

    def compute_weights(self, scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
        """Normalise: compute the softmax of each row, as for the dot product.

        Args:
            scores: Scores (…, q_len, kv_len).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Returns:
            Weights (…, q_len, kv_len).
        """
        return ScaledDotProductAttention(self.d_k).compute_weights(scores, mask)

    def compute_output(
        self, weights: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> Floats:
        """Aggregate: mix the values by their weights, as for the dot product.

        Args:
            weights: Weights (…, q_len, kv_len).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Returns:
            The output (…, q_len, d_v).
        """
        return ScaledDotProductAttention(self.d_k).compute_output(weights, V, mask)

    def score_by_loops(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> CountedScores:
        """Compute the scores of one sequence with explicit loops, and count every operation.

        Projections are computed once per token, everything else once per pair.

        Args:
            Q: Queries (q_len, d_q).
            K: Keys (kv_len, d_k).

        Returns:
            The scores (q_len, kv_len) and the counts.

        Raises:
            ArgumentError: If the arrays are not one sequence.

        >>> print(AdditiveAttention(d_q=2, d_k=2, hidden_dim=3).score_by_loops(np.ones((5, 2)), np.ones((7, 2))).counts)
        projection_multiply_adds           72
        pair_multiply_adds                105
        additions                         105
        tanh_calls                        105
        """
        Q, K, W_Q, W_K, w = self._check_arrays(Q, K)
        if Q.ndim != 2 or K.ndim != 2:
            raise ArgumentError(
                "score_by_loops",
                received=f"Q of shape {Q.shape} and K of shape {K.shape}",
                expected="Q (q_len, d_q) and K (kv_len, d_k), one sequence",
                hint="Call it once for each sequence, e.g. with Q[0] and K[0].",
            )
        counts = AdditiveCounts()
        from_query = _project_by_loops(Q, W_Q, counts)
        from_key = _project_by_loops(K, W_K, counts)
        scores, output_weights = np.empty((len(Q), len(K))), w.tolist()

        for i in range(len(Q)):
            for j in range(len(K)):
                score = 0.0
                for c in range(self.hidden_dim):
                    hidden = from_query[i][c] + from_key[j][c]
                    counts.additions += 1
                    hidden = math.tanh(hidden)
                    counts.tanh_calls += 1
                    score += output_weights[c] * hidden
                    counts.pair_multiply_adds += 1
                scores[i, j] = score
        return CountedScores(scores, counts)

    def _check_arrays(
        self, Q: npt.ArrayLike, K: npt.ArrayLike
    ) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Convert queries, keys and parameters to arrays, and check that their shapes fit together."""
        Q = as_floats("AdditiveAttention", "Q", Q, "q_len", "d_q")
        K = as_floats("AdditiveAttention", "K", K, "kv_len", "d_k")
        W_Q = as_floats("AdditiveAttention", "W_Q", self.W_Q, "d_q", "hidden_dim")
        W_K = as_floats("AdditiveAttention", "W_K", self.W_K, "d_k", "hidden_dim")
        w = as_floats("AdditiveAttention", "w", self.w, "hidden_dim")
        for name, shape, sizes, form, expected in (
            ("Q", Q.shape, Q.shape[-1:], "(…, q_len, d_q)", (self.d_q,)),
            ("K", K.shape, K.shape[-1:], "(…, kv_len, d_k)", (self.d_k,)),
            ("W_Q", W_Q.shape, W_Q.shape, "(d_q, hidden_dim)", (self.d_q, self.hidden_dim)),
            ("W_K", W_K.shape, W_K.shape, "(d_k, hidden_dim)", (self.d_k, self.hidden_dim)),
            ("w", w.shape, w.shape, "(hidden_dim,)", (self.hidden_dim,)),
        ):
            if sizes != expected:
                raise ArgumentError(
                    f"AdditiveAttention, {name}",
                    received=f"an array of shape {shape}",
                    expected=f"shape {form} with d_q {self.d_q}, d_k {self.d_k} and hidden_dim {self.hidden_dim}",
                    hint="Pass an array of that shape, or build an AdditiveAttention that fits the array.",
                )
        check_leading_axes("AdditiveAttention", "Q", Q, "K", K)
        return Q, K, W_Q, W_K, w


@dataclass
class AdditiveCounts:
    """The number of operations of each kind: projections once per token, the others once per pair.

    >>> from regard.learn import AdditiveAttention, cat
    >>> AdditiveAttention(d_q=4, d_k=4, hidden_dim=2).score_by_loops(cat.Q, cat.K).counts.tanh_calls
    50
    """

    projection_multiply_adds: int = 0
    pair_multiply_adds: int = 0
    additions: int = 0
    tanh_calls: int = 0

    def __str__(self) -> str:
        rows = [[field.name, getattr(self, field.name)] for field in fields(self)]
        return format_table(rows, align=["left", "right"])


@dataclass(frozen=True, eq=False)
class CountedScores:
    """The result of `score_by_loops`: the `scores` (q_len, kv_len), and the `counts` of operations.

    >>> from regard.learn import AdditiveAttention, cat
    >>> AdditiveAttention(d_q=4, d_k=4, hidden_dim=2).score_by_loops(cat.Q, cat.K).scores.shape
    (5, 5)
    """

    scores: Floats
    counts: AdditiveCounts


def _project_by_loops(x: Floats, W: Floats, counts: AdditiveCounts) -> list[list[float]]:
    rows, columns = x.tolist(), W.T.tolist()
    projected = []
    for row in rows:
        hidden = []
        for column in columns:
            dot = 0.0
            for c in range(len(row)):
                dot += row[c] * column[c]
                counts.projection_multiply_adds += 1
            hidden.append(dot)
        projected.append(hidden)
    return projected
