"""Print the steps of a computation: each a title, rows of cells with bars beside them, and a closing line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from regard.render.table import format_table
from regard.render.text import format_bar


class PrintedStep(NamedTuple):
    """One step as it is printed.

    `rows` hold a name and its cells under `columns`, and `shares` the weights to draw as bars beside them.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    shares: list[float]
    closing: str = ""


def format_steps(heading: str, steps: Sequence[PrintedStep]) -> str:
    """Return a heading and the steps below it as lines of text."""
    lines = [heading, ""]
    for step in steps:
        rows = step.rows
        if step.shares:
            rows = [[*row, format_bar(share)] for row, share in zip(rows, step.shares, strict=True)]
        lines += [step.title, *([format_table(rows, align="left", indent="   ")] if rows else [])]
        lines += [f"   {step.closing}"] if step.closing else []
    return "\n".join(lines)
