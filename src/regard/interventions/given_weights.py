"""Edit the weights of layers that compute their own softmax: there is no query and key, only the weights themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from regard.engines.torch import TorchNamespace
from regard.errors import ArgumentError
from regard.frame import Frame
from regard.interventions.edge_correction import OutputWriter, ValueColumns
from regard.masks import Mask
from regard.score_mods import ScoreMod

Tensor = Any  # the types of torch are not followed


def edit_given_weights(weights: Tensor, masks: Sequence[Mask], score_mods: Sequence[ScoreMod]) -> Tensor:
    """Apply masks and score modifications to weights, and normalise the rows that change.

    What a row lacks to a sum of 1 belongs to a sink, and keeps its part in the normalisation. Sums run over the
    remaining weights, so that nothing cancels.

    Args:
        weights: (…, heads, q_len, kv_len).
        masks: Masks to apply.
        score_mods: Modifications of the scores; only additions.

    Returns:
        The new weights, in the same dtype.

    Raises:
        ArgumentError: If a modification is not an addition: the scores are not known.
    """
    if not masks and not score_mods:
        return weights
    shape = tuple(weights.shape)
    frame = Frame.from_shape(shape)
    rows, columns = np.arange(shape[-2]), np.arange(shape[-1])
    old = weights.reshape(-1, *shape[-2:])
    wide = old.to(torch.promote_types(weights.dtype, torch.float32))
    new, changed = wide, torch.zeros(old.shape[:2], dtype=torch.bool, device=old.device)
    for mask in masks:
        mask.check(frame)
        allowed = mask.allows(frame, rows, columns, torch).to(old.device)
        changed = changed | ((wide != 0) & ~allowed).any(-1)
        new = torch.where(allowed, new, 0.0)
    rest = 1.0 - wide.sum(-1, keepdim=True)
    is_rounding = (rest <= 8 * torch.finfo(weights.dtype).eps + 1e-5) | ~(wide != 0).any(-1, keepdim=True)
    # A head either has a sink in every row or has none. Rows with little of it may lose all other keys.
    has_sink = (~is_rounding).any(-2, keepdim=True)
    rest = torch.where(has_sink, rest.clamp(min=0.0), 0.0)
    for score_mod in score_mods:
        score_mod.check(frame)
        bias = score_mod.additive_bias(frame, rows, columns, TorchNamespace(wide.device), wide.dtype)
        if bias is None:
            raise ArgumentError(
                "rescore",
                received=f"{score_mod!r} for a layer that computes its own softmax",
                expected="an addition such as bias(…) or alibi(): the scores themselves are not known",
                hint="Load the model with attn_implementation='sdpa' if it supports that.",
            )
        bias = bias.to(wide.device)
        shift = bias.amax(-1, keepdim=True)
        new, rest = new * torch.exp(bias - shift), rest * torch.exp(-shift)
        changed = changed | (bias != 0).any(-1)
    total = new.sum(-1, keepdim=True) + rest
    new = new / torch.where(total == 0, 1.0, total)
    return torch.where(changed[..., None], new.to(weights.dtype), old).reshape(shape)


def multiply_given_weights(old: Tensor, new: Tensor, value: ValueColumns, writer: OutputWriter) -> bool:
    """Multiply edited weights by a value, and write the rows that differ; return whether there are any.

    Args:
        old: Weights of the layer: (…, heads, q_len, kv_len).
        new: The edited ones.
        value: The value.
        writer: Holds the output of the layer, and gets the result.
    """
    old, new = (weights.reshape(-1, *weights.shape[-2:]) for weights in (old, new))
    differs = (old != new).any(-1)
    pairs = np.flatnonzero(differs.any(1).cpu().numpy())
    if not len(pairs):
        return False
    index = torch.as_tensor(pairs)
    output = new[index] @ value.array[torch.as_tensor(value.pair_index[pairs])].to(new.dtype)
    writer.write(
        pairs, None, torch.where(differs[index][..., None], output, writer.read(pairs).to(output.dtype))
    )
    return True
