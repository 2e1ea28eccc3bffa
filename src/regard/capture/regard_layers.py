"""Capture layers that compute their matrix with `regard.attention`, those of `regard.nn` among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from regard.capture import wrappers
from regard.capture.captured_args import CapturedArgs
from regard.core.matrix import AttentionMatrix
from regard.masks import causal
from regard.score_mods import SoftcapMod


def wrap_regard_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `attention`, or `layer_attention`, which is passed the value and returns the output, too."""

    @wraps(original)
    def attention(query: Any, key: Any, *value: Any, **options: Any) -> Any:
        result = original(query, key, *value, **options)
        output, matrix = result if value else (None, result)
        module = wrappers.find_running_module()
        if module is None:
            return result
        obstacle = wrappers.find_obstacle(query, key)
        if obstacle is not None:
            wrappers.report_uncaptured(module, *obstacle)
            return result
        mods = [mod for mod in options.get("score_mod") or () if mod is not None]
        if any(not isinstance(mod, SoftcapMod) for mod in mods) or len(mods) > 1:
            wrappers.report_uncaptured(
                module, f"its scores are modified by {mods}", "Use the layer's own matrix: need_matrix=True."
            )
            return result
        mask: Any = options.get("mask")
        is_square = query.shape[-2] == key.shape[-2]
        is_simple = mask is None or (is_square and mask == causal())
        args = CapturedArgs(
            query,
            key,
            value[0] if value else key,
            attn_mask=None if is_simple else torch.from_numpy(mask.to_dense(*_mask_shape(mask, matrix))),
            is_causal=is_simple and mask is not None,
            scale=matrix.scale,
            softcap=mods[0].cap if mods else None,
            sink=options.get("sink"),
            output=output,
            kernel="regard: attention",
        )
        edited = wrappers.notify(module, args)
        if edited.edits is None:
            return result
        changed = {
            "mask": edited.edits.edit_mask(mask),
            "score_mod": edited.edits.edit_score_mods(tuple(mods)),
        }
        if not value:
            return original(query, key, **options | changed)
        _, matrix = original(query, key, *value, **options | changed | {"multiply": False})
        if not options.get("multiply", True):
            return None, matrix
        return (matrix @ value[0] if edited.edited_output is None else edited.edited_output), matrix

    return attention


def _mask_shape(mask: Any, matrix: AttentionMatrix) -> tuple[int, ...]:
    """Return the shape to expand a mask to: with one head if the heads share it."""
    *batch, heads, q_len, kv_len = matrix.shape
    shape = (*batch, 1, q_len, kv_len)
    try:
        mask.check(type(matrix.problem.frame).from_shape(shape))
    except ValueError:  # the mask differs between heads
        return (*batch, heads, q_len, kv_len)
    return shape
