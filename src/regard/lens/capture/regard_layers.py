"""Layers that make their matrix by `regard.attention`, those of `regard.nn` among them, watched where they call it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from regard.core.matrix import AttentionMatrix
from regard.lens.capture import wrappers as capture
from regard.masks import causal
from regard.score_mods import SoftcapMod


def wrap_attention(original: Callable[..., AttentionMatrix]) -> Callable[..., AttentionMatrix]:
    """`attention` or `layer_matrix` as a layer's file knows it, watched; only the second knows the value."""

    @wraps(original)
    def attention(query: Any, key: Any, *value: Any, **options: Any) -> AttentionMatrix:
        matrix = original(query, key, *value, **options)
        module = capture._running()
        if module is not None and capture._watched(module):
            mods = [each for each in options.get("score_mod") or () if each is not None]
            if any(not isinstance(each, SoftcapMod) for each in mods) or len(mods) > 1:
                for recorder, name in tuple(capture.owners.get(id(module), ())):
                    if name is not None:
                        capture._thread.captured = capture.captured() + 1
                        recorder.miss(name, f"scores changed by {mods}", "Ask the layer: need_matrix=True.")
                return matrix
            mask: Any = options.get("mask")
            square = query.shape[-2] == key.shape[-2]
            plain = mask is None or (square and mask == causal())
            passed = capture.Passed(
                query,
                key,
                value[0] if value else key,
                attn_mask=None if plain else torch.from_numpy(mask.to_dense(*_shape(mask, matrix))),
                is_causal=plain and mask is not None,
                scale=matrix.scale,
                softcap=mods[0].cap if mods else None,
                sink=options.get("sink"),
                kernel="regard: attention",
            )
            capture.tell(module, passed)
        return matrix

    return attention


def _shape(mask: Any, matrix: AttentionMatrix) -> tuple[int, ...]:
    """As much of the matrix's shape as its mask may differ over; heads mostly share one."""
    *batch, heads, q_len, kv_len = matrix.shape
    try:
        one = (*batch, 1, q_len, kv_len)
        mask.check(type(matrix._problem.frame).from_shape(one))
    except ValueError:  # a size for each head
        return (*batch, heads, q_len, kv_len)
    return one
