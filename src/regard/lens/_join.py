"""Calls whose keys extend the last one's, put together: prefill and steps of `generate()` are one matrix.

Only the newest keys are held, and what a rolling cache let go; each call adds its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regard._types import IntArray
from regard.lens._call import Call
from regard.lens._recognise import Rules

Tensor = Any  # the types of torch are not followed

# Up to so many numbers all keys are compared with the last call's; of more, the newest columns and a sample.
COMPARED, NEWEST, SAMPLE = 1 << 18, 512, 64


@dataclass
class Run:
    """Calls of one layer that one cache joins. `column` is where the newest call's keys begin among all keys."""

    calls: list[Call]
    let_go: list[Tensor] = field(default_factory=list)
    column: int = 0
    crossing: bool | None = None  # whether every call looks at the same keys; None while there is one
    _joined: Call | None = None

    @classmethod
    def begin(cls, call: Call) -> Run:
        """The run of a first call."""
        if call.measured is not None:
            return cls([call])
        return cls([replace(call, first=max(0, call.key.shape[-2] - call.query.shape[-2]))])

    @property
    def rows(self) -> int:
        """How many rows there are so far."""
        return sum(call.query.shape[-2] for call in self.calls)

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, q_len, kv_len)"""
        last = self.calls[-1]
        if last.measured is not None:
            return last.extent
        return (*last.query.shape[:-2], self.rows, self.column + last.key.shape[-2])

    def takes(self, call: Call) -> bool:
        """Whether a call goes on where this run ends; it then belongs to it."""
        last = self.calls[-1]
        if not _alike(last, call):
            return False
        new, held = call.query.shape[-2], last.key.shape[-2]
        same = call.key.shape[-2] == held and _same_tensor(call.key, last.key)
        if same or (self.crossing is not False and call.key.shape[-2] == held and self._looks_across(call)):
            return self._cross(call)
        past = call.key.shape[-2] - new  # the keys that were there before this call
        if self.crossing or past <= 0:
            return False
        if past <= held and _equal(call.key[..., :past, :], last.key[..., :past, :]):
            return self._extend(call, past)
        holes = last.rules.keys is not None or call.rules.keys is not None
        if past < held and not holes and _equal(call.key[..., :past, :], last.key[..., held - past :, :]):
            self.let_go.append(last.key[..., : held - past, :].clone())
            self.column += held - past
            return self._extend(call, past)
        return False

    def _looks_across(self, call: Call) -> bool:
        """Whether the same keys stand for another sequence: they do not grow with the rows."""
        square = self.calls[0].first + self.rows == self.column + self.calls[-1].key.shape[-2]
        square = square and self.calls[0].first == 0
        return not square and _equal(call.key, self.calls[-1].key)

    def _cross(self, call: Call) -> bool:
        if not _agree(self.calls[0].rules.keys, call.rules.keys, call.key.shape[-2]):
            return False
        self.crossing, self._joined = True, None
        self._append(call)
        return True

    def _extend(self, call: Call, past: int) -> bool:
        begin = self.calls[0].first
        keep = self.column + past - begin  # rows that stand: a speculative step may take some back
        if keep <= 0 or not _agree(self.calls[-1].rules.keys, call.rules.keys, past):
            return False
        excess = self.rows - keep
        while excess > 0:
            last = self.calls.pop()
            count = last.query.shape[-2] - excess
            excess = -min(count, 0)
            if count > 0:
                self.calls.append(_first_rows(last, count))
        shift = self.column
        rules = call.rules
        if shift:
            rules = replace(rules, low=rules.low + shift, high=rules.high + shift)
        self.crossing, self._joined = False, None
        self._append(replace(call, rules=rules, first=shift + past))
        return True

    def _append(self, call: Call) -> None:
        # Only the newest keys are held. A copy: the caller may have been given the call itself.
        self.calls[-1] = replace(self.calls[-1], key=None, value=None, versions=())
        self.calls.append(call)

    @property
    def call(self) -> Call:
        """The run as one call."""
        if len(self.calls) == 1 and not self.let_go:
            return self.calls[0]
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def _join(self) -> Call:
        first, last = self.calls[0], self.calls[-1]
        key = torch.cat([*self.let_go, last.key], -2) if self.let_go else last.key
        lses = [call.lse for call in self.calls]
        whole = all(lse is not None for lse in lses)
        outputs = [call.output for call in self.calls]
        return replace(
            first,
            query=torch.cat([call.query for call in self.calls], -2),
            key=key,
            value=last.value if not self.let_go else None,
            output=None if any(each is None for each in outputs) else torch.cat(outputs, -2),
            lse=torch.cat(lses, -1) if whole else None,
            rules=_joined_rules([call.rules for call in self.calls]),
            steps=len(self.calls),
            kernel=last.kernel if len({call.kernel for call in self.calls}) == 1 else first.kernel,
            versions=last.versions,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of queries, keys and lse."""
        if self.calls[-1].measured is not None:
            return 0
        rows = sum(call.query.nbytes + (0 if call.lse is None else call.lse.nbytes) for call in self.calls)
        return int(rows + self.calls[-1].key.nbytes + sum(each.nbytes for each in self.let_go))


def _alike(a: Call, b: Call) -> bool:
    """Whether all that does not grow is the same."""
    shapes = all(x.shape[:-2] == y.shape[:-2] for x, y in ((a.query, b.query), (a.key, b.key)))
    same_sink = a.sink is b.sink or (
        a.sink is not None and b.sink is not None and torch.equal(a.sink, b.sink)
    )
    plain = all(x.rules.kept is None and x.rules.nbytes == 0 for x in (a, b))
    return bool(
        shapes
        and plain
        and same_sink
        and a.query.dtype == b.query.dtype
        and (a.scale, a.softcap, a.rules.added) == (b.scale, b.softcap, b.rules.added)
    )


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    return bool(a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether keys are the same: all of them where they are few, else the newest and a sample."""
    if a.numel() > COMPARED:
        length = a.shape[-2]
        sample = torch.linspace(0, length - 1, SAMPLE, device=a.device).long()
        if not torch.equal(a[..., sample, :], b[..., sample, :]):
            return False
        a, b = a[..., -NEWEST:, :], b[..., -NEWEST:, :]
    return bool(torch.equal(a, b))


def _agree(a: Any, b: Any, past: int) -> bool:
    """Whether two calls hide the same keys from everybody."""
    if a is None and b is None:
        return True
    a, b = (np.ones((1, past), bool) if each is None else each[..., :past] for each in (a, b))
    return bool((a == b).all())


def _first_rows(call: Call, count: int) -> Call:
    """The first rows of a call."""
    rules = replace(
        call.rules,
        low=call.rules.low[..., :count],
        high=call.rules.high[..., :count],
        flat=None if call.rules.flat is None else call.rules.flat[..., :count],
    )
    return replace(
        call,
        query=call.query[..., :count, :],
        lse=None if call.lse is None else call.lse[..., :count],
        output=None if call.output is None else call.output[..., :count, :],
        rules=rules,
    )


def _joined_rules(rules: list[Rules]) -> Rules:
    low, high = (_stacked([getattr(each, name) for each in rules]) for name in ("low", "high"))
    flat = None
    if any(each.flat is not None for each in rules):
        flats = [np.zeros(each.low.shape[-1], np.int64) if each.flat is None else each.flat for each in rules]
        flat = _stacked(flats)
    return Rules(low, high, keys=rules[-1].keys, flat=flat, added=rules[-1].added)


def _stacked(edges: list[IntArray]) -> IntArray:
    lead = np.broadcast_shapes(*(edge.shape[:-1] for edge in edges))
    return np.concatenate([np.broadcast_to(edge, (*lead, edge.shape[-1])) for edge in edges], -1)
