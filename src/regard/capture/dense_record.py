"""Build the record of a call from weights that the layer computed itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from regard.capture.call import Call
from regard.capture.compact_mask import CompactMask
from regard.capture.dense_attention import DenseAttention
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed


def build_dense_call(module: nn.Module, name: str, dense: DenseAttention, kernel: str) -> Call:
    """Build the record of a call whose weights are given.

    Args:
        module: The module that ran.
        name: Its name in the model.
        dense: Its weights and value.
        kernel: Name of the kernel.

    Returns:
        The call; its query and key have a head_dim of 0.
    """
    weights, value, score_rows = dense.weights, dense.value, dense.score_rows
    *batch, heads, q_len, kv_len = weights.shape
    if value is not None and (value.ndim != weights.ndim or heads % value.shape[-3]):
        value = None
    kv_heads = heads if value is None else value.shape[-3]
    return Call(
        name=name,
        layer_class=type(module).__name__,
        query=weights.new_empty((*batch, heads, q_len, 0)),
        key=weights.new_empty((*batch, kv_heads, kv_len, 0)),
        compact_mask=find_mask(weights, None if score_rows is None else score_rows[..., 1:]),
        scale=1.0,
        kernel=kernel,
        lse=None if score_rows is None else score_rows[..., 0],
        weights=weights,
        cached=value,
        dropout_p=dense.dropout_p,
        training=module.training,
    )


def find_mask(weights: Tensor, intervals: Tensor | None = None) -> CompactMask:
    """Find the keys that each row attends to in any head: an interval that contains every weight above 0.

    Masks that add the lowest number give equal weights to all keys of a row that is masked altogether. Such rows are
    marked if the scores tell, or if they attend to later tokens and the other rows do not.

    Args:
        weights: (…, heads, q_len, kv_len).
        intervals: (…, heads, q_len, 2): first key and end of each row that the scores leave unmasked, both 0 if the
            row is masked altogether. They include keys whose weight is too small for a number. NaN if not known.

    Returns:
        The intervals, (…, 1, q_len).
    """
    q_len, kv_len = weights.shape[-2:]
    if 0 in weights.shape:
        return CompactMask(np.zeros(q_len, np.int64), np.full(q_len, kv_len))
    if intervals is not None and not bool(intervals.isnan().any()):
        return _merge_intervals(weights, intervals)
    visible = (weights != 0).any(-3, keepdim=True)
    flags = visible.to(torch.uint8)
    live = visible.any(-1)
    start = torch.where(live, flags.argmax(-1), 0).cpu().numpy()
    stop = torch.where(live, kv_len - flags.flip(-1).argmax(-1), 0).cpu().numpy()
    ahead = stop > np.arange(q_len) + (kv_len - q_len) + 1
    if not ahead.any() or kv_len < q_len:
        return CompactMask(start, stop)
    largest, smallest = weights.amax(-1), weights.amin(-1)
    uniform = (largest == smallest).all(-2, keepdim=True).cpu().numpy() & ahead
    is_causal = not (ahead & ~uniform).any() and not ahead[..., :-1].all()
    if not uniform.any() or not is_causal:
        return CompactMask(start, stop)
    return _mark_uniform_rows(start, stop, uniform, kv_len)


def _merge_intervals(weights: Tensor, intervals: Tensor) -> CompactMask:
    """Merge the intervals of all heads; rows that are masked altogether have weights in spite of that."""
    kv_len = weights.shape[-1]
    start, stop = intervals.unbind(-1)
    is_live = start < stop
    start = torch.where(is_live, start, kv_len).amin(-2, keepdim=True)
    stop = stop.amax(-2, keepdim=True)
    largest = weights.amax(-1).amax(-2, keepdim=True)  # NaN where a weight is
    masked = (stop == 0) & (largest > 0)
    start = torch.where((stop == 0) | largest.isnan(), 0, start)
    stop = torch.where(largest.isnan(), kv_len, stop)
    start, stop, masked = start.long().cpu().numpy(), stop.long().cpu().numpy(), masked.cpu().numpy()
    return _mark_uniform_rows(start, stop, masked, kv_len) if masked.any() else CompactMask(start, stop)


def _mark_uniform_rows(start: IntArray, stop: IntArray, uniform: Any, kv_len: int) -> CompactMask:
    """Return the intervals with some rows, (…, 1, q_len), as rows that are masked altogether."""
    return CompactMask(
        np.where(uniform, 0, start), np.where(uniform, 0, stop), uniform_keys=np.where(uniform, kv_len, 0)
    )
