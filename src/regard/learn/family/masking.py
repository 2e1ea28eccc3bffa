"""Members that change only who may be seen, or from where is looked: the arithmetic stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regard.learn.family.variant import Variant, ahead, mask_for
from regard.learn.validation import Bools, Floats, as_count


class Masked(Variant):
    """Attention that hides keys by a rule of its own, and by the mask, if one is given, as well."""

    def forward(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        mask = mask_for(Q, K, mask)
        return super().forward(Q, K, V, mask & self.sees(*mask.shape[-2:]))

    def sees(self, q_len: int, kv_len: int) -> Bools:
        """Which keys each query may see, (q_len, kv_len)."""
        return np.ones((q_len, kv_len), dtype=bool)


class Causal(Masked):
    """Each query sees its own position and what came before; the last query stands at the last key.

    >>> Causal(d_k=1).sees(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    def sees(self, q_len: int, kv_len: int) -> Bools:
        return ahead(q_len, kv_len) <= 0


class SlidingWindow(Masked):
    """Each query sees the last `size` keys, its own included; the last query stands at the last key.

    >>> SlidingWindow(d_k=1, size=2).sees(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    def __init__(self, d_k: int, size: int) -> None:
        super().__init__(d_k)
        self.size = as_count("SlidingWindow", "size", size, least=1)

    def sees(self, q_len: int, kv_len: int) -> Bools:
        distance = ahead(q_len, kv_len)
        return (-self.size < distance) & (distance <= 0)


class BlockSparse(Masked):
    """Each token sees its own block of `block` tokens; the tokens of `everywhere` see all and are seen by all.

    >>> BlockSparse(d_k=1, block=2, everywhere=[4]).sees(5, 5).astype(int)
    array([[1, 1, 0, 0, 1],
           [1, 1, 0, 0, 1],
           [0, 0, 1, 1, 1],
           [0, 0, 1, 1, 1],
           [1, 1, 1, 1, 1]])
    """

    def __init__(self, d_k: int, block: int, everywhere: Sequence[int] = ()) -> None:
        super().__init__(d_k)
        self.block = as_count("BlockSparse", "block", block, least=1)
        self.everywhere = [as_count("BlockSparse", "everywhere", index, least=0) for index in everywhere]

    def sees(self, q_len: int, kv_len: int) -> Bools:
        q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]
        same_block: Bools = q // self.block == k // self.block
        return same_block | np.isin(q, self.everywhere) | np.isin(k, self.everywhere)


class Cross(Variant):
    """Queries of one sequence, keys and values of another: nothing is overridden, only the inputs differ.

    >>> output, weights = Cross(d_k=1)(Q=[[0], [0]], K=[[1], [2], [3]], V=[[3], [6], [9]])
    >>> weights.shape, output.shape
    ((2, 3), (2, 1))
    """
