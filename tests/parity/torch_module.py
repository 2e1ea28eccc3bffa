"""`torch.nn.MultiheadAttention` with every option that changes its numbers, and layers converted from it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from regard.nn import MultiheadAttention, torch_masks
from tests.parity.compare import (
    Comparison,
    ParityResult,
    draw_normal,
    max_scores,
    randomize,
    record_magnitudes,
)

Tensor = Any  # mypy does not follow torch's types

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

_IGNORED = draw_normal(7, BATCH * HEADS, Q_LEN, KV_LEN) > 0.5  # True = ignore
_IGNORED[..., 2] = False  # every row has a key: empty rows are NaN in torch and zeros here
_PADDING = torch.arange(KV_LEN) >= torch.tensor([[11], [4], [7], [3], [10], [5]])
_ADDED = draw_normal(8, Q_LEN, KV_LEN)
SITUATIONS: dict[str, dict[str, Tensor]] = {
    "cross-attention": {},
    "attn_mask": {"attn_mask": _IGNORED[0]},
    "attn_mask per head, key_padding_mask": {"attn_mask": _IGNORED, "key_padding_mask": _PADDING},
    "attn_mask added": {"attn_mask": _ADDED},
    "attn_mask, key_padding_mask added": {
        "attn_mask": torch.where(_IGNORED[0], -torch.inf, _ADDED),
        "key_padding_mask": torch.where(_PADDING, -torch.inf, 0.0),
    },
    "self-attention, is_causal": {"attn_mask": torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(1)},
    "unbatched": {"attn_mask": _IGNORED[0]},
}


def comparisons() -> Iterator[Comparison]:
    """Yield every module in every situation that its widths allow."""
    for module, options in MODULES.items():
        for situation in SITUATIONS:
            if "self" not in situation or "kdim" not in options:
                runs = (functools.partial(run, options, situation) for run in (_run_module, _run_layer))
                yield Comparison(module, situation, *runs)


def _build_inputs(
    options: dict[str, Any], situation: str, storage: torch.dtype, dtype: torch.dtype
) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
    """Build the module, its query, key and value, batch first, and its masks."""
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options}).eval()
    randomize(list(module.parameters()))
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    x = [draw_normal(seed, BATCH, KV_LEN if seed else Q_LEN, width) for seed, width in enumerate(widths)]
    x = [x[0]] * 3 if "self" in situation else x
    if "unbatched" in situation:
        x = [array[0] for array in x]
    masks = {
        name: mask.to(storage).to(dtype) if mask.is_floating_point() else mask
        for name, mask in SITUATIONS[situation].items()
    }
    return module.to(storage).to(dtype), [array.to(storage).to(dtype) for array in x], masks


def _run_module(
    options: dict[str, Any], situation: str, storage: torch.dtype, dtype: torch.dtype
) -> ParityResult:
    module, x, masks = _build_inputs(options, situation, storage, dtype)
    is_length_first = not module.batch_first and x[0].ndim == 3
    x = [array.transpose(0, 1) for array in x] if is_length_first else x
    causal = {"is_causal": True} if "is_causal" in situation else {}
    output, weights = module(*x, **masks, **causal, average_attn_weights=False)
    if module.add_zero_attn:
        weights = weights[..., :-1]  # the key of zeros is a sink here, a share without a key
    output = output.transpose(0, 1) if is_length_first else output
    return ParityResult(output.double().numpy(), weights.double().numpy())


def _run_layer(
    options: dict[str, Any], situation: str, storage: torch.dtype, dtype: torch.dtype
) -> ParityResult:
    module, x, masks = _build_inputs(options, situation, storage, dtype)
    layer = MultiheadAttention.from_torch(module)
    with record_magnitudes(layer) as magnitudes:
        output, A = layer(*x, **torch_masks(HEADS, **masks), need_matrix=True)
    output, weights = output.double().numpy(), A.to_dense().double().numpy()
    return ParityResult(output, weights, max_scores(A), magnitudes[0].reshape(output.shape))
