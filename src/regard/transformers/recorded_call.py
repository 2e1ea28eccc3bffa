"""The record of one call of the attention function: what is needed to compute its matrix."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from regard.capture.cache_store import KeyStore
from regard.capture.call import Call, CapturedArgs
from regard.capture.compact_mask import CompactMask, count_used_keys
from regard.capture.record import RecentMasks, find_position_biases, recognise_call_mask
from regard.core.matrix import AttentionMatrix
from regard.score_mods import bias, softcap

Tensor = Any  # the types of torch are not followed

# Caches of one layer that may take turns without storing keys twice: guidance has two.
RECENT_STORES = 4


class _ThreadCalls(threading.local):
    """What each thread recorded lately: the stores of the calls of each module, and the masks."""

    def __init__(self) -> None:
        self.stores: weakref.WeakKeyDictionary[nn.Module, deque[Any]] = weakref.WeakKeyDictionary()
        self.masks = RecentMasks()


_thread = _ThreadCalls()


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of an attention layer; its matrix is built when it is read.

    Args:
        args: Arguments of the call, without key and value, and without mask and bias once they are recognised.
        layer_class: Name of the module's class.
        store: The store of its keys.
        start: Position of its first key in the store.
        kv_len: Number of its keys.
        compact_mask: Mask and bias as they were recognised; None if that is left until the matrix is read.
    """

    args: CapturedArgs
    layer_class: str
    store: KeyStore
    start: int
    kv_len: int
    compact_mask: CompactMask | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, (batch, heads, q_len, kv_len)."""
        return (*self.query.shape[:-1], self.kv_len)

    @property
    def query(self) -> Tensor:
        """The query, (batch, heads, q_len, head_dim)."""
        return self.args.query

    @property
    def matrix(self) -> AttentionMatrix:
        """The lazy matrix; it has gradients if the model ran with them."""
        return self._call.matrix

    @cached_property
    def _call(self) -> Call:
        args = self.args._replace(key=self.store.read(self.start, self.kv_len))
        return Call(
            name="outputs.attentions",
            layer_class=self.layer_class,
            query=args.query,
            key=args.key,
            compact_mask=self.compact_mask or recognise_call_mask(args, self.kv_len),
            scale=args.resolved_scale,
            kernel=args.kernel,
            softcap=None if args.softcap is None else softcap(args.softcap),
            sink=args.sink,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the tensors; the matrix is built again."""
        return {name: value for name, value in vars(self).items() if name != "_call"}

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to query or key."""
        return bool(self.query.requires_grad or self.store.requires_grad)

    def detach(self) -> RecordedCall:
        """Return the call without its graph."""
        if not self.requires_grad:
            return self
        args = self.args._replace(query=self.query.detach())
        return replace(self, args=args, store=self.store.detach())

    def to(self, device: torch.device) -> RecordedCall:
        """Return the call on another device; calls of one cache share the moved keys."""
        if self.query.device == device:
            return self
        mask = self._call.compact_mask
        if mask.dense_mask is not None:
            mask = replace(mask, dense_mask=mask.dense_mask.to(device))
        if (array := getattr(mask.bias, "array", None)) is not None:
            mask = replace(mask, bias=bias(array.to(device)))
        sink = None if self.args.sink is None else self.args.sink.to(device)
        args = self.args._replace(query=self.query.to(device), sink=sink, attn_mask=None, position_bias=None)
        return replace(self, args=args, store=self.store.to(device), compact_mask=mask)


def record_call(module: nn.Module, args: CapturedArgs, *, keep: bool) -> RecordedCall:
    """Record a call of a layer."""
    store, start = _store_keys(module, args) if keep else (KeyStore(args.key, copy=False), 0)
    kv_len, compact_mask = int(args.key.shape[-2]), None
    # The mask of one row is small, and recognised if the row is read.
    if args.query.shape[-2] > 1:
        compact_mask = _thread.masks.recognise(args, kv_len, find_position_biases(module))
        args = args._replace(attn_mask=None, position_bias=None)
    return RecordedCall(
        args._replace(key=None, value=None), type(module).__name__, store, start, kv_len, compact_mask
    )


def _store_keys(module: nn.Module, args: CapturedArgs) -> tuple[KeyStore, int]:
    """Append the keys to a store of the module's calls, or begin a new one; return it and the first position."""
    stores = _thread.stores.setdefault(module, deque(maxlen=RECENT_STORES))
    used, q_len = _count_used_keys(args), args.query.shape[-2]
    for reference in reversed(stores):
        # A store is held by the calls that use it. If none of them is left, the steps before are not needed.
        store = reference()
        if store is not None and (start := store.try_append(args.key, q_len, used)) is not None:
            return store, start
    store = KeyStore(args.key, used)
    stores.append(weakref.ref(store))
    return store, 0


def _count_used_keys(args: CapturedArgs) -> int:
    """Return the number of keys up to the last one that the last query attends to; a static cache has more."""
    q_len, kv_len = args.query.shape[-2], int(args.key.shape[-2])
    mask = args.attn_mask
    if mask is None:
        return int(min(q_len, kv_len)) if args.is_causal else kv_len
    if mask.shape[-1] < kv_len:
        return kv_len
    return count_used_keys(mask[..., -1:, :kv_len]) or kv_len
