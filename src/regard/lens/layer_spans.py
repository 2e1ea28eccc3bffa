"""`LayerSpans`: the masses of one layer on spans of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.types import Array

__all__ = ["LayerSpans", "mean_defined"]


@dataclass(frozen=True)
class LayerSpans:
    """The masses of one layer.

    Args:
        module: Name of the module.
        layer: Number of the layer, from 0, in the order in which the layers ran.
        mass: (batch, heads, tokens, names).
        lookback: Lookback ratio, (batch, heads, tokens); NaN where nothing was generated yet.
        plan: How the masses were computed, as `AttentionMatrix.plan` says it.
    """

    module: str
    layer: int
    mass: Array
    lookback: Array
    plan: str


def mean_defined(values: Array, axis: int | tuple[int, ...]) -> Array:
    """Compute the mean of the values that are not NaN; NaN if all are."""
    defined = ~np.isnan(values)
    count = defined.sum(axis)
    return np.where(count > 0, np.where(defined, values, 0.0).sum(axis) / np.maximum(count, 1), np.nan)
