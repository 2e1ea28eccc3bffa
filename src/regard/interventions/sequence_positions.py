"""Find where the calls of a layer are in the sequence, over the cached steps of `generate()`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from regard.capture.cache_store import match_cache
from regard.capture.call import Call
from regard.interventions.placement import Placement
from regard.lens.token_rows import TokenRows

Tensor = Any  # the types of torch are not followed

# Caches of one layer that may take turns; only a cache that evicts keys needs to be recognised.
RECENT_CACHES = 16


class CacheState(NamedTuple):
    """The state of a layer's cache after a call.

    Args:
        keys: Keys in use, or values if the layer computes its own softmax: (…, kv_heads, held, dim).
        key_offset: Position of the first one.
    """

    keys: Tensor
    key_offset: int


class SequencePositions:
    """Where the calls of each layer are in the sequence.

    If a call extends the keys of an earlier one, it continues its sequence: at the end of all keys, or of those that a
    rolling cache has not evicted. Otherwise it begins a sequence. The rows of cross-attention are where the decoder's
    self-attention before it was.
    """

    def __init__(self) -> None:
        self._caches: dict[str, deque[CacheState]] = {}
        self._newest_rows: Placement | None = None  # of self-attention
        self._preceding: Callable[[], Call | None] | None = None

    def precede(self, build: Callable[[], Call | None]) -> None:
        """Remember a call that no edit changes; it is built if cross-attention needs its rows.

        Args:
            build: Builds the record of the call.
        """
        self._preceding = build

    def locate(self, call: Call) -> Placement:
        """Return where a call is, and remember it.

        Args:
            call: Record of the call.
        """
        *_, q_len, kv_len = call.shape
        used = min(call.compact_mask.last_key or kv_len, kv_len)
        call.query_offset = max(0, used - q_len)
        if TokenRows.from_call(call).query_offset is None:
            return Placement(call.shape, self._count_rows_before(call), 0, True)
        self._preceding = None
        past, key_offset = call.query_offset, 0
        keys = call.key if call.weights is None else call.cached
        if keys is not None:
            key_offset = self._find_key_offset(call.name, keys[..., :used, :].detach(), past)
        placement = Placement(call.shape, key_offset + past, key_offset, False)
        self._newest_rows = placement
        return placement

    def _find_key_offset(self, name: str, keys: Tensor, past: int) -> int:
        """Return the position of the first key of a call, and remember the keys."""
        caches = self._caches.setdefault(name, deque(maxlen=RECENT_CACHES))
        offsets = []
        for i, state in reversed(list(enumerate(caches))):
            match = match_cache(state.keys, keys, past)
            if match is not None:
                offsets.append(state.key_offset + match.evicted)
            if match is not None and past + match.evicted == state.keys.shape[-2]:
                offsets = offsets[-1:]
                del caches[i]  # others may continue a cache that was cut back, but not this one
                break
        key_offset = offsets[0] if offsets else 0
        caches.append(CacheState(keys, key_offset))
        return key_offset

    def _count_rows_before(self, call: Call) -> int:
        """Count the rows before those of cross-attention by the self-attention that ran before it."""
        if self._preceding is not None:
            build, self._preceding = self._preceding, None
            preceding, self._newest_rows = build(), None
            if preceding is not None:
                self.locate(preceding)
        newest = self._newest_rows
        if newest is None or newest.shape[-2] != call.shape[-2] or newest.batch != len(call.query):
            return 0
        return newest.query_offset
