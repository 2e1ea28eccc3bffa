"""Store the keys of one layer once for all steps of a key-value cache.

Each step of `generate()` passes the keys of all tokens so far: in a new tensor, in a buffer that the next step writes
to, or in a window from which older keys were evicted. The new keys of a step are appended to those of the last one if
the others are the same numbers. So the store depends on no class of cache, and matrices of earlier steps stay as they
were whatever the model does to its cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError

Tensor = Any  # the types of torch are not followed

# Numbers that are compared at once.
CHUNK = 1 << 18

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        if not _have_same_layout(key, old) or key.requires_grad or old.requires_grad:
            return None
        if self._holds(key, used):
            return 0
        if not 0 < past <= self.count:
            return None
        if not _are_same(key[..., :past, :], old[..., self.count - past : self.count, :]):
            return None
        start, count = self.count - past, self.count + q_len
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
        return _are_same(key[..., :used, :], self._keys[..., :used, :])

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


def _have_same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two keys differ in their length only."""
    return bool(
        a.shape[:-2] == b.shape[:-2]
        and a.shape[-1] == b.shape[-1]
        and a.dtype == b.dtype
        and a.device == b.device
    )


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Compare keys bit by bit, so that NaN equals itself."""
    integer = _INTEGERS[a.dtype.itemsize]
    a, b = a.view(integer), b.view(integer)
    if not a.is_cpu:
        return bool(torch.equal(a, b))
    # NumPy compares several numbers at once.
    ours, theirs = a.numpy(), b.numpy()
    rows = max(1, CHUNK * a.shape[-2] // max(1, a.numel()))
    starts = range(0, a.shape[-2], rows)
    return all(np.array_equal(ours[..., i : i + rows, :], theirs[..., i : i + rows, :]) for i in starts)
