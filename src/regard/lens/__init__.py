"""The lens: watch a model, change nothing, and have the attention matrix of every layer.

>>> import regard, torch
>>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
>>> with regard.watch(layer) as recording:
...     output = layer(torch.ones(1, 3, 8))
>>> recording
Recording(1 layer, 216 bytes held)
  self_attn: (batch 1, heads 2, q_len 3, kv_len 3)
"""

from __future__ import annotations

try:
    import torch as _torch_is_there  # noqa: F401
except ImportError as error:
    raise ImportError("regard.watch: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.lens.analysis.finding import Finding, Findings
from regard.lens.call import Call
from regard.lens.recording import Recording
from regard.lens.table import Table

__all__ = ["Call", "Finding", "Findings", "Recording", "Table"]

set_public_module(globals())
