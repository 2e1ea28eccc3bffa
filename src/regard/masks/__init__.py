"""Masks: values that say which keys a query may attend to. True always means attend.

Each mask is named after what it allows, and masks combine with `&`, `|` and `~`:

>>> causal() & padding([3, 5]) & (sliding_window(512) | first(4))
causal() & padding([3, 5]) & (sliding_window(512) | first(4))

No mask is built whole. A mask is evaluated on one block of rows and columns at a time, and classifies blocks as empty,
full or partial from their positions alone: empty blocks are skipped, and full ones need no evaluation. This package may
import frame, tiling and validation.

To write your own, subclass `Mask` as a frozen dataclass, so that equal masks are equal values. `allows` says which
entries may be attended to. `classify_blocks` says which blocks are not empty and which are full; it may be wrong in one
direction only, and without it every block is evaluated. The other methods of `Mask` have defaults.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Chunks(Mask):
...     # Each query attends to the keys of its own chunk.
...     size: int
...     def allows(self, frame, q_idx, kv_idx, xp):
...         return q_idx[:, None] // self.size == kv_idx // self.size
...     def classify_blocks(self, frame, q_lo, q_hi, kv_lo, kv_hi):
...         first, last = q_lo // self.size, (q_hi - 1) // self.size
...         kv_first, kv_last = kv_lo // self.size, (kv_hi - 1) // self.size
...         nonempty = (kv_first <= last) & (first <= kv_last)
...         return BlockKinds(nonempty, (kv_first == last) & (first == kv_last))
>>> (causal() & Chunks(2)).to_dense(4, 4).astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 0, 1, 0],
       [0, 0, 1, 1]])
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.masks.base import BlockKinds, Mask
from regard.masks.kinds import between, causal, dense, document, first, mask, padding, prefix, sliding_window

__all__ = [
    "BlockKinds",
    "Mask",
    "between",
    "causal",
    "dense",
    "document",
    "first",
    "mask",
    "padding",
    "prefix",
    "sliding_window",
]

set_public_module(globals())
