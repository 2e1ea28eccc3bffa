"""`ScaledMean`: a lazy matrix that is averaged over some of its leading axes and multiplied by a number.

Sums are linear, so they are computed by the matrix and averaged afterwards. The largest weights of a mean are not those
of its heads, so they are searched in the weights of some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.core.matrix import AttentionMatrix
from regard.measures import MaxWeight
from regard.transformers.recorded_call import RecordedCall
from regard.transformers.tensor_index import insert_axes

Tensor = Any  # the types of torch are not followed

# Weights that are computed at once.
BAND = 1 << 23


@dataclass(frozen=True, eq=False)
class ScaledMean:
    """A mean of heads times a number; tensors that it returns have dtype float32 or wider.

    Args:
        source: A recorded call, whose matrix is built when it is needed, or a matrix.
        averaged: Leading axes of the matrix over which the mean is taken, in ascending order.
        factor: Factor of the weights.
    """

    source: RecordedCall | AttentionMatrix
    averaged: tuple[int, ...] = ()
    factor: float = 1.0

    @property
    def matrix(self) -> AttentionMatrix:
        """The matrix before the mean."""
        return self.source.matrix if isinstance(self.source, RecordedCall) else self.source

    @property
    def query(self) -> Tensor:
        """The query of the matrix, whose dtype and device are those of the layer."""
        return self.source.query if isinstance(self.source, RecordedCall) else self.source.problem.query

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after averaging."""
        return tuple(size for axis, size in enumerate(self.source.shape) if axis not in self.averaged)

    def average(self, axes: list[int]) -> ScaledMean:
        """Return the mean over further leading axes, counted in `shape`."""
        kept = [axis for axis in range(len(self.source.shape)) if axis not in self.averaged]
        return replace(self, averaged=tuple(sorted((*self.averaged, *(kept[axis] for axis in axes)))))

    def scale(self, factor: float) -> ScaledMean:
        """Return the product with a number."""
        return replace(self, factor=self.factor * factor)

    def read(self, index: Any) -> ScaledMean | Tensor:
        """Return the weights at an index; lazily if it keeps all queries and keys."""
        full, axes = insert_axes(index, self.shape, self.averaged)
        part = self.matrix[full]
        if isinstance(part, AttentionMatrix):
            return ScaledMean(part, axes, self.factor)
        return self._finish(part, axes)

    def to_dense(self) -> Tensor:
        """Compute all weights."""
        return self._finish(self.matrix.to_dense(), self.averaged)

    def sum(self, axis: int) -> Tensor:
        """Sum over the keys (−1) or the queries (−2)."""
        return self._finish(self.matrix.sum(axis), self.averaged)

    def max(self, axis: int) -> tuple[Tensor, Tensor]:
        """Return the largest weight of each row (−1) or column (−2) and its index; ties go to the lowest."""
        if not self.averaged and self.factor > 0:
            values, indices = self.matrix.measure(top=MaxWeight(axis)).top
            return values * self.factor, indices
        if axis == -1:
            rows = [band.max(-1) for band in self._bands()]
            return torch.cat([row.values for row in rows], -1), torch.cat([row.indices for row in rows], -1)
        best: tuple[Tensor, Tensor] | None = None
        start = 0
        for band in self._bands():
            values, indices = band.max(-2)
            indices, start = indices + start, start + band.shape[-2]
            if best is not None:
                is_larger = values > best[0]
                values, indices = (
                    torch.where(is_larger, new, old) for new, old in zip((values, indices), best, strict=True)
                )
            best = values, indices
        assert best is not None
        return best

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest weights of each row and their keys, largest first; ties go to the lowest index."""
        if not self.averaged and self.factor > 0:
            values, indices = self.matrix.topk(k)
            return values * self.factor, indices
        bands = [band.sort(dim=-1, descending=True, stable=True) for band in self._bands()]
        values = torch.cat([band.values[..., :k] for band in bands], -2)
        return values, torch.cat([band.indices[..., :k] for band in bands], -2)

    def _bands(self) -> Iterator[Tensor]:
        """Yield the weights of some rows at a time."""
        rows = max(1, BAND * self.shape[-2] // max(1, math.prod(self.source.shape)))
        for start in range(0, self.shape[-2], rows):
            band = self.matrix.lazy[..., start : start + rows, :].to_dense()
            yield self._finish(band, self.averaged)

    def _finish(self, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Average and scale what was computed."""
        tensor = tensor.mean(axes) if axes else tensor
        return tensor if self.factor == 1.0 else tensor * self.factor
