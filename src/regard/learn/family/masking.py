"""Variants that change which keys a query attends to, or where the queries come from; the arithmetic stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regard.learn.family.variant import AttentionVariant, broadcast_mask, relative_positions
from regard.learn.validation import Bools, Floats, TrueMeans, as_count, read_mask


class Masked(AttentionVariant):
    """Attention with a built-in mask. If the caller passes a mask as well, a key must be allowed by both.

    Args:
        d_k: Number of entries in each query and key.
    """

    def forward(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        mask = broadcast_mask(Q, K, read_mask("mask", mask, true_means))
        return super().forward(Q, K, V, mask & self.create_mask(*mask.shape[-2:]))

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        """Create the built-in mask.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.

        Returns:
            A boolean mask (q_len, kv_len), True = attend.
        """
        return np.ones((q_len, kv_len), dtype=bool)


class Causal(Masked):
    """Each query attends to its own position and those before it; the last query is aligned with the last key.

    Args:
        d_k: Number of entries in each query and key.

    >>> Causal(d_k=1).create_mask(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        return relative_positions(q_len, kv_len) <= 0


class SlidingWindow(Masked):
    """Each query attends to the last `size` keys, its own included; the last query is aligned with the last key.

    Args:
        d_k: Number of entries in each query and key.
        size: Number of keys in the window.

    >>> SlidingWindow(d_k=1, size=2).create_mask(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    def __init__(self, d_k: int, size: int) -> None:
        super().__init__(d_k)
        self.size = as_count("SlidingWindow", "size", size, minimum=1)

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        distance = relative_positions(q_len, kv_len)
        return (-self.size < distance) & (distance <= 0)


class BlockSparse(Masked):
    """Each token attends to its own block; global tokens attend to all tokens, and all tokens attend to them.

    Args:
        d_k: Number of entries in each query and key.
        block_size: Number of tokens in a block.
        global_tokens: Positions of the global tokens.

    >>> BlockSparse(d_k=1, block_size=2, global_tokens=[4]).create_mask(5, 5).astype(int)
    array([[1, 1, 0, 0, 1],
           [1, 1, 0, 0, 1],
           [0, 0, 1, 1, 1],
           [0, 0, 1, 1, 1],
           [1, 1, 1, 1, 1]])
    """

    def __init__(self, d_k: int, block_size: int, global_tokens: Sequence[int] = ()) -> None:
        super().__init__(d_k)
        self.block_size = as_count("BlockSparse", "block_size", block_size, minimum=1)
        self.global_tokens = [as_count("BlockSparse", "global_tokens", i, minimum=0) for i in global_tokens]

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]
        same_block: Bools = q // self.block_size == k // self.block_size
        return same_block | np.isin(q, self.global_tokens) | np.isin(k, self.global_tokens)


class Cross(AttentionVariant):
    """Queries from one sequence, keys and values from another: only the inputs differ, nothing is overridden.

    Args:
        d_k: Number of entries in each query and key.

    >>> output, weights = Cross(d_k=1)(Q=[[0], [0]], K=[[1], [2], [3]], V=[[3], [6], [9]])
    >>> output.shape, weights.shape
    ((2, 1), (2, 3))
    """
