"""Change the attention of a model while it runs, and measure how much each change matters.

`with regard.intervene(model, edits)` applies edits: `knockout`, `restrict`, `rescore`, `ablate` and `patch`. The model
keeps its fused kernels, and nothing of size q_len × kv_len is stored. The package imports `regard.lens` and below, and
torch.

Design notes:
- Edits use the wrappers with which `regard.watch` records; there is no second patching mechanism.
- A knockout is a mask. Few edges are corrected from the kernel's own output and lse, many run through the lowered mask.
- Heads and rows that no edit touches keep the kernel's output, bit for bit.

>>> import regard, torch
>>> from regard.interventions import knockout
>>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
>>> with regard.intervene(layer, knockout(heads=0, queries=2, keys=[0, 1]), record=True) as run, torch.no_grad():
...     output = layer(torch.ones(1, 3, 8))
>>> run.recording["self_attn"][0, 0].to_dense().round(decimals=2)
tensor([[0.3300, 0.3300, 0.3300],
        [0.3300, 0.3300, 0.3300],
        [0.0000, 0.0000, 1.0000]])
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - required by every module of the package
except ImportError as error:
    raise ImportError("regard.intervene: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.interventions.edits import Edit, ablate, knockout, patch, rescore, restrict
from regard.interventions.effect_sweep import EffectTable, effects
from regard.interventions.gradient_attribution import Attribution, attribution
from regard.interventions.intervene import Intervention
from regard.interventions.logit_parts import LogitAttribution, logit_attribution
from regard.interventions.model_runs import logit_difference

__all__ = [
    "Attribution",
    "Edit",
    "EffectTable",
    "Intervention",
    "LogitAttribution",
    "ablate",
    "attribution",
    "effects",
    "knockout",
    "logit_attribution",
    "logit_difference",
    "patch",
    "rescore",
    "restrict",
]

set_public_module(globals())
