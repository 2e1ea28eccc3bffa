"""Scripts that read `outputs.attentions`, as users write them for the tensors of eager attention.

Each takes the output of a model that ran with `output_attentions=True`, and nothing in it depends on regard.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = Any


def attention_to_first_token(outputs: Any) -> Tensor:
    """Return the mean weight on the first token for each layer and head: (layers, heads)."""
    return torch.stack([layer[0, :, 1:, 0].mean(dim=-1) for layer in outputs.attentions])


def last_row_of_the_head_mean(outputs: Any) -> Tensor:
    """Return what the last token attends to in the last layer, averaged over its heads: (kv_len,)."""
    layer = outputs.attentions[-1].detach().cpu().float()
    return layer.squeeze(0).mean(dim=0)[-1]


def received_by_each_token(outputs: Any) -> Tensor:
    """Return the mean weight that each token receives, over layers, heads and queries: (kv_len,)."""
    total = 0.0
    for layer in outputs.attentions:
        total = total + layer.mean(dim=1).sum(dim=-2)[0]
    return total / (len(outputs.attentions) * outputs.attentions[0].size(2))


def select_image_tokens(
    outputs: Any, layer: int = 2, first: int = 5, count: int = 12, keep: int = 6
) -> Tensor:
    """Return the tokens that FastV keeps after a layer (Chen et al. 2024, arXiv 2403.06764).

    Image tokens are ranked by the weight that the last token gives them in the layer before, averaged over heads.

    Args:
        outputs: Output of the model.
        layer: Layer before which tokens are dropped.
        first: Position of the first image token.
        count: Number of image tokens.
        keep: Number of image tokens to keep.
    """
    weights = outputs.attentions[layer - 1]
    averaged = torch.mean(weights, dim=1)[0]
    on_image = averaged[-1][first : first + count]
    best = on_image.topk(keep).indices + first
    length = weights.shape[-1]
    return torch.cat([torch.arange(first), best, torch.arange(first + count, length)]).sort().values


def lookback_ratios(generated: Any, prompt_length: int) -> Tensor:
    """Return the lookback ratio of each generated token (Chuang et al. 2024, arXiv 2407.07071): (steps, layers, heads).

    It is the mean weight on the tokens of the prompt, divided by the sum of that and the mean weight on new tokens.

    Args:
        generated: Output of `generate` with `return_dict_in_generate=True`.
        prompt_length: Number of tokens of the prompt.
    """
    ratios = []
    for step in generated.attentions[1:]:  # the first is that of the prompt
        layers = []
        for layer in step:
            row = layer[0, :, -1, :]
            context, new = row[:, :prompt_length].mean(-1), row[:, prompt_length:].mean(-1)
            layers.append(context / (context + new))
        ratios.append(torch.stack(layers))
    return torch.stack(ratios)


def rollout(attentions: Any) -> Tensor:
    """Return the attention rollout (Abnar and Zuidema 2020, arXiv 2005.00928): (n, n).

    Args:
        attentions: A tensor for each layer, (1, heads, n, n); it needs dense ones.
    """
    result = torch.eye(attentions[0].shape[-1])
    for weights in torch.stack(tuple(attentions)).squeeze(1).mean(1):
        mixed = weights + torch.eye(len(weights))
        result = (mixed / mixed.sum(-1, keepdim=True)) @ result
    return result
