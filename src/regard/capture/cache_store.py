"""Decide which calls of a layer share a key-value cache, and store the keys of such calls once.

Each step of `generate()` passes the keys of all tokens so far: in a new tensor, in a buffer that the next step writes
to, in a window from which older keys were evicted, or in another order of the batch, as beam search does. A call
continues a cache if all its older keys are the same numbers, bit by bit. So the decision depends on no class of cache,
and it is the same for recordings, interventions and `outputs.attentions`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed

# Numbers that are compared at once.
CHUNK = 1 << 18

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CacheMatch(NamedTuple):
    """How a call continues a cache.

    Args:
        evicted: How many of the oldest keys the cache no longer has.
        candidates: For each batch entry of the call, the batch entries of the cache with its keys, its own first.
    """

    evicted: int
    candidates: list[list[int]]

    @property
    def entries(self) -> IntArray | None:
        """The batch entry of the cache that each batch entry of the call continues; None if each continues its own."""
        return find_entries(self.candidates)


def match_cache(old: Tensor, new: Tensor, past: int) -> CacheMatch | None:
    """Find out whether a call continues a cache: its newest keys, or older ones if the cache was cut back.

    Args:
        old: Keys of the cache after its last call, (…, kv_heads, held, head_dim).
        new: Keys of the call, (…, kv_heads, kv_len, head_dim).
        past: How many of them are of earlier calls.

    Returns:
        The match, or None if any of the first `past` keys differs from the cache.
    """
    held = old.shape[-2]
    if not 0 < past <= held:
        return None
    end = held - past
    # The newest keys first, then the first ones; keys without positions may be found several times.
    for evicted in sorted(_find_first_keys(old, new, end), key=lambda position: (position != end, position)):
        candidates = match_entries(old[..., evicted : evicted + past, :], new[..., :past, :])
        if candidates is not None:
            return CacheMatch(evicted, candidates)
    return None


def _find_first_keys(old: Tensor, new: Tensor, end: int) -> list[int]:
    """List the positions up to `end` where old keys of any batch entry have the bits of the first new key."""
    if (
        old.ndim != new.ndim
        or old.shape[-1] != new.shape[-1]
        or old.dtype != new.dtype
        or old.device != new.device
    ):
        return []
    if not old.numel() or not new.numel():
        return [0, end]
    integer = _INTEGERS[old.dtype.itemsize]
    keys = old.detach()[..., : end + 1, :].view(integer)
    keys = keys[(slice(None), *(0,) * (old.ndim - 3))] if old.ndim > 3 else keys.flatten(0, -3)[:1]
    first = new.detach()[(0,) * (new.ndim - 1)].view(integer)
    if keys.is_cpu:  # NumPy takes a fraction of the time
        return list((keys.numpy() == first.numpy()).all(-1).any(0).nonzero()[0].tolist())
    return list((keys == first).all(-1).any(0).nonzero().flatten().tolist())


def match_entries(old: Tensor, new: Tensor, among: list[list[int]] | None = None) -> list[list[int]] | None:
    """List the batch entries of old keys that equal each batch entry of new keys, its own first; None if any has none.

    Args:
        old: (batch, …, n, head_dim).
        new: The same with any number of batch entries. Keys without a batch axis, (heads, n, head_dim), have as many
            heads as the old ones.
        among: For each new entry, the old ones to look at. Default: all, unless each equals its own.
    """
    if old.shape[1:] != new.shape[1:] or old.dtype != new.dtype or old.device != new.device:
        return None
    old, new = old.detach(), new.detach()
    if among is None:
        if len(old) == len(new) and have_same_bits(old, new):
            return [[i] for i in range(len(old))]
        if old.ndim < 4 or len(old) == len(new) == 1:
            return None
        among = [sorted(range(len(old)), key=lambda j: j != i) for i in range(len(new))]
    candidates = []
    for entry, others in zip(new, among, strict=True):
        candidates.append([j for j in others if have_same_bits(old[j], entry)])
        if not candidates[-1]:
            return None
    return candidates


def find_entries(candidates: list[list[int]]) -> IntArray | None:
    """Return the first candidate of each batch entry; None if it is its own."""
    entries = np.array([others[0] for others in candidates])
    return None if (entries == np.arange(len(entries))).all() else entries


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare keys of one shape bit by bit, so that NaN equals itself."""
    integer = _INTEGERS[a.dtype.itemsize]
    a, b = a.view(integer), b.view(integer)
    return have_same_numbers(a.numpy(), b.numpy()) if a.is_cpu else bool(torch.equal(a, b))


def have_same_numbers(a: Any, b: Any) -> bool:
    """Compare NumPy arrays of keys, (…, n, head_dim): the newest key first, then all in chunks."""
    if a.size <= CHUNK:
        return bool((a == b).all())
    rows = max(1, CHUNK * a.shape[-2] // a.size)
    starts = (a.shape[-2] - 1, *range(0, a.shape[-2], rows))
    return all(bool((a[..., i : i + rows, :] == b[..., i : i + rows, :]).all()) for i in starts)


class KeyStore:
    """The keys of consecutive calls of a layer, in the order of their tokens.

    Args:
        key: Key of the first call, (…, kv_heads, kv_len, head_dim).
        used: Number of its keys that any query attends to; those after them are not filled yet. Default: all.
        copy: Copy a key that the model may overwrite.
    """

    def __init__(self, key: Tensor, used: int | None = None, *, copy: bool = True) -> None:
        self.count = int(key.shape[-2]) if used is None else used  # keys that are final
        self._moved: tuple[Any, KeyStore] | None = None
        # A tensor that was written to in place may be a buffer that will be again; in inference mode that is not known.
        has_version = not key.is_inference()
        is_stable = key.requires_grad or (has_version and key._version == 0)
        self._version = (
            key._version if has_version and (is_stable or not copy) else None
        )  # of a tensor of the model
        self._keys = key if is_stable or not copy else _grow(key, self.count, key.shape[-2])

    def try_append(self, key: Tensor, q_len: int, used: int) -> int | None:
        """Append the keys of a step if the rest of its keys are the newest of this store.

        Args:
            key: Key of the step, (…, kv_heads, kv_len, head_dim).
            q_len: Number of new keys.
            used: Number of keys that any query attends to; the new ones are the last of them.

        Returns:
            Position of the step's first key in the store, or None if its keys do not extend the store.
        """
        past, old = used - q_len, self._keys
        if key.requires_grad or old.requires_grad:
            return None
        if self._holds(key, used):
            return 0
        match = match_cache(old[..., : self.count, :], key[..., :used, :], past)
        # Matrices of earlier calls read this store: its keys are neither cut back nor reordered.
        if match is None or match.entries is not None or match.evicted != self.count - past:
            return None
        start, count = match.evicted, self.count + q_len
        needed = max(count, start + key.shape[-2])  # a buffer has keys that are not filled yet
        with torch.inference_mode(False), torch.no_grad():
            if self._version is not None or needed > old.shape[-2]:
                self._keys = _grow(old, self.count, needed + max(256, needed // 4))
                self._version = None
            self._keys[..., self.count : count, :] = key[..., past:used, :]
        self.count = count
        return start

    def _holds(self, key: Tensor, used: int) -> bool:
        """Return whether a call has the keys of the last one, as the calls of a decoder have those of its encoder."""
        if used != self.count or key.shape[-2] > self._keys.shape[-2]:
            return False
        match = match_cache(self._keys[..., :used, :], key[..., :used, :], used)
        return match is not None and match.entries is None

    def read(self, start: int, length: int) -> Tensor:
        """Return keys as a view, (…, kv_heads, length, head_dim); keys that were never filled are 0.

        Args:
            start: Position of the first key.
            length: Number of keys.

        Raises:
            ArgumentError: If the model has overwritten the keys.
        """
        if self._version is not None and self._keys._version != self._version:
            raise ArgumentError(
                "outputs.attentions",
                received="keys that the model overwrote after the call",
                expected="the keys that the layer computed with",
                hint="Read the weights before the next call of the model, or use a cache of transformers.",
            )
        return self._keys[..., start : start + length, :]

    def to(self, device: Any) -> KeyStore:
        """Return a store on another device; the steps of one store share it."""
        if self._keys.device == torch.device(device):
            return self
        if self._moved is None or self._moved[0] != (device, self.count):
            moved = KeyStore(self.read(0, self._keys.shape[-2]).to(device), self.count)
            self._moved = ((device, self.count), moved)
        return self._moved[1]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the keys, which are no tensor of a model then."""
        return {**vars(self), "_version": None, "_moved": None}

    def detach(self) -> KeyStore:
        """Return a store whose keys have no graph."""
        return KeyStore(self._keys.detach(), self.count) if self.requires_grad else self

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to the keys."""
        return bool(self._keys.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys."""
        return int(self._keys.nbytes)


def _grow(keys: Tensor, count: int, length: int) -> Tensor:
    """Return a copy of the first `count` keys with room for `length`."""
    with torch.inference_mode(False), torch.no_grad():
        grown = torch.zeros((*keys.shape[:-2], length, keys.shape[-1]), dtype=keys.dtype, device=keys.device)
        grown[..., :count, :] = keys[..., :count, :]
        return grown
