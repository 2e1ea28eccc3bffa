"""Decide which calls of a layer share a key-value cache, store their keys once, and join their rows into one matrix.

Each step of `generate()` passes the keys of all tokens so far: in a new tensor, in a buffer that the next step writes
to, in a window from which older keys were evicted, or in another order of the batch, as beam search does. A call
continues a cache if all its older keys are the same numbers, bit by bit (`match_cache`). So the decision depends on no
class of cache, and it is the same for recordings (`JoinedCalls`), interventions and `outputs.attentions` (`KeyStore`).

A recording holds the newest keys, and those that a rolling cache evicted; each call adds its rows. A step of one
unmasked row over the keys of the last call and one more has a fast path, `RowSteps`: it differs from the last step in
query, key, value and lse only, and building its record in full would take most of the time that `watch` adds to it.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from threading import Lock, get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.compact_mask import CompactMask, recognise_mask
from regard.engines.native.library import load_library
from regard.errors import ArgumentError
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed

# Dtypes that NumPy also has: its comparisons take a fraction of the time.
_NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# A call that extends no cache is compared with this many of the latest ones to find out why.
MAX_FAULTY_CACHES = 8

CACHE_FAULTS = {
    "keys do not grow": "The keys of a cached step do not grow: they replace keys of earlier tokens, or omit its own.",
    "keys skipped": "A cached step adds more keys than it has tokens.",
    "values missing": "The values of a cached step were not appended.",
}


class CacheMatch(NamedTuple):
    """How a call continues a cache.

    Args:
        candidates: For each batch entry, the entries of the cache that it may continue, the likeliest first; None: its
            own.
        evicted: How many of the oldest keys the cache no longer has.
        rows_before: Number of rows that precede those of the call; rows from there on are replaced.
        key: Keys of the call in use, or values if the layer computed its own softmax; None for cross-attention.
    """

    candidates: list[list[int]] | None = None
    evicted: int = 0
    rows_before: int = 0
    key: Tensor | None = None

    @property
    def entries(self) -> IntArray | None:
        """The batch entry of the cache that each batch entry of the call continues; None if each continues its own."""
        if self.candidates is None:
            return None
        entries = np.array([others[0] for others in self.candidates])
        return None if (entries == np.arange(len(entries))).all() else entries


def match_cache(old: Tensor, new: Tensor, past: int) -> CacheMatch | None:
    """Return how a call continues a cache, by its newest keys, or older ones if it was cut back; None if it does not.

    Args:
        old: Keys of the cache after its last call, (…, kv_heads, held, head_dim).
        new: Keys of the call, (…, kv_heads, kv_len, head_dim).
        past: How many of them are of earlier calls.
    """
    held = old.shape[-2]
    if not 0 < past <= held:
        return None
    end = held - past
    # The newest keys first, then the first ones; keys without positions may be found several times.
    for evicted in sorted(_find_first_keys(old, new, end), key=lambda position: (position != end, position)):
        candidates = match_entries(old[..., evicted : evicted + past, :], new[..., :past, :])
        if candidates is not None:
            return CacheMatch(candidates, evicted)
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
        old: (batch, …, n, head_dim), or (heads, n, head_dim) without a batch axis.
        new: The same with any number of batch entries.
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


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare keys of one shape bit by bit, so that NaN equals itself."""
    if a.is_cpu:
        library, a_step, b_step = load_library(), _find_step(a), _find_step(b)
        if library is not None and a_step is not None and b_step is not None:
            size, count = a.shape[-2] * a.shape[-1] * a.dtype.itemsize, math.prod(a.shape[:-2])
            return bool(
                library.regard_have_same_bytes(a.data_ptr(), a_step, b.data_ptr(), b_step, size, count)
            )
    integer = _INTEGERS[a.dtype.itemsize]
    a, b = a.view(integer), b.view(integer)
    return bool((a.numpy() == b.numpy()).all() if a.is_cpu else torch.equal(a, b))


def _find_step(x: Tensor) -> int | None:
    """Return how many bytes the matrices of an array (…, n, head_dim) are apart; None if that is not one number."""
    *leading, rows, columns = x.shape
    *strides, row_stride, column_stride = x.stride()
    if (column_stride != 1 and columns > 1) or (row_stride != columns and rows > 1):
        return None
    axes = [axis for axis in zip(leading, strides, strict=True) if axis[0] != 1]
    step = axes[-1][1] if axes else 0
    expected = step
    for length, stride in reversed(axes):
        if stride != expected:
            return None
        expected = stride * length
    return int(step * x.dtype.itemsize)


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
        """Append the new keys of a step, the last of those in use, if its other keys are the newest of this store.

        Returns:
            Position of the step's first key in the store, or None if its keys do not extend the store.
        """
        past, old = used - q_len, self._keys
        if key.requires_grad or old.requires_grad or self._is_overwritten:
            return None
        if self._holds(key, used):
            return 0
        start, count = self.count - past, self.count + q_len
        # Matrices of earlier calls read this store: its keys are neither cut back nor reordered. So a step continues
        # its newest keys, or starts another store.
        if past <= 0 or start < 0 or not _are_comparable(old, key):
            return None
        if not have_same_bits(old.narrow(-2, start, past).detach(), key.narrow(-2, 0, past).detach()):
            return None
        needed = max(count, start + key.shape[-2])  # a buffer has keys that are not filled yet
        is_plain = not (torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        with nullcontext() if is_plain else _allow_writing():
            if self._version is not None or needed > old.shape[-2]:
                self._keys = _grow(old, self.count, needed + max(256, needed // 4))
                self._version = None
            self._keys.narrow(-2, self.count, q_len).copy_(key.narrow(-2, past, q_len))
        self.count = count
        return start

    def _holds(self, key: Tensor, used: int) -> bool:
        """Return whether a call has the keys of the last one, as the calls of a decoder have those of its encoder."""
        if used != self.count or key.shape[-2] > self._keys.shape[-2]:
            return False
        match = match_cache(self._keys[..., :used, :], key[..., :used, :], used)
        return match is not None and match.entries is None

    def read(self, start: int, length: int) -> Tensor:
        """Return keys as a view, (…, kv_heads, length, head_dim); keys that were never filled are 0."""
        if self._is_overwritten:
            raise ArgumentError(
                "outputs.attentions",
                received="keys that the model overwrote after the call",
                expected="the keys that the layer used",
                hint="Read the weights before the next call of the model, or use a cache of transformers.",
            )
        return self._keys[..., start : start + length, :]

    @property
    def _is_overwritten(self) -> bool:
        """Whether the model changed the keys after the call."""
        return self._version is not None and self._keys._version != self._version

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


@contextmanager
def _allow_writing() -> Iterator[None]:
    """Allow writing to the tensors of a store, which are no inference tensors and have no graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _are_comparable(a: Tensor, b: Tensor) -> bool:
    """Return whether keys differ in their number at most."""
    shapes = [(*keys.shape[:-2], keys.shape[-1]) for keys in (a, b)]
    return shapes[0] == shapes[1] and bool(a.dtype == b.dtype and a.device == b.device)


def _grow(keys: Tensor, count: int, length: int) -> Tensor:
    """Return a copy of the first `count` keys with room for `length`."""
    with _allow_writing():
        grown = torch.zeros((*keys.shape[:-2], length, keys.shape[-1]), dtype=keys.dtype, device=keys.device)
        grown[..., :count, :] = keys[..., :count, :]
        return grown


class CacheFault(NamedTuple):
    """A call whose keys or values do not extend the cache as its tokens should.

    Args:
        call: Number of the call among those of its layer, from 0.
        kind: What is wrong, a key of `CACHE_FAULTS`.
        tokens: Number of tokens of the call.
        added: Number of keys or values that it added to the cache.
    """

    call: int
    kind: str
    tokens: int
    added: int


class CallRows(NamedTuple):
    """The rows that one call added."""

    query: Tensor
    lse: Tensor | None
    output: Tensor | None
    compact_mask: CompactMask
    is_causal: bool
    weights: Tensor | None
    key_offset: int  # position of the first column of `weights` among all keys
    entries: IntArray | None = None  # batch entry of the rows before that each entry continues; None: its own

    def first(self, count: int) -> CallRows:
        """Return the first rows."""
        output, weights = (
            None if rows is None else rows[..., :count, :] for rows in (self.output, self.weights)
        )
        return self._replace(
            query=self.query[..., :count, :],
            lse=None if self.lse is None else self.lse[..., :count],
            output=output,
            compact_mask=self.compact_mask.map_edges(lambda edge: edge[..., :count]),
            weights=weights,
        )

    def select(self, entries: IntArray) -> CallRows:
        """Return the rows of some batch entries, without their place among the rows before."""
        index = torch.as_tensor(entries, device=self.query.device)
        tensors = (self.query, self.lse, self.output, self.weights)
        query, lse, output, weights = (None if tensor is None else tensor[index] for tensor in tensors)
        mask = self.compact_mask.map_edges(lambda edge: _select(edge, entries))
        return CallRows(query, lse, output, mask, self.is_causal, weights, self.key_offset)


class RowSteps:
    """The steps of one cache, in one thread, that are waiting to be joined.

    Args:
        call: The last call, one row.
        args: What the layer was called with; dropout, `is_causal`, scale and `enable_gqa` are those of all steps.
        passes: For each thread, how `generate()` proposes tokens in its pass, the cache passed to the model, and the
            number of the pass.
    """

    def __init__(self, call: Call, args: CapturedArgs, passes: Mapping[int, tuple[str, Any, int]]) -> None:
        self.queries: list[Tensor] = []
        self.lses: list[Tensor] = []
        self.key = call.key
        self.options = args[4:8]
        self.lock = Lock()
        self._is_open, self._thread = True, get_ident()
        self._passes, self._source_cache = passes, call.source_cache
        self._query_shape, self._dtype = call.query.shape, call.query.dtype
        self._given: tuple[Any, Any] | None = None  # other arguments of the last step, as they were passed
        self._library = load_library()
        self._expect(call.key, args.value)

    def _expect(self, key: Tensor, value: Tensor) -> None:
        """Prepare to compare the next step with the last one."""
        batch, heads, length, head_dim = key.shape
        self._key_shape = (batch, heads, length + 1, head_dim)
        self._value_shape = (*value.shape[:2], length + 1, value.shape[3])
        self._known_key = key.detach()  # the model may give the tensor itself other numbers
        row = head_dim * key.dtype.itemsize
        self._layout = (
            ((length + 1) * row, key.data_ptr(), length * row, length * row, batch * heads)
            if key.is_contiguous() and self._library is not None
            else None
        )

    @staticmethod
    def accept(args: CapturedArgs) -> bool:
        """Return whether a call is one unmasked row of a kernel whose lse is known, on the CPU."""
        return (
            args.lse is not None
            and args.edits is None
            and args.attn_mask is None
            and not args.is_causal
            and args.query.shape[-2] == 1
            and args.key.is_cpu
            and args.key.dtype in _NUMPY_DTYPES
            and bool(args.key.numel() and args.value.numel())
        )

    def matches(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call of `F.scaled_dot_product_attention` without a mask is the next step.

        If not, the call is recorded in full, which finds out why.
        """
        if len(args) < 3 or module.training or not self._is_open or self._thread != get_ident():
            return False
        mode, source_cache, _ = self._passes.get(self._thread, ("", None, 0))
        if mode or source_cache is not self._source_cache:
            return False
        query, key, value = args[:3]
        if not type(query) is type(key) is type(value) is torch.Tensor:
            return False
        if (
            key.shape != self._key_shape
            or value.shape != self._value_shape
            or query.shape != self._query_shape
            or not query.dtype is key.dtype is value.dtype is self._dtype
            or not (query.is_cpu and key.is_cpu and value.is_cpu)
        ):
            return False
        if self._given != (args[3:], kwargs):
            if CapturedArgs(*args, **kwargs)[4:8] != self.options:
                return False
            self._given = args[3:], dict(kwargs)
        # Tensors that may be overwritten are copied, and those with a graph detached.
        if key.is_inference() or query.is_inference() or key._version or query._version:
            return False
        if key.requires_grad or query.requires_grad or value.requires_grad or key.is_neg() or value.is_neg():
            return False
        known = self._known_key
        if known._version or (self._layout is not None and known.data_ptr() != self._layout[1]):
            return False  # the keys of the last step were changed, or their memory was freed
        if not value.numpy()[-1, -1, -1, -1]:
            return False  # it may not have been written
        if self._layout is not None and key.is_contiguous():  # in most models; without views of the keys
            return bool(self._library.regard_have_same_bytes(key.data_ptr(), *self._layout))
        return have_same_bits(key.narrow(-2, 0, key.shape[-2] - 1), known)

    def append(self, query: Tensor, key: Tensor, value: Tensor, lse: Tensor) -> bool:
        """Add a step for which `matches` returned True; return False if another thread closed these steps since."""
        with self.lock:
            if not self._is_open:
                return False
            self.queries.append(query)
            self.lses.append(lse)
            self.key = key
            self._expect(key, value)
            return True

    def close(self) -> None:
        """Let no further step be added: the next one is recorded in full."""
        with self.lock:
            self._is_open = False


class JoinedCalls:
    """The calls of one layer that share a cache, from the first on: the rows of all, and the keys of the last."""

    def __init__(self, call: Call) -> None:
        self._last = call
        self._steps: list[CallRows] = []
        self._rows: RowSteps | None = None  # what collects rows on the fast path
        self.num_rows = 0
        self._num_calls = 0  # without rows that wait to be joined
        self.evicted_keys: list[Tensor] = []  # by a rolling cache
        self.key_offset = 0  # position of the newest call's first key among all keys
        self.is_cross_attention = False  # every call attends to the same keys
        self._candidates: list[list[int]] | None = None  # which entries those of the newest call may continue
        self._joined: Call | None = None
        self.before: JoinedCalls | None = None  # calls of the layer that ran before in the same pass
        self._copied_from: JoinedCalls | None = None  # whose first rows these share
        if call.measures is None:
            call.query_offset = max(
                0, call.compact_mask.count_used_keys(call.shape[-1]) - call.query.shape[-2]
            )
            self._add_rows(call)
        self._query_offset = call.query_offset
        self._first_edits = call.edits

    def _add_rows(self, call: Call, entries: IntArray | None = None) -> None:
        self._last, self._joined = call, None
        mask, weights = call.compact_mask, call.weights
        rows = CallRows(
            call.query, call.lse, call.output, mask, call.is_causal, weights, self.key_offset, entries
        )
        self._steps.append(rows)
        self._num_calls += 1
        self.num_rows += call.query.shape[-2]

    @property
    def num_calls(self) -> int:
        """Number of calls, those included whose rows were discarded."""
        self._join_rows()
        return max(1, self._num_calls)

    @property
    def _has_grown(self) -> bool:
        """Whether later calls added keys, so that the keys are not an encoder's."""
        return len(self.steps) > 1 and not self.is_cross_attention

    @property
    def _continues_unknown_rows(self) -> bool:
        """Whether these begin in the middle of a sequence, as each step of a ring buffer does."""
        return len(self._steps) == 1 and self._last.query_offset > 0

    @property
    def speculative_mode(self) -> str:
        """How `generate()` proposed tokens that it may have discarded; "" if it did not."""
        return self.last.speculative_mode if len(self.steps) > 1 else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined matrix, (…, heads, q_len, kv_len)."""
        if self.last.measures is not None:
            return self.last.shape
        *lead, _, kv_len = self.last.shape  # joins the rows first
        return (*lead, self.num_rows, self.key_offset + kv_len)

    def has_cache_of(self, call: Call) -> bool:
        """Return whether the model was given the same cache object for the last call as for another one."""
        return call.source_cache is not None and call.source_cache is self._last.source_cache

    def follows(self, before: JoinedCalls | None) -> bool:
        """Return whether these are the calls after some of the layer before, or after what they were copied from."""
        return before is not None and self.before is not None and self.before in (before, before._copied_from)

    def _has_another_cache(self, call: Call) -> bool:
        """Return whether the model was given another cache object for a call, such as a copy of a shared prefix."""
        other = self._last.source_cache
        return call.source_cache is not None and other is not None and call.source_cache is not other

    def find_newest_rows(self, call: Call) -> CacheMatch | None:
        """Return where the newest rows are if they are those of the pass in which another layer was called."""
        last = self._last
        if self.is_cross_attention or last.measures is not None or self._continues_unknown_rows:
            return None
        if last.query.shape[-2] != call.query.shape[-2] or len(last.query) != len(call.query):
            return None
        waiting = 0 if self._rows is None else len(self._rows.queries)
        return CacheMatch(None if waiting else self._candidates, rows_before=last.query_offset + waiting)

    def match(self, call: Call, place: CacheMatch | None = None) -> CacheMatch | None:
        """Return how a call extends these; None if it is of another cache, or of none."""
        last = self.last
        if not _have_same_settings(last, call) or _has_overwritten_keys(last):
            return None
        old_keys, new_keys = _get_cached(last), _get_cached(call)
        is_same = self._has_key_of(call)
        if is_same or place is not None or (call.weights is not None and _share_memory(old_keys, new_keys)):
            extension = self._match_cross_attention(call, old_keys, new_keys, place)
            if extension is not None or is_same:
                return extension
        if self.is_cross_attention or old_keys is None or new_keys is None:
            return None
        # A static cache masks the positions that are not filled yet, so it ends at the last key in use.
        old, new = _take_used(last, old_keys), _take_used(call, new_keys)
        ends = (new_keys, new) if _ends_with_own_keys(call) else (new,)
        pairs = {(a.shape[-2], b.shape[-2]): (a, b) for a, b in product((old_keys, old), ends)}
        for keys in pairs.values():
            if (extension := self._match_grown(call, *keys)) is not None:
                return extension
        return None

    def _match_cross_attention(
        self, call: Call, old: Tensor | None, new: Tensor | None, place: CacheMatch | None
    ) -> CacheMatch | None:
        """Match a call with other queries over the same keys, as a decoder has over those of its encoder."""
        if place is None:
            if call.speculative_mode:
                return None  # beams share keys, and rows may have been discarded
            if _are_whole_passes(self.last, call):
                return None
            place = CacheMatch(rows_before=self.num_rows)
        last = self.last
        if self._has_grown or not 0 < place.rows_before <= self.num_rows:
            return None
        is_same = self._has_key_of(call)
        if is_same and call.query.data_ptr() == last.query.data_ptr():
            return None  # the same attention over another value
        if place.entries is not None or not (is_same or _share_memory(old, new)):
            # Beams of one text have equal keys. The rows before tell them apart as far as they differ.
            candidates = None if old is None or new is None else match_entries(old, new, place.candidates)
            if candidates is None:
                return None
            place = place._replace(candidates=candidates)
        if place.entries is not None and call.edits is not None:
            return None  # an edit may select batch entries
        return place if _attend_to_same_keys(last, call, place.entries) else None

    def _has_key_of(self, call: Call) -> bool:
        """Return whether the last call was passed the same key tensor as another one, unchanged in between."""
        a, b = call.source_key, self.last.source_key
        if a is None or b is None or a[0]() is None or a[0]() is not b[0]() or a[1] != b[1]:
            return False
        # In inference mode, a tensor has no version; both calls have a copy of it.
        return a[1] is not None or _have_same_keys(self.last.key, call.key)

    def _match_grown(self, call: Call, old: Tensor, new: Tensor) -> CacheMatch | None:
        """Match a call whose keys `new` extend the keys `old` of the last call."""
        q_len = call.query.shape[-2]
        past = new.shape[-2] - q_len  # keys from before this call
        match = match_cache(old, new, past)
        if match is None or (match.entries is not None and call.edits is not None):
            return None  # an edit may select batch entries
        evicted, entries = match.evicted, match.entries
        discarded = min(old.shape[-2] - evicted, new.shape[-2]) - past
        # Discarded keys are replaced by others. If the same keys follow, the sequence did not grow.
        if discarded and _have_same_keys(
            old[..., evicted + past :, :][..., :discarded, :], new[..., past:, :][..., :discarded, :], entries
        ):
            return None
        kept_rows = self.key_offset + evicted + past - self._query_offset
        is_cut_on_purpose = call.speculative_mode or self._has_another_cache(call)
        if kept_rows <= 0 or (kept_rows + q_len <= self.num_rows and not is_cut_on_purpose):
            return None  # the sequence did not grow
        old_keys, new_keys = self.last.compact_mask.visible_keys, call.compact_mask.visible_keys
        has_holes = old_keys is not None or new_keys is not None
        if has_holes and (evicted or not _agree(old_keys, new_keys, past, entries)):
            return None
        extension = match._replace(rows_before=kept_rows, key=new)
        may_be_reordered = entries is not None or call.speculative_mode
        return None if may_be_reordered and self._has_equal_windows(extension) else extension

    def _has_equal_windows(self, extension: CacheMatch) -> bool:
        """Return whether batch entries differ in evicted keys alone, so that their order cannot be known."""
        history, window = self._get_history(extension)
        if history is None or len(window) == 1:
            return False
        return any(
            have_same_bits(window[i], window[j]) and not have_same_bits(history[i], history[j])
            for i in range(len(window))
            for j in range(i)
        )

    def _get_history(self, extension: CacheMatch) -> tuple[Tensor | None, Tensor]:
        """Return the keys that a cache will have evicted, None if there are none, and the keys that it has left."""
        old = _get_cached(self.last)
        assert old is not None
        evicted = [*self.evicted_keys, *([old[..., : extension.evicted, :]] if extension.evicted else [])]
        history = torch.cat(evicted, -2).detach() if evicted else None
        return history, old[..., extension.evicted :, :].detach()

    def has_history_of(self, other: JoinedCalls, extensions: tuple[CacheMatch, CacheMatch]) -> bool:
        """Return whether two caches that a call extends have evicted the same keys."""
        (ours, _), (theirs, _) = self._get_history(extensions[0]), other._get_history(extensions[1])
        if ours is None or theirs is None:
            return ours is theirs
        return ours.shape == theirs.shape and have_same_bits(ours, theirs)

    def extend(self, call: Call, extension: CacheMatch) -> JoinedCalls:
        """Append a call by what `match` returned; its key, mask and offset are adjusted.

        Returns a copy if the call continues from an earlier position, or drops batch entries, and `generate()` did not
        discard the tokens.
        """
        num_rows, entries = extension.rows_before, extension.entries
        extended = self
        drops_entries = entries is not None and len(np.unique(entries)) < len(self.last.query)
        if not call.speculative_mode and (num_rows < self.num_rows or drops_entries):
            extended = copy.copy(self)
            extended._steps, extended.evicted_keys = list(self.steps), list(self.evicted_keys)
            extended._rows, extended._num_calls, extended._copied_from = None, 0, self
        if extension.key is None:
            extended.is_cross_attention = True
        else:
            extended._advance(call, extension.key, extension.evicted, entries)
        extended._add_rows(call, extended._truncate(num_rows, entries))
        extended._candidates = extension.candidates
        return extended

    def _advance(self, call: Call, new: Tensor, evicted: int, entries: IntArray | None) -> None:
        """Take over the keys of a call, and keep those that the cache evicted."""
        if evicted:
            old = _get_cached(self.last)
            assert old is not None
            self.evicted_keys.append(old[..., :evicted, :].clone())
        if entries is not None:
            self.evicted_keys = [keys[torch.as_tensor(entries)] for keys in self.evicted_keys]
        length, mask = new.shape[-2], call.compact_mask
        if mask.visible_keys is not None:
            mask = replace(mask, visible_keys=mask.visible_keys[..., :length])
        self.key_offset += evicted
        if self.key_offset:
            mask = replace(mask, start=mask.start + self.key_offset, stop=mask.stop + self.key_offset)
        call.compact_mask = mask
        call.query_offset = self.key_offset + length - call.query.shape[-2]
        if call.weights is None:
            call.key = new
        else:
            call.cached, call.key, call.weights = new, call.key[..., :length, :], call.weights[..., :length]

    def follow_rows(
        self, call: Call, args: CapturedArgs, passes: Mapping[int, tuple[str, Any, int]]
    ) -> RowSteps | None:
        """Return what collects the steps after a call on the fast path; None if they must be recorded in full."""
        last = self.last
        is_plain = (
            last is call  # no other thread added one
            and len(self.steps) > 1  # the first call may have been returned to the user, so it is not changed
            and not self.is_cross_attention
            and self.key_offset == 0
            and last.query_offset + 1 == self.num_rows
            and len(last.versions) == 2  # neither query nor key was copied
            and last.compact_mask.visible_keys is None
            and RowSteps.accept(args)
            and last.key.shape[:-2] == args.key.shape[:-2]  # no repeated heads were dropped
        )
        self._rows = RowSteps(last, args, passes) if is_plain else None
        return self._rows

    def close_rows(self) -> None:
        """End the fast path, so that no thread adds a step while a call is being added."""
        if self._rows is not None:
            self._rows.close()
            self._join_rows()

    def _join_rows(self) -> None:
        """Add the rows that were collected on the fast path; the result is that of `extend`."""
        rows = self._rows
        if rows is None or not rows.queries:
            return
        with rows.lock:
            queries, lses, key = rows.queries, rows.lses, rows.key
            rows.queries, rows.lses = [], []
        last, length = self._last, key.shape[-2] - len(queries)
        for query, lse in zip(queries, lses, strict=True):
            length += 1
            mask = recognise_mask(None, is_causal=False, q_len=1, kv_len=length)
            self._steps.append(CallRows(query, lse.detach(), None, mask, False, None, self.key_offset))
        self.num_rows, self._num_calls = self.num_rows + len(queries), self._num_calls + len(queries)
        last.query, last.key, last.compact_mask, last.query_offset = query, key, mask, length - 1
        last.versions, last.source_key = ((query, 0), (key, 0)), (weakref.ref(key), 0)
        last.lse, self._joined = lse.detach(), None

    @property
    def last(self) -> Call:
        """The last call."""
        self._join_rows()
        return self._last

    @property
    def steps(self) -> list[CallRows]:
        """The rows of each call."""
        self._join_rows()
        return self._steps

    def find_fault(self, call: Call) -> tuple[str, int] | None:
        """Find out why a call does not extend this cache although it holds the keys of its first tokens.

        Returns a key of `CACHE_FAULTS` and how many keys were added; None if the call is of another cache, or of none.
        """
        last = self.last
        if call.speculative_mode or self.is_cross_attention or self._has_another_cache(call):
            return None
        if self._continues_unknown_rows:
            return None  # a ring buffer replaces its last key in every round
        if not _have_same_settings(last, call) or _has_overwritten_keys(last):
            return None
        old_keys, new_keys = _get_cached(last), _get_cached(call)
        if old_keys is None or new_keys is None:
            return None
        old, new = _take_used(last, old_keys), _take_used(call, new_keys)
        held, past = old.shape[-2], new.shape[-2] - call.query.shape[-2]
        shared = min(held, past)
        if shared <= 0 or not _have_same_keys(old[..., :shared, :], new[..., :shared, :]):
            return None
        added = new.shape[-2] - held
        if past > held:
            return "keys skipped", added
        if added > 0:
            return None
        repeats = _have_same_keys(old[..., : new.shape[-2], :], new)
        if repeats and not self._has_grown and _attend_to_same_keys(last, last):
            return None  # cross-attention whose keys are computed again
        return "keys do not grow", added

    def _truncate(self, num_rows: int, entries: IntArray | None) -> IntArray | None:
        """Remove the rows from `num_rows` on; return the batch entries of the rest for those of the last call."""
        while self.num_rows > num_rows:
            step = self.steps.pop()
            self.num_rows -= step.query.shape[-2]
            if self.num_rows < num_rows:
                self.steps.append(step.first(num_rows - self.num_rows))
                self.num_rows = num_rows
            elif step.entries is not None:
                entries = step.entries if entries is None else step.entries[entries]
        return entries

    @property
    def call(self) -> Call:
        """All calls as one."""
        if len(self.steps) <= 1 and not self.evicted_keys:
            return self.last
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def _join(self) -> Call:
        last, steps = self.last, self._select_entries()
        lses, outputs = [step.lse for step in steps], [step.output for step in steps]
        key = last.key
        if self.evicted_keys:
            evicted = [
                rows[..., : key.shape[-1]] for rows in self.evicted_keys
            ]  # none of the columns without a key
            key = torch.cat([*evicted, key], -2)
        # Queries that the model may overwrite were copied; no others may be, in any step.
        held = [
            (step.query, 0)
            for step in self.steps
            if not (step.query.is_inference() or step.query.requires_grad)
        ]
        return replace(
            last,
            versions=(*last.versions, *held),
            query=torch.cat([step.query for step in steps], -2),
            key=key,
            weights=None if last.weights is None else self._join_weights(steps),
            value=last.value if not self.evicted_keys else None,
            output=None if any(output is None for output in outputs) else torch.cat(outputs, -2),
            lse=None if any(lse is None for lse in lses) else torch.cat(lses, -1),
            compact_mask=_join_masks([step.compact_mask for step in steps]),
            is_causal=any(step.is_causal for step in steps),
            steps=len(steps),
            prompt_len=_count_prompt_rows(steps),
            query_offset=self._query_offset,
            edits=None if last.edits is None else last.edits.join(self._first_edits, self.shape),
        )

    def _select_entries(self) -> list[CallRows]:
        """Return the rows of each call in the order of the last call's batch entries."""
        entries, steps = None, []
        for step in reversed(self.steps):
            steps.append(step if entries is None else step.select(entries))
            if step.entries is not None:
                entries = step.entries if entries is None else step.entries[entries]
        return steps[::-1]

    def _join_weights(self, steps: list[CallRows]) -> Tensor:
        """Join the weights of all calls; keys that a call did not have get a weight of 0."""
        kv_len = self.shape[-1]
        rows = [
            torch.nn.functional.pad(
                step.weights, (step.key_offset, kv_len - step.key_offset - step.weights.shape[-1])
            )
            for step in steps
            if step.weights is not None
        ]
        return torch.cat(rows, -2)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held, without masks of q_len × kv_len."""
        held_value = self.last.cached if self.last.value is None else self.last.value
        tensors = [self.last.key, held_value, *self.evicted_keys]
        tensors += [
            tensor for step in self.steps for tensor in (step.query, step.lse, step.output, step.weights)
        ]
        return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)


def find_cache(
    call: Call, groups: list[JoinedCalls], before: JoinedCalls | None
) -> tuple[JoinedCalls, CacheMatch] | tuple[None, None]:
    """Find the calls whose cache a call extends, and how."""
    place = None if before is None else before.find_newest_rows(call)
    # The latest first, since a layer that several depths share has one cache for each; but first of all those
    # that were called with the same cache, if the model was given one: windows of two caches may be equal.
    # Layers that several depths share may attend to the same keys in each: the layer before tells them apart.
    ordered = sorted(
        reversed(groups), key=lambda joined: (not joined.has_cache_of(call), not joined.follows(before))
    )
    matches = ((joined, match) for joined in ordered if (match := joined.match(call, place)) is not None)
    whole: list[tuple[JoinedCalls, CacheMatch]] = []
    cut_back: list[tuple[JoinedCalls, CacheMatch]] = []
    for joined, match in matches:
        is_whole = match.rows_before == joined.num_rows
        (whole if is_whole else cut_back).append((joined, match))
        if match.key is None and joined.follows(before):
            return joined, match
        if is_whole and (joined.has_cache_of(call) or not (match.evicted or joined.key_offset)):
            return joined, match
    if not whole and not cut_back:
        return None, None
    (joined, extension), *others = whole or cut_back
    if not joined.has_cache_of(call) and not all(
        joined.has_history_of(other, (extension, match)) for other, match in others
    ):
        return None, None  # they differ in evicted keys alone, so which one it extends is not known
    return joined, extension


def find_cache_fault(groups: list[JoinedCalls], call: Call, number: int) -> CacheFault | None:
    """Find out which of the latest caches a call, by its number, does not extend although it holds its keys."""
    for joined in reversed(groups[-MAX_FAULTY_CACHES:]):
        found = joined.find_fault(call)
        if found is not None:
            return CacheFault(number, found[0], int(call.query.shape[-2]), found[1])
    return None


def _count_prompt_rows(steps: list[CallRows]) -> int:
    """Return the number of rows before the last steps of one row each; a prompt may be read in several pieces."""
    sizes = [int(step.query.shape[-2]) for step in steps]
    last = max((i for i, size in enumerate(sizes) if size > 1), default=0)
    return sum(sizes[: last + 1])


def _have_same_settings(a: Call, b: Call) -> bool:
    """Return whether two calls agree in everything except the lengths, and neither holds a mask as an array."""
    # Batches may differ: a cache can be expanded to several beams, or reduced to some of its entries.
    first = 1 if a.query.ndim == b.query.ndim == 4 else 0
    if (
        a.query.shape[first:-2] != b.query.shape[first:-2]
        or a.key.shape[first:-2] != b.key.shape[first:-2]
        or (a.edits is not None and len(a.query) != len(b.query))  # an edit may select batch entries
    ):
        return False
    if (
        a.scale != b.scale
        or a.softcap != b.softcap
        or a.compact_mask.bias != b.compact_mask.bias
        or a.query.dtype != b.query.dtype
    ):
        return False
    if not (a.compact_mask.is_intervals and b.compact_mask.is_intervals):
        return False
    if (a.weights is None) != (b.weights is None) or (a.edits is None) != (b.edits is None):
        return False
    if a.edits is not None and not a.edits.extends(b.edits):
        return False
    same_sink = a.sink is b.sink or (
        a.sink is not None and b.sink is not None and torch.equal(a.sink, b.sink)
    )
    return bool(same_sink)


def _are_whole_passes(a: Call, b: Call) -> bool:
    """Return whether two passes have as many queries as keys each: the same sequence again, and not its next steps."""
    is_same_pass = a.forward_pass == b.forward_pass != 0
    return not is_same_pass and all(1 < call.shape[-2] == call.shape[-1] for call in (a, b))


def _get_cached(call: Call) -> Tensor | None:
    """Return the tensor of a call that a cache extends: the key, or the value if the layer computed its own softmax."""
    return call.key if call.weights is None else call.cached


def _has_overwritten_keys(call: Call) -> bool:
    """Return whether the model changed the keys of a call since; those that had been changed before were copied."""
    keys = _get_cached(call)
    return keys is not None and not (keys.is_inference() or keys.requires_grad) and keys._version != 0


def _ends_with_own_keys(call: Call) -> bool:
    """Return whether the last keys are those of the rows, padding included: then some row ends at its own key."""
    q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
    # With the flag, rows end where the kernel aligned them, which may be wrong.
    return call.is_causal or bool((call.compact_mask.stop == np.arange(kv_len - q_len, kv_len) + 1).any())


def _have_same_keys(old: Tensor, new: Tensor, entries: IntArray | None = None) -> bool:
    """Return whether batch entries of a call have the same keys as those that they continue."""
    old = old.detach() if entries is None else old.detach()[torch.as_tensor(entries)]
    return old.shape == new.shape and old.dtype == new.dtype and have_same_bits(old, new.detach())


def _share_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are the same memory."""
    return a is not None and b is not None and a.shape == b.shape and bool(a.data_ptr() == b.data_ptr())


def _attend_to_same_keys(a: Call, b: Call, entries: IntArray | None = None) -> bool:
    """Return whether all rows of two calls attend to the same keys, as a decoder's do to an encoder's."""
    first, other = a.compact_mask, b.compact_mask
    starts, stops = (_select(edge, entries)[..., :1] for edge in (first.start, first.stop))
    same_interval = (first.start == first.start[..., :1]).all() and (first.stop == first.stop[..., :1]).all()
    same_interval = same_interval and (other.start == starts).all() and (other.stop == stops).all()
    return bool(same_interval) and _agree(first.visible_keys, other.visible_keys, b.key.shape[-2], entries)


def _take_used(call: Call, keys: Tensor) -> Tensor:
    """Return the keys, or values, up to the last one that any row of a call attends to."""
    return keys[..., : call.compact_mask.count_used_keys(call.shape[-1]), :]


def _select(edges: Any, entries: IntArray | None) -> Any:
    """Select batch entries of an array that broadcasts to (batch, heads, n)."""
    is_shared = entries is None or edges is None or edges.ndim < 3 or len(edges) == 1
    return edges if is_shared else edges[entries]


def _agree(a: Any, b: Any, past: int, entries: IntArray | None = None) -> bool:
    """Return whether two calls mask the same of the first `past` keys in every row."""
    if a is None and b is None:
        return True
    a, b = (np.ones((1, past), bool) if keys is None else keys[..., :past] for keys in (a, b))
    return bool((_select(a, entries) == b).all())


def _join_masks(masks: list[CompactMask]) -> CompactMask:
    start, stop = (_concatenate([getattr(mask, edge) for mask in masks]) for edge in ("start", "stop"))
    uniform_keys = None
    if any(mask.uniform_keys is not None for mask in masks):
        none = [np.zeros(mask.start.shape[-1], np.int64) for mask in masks]
        uniform_keys = _concatenate(
            [
                zeros if mask.uniform_keys is None else mask.uniform_keys
                for mask, zeros in zip(masks, none, strict=True)
            ]
        )
    last = masks[-1]
    return CompactMask(start, stop, last.visible_keys, uniform_keys, bias=last.bias)


def _concatenate(edges: list[IntArray]) -> IntArray:
    """Concatenate rows after broadcasting their leading axes."""
    lead = np.broadcast_shapes(*(edge.shape[:-1] for edge in edges))
    return np.concatenate([np.broadcast_to(edge, (*lead, edge.shape[-1])) for edge in edges], -1)
