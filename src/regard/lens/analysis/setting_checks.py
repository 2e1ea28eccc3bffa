"""Compare calls with what the model states about itself: sinks, soft cap, window, and positions of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.findings import Finding
from regard.lens.analysis.checked_layer import CheckedLayer
from regard.lens.capture.module_hints import ModuleHints, ModuleSettings


def check_settings(layer: CheckedLayer) -> list[Finding]:
    """Check that a call uses the sinks, the soft cap and the window of its module."""
    settings = layer.module_hints.settings.get(layer.module)
    if settings is None:
        return []
    found = (_check_sinks(layer, settings), _check_softcap(layer, settings), _check_window(layer, settings))
    return [finding for finding in found if finding is not None]


def _check_sinks(layer: CheckedLayer, settings: ModuleSettings) -> Finding | None:
    if not settings.has_sinks or layer.call.sink is not None or "sink" in layer.call.kernel:
        return None
    return layer.build_finding(
        "sinks not used",
        "error",
        "The module has learnt sinks, and the attention function that ran does not use them.",
        layer.everywhere,
        {"kernel": layer.call.kernel, "weight of the sinks": 0.0},
        "Load the model with attn_implementation='eager' or another that has sinks: SDPA has no argument for them.",
    )


def _check_softcap(layer: CheckedLayer, settings: ModuleSettings) -> Finding | None:
    if settings.softcap is None or layer.call.softcap is not None:
        return None
    return layer.build_finding(
        "softcap missing",
        "error",
        "The configuration has a soft cap, and the scores of this layer are not capped.",
        layer.everywhere,
        {"attn_logit_softcapping": settings.softcap, "kernel": layer.call.kernel},
        "Pass softcap to the attention function, or attn_implementation='eager': SDPA does not cap.",
    )


def _check_window(layer: CheckedLayer, settings: ModuleSettings) -> Finding | None:
    """Check that no row of a causal layer attends to more keys than the window, and that long rows fill it."""
    window, mask = settings.window, layer.call.compact_mask
    is_self_attention = layer.token_rows.query_offset is not None
    if window is None or not layer.causal or not is_self_attention or mask.stored_arrays or layer.image_runs:
        return None
    start, stop = layer.intervals
    own = layer.token_rows.own_keys
    width = np.where(start < stop, own + 1 - start, 0)
    widest = int(width.max(initial=0))
    first = np.where(layer.keys.any(1), layer.keys.argmax(1), 0)[:, None, None]
    expected = np.minimum(own + 1 - first, window)
    if widest <= window and not (layer.rows[:, None] & (width > 0) & (width < expected)).any():
        return None
    where = np.broadcast_to(
        (width > window) | ((width > 0) & (width < expected)), (layer.shape[0], *width.shape[1:])
    )
    return layer.build_finding(
        "window not as configured",
        "error",
        "Tokens attend to another number of keys than the window of the configuration.",
        where,
        {"keys of the widest row": widest, "sliding_window": window},
        "A window of n keys counts the token itself: attend where query − key < n.",
    )


def check_padded_positions(layers: Sequence[CheckedLayer], module_hints: ModuleHints) -> list[Finding]:
    """Check that tables of positions do not count padding on the left.

    Args:
        layers: The layers, with `is_token` where it is known.
        module_hints: The positions that were looked up.

    Returns:
        At most one finding.
    """
    for lookup in module_hints.lookups:
        if not lookup.is_table:
            continue
        positions = lookup.positions.cpu().numpy()
        for layer in layers:
            finding = _check_lookup(layer, positions, lookup.module)
            if finding is not None:
                return [finding]
    return []


def _check_lookup(layer: CheckedLayer, positions: Any, module: str) -> Finding | None:
    is_token = layer.is_token
    if is_token is None or layer.token_rows.query_offset != 0 or positions.shape[-1] != is_token.shape[1]:
        return None
    if len(positions) not in (1, len(is_token)):
        return None
    positions = np.broadcast_to(positions, is_token.shape)
    first = is_token.argmax(1)
    columns = np.arange(is_token.shape[1])
    is_consecutive = (positions - positions[:, :1] == columns) | (columns > first[:, None])
    counts = (first > 0) & is_token.any(1) & is_consecutive.all(1)
    if not counts.any():
        return None
    entry = int(np.flatnonzero(counts)[0])
    return layer.build_finding(
        "positions count padding",
        "error",
        "Tokens after padding on the left have the positions of a longer text, which the model did not train on.",
        counts[:, None, None],
        {
            "padding before the first token": int(first[entry]),
            "its position": int(positions[entry, first[entry]]),
            "looked up by": module,
        },
        "Pass position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), or pad on the right.",
    )
