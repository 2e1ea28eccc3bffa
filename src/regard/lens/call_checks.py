"""Check what a layer was called with: mask, dropout and kernel. Each check returns a finding, or None."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from regard.findings import Finding
from regard.lens.checked_layer import CheckedLayer
from regard.lens.weight_measures import DistanceBands
from regard.masks import dense
from regard.measures import Mass

# A weight above ROUNDING is not rounding, one above SIGNIFICANT is an error.
ROUNDING, SIGNIFICANT = 1e-6, 1e-3


def check_inverted_mask(layer: CheckedLayer) -> Finding | None:
    """Check for a mask of the opposite polarity: it masks the tokens, and attends to the padding or the future."""
    where, message, evidence = None, "", {}
    if layer.is_token is not None:
        visible, is_token = layer.keys, layer.is_token
        has_padding = ~is_token.all(1)
        inverted = has_padding & (visible == ~is_token).all(1)
        if inverted.any():
            where = inverted[:, None, None]
            message = "The mask masks the tokens and leaves the padding."
            evidence = {"visible padding keys": int(visible[inverted].sum()), "visible tokens": 0}
    token_rows, mask = layer.token_rows, layer.call.compact_mask
    if (
        where is None
        and token_rows.query_offset is not None
        and mask.dense_mask is None
        and layer.shape[2] > 2
    ):
        start, stop = layer.intervals
        live = start < stop
        only_later = (start > token_rows.own_keys) & live
        if only_later.mean() > 0.5 and not ((start <= token_rows.own_keys) & live).any():
            where = np.broadcast_to(only_later, (layer.shape[0], *only_later.shape[1:]))
            message = "Every token attends only to later tokens."
            evidence = {"rows that attend only to later keys": int(only_later.sum())}
            evidence["rows that attend to their own key"] = 0
    if where is None:
        return None
    hint = (
        "True = attend in F.scaled_dot_product_attention, True = ignore in nn.MultiheadAttention: pass ~mask."
    )
    return layer.build_finding("inverted mask", "error", message, where, evidence, hint)


def check_causal_alignment(layer: CheckedLayer) -> Finding | None:
    """Check for `is_causal` with more keys than queries: torch aligns query 0 with key 0."""
    _, _, q_len, kv_len = layer.shape
    if not layer.call.is_causal:
        return None
    hint = "Pass is_causal=False for one new token, attn_mask=causal_lower_right(q_len, kv_len) for several."
    if layer.call.steps > 1:
        return _check_cached_alignment(layer, hint)
    masked = int((~layer.keys.any(0)).sum())
    if q_len >= kv_len or masked == 0:
        return None
    message = (
        f"is_causal with {q_len} queries and {kv_len} keys aligns query 0 with key 0 instead of the end."
    )
    evidence = {"keys masked in every row": masked, "q_len": q_len, "kv_len": kv_len}
    return layer.build_finding("causal alignment", "error", message, layer.everywhere, evidence, hint)


def _check_cached_alignment(layer: CheckedLayer, hint: str) -> Finding | None:
    """Check the alignment of calls that a cache joined: rows that attend to keys, but not to their own."""
    token_rows = layer.token_rows
    if token_rows.query_offset is None or layer.call.compact_mask.dense_mask is not None:
        return None
    start, stop = layer.intervals
    misses_own = (start < stop) & (stop <= token_rows.own_keys)
    if not misses_own.any():
        return None
    rows = np.flatnonzero(misses_own.any((0, 1)))
    message = "is_causal with keys from a cache aligns the new queries with key 0 instead of the end."
    visible = int(stop[..., rows[0]].max())
    evidence = {"rows that mask their own key": len(rows), f"keys visible to row {rows[0]}": visible}
    where = np.broadcast_to(misses_own, (layer.shape[0], *misses_own.shape[1:]))
    return layer.build_finding("causal alignment", "error", message, where, evidence, hint)


def check_future(layer: CheckedLayer) -> Finding | None:
    """Check a layer that should be causal for weight on later tokens."""
    mask, token_rows = layer.call.compact_mask, layer.token_rows
    if not layer.causal or token_rows.query_offset is None or layer.shape[2] < 2:
        return None
    if not layer.attends_beyond.any():
        return None
    measure = DistanceBands([(1, math.inf)], token_rows.query_offset)
    share = layer.flatten_batch(layer.call.matrix.measure(bands=measure).bands[..., 1])
    counted = layer.rows[:, None] & layer.live_rows & layer.attends_beyond
    share = np.where(np.broadcast_to(counted, share.shape), share, 0.0)
    if not share.max() > ROUNDING:
        return None
    message, has_prefix = "Tokens attend to later tokens.", not mask.stored_arrays and _has_prefix(layer)
    if has_prefix:
        message = (
            "Tokens of a prefix attend to each other, and the rest is causal: a prefix model, if intended."
        )
    evidence, hint = _describe_shares(share), "Pass is_causal=True or a causal mask to this layer."
    if not has_prefix and not mask.stored_arrays:
        message, offset = _describe_offset(layer, message)
        evidence |= offset
        hint = "Mask key j of row i if j > i, with integer positions: triu(diagonal=1)." if offset else hint
    return layer.build_finding(
        "weight on the future",
        "error" if share.max() > SIGNIFICANT and not has_prefix else "warning",
        message,
        share > ROUNDING,
        evidence,
        f"{hint} If tokens may attend to later ones: diagnose(causal=False).",
    )


def _describe_offset(layer: CheckedLayer, message: str) -> tuple[str, dict[str, Any]]:
    """Describe a mask that is almost triangular: by how many keys rows see too far, and from which row on."""
    _, _, q_len, kv_len = layer.shape
    stop = layer.intervals[1]
    ahead = np.maximum(stop - layer.allowed_stop, 0).max((0, 1))
    rows, largest = np.flatnonzero(ahead), int(ahead.max())
    if largest > max(1, kv_len // 8):
        return message, {}
    evidence = {"keys too many": largest, "first row": int(rows[0])}
    if (ahead[: q_len - largest] == largest).all():
        return f"The mask is shifted: each row i attends to key i + {largest}.", evidence
    exact = {256: "bfloat16", 2048: "float16"}
    name = next((name for limit, name in exact.items() if limit <= rows[0] <= limit + 8), None)
    cause = (
        ""
        if name is None
        else f" Its positions were rounded: {name} holds integers up to {rows[0] // 8 * 8} only."
    )
    return f"From row {rows[0]} on, rows attend to up to {largest} later keys.{cause}", evidence


def _has_prefix(layer: CheckedLayer) -> bool:
    """Return whether all weight on the future lies in a prefix, shorter than the sequence, that its tokens share."""
    own, (_, stop) = layer.token_rows.own_keys, layer.intervals
    prefix = np.where(stop > own + 1, stop, 0).max(-1, keepdims=True)
    as_expected = np.where(own < prefix, stop == prefix, stop <= own + 1)
    return bool((prefix < layer.shape[3]).all() and as_expected.all())


def check_padding(layer: CheckedLayer) -> Finding | None:
    """Check for weight of tokens on padding."""
    if layer.is_token is None or layer.is_token.all() or not (layer.keys & ~layer.is_token).any():
        return None
    is_padding = ~layer.is_token.reshape((*layer.token_rows.keys.shape[:-1], -1))
    mask = dense(torch.as_tensor(is_padding[..., None, :]))
    share = layer.flatten_batch(layer.call.matrix.measure(Mass(mask)).mass)
    share = np.where(layer.rows[:, None], share, 0.0)
    if not share.max() > ROUNDING:
        return None
    return layer.build_finding(
        "weight on padding",
        "error" if share.max() > SIGNIFICANT else "warning",
        "Tokens attend to padding.",
        share > ROUNDING,
        _describe_shares(share) | {"padding keys": int(is_padding.sum())},
        "Pass attention_mask to the model, and on to this layer (key_padding_mask in nn.MultiheadAttention).",
    )


def _describe_shares(share: Any) -> dict[str, Any]:
    affected = share > ROUNDING
    batch, head, row = np.unravel_index(share.argmax(), share.shape)
    largest = f"{share.max():.3g} (batch {batch}, head {head}, row {row})"
    return {"mean share": float(share[affected].mean()), "largest": largest}


def check_empty_rows(layer: CheckedLayer) -> Finding | None:
    """Check for tokens that attend to nothing."""
    empty = ~layer.live_rows & layer.rows[:, None]
    if not empty.any():
        return None
    message = "These tokens attend to no key, so their output is zero or NaN, depending on the kernel."
    if layer.call.compact_mask.uniform_keys is not None:
        message = (
            "Every key of these tokens is masked with the lowest number, so all keys have equal weights, padding and "
            "later tokens included."
        )
    evidence = {"rows": f"{int(empty.any(1).sum())} of {layer.rows.size}"}
    hint = "Let each token attend at least to its own key, rows of padding too, and drop their output later."
    return layer.build_finding("fully masked rows", "error", message, empty, evidence, hint)


def check_dropout(layer: CheckedLayer) -> Finding | None:
    """Check for dropout in eval mode."""
    call = layer.call
    if not call.dropout_p or call.training:
        return None
    return layer.build_finding(
        "dropout",
        "error",
        "Dropout is active in eval mode.",
        layer.everywhere,
        {"dropout_p": call.dropout_p, "training": False},
        "Pass dropout_p=self.p if self.training else 0.0: F.scaled_dot_product_attention always applies it.",
    )


def check_kernel(layer: CheckedLayer) -> Finding | None:
    """Check for the math kernel, which stores the whole matrix, where a fused kernel could run."""
    batch, heads, q_len, kv_len = layer.shape
    call = layer.call
    if call.kernel != "torch: math" or q_len < 2:
        return None
    item_size = 4 if call.query is None else call.query.element_size()
    nbytes = batch * heads * q_len * kv_len * item_size
    if call.dropout_p:
        hint = (
            "Dropout forces it on CPU. Train with dropout_p=0.0, or on a GPU, whose kernels support dropout."
        )
    elif len(call.shape) != 4:
        hint = f"A query of {len(call.shape)} axes forces it. Pass (batch, heads, n, head_dim)."
    elif call.is_broadcast:
        hint = (
            "Key and value that are broadcast force it. Pass enable_gqa=True for fewer heads, or expand them to the "
            "query's batch and heads: key.expand(batch, heads, -1, -1)."
        )
    else:
        hint = "A mask that requires a gradient forces it, value_dim ≠ head_dim, or a sdpa_kernel(…) context."
    return layer.build_finding(
        "slow kernel",
        "warning",
        "F.scaled_dot_product_attention ran the kernel that stores the whole matrix.",
        layer.everywhere,
        {"kernel": "math", "bytes stored": f"{nbytes:,}"},
        hint,
    )
