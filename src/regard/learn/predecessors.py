"""The predecessors of attention: kernel smoothing, the recurrent network, and additive attention.

Kernel smoothing is the mean of the values, weighted by the similarity of each key to the query:

    weight of key j  =  κ(query, key j) / Σ κ(query, key m)

Nadaraya and Watson estimated a curve this way in 1964, with a Gaussian κ. Softmax attention is this mean with
κ = exp(query · key / √d_k). Since |query − key|² = |query|² − 2 query · key + |key|², the two differ only by the length
of the key: if all keys have the same length, they are equal.

A recurrent network has one state, updated token by token:

    state_t = tanh(state_{t−1} W + x_t U)

The last state must hold everything the network knows about the text, no matter how long the text is. A step cannot
start before the previous one is finished. The contribution of an early token is multiplied by W and squashed by tanh
at every later step; `compute_influence` measures how much is left. Attention reaches every token in one step.

Additive attention compares by a small network with one hidden layer (Bahdanau, Cho & Bengio, 1409.0473):

    dot product    score = query · key / √d_k
    additive       score = w · tanh(query W_Q + key W_K)

Queries and keys may have different sizes, and the scores are bounded, since tanh stays between −1 and 1. Each pair
costs hidden_dim additions, tanh calls and multiply-adds; the dot product costs d_k multiply-adds, and all pairs are one
matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from regard.learn.by_hand import (
    RowInputs,
    StepsOutputWeights,
    WorkedStep,
    as_text,
    explain_aggregation,
    explain_normalisation,
    format_lines,
    work_out,
)
from regard.learn.checked import CheckedAttention
from regard.learn.softmax_alternatives import normalised_relu
from regard.learn.validation import (
    Floats,
    MaskLike,
    TrueMeans,
    as_floats,
    read_mask,
    require,
)
from regard.render.table import format_table


def exponential_kernel(Q: Floats, K: Floats) -> Floats:
    """Compute exp(query · key / √d_k) for every query and key.

    It overflows if a scaled score exceeds 709; softmax subtracts the largest score of the row first.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).

    Returns:
        Similarities (…, q_len, kv_len).

    >>> exponential_kernel(np.array([[2.0]]), np.array([[0.0], [1.0]])).round(3)
    array([[1.   , 7.389]])
    """
    return np.exp(Q @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1]))


def gaussian_kernel(Q: Floats, K: Floats, width: float | None = None) -> Floats:
    """Compute exp(−|query − key|² / 2 width²) for every query and key.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).
        width: Width of the Gaussian, above 0. The default is the fourth root of d_k; it makes the kernel differ from
            `exponential_kernel` only by the lengths of the vectors.

    Returns:
        Similarities (…, q_len, kv_len).

    >>> gaussian_kernel(np.array([[2.0]]), np.array([[2.0], [1.0]])).round(3)
    array([[1.   , 0.607]])
    """
    width = Q.shape[-1] ** 0.25 if width is None else width
    distances = np.linalg.norm(Q[..., :, None, :] - K[..., None, :, :], axis=-1)
    similarities: Floats = np.exp(-((distances / width) ** 2) / 2)
    return similarities


def kernel_attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    mask: MaskLike = None,
    true_means: TrueMeans = None,
    *,
    kernel: Callable[[Floats, Floats], Floats] = exponential_kernel,
) -> tuple[Floats, Floats]:
    """Compute attention with any kernel that is not negative.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).
        V: Values (…, kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.
        kernel: A function of Q and K that returns similarities (…, q_len, kv_len).

    Returns:
        The output (…, q_len, d_v) and the weights (…, q_len, kv_len).

    Raises:
        ArgumentError: If the shapes are incompatible, or the kernel returns a negative number.

    >>> output, weights = kernel_attention([[0.0]], [[-1.0], [1.0], [9.0]], [[1], [3], [8]], kernel=gaussian_kernel)
    >>> weights.round(3)
    array([[0.5, 0.5, 0. ]])
    >>> output.round(3)
    array([[2.]])
    """
    Q = as_floats("kernel_attention", "Q", Q, "q_len", "d_k")
    attention = CheckedAttention(d_k=Q.shape[-1])
    Q, K, V = attention.check_arrays(Q, K, V)
    similarities = as_floats("kernel_attention", "kernel(Q, K)", kernel(Q, K), "q_len", "kv_len")
    lowest, hint = similarities.min(initial=0), "Use its exponential, or max(kernel, 0)."
    received = f"a kernel with values down to {lowest:g}"
    require(lowest >= 0, "kernel_attention", received, "a kernel that is never negative", hint)
    mask = read_mask("kernel_attention", mask, true_means)
    weights = normalised_relu(similarities, mask)  # none is negative: each is divided by the sum
    return attention.compute_output(weights, V), weights


class RecurrentNetwork:
    """A recurrent network that reads one token at a time into a state of fixed size.

    The parameters `U` (embed_dim, hidden_dim) and `W` (hidden_dim, hidden_dim) are random; you can assign others.

    Args:
        embed_dim: Number of entries in each token.
        hidden_dim: Number of entries in the state.
        seed: Seed of the random parameters.

    >>> states = RecurrentNetwork(embed_dim=2, hidden_dim=3)(np.ones((5, 2)))
    >>> states.shape  # one state after each token; the last one represents the whole text
    (5, 3)
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, seed: int = 0) -> None:
        self.embed_dim, self.hidden_dim = embed_dim, hidden_dim
        rng = np.random.default_rng(seed)
        self.U: Floats = rng.normal(scale=embed_dim**-0.5, size=(embed_dim, hidden_dim))
        self.W: Floats = rng.normal(scale=hidden_dim**-0.5, size=(hidden_dim, hidden_dim))

    def forward(self, x: ArrayLike) -> Floats:
        """Read a sequence, and return the state after each token.

        Args:
            x: Tokens (n, embed_dim).

        Returns:
            States (n, hidden_dim).

        """
        x = as_floats("RecurrentNetwork", "x", x, "n", "embed_dim")
        states = np.zeros((len(x), self.hidden_dim))
        state = np.zeros(self.hidden_dim)
        for t, token in enumerate(x):  # these steps cannot run in parallel
            state = np.tanh(state @ self.W + token @ self.U)
            states[t] = state
        return states

    __call__ = forward

    def compute_influence(self, x: ArrayLike) -> Floats:
        """Compute the influence of each token: the norm of the last state's derivative with respect to it.

        Args:
            x: Tokens (n, embed_dim).

        Returns:
            One number for each token (n,).

        >>> network = RecurrentNetwork(embed_dim=1, hidden_dim=1)
        >>> network.U, network.W = np.array([[1.0]]), np.array([[0.5]])
        >>> network.compute_influence([[0], [0], [0]])  # halved at every step
        array([0.25, 0.5 , 1.  ])
        """
        states = self.forward(x)
        derivative = np.eye(self.hidden_dim)  # of the last state with respect to the state after token t
        norms = np.zeros(len(states))
        for t in reversed(range(len(states))):
            slope = 1 - states[t] ** 2  # the derivative of tanh
            norms[t] = np.linalg.norm((self.U * slope) @ derivative)
            derivative = (self.W * slope) @ derivative
        return norms


class AdditiveAttention(CheckedAttention):
    """Attention with additive scores: only the comparison differs from the dot product, and nothing is scaled.

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
        super().__init__(d_k)
        self.d_q, self.hidden_dim = d_q, hidden_dim
        rng = np.random.default_rng(seed)
        # A variance of 1 / (number of terms) keeps a sum of products about as large as its factors.
        self.W_Q: Floats = rng.normal(scale=d_q**-0.5, size=(d_q, hidden_dim))
        self.W_K: Floats = rng.normal(scale=d_k**-0.5, size=(d_k, hidden_dim))
        self.w: Floats = rng.normal(scale=hidden_dim**-0.5, size=hidden_dim)

    def compute_scores(self, Q: Floats, K: Floats) -> Floats:
        """Compare: compute w · tanh(query W_Q + key W_K) for every query and key.

        Args:
            Q: Queries (…, q_len, d_q).
            K: Keys (…, kv_len, d_k).

        Returns:
            Scores (…, q_len, kv_len).

        >>> attention = AdditiveAttention(d_q=1, d_k=1, hidden_dim=1)
        >>> attention.W_Q, attention.W_K, attention.w = np.ones((1, 1)), np.ones((1, 1)), np.array([2.0])
        >>> attention.compute_scores(np.array([[0.5]]), np.array([[-0.5], [0.5]])).round(3)  # 2 tanh(0) and 2 tanh(1)
        array([[0.   , 1.523]])
        """
        with np.errstate(invalid="ignore", over="ignore"):  # a masked key may be infinite
            from_query = (Q @ self.W_Q)[..., :, None, :]  # (…, q_len, 1, hidden_dim)
            from_key = (K @ self.W_K)[..., None, :, :]  # (…, 1, kv_len, hidden_dim)
            # Every pair has its own hidden layer: hidden_dim times the memory of the scores.
            return np.tanh(from_query + from_key) @ self.w

    def scale_scores(self, scores: Floats) -> Floats:
        return scores  # tanh already keeps them small

    def check_arrays(self, Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> tuple[Floats, Floats, Floats]:
        Q = as_floats("AdditiveAttention", "Q", Q, "q_len", "d_q")  # a query may be wider than a key
        return Q, *super().check_arrays(K, K, V)[1:]

    def score_by_loops(self, Q: ArrayLike, K: ArrayLike) -> CountedScores:
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
        Q, K = np.asarray(Q, np.float64), np.asarray(K, np.float64)
        received, hint = (
            f"Q of shape {Q.shape} and K of shape {K.shape}",
            "Pass one sequence, e.g. Q[0] and K[0].",
        )
        require(Q.ndim == K.ndim == 2, "score_by_loops", received, "Q (q_len, d_q) and K (kv_len, d_k)", hint)
        counts = AdditiveCounts()
        from_query = _project_by_loops(Q, self.W_Q, counts)
        from_key = _project_by_loops(K, self.W_K, counts)
        scores, output_weights = np.empty((len(Q), len(K))), self.w.tolist()

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


@work_out.register
def _work_out_additive(attention: AdditiveAttention, inputs: RowInputs) -> StepsOutputWeights:
    row, arrays = inputs.row, (inputs.Q, inputs.K, inputs.V)
    output, weights = attention.forward(*arrays)
    scores = attention.compute_scores(inputs.Q, inputs.K)[row]
    query, keys = as_text(inputs.Q[row] @ attention.W_Q), inputs.K @ attention.W_K
    lines = [
        [token, f"{as_text(attention.w)}·tanh({query} + {as_text(key)}) = {as_text(score)}"]
        for token, key, score in zip(inputs.tokens, keys, scores, strict=True)
    ]
    steps = [
        WorkedStep("1. Compare the query with each key: w · tanh(query W_Q + key W_K)", format_lines(lines)),
        WorkedStep("2. No scaling: tanh already keeps the scores small", ()),
        explain_normalisation(attention, scores, weights[row]),
        explain_aggregation(weights[row], inputs.V, output[row]),
    ]
    return steps, output[row], weights[row]


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
