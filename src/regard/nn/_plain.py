"""The module that everybody writes first."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from regard.core.attention import matrix_of
from regard.errors import ArgumentError, describe_argument
from regard.masks import Mask

Tensor = Any  # the types of torch are not followed


class ScaledDotProductAttention(nn.Module):  # type: ignore[misc]
    """softmax(Q Kᵀ / √d_k) V, as a module: (weights, output).

    >>> import torch
    >>> attend = ScaledDotProductAttention(d_k=2)
    >>> weights, output = attend(torch.eye(2), torch.eye(2), torch.tensor([[1.0], [3.0]]))
    >>> weights
    tensor([[0.6698, 0.3302],
            [0.3302, 0.6698]])
    """

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.d_k = d_k

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
        """Q (…, q_len, d_k), K (…, kv_len, d_k), V (…, kv_len, d_v); `mask` as in `regard.attention`, True = attend."""
        if Q.shape[-1] != self.d_k:
            raise ArgumentError(
                "ScaledDotProductAttention",
                received=f"Q as {describe_argument(Q)}",
                expected=f"(…, q_len, d_k {self.d_k})",
                hint=f"Make the module for this width: ScaledDotProductAttention({Q.shape[-1]}).",
            )
        A = matrix_of(Q, K, V, mask=mask, scale=1 / math.sqrt(self.d_k))
        return A.to_dense(), A @ V

    def extra_repr(self) -> str:
        return f"d_k={self.d_k}"
