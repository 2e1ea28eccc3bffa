"""Random tensors for the tests of the PyTorch engine."""

from __future__ import annotations

import torch


def draw(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, count: int = 3
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]
