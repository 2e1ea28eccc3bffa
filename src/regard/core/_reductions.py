"""What is asked of a matrix most often, each a measure by itself: sums, means, the largest, entropy and the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.masks import Mask
from regard.measures import Coarse, Distance, Entropy, Mass, MaxWeight, Sum, TopK
from regard.types import Align, Array


class Reductions:
    """Reductions of a matrix that has `shape`, `ndim` and `measure`."""

    shape: Any
    ndim: Any
    measure: Any

    def entropy(self) -> Array:
        """The entropy of each row in nats: (…, heads, q_len)."""
        return self.measure(Entropy()).entropy

    def distance(self, align: Align | None = None) -> Array:
        """The mean distance of each row, Σ w · |q_idx − kv_idx|: (…, heads, q_len). `align` as in `causal`."""
        return self.measure(Distance(align)).distance

    def mass(self, mask: Mask) -> Array:
        """The share of each row on the keys that `mask` lets through: (…, heads, q_len)."""
        return self.measure(Mass(mask)).mass

    def topk(self, k: int) -> Any:
        """The k largest weights of each row and their keys: `.values` and `.indices`, (…, heads, q_len, k)."""
        return self.measure(top=TopK(k)).top

    def coarsen(self, block: int | tuple[int, int], reduce: str = "mean") -> Array:
        """The matrix as `block` × `block` cells by their "mean", "max" or "sum": (…, heads, block, block).

        `block` may be (rows, columns), too.
        """
        return self.measure(Coarse(block, reduce)).coarse

    def sum(self, axis: int | tuple[int, ...] | None = None) -> Array:
        """Sums over kv_len (axis −1), over q_len (−2: what each key received), or over everything (None)."""
        if (kept := self._axis(axis, "sum")) is None:
            return self.measure(Sum(-1)).sum.sum()
        return self.measure(Sum(kept)).sum

    def mean(self, axis: int | tuple[int, ...] | None = None) -> Array:
        """Means over kv_len (axis −1), over q_len (−2), or over everything (None)."""
        kept = self._axis(axis, "mean")
        with np.errstate(all="ignore"):  # the mean of none is NaN, without a warning
            return self.sum(axis) / np.float64(math.prod(self.shape) if kept is None else self.shape[kept])

    def max(self, axis: int | tuple[int, ...] | None = None) -> Array:
        """The largest weights over kv_len (axis −1), over q_len (−2), or of everything (None)."""
        if (kept := self._axis(axis, "max", searched=True)) is None:
            return self._largest(-1).values.max()
        return self._largest(kept).values

    def argmax(self, axis: int | tuple[int, ...] | None = None) -> Array:
        """Where the largest weights are, ties to the lowest index; over everything (None) a flat index."""
        if (kept := self._axis(axis, "argmax", searched=True)) is None:
            values, indices = self._largest(-1)
            row = int(values.argmax())
            return row * self.shape[-1] + indices.ravel()[row]
        return self._largest(kept).indices

    def _largest(self, axis: int) -> Any:
        return self.measure(MaxWeight(axis)).max_weight

    def _axis(self, axis: Any, operation: str, *, searched: bool = False) -> int | None:
        """−1, −2, or None for every axis; axes of heads are refused, since their sum is a whole matrix."""
        if searched and not math.prod(self.shape):
            raise ArgumentError(
                operation,
                received=f"a matrix of shape {self.shape}",
                expected="at least one entry",
                hint="Nothing is the largest of none.",
            )
        if axis is None:
            return None
        axes = axis if isinstance(axis, tuple) else (axis,)
        whole = all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in axes)
        where: set[int] = {a - self.ndim if a >= 0 else a for a in axes} if whole else set()
        if where == set(range(-self.ndim, 0)):
            return None
        if where in ({-1}, {-2}):
            return int(where.pop())
        hint = f"The matrix has {self.ndim} axes."
        if where == {-2, -1} and operation != "argmax":
            hint = f"Take one after the other: A.{operation}(axis=-1).{operation}(-1)."
        elif where and where <= set(range(-self.ndim, 0)):
            hint = (
                f"Over heads the result is a whole matrix: take A[rows].{operation}(axis) or coarsen first."
            )
        raise ArgumentError(
            operation,
            received=f"axis={axis!r}",
            expected="axis=-1 (over the keys), axis=-2 (over the queries) or None (over everything)",
            hint=hint,
        )
