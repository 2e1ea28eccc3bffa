"""Join the calls that share one key-value cache: prefill and steps of `generate()` become one matrix.

Only the newest keys are held, and the keys that a rolling cache evicted; each call adds its own rows.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.lens.capture.call import Call
from regard.lens.capture.captured_args import NUMPY_DTYPES, CapturedArgs
from regard.lens.capture.compact_mask import CompactMask
from regard.lens.capture.mask_recognition import recognise_mask
from regard.lens.capture.row_steps import RowSteps, have_equal_keys
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed

# Keys with at most this many numbers are compared whole with the previous call's; of more, a sample and the newest.
MAX_COMPARED, NEWEST = 1 << 18, 512


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


CACHE_FAULTS = {
    "keys do not grow": "The keys of a cached step do not grow: they replace keys of earlier tokens, or omit its own.",
    "keys skipped": "A cached step adds more keys than it has tokens.",
    "values missing": "The values of a cached step were not appended.",
}


class CallRows(NamedTuple):
    """The rows that one call added."""

    query: Tensor
    lse: Tensor | None
    output: Tensor | None
    compact_mask: CompactMask
    is_causal: bool
    weights: Tensor | None
    key_offset: int  # position of the first column of `weights` among all keys

    def first(self, count: int) -> CallRows:
        """Return the first rows."""
        mask = self.compact_mask
        uniform_keys = None if mask.uniform_keys is None else mask.uniform_keys[..., :count]
        return CallRows(
            self.query[..., :count, :],
            None if self.lse is None else self.lse[..., :count],
            None if self.output is None else self.output[..., :count, :],
            replace(
                mask, start=mask.start[..., :count], stop=mask.stop[..., :count], uniform_keys=uniform_keys
            ),
            self.is_causal,
            None if self.weights is None else self.weights[..., :count, :],
            self.key_offset,
        )


class JoinedCalls:
    """The calls of one layer that share a cache: the rows of all, and the keys of the last.

    Args:
        call: The first call.
    """

    def __init__(self, call: Call) -> None:
        self._last = call
        self._steps: list[CallRows] = []
        self._rows: RowSteps | None = None  # what collects rows by the short way
        self.num_rows = 0
        self._num_calls = 0  # without rows that wait to be joined
        self.evicted_keys: list[Tensor] = []  # by a rolling cache
        self.key_offset = 0  # position of the newest call's first key among all keys
        self.is_cross_attention = False  # every call attends to the same keys
        self._joined: Call | None = None
        if call.measures is None:
            call.query_offset = max(0, _count_used_keys(call) - call.query.shape[-2])
            self._add_rows(call)
        self._query_offset = call.query_offset
        self._first_edits = call.edits

    def _add_rows(self, call: Call) -> None:
        self._last, self._joined = call, None
        mask, weights = call.compact_mask, call.weights
        rows = CallRows(call.query, call.lse, call.output, mask, call.is_causal, weights, self.key_offset)
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

    def try_append(self, call: Call) -> bool:
        """Append a call whose keys extend those of the last call.

        Args:
            call: The next call of the layer. If it is appended, its key, mask and offset are adjusted.

        Returns:
            Whether it was appended.
        """
        last = self.last
        if not _have_same_settings(last, call):
            return False
        if _is_same_tensor(call.source_key, last.source_key):
            # Another query over the same keys; if the query repeats, it is the same attention over another value.
            repeated = call.query.data_ptr() == last.query.data_ptr()
            if (
                repeated
                or self._has_grown
                or not _attend_to_same_keys(last.compact_mask, call.compact_mask, call.key.shape[-2])
            ):
                return False
            self.is_cross_attention = True
            self._add_rows(call)
            return True
        if call.weights is not None and self._append_cross_attention(call):
            return True
        if self.is_cross_attention:
            return False
        old_keys, new_keys = _get_cached(last), _get_cached(call)
        if old_keys is None or new_keys is None:
            return False
        if self._append(call, old_keys, new_keys):
            return True
        # A static cache masks the positions that are not filled yet, so it ends at the last key in use.
        old, new = old_keys[..., : _count_used_keys(last), :], new_keys[..., : _count_used_keys(call), :]
        return any(self._append(call, *keys) for keys in ((old_keys, new), (old, new_keys), (old, new)))

    def _append_cross_attention(self, call: Call) -> bool:
        """Append a call with its own softmax if it attends to the values of the last call, in the same memory."""
        old, new = _get_cached(self.last), _get_cached(call)
        if old is None or new is None or old.shape != new.shape or old.data_ptr() != new.data_ptr():
            return False
        if self._has_grown or not _attend_to_same_keys(
            self.last.compact_mask, call.compact_mask, new.shape[-2]
        ):
            return False
        self.is_cross_attention = True
        self._add_rows(call)
        return True

    def follow_rows(self, args: CapturedArgs) -> RowSteps | None:
        """Prepare for steps by the short way, after a call was appended.

        Args:
            args: What the layer was called with.

        Returns:
            What collects the steps; None if the next ones must be recorded in full.
        """
        last = self.last
        is_plain = (
            len(self.steps) > 1  # the first call may have been returned to the user, so it is not changed
            and not self.is_cross_attention
            and self.key_offset == 0
            and last.query_offset + 1 == self.num_rows
            and len(last.versions) == 2  # neither query nor key was copied
            and last.compact_mask.visible_keys is None
            and RowSteps.accept(args)
            and last.key.shape[:-2] == args.key.shape[:-2]  # no repeated heads were dropped
        )
        self._rows = RowSteps(last.query, last.key, args.value, args[4:8]) if is_plain else None
        return self._rows

    def _join_rows(self) -> None:
        """Add the rows that were collected by the short way; the result is that of `try_append`."""
        rows = self._rows
        if rows is None or not rows.queries:
            return
        with rows.lock:
            queries, lses, key = rows.queries, rows.lses, rows.key
            rows.queries, rows.lses = [], []
        last, length = self._last, key.shape[-2] - len(queries)
        for query, lse in zip(queries, lses, strict=True):
            length += 1
            mask = recognise_mask(None, is_causal=False, q_len=1, kv_len=length, lead=())
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

    def _append(self, call: Call, old: Tensor, new: Tensor) -> bool:
        """Append a call with the keys `new` if they extend the keys `old` of the last call."""
        past = new.shape[-2] - call.query.shape[-2]  # keys from before this call
        evicted = _count_evicted(old, new, past) if past > 0 else None
        if evicted is None:
            return False
        key_offset = self.key_offset + evicted
        kept_rows = key_offset + past - self._query_offset  # a speculative step may discard rows
        old_keys, new_keys = self.last.compact_mask.visible_keys, call.compact_mask.visible_keys
        has_holes = old_keys is not None or new_keys is not None
        if kept_rows + call.query.shape[-2] <= self.num_rows and not call.speculative_mode:
            return False  # the sequence did not grow, so the rows were not discarded on purpose
        if kept_rows <= 0 or (has_holes and (evicted or not _agree(old_keys, new_keys, past))):
            return False
        if evicted:
            self.evicted_keys.append(old[..., :evicted, :].clone())
        self._truncate(kept_rows)
        mask = call.compact_mask
        if new_keys is not None:
            mask = replace(mask, visible_keys=new_keys[..., : new.shape[-2]])
        if key_offset:
            mask = replace(mask, start=mask.start + key_offset, stop=mask.stop + key_offset)
        self.key_offset, call.query_offset = key_offset, key_offset + past
        call.compact_mask = mask
        if call.weights is None:
            call.key = new
        else:
            length = new.shape[-2]
            call.cached, call.key, call.weights = new, call.key[..., :length, :], call.weights[..., :length]
        self._add_rows(call)
        return True

    def find_fault(self, call: Call) -> tuple[str, int] | None:
        """Find out why a call does not extend this cache although it holds the keys of its first tokens.

        Args:
            call: A call that `try_append` rejected.

        Returns:
            What is wrong, a key of `CACHE_FAULTS`, and how many keys were added; None if the call is of another
            cache, or of none.
        """
        last = self.last
        if call.speculative_mode or self.is_cross_attention or not _have_same_settings(last, call):
            return None
        old_keys, new_keys = _get_cached(last), _get_cached(call)
        if old_keys is None or new_keys is None:
            return None
        old, new = old_keys[..., : _count_used_keys(last), :], new_keys[..., : _count_used_keys(call), :]
        held, past = old.shape[-2], new.shape[-2] - call.query.shape[-2]
        shared = min(held, past)
        if shared <= 0 or not _are_equal(new[..., :shared, :], old[..., :shared, :]):
            return None
        added = new.shape[-2] - held
        if past > held:
            return "keys skipped", added
        if added > 0:
            return None
        repeats = _are_equal(new, old[..., : new.shape[-2], :])
        if (
            repeats
            and not self._has_grown
            and _attend_to_same_keys(last.compact_mask, last.compact_mask, held)
        ):
            return None  # cross-attention whose keys are computed again
        return "keys do not grow", added

    def _truncate(self, num_rows: int) -> None:
        """Remove the rows from `num_rows` on."""
        while self.num_rows > num_rows:
            step = self.steps.pop()
            self.num_rows -= step.query.shape[-2]
            if self.num_rows < num_rows:
                self.steps.append(step.first(num_rows - self.num_rows))
                self.num_rows = num_rows

    @property
    def call(self) -> Call:
        """All calls as one."""
        if len(self.steps) <= 1 and not self.evicted_keys:
            return self.last
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def _join(self) -> Call:
        last, steps = self.last, self.steps
        lses, outputs = [step.lse for step in steps], [step.output for step in steps]
        key = last.key
        if self.evicted_keys:
            evicted = [
                rows[..., : key.shape[-1]] for rows in self.evicted_keys
            ]  # none of the columns without a key
            key = torch.cat([*evicted, key], -2)
        return replace(
            last,
            query=torch.cat([step.query for step in steps], -2),
            key=key,
            weights=None if last.weights is None else self._join_weights(),
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

    def _join_weights(self) -> Tensor:
        """Join the weights of all calls; keys that a call did not have get a weight of 0."""
        kv_len = self.shape[-1]
        rows = [
            torch.nn.functional.pad(
                step.weights, (step.key_offset, kv_len - step.key_offset - step.weights.shape[-1])
            )
            for step in self.steps
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


def _count_prompt_rows(steps: list[CallRows]) -> int:
    """Return the number of rows before the last steps of one row each; a prompt may be read in several pieces."""
    sizes = [int(step.query.shape[-2]) for step in steps]
    last = max((i for i, size in enumerate(sizes) if size > 1), default=0)
    return sum(sizes[: last + 1])


def _have_same_settings(a: Call, b: Call) -> bool:
    """Return whether two calls agree in everything except the lengths, and neither holds a mask as an array."""
    if a.query.shape[:-2] != b.query.shape[:-2] or a.key.shape[:-2] != b.key.shape[:-2]:
        return False
    if (
        a.scale != b.scale
        or a.softcap != b.softcap
        or a.compact_mask.bias != b.compact_mask.bias
        or a.query.dtype != b.query.dtype
    ):
        return False
    if any(mask.nbytes or mask.tiled_mask is not None for mask in (a.compact_mask, b.compact_mask)):
        return False
    if (a.weights is None) != (b.weights is None) or (a.edits is None) != (b.edits is None):
        return False
    if a.edits is not None and not a.edits.extends(b.edits):
        return False
    same_sink = a.sink is b.sink or (
        a.sink is not None and b.sink is not None and torch.equal(a.sink, b.sink)
    )
    return bool(same_sink)


def _get_cached(call: Call) -> Tensor | None:
    """Return the tensor of a call that a cache extends: the key, or the value if the layer computed its own softmax."""
    return call.key if call.weights is None else call.cached


def _is_same_tensor(a: Any, b: Any) -> bool:
    """Return whether two calls were passed the same key tensor, unchanged in between."""
    if a is None or b is None:
        return False
    (tensor, version), (other, other_version) = a, b
    return tensor() is not None and tensor() is other() and version == other_version


def _attend_to_same_keys(a: CompactMask, b: CompactMask, kv_len: int) -> bool:
    """Return whether all rows of two calls attend to the same keys, as a decoder's do to an encoder's."""
    same_interval = all(
        (mask.start == a.start[..., :1]).all() and (mask.stop == a.stop[..., :1]).all() for mask in (a, b)
    )
    return same_interval and _agree(a.visible_keys, b.visible_keys, kv_len)


def _count_used_keys(call: Call) -> int:
    """Return the number of keys up to the last one that any row attends to; all keys if none is."""
    return call.compact_mask.last_key or int(call.key.shape[-2])


def _count_evicted(old: Tensor, new: Tensor, past: int) -> int | None:
    """Return how many old keys a cache evicted if `past` new keys are old ones; None if they are not."""
    held = old.shape[-2]
    if past > held:
        return None
    if _are_equal(new[..., :past, :], old if past == held else old[..., :past, :]):
        overlap = min(held, new.shape[-2])
        # Discarded keys are replaced by others. If the same keys follow, the sequence did not grow.
        same = past < overlap and _are_equal(new[..., past:overlap, :], old[..., past:overlap, :])
        return None if same else 0
    if past < held and _are_equal(new[..., :past, :], old[..., held - past :, :]):
        return int(held - past)
    return None


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Compare keys: all of them if they are few, else a sample and the newest."""
    if a.requires_grad or b.requires_grad:
        a, b = a.detach(), b.detach()
    if a.is_cpu and a.dtype in NUMPY_DTYPES:
        a, b = a.numpy(), b.numpy()
    return have_equal_keys(a, b, NEWEST, MAX_COMPARED)


def _agree(a: Any, b: Any, past: int) -> bool:
    """Return whether two calls mask the same of the first `past` keys in every row."""
    if a is None and b is None:
        return True
    a, b = (np.ones((1, past), bool) if keys is None else keys[..., :past] for keys in (a, b))
    return bool((a == b).all())


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
