"""Build the record of a call from weights that the layer computed itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from regard.lens.capture.call import Call
from regard.lens.capture.compact_mask import CompactMask
from regard.lens.capture.dense_attention import DenseAttention

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
    weights, value = dense.weights, dense.value
    *batch, heads, q_len, kv_len = weights.shape
    if value is not None and (value.ndim != weights.ndim or heads % value.shape[-3]):
        value = None
    kv_heads = heads if value is None else value.shape[-3]
    return Call(
        name=name,
        layer_class=type(module).__name__,
        query=weights.new_empty((*batch, heads, q_len, 0)),
        key=weights.new_empty((*batch, kv_heads, kv_len, 0)),
        compact_mask=find_mask(weights),
        scale=1.0,
        kernel=kernel,
        weights=weights,
        cached=value,
        dropout_p=dense.dropout_p,
        training=module.training,
    )


def find_mask(weights: Tensor) -> CompactMask:
    """Find the keys that each row attends to in any head: an interval that contains every weight above 0.

    Masks that add the lowest number give equal weights to all keys of a row that is masked altogether. Such rows are
    marked if they attend to later tokens, and the other rows do not.

    Args:
        weights: (…, heads, q_len, kv_len).

    Returns:
        The intervals, (…, 1, q_len).
    """
    q_len, kv_len = weights.shape[-2:]
    if 0 in weights.shape:
        return CompactMask(np.zeros(q_len, np.int64), np.full(q_len, kv_len))
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
    return CompactMask(
        np.where(uniform, 0, start), np.where(uniform, 0, stop), uniform_keys=np.where(uniform, kv_len, 0)
    )
