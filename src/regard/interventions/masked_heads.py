"""Compute the output of a call whose heads a mask changes, without the kernel over all heads before."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regard.capture.call import CapturedArgs
from regard.engines import torch_kernels as kernels
from regard.interventions.edge_correction import ValueColumns, compute_rows, touches
from regard.problem import Problem
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed
BoolArray = Any


def compute_masked_heads(
    problem: Problem, edited: Problem, masked: BoolArray, args: CapturedArgs, value: ValueColumns
) -> tuple[Tensor, bool]:
    """Compute each head once: the masked ones through the edited mask, the others by the function of the model.

    Args:
        problem: The matrix without the edits.
        edited: The matrix with them.
        masked: Heads that the edits select, (heads,), booleans; the same in each batch entry.
        args: The arguments of the call.
        value: Its value in canonical form.

    Returns:
        The output, (batch, heads, q_len, value_dim), and whether a mask removes any entry.
    """
    batch, num_heads = args.query.shape[:2]
    pairs = np.flatnonzero(np.tile(masked, batch))
    if not touches(problem, edited, pairs):
        return kernels.SDPA(*args[:6], scale=args.scale, enable_gqa=args.enable_gqa), False
    rows = compute_rows(edited, pairs, None, value).unflatten(0, (batch, -1))
    if masked.all():
        return rows, True
    output = rows.new_empty(batch, num_heads, *rows.shape[-2:])
    output[:, masked] = rows
    output[:, ~masked] = _run_heads(args, np.flatnonzero(~masked))
    return output, True


def _run_heads(args: CapturedArgs, heads: IntArray) -> Tensor:
    """Run the function of the model over some heads, which keep every bit."""
    num_heads = args.query.shape[-3]

    def select(tensor: Tensor) -> Tensor:
        index = torch.as_tensor(heads // (num_heads // tensor.shape[-3]), device=tensor.device)
        return tensor.index_select(-3, index)

    mask = args.attn_mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = select(mask)
    query, key, value = map(select, (args.query, args.key, args.value))
    return kernels.SDPA(query, key, value, mask, is_causal=args.is_causal, scale=args.scale)
