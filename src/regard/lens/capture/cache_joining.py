"""Calls whose keys extend the last one's, put together: prefill and steps of `generate()` are one matrix.

Only the newest keys are held, and what a rolling cache let go; each call adds its own rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.lens.call import Call
from regard.lens.capture.mask_recognition import Rules
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed

# Up to so many numbers all keys are compared with the last call's; of more, the newest columns and a sample.
COMPARED, NEWEST, SAMPLE = 1 << 18, 512, 64


class Rows(NamedTuple):
    """The rows that one call added."""

    query: Tensor
    lse: Tensor | None
    output: Tensor | None
    rules: Rules
    is_causal: bool

    def first(self, count: int) -> Rows:
        """The first of them."""
        rules = self.rules
        flat = None if rules.flat is None else rules.flat[..., :count]
        return Rows(
            self.query[..., :count, :],
            None if self.lse is None else self.lse[..., :count],
            None if self.output is None else self.output[..., :count, :],
            replace(rules, low=rules.low[..., :count], high=rules.high[..., :count], flat=flat),
            self.is_causal,
        )


class Run:
    """Calls of one layer that one cache joins, as one: all their rows, and the keys of the last."""

    def __init__(self, call: Call) -> None:
        self.last = call
        self.steps: list[Rows] = []
        self.rows = 0
        self.let_go: list[Tensor] = []  # keys that a rolling cache holds no more
        self.column = 0  # where the newest call's keys begin among all keys
        self.crossing = False  # whether every call looks at the same keys
        self._joined: Call | None = None
        if call.measured is None:
            call.first = max(0, _seen_up_to(call) - call.query.shape[-2])
            self._add(call)
        self._begin = call.first

    def _add(self, call: Call) -> None:
        self.last, self._joined = call, None
        self.steps.append(Rows(call.query, call.lse, call.output, call.rules, call.is_causal))
        self.rows += call.query.shape[-2]

    @property
    def trying(self) -> str:
        """How `generate()` tried out tokens that it may have taken back; "" where it did not."""
        return self.last.trying if len(self.steps) > 1 else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, q_len, kv_len)"""
        *lead, _, kv_len = self.last.shape
        return self.last.shape if self.last.measured is not None else (*lead, self.rows, self.column + kv_len)

    def takes(self, call: Call) -> bool:
        """Whether a call goes on where this run ends; it then belongs to it."""
        last = self.last
        if not _alike(last, call):
            return False
        if _same_tensor(call.origin, last.origin):
            # Another query that sees the same: the same one again is the same attention over another value.
            again = call.query.data_ptr() == last.query.data_ptr()
            if again or not _see_the_same(last.rules, call.rules, call.key.shape[-2]):
                return False
            self.crossing = True
            self._add(call)
            return True
        if self.crossing:
            return False
        if self._extend(call, last.key, call.key):
            return True
        # A cache with room to spare hides what is not there yet from everybody: it ends where the last one is seen.
        held, length = last.key[..., : _seen_up_to(last), :], call.key[..., : _seen_up_to(call), :]
        return any(
            self._extend(call, a, b) for a, b in ((last.key, length), (held, call.key), (held, length))
        )

    def _extend(self, call: Call, old: Tensor, new: Tensor) -> bool:
        """Take a call whose keys are the `new` ones, the last one's being the `old`, if they go on."""
        past = new.shape[-2] - call.query.shape[-2]  # the keys that were there before this call
        dropped = _dropped(old, new, past) if past > 0 else None
        if dropped is None:
            return False
        column = self.column + dropped
        stand = column + past - self._begin  # rows that stand: a speculative step may take some back
        keys = self.last.rules.keys, call.rules.keys
        holes = keys[0] is not None or keys[1] is not None
        if stand <= 0 or (holes and (dropped or not _agree(*keys, past))):
            return False
        if dropped:
            self.let_go.append(old[..., :dropped, :].clone())
        while self.rows > stand:
            step = self.steps.pop()
            count = step.query.shape[-2]
            self.rows -= count
            if self.rows < stand:
                self.steps.append(step.first(stand - self.rows))
                self.rows = stand
        rules = call.rules
        if holes and keys[1] is not None:
            rules = replace(rules, keys=keys[1][..., : new.shape[-2]])
        if column:
            rules = replace(rules, low=rules.low + column, high=rules.high + column)
        self.column, call.first, call.key, call.rules = column, column + past, new, rules
        self._add(call)
        return True

    @property
    def call(self) -> Call:
        """The run as one call."""
        if len(self.steps) <= 1 and not self.let_go:
            return self.last
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def _join(self) -> Call:
        last, steps = self.last, self.steps
        key = torch.cat([*self.let_go, last.key], -2) if self.let_go else last.key
        lses, outputs = [step.lse for step in steps], [step.output for step in steps]
        return replace(
            last,
            query=torch.cat([step.query for step in steps], -2),
            key=key,
            value=last.value if not self.let_go else None,
            output=None if any(each is None for each in outputs) else torch.cat(outputs, -2),
            lse=None if any(each is None for each in lses) else torch.cat(lses, -1),
            rules=_joined([step.rules for step in steps]),
            is_causal=any(step.is_causal for step in steps),
            steps=len(steps),
            first=self._begin,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of what is held, masks of q_len × kv_len left out."""
        held = [self.last.key, self.last.value, *self.let_go]
        held += [tensor for step in self.steps for tensor in step[:3]]
        return sum(int(tensor.nbytes) for tensor in held if tensor is not None)


def _alike(a: Call, b: Call) -> bool:
    """Whether all that does not grow is the same."""
    if a.query.shape[:-2] != b.query.shape[:-2] or a.key.shape[:-2] != b.key.shape[:-2]:
        return False
    if (
        a.scale != b.scale
        or a.softcap != b.softcap
        or a.rules.added != b.rules.added
        or a.query.dtype != b.query.dtype
    ):
        return False
    if a.rules.nbytes or b.rules.nbytes:
        return False
    same_sink = a.sink is b.sink or (
        a.sink is not None and b.sink is not None and torch.equal(a.sink, b.sink)
    )
    return bool(same_sink)


def _same_tensor(a: Any, b: Any) -> bool:
    """Whether two calls were given one and the same key, which nobody wrote into between them."""
    if a is None or b is None:
        return False
    (tensor, version), (other, other_version) = a, b
    return tensor() is not None and tensor() is other() and version == other_version


def _see_the_same(a: Rules, b: Rules, kv_len: int) -> bool:
    """Whether all rows of two calls see the same keys, as those of a decoder see an encoder's."""
    alike = all(
        (each.low == a.low[..., :1]).all() and (each.high == a.high[..., :1]).all() for each in (a, b)
    )
    return alike and _agree(a.keys, b.keys, kv_len)


def _seen_up_to(call: Call) -> int:
    """How many keys there are up to the last one that somebody sees; all of them where nobody sees any."""
    return int(call.rules.high.max(initial=0)) or int(call.key.shape[-2])


def _dropped(old: Tensor, new: Tensor, past: int) -> int | None:
    """How many of the old keys a cache let go of so that `past` of the new ones are old; None where it did not."""
    held = old.shape[-2]
    if past > held:
        return None
    if _equal(new[..., :past, :], old if past == held else old[..., :past, :]):
        again = min(held, new.shape[-2])
        # Keys taken back are replaced by others; the same ones again are no sequence that grows.
        same = past < again and _equal(new[..., past:again, :], old[..., past:again, :])
        return None if same else 0
    return held - past if past < held and _equal(new[..., :past, :], old[..., held - past :, :]) else None


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether keys are the same: all of them where they are few, else the newest and a sample."""
    if a.numel() > COMPARED:
        length = a.shape[-2]
        step = max(1, length // SAMPLE)
        if not torch.equal(a[..., ::step, :], b[..., ::step, :]):
            return False
        a, b = a[..., -NEWEST:, :], b[..., -NEWEST:, :]
    return bool(torch.equal(a, b))


def _agree(a: Any, b: Any, past: int) -> bool:
    """Whether two calls hide the same keys from everybody."""
    if a is None and b is None:
        return True
    a, b = (np.ones((1, past), bool) if each is None else each[..., :past] for each in (a, b))
    return bool((a == b).all())


def _joined(rules: list[Rules]) -> Rules:
    low, high = (_stacked([getattr(each, name) for each in rules]) for name in ("low", "high"))
    flat = None
    if any(each.flat is not None for each in rules):
        flats = [np.zeros(each.low.shape[-1], np.int64) if each.flat is None else each.flat for each in rules]
        flat = _stacked(flats)
    return Rules(low, high, keys=rules[-1].keys, flat=flat, added=rules[-1].added)


def _stacked(edges: list[IntArray]) -> IntArray:
    lead = np.broadcast_shapes(*(edge.shape[:-1] for edge in edges))
    return np.concatenate([np.broadcast_to(edge, (*lead, edge.shape[-1])) for edge in edges], -1)
