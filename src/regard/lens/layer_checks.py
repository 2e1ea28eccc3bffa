"""The checks of one attention layer that `Recording.diagnose` runs: its mask, dropout, kernel, settings and heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.capture.module_hints import ImageRuns, ModuleHints, ModuleSettings
from regard.families import UNSCALED_LAYERS
from regard.findings import Finding, Severity
from regard.lens.find import as_numpy
from regard.lens.token_rows import TokenRows, find_visible
from regard.lens.weight_measures import DistanceBands, WeightAt
from regard.masks import dense
from regard.measures import Entropy, Mass


@dataclass(eq=False)
class CheckedLayer:
    """A call and what is expected of it.

    Args:
        layer: Number of the layer.
        module: Name of the module.
        call: The call.
        causal: No token should attend to later ones.
        is_token: (batch, kv_len), False for padding; None if unknown.
        image_runs: First key and end of each image whose tokens may attend to each other, for each batch entry.
        module_hints: Settings of the modules, and the positions that were looked up.
        usual_scale: The scale of most layers of the same kind, or None.
        is_finite: Query, key and bias have no NaN or inf.
        has_wrong_mask: The mask has another form than it should: inverted, of 0 and 1, of another entry.
    """

    layer: int
    module: str
    call: Call
    causal: bool = False
    is_token: Any = None
    image_runs: ImageRuns = field(default_factory=list)
    module_hints: ModuleHints = field(default_factory=ModuleHints)
    usual_scale: float | None = None
    is_finite: bool = True
    has_wrong_mask: bool = False

    @cached_property
    def token_rows(self) -> TokenRows:
        """The rows and keys that are not padding."""
        return TokenRows.from_call(self.call)

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape, (batch, heads, q_len, kv_len)."""
        *lead, q_len, kv_len = self.call.shape
        return math.prod(lead[:-1]), lead[-1] if lead else 1, q_len, kv_len

    @cached_property
    def rows(self) -> Any:
        """Rows that are tokens, as far as is known, (batch, q_len)."""
        batch, _, q_len, _ = self.shape
        offset = self.token_rows.query_offset
        if offset is None:
            return np.ones((batch, q_len), bool)
        is_token = self.keys if self.is_token is None else self.is_token
        return is_token[:, offset : offset + q_len]

    @cached_property
    def keys(self) -> Any:
        """Keys that some row attends to, (batch, kv_len)."""
        return self.token_rows.keys.reshape(self.shape[0], -1)

    @cached_property
    def live_rows(self) -> Any:
        """Rows that attend to some key, by head: (batch, heads or 1, q_len)."""
        batch, _, q_len, kv_len = self.shape
        rows, _ = find_visible(self.call.compact_mask, q_len, kv_len)
        rows = as_batch_heads(rows)
        return np.broadcast_to(rows, (batch, *rows.shape[1:]))

    @cached_property
    def intervals(self) -> tuple[Any, Any]:
        """First key and end of each row's interval, (batch or 1, heads or 1, q_len) each."""
        mask = self.call.compact_mask
        start, stop = np.broadcast_arrays(mask.start, mask.stop)
        return as_batch_heads(start), as_batch_heads(stop)

    @property
    def settings(self) -> ModuleSettings:
        """What the module states about its sinks, soft cap and window."""
        return self.module_hints.settings.get(self.module, ModuleSettings(False, None, {}))

    @property
    def misses_own_key(self) -> Any:
        """Rows that attend to earlier keys but not to their own, (batch or 1, heads or 1, q_len); None if unknown."""
        if self.token_rows.query_offset is None or self.call.compact_mask.dense_mask is not None:
            return None
        start, stop = self.intervals
        return (start < stop) & (stop <= self.token_rows.own_keys)

    @cached_property
    def allowed_stop(self) -> Any:
        """End of the keys that each row of a causal layer may attend to, (batch or 1, 1, q_len)."""
        own = self.token_rows.own_keys
        allowed = np.repeat(own[None] + 1, max(len(self.image_runs), 1), 0)
        for row, runs in zip(allowed, self.image_runs, strict=False):
            for start, stop in runs:
                row[(own >= start) & (own < stop)] = stop
        return allowed[:, None]

    @cached_property
    def attends_beyond(self) -> Any:
        """Rows that attend to a key past `allowed_stop`, (batch or 1, heads or 1, q_len)."""
        mask = self.call.compact_mask
        if (visible := mask.stored_visible) is None:
            return self.intervals[1] > self.allowed_stop
        keys = torch.arange(self.shape[3], device=visible.device)
        last = torch.where(visible, keys, -1).amax(-1).cpu().numpy()
        return as_batch_heads(last) >= self.allowed_stop

    def flatten_batch(self, result: Any) -> Any:
        """Return a result (…, heads, n) as float64 NumPy, (batch, heads, n)."""
        batch, heads, *_ = self.shape
        return as_numpy(result).reshape(batch, heads, -1)

    def build_finding(
        self,
        kind: str,
        severity: Severity,
        message: str,
        evidence: dict[str, Any],
        hint: str,
        where: Any = None,
    ) -> Finding:
        """Build a finding about a call, or about the part of it where `where` is True.

        `where` broadcasts to (batch, heads or 1, q_len or 1). An axis along which all are True is not listed.
        """
        indices: dict[str, tuple[int, ...]] = {}
        if where is not None:
            where = np.broadcast_to(where, (self.shape[0], *where.shape[1:]))
            for axis, name in enumerate(("batch", "heads", "rows")):
                hit = where.any(tuple(other for other in range(3) if other != axis))
                indices[name] = () if hit.all() else tuple(int(i) for i in np.flatnonzero(hit))
        return Finding(
            kind, severity, message, self.module, self.layer, evidence=evidence, hint=hint, **indices
        )


def as_batch_heads(array: Any) -> Any:
    """Reshape (…, heads, n) or (n,) to (batch, heads, n)."""
    array = np.asarray(array)
    while array.ndim < 3:
        array = array[None]
    return array.reshape(-1, *array.shape[-2:])


# A weight above ROUNDING is not rounding, one above SIGNIFICANT is an error.
ROUNDING, SIGNIFICANT = 1e-6, 1e-3


def check_inverted_mask(layer: CheckedLayer) -> Finding | None:
    """Check for a mask of the opposite polarity: it masks the tokens, and attends to the padding or the future."""
    where, message, evidence = None, "", {}
    if layer.is_token is not None:
        visible, is_token = layer.keys, layer.is_token
        has_padding = ~is_token.all(1)
        inverted = has_padding & (visible == ~is_token).all(1)
        if inverted.any():
            where = inverted[:, None, None]
            message = "The mask hides the tokens and keeps the padding visible."
            evidence = {"visible padding keys": int(visible[inverted].sum()), "visible tokens": 0}
    token_rows, mask = layer.token_rows, layer.call.compact_mask
    if (
        where is None
        and token_rows.query_offset is not None
        and mask.dense_mask is None
        and layer.shape[2] > 2
    ):
        start, stop = layer.intervals
        live = start < stop
        only_later = (start > token_rows.own_keys) & live
        if only_later.mean() > 0.5 and not ((start <= token_rows.own_keys) & live).any():
            where = only_later
            message = "Every token attends only to later tokens."
            evidence = {"rows that attend only to later keys": int(only_later.sum())}
            evidence["rows that attend to their own key"] = 0
    if where is None:
        return None
    hint = "Pass ~mask: True means attend in F.scaled_dot_product_attention, ignore in nn.MultiheadAttention."
    return layer.build_finding("inverted mask", "error", message, evidence, hint, where)


def check_causal_alignment(layer: CheckedLayer) -> Finding | None:
    """Check for `is_causal` with more keys than queries: torch aligns query 0 with key 0."""
    _, _, q_len, kv_len = layer.shape
    if not layer.call.is_causal:
        return None
    hint = "For one new token pass is_causal=False, for several attn_mask=causal_lower_right(q_len, kv_len)."
    if layer.call.steps > 1:  # joined by a cache
        misses_own = layer.misses_own_key
        if misses_own is None or not misses_own.any():
            return None
        rows = np.flatnonzero(misses_own.any((0, 1)))
        message = (
            "is_causal with keys from a cache aligns the new queries with key 0 instead of the last key."
        )
        visible = int(layer.intervals[1][..., rows[0]].max())
        evidence = {"rows that mask their own key": len(rows), f"keys visible to row {rows[0]}": visible}
        return layer.build_finding("causal alignment", "error", message, evidence, hint, misses_own)
    masked = int((~layer.keys.any(0)).sum())
    if q_len >= kv_len or masked == 0:
        return None
    message = f"is_causal with {q_len} queries and {kv_len} keys aligns query 0 with key 0 instead of the last ones."
    evidence = {"keys masked in every row": masked, "q_len": q_len, "kv_len": kv_len}
    return layer.build_finding("causal alignment", "error", message, evidence, hint)


def check_future(layer: CheckedLayer) -> Finding | None:
    """Check a layer that should be causal for weight on later tokens."""
    mask, token_rows = layer.call.compact_mask, layer.token_rows
    if token_rows.query_offset is None or layer.shape[2] < 2 or not layer.attends_beyond.any():
        return None
    measure = DistanceBands([(1, math.inf)], token_rows.query_offset)
    share = layer.flatten_batch(layer.call.matrix.measure(bands=measure).bands[..., 1])
    counted = layer.rows[:, None] & layer.live_rows & layer.attends_beyond
    share = np.where(np.broadcast_to(counted, share.shape), share, 0.0)
    if not share.max() > ROUNDING:
        return None
    message, has_prefix = "Tokens attend to later tokens.", not mask.stored_arrays and _has_prefix(layer)
    if has_prefix:
        message = (
            "Tokens of a prefix attend to each other and the rest is causal, as in a prefix language model."
        )
    evidence, hint = _describe_shares(share), "Pass is_causal=True or a causal mask to this layer."
    if not has_prefix and not mask.stored_arrays:
        message, offset = _describe_offset(layer, message)
        evidence |= offset
        hint = "Mask key j of row i if j > i, with integer positions: triu(diagonal=1)." if offset else hint
    return layer.build_finding(
        "weight on the future",
        "error" if share.max() > SIGNIFICANT and not has_prefix else "warning",
        message,
        evidence,
        f"{hint} If tokens may attend to later tokens, pass diagnose(causal=False).",
        share > ROUNDING,
    )


def _describe_offset(layer: CheckedLayer, message: str) -> tuple[str, dict[str, Any]]:
    """Describe a mask that is almost triangular: by how many keys rows see too far, and from which row on."""
    _, _, q_len, kv_len = layer.shape
    stop = layer.intervals[1]
    ahead = np.maximum(stop - layer.allowed_stop, 0).max((0, 1))
    rows, largest = np.flatnonzero(ahead), int(ahead.max())
    if largest > max(1, kv_len // 8):
        return message, {}
    evidence = {"extra keys": largest, "first row": int(rows[0])}
    if (ahead[: q_len - largest] == largest).all():
        return f"The mask is shifted: each row i attends to key i + {largest}.", evidence
    exact = {256: "bfloat16", 2048: "float16"}
    name = next((name for limit, name in exact.items() if limit <= rows[0] <= limit + 8), None)
    limit = rows[0] // 8 * 8
    cause = (
        f" Its positions were rounded: {name} represents integers exactly only up to {limit}." if name else ""
    )
    return f"From row {rows[0]} on, rows attend to up to {largest} later keys.{cause}", evidence


def _has_prefix(layer: CheckedLayer) -> bool:
    """Return whether all weight on the future lies in a prefix, shorter than the sequence, that its tokens share."""
    own, (_, stop) = layer.token_rows.own_keys, layer.intervals
    prefix = np.where(stop > own + 1, stop, 0).max(-1, keepdims=True)
    as_expected = np.where(own < prefix, stop == prefix, stop <= own + 1)
    return bool((prefix < layer.shape[3]).all() and as_expected.all())


def check_padding(layer: CheckedLayer) -> Finding | None:
    """Check for weight of tokens on padding."""
    if not (layer.keys & ~layer.is_token).any():
        return None
    is_padding = ~layer.is_token.reshape((*layer.token_rows.keys.shape[:-1], -1))
    mask = dense(torch.as_tensor(is_padding[..., None, :]))
    share = layer.flatten_batch(layer.call.matrix.measure(Mass(mask)).mass)
    share = np.where(layer.rows[:, None], share, 0.0)
    if not share.max() > ROUNDING:
        return None
    return layer.build_finding(
        "weight on padding",
        "error" if share.max() > SIGNIFICANT else "warning",
        "Tokens attend to padding.",
        _describe_shares(share) | {"padding keys": int(is_padding.sum())},
        "Pass attention_mask to the model, and on to this layer (key_padding_mask in nn.MultiheadAttention).",
        share > ROUNDING,
    )


def _describe_shares(share: Any) -> dict[str, Any]:
    affected = share > ROUNDING
    batch, head, row = np.unravel_index(share.argmax(), share.shape)
    largest = f"{share.max():.3g} (batch {batch}, head {head}, row {row})"
    return {"mean share": float(share[affected].mean()), "largest": largest}


def check_empty_rows(layer: CheckedLayer) -> Finding | None:
    """Check for tokens that attend to nothing."""
    empty = ~layer.live_rows & layer.rows[:, None]
    if not empty.any():
        return None
    message = "These tokens attend to no key, so their output is zero or NaN, depending on the kernel."
    if layer.call.compact_mask.uniform_keys is not None:
        message = (
            "Every key of these tokens is masked with the lowest number, so all keys have equal weights, including "
            "padding and later tokens."
        )
    evidence = {"rows": f"{int(empty.any(1).sum())} of {layer.rows.size}"}
    hint = "Let each row attend at least to its own key, including padding rows, and drop their output later."
    return layer.build_finding("fully masked rows", "error", message, evidence, hint, empty)


def check_dropout(layer: CheckedLayer) -> Finding | None:
    """Check for dropout in eval mode."""
    call = layer.call
    if not call.dropout_p or call.training:
        return None
    return layer.build_finding(
        "dropout",
        "error",
        "Dropout is active in eval mode.",
        {"dropout_p": call.dropout_p, "training": False},
        "Pass dropout_p=self.p if self.training else 0.0: F.scaled_dot_product_attention always applies it.",
    )


def check_kernel(layer: CheckedLayer) -> Finding | None:
    """Check for the math kernel, which stores the whole matrix, where a fused kernel could run."""
    batch, heads, q_len, kv_len = layer.shape
    call = layer.call
    if call.kernel != "torch: math" or q_len < 2:
        return None
    item_size = 4 if call.query is None else call.query.element_size()
    nbytes = batch * heads * q_len * kv_len * item_size
    if call.dropout_p:
        hint = "Dropout forces this kernel on CPU. Train with dropout_p=0.0, or on a GPU: its kernels support dropout."
    elif len(call.shape) != 4:
        hint = f"A query of {len(call.shape)} axes forces this kernel. Pass (batch, heads, n, head_dim)."
    elif call.is_broadcast:
        hint = (
            "A broadcast key or value forces this kernel. Pass enable_gqa=True for fewer heads, or expand them to the "
            "query's batch and heads: key.expand(batch, heads, -1, -1)."
        )
    else:
        hint = "A mask that requires a gradient, value_dim ≠ head_dim, or sdpa_kernel(…) forces this kernel."
    return layer.build_finding(
        "slow kernel",
        "warning",
        "F.scaled_dot_product_attention ran the kernel that stores the whole matrix.",
        {"kernel": "math", "bytes stored": f"{nbytes:,}"},
        hint,
    )


# Batches of more entries are compared with their reverse and their rotations only.
MAX_PERMUTED = 4
# Share of the rows that must mask their own key, so that it is not chance.
MOST_ROWS = 0.5


def check_zero_one_mask(layer: CheckedLayer) -> Finding | None:
    """Check for a mask of 0 and 1 that is added to the scores, where it masks nothing."""
    bias = _get_bias(layer)
    if bias is None or bias.requires_grad:
        return None
    ones = bias == 1
    if not bool(ones.any()) or bool(ones.all()) or not bool((ones | (bias == 0)).all()):
        return None
    evidence = {"entries of 1": int(ones.sum()), "entries of 0": int((~ones).sum()), "dtype": str(bias.dtype)}
    return layer.build_finding(
        "mask of 0 and 1",
        "error",
        "The mask has only the numbers 0 and 1. As a float mask it is added to the scores, so no key is masked.",
        evidence,
        "Pass mask.bool(), True = attend, or masked_fill(mask == 0, -inf).",
    )


def check_own_key(layer: CheckedLayer) -> Finding | None:
    """Check a causal layer for tokens that attend to earlier keys, but not to their own."""
    masks_own = layer.misses_own_key
    if masks_own is None or layer.call.compact_mask.stored_arrays or layer.call.is_causal:
        return None
    if not masks_own.mean() > MOST_ROWS:
        return None
    return layer.build_finding(
        "own key masked",
        "error",
        "Tokens attend to earlier tokens, but not to themselves: the causal mask excludes its diagonal.",
        {"rows that mask their own key": int(masks_own.any((0, 1)).sum()), "rows": layer.shape[2]},
        "Mask with triu(diagonal=1), or attend with tril(): the diagonal is the token itself.",
        masks_own,
    )


def check_padding_order(layer: CheckedLayer) -> Finding | None:
    """Check for padding masks that belong to other entries of the batch."""
    is_token = layer.is_token
    if is_token is None or layer.keys.shape != is_token.shape or (layer.keys == is_token).all():
        return None
    entries = list(range(len(is_token)))
    orders: Iterable[Sequence[int]] = permutations(entries)
    if len(entries) > MAX_PERMUTED:
        orders = [entries[::-1], *(entries[shift:] + entries[:shift] for shift in entries[1:])]
    for order in orders:
        if (layer.keys == is_token[list(order)]).all():
            return layer.build_finding(
                "padding mask of another batch entry",
                "error",
                "Each batch entry is masked with the padding of another batch entry.",
                {"mask of entry": ", ".join(map(str, order))},
                "Reorder the mask with its inputs: sort, shuffle or repeat both, and do not transpose the batch.",
                (layer.keys != is_token).any(1)[:, None, None],
            )
    return None


def check_padding_axis(layer: CheckedLayer) -> Finding | None:
    """Check for padding masks on the axis of the heads, which is possible if there are as many heads as entries."""
    is_token, (batch, heads, q_len, kv_len) = layer.is_token, layer.shape
    if is_token is None or batch != heads or q_len != kv_len or (is_token == is_token[:1]).all():
        return None
    # The last token of an entry attends to all its tokens, causal or not.
    last = kv_len - 1 - is_token[:, ::-1].argmax(1)
    weights = layer.call.matrix[..., last, :].reshape(batch, heads, heads, kv_len)
    visible = (
        (weights > 0).diagonal(dim1=1, dim2=2).movedim(-1, 1).cpu().numpy()
    )  # head h, last token of entry h
    if not (visible == is_token).all():
        return None
    return layer.build_finding(
        "padding masked by head",
        "error",
        "Head h masks the padding of batch entry h: the mask has the batch on the axis of the heads.",
        {
            "batch": batch,
            "heads": heads,
            "padding keys of each head": ", ".join(map(str, (~is_token).sum(1))),
        },
        "Pass a mask of shape (batch, 1, q_len, kv_len): mask[:, None], not mask[None].",
    )


def check_bias_direction(layer: CheckedLayer) -> Finding | None:
    """Check for a bias proportional to the distance that favours distant keys, as ALiBi with the wrong sign."""
    bias, offset = _get_bias(layer), layer.token_rows.query_offset
    if (
        bias is None
        or offset is None
        or bias.ndim < 3
        or bias.shape[-2] != layer.shape[2]
        or layer.shape[2] < 4
    ):
        return None
    bias = bias.detach().cpu().double().numpy()
    bias = bias.reshape(-1, *bias.shape[-3:])
    distance = layer.token_rows.own_keys[:, None] - np.arange(layer.shape[3])
    counted = np.isfinite(bias) & (bias > -1e30) & (distance > 0)
    if not counted.any():
        return None
    slopes = np.where(counted, bias, 0).sum((-1, -2)) / np.maximum(
        np.where(counted, distance, 0).sum((-1, -2)), 1
    )
    error = np.where(counted, np.abs(bias - slopes[..., None, None] * distance), 0).max((-1, -2))
    grows = (slopes > 0) & (error <= 1e-2 * slopes)
    if not grows.any():
        return None
    return layer.build_finding(
        "bias grows with distance",
        "error",
        "The bias grows with the distance, so the most distant tokens receive the most weight.",
        {"slopes": ", ".join(f"{slope:.3g}" for slope in slopes[0])},
        "Add −slope · (query position − key position), with positive slopes, as ALiBi does.",
        grows[..., None],
    )


def check_documents(layer: CheckedLayer) -> Finding | None:
    """Check for documents that attend to each other, by the positions of the first lookup that has restarts."""
    lookups = (lookup.positions.cpu().numpy() for lookup in layer.module_hints.lookups)
    return next(filter(None, (_check_restarts(layer, positions) for positions in lookups)), None)


def _check_restarts(layer: CheckedLayer, positions: Any) -> Finding | None:
    """Check a packed sequence by the positions of one pass, (batch or 1, n); a document begins where they restart."""
    batch, _, q_len, kv_len = layer.shape
    if layer.token_rows.query_offset != 0 or q_len != kv_len or positions.shape[-1] != q_len:
        return None
    if len(positions) not in (1, batch) or layer.call.steps > 1:
        return None
    restarts = np.zeros((len(positions), q_len), bool)
    restarts[:, 1:] = (np.diff(positions, axis=-1) < 0) & (positions[:, 1:] == positions[:, :1])
    is_token = layer.keys if layer.is_token is None else layer.is_token
    restarts = np.broadcast_to(restarts, (batch, q_len)) & is_token & np.roll(is_token, 1, 1)
    if not restarts.any() or layer.call.compact_mask.stored_arrays:
        return None
    rows = np.arange(q_len)
    beginning = np.maximum.accumulate(np.where(restarts, rows, 0), 1)[:, None]
    start, stop = layer.intervals
    crosses = (start < beginning) & (start < stop)
    if not crosses.any():
        return None
    return layer.build_finding(
        "documents attend to each other",
        "error",
        "Positions restart, so documents are packed, and tokens attend to earlier documents.",
        {
            "documents": int(restarts.sum(1).max()) + 1,
            "rows that attend to another document": int(crosses.any((0, 1)).sum()),
        },
        "Pass a block-diagonal mask, cu_seqlens, or position_ids without attention_mask to transformers.",
        crosses,
    )


def _get_bias(layer: CheckedLayer) -> Any:
    """Return the array of a bias that was stored as it is; None without one."""
    bias = getattr(layer.call.compact_mask.bias, "array", None)
    return bias if isinstance(bias, torch.Tensor) and bias.is_floating_point() else None


def check_settings(layer: CheckedLayer) -> Iterable[Finding]:
    """Check that a call uses the sinks, the soft cap and the window of its module."""
    return filter(None, (_check_sinks(layer), _check_softcap(layer), _check_windows(layer)))


def _check_sinks(layer: CheckedLayer) -> Finding | None:
    if not layer.settings.has_sinks or layer.call.sink is not None or "sink" in layer.call.kernel:
        return None
    weights = layer.call.weights
    if weights is not None and bool((1 - weights.sum(-1) > 1e-5 + 8 * torch.finfo(weights.dtype).eps).any()):
        return None  # the rows of its own softmax sum to less than 1, so it has a sink
    return layer.build_finding(
        "sinks not used",
        "error",
        "The module has learnt sinks, but the attention function does not use them.",
        {"kernel": layer.call.kernel, "weight of the sinks": 0.0},
        "Load the model with attn_implementation='eager' or another one that supports sinks; SDPA does not.",
    )


def _check_softcap(layer: CheckedLayer) -> Finding | None:
    # If the layer computed its own softmax, its scores are not known.
    if layer.settings.softcap is None or layer.call.softcap is not None or layer.call.weights is not None:
        return None
    return layer.build_finding(
        "softcap missing",
        "error",
        "The configuration has a soft cap, but the scores of this layer are not capped.",
        {"attn_logit_softcapping": layer.settings.softcap, "kernel": layer.call.kernel},
        "Pass softcap to the attention function, or attn_implementation='eager': SDPA does not cap.",
    )


def _check_windows(layer: CheckedLayer) -> Finding | None:
    """Check that the rows of a causal layer attend to as many keys as each statement about its window says."""
    mask, is_self_attention = layer.call.compact_mask, layer.token_rows.query_offset is not None
    if not layer.causal or not is_self_attention or not mask.is_intervals or layer.image_runs:
        return None
    start, stop = layer.intervals
    own = layer.token_rows.own_keys
    width = np.where(start < stop, own + 1 - start, 0)
    first = np.where(layer.keys.any(1), layer.keys.argmax(1), 0)[:, None, None]
    # A window moves by one key from row to row. Where a packed document begins, a row has only its own key.
    moves = (np.diff(start, axis=-1, prepend=start[..., :1]) == 1) & (width > 1)
    for name, window in layer.settings.windows.items():
        expected = np.minimum(own + 1 - first, own.max() + 1 if window is None else window)
        is_narrow = layer.rows[:, None] & (width < expected) & moves
        is_wide = (width > window) if window is not None else np.zeros_like(width, bool)
        if not is_narrow.any() and not is_wide.any():
            continue
        widest = int(width.max(initial=0))
        return layer.build_finding(
            "window not as configured",
            "error",
            "The number of keys that tokens attend to differs from the configuration.",
            {"keys of the widest row": widest, name: "all keys" if window is None else window},
            "Give each layer the mask of its own type. A window of n keys counts the token itself: attend where "
            "query − key < n.",
            is_narrow | is_wide,
        )
    return None


def check_padded_positions(layers: Sequence[CheckedLayer]) -> list[Finding]:
    """Check that tables of positions do not count padding on the left; return at most one finding."""
    lookups = layers[0].module_hints.lookups if layers else []
    for lookup in lookups:
        for layer in layers if lookup.is_table else ():
            finding = _check_lookup(layer, lookup.positions.cpu().numpy(), lookup.module)
            if finding is not None:
                return [finding]
    return []


def _check_lookup(layer: CheckedLayer, positions: Any, module: str) -> Finding | None:
    is_token = layer.is_token
    if is_token is None or layer.token_rows.query_offset != 0 or positions.shape[-1] != is_token.shape[1]:
        return None
    if len(positions) not in (1, len(is_token)):
        return None
    positions = np.broadcast_to(positions, is_token.shape)
    first = is_token.argmax(1)
    columns = np.arange(is_token.shape[1])
    is_consecutive = (positions - positions[:, :1] == columns) | (columns > first[:, None])
    counts = (first > 0) & is_token.any(1) & is_consecutive.all(1)
    if not counts.any():
        return None
    entry = int(np.flatnonzero(counts)[0])
    return layer.build_finding(
        "positions count padding",
        "error",
        "Positions count the padding on the left, so tokens have the positions of a longer text.",
        {
            "padding before the first token": int(first[entry]),
            "position of the first token": int(positions[entry, first[entry]]),
            "looked up by": module,
        },
        "Pass position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), or pad on the right.",
        counts[:, None, None],
    )


# Heads whose entropy is below or above this share of ln(number of visible keys) are saturated, or uniform.
SATURATED, UNIFORM = 0.01, 1 - 1e-4
# Mean weight on one common key, such as the previous token, above which a saturated head is only a note.
COMMON_KEY_WEIGHT = 0.9
# Standard deviation of the scores above which the softmax leaves little but the largest.
LARGE_DEVIATION = 4.0
# Rows from which scores are sampled.
SAMPLED_ROWS = 64


def check_heads(layer: CheckedLayer) -> list[Finding]:
    """Check scale and entropy of the heads of a layer with finite query and key."""
    deviation, largest = _sample_scores(layer)
    scale_finding = _check_scale(layer, deviation, largest)
    # Heads whose scores the scale makes too large are not reported as saturated.
    has_large_scores = (deviation > LARGE_DEVIATION) & (scale_finding is not None)
    entropy_findings = _check_entropy(layer, deviation, has_large_scores)
    return entropy_findings if scale_finding is None else [scale_finding, *entropy_findings]


def _sample_scores(layer: CheckedLayer) -> tuple[Any, Any]:
    """Return standard deviation and largest magnitude of each head's scores, (heads,), over some rows."""
    tokens = np.flatnonzero(layer.rows.any(0))
    heads = layer.shape[1]
    if not len(tokens):
        return np.zeros(heads), np.zeros(heads)
    rows = tokens[np.unique(np.linspace(0, len(tokens) - 1, SAMPLED_ROWS).astype(int))]
    scores = as_numpy(layer.call.matrix.scores[..., rows, :])
    scores = scores.reshape(*layer.shape[:2], -1).swapaxes(0, 1).reshape(heads, -1)
    live = np.isfinite(scores) & (np.abs(scores) < 1e30)
    count = np.maximum(live.sum(1), 1)
    mean = np.where(live, scores, 0).sum(1) / count
    variance = np.where(live, (scores - mean[:, None]) ** 2, 0).sum(1) / count
    return np.sqrt(variance), np.where(live, np.abs(scores), 0).max(1, initial=0.0)


def _check_scale(layer: CheckedLayer, deviation: Any, largest: Any) -> Finding | None:
    """Check the scale by the deviation and the largest score of each head, (heads,)."""
    call, usual_scale = layer.call, layer.usual_scale
    if call.weights is not None:  # the layer computed its own softmax, and its scale is not known
        return None
    is_unscaled = UNSCALED_LAYERS.fullmatch(call.layer_class) is not None
    default, default_name = (
        (1.0, "scale of this class") if is_unscaled else (1 / math.sqrt(call.query.shape[-1]), "1/√head_dim")
    )
    has_large_scores = deviation > LARGE_DEVIATION
    is_unusual = usual_scale is not None and not math.isclose(call.scale, usual_scale, rel_tol=1e-3)
    if not (call.scale > 1.5 * default and has_large_scores.any()) and not is_unusual:
        return None
    evidence: dict[str, Any] = {"scale": call.scale, default_name: default}
    if is_unusual:
        evidence["scale of the other layers"] = usual_scale
    evidence |= {
        "deviation of the scores": float(deviation.max()),
        "largest score": float(largest.max()),
    }
    message = f"Scores are too large: the scale is not {1 if is_unscaled else '1/√head_dim'}."
    if call.scale <= 1.5 * default:
        message = "The scale differs from the scale of the other layers."
    expected = usual_scale if is_unusual else default
    scales = f"scale={expected:.4g}" if is_unscaled else f"scale=None, or {expected:.4g}"
    hint = f"Pass {scales}; scale only once, before or inside the call."
    where = has_large_scores if has_large_scores.any() else ~has_large_scores
    return layer.build_finding("scale", "warning", message, evidence, hint, where[None, :, None])


def _check_entropy(layer: CheckedLayer, deviation: Any, has_large_scores: Any) -> list[Finding]:
    """Check for heads whose rows put all weight on one key, or equal weight on all."""
    common_keys = _find_common_keys(layer)
    measures = {name: WeightAt(keys) for name, keys in common_keys.items()}
    results = layer.call.matrix.measure(entropy=Entropy(), **measures)
    entropy = layer.flatten_batch(results.entropy)
    maximum = np.log(np.maximum(np.broadcast_to(_count_visible_keys(layer), entropy.shape), 1))
    counted = layer.rows[:, None] & (maximum >= math.log(4))
    if not counted.any(axis=(0, 2)).all():
        return []
    findings = []
    factor = np.where(counted, 1.0, 0.0)
    total = factor.sum((0, 2))
    share = np.where(counted, entropy / np.maximum(maximum, 1e-9), 0.0).sum((0, 2)) / total
    mean = (entropy * factor).sum((0, 2)) / total
    saturated = (share < SATURATED) & ~has_large_scores
    for name, keys in common_keys.items():
        # Average over rows that have such a key: the first token has no previous one, which matters in a short text.
        has_key = factor * (keys >= 0).reshape(layer.shape[0], 1, -1)
        weight = layer.flatten_batch(getattr(results, name))
        weight_on_key = (weight * has_key).sum((0, 2)) / np.maximum(has_key.sum((0, 2)), 1)
        heads = saturated & (weight_on_key > COMMON_KEY_WEIGHT)
        if heads.any():
            findings.append(_build_saturated(layer, heads, mean, deviation, name, weight_on_key))
        saturated &= weight_on_key <= COMMON_KEY_WEIGHT
    if saturated.any():
        findings.append(_build_saturated(layer, saturated, mean, deviation))
    uniform = share > UNIFORM
    if uniform.any():
        evidence = {"entropy / ln(keys)": float(share[uniform].min())}
        evidence["deviation of the scores"] = float(deviation[uniform].max())
        message = "All keys have equal weights: the head does not distinguish them."
        hint = "Expected before training. After it, check for zeros in query or key, or a scale that is too small."
        where = uniform[None, :, None]
        findings.append(layer.build_finding("uniform heads", "note", message, evidence, hint, where))
    return findings


def _find_common_keys(layer: CheckedLayer) -> dict[str, Any]:
    """Return the keys that heads of healthy models often attend to exclusively, by name; −1 for rows without one."""
    token_rows = layer.token_rows
    keys = {"first": token_rows.first_key}
    if token_rows.query_offset is not None:
        own = token_rows.own_keys
        following = np.where(own + 1 < layer.shape[3], own + 1, -1)
        keys |= {"previous": own - 1, "own": own, "next": following}
    return {name: np.where(token_rows.rows, positions, -1) for name, positions in keys.items()}


def _build_saturated(
    layer: CheckedLayer, heads: Any, mean: Any, deviation: Any, token: str = "", weight_on_key: Any = None
) -> Finding:
    where, evidence = heads[None, :, None], {"mean entropy": float(mean[heads].max())}
    evidence["deviation of the scores"] = float(deviation[heads].max())
    if token:
        evidence[f"weight on the {token} token"] = float(weight_on_key[heads].min())
        message = f"The heads attend only to the {token} token."
        hint = "Common in trained models; not an error by itself."
        return layer.build_finding("saturated heads", "note", message, evidence, hint, where)
    message = "Nearly every row puts all its weight on one key."
    hint = "Such a row has no gradient. Normalise queries and keys, or lower their learning rate."
    return layer.build_finding("saturated heads", "warning", message, evidence, hint, where)


def _count_visible_keys(layer: CheckedLayer) -> Any:
    """Count the keys that each row attends to: (batch or 1, heads or 1, q_len)."""
    mask = layer.call.compact_mask
    if mask.dense_mask is not None:
        visible = mask.dense_mask.expand(*mask.dense_mask.shape[:-1], layer.shape[3])
        return as_batch_heads(visible.sum(-1).cpu().numpy())
    if mask.visible_counts is not None:
        return as_batch_heads(mask.visible_counts)
    start, stop = layer.intervals
    if mask.visible_keys is None:
        return stop - start
    before = np.cumsum(as_batch_heads(mask.visible_keys), -1)
    before = np.concatenate([np.zeros_like(before[..., :1]), before], -1)
    batch = layer.shape[0]
    start, stop, before = (
        np.broadcast_to(array, (batch, *array.shape[1:])) for array in (start, stop, before)
    )
    lead = np.broadcast_shapes(start.shape[:2], before.shape[:2])
    start, stop, before = (np.broadcast_to(array, (*lead, array.shape[2])) for array in (start, stop, before))
    return np.take_along_axis(before, stop, -1) - np.take_along_axis(before, start, -1)
