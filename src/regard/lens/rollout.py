"""Compute attention rollout through all layers: `Recording.rollout`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call, LayerCall
from regard.errors import ArgumentError
from regard.lens.find import (
    as_numpy,
    entry_tokens,
    find_positions,
    select_batch_entry,
    select_layers,
    stack_name,
)
from regard.lens.token_rows import TokenRows, as_token_lists, token_count_error
from regard.types import Array

OPERATION = "recording.rollout"


def compute_rollout(
    layer_calls: Sequence[LayerCall], token: Any, tokens: Any, batch: int, layers: str | Sequence[str] | None
) -> Array:
    """Compute the result of `Recording.rollout`.

    Args:
        layer_calls: The calls of a recording.
        token: Position or text of the token.
        tokens: Tokens of the sequence, or None.
        batch: The batch entry.
        layers: Names of modules or patterns; None for all.

    Returns:
        The share of each input token, (n,).
    """
    calls = _select_stack(layer_calls, layers)
    length = calls[0].shape[-1]
    texts = None
    if tokens is not None:
        token_lists = as_token_lists(tokens, OPERATION)
        texts = entry_tokens(token_lists, math.prod(calls[0].shape[:-3]), length, batch)
        if texts is None:
            raise token_count_error(OPERATION, token_lists, {length})
    positions = find_positions(token, texts, length, "token", OPERATION)
    if len(positions) > 1:
        raise ArgumentError(
            OPERATION,
            received=f"token={token!r}, which is at {', '.join(map(str, positions))}",
            expected="one token",
            hint=f"Pass its position: recording.rollout({positions[-1]}).",
        )
    share = np.zeros(length)
    share[positions] = 1.0
    for call in reversed(calls):
        rows = np.flatnonzero(share)
        # Rows with a share of 0 add nothing to the product; under a causal mask they are most of the rows.
        part = select_batch_entry(call, batch, OPERATION).lazy[..., rows[0] : rows[-1] + 1, :]
        vector = torch.as_tensor(share[rows[0] : rows[-1] + 1], dtype=part.dtype, device=call.key.device)
        flow = as_numpy(part.mT @ vector)
        share = 0.5 * share + 0.5 * flow.reshape(-1, length).mean(0)
    return share


def _select_stack(layer_calls: Sequence[LayerCall], layers: str | Sequence[str] | None) -> list[Call]:
    """Select the calls of one stack of self-attention, from the first layer to the last."""
    selected = [entry.call for entry in select_layers(layer_calls, layers, OPERATION)]
    calls = [call for call in selected if TokenRows.from_call(call).query_offset == 0]
    stacks = {(stack_name(call.name), call.shape[-1]) for call in calls}
    if len(stacks) == 1:
        return calls
    received = ", ".join(f"{stack or 'layers'} of {length} tokens" for stack, length in sorted(stacks))
    if not received:
        received = f"no self-attention among {len(layer_calls)} layers" + (
            f" named {layers!r}" if layers else ""
        )
    raise ArgumentError(
        OPERATION,
        received=received,
        expected="the layers of one stack, over one whole sequence",
        hint='Select it: recording.rollout(token, layers="encoder.*"). list(recording) lists the names.',
    )
