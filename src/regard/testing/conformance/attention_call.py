"""A call of attention in one form: four axes, plain NumPy numbers, True = attend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Align = Literal["upper_left", "lower_right"]


@dataclass(frozen=True, eq=False)
class Call:
    """What an attention function is asked, whatever its own layout.

    query (batch, heads, q_len, head_dim), key (batch, kv_heads, kv_len, head_dim), value (batch, kv_heads, kv_len,
    value_dim), in numbers that `dtype` holds exactly; mask boolean, (q_len, kv_len) or with all four axes, those of
    size one broadcast.
    """

    query: Any
    key: Any
    value: Any
    dtype: str = "float64"
    mask: Any = None
    causal: Align | None = None
    scale: float | None = None
    memory: str = "contiguous"

    @property
    def sizes(self) -> dict[str, int]:
        """Its sizes by name."""
        batch, heads, q_len, head_dim = self.query.shape
        _, kv_heads, kv_len, value_dim = self.value.shape
        return {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
            "head_dim": head_dim, "value_dim": value_dim,
        }  # fmt: skip

    def allowed(self) -> Any:
        """Which keys each query may see, (…, q_len, kv_len)."""
        q_len, kv_len = self.query.shape[-2], self.key.shape[-2]
        seen = np.ones((q_len, kv_len), bool) if self.mask is None else np.asarray(self.mask, bool)
        return seen & causal_mask(q_len, kv_len, self.causal)

    def take(self, axis: str, cut: slice) -> Call:
        """The same call with a part of an axis; `kv_heads` goes with `heads`."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if axis == "batch":
            query, key, value = query[cut], key[cut], value[cut]
        elif axis == "heads":
            query, key, value = query[:, cut], key[:, cut], value[:, cut]
        elif axis == "q_len":
            query = query[:, :, cut]
        elif axis == "kv_len":
            key, value = key[:, :, cut], value[:, :, cut]
        elif axis == "head_dim":
            query, key = query[..., cut], key[..., cut]
        else:
            value = value[..., cut]
        if mask is not None:
            place = {"batch": -4, "heads": -3, "q_len": -2, "kv_len": -1}.get(axis)
            if place is not None and -place <= mask.ndim and mask.shape[place] > 1:
                mask = mask[(slice(None),) * (mask.ndim + place) + (cut,)]
        return replace(self, query=query, key=key, value=value, mask=mask)


def causal_mask(q_len: int, kv_len: int, align: Align | None) -> Any:
    """The keys a query may see under `causal`; all where none is asked.

    >>> causal_mask(2, 3, "lower_right").astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    if align is None:
        return np.ones((q_len, kv_len), bool)
    return np.tri(q_len, kv_len, kv_len - q_len if align == "lower_right" else 0, dtype=bool)
