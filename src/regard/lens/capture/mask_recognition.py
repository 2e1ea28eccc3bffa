"""A tensor of q_len × kv_len that a model passes as a mask, as values of O(q_len) wherever it is one.

Nearly every mask in use lets each query see one run of keys: causal, padded on either side, sliding, packed, chunked.
So a mask is first read as the ends of each row's run (and the keys that nobody sees, where padding has holes); rows of
several calls are then put together by their ends, and the name is found at the end from the ends alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch

from regard.frame import Frame
from regard.lens.capture.interval_mask import Flat, Span
from regard.masks import Mask, causal, dense, padding, sliding_window
from regard.score_mods import ScoreMod, bias
from regard.types import Align, IntArray

Tensor = Any  # the types of torch are not followed
Bools = Any

# Entries of a mask that are looked at together.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Rules:
    """Which keys each row sees, and what is added: as the ends of runs, or as the array itself where it is no run.

    `low`, `high` broadcast to (…, heads, q_len), keys low ≤ kv_idx < high; `keys` (…, kv_len) are those not hidden from
    everybody, None for all. A row with `flat` above 0 sees nothing, and weighs alike its first `flat` keys, or as many
    as there are. `kept` is a boolean array, True = attend, that nothing shorter says, `added` what is added to the
    scores.
    """

    low: IntArray
    high: IntArray
    keys: Bools | None = None
    flat: Bools | None = None
    kept: Tensor | None = None
    added: ScoreMod | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of arrays of q_len × kv_len that had to be kept."""
        if self.kept is None and self.added is None:
            return 0
        arrays = (self.kept, getattr(self.added, "array", None))
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def mask(self, q_len: int, kv_len: int) -> Mask | None:
        """The mask by its name."""
        found = _named(self.low, self.high, q_len, kv_len)
        if self.flat is not None and found is not None:
            found |= Span(np.zeros_like(self.flat), np.minimum(self.flat, kv_len), "rows without a live key")
        for array in (None if self.keys is None else torch.as_tensor(self.keys)[..., None, :], self.kept):
            if array is not None:
                found = dense(array) if found is None else found & dense(array)
        return found

    def score_mods(self) -> tuple[ScoreMod, ...]:
        """What is done to the scores."""
        flat = None if self.flat is None else Flat(self.flat > 0)
        return tuple(each for each in (self.added, flat) if each is not None)

    @property
    def empty(self) -> Bools | None:
        """Rows that see nothing, broadcasting to (…, heads, q_len); None where there is none."""
        if self.kept is not None:
            none = ~self.kept.any(-1).cpu().numpy()
        else:
            none = self.low >= self.high if self.flat is None else (self.low >= self.high) & (self.flat == 0)
        return none if none.any() else None


def read(
    mask: Tensor | None,
    *,
    is_causal: bool,
    q_len: int,
    kv_len: int,
    lead: tuple[int, ...],
    biases: Sequence[ScoreMod] = (),
    sinks: bool = False,
) -> Rules:
    """The rules of one call: `mask` is boolean, True = attend, or added to the scores; `biases` may explain it.

    With `sinks` a row without a live key has a weight on nothing: the sink takes it all.
    """
    if mask is None:
        return _unmasked(is_causal, q_len, kv_len)
    mask = mask.detach()
    while mask.ndim < 2:
        mask = mask[None]
    if mask.dtype == torch.bool:
        rules = _runs(mask, q_len, kv_len)
        return rules if rules is not None else Rules(*_all(q_len, kv_len), kept=mask)
    return _read_added(mask, q_len, kv_len, lead, biases, sinks)


@lru_cache(maxsize=8)
def _unmasked(is_causal: bool, q_len: int, kv_len: int) -> Rules:
    high = np.minimum(np.arange(1, q_len + 1), kv_len) if is_causal else np.full(q_len, kv_len)
    return Rules(np.zeros(q_len, np.int64), high)


def seen_up_to(mask: Tensor) -> int:
    """How many keys there are up to the last one that somebody sees."""
    visible = _visible(mask).flatten(0, -2).any(0).nonzero()
    return int(visible.max()) + 1 if len(visible) else 0


def _read_added(
    mask: Tensor, q_len: int, kv_len: int, lead: tuple[int, ...], biases: Sequence[ScoreMod], sinks: bool
) -> Rules:
    lowest = torch.finfo(mask.dtype).min
    literal = Rules(*_all(q_len, kv_len), added=bias(mask))
    rules = _runs(mask, q_len, kv_len)
    if rules is not None and not sinks:
        rules = _flattened(rules, mask, lowest, q_len, kv_len)
    if rules is None:
        return literal
    if _explains(None, mask, lowest, lead, q_len, kv_len):
        return rules
    for each in biases:
        if _explains(each, mask, lowest, lead, q_len, kv_len):
            return replace(rules, added=each)
    return literal


def _flattened(rules: Rules, mask: Tensor, lowest: float, q_len: int, kv_len: int) -> Rules | None:
    """Rows in which everything is the lowest number weigh all keys alike; None where that cannot be said so."""
    empty = rules.empty
    if empty is None:
        return rules
    least, most = (
        torch.broadcast_to(f(mask, -1), (*mask.shape[:-2], q_len)) for f in (torch.amin, torch.amax)
    )
    swallowed = (most == lowest).cpu().numpy() & empty
    if not swallowed.any():
        return rules
    mixed = ((least != lowest).cpu().numpy() & swallowed).any()
    # The lowest number of float16 is not so low that it swallows what is added to it.
    if mixed or rules.keys is not None or mask.dtype == torch.float16:
        return None
    return replace(rules, flat=_alike(np.where(swallowed, kv_len, 0)))


def _explains(
    added: ScoreMod | None, mask: Tensor, lowest: float, lead: tuple[int, ...], q_len: int, kv_len: int
) -> bool:
    """Whether a mask adds exactly this where it hides nothing; None for nothing."""
    if added is not None and (mask.ndim < 3 or mask.shape[-3:-1] != (lead[-1], q_len)):
        return False
    expected: Any = 0.0
    for rows in _bands(mask):
        here = mask[..., rows, :]
        if added is not None:
            frame, q_idx = Frame(lead[-1:], q_len, kv_len), np.arange(q_len)[rows]
            expected = added.additive_bias(frame, q_idx, np.arange(kv_len), _Xp(mask.device), mask.dtype)
        if not bool(((here == expected) | (here <= lowest)).all()):
            return False
    return True


class _Xp:
    """As much of an array namespace as added scores ask for."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def asarray(self, array: Any, dtype: Any = None) -> Tensor:
        return torch.as_tensor(array, device=self._device, dtype=dtype)


def _visible(mask: Tensor) -> Tensor:
    """True where a mask, boolean or added to the scores, hides nothing."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _runs(mask: Tensor, q_len: int, kv_len: int) -> Rules | None:
    """Each row's run of keys, and the keys that somebody sees; None where the rows are no runs of those."""
    if kv_len == 0 or q_len == 0:
        return Rules(*_all(q_len, kv_len))
    lows, highs, counts, keys = [], [], [], None
    for rows in _bands(mask):
        visible = _visible(mask[..., rows, :])
        visible = visible.expand(*visible.shape[:-1], kv_len)
        flags = visible.to(torch.uint8)
        count = flags.sum(-1, dtype=torch.int64)
        low = flags.argmax(-1)
        high = kv_len - flags.flip(-1).argmax(-1)
        lows.append(torch.where(count > 0, low, 0))
        highs.append(torch.where(count > 0, high, 0))
        counts.append(count)
        keys = visible.any(-2) if keys is None else keys | visible.any(-2)
    low, high, count = (torch.cat(each, -1).cpu().numpy() for each in (lows, highs, counts))
    keys = keys.cpu().numpy()  # type: ignore[union-attr]
    if (count == high - low).all():
        return Rules(_ends(low, q_len), _ends(high, q_len))
    before = np.concatenate([np.zeros((*keys.shape[:-1], 1), np.int64), np.cumsum(keys, -1)], -1)
    inside = np.take_along_axis(before, high, -1) - np.take_along_axis(before, low, -1)
    if not (count == inside).all():
        return None
    return Rules(_ends(low, q_len), _ends(high, q_len), keys=_alike(keys))


def _bands(mask: Tensor) -> list[slice]:
    """Rows that are looked at together."""
    rows = mask.shape[-2]
    step = max(1, CHUNK * rows // max(1, mask.numel()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _all(q_len: int, kv_len: int) -> tuple[IntArray, IntArray]:
    return np.zeros(q_len, np.int64), np.full(q_len, kv_len)


def _ends(edge: IntArray, q_len: int) -> IntArray:
    """The ends of rows, those of one row for all."""
    edge = _alike(edge)
    return np.broadcast_to(edge, (*edge.shape[:-1], q_len))


def _alike(array: Any) -> Any:
    """Leading axes along which all entries are the same, cut to one."""
    for axis in range(array.ndim - 1):
        first = array.take([0], axis)
        if array.shape[axis] > 1 and (array == first).all():
            array = first
    return array


def _named(low: IntArray, high: IntArray, q_len: int, kv_len: int) -> Mask | None:
    """The mask that lets each row see its run: by the names of `regard.masks` where they say it."""
    if not q_len or not ((low > 0) | (high < kv_len)).any():
        return None
    shape = np.broadcast_shapes(low.shape, high.shape)
    low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
    named = []
    if len(shape) < 2 or shape[-2] == 1:
        offsets = dict.fromkeys((kv_len - q_len, 0))
        named = [
            mask for offset in offsets if (mask := _banded(low, high, q_len, kv_len, offset)) is not None
        ]
    return min(named, key=lambda mask: len(repr(mask))) if named else Span(low, high)


def _banded(low: IntArray, high: IntArray, q_len: int, kv_len: int, offset: int) -> Mask | None:
    """A band about the diagonal and padding on either side, where together they are these runs."""
    place = np.arange(q_len) + offset  # where each query stands among the keys
    live = low < high
    start = np.where(live, low, kv_len).min(-1, keepdims=True)
    stop = np.where(live, high, 0).max(-1, keepdims=True)
    start = np.minimum(start, stop)
    lefts = np.broadcast_to(place - low, low.shape)[live & (low > start)]
    rights = np.broadcast_to(high - 1 - place, low.shape)[live & (high < stop)]
    left, right = (int(each.flat[0]) if each.size else None for each in (lefts, rights))
    if min(left or 0, right or 0) < 0:
        return None
    # Without padding first: the band alone may hide the first and the last keys.
    for before, after in product((False, True), repeat=2):
        first, last = start if before else 0, stop if after else kv_len
        first = first if left is None else np.maximum(first, place - left)
        last = last if right is None else np.minimum(last, place + 1 + right)
        if np.where(live, (first == low) & (last == high), first >= last).all():
            break
    else:
        return None
    align: Align | None = None if q_len == kv_len else "lower_right" if offset else "upper_left"
    parts: list[Mask] = []
    if left is None and right == 0:
        parts.append(causal(align))
    elif right == 0 and left is not None:
        parts.append(sliding_window(left + 1, align=align))
    elif (left, right) != (None, None):
        parts.append(sliding_window(left=left, right=right, align=align))
    batch = low.shape[:-2]
    if after:
        parts.append(padding(_numbers(stop, batch)))
    if before:
        parts.append(padding(_numbers(kv_len - start, batch), side="left"))
    mask = parts[0] if parts else None
    for part in parts[1:]:
        mask = part if mask is None else mask & part
    return mask


def _numbers(lengths: IntArray, batch: tuple[int, ...]) -> Any:
    return int(lengths.item()) if lengths.size == 1 else lengths.reshape(batch)
