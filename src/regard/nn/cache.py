"""The key-value cache: keys and values of past tokens, so that decoding computes only the new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError, format_shape
from regard.masks import Mask, first, sliding_window
from regard.nn.positional_masks import NEVER_VISIBLE, TokenPositions
from regard.types import IntArray

Tensor = Any  # mypy does not follow torch's types

# Tokens that a new cache allocates space for. A full cache doubles its capacity.
INITIAL_CAPACITY = 64


class KVCache:
    """Cached keys and values of past tokens, for one layer: `layer(x, mask=causal(), cache=cache)`.

    Batch entries may have different lengths, and each counts its own tokens from 0. With a `window`, queries see the
    last `window` tokens and the first `keep_first` ones. For any chunk size, the mask is `sliding_window(window) |
    first(keep_first)`, and tokens outside it are evicted. Keys keep their positions.

    Args:
        window: The number of most recent tokens that stay visible; None keeps every token.
        keep_first: The number of first tokens that stay visible in addition to the window. Default 0.

    Raises:
        ArgumentError: If `window` is below 1, or `keep_first` is negative or given without a window.

    >>> import torch
    >>> cache = KVCache(window=4, keep_first=1)
    >>> for _ in range(20):
    ...     _ = cache.append(torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8))  # (batch, kv_heads, n, head_dim)
    >>> cache
    KVCache(20 tokens, 8 of them cached, window=4, keep_first=1)
    """

    def __init__(self, *, window: int | None = None, keep_first: int = 0) -> None:
        are_integers = all(isinstance(n, int) and not isinstance(n, bool) for n in (window or 1, keep_first))
        if (
            not are_integers
            or (window is not None and window < 1)
            or keep_first < 0
            or (keep_first and window is None)
        ):
            raise ArgumentError(
                "KVCache",
                received=f"window={window!r}, keep_first={keep_first!r}",
                expected="a window of at least 1 token, and a keep_first of at least 0, used with a window",
                hint="KVCache() keeps every token; KVCache(window=512, keep_first=4) keeps the first 4 and last 512.",
            )
        self.window, self.keep_first = window, keep_first
        self.mask: Mask | None = None  # the window as a mask of the whole sequence
        if window is not None:
            self.mask = sliding_window(window) | first(keep_first) if keep_first else sliding_window(window)
        self._key: Tensor = None  # (batch, kv_heads, capacity, head_dim)
        self._value: Tensor = None
        self._lengths: IntArray = np.zeros(1, np.int64)
        self._evicted: IntArray = np.zeros(
            1, np.int64
        )  # evicted tokens of each entry, all after the first ones
        self._is_uniform = True  # whether all batch entries have the same length and evictions
        self._is_shared = False  # whether a matrix reads the buffers, so that they must not be overwritten

    @property
    def lengths(self) -> IntArray:
        """The number of tokens each batch entry has received, (batch,)."""
        return self._lengths.copy()

    def __len__(self) -> int:
        return int(self._lengths.max(initial=0))

    @property
    def columns(self) -> int:
        """The number of cached tokens of the longest batch entry."""
        return int((self._lengths - self._evicted).max(initial=0))

    @property
    def key(self) -> Tensor:
        """The cached keys, (batch, kv_heads, columns, head_dim); a view, not a copy."""
        return self._key[:, :, : self.columns]

    @property
    def value(self) -> Tensor:
        """The cached values, (batch, kv_heads, columns, head_dim); a view, not a copy."""
        return self._value[:, :, : self.columns]

    @property
    def positions(self) -> IntArray:
        """The position of each column: (batch, columns), or (1, columns) if all entries agree; −1 for no token."""
        lengths, evicted = (x[:1] if self._is_uniform else x for x in (self._lengths, self._evicted))
        column = np.arange(self.columns)
        position = column + np.where(column < self.keep_first, 0, evicted[:, None])
        return np.where(position < lengths[:, None], position, NEVER_VISIBLE)

    def next_positions(self, count: int, real: Any = None) -> IntArray:
        """Return the positions that the next tokens will have.

        Args:
            count: The number of tokens.
            real: Booleans (batch, count), True for tokens and False for padding. Default: all are tokens.

        Returns:
            Positions (batch, count), or (1, count) if all entries agree.
        """
        if real is None:
            lengths = self._lengths[:1] if self._is_uniform else self._lengths
            return lengths[:, None] + np.arange(count)
        counted: IntArray = np.maximum(np.cumsum(real, 1) - 1, 0)
        return self._lengths[:, None] + counted

    def append(self, key: Tensor, value: Tensor, real: Any = None) -> tuple[Tensor, Tensor]:
        """Append tokens, and return all cached keys and values.

        Args:
            key: Keys of the next tokens, (batch, kv_heads, n, head_dim).
            value: Values of the next tokens, (batch, kv_heads, n, head_dim).
            real: Booleans (batch, n), True for tokens. Padding, on either side, is not cached. Default: all tokens.

        Returns:
            The cached keys and values, (batch, kv_heads, columns, head_dim) each.

        Raises:
            ArgumentError: If shape, dtype or device differ from those of the cached tokens.
        """
        self._check(key, value, real)
        self._evict()
        count = key.shape[2]
        if self._is_uniform and (real is None or np.all(real)):
            start = self.columns
            self._reserve(start + count, key, value)
            self._key[:, :, start : start + count] = key
            self._value[:, :, start : start + count] = value
            self._lengths = self._lengths + count
            return self.key, self.value
        is_token = np.ones((len(self._lengths), count), bool) if real is None else np.asarray(real)
        cached, added = self._lengths - self._evicted, is_token.sum(1)
        self._reserve(int((cached + added).max(initial=0)), key, value)
        entry, source = np.nonzero(is_token)
        target = cached[entry] + (np.cumsum(is_token, 1) - 1)[entry, source]
        entry, source, target = (torch.tensor(x, device=key.device) for x in (entry, source, target))
        self._key[entry, :, target] = key[entry, :, source]
        self._value[entry, :, target] = value[entry, :, source]
        self._set_lengths(self._lengths + added, self._evicted)
        return self.key, self.value

    def crop(self, length: Any) -> None:
        """Remove the tokens from position `length` on.

        A cache with a window can be cropped only as far as it still holds the tokens it needs.

        Args:
            length: The number of tokens to keep; one number, or one for each batch entry, (batch,).

        Raises:
            ArgumentError: If `length` exceeds the tokens received, or needs tokens that have been evicted.
        """
        lengths = np.broadcast_to(np.asarray(length, np.int64), self._lengths.shape)
        if (lengths < 0).any() or (lengths > self._lengths).any():
            raise ArgumentError(
                "KVCache.crop",
                received=f"length {length}, after {self._lengths.tolist()} tokens",
                expected="lengths from 0 to the number of tokens received",
                hint="crop(length) keeps the first `length` tokens.",
            )
        least = np.where(self._evicted, self.keep_first + self._evicted + (self.window or 1) - 1, 0)
        if (lengths < least).any():
            raise ArgumentError(
                "KVCache.crop",
                received=f"length {length}, after the window has evicted {self._evicted.tolist()} tokens",
                expected=f"{least.max()} or more",
                hint="Use a larger window in the cache and a smaller one in the layer's mask, or rerun the prompt.",
            )
        if self._is_shared:
            self._key, self._value, self._is_shared = self._key.clone(), self._value.clone(), False
        self._set_lengths(lengths.copy(), self._evicted)

    def mark_shared(self) -> None:
        """Declare that a matrix reads the cached tensors, so that `crop` copies them before they are overwritten."""
        self._is_shared = True

    def token_positions(self, rows: IntArray, q_len: int | None = None) -> TokenPositions:
        """Return the positions of query rows and of the cached keys.

        Args:
            rows: The position of each query, (batch or 1, queries).
            q_len: The number of rows of the whole matrix. Default: the number of tokens received.
        """
        in_order = self._is_uniform and not self._evicted.any()
        full_shape = (len(self) if q_len is None else q_len, len(self))
        return TokenPositions(rows, None if in_order else self.positions, full_shape)

    def _evict(self) -> None:
        """Evict tokens outside the window once there are `window` of them, so that each token moves at most once."""
        if self.window is None or self._key is None:
            return
        kept = self.keep_first + self.window
        if self.columns < kept + self.window:
            return
        evicted = np.maximum(self._lengths - self._evicted - kept, 0)
        column = np.arange(kept)
        source = torch.tensor(column + np.where(column < self.keep_first, 0, evicted[:, None]))
        index = source.to(self._key.device)[:, None, :, None]
        for name in ("_key", "_value"):
            cached = getattr(self, name)
            moved = cached.gather(2, index.expand(len(cached), cached.shape[1], kept, cached.shape[3]))
            # A new buffer, sized by the window and not by the prompt; matrices may still read the old one.
            buffer = cached.new_zeros((*cached.shape[:2], kept + 2 * self.window, cached.shape[3]))
            buffer[:, :, :kept] = moved
            setattr(self, name, buffer)
        self._is_shared = False
        self._set_lengths(self._lengths, self._evicted + evicted)

    def _reserve(self, columns: int, key: Tensor, value: Tensor) -> None:
        """Reserve capacity for `columns` tokens; doubling keeps the total cost of copies linear in the tokens."""
        for name, new in (("_key", key), ("_value", value)):
            cached = getattr(self, name)
            if cached is None or cached.shape[2] < columns:
                capacity = max(columns, INITIAL_CAPACITY if cached is None else 2 * cached.shape[2])
                # Zeros, not uninitialised memory: non-finite values would take a slower path.
                buffer = new.new_zeros((*new.shape[:2], capacity, new.shape[3]))
                if cached is not None:
                    buffer[:, :, : cached.shape[2]] = cached
                setattr(self, name, buffer)
            elif torch.is_grad_enabled() and (new.requires_grad or cached.requires_grad):
                # Writing in place would destroy what an earlier call saved for its backward pass.
                setattr(self, name, cached.clone())

    def _check(self, key: Tensor, value: Tensor, real: Any) -> None:
        if real is not None and np.shape(real) != (key.shape[0], key.shape[2]):
            raise ArgumentError(
                "KVCache.append",
                received=f"real of shape {np.shape(real)}",
                expected=format_shape(batch=key.shape[0], n=key.shape[2]),
                hint="Pass one boolean for each token of the key: True for a token, False for padding.",
            )
        if self._key is None:
            batch = key.shape[0]
            self._set_lengths(*(np.zeros(batch, np.int64) for _ in range(2)))
            return
        for name, cached, new in (("key", self._key, key), ("value", self._value, value)):
            same = cached.shape[:2] == new.shape[:2] and cached.shape[3] == new.shape[3]
            if not same or cached.dtype != new.dtype or cached.device != new.device:
                raise ArgumentError(
                    "KVCache.append",
                    received=f"{name} {_format_tensor(new)}",
                    expected="the shape, dtype and device of the cached tokens, "
                    + _format_tensor(cached[:, :, : self.columns]),
                    hint="Use a separate KVCache() for each layer and each batch.",
                )

    def _set_lengths(self, lengths: IntArray, evicted: IntArray) -> None:
        self._lengths, self._evicted = lengths, evicted
        self._is_uniform = all(bool((x == x[:1]).all()) for x in (lengths, evicted))

    def __repr__(self) -> str:
        tokens = len(self) if self._is_uniform else self._lengths.tolist()
        window = "" if self.window is None else f", window={self.window}, keep_first={self.keep_first}"
        cached = "" if self.window is None else f", {self.columns} of them cached"
        return f"KVCache({tokens} tokens{cached}{window})"


def _format_tensor(x: Tensor) -> str:
    axes = dict(zip(("batch", "kv_heads", "n", "head_dim"), x.shape, strict=True))
    return f"{format_shape(**axes)} {str(x.dtype).removeprefix('torch.')} on {x.device}"
