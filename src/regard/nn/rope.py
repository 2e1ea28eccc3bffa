"""Rotary embedding as a module: the tables are computed once, and a rotation costs two products."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from regard.errors import ArgumentError, describe_argument
from regard.positions import RopeLayout, check_rope_layout, rope_frequencies, rope_tables, rotate

Tensor = Any  # mypy does not follow torch's types


class Rope(nn.Module):  # type: ignore[misc]
    """Rotation of queries or keys by their positions, as `regard.rope` does it, with cached tables.

    Tables are computed in float64 and stored in at least float32, even if the module is cast to a narrower dtype:
    bfloat16 cannot represent positions beyond 256.

    Args:
        head_dim: The width of one head, an even number.
        layout: Which entries form a pair, `"half"` or `"interleaved"`, as in `regard.rope`.
        base: The base of the frequencies. Default 10,000.
        frequencies: The angle of each pair from one position to the next, (pairs,), for models that scale their
            angles. With fewer than head_dim / 2 frequencies, the last entries of a head are not rotated. Default:
            base^(−2i/head_dim).
        factor: The factor of the rotated entries (YaRN's attention factor). Default 1.

    Raises:
        ArgumentError: If `head_dim` is odd, `layout` is unknown, or there are more frequencies than pairs.

    >>> import torch
    >>> Rope(2, layout="half")(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[[1.0000, 0.0000],
             [0.5403, 0.8415]]])
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        layout: RopeLayout,
        base: float = 10_000.0,
        frequencies: Any = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        check_rope_layout(layout, "Rope")
        if frequencies is None:
            frequencies = rope_frequencies(head_dim, base)
        angles = np.asarray(
            frequencies.cpu() if isinstance(frequencies, torch.Tensor) else frequencies, np.float64
        )
        if head_dim % 2 or angles.ndim != 1 or 2 * len(angles) > head_dim:
            raise ArgumentError(
                "Rope",
                received=f"head_dim {head_dim} and frequencies of shape {angles.shape}",
                expected="an even head_dim, and at most one frequency for each pair of entries",
                hint="Entries are rotated in pairs: head_dim / 2 frequencies rotate a whole head.",
            )
        self.head_dim, self.layout, self.factor = head_dim, layout, factor
        self.frequencies = angles
        # Recomputed from the frequencies, so a checkpoint does not need them.
        self.register_buffer("cos", torch.empty(0, 2 * len(angles)), persistent=False)
        self.register_buffer("sin", torch.empty(0, 2 * len(angles)), persistent=False)

    def forward(self, x: Tensor, positions: Any = None) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: (batch, heads, n, head_dim).
            positions: The position of the first token, or the positions of all, (n,) or (batch, n). Default: 0.

        Returns:
            The rotated x, with its shape and dtype.

        Raises:
            ArgumentError: If positions are negative, not integers, or not one for each token.
        """
        start = 0 if positions is None else positions
        if isinstance(start, int):
            self._extend_tables(start + x.shape[-2], x)
            cos, sin = self.cos[start : start + x.shape[-2]], self.sin[start : start + x.shape[-2]]
        else:
            at = torch.as_tensor(positions, device=x.device)
            fits = at.shape[-1:] == x.shape[-2:-1] and (
                at.ndim == 1 or (at.ndim == 2 and len(at) in (1, len(x)))
            )
            if not fits or at.is_floating_point() or (at < 0).any():
                raise ArgumentError(
                    "Rope",
                    received=f"positions as {describe_argument(at)}"
                    + (", some below 0" if (at < 0).any() else ""),
                    expected=f"integers from 0, of shape ({x.shape[-2]},) or ({len(x)}, {x.shape[-2]})",
                    hint="Pass one position for each token, or the position of the first token as a number.",
                )
            self._extend_tables(int(at.max()) + 1 if at.numel() else 0, x)
            cos, sin = self.cos[at], self.sin[at]  # (batch, n, pairs · 2)
            if at.ndim > 1:
                cos, sin = cos[:, None], sin[:, None]  # broadcast over heads
        width = cos.shape[-1]
        if width == x.shape[-1]:
            return rotate(x.to(cos.dtype), cos, sin, self.layout).to(x.dtype)
        rotated = rotate(x[..., :width].to(cos.dtype), cos, sin, self.layout).to(x.dtype)
        return torch.cat([rotated, x[..., width:]], -1)

    def _extend_tables(self, length: int, x: Tensor) -> None:
        """Extend the tables to at least `length` positions, in at least the dtype of x, on its device."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if len(self.cos) >= length and self.cos.dtype == dtype and self.cos.device == x.device:
            return
        length = max(length, 2 * len(self.cos)) if len(self.cos) < length else len(self.cos)
        tables = rope_tables(np.arange(length), self.frequencies, self.layout)
        self.cos, self.sin = (torch.tensor(self.factor * t, dtype=dtype, device=x.device) for t in tables)

    def extra_repr(self) -> str:
        rotated = 2 * len(self.frequencies)
        partial = "" if rotated == self.head_dim else f", {rotated} of them rotated"
        return f"head_dim {self.head_dim}{partial}, {self.layout}"
