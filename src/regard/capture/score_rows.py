"""Summarise the scores that a layer passes to its own softmax: three numbers for each row."""

from __future__ import annotations

from typing import Any

import torch

Tensor = Any  # the types of torch are not followed

# Masks add −10,000 or less. A score that is lower than the largest of its row by more than this counts as masked.
MASK_GAP = 5000.0


def summarise_score_rows(scores: Tensor, weights: Tensor, dim: int) -> Tensor | None:
    """Reduce the scores of a softmax, or exponential, to the lse of each row, its first key not masked, and its end.

    The weights alone do not tell: they have no scale, and far below the largest score of a row they are 0.

    Args:
        scores: Input of the softmax.
        weights: Its result, of the same shape.
        dim: Its axis.

    Returns:
        The shape of the scores, with lse, first key and end on the axis of the softmax. In a row that is masked
        altogether, both keys are 0. The lse is NaN if the scores are not known: the model may have subtracted the
        largest one before the softmax. None for subclasses of tensors, and if the result has replaced the scores.
    """
    is_plain = type(scores) is torch.Tensor and type(weights) is torch.Tensor
    if not is_plain or scores is weights or not scores.numel():
        return None
    with torch.no_grad():
        largest, dtype = scores.amax(dim, keepdim=True), torch.promote_types(weights.dtype, torch.float32)
        lse = largest.to(dtype) - weights.amax(dim, keepdim=True).to(dtype).log()
        # A row is masked altogether if the mask was added to every score. Without other rows to compare with, only the
        # lowest number is certain to be a mask; it may have been divided by the scale.
        lowest = max(-1e30, torch.finfo(scores.dtype).min / 2)
        if bool((largest > -MASK_GAP).any()):
            lowest = -MASK_GAP
        visible = scores >= torch.where(largest > lowest, largest - MASK_GAP, torch.inf)
        if bool(largest.nan_to_num(-torch.inf).max() == 0) and bool((visible & (scores < 0)).any()):
            lse = torch.full_like(lse, torch.nan)
        for axis in range(visible.ndim):  # heads, and often batch entries, share their mask: search it once
            first = visible.narrow(axis, 0, 1)
            if axis != dim % visible.ndim and bool((visible == first).all()):
                visible = first
        flags = visible.to(torch.uint8)
        start, from_end = (part.argmax(dim, keepdim=True) for part in (flags, flags.flip(dim)))
        stop = torch.where(visible.any(dim, keepdim=True), scores.shape[dim] - from_end, 0)
        return torch.cat([lse, *(key.to(dtype).expand_as(lse) for key in (start, stop))], dim)
