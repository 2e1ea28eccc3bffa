"""One attention call in canonical form: four axes, NumPy numbers, True = attend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Align = Literal["upper_left", "lower_right"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention call, independent of the layout of any function.

    Args:
        query: (batch, heads, q_len, head_dim), in numbers that `dtype` represents exactly.
        key: (batch, kv_heads, kv_len, head_dim).
        value: (batch, kv_heads, kv_len, value_dim).
        dtype: The dtype to call the function with.
        mask: Booleans (q_len, kv_len), or with all four axes, where an axis of size one broadcasts. Default: none.
        causal: The corner of the causal triangle. Default: not causal.
        scale: The scale to pass. Default: none is passed.
        memory: The memory layout of the arrays: "contiguous", "transposed", "sliced", "expanded" or "reversed".
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
        """The sizes of the axes by name."""
        batch, heads, q_len, head_dim = self.query.shape
        _, kv_heads, kv_len, value_dim = self.value.shape
        return {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
            "head_dim": head_dim, "value_dim": value_dim,
        }  # fmt: skip

    def build_mask(self) -> Any:
        """Return which keys each query may attend to, booleans (…, q_len, kv_len)."""
        q_len, kv_len = self.query.shape[-2], self.key.shape[-2]
        mask = np.ones((q_len, kv_len), bool) if self.mask is None else np.asarray(self.mask, bool)
        return mask & build_causal_mask(q_len, kv_len, self.causal)

    def slice_axis(self, axis: str, part: slice) -> AttentionCall:
        """Return the call with a slice of one axis.

        Args:
            axis: A name from `sizes`; "heads" slices `kv_heads` too.
            part: The slice.
        """
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if axis == "batch":
            query, key, value = query[part], key[part], value[part]
        elif axis == "heads":
            query, key, value = query[:, part], key[:, part], value[:, part]
        elif axis == "q_len":
            query = query[:, :, part]
        elif axis == "kv_len":
            key, value = key[:, :, part], value[:, :, part]
        elif axis == "head_dim":
            query, key = query[..., part], key[..., part]
        else:
            value = value[..., part]
        if mask is not None:
            mask_axis = {"batch": -4, "heads": -3, "q_len": -2, "kv_len": -1}.get(axis)
            if mask_axis is not None and -mask_axis <= mask.ndim and mask.shape[mask_axis] > 1:
                mask = mask[(slice(None),) * (mask.ndim + mask_axis) + (part,)]
        return replace(self, query=query, key=key, value=value, mask=mask)


def build_causal_mask(q_len: int, kv_len: int, align: Align | None) -> Any:
    """Build a boolean causal mask of shape (q_len, kv_len). If `align` is None, every entry is True.

    >>> build_causal_mask(2, 3, "lower_right").astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    if align is None:
        return np.ones((q_len, kv_len), bool)
    return np.tri(q_len, kv_len, kv_len - q_len if align == "lower_right" else 0, dtype=bool)
