"""Measure layers of one shape together: for a short text, setting up a pass takes as long as the pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.lens.token_rows import is_cross_attention_name

# Rows of a layer that is joined to others: one block of the compiled pass, whose sums do not depend on other pairs.
MAX_ROWS = 256
# Keys of such a layer, and numbers of the queries that are copied to join some.
MAX_KEYS, MAX_NUMBERS = 1024, 1 << 22


def measure_layers(calls: Sequence[Call], measure: Callable[[Call], dict[str, Any]]) -> list[dict[str, Any]]:
    """Apply a function to calls, to those of equal shape and mask at once.

    Args:
        calls: One call of each layer.
        measure: Function of a call that returns arrays with an axis of heads, which is the first.

    Returns:
        What `measure` would return for each call.
    """
    results: list[Any] = [None] * len(calls)
    for group in _group_layers(calls):
        if len(group) == 1:
            results[group[0]] = measure(calls[group[0]])
            continue
        joined = measure(_join_heads([calls[i] for i in group]))
        heads = calls[group[0]].shape[-3]
        for number, i in enumerate(group):
            own = slice(number * heads, (number + 1) * heads)
            results[i] = {name: column[own] for name, column in joined.items()}
    return results


def is_joinable(call: Call) -> bool:
    """Return whether a call may be measured together with others."""
    return _describe(call) is not None


def copy_tensors(call: Call) -> Call:
    """Return a call with tensors of its own, for a call that is measured after the model has gone on."""
    return replace(call, query=call.query.clone(), key=call.key.clone())


def _group_layers(calls: Sequence[Call]) -> list[list[int]]:
    """List the numbers of the calls in groups that can be joined."""
    groups: dict[Hashable, list[int]] = {}
    full = 0
    for i, call in enumerate(calls):
        key = _describe(call)
        group = groups.setdefault(i if key is None else key, [])
        if group and (len(group) + 1) * call.query.numel() > MAX_NUMBERS:
            groups["full", full] = groups.pop(key)
            full, group = full + 1, groups.setdefault(key, [])
        group.append(i)
    return list(groups.values())


def _describe(call: Call) -> Hashable | None:
    """Return what joined calls have in common; None for a call that is measured by itself."""
    mask = call.compact_mask
    if call.query is None or call.weights is not None or len(call.shape) < 3 or 0 in call.shape:
        return None
    if call.shape[-2] > MAX_ROWS or call.shape[-1] > MAX_KEYS or not mask.is_intervals:
        return None
    modified = (call.edits, call.softcap, call.sink, mask.bias, mask.uniform_keys)
    if any(part is not None for part in modified) or call.query.requires_grad or call.key.requires_grad:
        return None
    edges = (mask.start, mask.stop)
    if any(edge.ndim > 1 and edge.shape[-2] > 1 for edge in edges):
        return None  # a mask for each head
    arrays = [*edges, *([] if mask.visible_keys is None else [np.asarray(mask.visible_keys)])]
    tensors = (call.query, call.key, *([] if call.lse is None else [call.lse]))
    return (
        tuple((array.shape, array.tobytes()) for array in arrays),
        tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors),
        (call.scale, call.query_offset, is_cross_attention_name(call.name)),
    )


def _join_heads(calls: Sequence[Call]) -> Call:
    """Return a call with the heads of several."""
    for call in calls:
        call._check_unchanged()
    with torch.no_grad():
        query, key = (torch.cat([getattr(call, name) for call in calls], -3) for name in ("query", "key"))
        lse = None if calls[0].lse is None else torch.cat([call.lse for call in calls], -2)
    return replace(calls[0], query=query, key=key, lse=lse, value=None, output=None, versions=())
