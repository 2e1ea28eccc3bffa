"""Record and analyse the attention of a model: `with regard.watch(model) as recording` binds a `Recording`.

A recording holds the lazy attention matrix of every layer, and finds, measures and checks heads. `regard.capture`
records the calls. The package imports `regard.capture` and below, and torch.

Design notes:
- Masses on spans are value columns of one product after the run, not of the model's own call. The CPU's flash
  operator refuses a value that is wider than the key. With query, key and value padded to one width, the output of a
  one-row step is not bit-identical, and each step copies the cache. The product over the rows of the answer is made
  once for each layer, and spans can be changed afterwards.
- A generated token has the row that produced it. It is the row whose output chose the token, as in Lookback Lens;
  every generated token then has a row, although `generate()` does not feed back the last token.
- A recording with `grad=True` has two matrices. A matrix caches its results, so a matrix that was used without
  gradients has no gradients afterwards.
- The page of an image stores pixels as an array, and draws them on a canvas. No image format is decoded, the page
  contains no file metadata, and its content security policy needs no `img-src`.
- If not all weights fit in that page, every head keeps the rows of some queries, quantised to 254 levels. Query and key
  of a head with 4,096 tokens take 1 MB, a row 4 kB. So each head has a map of the class token or the last word within
  10 MB, and the last layers have all rows.
- `align` takes its times where transformers does, and a true minimum on ties. Times are compared with
  `return_token_timestamps` digit by digit. On equal sums, the loop in transformers can choose a path that is not the
  cheapest; sums of real weights are not equal. Cells on an antidiagonal are independent, so NumPy computes them at
  once: 448 × 1500 in 0.15 s.
- Padding rows are excluded from all means. `diagnose` checks masks by their intervals first, and makes a pass only if
  needed.

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
