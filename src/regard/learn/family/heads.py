"""Variants with several heads: each head attends with a part of the columns, and heads may share keys and values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.family.variant import AttentionVariant
from regard.learn.validation import Floats, TrueMeans, as_count, as_floats


class MultiHead(AttentionVariant):
    """Several heads of `d_k` columns each; their outputs are concatenated.

    The weights are (…, num_heads, q_len, kv_len).

    Args:
        d_k: Number of query and key columns per head.
        num_heads: Number of heads.

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
        self.num_heads = as_count("MultiHead", "num_heads", num_heads, minimum=1)

    def forward(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        output, weights = super().forward(*self.split_inputs(Q, K, V), mask, true_means)
        return self.merge(output), weights

    def split_inputs(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike
    ) -> tuple[Floats, Floats, Floats]:
        """Split Q, K and V into heads.

        Args:
            Q: Queries (…, q_len, columns).
            K: Keys (…, kv_len, columns).
            V: Values (…, kv_len, columns).

        Returns:
            Q, K and V, each (…, num_heads, n, columns / num_heads).
        """
        n = self.num_heads
        return self.split("Q", Q, n), self.split("K", K, n), self.split("V", V, n)

    def split(self, name: str, x: npt.ArrayLike, parts: int) -> Floats:
        """Split the columns into equal parts.

        Args:
            name: Name of the array, for the error message.
            x: An array (…, n, columns).
            parts: Number of parts.

        Returns:
            The parts (…, parts, n, columns / parts).

        Raises:
            ArgumentError: If the columns do not divide into that many parts.
        """
        x = as_floats("MultiHead", name, x, "n", "columns")
        if x.shape[-1] % parts:
            raise ArgumentError(
                type(self).__name__,
                received=f"{name} of shape {x.shape}, {x.shape[-1]} columns",
                expected=f"columns that divide into {parts} equal parts",
                hint=f"Use a multiple of {parts} columns, or another number of heads.",
            )
        return x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts).swapaxes(-3, -2)

    def merge(self, x: Floats) -> Floats:
        """Concatenate the heads.

        Args:
            x: Heads (…, num_heads, n, d).

        Returns:
            The heads side by side (…, n, num_heads · d).
        """
        x = x.swapaxes(-3, -2)
        return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class GroupedQuery(MultiHead):
    """Fewer heads of keys and values than of queries: each key head serves a group of consecutive query heads.

    Args:
        d_k: Number of query and key columns per head.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.

    >>> output, weights = GroupedQuery(d_k=1, num_heads=4, num_kv_heads=2)([[1, 2, 3, 4]], [[5, 6]], [[7, 8]])
    >>> weights.shape, output
    ((4, 1, 1), array([[7., 7., 8., 8.]]))
    """

    def __init__(self, d_k: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(d_k, num_heads)
        self.num_kv_heads = as_count("GroupedQuery", "num_kv_heads", num_kv_heads, minimum=1)
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
            raise ArgumentError(
                "GroupedQuery",
                received=f"num_heads {num_heads} and num_kv_heads {num_kv_heads}",
                expected="the same number of query heads for each key head",
                hint=f"Choose num_kv_heads from {divisors}.",
            )

    def split_inputs(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike
    ) -> tuple[Floats, Floats, Floats]:
        """Split Q, K and V into heads, and repeat each key and value head for its group of query heads.

        Args:
            Q: Queries (…, q_len, columns).
            K: Keys (…, kv_len, columns).
            V: Values (…, kv_len, columns).

        Returns:
            Q, K and V, each with num_heads heads: (…, num_heads, n, columns per head).
        """
        n, group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        K, V = self.split("K", K, n), self.split("V", V, n)
        return self.split("Q", Q, self.num_heads), K.repeat(group, axis=-3), V.repeat(group, axis=-3)


class MultiQuery(GroupedQuery):
    """Several heads of queries, and one head of keys and values for all of them.

    Args:
        d_k: Number of query and key columns per head.
        num_heads: Number of query heads.

    >>> output, weights = MultiQuery(d_k=1, num_heads=2)([[9, 0]], [[9], [0]], [[1], [3]])
    >>> output.round(2)
    array([[1., 2.]])
    """

    def __init__(self, d_k: int, num_heads: int) -> None:
        super().__init__(d_k, num_heads, num_kv_heads=1)


def mean_pool_heads(x: npt.ArrayLike, num_heads: int, num_kv_heads: int) -> Floats:
    """Replace each group of heads by its mean.

    Ainslie et al. (2305.13245) convert a trained multi-head model into a grouped-query model this way.

    Args:
        x: Keys or values (…, n, columns), with the heads side by side.
        num_heads: Number of heads in `x`.
        num_kv_heads: Number of heads to keep; divides `num_heads`.

    Returns:
        The pooled heads (…, n, columns · num_kv_heads / num_heads).

    >>> mean_pool_heads([[1, 3, 10, 20]], num_heads=4, num_kv_heads=2)
    array([[ 2., 15.]])
    """
    x = as_floats("mean_pool_heads", "x", x, "n", "columns")
    d = x.shape[-1] // num_heads
    mean: Floats = x.reshape(*x.shape[:-1], num_kv_heads, num_heads // num_kv_heads, d).mean(axis=-2)
    return np.ascontiguousarray(mean).reshape(*x.shape[:-1], num_kv_heads * d)
