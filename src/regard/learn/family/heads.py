"""Several heads: each compares and mixes a few columns by itself, or shares its keys and values with others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.family.variant import Variant
from regard.learn.validation import Floats, as_count, as_floats


class MultiHead(Variant):
    """`num_heads` heads of `d_k` columns each: weights (…, num_heads, q_len, kv_len), outputs side by side.

    >>> output, weights = MultiHead(d_k=1, num_heads=2)([[9, 0]], [[9, 0], [0, 9]], [[1, 1], [3, 3]])
    >>> weights.round(2)
    array([[[1. , 0. ]],
    <BLANKLINE>
           [[0.5, 0.5]]])
    >>> output.round(2)
    array([[1., 2.]])
    """

    def __init__(self, d_k: int, num_heads: int) -> None:
        super().__init__(d_k)
        self.num_heads = as_count("MultiHead", "num_heads", num_heads, least=1)

    def forward(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        output, weights = super().forward(*self.heads(Q, K, V), mask)
        return self.join(output), weights

    def heads(self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike) -> tuple[Floats, Floats, Floats]:
        """What each head works on: Q, K and V, each (…, num_heads, n, columns)."""
        n = self.num_heads
        return self.split("Q", Q, n), self.split("K", K, n), self.split("V", V, n)

    def split(self, name: str, x: npt.ArrayLike, parts: int) -> Floats:
        """The columns dealt out in equal parts: (…, n, columns) to (…, parts, n, columns / parts)."""
        x = as_floats("MultiHead", name, x, "n", "columns")
        if x.shape[-1] % parts:
            raise ArgumentError(
                type(self).__name__,
                received=f"{name} of shape {x.shape}, {x.shape[-1]} columns",
                expected=f"columns that divide into {parts} equal parts",
                hint=f"Take a multiple of {parts} columns, or another number of heads.",
            )
        return x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts).swapaxes(-3, -2)

    def join(self, x: Floats) -> Floats:
        """The heads side by side: (…, num_heads, n, d) to (…, n, num_heads · d)."""
        x = x.swapaxes(-3, -2)
        return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class GroupedQuery(MultiHead):
    """`num_heads` heads of queries, `num_kv_heads` of keys and values: each of these serves several in a row.

    >>> output, weights = GroupedQuery(d_k=1, num_heads=4, num_kv_heads=2)([[1, 2, 3, 4]], [[5, 6]], [[7, 8]])
    >>> weights.shape, output
    ((4, 1, 1), array([[7., 7., 8., 8.]]))
    """

    def __init__(self, d_k: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(d_k, num_heads)
        self.num_kv_heads = as_count("GroupedQuery", "num_kv_heads", num_kv_heads, least=1)
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(
                "GroupedQuery",
                received=f"num_heads {num_heads} and num_kv_heads {num_kv_heads}",
                expected="as many heads of queries for each head of keys",
                hint=f"Take num_kv_heads from {[n for n in range(1, num_heads + 1) if num_heads % n == 0]}.",
            )

    def heads(self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike) -> tuple[Floats, Floats, Floats]:
        """What each head works on; heads of one group are given the same keys and values."""
        n, group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        K, V = self.split("K", K, n), self.split("V", V, n)
        return self.split("Q", Q, self.num_heads), K.repeat(group, axis=-3), V.repeat(group, axis=-3)


class MultiQuery(GroupedQuery):
    """`num_heads` heads of queries, one of keys and values, which serves them all.

    >>> output, weights = MultiQuery(d_k=1, num_heads=2)([[9, 0]], [[9], [0]], [[1], [3]])
    >>> output.round(2)
    array([[1., 2.]])
    """

    def __init__(self, d_k: int, num_heads: int) -> None:
        super().__init__(d_k, num_heads, num_kv_heads=1)


def pooled(x: npt.ArrayLike, num_heads: int, num_kv_heads: int) -> Floats:
    """Fewer heads made of many, (…, n, columns) to fewer columns: each group is replaced by its mean.

    This is how Ainslie et al. (2305.13245) turn a trained multi-head model into a grouped one.

    >>> pooled([[1, 3, 10, 20]], num_heads=4, num_kv_heads=2)
    array([[ 2., 15.]])
    """
    x = as_floats("pooled", "x", x, "n", "columns")
    d = x.shape[-1] // num_heads
    mean: Floats = x.reshape(*x.shape[:-1], num_kv_heads, num_heads // num_kv_heads, d).mean(axis=-2)
    return np.ascontiguousarray(mean).reshape(*x.shape[:-1], num_kv_heads * d)
