"""Recognise the mask tensor that a model passes: boolean or additive, q_len × kv_len, as a `CompactMask`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from regard.capture.compact_mask import CompactMask
from regard.frame import Frame
from regard.score_mods import ScoreMod, bias
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed

# Entries of a mask that are processed together.
CHUNK = 1 << 22


def recognise_mask(
    mask: Tensor | None,
    *,
    is_causal: bool,
    q_len: int,
    kv_len: int,
    lead: tuple[int, ...],
    biases: Sequence[ScoreMod] = (),
    sinks: bool = False,
) -> CompactMask:
    """Recognise the mask of one call.

    Args:
        mask: Boolean, True = attend, or added to the scores; broadcasts to (*lead, q_len, kv_len).
        is_causal: The flag of `F.scaled_dot_product_attention`, used if there is no mask.
        q_len: Number of queries.
        kv_len: Number of keys.
        lead: Leading axes of the matrix, (…, heads).
        biases: Position biases of the model, which may explain an additive mask.
        sinks: The layer has a sink, which takes all the weight of a fully masked row.

    Returns:
        Intervals wherever the mask consists of them, else the mask or bias itself.
    """
    if mask is None:
        return _recognise_flag(is_causal, q_len, kv_len)
    mask = mask.detach()
    while mask.ndim < 2:
        mask = mask[None]
    if mask.dtype == torch.bool:
        compact = find_intervals(mask, q_len, kv_len)
        return (
            compact if compact is not None else CompactMask(*_full_intervals(q_len, kv_len), dense_mask=mask)
        )
    return _recognise_additive(mask, q_len, kv_len, lead, biases, sinks)


def count_used_keys(mask: Tensor) -> int:
    """Return the number of keys up to the last one that any row attends to."""
    used = _as_boolean(mask).flatten(0, -2).any(0).nonzero()
    return int(used.max()) + 1 if len(used) else 0


@lru_cache(maxsize=8)
def _recognise_flag(is_causal: bool, q_len: int, kv_len: int) -> CompactMask:
    stop = np.minimum(np.arange(1, q_len + 1), kv_len) if is_causal else np.full(q_len, kv_len)
    return CompactMask(np.zeros(q_len, np.int64), stop)


def _recognise_additive(
    mask: Tensor, q_len: int, kv_len: int, lead: tuple[int, ...], biases: Sequence[ScoreMod], sinks: bool
) -> CompactMask:
    lowest = torch.finfo(mask.dtype).min
    as_bias = CompactMask(*_full_intervals(q_len, kv_len), bias=bias(mask))
    compact = find_intervals(mask, q_len, kv_len)
    if compact is not None and not sinks:
        compact = _mark_uniform_rows(compact, mask, lowest, q_len, kv_len)
    if compact is None:
        return as_bias
    if _equals_bias(mask, None, lowest, lead, q_len, kv_len):
        return compact
    for known in biases:
        if _equals_bias(mask, known, lowest, lead, q_len, kv_len):
            return replace(compact, bias=known)
    return as_bias


def _mark_uniform_rows(
    compact: CompactMask, mask: Tensor, lowest: float, q_len: int, kv_len: int
) -> CompactMask | None:
    """Mark the rows in which every entry is the lowest number; their keys get equal weights.

    Returns None if intervals cannot express it.
    """
    empty = compact.empty_rows
    if empty is None:
        return compact
    least, most = (
        torch.broadcast_to(reduce(mask, -1), (*mask.shape[:-2], q_len)) for reduce in (torch.amin, torch.amax)
    )
    uniform = (most == lowest).cpu().numpy() & empty
    if not uniform.any():
        return compact
    mixed = ((least != lowest).cpu().numpy() & uniform).any()
    # The lowest float16 is not low enough to absorb a score that is added to it.
    if mixed or compact.visible_keys is not None or mask.dtype == torch.float16:
        return None
    return replace(compact, uniform_keys=merge_equal_axes(np.where(uniform, kv_len, 0)))


def _equals_bias(
    mask: Tensor, known: ScoreMod | None, lowest: float, lead: tuple[int, ...], q_len: int, kv_len: int
) -> bool:
    """Return whether a mask equals a bias at every entry that is not masked; None stands for a bias of zero."""
    if known is not None and (mask.ndim < 3 or mask.shape[-3:-1] != (lead[-1], q_len)):
        return False
    expected: Any = 0.0
    for rows in split_rows(mask):
        entries = mask[..., rows, :]
        if known is not None:
            frame, q_idx = Frame(lead[-1:], q_len, kv_len), np.arange(q_len)[rows]
            expected = known.additive_bias(
                frame, q_idx, np.arange(kv_len), BiasNamespace(mask.device), mask.dtype
            )
        if not bool(((entries == expected) | (entries <= lowest)).all()):
            return False
    return True


class BiasNamespace:
    """The part of an array namespace that biases use, for torch."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def asarray(self, array: Any, dtype: Any = None) -> Tensor:
        """Return an array as a tensor on the device."""
        return torch.as_tensor(array, device=self._device, dtype=dtype)


def _as_boolean(mask: Tensor) -> Tensor:
    """Return True at the entries that are not masked, of a boolean or additive mask."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def find_intervals(mask: Tensor, q_len: int, kv_len: int) -> CompactMask | None:
    """Find each row's interval of keys; None if the rows are not intervals, even without the keys masked for all."""
    if kv_len == 0 or q_len == 0:
        return CompactMask(*_full_intervals(q_len, kv_len))
    starts, stops, counts, keys = [], [], [], None
    for rows in split_rows(mask):
        visible = _as_boolean(mask[..., rows, :])
        visible = visible.expand(*visible.shape[:-1], kv_len)
        flags = visible.to(torch.uint8)
        count = flags.sum(-1, dtype=torch.int64)
        starts.append(torch.where(count > 0, flags.argmax(-1), 0))
        stops.append(torch.where(count > 0, kv_len - flags.flip(-1).argmax(-1), 0))
        counts.append(count)
        keys = visible.any(-2) if keys is None else keys | visible.any(-2)
    start, stop, count = (torch.cat(parts, -1).cpu().numpy() for parts in (starts, stops, counts))
    keys = keys.cpu().numpy()  # type: ignore[union-attr]
    edges = _expand_rows(start, q_len), _expand_rows(stop, q_len)
    if (count == stop - start).all():
        return CompactMask(*edges)
    before = np.concatenate([np.zeros((*keys.shape[:-1], 1), np.int64), np.cumsum(keys, -1)], -1)
    inside = np.take_along_axis(before, stop, -1) - np.take_along_axis(before, start, -1)
    if not (count == inside).all():
        return None
    return CompactMask(*edges, visible_keys=merge_equal_axes(keys))


def split_rows(mask: Tensor) -> list[slice]:
    """Split the rows of a mask into slices of about CHUNK entries."""
    rows = mask.shape[-2]
    step = max(1, CHUNK * rows // max(1, mask.numel()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _full_intervals(q_len: int, kv_len: int) -> tuple[IntArray, IntArray]:
    return np.zeros(q_len, np.int64), np.full(q_len, kv_len)


def _expand_rows(edge: IntArray, q_len: int) -> IntArray:
    """Broadcast one row to all, after merging equal leading axes."""
    edge = merge_equal_axes(edge)
    return np.broadcast_to(edge, (*edge.shape[:-1], q_len))


def merge_equal_axes(array: Any) -> Any:
    """Reduce each leading axis along which all entries are equal to length 1."""
    for axis in range(array.ndim - 1):
        first = array.take([0], axis)
        if array.shape[axis] > 1 and (array == first).all():
            array = first
    return array
