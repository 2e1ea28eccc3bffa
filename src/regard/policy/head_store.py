"""`HeadStore`: the keys and values of kv heads that have the same window and the same number of sinks.

Slots hold the sinks first and then the window, as a ring. Softmax does not depend on the order of the keys, so a
single step overwrites the oldest slot and attends to all slots where they are: nothing is copied. A store without a
window has one slot per token, and grows by a 64th of its size.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = Any  # the types of torch are not followed

# Start of a batch entry whose tokens so far are all padding.
UNKNOWN_START = 2**62

# A store without a window has at most 1/64 more slots than tokens.
GROWTH_SHIFT = 6


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
        """Return the keys and values that the next token can attend to besides the sinks, in order.

        Returns:
            Keys, values and the position of the first of them.
        """
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
