"""The faults the kit knows by name, each the definition with one step replaced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.testing.conformance import broken_steps as wrong
from regard.testing.conformance.attention_steps import Steps, scale_of


@dataclass(frozen=True, eq=False)
class Fault:
    """A cause: its name for scripts, its words, what to change, and the ways in which functions have it.

    `meant` is how to describe a function that is so on purpose.
    """

    name: str
    words: str
    hint: str
    variants: tuple[dict[str, Any], ...]
    meant: str = ""

    def applied_to(self, steps: Steps, variant: int) -> Steps | None:
        """The steps with this fault too; None where another fault has already replaced one of them."""
        changes = self.variants[variant]
        taken = any(getattr(steps, name) is not getattr(Steps(), name) for name in changes)
        return None if taken else replace(steps, **changes)


def _fault(
    name: str, words: str, hint: str, *variants: dict[str, Any], meant: str = "", **steps: Any
) -> Fault:
    return Fault(name, words, hint, variants or (steps,), meant)


TILES = (8, 16, 32, 64, 128)

# In the order in which they are preferred where several explain the same: the commonest first.
FAULTS: tuple[Fault, ...] = (
    # -- the scale --
    _fault(
        "scale missing", "the scale is missing", "Multiply the scores by 1/√head_dim before the softmax.",
        scale=wrong.unless_given(lambda call: 1.0),
    ),
    _fault(
        "scale by head_dim", "the scores are divided by head_dim, not by its square root",
        "Multiply by 1/√head_dim.", scale=wrong.unless_given(lambda call: 1 / wrong.sizes(call)["head_dim"]),
    ),
    _fault(
        "scale inverted", "the scores are multiplied by √head_dim where they should be divided by it",
        "Multiply by 1/√head_dim.", scale=wrong.unless_given(lambda call: wrong.sizes(call)["head_dim"] ** 0.5),
    ),
    _fault(
        "scale twice", "the scale is applied twice", "Scale the scores, or the query, or the key: one of them.",
        {"scale": lambda call: scale_of(call) ** 2},
        {"scale": lambda call: scale_of(call) * wrong.sizes(call)["head_dim"] ** -0.5},
    ),
    _fault(
        "scale of another axis", "the scale is taken from another axis than head_dim",
        "Use the last axis of query: 1/√head_dim of one head, whatever value_dim, heads and lengths are.",
        *(
            {"scale": wrong.unless_given(scale)}
            for scale in (
                lambda call: (wrong.sizes(call)["heads"] * wrong.sizes(call)["head_dim"]) ** -0.5,
                lambda call: max(wrong.sizes(call)["value_dim"], 1) ** -0.5,
                lambda call: max(wrong.sizes(call)["kv_len"], 1) ** -0.5,
                lambda call: max(wrong.sizes(call)["q_len"], 1) ** -0.5,
                lambda call: max(wrong.sizes(call)["heads"], 1) ** -0.5,
                lambda call: max(wrong.sizes(call)["batch"], 1) ** -0.5,
            )
        ),
    ),
    _fault(
        "scale ignored", "a scale that is given is ignored", "Use 1/√head_dim only where scale is None.",
        scale=lambda call: wrong.sizes(call)["head_dim"] ** -0.5,
    ),
    _fault(
        "scale 0 as none", "a scale of 0 is taken for none given",
        "Ask `scale is None`; `scale or default` takes 0 for None.",
        scale=lambda call: scale_of(call) if call.scale != 0 else wrong.sizes(call)["head_dim"] ** -0.5,
    ),
    _fault(
        "scale after softmax", "the scale is applied after the softmax", "Scale the scores, not the weights.",
        scale=lambda call: 1.0, after=lambda call, weights, live, allowed: (weights * scale_of(call), live),
    ),
    # -- the mask --
    _fault(
        "mask inverted", "True drops instead of keeps",
        "Hide a key where the mask is False.",
        meant="Or describe the function by mask=\"drop\" if that is its convention.",
        mask=wrong.of_mask(np.logical_not),
    ),
    _fault("mask ignored", "the mask is ignored", "Hide the masked scores.", mask=lambda call: np.True_),
    _fault(
        "mask transposed", "the mask is read transposed: its rows are taken for keys",
        "Row i of the mask is query i, column j is key j.", mask=wrong.of_mask(lambda mask: mask.swapaxes(-1, -2)),
    ),
    _fault(
        "mask of first batch entry", "the mask of the first batch entry serves the whole batch",
        "Index the mask by the batch entry, or broadcast it.",
        mask=wrong.of_mask(lambda mask: mask[:1] if mask.ndim == 4 else mask),
    ),
    _fault(
        "mask of first head", "the mask of the first head serves every head",
        "Index the mask by the head, or broadcast it.",
        mask=wrong.of_mask(lambda mask: mask[:, :1] if mask.ndim == 4 else mask),
    ),
    _fault(
        "mask of first query", "the mask's first row serves every query",
        "Row i of the mask is query i; only a mask of one row serves all.",
        mask=wrong.of_mask(lambda mask: mask[..., :1, :]),
    ),
    _fault(
        "hidden scores 0", "hidden scores are 0, not −inf, and so keep weight",
        "Set hidden scores to −inf before the softmax; exp(0) is 1.",
        hide=lambda scores, allowed: (np.where(allowed, scores, 0), wrong.all_live(scores)),
    ),
    _fault(
        "mask added", "the boolean mask is added to the scores as 0 and 1",
        "A boolean mask says where to put −inf.",
        meant="Or describe the function by mask=\"additive\" if 0 and −inf are meant.",
        hide=lambda scores, allowed: (scores + allowed, wrong.all_live(scores)),
    ),
    _fault(
        "hidden weights not renormalised", "the mask is applied after the softmax, and rows no longer sum to 1",
        "Hide the scores before the softmax.",
        hide=lambda scores, allowed: (scores, wrong.all_live(scores)),
        after=lambda call, weights, live, allowed: (np.where(allowed, weights, 0), allowed),
    ),
    # -- causal --
    _fault(
        "causal corner", "causal is {other} where {asked} was asked",
        "Query i sees key j where j ≤ i (upper left) or j ≤ i + kv_len − q_len (lower right).",
        meant="Or describe the function by causal=\"{other_name}\".",
        causal=wrong.where_causal(wrong.other_corner),
    ),
    _fault(
        "causal ignored", "causal is ignored", "Hide the keys after the query.",
        causal=lambda call: np.True_,
    ),
    _fault(
        "causal sees one ahead", "causal is off by one: a query sees the key after it",
        "kv_idx ≤ q_idx; the diagonal is the last key seen (k=1 of np.triu, diagonal=0 of torch.tril).",
        causal=wrong.where_causal(wrong.shifted_triangle(1)),
    ),
    _fault(
        "causal misses itself", "causal is off by one: a query does not see its own key",
        "kv_idx ≤ q_idx: the diagonal is seen.", causal=wrong.where_causal(wrong.shifted_triangle(-1)),
    ),
    _fault(
        "causal sees the future", "causal hides the past and shows the future", "A query sees kv_idx ≤ q_idx.",
        causal=wrong.where_causal(wrong.future),
    ),
    # -- the softmax --
    _fault(
        "softmax over queries", "softmax runs over queries", "Normalise over keys: axis=-1 of the scores.", axis=-2
    ),
    _fault("softmax over heads", "softmax runs over heads", "Normalise over keys: axis=-1 of the scores.", axis=1),
    _fault("softmax over batch", "softmax runs over the batch", "Normalise over keys: axis=-1.", axis=0),
    _fault(
        "softmax over the matrix", "softmax runs over the whole matrix: rows do not sum to 1",
        "Sum over keys only: axis=-1, keepdims=True.", {"axis": (-2, -1)}, {"axis": (0, 1, 2, 3)},
    ),
    _fault(
        "softmax missing", "the softmax is missing: scores are used as weights", "Normalise the scores over keys.",
        shift=wrong.no_shift, exponential=lambda scores: np.where(scores == -np.inf, 0, scores),
        total=lambda exponentials, axis, base: np.ones((1, 1, 1, 1)),
    ),
    _fault(
        "no shift", "large scores overflow: nothing is subtracted before the exponential",
        "Subtract the row's largest score first.", {"shift": wrong.no_shift},
        {"shift": wrong.no_shift, "total": wrong.nan_for_zero},
    ),
    _fault(
        "one more in the denominator", "the denominator of the softmax has one term too many",
        "Sum over the keys that are there; an attention sink is another function.",
        total=wrong.with_phantoms(lambda kv_len: 1),
    ),
    _fault(
        "padded block counted", "keys that pad the last block are counted with a score of 0",
        "Give them −inf before the exponential.",
        *({"total": wrong.with_phantoms(wrong.padded_to(tile))} for tile in TILES),
    ),
    _fault(
        "last block dropped", "keys after the last whole block are dropped",
        "Round the number of blocks up, and hide what lies beyond kv_len.",
        *({"mask": wrong.whole_blocks(tile)} for tile in TILES),
    ),
    _fault(
        "half precision", "half precision inputs are computed in half precision",
        "Keep scores and sums in float32.", rounded=True,
    ),
    # -- rows that see nothing, NaN --
    _fault(
        "empty rows NaN", "empty rows are NaN",
        "Where a row sees nothing its total is 0: divide by 1 there, so that its weights are 0.",
        empty=lambda scores, kv_len: np.nan,
    ),
    _fault(
        "empty rows attend", "empty rows attend to hidden keys",
        "Hide with −inf, not with a large negative number, and make the weights of an empty row 0.",
        {"empty": lambda scores, kv_len: 1 / max(kv_len, 1)}, {"empty": wrong.softmax_of},
    ),
    _fault(
        "masked key leaks", "a masked NaN leaks, from the key: a mask is added to its score",
        "Select with `where(mask, scores, -inf)`; NaN + −inf is NaN.",
        hide=lambda scores, allowed: (scores + np.where(allowed, 0, -np.inf), allowed),
    ),
    _fault(
        "masked value leaks", "a masked NaN leaks, from the value: it is multiplied by a weight of 0",
        "0 · NaN is NaN: put 0 into values that nobody sees, and sum the rest with what is hidden left out.",
        {"combine": lambda weights, live, value: weights @ value},
    ),
    _fault(
        "live NaN hidden", "a live NaN is hidden", "Replace only the rows that see nothing, not every NaN.",
        {"finish": lambda output: np.nan_to_num(output, posinf=np.inf, neginf=-np.inf)},
        {"finish": np.nan_to_num},
        {"after": lambda call, weights, live, allowed: (np.nan_to_num(weights), live)},
        {"after": wrong.rows_of_nan_dropped},
    ),
    # -- heads, batch, and which array is which --
    _fault(
        "heads mixed", "heads are mixed: memory is reshaped where axes should be exchanged",
        "Split and join heads by a reshape of the packed axis, and move them by a transpose.",
        {"arrange": wrong.on_each(wrong.mixed)},
        {"arrange": wrong.on_each(wrong.mixed), "finish": wrong.unmixed},
        {"arrange": wrong.on_each(wrong.unmixed)},
        {"arrange": wrong.on_each(wrong.unmixed), "finish": wrong.mixed},
        {"finish": wrong.unmixed},
        {"finish": wrong.mixed},
    ),
    _fault(
        "heads interleaved", "heads are split as (d h) where (h d) was asked",
        "Reshape the packed axis to (heads, head_dim) in this order.",
        {"arrange": wrong.on_each(wrong.interleaved)},
        {"arrange": wrong.on_each(wrong.interleaved), "finish": wrong.packed_back},
        {"finish": wrong.packed_back},
        {"finish": wrong.interleaved},
    ),
    _fault(
        "heads reversed", "heads are joined in reverse order", "Head 0 comes first in the packed axis.",
        {"finish": wrong.reversed_heads},
        {"arrange": wrong.on_each(wrong.reversed_heads)},
    ),
    _fault(
        "positions and heads swapped", "attention runs over heads: positions and heads are exchanged",
        "Exchange the axes of positions and heads first, so that scores compare positions.",
        {"arrange": wrong.on_each(wrong.swap_positions_and_heads), "finish": wrong.swap_positions_and_heads},
        meant="Or check the layout; (batch, heads, n, head_dim) is layout=\"b h n d\", PyTorch's inputs to "
        "flash-attn are \"b n h d\".",
    ),
    _fault(
        "groups tiled", "grouped heads are tiled: head h reads key head h mod kv_heads",
        "Repeat each key head in a row (repeat_interleave, np.repeat), not the whole (repeat, np.tile).",
        repeat=wrong.tiled,
    ),
    _fault(
        "first key head", "every head reads the first key head", "Head h reads key head h // (heads / kv_heads).",
        repeat=wrong.first_head,
    ),
    _fault(
        "key and value swapped", "key and value are exchanged", "The arguments are query, key, value.",
        arrange=lambda query, key, value: (query, value, key),
    ),
    _fault(
        "query and key swapped", "query and key are exchanged: scores are transposed", "scores = query @ keyᵀ.",
        arrange=lambda query, key, value: (key, query, value),
    ),
    _fault(
        "weights returned", "the weights are returned, not the output", "The output is weights @ value.",
        {"returned": lambda output, weights: (weights, None)}, {"returned": lambda output, weights: (weights, weights)},
    ),
    _fault(
        "pair swapped", "the weights come first in what is returned",
        "Return (output, weights).", meant="Or describe it: returns=\"weights, output\".",
        returned=lambda output, weights: (weights, output),
    ),
    _fault(
        "weights transposed", "the weights are returned transposed", "Row i of the weights is query i.",
        returned=lambda output, weights: (output, weights.swapaxes(-1, -2)),
    ),
    # -- gradients --
    _fault(
        "gradient without scale", "the scale is missing in the gradients", "query and key get scale · …",
        backward_scale=lambda call: 1.0,
    ),
    _fault(
        "gradient not centred", "the gradient of the softmax lacks its sum",
        "weights · (gradient − Σ weights · gradient), the sum over keys.", backward_centre=False,
    ),
    _fault(
        "gradient stopped", "no gradient reaches query and key", "Do not detach the weights.", backward_through=False
    ),
    _fault(
        "gradient NaN of empty rows", "gradients are NaN where a row is empty",
        "Select before the exponential as well as after it: `where` stops a value, not its gradient.",
        backward_empty=np.nan,
    ),
    _fault(
        "gradient of masked NaN", "a masked NaN leaks into the gradients",
        "Put 0 into keys and values that nobody sees, before the product.",
        {"backward_key": False}, {"backward_value": False}, {"backward_key": False, "backward_value": False},
    ),
)  # fmt: skip
