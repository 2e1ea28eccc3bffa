"""Rotary positions as a module: the tables are made once, and turned with at the speed of two products."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from regard.errors import ArgumentError, describe_argument
from regard.positions import RopeLayout, check_rope_layout, rope_frequencies, rope_tables, rotate

Tensor = Any  # the types of torch are not followed


class Rope(nn.Module):  # type: ignore[misc]
    """Queries or keys turned by their positions, as `regard.rope` does, with the tables kept.

    `layout` as in `regard.rope`. Models that stretch their angles give the `frequencies` themselves, (pairs,): the
    angle of each pair from one position to the next. Fewer than head_dim / 2 of them leave the last entries of a head
    as they are. What is turned is multiplied by `factor` (YaRN's attention factor). Tables are computed in float64 and
    kept in float32 at least, whatever the module is cast to: positions beyond 256 do not fit into bfloat16.

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
                hint="Entries are turned in pairs: head_dim / 2 frequencies turn a whole head.",
            )
        self.head_dim, self.layout, self.factor = head_dim, layout, factor
        self.frequencies = angles
        # Found again from the frequencies, so a checkpoint does not carry them.
        self.register_buffer("cos", torch.empty(0, 2 * len(angles)), persistent=False)
        self.register_buffer("sin", torch.empty(0, 2 * len(angles)), persistent=False)

    def forward(self, x: Tensor, positions: Any = None) -> Tensor:
        """x (batch, heads, n, head_dim), turned.

        `positions` is where the first token stands, or (n,) or (batch, n) positions; left out, they count from 0.
        """
        start = 0 if positions is None else positions
        if isinstance(start, int):
            self._reach(start + x.shape[-2], x)
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
                    expected=f"whole numbers from 0, of shape ({x.shape[-2]},) or ({len(x)}, {x.shape[-2]})",
                    hint="One position for each token; a number is where the first one stands.",
                )
            self._reach(int(at.max()) + 1 if at.numel() else 0, x)
            cos, sin = self.cos[at], self.sin[at]  # (batch, n, pairs · 2)
            if at.ndim > 1:
                cos, sin = cos[:, None], sin[:, None]  # the same for every head
        width = cos.shape[-1]
        if width == x.shape[-1]:
            return rotate(x.to(cos.dtype), cos, sin, self.layout).to(x.dtype)
        turned = rotate(x[..., :width].to(cos.dtype), cos, sin, self.layout).to(x.dtype)
        return torch.cat([turned, x[..., width:]], -1)

    def _reach(self, length: int, x: Tensor) -> None:
        """Tables of at least this length, as wide as x, on its device."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if len(self.cos) >= length and self.cos.dtype == dtype and self.cos.device == x.device:
            return
        length = max(length, 2 * len(self.cos)) if len(self.cos) < length else len(self.cos)
        made = rope_tables(np.arange(length), self.frequencies, self.layout)
        self.cos, self.sin = (torch.tensor(self.factor * t, dtype=dtype, device=x.device) for t in made)

    def extra_repr(self) -> str:
        turned = (
            ""
            if 2 * len(self.frequencies) == self.head_dim
            else f", {2 * len(self.frequencies)} of them turned"
        )
        return f"head_dim {self.head_dim}{turned}, {self.layout}"
