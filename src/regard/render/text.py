"""Text for a terminal: numbers, bars, and the trace of one query's four steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.types import Array

BAR_WIDTH = 40
KEYS_SHOWN = 12
TERMS_SHOWN = 8


def number(x: float) -> str:
    """A number as a reader wants it: to four digits after the point, without the zeros at the end.

    >>> number(2.0), number(0.5), number(0.29756), number(1e-9), number(float("-inf"))
    ('2', '0.5', '0.2976', '1.000e-09', '-inf')
    """
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    return f"{x:.4f}".rstrip("0").rstrip(".") if 1e-3 <= abs(x) < 1e6 else f"{x:.3e}"


def vector(numbers: Iterable[float]) -> str:
    """A row of numbers in brackets, its middle left out where it is long.

    >>> vector([1, 0.5])
    '[1, 0.5]'
    """
    shown = [number(float(x)) for x in numbers]
    if len(shown) > TERMS_SHOWN:
        shown = [*shown[: TERMS_SHOWN - 2], "…", shown[-1]]
    return "[" + ", ".join(shown) + "]"


def bar(weight: float) -> str:
    """A bar as long as the weight: 40 blocks for a weight of one.

    >>> bar(0.1095)
    '████'
    """
    return "█" * int(weight * BAR_WIDTH) if math.isfinite(weight) else ""


def columns(rows: Sequence[Sequence[str]], indent: str = "   ") -> list[str]:
    """Rows of cells as lines, the cells of a column equally wide; the last is left ragged."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def printable(token: str) -> str:
    r"""A token on one line, control characters and line ends escaped.

    >>> printable("a\n")
    'a\\n'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in token)


class Step(NamedTuple):
    """One of the four steps as it is shown: rows of a key's name and cells, `shares` to be drawn as bars."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    shares: list[float]
    closing: str = ""


def trace(steps: Any) -> str:
    """The four steps of one query, with every number for a short row and the top keys of a long one."""
    lines = [heading(steps), ""]
    for step in four_steps(steps):
        rows = step.rows
        if step.shares:
            rows = [[*row, bar(share)] for row, share in zip(rows, step.shares, strict=True)]
        lines += [step.title, *columns(rows), *([f"   {step.closing}"] if step.closing else [])]
    return "\n".join(lines)


def heading(steps: Any) -> str:
    """Which query, how many keys, how many numbers in each."""
    return f"{steps.title}: {len(steps.weights)} keys, head_dim {len(steps.query)}"


def four_steps(steps: Any) -> list[Step]:
    """What an explanation shows: every key of a short row, the top keys of a long one and the others as one."""
    weights = np.asarray(steps.weights)
    keys = np.arange(len(weights))
    rest = keys[:0]
    if len(keys) > KEYS_SHOWN:
        order = np.argsort(-np.nan_to_num(weights, nan=np.inf), kind="stable")
        keys, rest = np.sort(order[:KEYS_SHOWN]), order[KEYS_SHOWN:]
    hidden = np.asarray(steps.scores) == -np.inf
    names = [printable(token) for token in (steps.key_tokens[j] for j in keys)]
    others = f"({len(rest)} other keys)"

    rows = [[name, _sum_of_products(steps, int(j))] for name, j in zip(names, keys, strict=True)]
    made = [Step(f"1. Compare: query {vector(steps.query)} · key", ("key", "score"), rows, [])]

    changes = "".join(f", then {change}" for change in (*steps.score_mods, *steps.masks))
    rows = []
    for name, j in zip(names, keys, strict=True):
        raw, scaled, score = steps.raw_scores[j], steps.scaled_scores[j], steps.scores[j]
        cell = f"{number(raw)} × {number(steps.scale)} = {number(scaled)}"
        if hidden[j]:
            cell += "  hidden"
        elif steps.score_mods:
            cell += f" → {number(score)}"
        rows.append([name, cell])
    title = f"2. Scale: × {number(steps.scale)}{changes}"
    made.append(Step(title, ("key", "scaled score"), rows, []))

    title = (
        f"3. Normalise: exp(score − shift {number(steps.shift)}), divided by their sum {number(steps.total)}"
    )
    shown = [(name, steps.exponentials[j], float(weights[j])) for name, j in zip(names, keys, strict=True)]
    if steps.sink_exponential is not None:
        shown.append(("(sink)", steps.sink_exponential, steps.sink_exponential / (steps.total or 1.0)))
    if len(rest):
        shown.append((others, float(steps.exponentials[rest].sum()), float(weights[rest].sum())))
    rows = [[name, number(exponential), number(weight)] for name, exponential, weight in shown]
    closing = "This query sees no key: its weights are zeros." if hidden.all() else ""
    shares = [weight for *_, weight in shown]
    made.append(Step(title, ("key", "exponential", "weight"), rows, shares, closing))

    if steps.output is not None:
        rows = [
            [name, f"{number(weights[j])} · {vector(steps.value[j])}", f"= {vector(steps.contributions[j])}"]
            for name, j in zip(names, keys, strict=True)
        ]
        if len(rest):
            rows.append([others, "", f"= {vector(steps.contributions[rest].sum(0))}"])
        closing = f"output = {vector(steps.output)}"
        named = ("key", "weight · value", "contribution")
        made.append(Step("4. Aggregate: the sum of weight · value", named, rows, [], closing))
    return made


def _sum_of_products(steps: Any, j: int) -> str:
    terms = [f"{number(q)}·{number(k)}" for q, k in zip(steps.query, steps.key[j], strict=True)]
    if len(terms) > TERMS_SHOWN:
        terms = [*terms[:3], "…", terms[-1]]
    return f"{' + '.join(terms) or '0'} = {number(steps.raw_scores[j])}"


def table(numbers: Array) -> str:
    """A small matrix as lines of four-digit numbers.

    >>> print(table(np.eye(2)))
    [1.0000 0.0000]
    [0.0000 1.0000]
    """
    return "\n".join("[" + " ".join(f"{x:.4f}" for x in row) + "]" for row in numbers)
