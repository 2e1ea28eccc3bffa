"""`torch.nn.MultiheadAttention` with every option that changes its numbers, beside layers made from it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from regard.nn import MultiheadAttention, torch_masks
from tests.parity.compare import Answer, Comparison, largest_scores, numbers, scatter, sums

Tensor = Any  # the types of torch are not followed

BATCH, Q_LEN, KV_LEN, WIDTH, HEADS = 6, 7, 11, 24, 4

MODULES: dict[str, dict[str, Any]] = {
    "torch.nn.MultiheadAttention": {},
    "torch.nn.MultiheadAttention, bias=False": {"bias": False},
    "torch.nn.MultiheadAttention, add_bias_kv": {"add_bias_kv": True},
    "torch.nn.MultiheadAttention, add_zero_attn": {"add_zero_attn": True},
    "torch.nn.MultiheadAttention, both": {"add_bias_kv": True, "add_zero_attn": True},
    "torch.nn.MultiheadAttention, kdim, vdim": {"kdim": 10, "vdim": 14},
    "torch.nn.MultiheadAttention, batch_first=False": {"batch_first": False},
}

_HIDDEN = numbers(7, BATCH * HEADS, Q_LEN, KV_LEN) > 0.5  # True = ignore
_HIDDEN[..., 2] = False  # no row without a key: those are NaN there, zeros here
_PADDING = torch.arange(KV_LEN) >= torch.tensor([[11], [4], [7], [3], [10], [5]])
_ADDED = numbers(8, Q_LEN, KV_LEN)
SITUATIONS: dict[str, dict[str, Tensor]] = {
    "cross-attention": {},
    "attn_mask": {"attn_mask": _HIDDEN[0]},
    "attn_mask per head, key_padding_mask": {"attn_mask": _HIDDEN, "key_padding_mask": _PADDING},
    "attn_mask added": {"attn_mask": _ADDED},
    "attn_mask, key_padding_mask added": {
        "attn_mask": torch.where(_HIDDEN[0], -torch.inf, _ADDED),
        "key_padding_mask": torch.where(_PADDING, -torch.inf, 0.0),
    },
    "self-attention, is_causal": {"attn_mask": torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(1)},
    "without a batch": {"attn_mask": _HIDDEN[0]},
}


def comparisons() -> Iterator[Comparison]:
    """Every module in every situation that its widths allow."""
    for module, options in MODULES.items():
        for situation in SITUATIONS:
            if "self" not in situation or "kdim" not in options:
                runs = (functools.partial(run, options, situation) for run in (_theirs, _ours))
                yield Comparison(module, situation, *runs)


def _given(
    options: dict[str, Any], situation: str, given: torch.dtype, dtype: torch.dtype
) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
    """The module, its query, key and value, batch first, and its masks."""
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options}).eval()
    scatter(list(module.parameters()))
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    x = [numbers(seed, BATCH, KV_LEN if seed else Q_LEN, width) for seed, width in enumerate(widths)]
    x = [x[0]] * 3 if "self" in situation else x
    if "without" in situation:
        x = [each[0] for each in x]
    masks = {
        name: mask.to(given).to(dtype) if mask.is_floating_point() else mask
        for name, mask in SITUATIONS[situation].items()
    }
    return module.to(given).to(dtype), [each.to(given).to(dtype) for each in x], masks


def _theirs(options: dict[str, Any], situation: str, given: torch.dtype, dtype: torch.dtype) -> Answer:
    module, x, masks = _given(options, situation, given, dtype)
    turned = not module.batch_first and x[0].ndim == 3
    x = [each.transpose(0, 1) for each in x] if turned else x
    causal = {"is_causal": True} if "is_causal" in situation else {}
    output, weights = module(*x, **masks, **causal, average_attn_weights=False)
    if module.add_zero_attn:
        weights = weights[..., :-1]  # the key of zeros, which is a sink here: a share that no key gets
    output = output.transpose(0, 1) if turned else output
    return Answer(output.double().numpy(), weights.double().numpy())


def _ours(options: dict[str, Any], situation: str, given: torch.dtype, dtype: torch.dtype) -> Answer:
    module, x, masks = _given(options, situation, given, dtype)
    layer = MultiheadAttention.from_torch(module)
    with sums(layer) as summed:
        output, A = layer(*x, **torch_masks(HEADS, **masks), need_matrix=True)
    output, weights = output.double().numpy(), A.to_dense().double().numpy()
    return Answer(output, weights, largest_scores(A), summed[0].reshape(output.shape))
