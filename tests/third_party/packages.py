"""Import packages whose compiled parts do not load beside the CPU build of torch.

The wheels of torchvision and torchaudio on PyPI need CUDA. Their Python parts run without the compiled ones:
`scripts/setup --third-party` removes torchaudio's, and the operators that torchvision expects are declared here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

import torch

DISTRIBUTIONS = {"open_clip": "open-clip-torch", "x_transformers": "x-transformers"}


@functools.cache
def _declare_operators() -> torch.library.Library:
    """Declare the operators of torchvision that it describes at import."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def load(name: str) -> Any:
    """Import a module of another package by its name."""
    _declare_operators()
    return importlib.import_module(name)


def find_version(package: str) -> str:
    """Return the version of an installed package, by the name under which it is imported."""
    return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
