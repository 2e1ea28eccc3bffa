"""`HeadStore`: the keys and values of kv heads that have the same window and number of sinks, and attention over them.

Slots hold the sinks first and then the window, as a ring. Softmax does not depend on the order of the keys, so a
single step overwrites the oldest slot and attends to all slots where they are: nothing is copied. A store without a
window has one slot per token, and grows by a 64th of its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from regard.core.attention import attention
from regard.masks import dense
from regard.score_mods import bias, softcap

Tensor = Any  # the types of torch are not followed

# Start of a batch entry whose tokens so far are all padding.
UNKNOWN_START = 2**62

# A store without a window has at most 1/64 more slots than tokens.
GROWTH_SHIFT = 6

# Queries that share a mask: at least and at most so many.
MIN_TILE, MAX_TILE = 128, 1024


class HeadStore:
    """Keys and values of some kv heads of one layer.

    Positions count from the first token that is not padding in every batch entry. The sinks of a batch entry are its
    own first tokens, so that padding on the left does not take their place.

    Args:
        heads: The kv heads, ascending.
        window: Number of tokens that are stored besides the sinks, the last one included; None for all.
        sinks: Number of first tokens that are always stored; without meaning if all are.
    """

    def __init__(self, heads: list[int], window: int | None, sinks: int) -> None:
        self.heads = heads
        is_run = heads == list(range(heads[0], heads[-1] + 1))
        self.index: slice | list[int] = (
            slice(heads[0], heads[-1] + 1) if is_run else heads
        )  # a slice copies nothing
        self.window = window
        self.sinks = 0 if window is None else sinks
        self.limit = None if window is None else window + sinks
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Release everything that is stored."""
        self.length = 0
        self._key: Tensor = None
        self._value: Tensor = None
        self._past: tuple[Tensor, Tensor] | None = None

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.length if self.limit is None else min(self.length, self.limit)

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        tensors = [self._key, self._value, *(self._past or ())]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots in use, each (batch, heads, slots, dim)."""
        return self._key[:, :, : self.used], self._value[:, :, : self.used]

    def slot_positions(self, starts: Tensor | None) -> Tensor:
        """Return the position of the token in each slot.

        Args:
            starts: First position of each batch entry, (batch,), or None if all begin at 0.

        Returns:
            (1, slots), or (batch, slots) if there are sinks and starts.
        """
        device = self._key.device
        sinks = torch.arange(min(self.sinks, self.used), device=device)[None]
        if starts is not None and sinks.shape[1]:
            sinks = sinks + starts[:, None]
        ring = torch.arange(self.used - sinks.shape[1], device=device)[None]
        if self.window is not None:
            last = self.length - 1
            ring = last - (last - self.sinks - ring) % self.window
        return torch.cat([sinks, ring.expand(sinks.shape[0], -1)], 1)

    def recent(self) -> tuple[Tensor, Tensor, int]:
        """Return the keys and values that the next token can attend to besides the sinks, in order."""
        assert self.window is not None
        first = max(self.sinks, self.length - self.window + 1)
        return (*self._read_ring(first, self.length), min(first, self.length))

    def read_sinks(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the sinks that are stored so far."""
        count = min(self.sinks, self.used)
        return self._key[:, :, :count], self._value[:, :, :count]

    def append(self, key: Tensor, value: Tensor, starts: Tensor | None) -> None:
        """Store further tokens, and overwrite those that no later token attends to.

        Args:
            key: (batch, heads, tokens, dim).
            value: (batch, heads, tokens, value_dim).
            starts: First position of each batch entry, (batch,), or None if all begin at 0.
        """
        count = key.shape[2]
        first, length = self.length, self.length + count
        self._reserve(key, value, length)
        if self.window is None:
            self._key[:, :, first:length] = key
            self._value[:, :, first:length] = value
            self.length = length
            return
        if self.record_past:
            self._remember(key, value)
        self._store_sinks(key, value, starts)
        oldest = max(self.sinks, first, length - self.window)
        if oldest < length:
            self._write_ring(key[:, :, oldest - first :], value[:, :, oldest - first :], oldest)
        self.length = length

    def can_crop(self, count: int) -> bool:
        """Return whether the tokens that the window had before the last ones are still stored."""
        return self._count_missing(count) <= (0 if self._past is None else self._past[0].shape[2])

    def crop(self, count: int) -> None:
        """Remove the last tokens, and those that were only kept for it; `can_crop` must hold."""
        length = max(self.length - count, 0)
        if (missing := self._count_missing(count)) and self._past is not None:
            assert self.window is not None
            restored = max(self.sinks, length - self.window)
            # What would have left again before the new end is not needed.
            key, value = (part[:, :, -missing:][:, :, : length - restored] for part in self._past)
            self._write_ring(key, value, restored)
        self._past = None
        self.length = length

    def _count_missing(self, count: int) -> int:
        """Return the number of tokens that would come back into the window."""
        if self.window is None:
            return 0
        oldest, restored = (max(self.sinks, end - self.window) for end in (self.length, self.length - count))
        return oldest - restored

    def select(self, indices: Tensor) -> None:
        """Replace the batch entries by those at some indices."""
        if self._key is not None:
            indices = indices.to(self._key.device)
            self._key, self._value = self._key.index_select(0, indices), self._value.index_select(0, indices)
        if self._past is not None:
            key, value = self._past
            self._past = key.index_select(0, indices), value.index_select(0, indices)

    def _reserve(self, key: Tensor, value: Tensor, length: int) -> None:
        """Allocate slots for a number of tokens."""
        needed = length if self.limit is None else min(length, self.limit)
        if self._key is not None and needed <= self._key.shape[2]:
            return
        capacity = needed + (needed >> GROWTH_SHIFT)
        capacity = capacity if self.limit is None else min(capacity, self.limit)
        used = self.used
        for name, source in (("_key", key), ("_value", value)):
            old, new = getattr(self, name), source.new_empty((*source.shape[:2], capacity, source.shape[3]))
            # A slot that a batch entry has not filled is masked, and must not hold a NaN.
            new[:, :, used:] = 0
            if old is not None:
                new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)

    def _store_sinks(self, key: Tensor, value: Tensor, starts: Tensor | None) -> None:
        first, count = self.length, key.shape[2]
        if starts is None:
            end = min(self.sinks, first + count)
            if first < end:
                self._key[:, :, first:end] = key[:, :, : end - first]
                self._value[:, :, first:end] = value[:, :, : end - first]
            return
        if not (size := min(self.sinks, self._key.shape[2])):
            return
        index = starts[:, None] + torch.arange(size, device=key.device) - first
        is_new = ((index >= 0) & (index < count))[:, None, :, None]
        index = index.clamp(0, count - 1)[:, None, :, None]
        for slots, source in ((self._key, key), (self._value, value)):
            taken = source.gather(2, index.expand(-1, source.shape[1], -1, source.shape[3]))
            slots[:, :, :size] = torch.where(is_new, taken, slots[:, :, :size])

    def _ring_parts(self, first: int, end: int) -> list[slice]:
        """Return the slots of consecutive positions, at most as many as the window, as one or two slices."""
        assert self.window is not None
        begin = (first - self.sinks) % self.window
        head = min(end - first, self.window - begin)
        parts = [slice(self.sinks + begin, self.sinks + begin + head)]
        return parts if head == end - first else [*parts, slice(self.sinks, self.sinks + end - first - head)]

    def _read_ring(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        if first >= end:
            return self._key[:, :, :0], self._value[:, :, :0]
        parts = self._ring_parts(first, end)
        key, value = (
            torch.cat([slots[:, :, part] for part in parts], 2) for slots in (self._key, self._value)
        )
        return key, value

    def _write_ring(self, key: Tensor, value: Tensor, first: int) -> None:
        done = 0
        for part in self._ring_parts(first, first + key.shape[2]):
            size = part.stop - part.start
            self._key[:, :, part] = key[:, :, done : done + size]
            self._value[:, :, part] = value[:, :, done : done + size]
            done += size

    def _remember(self, key: Tensor, value: Tensor) -> None:
        """Keep the tokens that appending some others will overwrite, until `crop`."""
        assert self.window is not None
        length = self.length + key.shape[2]
        first, end = (max(self.sinks, stop - self.window) for stop in (self.length, length))
        if first >= end:
            return
        old_key, old_value = self._read_ring(first, min(end, self.length))
        fresh = slice(max(self.sinks - self.length, 0), max(end - self.length, 0))
        keys, values = [old_key, key[:, :, fresh]], [old_value, value[:, :, fresh]]
        if self._past is not None:
            keys, values = [self._past[0], *keys], [self._past[1], *values]
        self._past = torch.cat(keys, 2), torch.cat(values, 2)


@dataclass(frozen=True)
class ScoreOptions:
    """How a layer computes its weights.

    Args:
        scale: Factor of the scores; None for 1/√head_dim.
        dropout: Dropout probability of the weights.
        softcap: Limit of the scores; None for none.
        sink: Score that belongs to no key, (kv_heads, heads per kv head); None for none.
    """

    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sink: Tensor | None = None

    def select(self, heads: slice | list[int]) -> ScoreOptions:
        """Return the options of some kv heads."""
        return self if self.sink is None else replace(self, sink=self.sink[heads])


def attend_to_store(
    store: HeadStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    starts: Tensor | None,
    options: ScoreOptions,
) -> Tensor:
    """Store new tokens and return the attention of their queries.

    Args:
        store: The kv heads.
        query: (batch, kv_heads, heads per kv head, tokens, head_dim).
        key: (batch, kv_heads, tokens, head_dim).
        value: (batch, kv_heads, tokens, value_dim).
        mask: Mask of the model by position, True = attend, or added to the scores; it broadcasts to
            (batch, kv_heads, heads per kv head, tokens, positions). None if nothing is masked but later positions.
        starts: First position of each batch entry, (batch,), or None if all begin at 0.
        options: How weights are computed.

    Returns:
        (batch, kv_heads, heads per kv head, tokens, value_dim).
    """
    count, first = key.shape[2], store.length
    if count == 1:
        store.append(key, value, starts)
        if mask is None:
            return _multiply(query, *store.slots, None, options)
        positions = store.slot_positions(starts)
        visible = _find_visible(store, positions, first, 1, starts, query.device)
        return _multiply(query, *store.slots, _combine(visible, mask, positions), options)
    if store.window is None:
        store.append(key, value, starts)
        if mask is None and first == 0 and options.softcap is None and options.sink is None:
            return _multiply_causal(query, key, value, options)
        return _attend_all(store, query, mask, first, options)
    return _attend_window(store, query, key, value, mask, starts, options)


def _attend_all(
    store: HeadStore, query: Tensor, mask: Tensor | None, first: int, options: ScoreOptions
) -> Tensor:
    """Attend to every stored token, some queries at a time."""
    outputs = []
    key, value = store.slots
    for begin in range(0, query.shape[3], MAX_TILE):
        tile = query[:, :, :, begin : begin + MAX_TILE]
        end = first + begin + tile.shape[3]
        positions = torch.arange(end, device=query.device)[None]
        visible = _find_visible(store, positions, first + begin, tile.shape[3], None, query.device)
        allowed = _combine(visible, _select_queries(mask, begin, tile.shape[3]), slice(0, end))
        outputs.append(_multiply(tile, key[:, :, :end], value[:, :, :end], allowed, options))
    return torch.cat(outputs, 3)


def _attend_window(
    store: HeadStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    starts: Tensor | None,
    options: ScoreOptions,
) -> Tensor:
    """Attend to sinks and window, some queries at a time: the work grows with tokens times window."""
    assert store.window is not None
    first, origin, count = store.length, store.length, key.shape[2]
    recent_key, recent_value = key, value
    if first:
        old_key, old_value, origin = store.recent()
        recent_key, recent_value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
    store.append(key, value, starts)
    sink_key, sink_value = store.read_sinks()
    sinks = sink_key.shape[2]
    sink_positions = store.slot_positions(starts)[:, :sinks]
    outputs = []
    size = min(max(store.window, MIN_TILE), MAX_TILE)
    for begin in range(0, count, size):
        tile = query[:, :, :, begin : begin + size]
        end = first + begin + tile.shape[3]
        low = min(max(first + begin - store.window + 1, origin, store.sinks), end)
        positions = torch.arange(low, end, device=query.device)[None].expand(sink_positions.shape[0], -1)
        positions = torch.cat([sink_positions, positions], 1)
        visible = _find_visible(store, positions, first + begin, tile.shape[3], starts, query.device)
        part = slice(low - origin, end - origin)
        keys, values = recent_key[:, :, part], recent_value[:, :, part]
        if sinks:
            keys, values = torch.cat([sink_key, keys], 2), torch.cat([sink_value, values], 2)
        allowed = _combine(visible, _select_queries(mask, begin, tile.shape[3]), positions)
        outputs.append(_multiply(tile, keys, values, allowed, options))
    return torch.cat(outputs, 3)


def _find_visible(
    store: HeadStore, positions: Tensor, first: int, count: int, starts: Tensor | None, device: torch.device
) -> Tensor:
    """Return which keys the policy lets each query attend to.

    Args:
        store: The kv heads; its sinks come first among the keys.
        positions: Positions of the keys, (batch or 1, keys).
        first: Position of the first query.
        count: Number of queries.
        starts: First position of each batch entry, (batch,), or None if all begin at 0.
        device: Device of the result.

    Returns:
        (batch or 1, queries, keys).
    """
    queries = torch.arange(first, first + count, device=device)[None, :, None]
    keys = positions[:, None, :]
    visible = keys <= queries
    if store.window is None:
        return visible
    is_sink = torch.arange(positions.shape[1], device=device) < store.sinks
    in_window = keys > queries - store.window
    if starts is not None:
        # What a batch entry has as a sink, or as padding, is in the window for the other entries only.
        in_window = in_window & (keys >= starts[:, None, None] + store.sinks)
    return visible & (is_sink | in_window)


def _select_queries(mask: Tensor | None, begin: int, count: int) -> Tensor | None:
    return mask if mask is None or mask.shape[3] == 1 else mask[:, :, :, begin : begin + count]


def _combine(visible: Tensor, mask: Tensor | None, positions: Tensor | slice) -> Tensor:
    """Join what the policy and the model allow: (batch, kv_heads, heads per kv head, queries, keys), or broadcasting.

    Args:
        visible: (batch or 1, queries, keys).
        mask: Mask of the model by position, or None.
        positions: Positions of the keys, (batch or 1, keys), or a slice.
    """
    allowed = visible[:, None, None]
    if mask is None:
        return allowed
    if isinstance(positions, slice):
        chosen = mask[..., positions]
    elif positions.shape[0] == 1:
        chosen = mask.index_select(-1, positions[0])
    else:
        # A sink that a batch entry does not have yet has no column.
        index = positions.clamp(max=mask.shape[-1] - 1)[:, None, None, None]
        mask = mask.expand(positions.shape[0], -1, -1, -1, -1)
        chosen = mask.gather(-1, index.expand(*mask.shape[:-1], -1))
    if chosen.dtype == torch.bool:
        return allowed & chosen
    return torch.where(allowed, chosen, float("-inf"))


def _multiply_causal(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """Compute the attention of a first chunk, where nothing but later tokens is masked."""
    output = F.scaled_dot_product_attention(
        query.flatten(1, 2),
        key,
        value,
        is_causal=True,
        scale=options.scale,
        dropout_p=options.dropout,
        enable_gqa=query.shape[2] > 1,
    )
    return output.unflatten(1, query.shape[1:3])


def _multiply(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute the attention to some keys.

    Args:
        query: (batch, kv_heads, heads per kv head, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim).
        value: (batch, kv_heads, keys, value_dim).
        mask: Broadcasts to (batch, kv_heads, heads per kv head, queries, keys): booleans, or added to the scores.
        options: How weights are computed.
    """
    groups, count = query.shape[2:4]
    if options.softcap is not None or options.sink is not None:
        return _multiply_modified(query, key, value, mask, options)
    # Query heads of one kv head are rows of one product, so that no key is repeated.
    if mask is not None:
        mask = mask.expand(-1, -1, groups, count, -1).flatten(2, 3)
    output = F.scaled_dot_product_attention(
        query.flatten(2, 3), key, value, attn_mask=mask, scale=options.scale, dropout_p=options.dropout
    )
    return output.unflatten(2, (groups, count))


def _multiply_modified(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute what `F.scaled_dot_product_attention` cannot: a soft cap, or a score that belongs to no key."""
    groups = query.shape[1:3]
    mods, allowed = [], None
    if options.softcap is not None:
        mods.append(softcap(options.softcap))
    if mask is not None:
        mask = mask.expand(-1, *groups, -1, -1).flatten(1, 2)
        allowed = dense(mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min)
        if mask.dtype != torch.bool:
            mods.append(bias(mask.nan_to_num(neginf=0.0)))
    sink = None if options.sink is None else options.sink.reshape(-1)
    matrix = attention(
        query.flatten(1, 2),
        key,
        mask=allowed,
        score_mod=mods,
        scale=options.scale,
        sink=sink,
        enable_gqa=groups[1] > 1,
    )
    return (matrix @ value).unflatten(1, groups)
