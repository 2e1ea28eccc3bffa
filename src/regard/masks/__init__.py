"""Masks: values that say which keys a query may attend to. True = attend, always.

Each mask is named after what it lets through, and masks combine with `&`, `|` and `~`:

>>> causal() & padding([3, 5]) & (sliding_window(512) | first(4))
causal() & padding([3, 5]) & (sliding_window(512) | first(4))

No mask is built whole. A mask is evaluated on one block of rows and columns at a time, and classifies blocks as empty,
full or partial from their positions alone: empty blocks are skipped, and full ones need no evaluation. To write your
own, subclass `Mask` and define `allows` and `classify_blocks`. This package may import frame, tiling and validation.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.masks.base import Mask
from regard.masks.kinds import between, causal, dense, document, first, padding, prefix, sliding_window

__all__ = [
    "Mask",
    "between",
    "causal",
    "dense",
    "document",
    "first",
    "padding",
    "prefix",
    "sliding_window",
]

set_public_module(globals())
