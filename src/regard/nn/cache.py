"""The keys and values that decoding has seen, kept so that a token costs what it adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError, format_shape
from regard.masks import Mask, first, sliding_window
from regard.nn.positional_masks import NOBODY, Places
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed

# Tokens that a new cache has room for; when they are used up the room is doubled.
ROOM = 64


class KVCache:
    """The keys and values of the tokens so far, for one layer: `layer(x, mask=causal(), cache=cache)`.

    Batch entries may have different lengths; each counts its own tokens from 0. With a `window` only the last `window`
    tokens and the `keep_first` first ones are seen, by the mask `sliding_window(window) | first(keep_first)` whatever
    the chunks are, and what nobody will see again is dropped. Keys keep the positions that they came with.

    >>> cache = KVCache(window=4, keep_first=1)
    >>> for _ in range(20):
    ...     _ = cache.append(torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8))  # (batch, kv_heads, n, head_dim)
    >>> cache
    KVCache(20 tokens, 8 of them held, window=4, keep_first=1)
    """

    def __init__(self, *, window: int | None = None, keep_first: int = 0) -> None:
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (window or 1, keep_first))
        if (
            not whole
            or (window is not None and window < 1)
            or keep_first < 0
            or (keep_first and window is None)
        ):
            raise ArgumentError(
                "KVCache",
                received=f"window={window!r}, keep_first={keep_first!r}",
                expected="a window of 1 token or more, and keep_first of 0 or more beside it",
                hint="KVCache() keeps every token; KVCache(window=512, keep_first=4) the last 512 and the first 4.",
            )
        self.window, self.keep_first = window, keep_first
        self.mask: Mask | None = None  # what the window lets through, by position
        if window is not None:
            self.mask = sliding_window(window) | first(keep_first) if keep_first else sliding_window(window)
        self._key: Tensor = None  # (batch, kv_heads, room, head_dim)
        self._value: Tensor = None
        self._lengths: IntArray = np.zeros(1, np.int64)
        self._dropped: IntArray = np.zeros(1, np.int64)  # tokens after the first ones that are no longer held
        self._alike = True  # whether all batch entries have the same two
        self._lent = False  # whether a matrix looks at what is held, so that it must not be written over

    @property
    def lengths(self) -> IntArray:
        """How many tokens each batch entry has seen: (batch,)."""
        return self._lengths.copy()

    def __len__(self) -> int:
        return int(self._lengths.max(initial=0))

    @property
    def columns(self) -> int:
        """How many tokens of the longest entry are held."""
        return int((self._lengths - self._dropped).max(initial=0))

    @property
    def key(self) -> Tensor:
        """The keys held, (batch, kv_heads, columns, head_dim): a view, not a copy."""
        return self._key[:, :, : self.columns]

    @property
    def value(self) -> Tensor:
        """The values held, as the keys."""
        return self._value[:, :, : self.columns]

    @property
    def positions(self) -> IntArray:
        """The position of each column: (batch, columns), or (1, columns) where all entries agree; −1 for none."""
        lengths, dropped = (x[:1] if self._alike else x for x in (self._lengths, self._dropped))
        column = np.arange(self.columns)
        position = column + np.where(column < self.keep_first, 0, dropped[:, None])
        return np.where(position < lengths[:, None], position, NOBODY)

    def upcoming(self, count: int, real: Any = None) -> IntArray:
        """The positions of the next `count` tokens: (batch, count), or (1, count) where all entries agree.

        `real` is (batch, count), True for tokens and False for padding.
        """
        if real is None:
            lengths = self._lengths[:1] if self._alike else self._lengths
            return lengths[:, None] + np.arange(count)
        counted: IntArray = np.maximum(np.cumsum(real, 1) - 1, 0)
        return self._lengths[:, None] + counted

    def append(self, key: Tensor, value: Tensor, real: Any = None) -> tuple[Tensor, Tensor]:
        """The keys and values held, with the next n tokens: (batch, kv_heads, n, head_dim) each.

        `real` is (batch, n), True for tokens; padding, on whichever side, is not kept.
        """
        self._check(key, value, real)
        self._drop()
        count = key.shape[2]
        if self._alike and (real is None or np.all(real)):
            start = self.columns
            self._make_room(start + count, key, value)
            self._key[:, :, start : start + count] = key
            self._value[:, :, start : start + count] = value
            self._lengths = self._lengths + count
            return self.key, self.value
        kept = np.ones((len(self._lengths), count), bool) if real is None else np.asarray(real)
        held, came = self._lengths - self._dropped, kept.sum(1)
        self._make_room(int((held + came).max(initial=0)), key, value)
        entry, source = np.nonzero(kept)
        target = held[entry] + (np.cumsum(kept, 1) - 1)[entry, source]
        entry, source, target = (torch.tensor(x, device=key.device) for x in (entry, source, target))
        self._key[entry, :, target] = key[entry, :, source]
        self._value[entry, :, target] = value[entry, :, source]
        self._settle(self._lengths + came, self._dropped)
        return self.key, self.value

    def crop(self, length: Any) -> None:
        """Forget the tokens from position `length` on, a number or one for each batch entry.

        With a window a cache goes back only as far as what it holds allows.
        """
        lengths = np.broadcast_to(np.asarray(length, np.int64), self._lengths.shape)
        if (lengths < 0).any() or (lengths > self._lengths).any():
            raise ArgumentError(
                "KVCache.crop",
                received=f"length {length}, after {self._lengths.tolist()} tokens",
                expected="lengths from 0 to the tokens seen",
                hint="crop(length) leaves the first `length` tokens.",
            )
        least = np.where(self._dropped, self.keep_first + self._dropped + (self.window or 1) - 1, 0)
        if (lengths < least).any():
            raise ArgumentError(
                "KVCache.crop",
                received=f"length {length}, where the window has dropped {self._dropped.tolist()} tokens",
                expected=f"{least.max()} or more",
                hint="Give the cache a larger window and the layer's mask the smaller one, or read the prompt again.",
            )
        if self._lent:
            self._key, self._value, self._lent = self._key.clone(), self._value.clone(), False
        self._settle(lengths.copy(), self._dropped)

    def lend(self) -> None:
        """Say that a matrix was made of what is held: it will not be written over."""
        self._lent = True

    def places(self, rows: IntArray, q_len: int | None = None) -> Places:
        """Where these rows and what is held are in the sequence, or in a matrix of q_len rows."""
        in_order = self._alike and not self._dropped.any()
        shape = (len(self) if q_len is None else q_len, len(self))
        return Places(rows, None if in_order else self.positions, shape)

    def _drop(self) -> None:
        """Let go of what nobody will see, when it is as much as the window: so a token is moved once at most."""
        if self.window is None or self._key is None:
            return
        kept = self.keep_first + self.window
        if self.columns < kept + self.window:
            return
        away = np.maximum(self._lengths - self._dropped - kept, 0)
        column = np.arange(kept)
        source = torch.tensor(column + np.where(column < self.keep_first, 0, away[:, None]))
        index = source.to(self._key.device)[:, None, :, None]
        for name in ("_key", "_value"):
            held = getattr(self, name)
            moved = held.gather(2, index.expand(len(held), held.shape[1], kept, held.shape[3]))
            # New room, no larger than the window needs, whatever the prompt was; others may look at the old.
            room = held.new_zeros((*held.shape[:2], kept + 2 * self.window, held.shape[3]))
            room[:, :, :kept] = moved
            setattr(self, name, room)
        self._lent = False
        self._settle(self._lengths, self._dropped + away)

    def _make_room(self, columns: int, key: Tensor, value: Tensor) -> None:
        """Room for so many columns: doubled when used up, so that copying adds up to no more than what is kept."""
        for name, new in (("_key", key), ("_value", value)):
            held = getattr(self, name)
            if held is None or held.shape[2] < columns:
                size = max(columns, ROOM if held is None else 2 * held.shape[2])
                # Zeros, not whatever was there: what is not finite would be looked at closely.
                room = new.new_zeros((*new.shape[:2], size, new.shape[3]))
                if held is not None:
                    room[:, :, : held.shape[2]] = held
                setattr(self, name, room)
            elif torch.is_grad_enabled() and (new.requires_grad or held.requires_grad):
                # Written over, what an earlier call kept for its gradient would be lost.
                setattr(self, name, held.clone())

    def _check(self, key: Tensor, value: Tensor, real: Any) -> None:
        if real is not None and np.shape(real) != (key.shape[0], key.shape[2]):
            raise ArgumentError(
                "KVCache.append",
                received=f"real of shape {np.shape(real)}",
                expected=format_shape(batch=key.shape[0], n=key.shape[2]),
                hint="It says of each token of the key whether it is one, True, or padding.",
            )
        if self._key is None:
            batch = key.shape[0]
            self._settle(*(np.zeros(batch, np.int64) for _ in range(2)))
            return
        for name, held, new in (("key", self._key, key), ("value", self._value, value)):
            same = held.shape[:2] == new.shape[:2] and held.shape[3] == new.shape[3]
            if not same or held.dtype != new.dtype or held.device != new.device:
                raise ArgumentError(
                    "KVCache.append",
                    received=f"{name} {_told(new)}",
                    expected=f"as what is held, {_told(held[:, :, : self.columns])}",
                    hint="Each layer and each batch has a cache of its own: KVCache().",
                )

    def _settle(self, lengths: IntArray, dropped: IntArray) -> None:
        self._lengths, self._dropped = lengths, dropped
        self._alike = all(bool((x == x[:1]).all()) for x in (lengths, dropped))

    def __repr__(self) -> str:
        tokens = len(self) if self._alike else self._lengths.tolist()
        window = "" if self.window is None else f", window={self.window}, keep_first={self.keep_first}"
        held = "" if self.window is None else f", {self.columns} of them held"
        return f"KVCache({tokens} tokens{held}{window})"


def _told(x: Tensor) -> str:
    axes = dict(zip(("batch", "kv_heads", "n", "head_dim"), x.shape, strict=True))
    return f"{format_shape(**axes)} {str(x.dtype).removeprefix('torch.')} on {x.device}"
