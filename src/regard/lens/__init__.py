"""Record and analyse the attention of a model: `with regard.watch(model) as recording` binds a `Recording`.

A recording holds the lazy attention matrix of every layer, and finds, measures and checks heads. `regard.capture`
records the calls. The package imports `regard.capture` and below, and torch.

Design notes:
- The model runs its own kernels. If the CPU flash kernel would run, the operator is called directly, for its lse.
- A mask is read as the interval of keys of each row, so the rows of several calls are joined by their intervals.
- Recorded arguments are compared with what the function returned; a call that does not agree is refused.
- Steps belong to one cache if the old keys are found among the new ones. Only the newest keys are held.
- Padding rows count in no mean. `diagnose` checks masks by their intervals first, and makes a pass only if needed.

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
    import torch as _torch  # noqa: F401 - required by every module of the package
except ImportError as error:
    raise ImportError("regard.watch: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.capture.call import Call
from regard.findings import CheckRun, Finding, Findings
from regard.lens.alignment import Alignment
from regard.lens.recording import EmptyRecordingWarning, Recording
from regard.lens.sharded_recording import ShardedRecording
from regard.lens.span_mass import LayerSpans, SpanMass
from regard.lens.spans import token_spans
from regard.lens.table import Table
from regard.lens.watch import Watch

__all__ = [
    "Alignment",
    "Call",
    "CheckRun",
    "EmptyRecordingWarning",
    "Finding",
    "Findings",
    "LayerSpans",
    "Recording",
    "ShardedRecording",
    "SpanMass",
    "Table",
    "Watch",
    "token_spans",
]

set_public_module(globals())
