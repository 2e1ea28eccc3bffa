"""Change the attention of a model while it runs, and measure how much each change matters.

`with regard.intervene(model, edits)` applies edits: `knockout`, `restrict`, `rescore`, `ablate`, `patch` and
`patch_input`. The model keeps its fused kernels, and nothing of size q_len × kv_len is stored. `circuits` reads the
weights of heads. The package imports `regard.diagnosis` and below, and torch.

Design notes:
- The kernel runs first, and edited rows are written over its output. Heads and rows without an edit stay bit-identical.
  Masks of whole heads are the exception: the kernel runs over the other heads only, so each head is computed once. A
  row without some keys is (output − Σ w v) / (1 − Σ w) with w = exp(score − lse), which costs as much as the removed
  edges. Above Σ w = ½ the subtraction would cancel, so the row is computed again; if that is many rows, or a gradient
  is needed, the edited mask is lowered as a whole.
- Edits store positions in the whole sequence. The keys of a layer are compared with the places where a cache would
  store them, which finds the offset of a call in dynamic, static and rolling caches alike.
- `effects` reuses the outputs of blocks that finished before the edited block. They cannot depend on the edit. First, a
  run of the last block with the stored outputs of all other blocks must give the same metric; otherwise everything
  runs.
- The gradient of the weights is made in tiles, dL/dA = dL/dO · Vᵀ. A fused kernel returns dL/dQ, dL/dK and dL/dV
  only, and autograd of eager attention stores n². Sums and the largest edges of w · dL/dA are a measure, so the block
  loop computes them together with the weights.
- Only embeddings require gradients during `attribution`. Then every activation has a graph, and no linear layer saves
  its input for the gradient of a weight.
- `attribution(steps=…)` moves one layer at a time along the path to its baseline. One gradient has the wrong sign for
  the head that matters most in the induction model: the softmax after it is saturated. For each layer, the effects add
  up to the effect of ablating the layer, up to a gap that is measured and returned. Parts of the path where sum and
  metric disagree get more points: 64 equidistant points missed the effect of a layer, 2.7, by 4.4; 63 points placed
  this way missed it by 0.003.
- Output projections, norms, MLPs and the unembedding are recognised by their numbers. The input of a projection
  equals the heads' outputs; a block's output equals its input plus parts. That needs no table of names, holds for
  unknown models, and a model for which it does not hold is rejected. `circuits` finds the rows of each head in the
  same way: those whose outputs are its queries, or have the lengths of its rotated queries.
- `patch_input` runs the block of a layer a second time, with the changed input, up to the attention call. The norm,
  biases and rotary positions between the stream and the query are the model's own code. The input is read from the
  stack, since a hook would disable the fast path of torch's encoder layers.
- Edits use the wrappers with which `regard.watch` records; there is no second patching mechanism.
- A knockout is a mask. A few edges are corrected from the kernel's own output and lse; many edges run through the
  lowered mask.
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
from regard.interventions.edits import Edit, ablate, knockout, patch, patch_input, rescore, restrict
from regard.interventions.effect_sweep import EffectTable, effects
from regard.interventions.factored_matrix import FactoredMatrix
from regard.interventions.gradient_attribution import Attribution, attribution
from regard.interventions.head_circuits import Circuits, HeadWeights, circuits
from regard.interventions.intervene import Intervention
from regard.interventions.logit_parts import LogitAttribution, logit_attribution
from regard.interventions.model_runs import logit_difference

__all__ = [
    "Attribution",
    "Circuits",
    "Edit",
    "EffectTable",
    "FactoredMatrix",
    "HeadWeights",
    "Intervention",
    "LogitAttribution",
    "ablate",
    "attribution",
    "circuits",
    "effects",
    "knockout",
    "logit_attribution",
    "logit_difference",
    "patch",
    "patch_input",
    "rescore",
    "restrict",
]

set_public_module(globals())
