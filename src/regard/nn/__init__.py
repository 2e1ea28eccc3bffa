"""Torch layers with inspectable attention: `layer(x, need_matrix=True)` returns the output and the matrix.

Entry point: `MultiheadAttention`. `regard.nn` needs torch; it imports `regard.core` and the packages below it.

Design notes:
- A cache stores the tokens of each batch entry packed, in buffers that double. With a window, keys that no later query
  can attend to are evicted once they are as many as the window, so a token is moved at most once.
- Masks and score modifications refer to the sequence. If the cache holds all of it, they are aligned lower right;
  otherwise they are evaluated at the positions of the cached tokens (`positional_masks`).
- Rotary tables are computed in float64 and stored in float32 or wider, whatever dtype the module is cast to.
- Attention dropout stores the weights, because no CPU kernel drops. `torch.compile` breaks the graph once per layer.

>>> import torch
>>> from regard import causal
>>> layer = MultiheadAttention(64, num_heads=8, rope="half")
>>> output, A = layer(torch.ones(1, 5, 64), mask=causal(), need_matrix=True)
>>> A.shape, A.kernel
((1, 8, 5, 5), 'torch: flash on CPU, causal')
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("regard.nn: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.nn.attention import MultiheadAttention, torch_masks
from regard.nn.cache import KVCache
from regard.nn.convert_transformers import from_transformers
from regard.nn.rope import Rope

__all__ = [
    "KVCache",
    "MultiheadAttention",
    "Rope",
    "from_transformers",
    "torch_masks",
]

set_public_module(globals())
