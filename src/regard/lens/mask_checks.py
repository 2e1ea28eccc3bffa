"""Check masks and biases for mistakes of those who build them: 0 and 1, the wrong entry, the wrong sign, no documents.

Each check returns a finding, or None.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import torch

from regard.findings import Finding
from regard.lens.checked_layer import CheckedLayer

# Batches of more entries are compared with their reverse and their rotations only.
MAX_PERMUTED = 4
# Share of the rows that must mask their own key, so that it is not chance.
MOST_ROWS = 0.5


def check_zero_one_mask(layer: CheckedLayer) -> Finding | None:
    """Check for a mask of 0 and 1 that is added to the scores, where it masks nothing."""
    bias = _get_bias(layer)
    if bias is None or bias.requires_grad:
        return None
    ones = bias == 1
    if not bool(ones.any()) or bool(ones.all()) or not bool((ones | (bias == 0)).all()):
        return None
    evidence = {"entries of 1": int(ones.sum()), "entries of 0": int((~ones).sum()), "dtype": str(bias.dtype)}
    return layer.build_finding(
        "mask of 0 and 1",
        "error",
        "The mask has only the numbers 0 and 1. As a float mask it is added to the scores, and masks nothing.",
        layer.everywhere,
        evidence,
        "Pass mask.bool(), True = attend, or masked_fill(mask == 0, -inf).",
    )


def check_own_key(layer: CheckedLayer) -> Finding | None:
    """Check a causal layer for tokens that attend to earlier keys, but not to their own."""
    token_rows = layer.token_rows
    is_interval = not layer.call.compact_mask.stored_arrays
    if not layer.causal or token_rows.query_offset is None or not is_interval or layer.call.is_causal:
        return None
    start, stop = layer.intervals
    masks_own = (start < stop) & (stop <= token_rows.own_keys)
    if not masks_own.mean() > MOST_ROWS:
        return None
    where = np.broadcast_to(masks_own, (layer.shape[0], *masks_own.shape[1:]))
    return layer.build_finding(
        "own key masked",
        "error",
        "Tokens attend to earlier tokens, but not to themselves: the causal mask excludes its diagonal.",
        where,
        {"rows that mask their own key": int(masks_own.any((0, 1)).sum()), "rows": layer.shape[2]},
        "Mask with triu(diagonal=1), or attend with tril(): the diagonal is the token itself.",
    )


def check_padding_order(layer: CheckedLayer) -> Finding | None:
    """Check for padding masks that belong to other entries of the batch."""
    is_token = layer.is_token
    if is_token is None or layer.keys.shape != is_token.shape or (layer.keys == is_token).all():
        return None
    batch = len(is_token)
    orders = permutations(range(batch)) if batch <= MAX_PERMUTED else _simple_orders(batch)
    for order in orders:
        if (layer.keys == is_token[list(order)]).all():
            where = (layer.keys != is_token).any(1)[:, None, None]
            return layer.build_finding(
                "padding mask of another batch entry",
                "error",
                "Each entry of the batch is masked by the padding of another entry.",
                where,
                {"mask of entry": ", ".join(map(str, order))},
                "Reorder the mask with its inputs: sort, shuffle or repeat both, and do not transpose the batch.",
            )
    return None


def check_padding_axis(layer: CheckedLayer) -> Finding | None:
    """Check for padding masks on the axis of the heads, which is possible if there are as many heads as entries."""
    is_token, (batch, heads, q_len, kv_len) = layer.is_token, layer.shape
    if is_token is None or batch != heads or q_len != kv_len or (is_token == is_token[:1]).all():
        return None
    # The last token of an entry attends to all its tokens, causal or not.
    last = kv_len - 1 - is_token[:, ::-1].argmax(1)
    weights = layer.call.matrix[..., last, :].reshape(batch, heads, heads, kv_len)
    visible = (
        (weights > 0).diagonal(dim1=1, dim2=2).movedim(-1, 1).cpu().numpy()
    )  # head h, last token of entry h
    if not (visible == is_token).all():
        return None
    return layer.build_finding(
        "padding masked by head",
        "error",
        "Head h masks the padding of batch entry h, in every entry: the mask has the batch on the axis of the heads.",
        layer.everywhere,
        {
            "batch": batch,
            "heads": heads,
            "padding keys of each head": ", ".join(map(str, (~is_token).sum(1))),
        },
        "Pass a mask of shape (batch, 1, q_len, kv_len): mask[:, None], not mask[None].",
    )


def _simple_orders(batch: int) -> list[list[int]]:
    entries = list(range(batch))
    return [entries[::-1], *(entries[shift:] + entries[:shift] for shift in range(1, batch))]


def check_bias_direction(layer: CheckedLayer) -> Finding | None:
    """Check for a bias proportional to the distance that favours distant keys, as ALiBi with the wrong sign."""
    bias, offset = _get_bias(layer), layer.token_rows.query_offset
    if (
        bias is None
        or offset is None
        or bias.ndim < 3
        or bias.shape[-2] != layer.shape[2]
        or layer.shape[2] < 4
    ):
        return None
    bias = bias.detach().cpu().double().numpy()
    bias = bias.reshape(-1, *bias.shape[-3:])
    distance = layer.token_rows.own_keys[:, None] - np.arange(layer.shape[3])
    counted = np.isfinite(bias) & (bias > -1e30) & (distance > 0)
    if not counted.any():
        return None
    slopes = np.where(counted, bias, 0).sum((-1, -2)) / np.maximum(
        np.where(counted, distance, 0).sum((-1, -2)), 1
    )
    error = np.where(counted, np.abs(bias - slopes[..., None, None] * distance), 0).max((-1, -2))
    grows = (slopes > 0) & (error <= 1e-2 * slopes)
    if not grows.any():
        return None
    return layer.build_finding(
        "bias grows with distance",
        "error",
        "The bias is proportional to the distance, and positive: the most distant tokens get the most weight.",
        np.broadcast_to(grows[..., None], (layer.shape[0], *grows.shape[1:], 1)),
        {"slopes": ", ".join(f"{slope:.3g}" for slope in slopes[0])},
        "Add −slope · (query position − key position), with positive slopes, as ALiBi does.",
    )


def check_documents(layer: CheckedLayer, positions: Any) -> Finding | None:
    """Check for tokens that attend to another document of a packed sequence.

    Args:
        layer: The layer.
        positions: (batch or 1, n), of one forward pass; a document begins where they restart.

    Returns:
        The finding, or None.
    """
    batch, _, q_len, kv_len = layer.shape
    if layer.token_rows.query_offset != 0 or q_len != kv_len or positions.shape[-1] != q_len:
        return None
    if len(positions) not in (1, batch) or layer.call.steps > 1:
        return None
    restarts = np.zeros((len(positions), q_len), bool)
    restarts[:, 1:] = (np.diff(positions, axis=-1) < 0) & (positions[:, 1:] == positions[:, :1])
    is_token = layer.keys if layer.is_token is None else layer.is_token
    restarts = np.broadcast_to(restarts, (batch, q_len)) & is_token & np.roll(is_token, 1, 1)
    if not restarts.any() or layer.call.compact_mask.stored_arrays:
        return None
    rows = np.arange(q_len)
    beginning = np.maximum.accumulate(np.where(restarts, rows, 0), 1)[:, None]
    start, stop = layer.intervals
    crosses = (start < beginning) & (start < stop)
    if not crosses.any():
        return None
    return layer.build_finding(
        "documents attend to each other",
        "error",
        "The positions restart, so several documents are packed, and tokens attend to those before their own.",
        np.broadcast_to(crosses, (batch, *crosses.shape[1:])),
        {
            "documents": int(restarts.sum(1).max()) + 1,
            "rows that attend to another": int(crosses.any((0, 1)).sum()),
        },
        "Pass a block-diagonal mask, cu_seqlens, or position_ids without attention_mask to transformers.",
    )


def _get_bias(layer: CheckedLayer) -> Any:
    """Return the array of a bias that was stored as it is; None without one."""
    bias = getattr(layer.call.compact_mask.bias, "array", None)
    return bias if isinstance(bias, torch.Tensor) and bias.is_floating_point() else None
