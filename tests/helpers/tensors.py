"""Random tensors, and bounds, for the tests of the PyTorch engine."""

from __future__ import annotations

from typing import Any

import torch

from regard.testing.tolerance import epsilon


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, count: int = 3
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]


def limit_score_error(matrix: Any) -> float:
    """Return the relative error that the rule allows for float32 weights of a matrix, recomputed from the lse."""
    scores = matrix.scores[...]
    return 4 * epsilon("float32") * (1 + float(scores[scores.isfinite()].abs().max()))
