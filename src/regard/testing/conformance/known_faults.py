"""The faults that the kit can name, each the definition with one or two steps replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.testing.conformance.attention_steps import (
    Align,
    AttentionCall,
    Steps,
    build_causal_mask,
    get_causal_mask,
    get_mask,
    repeat_kv_heads,
    resolve_scale,
)

# -- Scale ----------------------------------------------------------------------------------------------------


def replace_default_scale(default: Callable[[AttentionCall], float]) -> Callable[[AttentionCall], float]:
    """Return a scale step that is wrong only if the call passes no scale."""
    return lambda call: default(call) if call.scale is None else call.scale


# -- Heads and positions --------------------------------------------------------------------------------------


def read_as_heads_first(array: Any) -> Any:
    """Read memory that holds (n, heads) as (heads, n)."""
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, heads, length, width)


def read_as_positions_first(array: Any) -> Any:
    """Read memory that holds (heads, n) as (n, heads)."""
    batch, heads, length, width = array.shape
    return array.reshape(batch, length, heads, width).swapaxes(1, 2)


def split_heads_last(array: Any) -> Any:
    """Split heads from a packed axis as (d h), although it holds (h d)."""
    batch, heads, length, width = array.shape
    packed = array.swapaxes(1, 2).reshape(batch, length, width, heads)
    return packed.transpose(0, 3, 1, 2)


def join_heads_last(array: Any) -> Any:
    """Invert `split_heads_last`."""
    batch, heads, length, width = array.shape
    packed = array.transpose(0, 2, 3, 1).reshape(batch, length, heads, width)
    return packed.swapaxes(1, 2)


def swap_positions_and_heads(array: Any) -> Any:
    """Swap the axes of positions and heads."""
    return array.swapaxes(1, 2)


def apply_to_each(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step that changes query, key and value alike."""
    return lambda query, key, value: (change(query), change(key), change(value))


def tile_kv_heads(array: Any, heads: int) -> Any:
    """Repeat the key heads as a whole, so that head h reads key head h mod kv_heads."""
    return np.tile(array, (1, heads // array.shape[1], 1, 1)) if array.shape[1] else array


# -- Mask and causal ------------------------------------------------------------------------------------------


def change_mask(change: Callable[[Any], Any]) -> Callable[[AttentionCall], Any]:
    """Return a mask step that changes the mask, if the call has one."""
    return lambda call: np.True_ if call.mask is None else change(call.mask)


def if_causal(build: Callable[[AttentionCall], Any]) -> Callable[[AttentionCall], Any]:
    """Return a causal step that builds its mask only if the call is causal."""
    return lambda call: np.True_ if call.causal is None else build(call)


def shift_diagonal(by: int) -> Callable[[AttentionCall], Any]:
    """Return a causal step whose diagonal is off by `by` keys."""

    def build(call: AttentionCall) -> Any:
        q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
        return np.tri(q_len, kv_len, by + (kv_len - q_len if call.causal == "lower_right" else 0), dtype=bool)

    return build


def use_other_corner(call: AttentionCall) -> Any:
    """Build the causal mask of the other alignment."""
    other: Align = "lower_right" if call.causal == "upper_left" else "upper_left"
    return build_causal_mask(call.query.shape[-2], call.key.shape[-2], other)


def always_causal(align: Align) -> Callable[[AttentionCall], Any]:
    """Return a causal step that masks in every call, by `align` if the call names no corner."""
    return lambda call: build_causal_mask(call.query.shape[-2], call.key.shape[-2], call.causal or align)


def show_future(call: AttentionCall) -> Any:
    """Build a causal mask that masks the past instead of the future."""
    q_len, kv_len = call.query.shape[-2], call.key.shape[-2]
    return build_causal_mask(kv_len, q_len, call.causal).T


def keep_whole_blocks(tile: int) -> Callable[[AttentionCall], Any]:
    """Return a mask step that drops the keys after the last whole block; a shorter sequence is one block."""

    def build(call: AttentionCall) -> Any:
        kv_len = call.key.shape[-2]
        kept = np.arange(kv_len) < (kv_len // tile * tile if kv_len >= tile else kv_len)
        return kept & (np.True_ if call.mask is None else call.mask)

    return build


# -- Softmax --------------------------------------------------------------------------------------------------


def softmax_unmasked(scores: Any, kv_len: int) -> Any:
    """Compute the weights of an empty row from its unmasked scores."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(-1, keepdims=True)


def count_padding(tile: int) -> Callable[[int], int]:
    """Return a function from kv_len to the number of keys that pad its last block."""
    return lambda kv_len: -kv_len % tile


def count_extra_keys(count: Callable[[int], int]) -> Callable[..., Any]:
    """Return a denominator with `count(kv_len)` extra keys of score 0."""
    return lambda exponentials, axis, base: (
        exponentials.sum(axis=axis, keepdims=True) + count(exponentials.shape[-1]) * np.exp(-base)
    )


def skip_shift(scores: Any, axis: Any) -> Any:
    """Subtract nothing before the exponential."""
    return np.zeros((1, 1, 1, 1))


def replace_zero_by_nan(exponentials: Any, axis: Any, base: Any) -> Any:
    """Return a denominator that is NaN if the sum underflows to 0."""
    total = exponentials.sum(axis=axis, keepdims=True)
    return np.where(total == 0, np.nan, total)


def drop_nan_rows(call: AttentionCall, weights: Any, live: Any, allowed: Any) -> tuple[Any, Any]:
    """Return zeros for a row whose scores are all NaN, as a running maximum that skips NaN does."""
    scores = call.query @ repeat_kv_heads(call.key, call.query.shape[1]).swapaxes(-1, -2)
    dropped = allowed.any(-1, keepdims=True) & (np.isnan(scores) | ~allowed).all(-1, keepdims=True)
    return np.where(dropped, 0, weights), live & ~dropped


@dataclass(frozen=True, eq=False)
class Fault:
    """A named cause of wrong results.

    Args:
        name: The name for scripts.
        message: What is wrong.
        hint: How to fix the problem.
        variants: The ways in which functions have the fault, each as the `Steps` fields that it replaces.
        if_intended: How to describe the function to the kit if the behaviour is intended.
    """

    name: str
    message: str
    hint: str
    variants: tuple[dict[str, Any], ...]
    if_intended: str = ""

    def apply_to(self, steps: Steps, variant: int) -> Steps | None:
        """Return the steps with this fault added; None if another fault has already replaced one of them."""
        changes = self.variants[variant]
        conflicts = any(getattr(steps, name) is not getattr(Steps(), name) for name in changes)
        return None if conflicts else replace(steps, **changes)


def _fault(
    name: str, message: str, hint: str, *variants: dict[str, Any], if_intended: str = "", **steps: Any
) -> Fault:
    """Build a fault from its variants, or from keyword arguments if it has one variant only."""
    return Fault(name, message, hint, variants or (steps,), if_intended)


TILES = (8, 16, 32, 64, 128)

# If several explain the same results, the first one is preferred: the most common come first.
FAULTS: tuple[Fault, ...] = (
    # -- Scale --
    _fault(
        "scale missing", "The scale is missing.", "Multiply the scores by 1/√head_dim before the softmax.",
        scale=replace_default_scale(lambda call: 1.0),
    ),
    _fault(
        "scale by head_dim", "The scores are divided by head_dim, not by its square root.",
        "Multiply by 1/√head_dim.", scale=replace_default_scale(lambda call: 1 / call.sizes["head_dim"]),
    ),
    _fault(
        "scale inverted", "The scores are multiplied by √head_dim instead of divided by it.",
        "Multiply by 1/√head_dim.", scale=replace_default_scale(lambda call: call.sizes["head_dim"] ** 0.5),
    ),
    _fault(
        "scale twice", "The scale is applied twice.", "Scale only the scores, or only the query, or only the key.",
        {"scale": lambda call: resolve_scale(call) ** 2},
        {"scale": lambda call: resolve_scale(call) * call.sizes["head_dim"] ** -0.5},
        {"scale": lambda call: (1 if call.scale is None else call.scale) * call.sizes["head_dim"] ** -0.5},
    ),
    _fault(
        "scale of another axis", "The scale is computed from a different axis than head_dim.",
        "Use 1/√head_dim, the last axis of the query; value_dim, heads and lengths do not matter.",
        *(
            {"scale": replace_default_scale(scale)}
            for scale in (
                lambda call: (call.sizes["heads"] * call.sizes["head_dim"]) ** -0.5,
                lambda call: (call.sizes["kv_heads"] * call.sizes["head_dim"]) ** -0.5,
                lambda call: max(call.sizes["value_dim"], 1) ** -0.5,
                lambda call: max(call.sizes["kv_len"], 1) ** -0.5,
                lambda call: max(call.sizes["q_len"], 1) ** -0.5,
                lambda call: max(call.sizes["heads"], 1) ** -0.5,
                lambda call: max(call.sizes["batch"], 1) ** -0.5,
            )
        ),
    ),
    _fault(
        "scale ignored", "The scale argument is ignored.", "Use 1/√head_dim only if scale is None.",
        scale=lambda call: call.sizes["head_dim"] ** -0.5,
    ),
    _fault(
        "scale 0 ignored", "A scale of 0 is replaced with the default.",
        "Test `scale is None`; `scale or default` treats 0 like None.",
        scale=lambda call: resolve_scale(call) if call.scale != 0 else call.sizes["head_dim"] ** -0.5,
    ),
    _fault(
        "scale after softmax", "The scale is applied after the softmax.", "Scale the scores, not the weights.",
        scale=lambda call: 1.0,
        after_softmax=lambda call, weights, live, allowed: (weights * resolve_scale(call), live),
    ),
    # -- Mask --
    _fault(
        "mask inverted", "The mask is inverted: True drops a key.",
        "Mask a key where the mask is False.",
        if_intended="If True = ignore is its convention, describe it: mask=\"drop\".",
        mask=change_mask(np.logical_not),
    ),
    _fault("mask ignored", "The mask is ignored.", "Set masked scores to −inf.", mask=lambda call: np.True_),
    _fault(
        "mask transposed", "The mask is read transposed: its rows are used as keys.",
        "Row i of the mask is query i, column j is key j.", mask=change_mask(lambda mask: mask.swapaxes(-1, -2)),
    ),
    _fault(
        "mask of first batch entry", "The mask of the first batch entry is used for the whole batch.",
        "Index the mask by the batch entry, or broadcast it.",
        mask=change_mask(lambda mask: mask[:1] if mask.ndim == 4 else mask),
    ),
    _fault(
        "mask of first head", "The mask of the first head is used for every head.",
        "Index the mask by the head, or broadcast it.",
        mask=change_mask(lambda mask: mask[:, :1] if mask.ndim == 4 else mask),
    ),
    _fault(
        "mask of first query", "The first row of the mask is used for every query.",
        "Row i of the mask is query i; only a mask with one row applies to all.",
        mask=change_mask(lambda mask: mask[..., :1, :]),
    ),
    _fault(
        "masked scores 0", "Masked scores are 0 instead of −inf, so masked keys keep weight.",
        "Set masked scores to −inf before the softmax; exp(0) is 1.",
        mask_scores=lambda scores, allowed: (np.where(allowed, scores, 0), np.ones_like(scores, bool)),
    ),
    _fault(
        "mask added", "The boolean mask is added to the scores as 0 and 1.",
        "Set scores to −inf where a boolean mask is False.",
        if_intended="If it expects 0 and −inf, describe it: mask=\"additive\".",
        mask_scores=lambda scores, allowed: (scores + allowed, np.ones_like(scores, bool)),
    ),
    _fault(
        "masked weights not renormalised", "The mask is applied after the softmax, so rows no longer sum to 1.",
        "Mask the scores before the softmax.",
        mask_scores=lambda scores, allowed: (scores, np.ones_like(scores, bool)),
        after_softmax=lambda call, weights, live, allowed: (np.where(allowed, weights, 0), allowed),
    ),
    # -- Causal --
    _fault(
        "causal corner", "Causal is aligned {other}, expected {expected}.",
        "Query i attends to key j if j ≤ i (upper left) or j ≤ i + kv_len − q_len (lower right).",
        if_intended="If that is its convention, describe it: causal=\"{other_name}\".",
        causal=if_causal(use_other_corner),
    ),
    _fault(
        "causal ignored", "Causal is ignored.", "Mask the keys after the query.",
        causal=lambda call: np.True_,
    ),
    _fault(
        "causal sees one ahead", "Causal is off by one: a query attends to the key after it.",
        "Attend if kv_idx ≤ q_idx; the diagonal is the last visible key (k=1 of np.triu, diagonal=0 of torch.tril).",
        causal=if_causal(shift_diagonal(1)),
    ),
    _fault(
        "causal misses itself", "Causal is off by one: a query does not attend to its own key.",
        "Attend if kv_idx ≤ q_idx: the diagonal is visible.", causal=if_causal(shift_diagonal(-1)),
    ),
    _fault(
        "causal sees the future", "Causal masks earlier keys and attends to later ones.", "Attend if kv_idx ≤ q_idx.",
        causal=if_causal(show_future),
    ),
    _fault(
        "causal always", "Causal is applied to calls that are not causal.", "Mask later keys only in causal calls.",
        *({"causal": always_causal(align)} for align in ("lower_right", "upper_left")),
    ),
    _fault(
        "causal ignored if masked", "Causal is ignored if the call has a mask.", "Combine both: mask & causal mask.",
        causal=lambda call: np.True_ if call.mask is not None else get_causal_mask(call),
    ),
    _fault(
        "mask ignored if causal", "The mask is ignored if the call is causal.", "Combine both: mask & causal mask.",
        mask=lambda call: np.True_ if call.causal is not None else get_mask(call),
    ),
    # -- Softmax --
    _fault(
        "softmax over queries", "Softmax runs over queries.", "Normalise over keys: axis=-1 of the scores.", axis=-2
    ),
    _fault("softmax over heads", "Softmax runs over heads.", "Normalise over keys: axis=-1 of the scores.", axis=1),
    _fault("softmax over batch", "Softmax runs over the batch.", "Normalise over keys: axis=-1.", axis=0),
    _fault(
        "softmax over the matrix", "Softmax runs over the whole matrix: rows do not sum to 1.",
        "Sum over keys only: axis=-1, keepdims=True.", {"axis": (-2, -1)}, {"axis": (0, 1, 2, 3)},
    ),
    _fault(
        "softmax missing", "The softmax is missing: scores are used as weights.", "Normalise the scores over keys.",
        shift=skip_shift, exponential=lambda scores: np.where(scores == -np.inf, 0, scores),
        denominator=lambda exponentials, axis, base: np.ones((1, 1, 1, 1)),
    ),
    _fault(
        "softmax in base 2", "The softmax raises 2 to the scores, not e.",
        "Multiply the scores by log2(e) before exp2.", exponential=np.exp2,
    ),
    _fault(
        "no shift", "Large scores overflow: the maximum is not subtracted before the exponential.",
        "Subtract the row's largest score first.", {"shift": skip_shift},
        {"shift": skip_shift, "denominator": replace_zero_by_nan},
    ),
    _fault(
        "one more in the denominator", "The denominator of the softmax has an extra term.",
        "Sum over the existing keys only; an attention sink is a different function.",
        denominator=count_extra_keys(lambda kv_len: 1),
    ),
    _fault(
        "padded block counted", "Keys that pad the last block are counted with a score of 0.",
        "Set their scores to −inf before the exponential.",
        *({"denominator": count_extra_keys(count_padding(tile))} for tile in TILES),
    ),
    _fault(
        "last block dropped", "Keys after the last whole block are dropped.",
        "Round the number of blocks up, and mask the keys beyond kv_len.",
        *({"mask": keep_whole_blocks(tile)} for tile in TILES),
    ),
    _fault(
        "half precision", "Scores and sums of half-precision inputs are computed in half precision.",
        "Keep scores and sums in float32.", half_precision=True,
    ),
    # -- Empty rows and NaN --
    _fault(
        "empty rows NaN", "Empty rows are NaN.",
        "If a row has no visible key, its sum is 0: divide by 1 there, so that its weights are 0.",
        empty_row=lambda scores, kv_len: np.nan,
    ),
    _fault(
        "empty rows attend", "Empty rows attend to masked keys.",
        "Mask with −inf, not with a large negative number, and set the weights of an empty row to 0.",
        {"empty_row": lambda scores, kv_len: 1 / max(kv_len, 1)}, {"empty_row": softmax_unmasked},
    ),
    _fault(
        "masked key leaks", "A masked NaN leaks from the key: the mask is added to its score.",
        "Select with `where(mask, scores, -inf)`; NaN + −inf is NaN.",
        mask_scores=lambda scores, allowed: (scores + np.where(allowed, 0, -np.inf), allowed),
    ),
    _fault(
        "masked value leaks", "A masked NaN leaks from the value: 0 · NaN is NaN.",
        "Write 0 into values that no query attends to, and sum only over unmasked entries.",
        {"combine": lambda weights, live, value: weights @ value},
    ),
    _fault(
        "live NaN lost", "A live NaN is replaced with a number.", "Replace only empty rows, not every NaN.",
        {"finish": lambda output: np.nan_to_num(output, posinf=np.inf, neginf=-np.inf)},
        {"finish": np.nan_to_num},
        {"after_softmax": lambda call, weights, live, allowed: (np.nan_to_num(weights), live)},
        {"after_softmax": drop_nan_rows},
    ),
    # -- Heads, batch, and the order of arguments --
    _fault(
        "heads mixed", "Heads are mixed: axes are reshaped instead of transposed.",
        "Split and merge heads by reshaping the packed axis, and move the axis with a transpose.",
        {"arrange": apply_to_each(read_as_heads_first)},
        {"arrange": apply_to_each(read_as_heads_first), "finish": read_as_positions_first},
        {"arrange": apply_to_each(read_as_positions_first)},
        {"arrange": apply_to_each(read_as_positions_first), "finish": read_as_heads_first},
        {"finish": read_as_positions_first},
        {"finish": read_as_heads_first},
    ),
    _fault(
        "heads interleaved", "Heads are split as (d h), expected (h d).",
        "Reshape the packed axis to (heads, head_dim) in this order.",
        {"arrange": apply_to_each(split_heads_last)},
        {"arrange": apply_to_each(split_heads_last), "finish": join_heads_last},
        {"finish": join_heads_last},
        {"finish": split_heads_last},
    ),
    _fault(
        "heads reversed", "Heads are joined in reverse order.", "Put head 0 first in the packed axis.",
        {"finish": lambda output: output[:, ::-1]},
        {"arrange": apply_to_each(lambda array: array[:, ::-1])},
    ),
    _fault(
        "positions and heads swapped", "Attention runs over heads: positions and heads are swapped.",
        "Transpose positions and heads first, so that scores compare positions.",
        {"arrange": apply_to_each(swap_positions_and_heads), "finish": swap_positions_and_heads},
        if_intended="Or check the layout: (batch, heads, n, head_dim) is layout=\"b h n d\", the inputs of flash-attn "
        "are \"b n h d\".",
    ),
    _fault(
        "groups tiled", "Grouped heads are tiled: head h reads key head h mod kv_heads.",
        "Repeat each key head (repeat_interleave, np.repeat), not the whole array (repeat, np.tile).",
        repeat_heads=tile_kv_heads,
    ),
    _fault(
        "first key head", "Every head reads the first key head.", "Head h reads key head h // (heads / kv_heads).",
        repeat_heads=lambda array, heads: np.repeat(array[:, :1], heads, axis=1),
    ),
    _fault(
        "key and value swapped", "Key and value are swapped.", "The order of arguments is query, key, value.",
        arrange=lambda query, key, value: (query, value, key),
    ),
    _fault(
        "query and key swapped", "Query and key are swapped: scores are transposed.", "scores = query @ keyᵀ.",
        arrange=lambda query, key, value: (key, query, value),
    ),
    _fault(
        "weights returned", "The weights are returned, not the output.", "The output is weights @ value.",
        {"return_value": lambda output, weights: (weights, None)},
        {"return_value": lambda output, weights: (weights, weights)},
    ),
    _fault(
        "pair swapped", "The weights come first in the returned pair.",
        "Return (output, weights).", if_intended="If that is its convention, describe it: returns=\"weights, output\".",
        return_value=lambda output, weights: (weights, output),
    ),
    _fault(
        "weights transposed", "The weights are returned transposed.", "Row i of the weights is query i.",
        return_value=lambda output, weights: (output, weights.swapaxes(-1, -2)),
    ),
    # -- Gradients --
    _fault(
        "gradient without scale", "The scale is missing in the gradients.",
        "Multiply the gradients of query and key by the scale.",
        backward_scale=lambda call: 1.0,
    ),
    _fault(
        "gradient not centred", "The gradient of the softmax lacks the subtracted sum.",
        "Compute weights · (gradient − Σ weights · gradient), with the sum over keys.", backward_centre=False,
    ),
    _fault(
        "gradient stopped", "No gradient reaches query and key.", "Do not detach the weights.",
        backward_reaches=("value",),
    ),
    *(
        _fault(
            f"gradient of {name} stopped", f"No gradient reaches {name}.",
            f"Do not detach {name}, or anything computed from it.",
            backward_reaches=tuple(other for other in ("query", "key", "value") if other != name),
        )
        for name in ("query", "key", "value")
    ),
    _fault(
        "gradient NaN of empty rows", "Gradients are NaN in empty rows.",
        "Use `where` both before and after the exponential: it blocks the value, but not its gradient.",
        backward_empty=np.nan,
    ),
    _fault(
        "gradient of masked NaN", "A masked NaN leaks into the gradients.",
        "Write 0 into keys and values that no query attends to, before the product.",
        {"backward_key": False}, {"backward_value": False}, {"backward_key": False, "backward_value": False},
    ),
)  # fmt: skip
