"""Compare the settings of a call in two runs: mask, bias, soft cap, sinks and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.capture.compact_mask import CompactMask
from regard.diagnosis.tensor_relation import list_rows
from regard.findings import Finding, format_numbers

Tensor = Any  # the types of torch are not followed

# An additive mask at or below this number masks a key in practice.
MASKED = -9000.0
# Entries of masks and biases that are compared; of larger ones, evenly spaced rows.
MAX_ENTRIES = 1 << 22


def find_setting_differences(
    a: Call, b: Call, q_len: int, kv_len: int, tokens: Tensor | None
) -> list[Finding]:
    """Find the settings that differ.

    Args:
        a: The call of run A.
        b: The call of run B.
        q_len: Number of queries to compare, from the first.
        kv_len: Number of keys to compare, from the first.
        tokens: (batch, q_len), True for the rows to compare; None for all.

    Returns:
        The differences, masks first.
    """
    differences = []
    if not _have_equal_masks(a.compact_mask, b.compact_mask):
        found = _compare_masks(a, b, q_len, kv_len, tokens)
        differences += [] if found is None else [found]
    if a.dropout_p != b.dropout_p:
        differences.append(
            Finding(
                "dropout", "error", f"The dropout is {b.dropout_p:g} instead of {a.dropout_p:g}.",
                hint="Pass dropout_p=0.0 unless self.training; call model.eval().",
                evidence={"A": a.dropout_p, "B": b.dropout_p},
            )
        )  # fmt: skip
    if repr(a.softcap) != repr(b.softcap):
        differences.append(
            Finding(
                "softcap", "error", f"The soft cap is {b.softcap} instead of {a.softcap}.",
                hint="Compare attn_logit_softcapping, and whether the attention function applies it.",
            )
        )  # fmt: skip
    sinks = _compare_sinks(a, b)
    return differences if sinks is None else [*differences, sinks]


def _have_equal_masks(a: CompactMask, b: CompactMask) -> bool:
    """Return whether two masks are equal as they are stored, which is the usual case."""
    if a is b:
        return True
    if a.tiled_mask is not None or b.tiled_mask is not None:
        return False  # compared entry by entry
    pairs = [
        (getattr(a, name), getattr(b, name)) for name in ("start", "stop", "visible_keys", "uniform_keys")
    ]
    for first, second in pairs:
        if (first is None) != (second is None) or (first is not None and not np.array_equal(first, second)):
            return False
    arrays = (a.dense_mask, b.dense_mask), (getattr(a.bias, "array", None), getattr(b.bias, "array", None))
    for first, second in arrays:
        if first is None or second is None:
            if first is not second:
                return False
        elif first.shape != second.shape or not torch.equal(first, second.to(first.device, first.dtype)):
            return False
    return a.bias is b.bias or getattr(a.bias, "array", None) is not None


def describe_moved_masks(masks_a: Sequence[CompactMask], masks_b: Sequence[CompactMask]) -> str:
    """Say which layers of B have the masks of other layers of A, as a hint; empty if that does not explain them.

    Args:
        masks_a: The mask of each layer of A.
        masks_b: The masks of the same layers of B.
    """
    layers = range(len(masks_a))
    kinds = [next(j for j in layers if _have_equal_masks(masks_a[j], masks_a[i])) for i in layers]
    found = [
        next((kinds[j] for j in layers if _have_equal_masks(masks_a[j], masks_b[i])), None) for i in layers
    ]
    if None in found or found == kinds or len(set(found)) < 2:
        return ""
    parts = [
        f"the mask of A's {format_numbers('layer', tuple(i for i in layers if kinds[i] == kind))} is in B's "
        f"{format_numbers('layer', tuple(i for i in layers if found[i] == kind))}"
        for kind in dict.fromkeys(kinds)
    ]
    return (
        f"The masks are on other layers: {'; '.join(parts)}. Compare which layers have a window: layer_types."
    )


def _compare_masks(a: Call, b: Call, q_len: int, kv_len: int, tokens: Tensor | None) -> Finding | None:
    """Compare mask and bias entry by entry; None if they agree in the rows that count."""
    pairs = max(1, int(np.prod(a.shape[:-2])))
    count = max(1, min(q_len, MAX_ENTRIES // max(1, pairs * kv_len)))
    rows = np.unique(np.linspace(0, max(0, q_len - 1), count).round().astype(int)).tolist() if q_len else []
    first, second = (_read_bias(call, rows, kv_len) for call in (a, b))
    if not first.numel() or first.shape[1:] != second.shape[1:]:
        return None
    visible_a, visible_b = first > MASKED, second > MASKED
    counted = torch.ones(1, 1, dtype=torch.bool) if tokens is None else tokens.cpu()[:, rows]
    changed = (visible_a != visible_b) & counted[:, None, :, None]
    if bool(changed.any()):
        return _describe_masks(a, b, first, second, changed, rows)
    both = visible_a & counted[:, None, :, None]
    error = torch.where(both, second - first, 0.0)
    # Softmax ignores a number that is added to a whole row.
    mean = error.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1)
    largest = float(torch.where(both, error - mean, 0.0).abs().max())
    size = float(torch.where(both, first, 0.0).abs().max())
    if largest <= 1e-2 * max(1.0, size) * (1 if a.query.dtype != b.query.dtype else 1e-2):
        return None
    names = [repr(call.compact_mask.bias) for call in (a, b)]
    return Finding(
        "bias", "error", f"The bias of the scores differs by up to {largest:.3g}: {names[1]} instead of {names[0]}.",
        hint="Compare the sign, the slopes or the table of the position bias, and the additive mask.",
        evidence={"largest": largest},
    )  # fmt: skip


def _read_bias(call: Call, rows: list[int], kv_len: int) -> Tensor:
    """Return what mask and bias add to the scores of some rows, (batch, heads, rows, keys); −inf masks."""
    empty = replace(
        call, query=torch.zeros_like(call.query), lse=None, softcap=None, weights=None, versions=()
    )
    added = empty.matrix.lazy[..., rows, :].scores[...].float().cpu()
    while added.ndim < 4:
        added = added[None]
    return added.flatten(0, -4)[..., :kv_len]


def _describe_masks(
    a: Call, b: Call, first: Tensor, second: Tensor, changed: Tensor, rows: list[int]
) -> Finding:
    visible_a, visible_b = first > MASKED, second > MASKED
    names = [_format_mask(call) for call in (a, b)]
    gained = int((changed & visible_b).any(1).sum())
    lost = int((changed & visible_a).any(1).sum())
    parts = [
        f"{count:,} {word}" for count, word in ((gained, "entries more"), (lost, "entries fewer")) if count
    ]
    if len(rows) < a.shape[-2]:
        parts[-1] += f" in {len(rows):,} rows that were compared"
    message = f"The mask is {names[1]} instead of {names[0]}: B attends to {' and '.join(parts)}."
    if names[0] == names[1]:
        message = f"The masks differ: B attends to {' and '.join(parts)}."
    flagged = torch.zeros(changed.shape[0], max(rows) + 1, dtype=torch.bool)
    flagged[:, rows] = changed.any(-1).any(1)
    numbers, batch = list_rows(flagged)
    numbers = () if len(numbers) == a.shape[-2] else numbers
    empty = int((changed.any(-1) & ~visible_b.any(-1)).any(1).sum())
    hint = _guess_mistake(b, visible_a, visible_b, second, changed)
    return Finding(
        "mask",
        "error",
        message,
        hint=hint,
        rows=numbers,
        batch=batch,
        evidence={"gained": gained, "lost": lost} | ({"rows without a key": empty} if empty else {}),
    )


def _format_mask(call: Call) -> str:
    bias = call.compact_mask.bias
    if call.mask is None:
        return "none" if bias is None else f"none with {bias!r}"
    return repr(call.mask) if bias is None else f"{call.mask!r} with {bias!r}"


def _guess_mistake(b: Call, visible_a: Tensor, visible_b: Tensor, added: Tensor, changed: Tensor) -> str:
    """Name the mistake that makes the mask of A the mask of B."""
    array = getattr(b.compact_mask.bias, "array", None)
    if array is not None and bool(((array == 0) | (array == 1)).all()):
        return "A float mask of 0 and 1 is added to the scores. Pass it as booleans: mask.bool()."
    if (
        array is not None
        and bool((changed & visible_b).any())
        and float(added[changed & visible_b].max()) < 0
    ):
        lowest = float(added[changed & visible_b].max())
        return f"The additive mask of {lowest:.3g} is too weak. Pass booleans, or torch.finfo(dtype).min."
    by_head = visible_a[:, :1].transpose(0, 1)
    if visible_a.shape[0] == visible_b.shape[1] and torch.equal(by_head.expand_as(visible_b), visible_b):
        return "Head h of B has the mask of batch entry h: give (batch, q_len, kv_len) an axis of heads, mask[:, None]."
    if torch.equal(visible_a, ~visible_b):
        return "The mask is inverted: True = attend in F.scaled_dot_product_attention, ignore in nn.MultiheadAttention."
    keys_a, keys_b = _find_shared_keys(visible_a), _find_shared_keys(visible_b)
    padded = ~keys_a.all(-1)  # batch entries
    is_rolled = any(torch.equal(keys_a.roll(n, 0), keys_b) for n in range(1, len(keys_a)))
    if is_rolled and not torch.equal(keys_a, keys_b):
        return "Each batch entry has the padding mask of another one: reorder the mask with the batch."
    if bool(padded.any()) and not bool((keys_b & keys_a)[padded].any()):
        return "The padding mask is inverted: True = attend in F.scaled_dot_product_attention."
    if bool((changed & visible_b).any()) and not bool((changed & ~_own_keys(changed, 1)).any()):
        return "B attends to the key after each token: use tril() to attend, or triu(diagonal=1) to mask."
    if not bool((changed & visible_b).any()) and torch.equal(changed, visible_a & _own_keys(changed)):
        return "B masks the own key of each token: use tril() to attend, or triu(diagonal=1) to mask."
    if not bool((changed.any(-1) & visible_b.any(-1)).any()):
        return "These rows of B attend to no key. If they are padding, the difference has no effect on the tokens."
    if bool(visible_b.all()):
        return "B masks nothing: pass the mask to the attention function, or is_causal=True."
    if b.is_causal and (b.steps > 1 or b.shape[-1] != b.shape[-2]) and not bool((changed & visible_b).any()):
        return "is_causal aligns to the first key; use torch.nn.attention.bias.causal_lower_right(q_len, kv_len)."
    if not bool((changed & visible_a).any()):
        return "B attends to keys that A masks: padding, the future, another document, or keys outside the window."
    return "Compare how the masks are built: causality, padding, window and documents."


def _own_keys(visible: Tensor, offset: int = 0) -> Tensor:
    """Return a diagonal of (…, rows, keys) as booleans; none if the matrix is not square."""
    rows, keys = visible.shape[-2:]
    return torch.ones(rows, keys, dtype=torch.bool).triu(offset).tril(offset) & (rows == keys)


def _find_shared_keys(visible: Tensor) -> Tensor:
    """Return which keys some other row of the batch entry attends to, (batch, keys)."""
    return (visible & ~_own_keys(visible)).any(-2).any(1)


def _compare_sinks(a: Call, b: Call) -> Finding | None:
    hint = "Load the model with an attention implementation that supports sinks, and pass them (s_aux)."
    if (a.sink is None) != (b.sink is None):
        name = "B" if b.sink is None else "A"
        return Finding("sinks", "error", f"{name} does not use the sinks.", hint=hint)
    if a.sink is None or b.sink is None:
        return None
    first, second = a.sink.float().cpu(), b.sink.float().cpu()
    if first.shape == second.shape and torch.allclose(first, second, rtol=2e-2, atol=2e-2):
        return None
    return Finding("sinks", "error", "The sinks differ.", hint="Compare the sinks of the two checkpoints.")
