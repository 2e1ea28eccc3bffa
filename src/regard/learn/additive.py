"""Additive attention, which came first, beside the dot product (Bahdanau, Cho & Bengio, 1409.0473).

    dot product    score = query · key / √d_k
    additive       score = w · tanh(query W_Q + key W_K)

The additive score is a small network with one hidden layer. It takes queries and keys of different sizes, and its
scores cannot run away, since tanh stays between −1 and 1. The price is paid for every pair: hidden_dim additions,
hyperbolic tangents and multiply-adds, where the dot product has d_k multiply-adds and is one matrix product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.validation import Floats, as_count, as_floats, check_leading_axes


class AdditiveAttention:
    """Attention weights and outputs by additive scores, with the methods of `ScaledDotProductAttention`.

    Queries have `d_q` numbers, keys `d_k`. `W_Q` (d_q, hidden_dim), `W_K` (d_k, hidden_dim) and `w` (hidden_dim,) are
    learned in a model; here they begin at random, the same for the same `seed`, and may be set.

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
        # One over the number of terms, as a variance, keeps a sum of products about as large as its factors.
        self.W_Q: Floats = rng.normal(scale=self.d_q**-0.5, size=(self.d_q, self.hidden_dim))
        self.W_K: Floats = rng.normal(scale=self.d_k**-0.5, size=(self.d_k, self.hidden_dim))
        self.w: Floats = rng.normal(scale=self.hidden_dim**-0.5, size=self.hidden_dim)

    def forward(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        """The output (…, q_len, d_v) and the weights (…, q_len, kv_len); only the comparison is another one.

        >>> attention = AdditiveAttention(d_q=1, d_k=1, hidden_dim=4)
        >>> output, weights = attention.forward([[1], [2]], [[0], [0]], [[5], [7]], mask=[[True, False], [True, True]])
        >>> weights
        array([[1. , 0. ],
               [0.5, 0.5]])
        """
        scores = self.compute_scores(Q, K)
        weights = self.compute_weights(scores, mask)
        return self.compute_output(weights, V, mask), weights

    __call__ = forward

    def compute_scores(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
        """Compare: w · tanh(query W_Q + key W_K) for every query with every key, (…, q_len, kv_len).

        >>> attention = AdditiveAttention(d_q=1, d_k=1, hidden_dim=1)
        >>> attention.W_Q, attention.W_K, attention.w = np.ones((1, 1)), np.ones((1, 1)), np.array([2.0])
        >>> attention.compute_scores([[0.5]], [[-0.5], [0.5]]).round(3)  # 2 tanh(0) and 2 tanh(1)
        array([[0.   , 1.523]])
        """
        Q, K, W_Q, W_K, w = self._checked(Q, K)
        with np.errstate(invalid="ignore", over="ignore"):  # inf may turn NaN in a key that the mask hides
            from_query = (Q @ W_Q)[..., :, None, :]  # (…, q_len, 1, hidden_dim)
            from_key = (K @ W_K)[..., None, :, :]  # (…, 1, kv_len, hidden_dim)
            # Every pair has a hidden layer of its own: hidden_dim times the memory of the scores.
            return np.tanh(from_query + from_key) @ w

    def compute_weights(self, scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
        """Normalise: the softmax of each row, as for the dot product."""
        return ScaledDotProductAttention(self.d_k).compute_weights(scores, mask)

    def compute_output(
        self, weights: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> Floats:
        """Aggregate: the values mixed by their weights, as for the dot product."""
        return ScaledDotProductAttention(self.d_k).compute_output(weights, V, mask)

    def score_by_loops(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> CountedScores:
        """The scores of one sequence, Q (q_len, d_q) and K (kv_len, d_k), with all the work counted.

        The projections are made once for each token, the rest once for each pair.

        >>> print(AdditiveAttention(d_q=2, d_k=2, hidden_dim=3).score_by_loops(np.ones((5, 2)), np.ones((7, 2))).counts)
        projection_multiply_adds           72
        pair_multiply_adds                105
        additions                         105
        tangents                          105
        """
        Q, K, W_Q, W_K, w = self._checked(Q, K)
        if Q.ndim != 2 or K.ndim != 2:
            raise ArgumentError(
                "score_by_loops",
                received=f"Q of shape {Q.shape} and K of shape {K.shape}",
                expected="Q (q_len, d_q) and K (kv_len, d_k), one sequence",
                hint="Loop over the batch and call it for each, as in Q[0].",
            )
        counts = AdditiveCounts()
        from_query = _project_by_loops(Q, W_Q, counts)
        from_key = _project_by_loops(K, W_K, counts)
        scores, outer = np.empty((len(Q), len(K))), w.tolist()

        for i in range(len(Q)):
            for j in range(len(K)):
                score = 0.0
                for c in range(self.hidden_dim):
                    hidden = from_query[i][c] + from_key[j][c]
                    counts.additions += 1
                    hidden = math.tanh(hidden)
                    counts.tangents += 1
                    score += outer[c] * hidden
                    counts.pair_multiply_adds += 1
                scores[i, j] = score
        return CountedScores(scores, counts)

    def _checked(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Queries, keys and parameters as arrays whose shapes fit each other."""
        Q = as_floats("AdditiveAttention", "Q", Q, "q_len", "d_q")
        K = as_floats("AdditiveAttention", "K", K, "kv_len", "d_k")
        W_Q = as_floats("AdditiveAttention", "W_Q", self.W_Q, "d_q", "hidden_dim")
        W_K = as_floats("AdditiveAttention", "W_K", self.W_K, "d_k", "hidden_dim")
        w = as_floats("AdditiveAttention", "w", self.w, "hidden_dim")
        for name, shape, got, form, want in (
            ("Q", Q.shape, Q.shape[-1:], "(…, q_len, d_q)", (self.d_q,)),
            ("K", K.shape, K.shape[-1:], "(…, kv_len, d_k)", (self.d_k,)),
            ("W_Q", W_Q.shape, W_Q.shape, "(d_q, hidden_dim)", (self.d_q, self.hidden_dim)),
            ("W_K", W_K.shape, W_K.shape, "(d_k, hidden_dim)", (self.d_k, self.hidden_dim)),
            ("w", w.shape, w.shape, "(hidden_dim,)", (self.hidden_dim,)),
        ):
            if got != want:
                raise ArgumentError(
                    f"AdditiveAttention, {name}",
                    received=f"an array of shape {shape}",
                    expected=f"shape {form} with d_q {self.d_q}, d_k {self.d_k} and hidden_dim {self.hidden_dim}",
                    hint="Give it that shape, or make an AdditiveAttention of the size of the array.",
                )
        check_leading_axes("AdditiveAttention", "Q", Q, "K", K)
        return Q, K, W_Q, W_K, w


@dataclass
class AdditiveCounts:
    """How often each kind of work was done: projections once for each token, the others once for each pair.

    >>> from regard.learn import AdditiveAttention, cat
    >>> AdditiveAttention(d_q=4, d_k=4, hidden_dim=2).score_by_loops(cat.Q, cat.K).counts.tangents
    50
    """

    projection_multiply_adds: int = 0
    pair_multiply_adds: int = 0
    additions: int = 0
    tangents: int = 0

    def __str__(self) -> str:
        return "\n".join(f"{field.name:<24}{getattr(self, field.name):>13,}" for field in fields(self))


@dataclass(frozen=True, eq=False)
class CountedScores:
    """What `score_by_loops` found: the `scores` (q_len, kv_len), and the `counts` of the work.

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
