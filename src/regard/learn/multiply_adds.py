"""Every multiplication of attention, one at a time, with its factors and its running sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.validation import Bools, TrueMeans, as_floats, as_mask, read_mask


@dataclass(frozen=True)
class Multiplication:
    """One multiply-add: `left` · `right` is added to an entry of `table`, which then holds `total`.

    `table` is "scores" or "output", and the entry is [`row`, `column`]. `term` is the index of this product in its sum:
    the coordinate for a score, the key for an output. `number` counts from 1 over both tables.

    >>> from regard.learn import cat
    >>> next(iter_multiplications(cat.Q, cat.K, cat.V))
    Multiplication(number=1, table='scores', row=0, column=0, term=0, left=1.0, right=0.0, total=0.0)
    """

    number: int
    table: str
    row: int
    column: int
    term: int
    left: float
    right: float
    total: float

    def __str__(self) -> str:
        return (
            f"{self.number:>4}  {self.table}[{self.row}, {self.column}]"
            f" += {self.left:.4g} · {self.right:.4g}  →  {self.total:.4g}"
        )


def iter_multiplications(
    Q: npt.ArrayLike,
    K: npt.ArrayLike,
    V: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    true_means: TrueMeans | None = None,
) -> Iterator[Multiplication]:
    """Iterate over the multiply-adds: first those of the scores before scaling, then those of the output.

    Scaling and softmax happen in between and are not included. Masked pairs are skipped, as in `attention_by_loops`.

    Args:
        Q: Queries (q_len, d_k).
        K: Keys (kv_len, d_k).
        V: Values (kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.

    Returns:
        An iterator over the multiply-adds in order.

    Raises:
        ArgumentError: If the arrays are not one head of one sequence.

    >>> for step in iter_multiplications(Q=[[1, 2]], K=[[3, 4], [3, 4]], V=[[6], [8]]):
    ...     print(step)
       1  scores[0, 0] += 1 · 3  →  3
       2  scores[0, 0] += 2 · 4  →  11
       3  scores[0, 1] += 1 · 3  →  3
       4  scores[0, 1] += 2 · 4  →  11
       5  output[0, 0] += 0.5 · 6  →  3
       6  output[0, 0] += 0.5 · 8  →  7
    """
    Q = as_floats("iter_multiplications", "Q", Q, "q_len", "d_k")
    K = as_floats("iter_multiplications", "K", K, "kv_len", "d_k")
    V = as_floats("iter_multiplications", "V", V, "kv_len", "d_v")
    if Q.ndim != 2 or K.ndim != 2 or V.ndim != 2:
        raise ArgumentError(
            "iter_multiplications",
            received=f"Q of shape {Q.shape}, K of shape {K.shape} and V of shape {V.shape}",
            expected="Q (q_len, d_k), K (kv_len, d_k) and V (kv_len, d_v), one head of one sequence",
            hint="Select one head of one sequence, e.g. Q[0, 3].",
        )
    mask = read_mask("iter_multiplications", mask, true_means)
    attention = ScaledDotProductAttention(d_k=Q.shape[-1])
    _, weights = attention(Q, K, V, mask)  # validates the shapes before the first step
    visible = np.ones(weights.shape, bool)
    if mask is not None:
        visible = as_mask("iter_multiplications", mask, weights.shape)
    return _iter_products(Q.tolist(), K.tolist(), V.T.tolist(), weights.tolist(), visible)


Matrix = list[list[float]]


def _iter_products(
    queries: Matrix, keys: Matrix, columns: Matrix, weights: Matrix, visible: Bools
) -> Iterator[Multiplication]:
    number = 0
    # Both tables are dot products of rows: queries with keys, then weights with the columns of V.
    for table, lefts, rights in (("scores", queries, keys), ("output", weights, columns)):
        for row, left in enumerate(lefts):
            for column, right in enumerate(rights):
                total = 0.0
                for term, (a, b) in enumerate(zip(left, right, strict=True)):
                    if visible[row, column if table == "scores" else term]:
                        total += a * b
                        number += 1
                        yield Multiplication(number, table, row, column, term, a, b, total)
