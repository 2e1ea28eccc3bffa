"""Compare calls with what the model states about itself: sinks, soft cap, window, and positions of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.capture.module_hints import ModuleHints, ModuleSettings
from regard.findings import Finding
from regard.lens.checked_layer import CheckedLayer


def check_settings(layer: CheckedLayer) -> list[Finding]:
    """Check that a call uses the sinks, the soft cap and the window of its module."""
    settings = layer.module_hints.settings.get(layer.module)
    if settings is None:
        return []
    found = (_check_sinks(layer, settings), _check_softcap(layer, settings), _check_windows(layer, settings))
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


def _check_windows(layer: CheckedLayer, settings: ModuleSettings) -> Finding | None:
    """Check that the rows of a causal layer attend to as many keys as each statement about its window says."""
    mask, is_self_attention = layer.call.compact_mask, layer.token_rows.query_offset is not None
    if not layer.causal or not is_self_attention or mask.stored_arrays or layer.image_runs:
        return None
    start, stop = layer.intervals
    own = layer.token_rows.own_keys
    width = np.where(start < stop, own + 1 - start, 0)
    first = np.where(layer.keys.any(1), layer.keys.argmax(1), 0)[:, None, None]
    # A window moves by one key from row to row. Where a packed document begins, a row has only its own key.
    moves = (np.diff(start, axis=-1, prepend=start[..., :1]) == 1) & (width > 1)
    for name, window in settings.windows.items():
        expected = np.minimum(own + 1 - first, own.max() + 1 if window is None else window)
        is_narrow = layer.rows[:, None] & (width < expected) & moves
        is_wide = (width > window) if window is not None else np.zeros_like(width, bool)
        if not is_narrow.any() and not is_wide.any():
            continue
        where = np.broadcast_to(is_narrow | is_wide, (layer.shape[0], *width.shape[1:]))
        widest = int(width.max(initial=0))
        return layer.build_finding(
            "window not as configured",
            "error",
            "Tokens attend to another number of keys than the configuration or the layer states.",
            where,
            {"keys of the widest row": widest, name: "all keys" if window is None else window},
            "Give each layer the mask of its own type. A window of n keys counts the token itself: attend where "
            "query − key < n.",
        )
    return None


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
