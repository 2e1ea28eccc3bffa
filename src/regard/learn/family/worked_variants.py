"""What each variant changes in the steps by hand of `worked_row`, registered by class."""

from __future__ import annotations

import math

import numpy as np

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.family.variants import (
    ALiBi,
    Biased,
    Cached,
    Causal,
    Flash,
    Linear,
    Masked,
    MultiHead,
    RelativeBias,
    Rotary,
    Sink,
    Softcap,
    TileState,
)
from regard.learn.family.worked_row import (
    RowInputs,
    StepsOutputWeights,
    WorkedStep,
    explain_aggregation,
    explain_comparison,
    explain_normalisation,
    explain_preparation,
    explain_scaling,
    format_equation,
    format_lines,
    join_terms,
    work_out,
)
from regard.learn.validation import Floats
from regard.render.text import format_number, format_vector

# -- Variants that change one of the four steps ------------------------------------------------------------


@explain_preparation.register
def _rotate(attention: Rotary, inputs: RowInputs) -> tuple[list[WorkedStep], Floats, Floats]:
    half = attention.d_k // 2
    query = attention.rotate(inputs.Q, inputs.position - inputs.row)[inputs.row]
    key = attention.rotate(inputs.K)
    lines: list[str] = []
    vectors = [("query", inputs.position, inputs.Q[inputs.row], query)]
    vectors += [(token, j, inputs.K[j], key[j]) for j, token in enumerate(inputs.tokens)]
    for name, position, x, rotated in vectors:
        angles = format_vector(attention.compute_angles(np.array([position]))[0])
        a, b = format_vector(x[:half]), format_vector(x[half:])
        lines += [f"   {name}, position {position}: angles {angles}"]
        lines += format_equation(
            f"{a}·cos({angles}) − {b}·sin({angles})", format_vector(rotated[:half]), "  "
        )
        lines += format_equation(
            f"{a}·sin({angles}) + {b}·cos({angles})", format_vector(rotated[half:]), "  "
        )
    pairs = " and ".join(f"({i}, {i + half})" for i in range(half))
    title = f"0. Rotate the pairs {pairs} by position · frequency"
    return [WorkedStep(title, tuple(lines))], query, key


@explain_scaling.register
def _add_bias(attention: Biased, raw: Floats, inputs: RowInputs) -> tuple[WorkedStep, Floats]:
    step, scaled = _scale(attention, raw, inputs)
    scores, bias = attention.scale_scores(raw)[inputs.row], attention.compute_bias(*raw.shape)[inputs.row]
    lines = _explain_bias(attention, bias, inputs)
    lines += format_equation(f"{format_vector(scaled)} + {format_vector(bias)}", format_vector(scores))
    return WorkedStep(f"{step.title}, add the bias", (*step.lines, *lines)), scores


@explain_scaling.register
def _cap(attention: Softcap, raw: Floats, inputs: RowInputs) -> tuple[WorkedStep, Floats]:
    step, scaled = _scale(attention, raw, inputs)
    scores, cap = attention.scale_scores(raw)[inputs.row], format_number(attention.cap)
    lines = format_equation(f"{cap}·tanh({format_vector(scaled)} / {cap})", format_vector(scores))
    return WorkedStep(f"{step.title}, cap at {cap}", (*step.lines, *lines)), scores


@explain_scaling.register
def _mask(attention: Masked, raw: Floats, inputs: RowInputs) -> tuple[WorkedStep, Floats]:
    step, scaled = _scale(attention, raw, inputs)
    mask = attention.create_mask(*raw.shape)[inputs.row]
    scores = np.where(mask, scaled, -np.inf)
    visible = [token for token, attend in zip(inputs.tokens, mask, strict=True) if attend]
    lines = [f"   visible keys: {', '.join(visible) or 'none'}", f"   scores = {format_vector(scores)}"]
    return WorkedStep(f"{step.title}, apply the mask", (*step.lines, *lines)), scores


def _scale(attention: ScaledDotProductAttention, raw: Floats, inputs: RowInputs) -> tuple[WorkedStep, Floats]:
    """Explain the division by √d_k alone."""
    return explain_scaling(ScaledDotProductAttention(attention.d_k), raw, inputs)


def _explain_bias(attention: Biased, bias: Floats, inputs: RowInputs) -> list[str]:
    """Explain where the bias of this row comes from."""
    relative = np.arange(len(inputs.K)) - inputs.position
    if isinstance(attention, ALiBi):
        return format_equation(
            f"-{format_number(attention.slope)}·{format_vector(abs(relative))}", format_vector(bias)
        )
    if isinstance(attention, RelativeBias):
        buckets = format_vector(attention.compute_buckets(relative))
        return [
            f"   relative positions {format_vector(relative)} → buckets {buckets} → bias {format_vector(bias)}"
        ]
    return []


@explain_normalisation.register
def _add_sink(attention: Sink, scores: Floats, weights: Floats) -> WorkedStep:
    shift = max(scores.max(initial=-np.inf), attention.sink)
    if shift == -np.inf:
        return explain_normalisation(ScaledDotProductAttention(attention.d_k), scores, weights)
    exponentials, sink = np.exp(scores - shift), np.exp(attention.sink - shift)
    lines = format_equation(
        f"exp({format_vector(scores)} − {format_number(shift)})", format_vector(exponentials)
    )
    lines += format_equation(
        f"exp({format_number(attention.sink)} − {format_number(shift)})", format_number(sink), "sink  "
    )
    terms, total = (
        [*(format_number(x) for x in exponentials if x > 0), format_number(sink)],
        exponentials.sum() + sink,
    )
    lines += format_equation(join_terms(terms), format_number(total), "sum  ")
    lines += format_equation(
        f"{format_vector(exponentials)} / {format_number(total)}", format_vector(weights), "weights  "
    )
    title = "3. Normalise: exponentials, divided by their sum with the sink included"
    return WorkedStep(title, tuple(lines))


# -- Variants with steps of their own ----------------------------------------------------------------------


@work_out.register
def _work_out_heads(attention: MultiHead, inputs: RowInputs) -> StepsOutputWeights:
    Q, K, V = attention.split_inputs(inputs.Q, inputs.K, inputs.V)
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    steps, outputs = [], []
    for h in range(attention.num_heads):
        plain = ScaledDotProductAttention(attention.d_k)
        head_inputs = RowInputs(Q[h], K[h], V[h], inputs.tokens, inputs.row)
        head_steps, head_output, _ = work_out(plain, head_inputs)
        steps += [WorkedStep(f"Head {h}", ()), *head_steps]
        outputs.append(format_vector(head_output))
    merged = (f"   {', '.join(outputs)} → {format_vector(output[inputs.row])}",)
    return (
        [*steps, WorkedStep("5. Concatenate the heads", merged)],
        output[inputs.row],
        weights[:, inputs.row],
    )


@work_out.register
def _work_out_linear(attention: Linear, inputs: RowInputs) -> StepsOutputWeights:
    row = inputs.row
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    scores = attention.compute_scores(inputs.Q, inputs.K)[row]
    query, key = attention.feature_map(inputs.Q[row]), attention.feature_map(inputs.K)
    features = [["query", f"φ({format_vector(inputs.Q[row])}) = {format_vector(query)}"]]
    features += [
        [token, f"φ({format_vector(x)}) = {format_vector(y)}"]
        for token, x, y in zip(inputs.tokens, inputs.K, key, strict=True)
    ]
    quotient = format_equation(join_terms(map(format_number, scores)), format_number(scores.sum()), "sum  ")
    left = f"{format_vector(scores)} / {format_number(scores.sum())}"
    quotient += format_equation(left, format_vector(weights[row]), "weights  ")
    steps = [
        WorkedStep("0. Apply the feature map φ(x): x + 1 above 0, exp(x) below", format_lines(features)),
        explain_comparison(query, key, scores, inputs.tokens),
        WorkedStep("2. No scaling: no exponential follows", ()),
        WorkedStep("3. Normalise: divide by the sum", tuple(quotient)),
        explain_aggregation(weights[row], inputs.V, output[row]),
        _explain_state(attention, inputs, query, key),
    ]
    return steps, output[row], weights[row]


def _explain_state(attention: Linear, inputs: RowInputs, query: Floats, key: Floats) -> WorkedStep:
    """Explain the other order of the work: sums over the keys first, which all queries share."""
    S, z = attention.compute_state(inputs.K, inputs.V)
    lines = []
    for c, column in enumerate(S):
        terms = [f"{format_number(k[c])}·{format_vector(v)}" for k, v in zip(key, inputs.V, strict=True)]
        lines += format_equation(join_terms(terms), format_vector(column), f"S[{c}]  ")
    lines += format_equation(join_terms(map(format_vector, key)), format_vector(z), "z  ")
    numerator, denominator = query @ S, float(query @ z)
    terms = [f"{format_number(q)}·{format_vector(column)}" for q, column in zip(query, S, strict=True)]
    lines += format_equation(join_terms(terms), format_vector(numerator), "φ(query)·S  ")
    terms = [f"{format_number(q)}·{format_number(total)}" for q, total in zip(query, z, strict=True)]
    lines += format_equation(join_terms(terms), format_number(denominator), "φ(query)·z  ")
    output = attention.compute_output_from_state(inputs.Q, (S, z))[inputs.row]
    lines += format_equation(
        f"{format_vector(numerator)} / {format_number(denominator)}", format_vector(output), "output  "
    )
    return WorkedStep("Or sum over the keys first, once for all queries", tuple(lines))


@work_out.register
def _work_out_flash(attention: Flash, inputs: RowInputs) -> StepsOutputWeights:
    row = inputs.row
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    raw = attention.compute_scores(inputs.Q, inputs.K)
    scaling, scores = explain_scaling(attention, raw, inputs)
    steps = [explain_comparison(inputs.Q[row], inputs.K, raw[row], inputs.tokens), scaling]
    tiles = list(attention.iter_tiles(inputs.Q, inputs.K, inputs.V))
    for before, tile in zip([None, *tiles], tiles, strict=False):
        steps.append(_explain_tile(tile, before, inputs))

    row_max, row_sum = float(tiles[-1].row_max[row, 0]), float(tiles[-1].row_sum[row, 0])
    quotient = f"{format_vector(tiles[-1].weighted_sum[row])} / {format_number(row_sum)}"
    lines = format_equation(quotient, format_vector(output[row]), "output  ")
    steps.append(WorkedStep("4. Divide once, at the end", tuple(lines)))
    lse = row_max + math.log(row_sum)
    lines = format_equation(
        f"{format_number(row_max)} + log({format_number(row_sum)})", format_number(lse), "lse  "
    )
    lines += format_equation(
        f"exp({format_vector(scores)} − {format_number(lse)})", format_vector(weights[row]), "weights  "
    )
    steps.append(WorkedStep("Recompute any weight from the log-sum-exp (lse)", tuple(lines)))
    return steps, output[row], weights[row]


def _explain_tile(tile: TileState, before: TileState | None, inputs: RowInputs) -> WorkedStep:
    """Explain the update of the running maximum and sums by one tile of keys; `before` is the state before it."""
    row = inputs.row
    scores, exponentials = tile.scores[row], tile.exponentials[row]
    row_max, rescale = tile.row_max[row, 0], tile.rescale[row, 0]
    lines = [f"   largest score so far: {format_number(row_max)}"]
    lines += format_equation(
        f"exp({format_vector(scores)} − {format_number(row_max)})", format_vector(exponentials)
    )
    totals = [format_number(x) for x in exponentials]
    value = inputs.V[tile.start : tile.stop]
    sums = [f"{format_number(x)}·{format_vector(v)}" for x, v in zip(exponentials, value, strict=True)]
    if before is not None:
        old_max = format_number(before.row_max[row, 0])
        lines += format_equation(
            f"exp({old_max} − {format_number(row_max)})", format_number(rescale), "rescale  "
        )
        totals = [f"{format_number(before.row_sum[row, 0])}·{format_number(rescale)}", *totals]
        sums = [f"{format_vector(before.weighted_sum[row])}·{format_number(rescale)}", *sums]
    lines += format_equation(join_terms(totals), format_number(tile.row_sum[row, 0]), "sum  ")
    lines += format_equation(join_terms(sums), format_vector(tile.weighted_sum[row]), "weighted sum  ")
    return WorkedStep(f"3. Tile of {', '.join(inputs.tokens[tile.start : tile.stop])}", tuple(lines))


@work_out.register
def _work_out_cached(attention: Cached, inputs: RowInputs) -> StepsOutputWeights:
    cached = inputs.position + 1  # the number of keys when this query arrives
    if cached < 1:
        return work_out(Causal(attention.d_k), inputs)
    tokens = inputs.tokens[:cached]
    prefix = RowInputs(inputs.Q[: inputs.row + 1], inputs.K[:cached], inputs.V[:cached], tokens, inputs.row)
    steps, output, weights = work_out(ScaledDotProductAttention(attention.d_k), prefix)
    earlier = f"   already cached: {', '.join(tokens[:-1]) or 'nothing'}"
    append = WorkedStep(f"0. Append the key and value of {tokens[-1]}", (earlier,))
    return [append, *steps], output, np.append(weights, np.zeros(len(inputs.K) - cached))
