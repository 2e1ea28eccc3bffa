"""What each variant changes in the steps of `by_hand`, registered by class."""

from __future__ import annotations

import math

import numpy as np

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.by_hand import (
    RowInputs,
    StepsOutputWeights,
    WorkedStep,
    as_text,
    explain_aggregation,
    explain_comparison,
    explain_preparation,
    explain_scaling,
    format_equation,
    format_lines,
    join_terms,
    work_out,
)
from regard.learn.checked import CheckedAttention
from regard.learn.family import variants
from regard.learn.validation import Floats

# -- Variants that change one of the four steps ------------------------------------------------------------


@explain_preparation.register
def _rotate(attention: variants.Rotary, inputs: RowInputs) -> tuple[list[WorkedStep], Floats, Floats]:
    half = attention.d_k // 2
    query = attention.rotate(inputs.Q, inputs.position - inputs.row)[inputs.row]
    key = attention.rotate(inputs.K)
    lines: list[str] = []
    vectors = [("query", inputs.position, inputs.Q[inputs.row], query)]
    vectors += [(token, j, inputs.K[j], key[j]) for j, token in enumerate(inputs.tokens)]
    for name, position, x, rotated in vectors:
        angles = as_text(attention.compute_angles(np.array([position]))[0])
        a, b = as_text(x[:half]), as_text(x[half:])
        lines += [f"   {name}, position {position}: angles {angles}"]
        lines += format_equation(f"{a}·cos({angles}) − {b}·sin({angles})", rotated[:half], "  ")
        lines += format_equation(f"{a}·sin({angles}) + {b}·cos({angles})", rotated[half:], "  ")
    pairs = " and ".join(f"({i}, {i + half})" for i in range(half))
    title = f"0. Rotate the pairs {pairs} by position · frequency"
    return [WorkedStep(title, tuple(lines))], query, key


@explain_scaling.register
def _change_scores(attention: CheckedAttention, raw: Floats, inputs: RowInputs) -> tuple[WorkedStep, Floats]:
    step, scaled = explain_scaling(ScaledDotProductAttention(attention.d_k), raw, inputs)
    title, lines, row = step.title, list(step.lines), inputs.row
    scores = attention.scale_scores(raw)[row]
    if isinstance(attention, variants.Biased):
        bias, relative = attention.compute_bias(*raw.shape)[row], np.arange(len(inputs.K)) - inputs.position
        if isinstance(attention, variants.ALiBi):
            lines += format_equation(f"-{as_text(attention.slope)}·{as_text(abs(relative))}", bias)
        if isinstance(attention, variants.RelativeBias):
            buckets = as_text(attention.compute_buckets(relative))
            lines += [f"   relative positions {as_text(relative)} → buckets {buckets} → bias {as_text(bias)}"]
        lines += format_equation(f"{as_text(scaled)} + {as_text(bias)}", scores)
        title += ", add the bias"
    if isinstance(attention, variants.Softcap):
        cap = as_text(attention.cap)
        lines += format_equation(f"{cap}·tanh({as_text(scaled)} / {cap})", scores)
        title += f", cap at {cap}"
    if isinstance(attention, variants.Masked):
        mask = attention.create_mask(*raw.shape)[row]
        scores = np.where(mask, scores, -np.inf)
        visible = [token for token, attend in zip(inputs.tokens, mask, strict=True) if attend]
        lines += [f"   visible keys: {', '.join(visible) or 'none'}", f"   scores = {as_text(scores)}"]
        title += ", apply the mask"
    return WorkedStep(title, tuple(lines)), scores


# -- Variants with steps of their own ----------------------------------------------------------------------


@work_out.register
def _work_out_heads(attention: variants.MultiHead, inputs: RowInputs) -> StepsOutputWeights:
    Q, K, V = attention.split_inputs(inputs.Q, inputs.K, inputs.V)
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    steps, outputs = [], []
    for h in range(attention.num_heads):
        plain = ScaledDotProductAttention(attention.d_k)
        head_inputs = RowInputs(Q[h], K[h], V[h], inputs.tokens, inputs.row)
        head_steps, head_output, _ = work_out(plain, head_inputs)
        steps += [WorkedStep(f"Head {h}", ()), *head_steps]
        outputs.append(as_text(head_output))
    merged = (f"   {', '.join(outputs)} → {as_text(output[inputs.row])}",)
    return (
        [*steps, WorkedStep("5. Concatenate the heads", merged)],
        output[inputs.row],
        weights[:, inputs.row],
    )


@work_out.register
def _work_out_linear(attention: variants.Linear, inputs: RowInputs) -> StepsOutputWeights:
    row = inputs.row
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    scores = attention.compute_scores(inputs.Q, inputs.K)[row]
    query, key = attention.feature_map(inputs.Q[row]), attention.feature_map(inputs.K)
    features = [["query", f"φ({as_text(inputs.Q[row])}) = {as_text(query)}"]]
    features += [
        [token, f"φ({as_text(x)}) = {as_text(y)}"]
        for token, x, y in zip(inputs.tokens, inputs.K, key, strict=True)
    ]
    quotient = format_equation(join_terms(map(as_text, scores)), scores.sum(), "sum  ")
    left = f"{as_text(scores)} / {as_text(scores.sum())}"
    quotient += format_equation(left, weights[row], "weights  ")
    steps = [
        WorkedStep("0. Apply the feature map φ(x): x + 1 above 0, exp(x) below", format_lines(features)),
        explain_comparison(query, key, scores, inputs.tokens),
        WorkedStep("2. No scaling: no exponential follows", ()),
        WorkedStep("3. Normalise: divide by the sum", tuple(quotient)),
        explain_aggregation(weights[row], inputs.V, output[row]),
        _explain_state(attention, inputs, query, key),
    ]
    return steps, output[row], weights[row]


def _explain_state(attention: variants.Linear, inputs: RowInputs, query: Floats, key: Floats) -> WorkedStep:
    """Explain the other order of the work: sums over the keys first, which all queries share."""
    S, z = attention.compute_state(inputs.K, inputs.V)
    lines = []
    for c, column in enumerate(S):
        terms = [f"{as_text(k[c])}·{as_text(v)}" for k, v in zip(key, inputs.V, strict=True)]
        lines += format_equation(join_terms(terms), column, f"S[{c}]  ")
    lines += format_equation(join_terms(map(as_text, key)), z, "z  ")
    numerator, denominator = query @ S, float(query @ z)
    terms = [f"{as_text(q)}·{as_text(column)}" for q, column in zip(query, S, strict=True)]
    lines += format_equation(join_terms(terms), numerator, "φ(query)·S  ")
    terms = [f"{as_text(q)}·{as_text(total)}" for q, total in zip(query, z, strict=True)]
    lines += format_equation(join_terms(terms), denominator, "φ(query)·z  ")
    output = attention.compute_output_from_state(inputs.Q, (S, z))[inputs.row]
    lines += format_equation(f"{as_text(numerator)} / {as_text(denominator)}", output, "output  ")
    return WorkedStep("Or sum over the keys first, once for all queries", tuple(lines))


@work_out.register
def _work_out_flash(attention: variants.Flash, inputs: RowInputs) -> StepsOutputWeights:
    row = inputs.row
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    raw = attention.compute_scores(inputs.Q, inputs.K)
    scaling, scores = explain_scaling(attention, raw, inputs)
    steps = [explain_comparison(inputs.Q[row], inputs.K, raw[row], inputs.tokens), scaling]
    tiles = list(attention.iter_tiles(inputs.Q, inputs.K, inputs.V))
    for before, tile in zip([None, *tiles], tiles, strict=False):
        steps.append(_explain_tile(tile, before, inputs))

    row_max, row_sum = float(tiles[-1].row_max[row, 0]), float(tiles[-1].row_sum[row, 0])
    quotient = f"{as_text(tiles[-1].weighted_sum[row])} / {as_text(row_sum)}"
    lines = format_equation(quotient, output[row], "output  ")
    steps.append(WorkedStep("4. Divide once, at the end", tuple(lines)))
    lse = row_max + math.log(row_sum)
    lines = format_equation(f"{as_text(row_max)} + log({as_text(row_sum)})", lse, "lse  ")
    lines += format_equation(f"exp({as_text(scores)} − {as_text(lse)})", weights[row], "weights  ")
    steps.append(WorkedStep("Recompute any weight from the log-sum-exp (lse)", tuple(lines)))
    return steps, output[row], weights[row]


def _explain_tile(
    tile: variants.TileState, before: variants.TileState | None, inputs: RowInputs
) -> WorkedStep:
    """Explain the update of the running maximum and sums by one tile of keys; `before` is the state before it."""
    row = inputs.row
    scores, exponentials = tile.scores[row], tile.exponentials[row]
    row_max, rescale = tile.row_max[row, 0], tile.rescale[row, 0]
    lines = [f"   largest score so far: {as_text(row_max)}"]
    lines += format_equation(f"exp({as_text(scores)} − {as_text(row_max)})", exponentials)
    totals = [as_text(x) for x in exponentials]
    value = inputs.V[tile.start : tile.stop]
    sums = [f"{as_text(x)}·{as_text(v)}" for x, v in zip(exponentials, value, strict=True)]
    if before is not None:
        old_max = as_text(before.row_max[row, 0])
        lines += format_equation(f"exp({old_max} − {as_text(row_max)})", rescale, "rescale  ")
        totals = [f"{as_text(before.row_sum[row, 0])}·{as_text(rescale)}", *totals]
        sums = [f"{as_text(before.weighted_sum[row])}·{as_text(rescale)}", *sums]
    lines += format_equation(join_terms(totals), tile.row_sum[row, 0], "sum  ")
    lines += format_equation(join_terms(sums), tile.weighted_sum[row], "weighted sum  ")
    return WorkedStep(f"3. Tile of {', '.join(inputs.tokens[tile.start : tile.stop])}", tuple(lines))


@work_out.register
def _work_out_cached(attention: variants.Cached, inputs: RowInputs) -> StepsOutputWeights:
    cached = inputs.position + 1  # the number of keys when this query arrives
    if cached < 1:
        return work_out(variants.Causal(attention.d_k), inputs)
    tokens = inputs.tokens[:cached]
    prefix = RowInputs(inputs.Q[: inputs.row + 1], inputs.K[:cached], inputs.V[:cached], tokens, inputs.row)
    steps, output, weights = work_out(ScaledDotProductAttention(attention.d_k), prefix)
    earlier = f"   already cached: {', '.join(tokens[:-1]) or 'nothing'}"
    append = WorkedStep(f"0. Append the key and value of {tokens[-1]}", (earlier,))
    return [append, *steps], output, np.append(weights, np.zeros(len(inputs.K) - cached))
