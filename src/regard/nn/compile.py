"""Attention kept out of a compiled graph. Imported while compiling only: the compiler takes a second to load."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(reason="regard: masks and matrices are Python objects")  # type: ignore[untyped-decorator]
def attend(layer: Any, *arguments: Any) -> Any:
    """The layer's attention, run as it is between two graphs."""
    return layer._attend(*arguments)
