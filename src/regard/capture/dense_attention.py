"""The attention of a layer that computes its own softmax, with heads on an axis of their own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from regard.capture.followed_tensor import WeightProduct

Tensor = Any  # the types of torch are not followed

# Attributes of modules and of their configurations that have the number of heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "attention_heads")

_thread = threading.local()


class DenseAttention(NamedTuple):
    """The weights of a layer that computed its own softmax, and the other parts of its product.

    Args:
        weights: (…, heads, q_len, kv_len), without dropout.
        value: (…, kv_heads, kv_len, value_dim); None if its axes are not known.
        output: (…, heads, q_len, value_dim); None if its axes are not known.
        dropout_p: Probability of the dropout that the product includes.
        score_rows: (…, heads, q_len, 3): lse, first key and end of each row before the softmax, NaN where they are not
            known; None if nothing is known.
    """

    weights: Tensor
    value: Tensor | None
    output: Tensor | None
    dropout_p: float
    score_rows: Tensor | None = None


@contextmanager
def hold_products() -> Iterator[list[DenseAttention]]:
    """Collect the attention that is read inside the block, instead of recording it."""
    outer = find_holder()
    held: list[DenseAttention] = []
    _thread.held = held
    try:
        yield held
    finally:
        _thread.held = outer


def find_holder() -> list[DenseAttention] | None:
    """Return the list of the innermost `hold_products` block of this thread; None outside of one."""
    return getattr(_thread, "held", None)


def arrange_heads(product: WeightProduct, module: nn.Module) -> DenseAttention:
    """Return the attention of a product with an axis of heads before the last two.

    Args:
        product: The product; its leading axes may be merged.
        module: The module that ran, whose attributes have the number of heads.

    Returns:
        The attention. If the number of heads is unknown, each leading entry is a batch entry with one head.
    """
    weights, heads = product.weights, count_heads(module)
    *lead, q_len, kv_len = weights.shape
    split = product.split
    parts = [weights, product.value, product.output, product.score_rows]
    if len(lead) >= 3 and lead[-1] != heads == lead[-2] * lead[-1]:  # kv_heads and the heads of each
        parts = [
            None if part is None or part.ndim != weights.ndim else part.flatten(-4, -3) for part in parts
        ]
    elif len(lead) >= 2:
        source = _find_heads_axis(lead, heads)
        if source != len(lead) - 1:
            parts = [_move_axis(part, source, weights.ndim) for part in parts]
    elif split is not None and split[-2:] == (q_len, kv_len) and math.prod(split[:-2]) == math.prod(lead):
        parts = [_split_lead(part, lead, split[:-2]) for part in parts]
    elif split is not None and len(split) == 4 and split[-1] == kv_len and [split[0]] == lead:
        return _split_rows(product, split, heads)
    else:
        batch = math.prod(lead)
        heads = heads if heads and batch % heads == 0 else 1
        parts = [_split_lead(part, lead, (batch // heads, heads)) for part in parts]
    return DenseAttention(parts[0], parts[1], parts[2], product.dropout_p, parts[3])


def count_heads(module: nn.Module) -> int | None:
    """Return the number of heads that a module or its configuration states, or None."""
    for owner in (module, getattr(module, "config", None)):
        for name in _HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return None


def _find_heads_axis(lead: list[int], heads: int | None) -> int:
    """Return the axis of the heads: the last one, unless only another one has their number."""
    last = len(lead) - 1
    if heads is None or lead[last] == heads or heads not in lead:
        return last
    return lead.index(heads)


def _move_axis(part: Tensor | None, source: int, ndim: int) -> Tensor | None:
    return None if part is None or part.ndim != ndim else part.movedim(source, -3)


def _split_lead(part: Tensor | None, lead: list[int], shape: tuple[int, ...]) -> Tensor | None:
    """Split the merged leading axis of a tensor; one that is shared by all heads keeps an axis of 1 for them."""
    if part is None or list(part.shape[:-2]) == lead:
        return part if part is None else part.reshape(*shape, *part.shape[-2:])
    return None


def _split_rows(product: WeightProduct, split: tuple[int, ...], heads: int | None) -> DenseAttention:
    """Split rows of (heads, q_len), or (q_len, heads), that share one value: multi-query attention.

    Args:
        product: The product, with weights (batch, rows, kv_len).
        split: Shape of the weights before the rows were merged.
        heads: Number of heads, if known.

    Returns:
        The attention, whose value has one head.
    """
    rows_first = split[2] == heads and split[1] != heads

    def split_part(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        part = part.unflatten(1, split[1:3])
        return part.transpose(1, 2) if rows_first else part

    value = None if product.value is None else product.value.unsqueeze(1)
    split_weights, output, score_rows = map(split_part, (product.weights, product.output, product.score_rows))
    return DenseAttention(split_weights, value, output, product.dropout_p, score_rows)
