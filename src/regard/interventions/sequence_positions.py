"""Find where the calls of a layer are in the sequence, over the cached steps of `generate()`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from regard.interventions.placement import Placement
from regard.lens.analysis.token_rows import TokenRows
from regard.lens.capture.call import Call

Tensor = Any  # the types of torch are not followed

# As many of the newest keys are kept to recognise a cache.
NEWEST = 32


class CacheState(NamedTuple):
    """The state of a layer's cache after its last call.

    Args:
        tail: Its newest keys, or values if the layer computes its own softmax: (…, at most 32, dim).
        held: Number of keys in use.
        key_offset: Position of its first key.
        num_rows: Number of rows so far, for cross-attention.
        source_key: Weak reference to the key that was passed, and its version.
    """

    tail: Tensor
    held: int
    key_offset: int
    num_rows: int
    source_key: Any


class SequencePositions:
    """Where the calls of each layer are in the sequence.

    If the newest keys of the last call are found where a cache would have them, the call continues its sequence: at the
    end of all keys, or of those that a rolling cache has not evicted. Otherwise it begins a sequence.
    """

    def __init__(self) -> None:
        self._states: dict[str, CacheState] = {}

    def locate(self, call: Call) -> Placement:
        """Return where a call is, and remember it.

        Args:
            call: Record of the call.
        """
        *_, q_len, kv_len = call.shape
        keys = call.key if call.weights is None else call.cached
        used = min(call.compact_mask.last_key or kv_len, kv_len)
        call.query_offset = max(0, used - q_len)
        state = self._states.get(call.name)
        if TokenRows.from_call(call).query_offset is None:
            is_same = state is not None and _is_same(state.source_key, call.source_key)
            past = state.num_rows if is_same and state is not None else 0
            self._states[call.name] = CacheState(None, used, 0, past + q_len, call.source_key)
            return Placement(call.shape, past, 0, True)
        past, key_offset = used - q_len, 0
        old = None if state is None or past <= 0 else state.tail
        if state is not None and keys is not None and _ends_with(keys[..., : max(0, past), :], old):
            key_offset = state.key_offset + max(0, state.held - past)
        if keys is not None:
            tail = keys[..., max(0, used - NEWEST) : used, :].detach().clone()
            self._states[call.name] = CacheState(tail, used, key_offset, 0, call.source_key)
        return Placement(call.shape, key_offset + max(0, past), key_offset, False)


def _ends_with(keys: Tensor, tail: Tensor | None) -> bool:
    """Return whether keys end with those that were the newest, as far as both go."""
    if tail is None:
        return False
    count = min(keys.shape[-2], tail.shape[-2])
    if keys.shape[:-2] != tail.shape[:-2] or keys.shape[-1] != tail.shape[-1]:
        return False
    return bool(torch.equal(keys[..., -count:, :], tail[..., -count:, :]))


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two calls were passed the same key tensor, unchanged in between."""
    if a is None or b is None:
        return False
    (tensor, version), (other, other_version) = a, b
    return tensor() is not None and tensor() is other() and version == other_version
