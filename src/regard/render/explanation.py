"""Write the four steps of one query as text, and prepare them for a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regard.render.table import format_table
from regard.render.text import (
    TERMS_SHOWN,
    escape_unprintable,
    format_bar,
    format_factor,
    format_number,
    format_vector,
)

if TYPE_CHECKING:
    from regard.core.explanation import Explanation
    from regard.types import Array

KEYS_SHOWN = 12


class ExplanationStep(NamedTuple):
    """One of the four steps as it is printed.

    `rows` hold the name of a key and its cells under `columns`, and `shares` the weights to draw as bars beside them.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    shares: list[float]
    closing: str = ""


def format_explanation(explanation: Explanation) -> str:
    """Return the four steps of one query as lines of text.

    Args:
        explanation: The numbers of the steps.

    Returns:
        Every number of a short row, and the keys with the largest weights of a long one.
    """
    lines = [format_heading(explanation), ""]
    for step in explanation_steps(explanation):
        rows = step.rows
        if step.shares:
            rows = [[*row, format_bar(share)] for row, share in zip(rows, step.shares, strict=True)]
        lines += [step.title, *([format_table(rows, align="left", indent="   ")] if rows else [])]
        lines += [f"   {step.closing}"] if step.closing else []
    return "\n".join(lines)


def format_heading(explanation: Explanation) -> str:
    """Return which query is explained, the number of keys and the head dimension.

    Args:
        explanation: The numbers of the steps.

    Returns:
        One line.
    """
    return f"{explanation.title}: {len(explanation.weights)} keys, head_dim {len(explanation.query)}"


def explanation_steps(explanation: Explanation) -> list[ExplanationStep]:
    """Return the steps of an explanation as rows of text.

    Args:
        explanation: The numbers of the steps.

    Returns:
        Three steps, and a fourth if the explanation has a value. Of a row of more than 12 keys, the 12 keys with the
        largest weights are listed, and the others are summed in one line.
    """
    weights = np.asarray(explanation.weights)
    keys = np.arange(len(weights))
    rest = keys[:0]
    if len(keys) > KEYS_SHOWN:
        order = np.argsort(-np.nan_to_num(weights, nan=np.inf), kind="stable")
        keys, rest = np.sort(order[:KEYS_SHOWN]), order[KEYS_SHOWN:]
    names = [escape_unprintable(explanation.key_tokens[int(j)]) for j in keys]
    steps = [
        _compare(explanation, keys, names),
        _scale(explanation, keys, names),
        _normalise(explanation, keys, names, rest),
    ]
    if explanation.output is not None:
        steps.append(_aggregate(explanation, keys, names, rest))
    return steps


def _compare(explanation: Explanation, keys: Array, names: list[str]) -> ExplanationStep:
    rows = [[name, _sum_of_products(explanation, int(j))] for name, j in zip(names, keys, strict=True)]
    title = f"1. Compare: query {format_vector(explanation.query)} · key"
    return ExplanationStep(title, ("key", "score"), rows, [])


def _sum_of_products(explanation: Explanation, j: int) -> str:
    pairs = zip(explanation.query, explanation.key[j], strict=True)
    terms = [f"{format_number(q)}·{format_factor(k)}" for q, k in pairs]
    if len(terms) > TERMS_SHOWN:
        terms = [*terms[:3], "…", terms[-1]]
    return f"{' + '.join(terms) or '0'} = {format_number(explanation.raw_scores[j])}"


def _scale(explanation: Explanation, keys: Array, names: list[str]) -> ExplanationStep:
    scale = format_number(explanation.scale)
    rows = []
    for name, j in zip(names, keys, strict=True):
        raw, scaled, score = (
            float(numbers[j])
            for numbers in (explanation.raw_scores, explanation.scaled_scores, explanation.scores)
        )
        cell = f"{format_number(raw)} × {scale} = {format_number(scaled)}"
        if score == -np.inf:
            cell += "  masked"
        elif explanation.score_mods:
            cell += f" → {format_number(score)}"
        rows.append([name, cell])
    changes = "".join(f", then {change}" for change in (*explanation.score_mods, *explanation.masks))
    return ExplanationStep(f"2. Scale: × {scale}{changes}", ("key", "scaled score"), rows, [])


def _normalise(explanation: Explanation, keys: Array, names: list[str], rest: Array) -> ExplanationStep:
    exponentials, weights = explanation.exponentials, explanation.weights
    entries = [(name, exponentials[j], float(weights[j])) for name, j in zip(names, keys, strict=True)]
    sink = explanation.sink_exponential
    if sink is not None:
        entries.append(("(sink)", sink, sink / (explanation.total or 1.0)))
    if len(rest):
        entries.append((_others(rest), float(exponentials[rest].sum()), float(weights[rest].sum())))
    shift, total = format_number(explanation.shift), format_number(explanation.total)
    all_masked = (np.asarray(explanation.scores) == -np.inf).all()
    return ExplanationStep(
        f"3. Normalise: exp(score − shift {shift}), divided by their sum {total}",
        ("key", "exponential", "weight"),
        [[name, format_number(exponential), format_number(weight)] for name, exponential, weight in entries],
        [weight for *_, weight in entries],
        "Every key is masked for this query: its weights are zeros." if all_masked else "",
    )


def _aggregate(explanation: Explanation, keys: Array, names: list[str], rest: Array) -> ExplanationStep:
    value, contributions, output = explanation.value, explanation.contributions, explanation.output
    assert value is not None
    assert contributions is not None
    assert output is not None
    rows = [
        [
            name,
            f"{format_number(explanation.weights[j])} · {format_vector(value[j])}",
            f"= {format_vector(contributions[j])}",
        ]
        for name, j in zip(names, keys, strict=True)
    ]
    if len(rest):
        rows.append([_others(rest), "", f"= {format_vector(contributions[rest].sum(0))}"])
    return ExplanationStep(
        "4. Aggregate: the sum of weight · value",
        ("key", "weight · value", "contribution"),
        rows,
        [],
        f"output = {format_vector(output)}",
    )


def _others(rest: Array) -> str:
    return f"({len(rest)} other keys)"
