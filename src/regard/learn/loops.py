"""Attention with every loop written out, and every operation counted where it happens.

No count comes from a formula: each line of arithmetic is followed by the line that counts it. Without a mask, the
multiply-adds add up to n_q · n_k · (d_k + d_v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.validation import Floats, TrueMeans, as_floats, as_mask, read_mask
from regard.render.table import format_table

FLOAT_BYTES = np.dtype(np.float64).itemsize


@dataclass
class OperationCounts:
    """The number of operations of each kind, and the bytes of the tables written.

    >>> print(attention_by_loops([[1, 0]], [[1, 0], [0, 1]], [[5], [6]]).counts)
    score_multiply_adds            4
    value_multiply_adds            2
    additions                      4
    comparisons                    1
    exponentials                   2
    divisions                      4
    bytes_scores                  16
    bytes_exponentials            16
    bytes_weights                 16
    bytes_output                   8
    multiply_adds                  6
    bytes_written                 56
    """

    score_multiply_adds: int = 0
    value_multiply_adds: int = 0
    additions: int = 0
    comparisons: int = 0
    exponentials: int = 0
    divisions: int = 0
    bytes_scores: int = 0
    bytes_exponentials: int = 0
    bytes_weights: int = 0
    bytes_output: int = 0

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of the scores and of the output together."""
        return self.score_multiply_adds + self.value_multiply_adds

    @property
    def bytes_written(self) -> int:
        """The bytes of all four tables together."""
        return self.bytes_scores + self.bytes_exponentials + self.bytes_weights + self.bytes_output

    def __str__(self) -> str:
        names = [field.name for field in fields(self)] + ["multiply_adds", "bytes_written"]
        return format_table([[name, getattr(self, name)] for name in names], align=["left", "right"])


@dataclass(frozen=True, eq=False)
class CountedAttention:
    """The result of `attention_by_loops`: `output`, `weights`, scaled `scores`, and the `counts` of operations.

    >>> from regard.learn import attention_by_loops, cat
    >>> result = attention_by_loops(cat.Q, cat.K, cat.V)
    >>> result.weights[2].round(4), result.counts.exponentials
    (array([0.1519, 0.2505, 0.2505, 0.1519, 0.1951]), 25)
    """

    output: Floats
    weights: Floats
    scores: Floats
    counts: OperationCounts

    def __str__(self) -> str:
        (q_len, kv_len), d_v = self.weights.shape, self.output.shape[-1]
        return f"attention by loops: q_len {q_len}, kv_len {kv_len}, d_v {d_v}\n{self.counts}"


def attention_by_loops(
    Q: npt.ArrayLike,
    K: npt.ArrayLike,
    V: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    true_means: TrueMeans | None = None,
) -> CountedAttention:
    """Compute attention with explicit loops, and count every operation.

    A masked pair costs no arithmetic, but its cell is still written.

    Args:
        Q: Queries (q_len, d_k).
        K: Keys (kv_len, d_k).
        V: Values (kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.

    Returns:
        The output (q_len, d_v), the weights and scaled scores (q_len, kv_len), and the counts.

    Raises:
        ArgumentError: If the arrays are not one head of one sequence, or their shapes do not fit together.

    >>> result = attention_by_loops([[0, 0]], [[1, 2], [3, 4]], [[10], [30]])
    >>> result.output, result.weights
    (array([[20.]]), array([[0.5, 0.5]]))
    >>> result.counts.multiply_adds == 1 * 2 * (2 + 1)
    True
    """
    Q = _check_table("Q", Q, "q_len", "d_k")
    K = _check_table("K", K, "kv_len", "d_k")
    V = _check_table("V", V, "kv_len", "d_v")
    (n_q, d_k), (n_k, d_v) = Q.shape, V.shape
    if K.shape != (n_k, d_k) or d_k == 0:
        raise ArgumentError(
            "attention_by_loops",
            received=f"Q of shape {Q.shape}, K of shape {K.shape} and V of shape {V.shape}",
            expected="Q (q_len, d_k), K (kv_len, d_k) and V (kv_len, d_v), with d_k at least 1",
            hint="Project queries and keys to the same d_k, and compute K and V from the same sequence.",
        )
    attend = np.ones((n_q, n_k), dtype=bool)
    mask = read_mask("attention_by_loops", mask, true_means)
    if mask is not None:
        attend &= as_mask("attention_by_loops", mask, (n_q, n_k))

    counts = OperationCounts()
    scores, weights, output = np.zeros((n_q, n_k)), np.zeros((n_q, n_k)), np.zeros((n_q, d_v))
    q, k, v = Q.tolist(), K.tolist(), V.tolist()  # plain Python floats
    root = math.sqrt(d_k)

    for i in range(n_q):
        visible = [j for j in range(n_k) if attend[i, j]]

        # 1. compare and 2. scale: one dot product for each key this query attends to.
        for j in range(n_k):
            scores[i, j] = -math.inf
            if attend[i, j]:
                dot = 0.0
                for c in range(d_k):
                    dot += q[i][c] * k[j][c]
                    counts.score_multiply_adds += 1
                scores[i, j] = dot / root
                counts.divisions += 1
            counts.bytes_scores += FLOAT_BYTES

        # 3. normalise: the highest score, the exponentials of the differences, their sum, the shares.
        row = scores[i].tolist()
        highest = row[visible[0]] if visible else -math.inf
        for j in visible[1:]:
            highest = row[j] if row[j] > highest else highest
            counts.comparisons += 1
        shift = 0.0 if highest == -math.inf else highest

        exponentials, total = [0.0] * n_k, 0.0
        for j in visible:
            exponentials[j] = math.exp(row[j] - shift)
            counts.additions += 1
            counts.exponentials += 1
            counts.bytes_exponentials += FLOAT_BYTES
            total += exponentials[j]
            counts.additions += 1

        for j in range(n_k):
            weights[i, j] = 0.0
            if attend[i, j] and total != 0.0:
                weights[i, j] = exponentials[j] / total
                counts.divisions += 1
            counts.bytes_weights += FLOAT_BYTES

        # 4. aggregate: the sum of share · value.
        share = weights[i].tolist()
        for c in range(d_v):
            mixed = 0.0
            for j in visible:
                mixed += share[j] * v[j][c]
                counts.value_multiply_adds += 1
            output[i, c] = mixed
            counts.bytes_output += FLOAT_BYTES

    return CountedAttention(output, weights, scores, counts)


def _check_table(name: str, array: npt.ArrayLike, *axes: str) -> Floats:
    table = as_floats("attention_by_loops", name, array, *axes)
    if table.ndim != 2:
        raise ArgumentError(
            "attention_by_loops",
            received=f"{name} of shape {table.shape}",
            expected=f"{name} of shape ({', '.join(axes)}), one head of one sequence",
            hint="Call it once for each sequence and head, e.g. with Q[0, 3].",
        )
    return table
