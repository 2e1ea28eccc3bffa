"""Use regard inside transformers: `import regard.transformers` registers `attn_implementation="regard"`.

A model with this implementation computes the outputs of `sdpa`, bit for bit. With `output_attentions=True`,
`outputs.attentions` holds `AttentionWeights`: lazy matrices that read like tensors, in O(n) memory. `choose_layers`
limits which layers record theirs. The package imports `regard.capture` and below, torch and transformers.

Design notes:
- `outputs.attentions` holds a class of its own, not `AttentionMatrix`. It follows torch where the two differ:
  `max(dim)` returns values and indices, results have the dtype of the model, a mean over heads is lazy. It refuses
  every operation that stores the matrix, at any size, so a script that runs on 512 tokens runs on 32,768.
- A layer that was not chosen returns a placeholder. transformers drops None, which would shift the number of every
  layer after it.
- The function calls the `sdpa` function of transformers, so that its outputs are those of `sdpa` in every release.
  Scores that it cannot compute, with a soft cap or a sink, are computed by `regard.attention`.
- The mask function of `sdpa` is registered under the same name. Without one, transformers passes no mask.
- The keys of all steps of a cache are stored once, see `regard.capture.cache_store`.

>>> import torch, transformers
>>> import regard.transformers
>>> config = transformers.LlamaConfig(
...     vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
... )
>>> model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="regard").eval()
>>> outputs = model(torch.arange(6)[None], output_attentions=True)
>>> outputs.attentions[1]
AttentionWeights(batch 1, heads 4, q_len 6, kv_len 6) float32
>>> outputs.attentions[1].mean(dim=1)[0, -1].shape
torch.Size([6])
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - required by every module of the package
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"regard.transformers: {error.name} is not installed. pip install 'regard[hf]'"
    ) from error

from regard._public import set_public_module
from regard.transformers.attention_function import register
from regard.transformers.attention_weights import AttentionWeights
from regard.transformers.layer_choice import UnrecordedWeights, choose_layers
from regard.transformers.stacked_weights import StackedWeights

__all__ = ["AttentionWeights", "StackedWeights", "UnrecordedWeights", "choose_layers"]

register()
set_public_module(globals())
