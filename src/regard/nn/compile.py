"""Attention outside a compiled graph. Imported only while compiling, because the compiler takes a second to load."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(reason="regard: masks and matrices are Python objects")  # type: ignore[untyped-decorator]
def attend(layer: Any, *arguments: Any) -> Any:
    """Run `_attend` of a `MultiheadAttention` eagerly, between two graphs."""
    return layer._attend(*arguments)
