"""What a notebook shows: plain records in, HTML out that needs no script and no style sheet.

Every text is escaped where it enters. Text keeps the notebook's own colour; what is coloured is a background that lets
the notebook's shine through, so that light and dark both read well. Where styles are taken away, the numbers stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from regard.render import text
from regard.types import Array

# The blue of the pages, between their light and their dark one; at its strongest, text of either kind reads on it.
BLUE, STRONGEST = "74, 134, 216", 0.55
MARKS = {"error": "#d9480f", "warning": "#b58900", "note": "#4a86d8"}
LETTERS = 200  # of a text in a cell; a token may be a whole book
SHOWN = 50  # rows of a table, findings of a list


class Sample(NamedTuple):
    """Weights to be shown: `numbers` (rows, columns), `hidden` where no key is seen, and the positions of both."""

    q_idx: Sequence[int]
    kv_idx: Sequence[int]
    numbers: Array
    hidden: Array
    words: str


class Item(NamedTuple):
    """One finding: its severity, a heading, a sentence, and named lines below it."""

    severity: str
    heading: str
    what: str
    lines: dict[str, str]


def matrix(about: str, sample: Sample | None, closing: str = "") -> str:
    """A matrix: what it is, and some of its weights as a coloured table.

    >>> sample = Sample([0], [0, 1], np.array([[0.75, 0.25]]), np.zeros((1, 2), bool), "All weights.")
    >>> html = matrix("a matrix of (1, 2)", sample)
    >>> "0.7500</td>" in html, "<script" in html
    (True, False)
    """
    parts = [paragraph(about, strong=True)]
    if sample is not None:
        with np.errstate(invalid="ignore"):
            largest = float(np.nanmax(sample.numbers, initial=0.0, where=np.isfinite(sample.numbers)))
        names = ["query \\ key", *(f"{j:,}" for j in sample.kv_idx)]
        rows = []
        for i, numbers, hidden in zip(sample.q_idx, sample.numbers, sample.hidden, strict=True):
            cells = [_weight(float(x), largest, bool(h)) for x, h in zip(numbers, hidden, strict=True)]
            rows.append([_name(f"{i:,}"), *cells])
        parts += [paragraph(sample.words), table(names, rows)]
    return _whole(*parts, paragraph(closing) if closing else "")


def steps(explanation: Any) -> str:
    """One query's four steps, each a table; of a long row the top keys."""
    parts = [paragraph(text.heading(explanation), strong=True)]
    for step in text.four_steps(explanation):
        rows = []
        for n, (name, *cells) in enumerate(step.rows):
            row = [_name(name), *map(_cell, cells)]
            rows.append([*row, _bar(step.shares[n])] if step.shares else row)
        names = [*step.columns, *(["share"] if step.shares else [])]
        left = [name in ("key", "share") for name in names]
        parts += [paragraph(step.title), table(names, rows, left)]
        parts += [paragraph(step.closing, strong=True)] if step.closing else []
    return _whole(*parts)


def listing(
    about: str, names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[bool], closing: str = ""
) -> str:
    """Rows of texts under their names, columns flush left or right; the caller bounds how many."""
    cells = [[_cell(words, flush) for words, flush in zip(row, left, strict=True)] for row in rows]
    shown = table(names, cells, left)
    return _whole(
        paragraph(about, strong=True) if about else "", shown, paragraph(closing) if closing else ""
    )


def findings(summary: str, items: Sequence[Item], more: int = 0) -> str:
    """Findings one below the other, each with a mark of its severity; the word says it too.

    >>> "severe" in findings("1 error", [Item("error", "mask", "It is <b>severe</b>.", {"hint": "Turn it round."})])
    True
    """
    blocks = []
    for item in items:
        lines = "".join(
            f'<div><span style="opacity: 0.8">{_text(name)}:</span> {_text(line)}</div>'
            for name, line in item.lines.items()
        )
        blocks.append(
            f'<li style="border-left: 4px solid {MARKS[item.severity]}; padding: 0 0 0 0.8em; margin: 0.8em 0">'
            f"<div><strong>{_text(item.severity)}: {_text(item.heading)}</strong></div>"
            f"<div>{_text(item.what)}</div>{lines}</li>"
        )
    shown = f'<ul style="list-style: none; margin: 0; padding: 0">{"".join(blocks)}</ul>' if blocks else ""
    rest = paragraph(f"… and {more:,} more; print() shows them all.") if more else ""
    return _whole(paragraph(summary, strong=True) if summary else "", shown, rest)


def paragraph(words: str, *, strong: bool = False) -> str:
    """A paragraph of text."""
    inner = f"<strong>{_text(words, 10 * LETTERS)}</strong>" if strong else _text(words, 10 * LETTERS)
    return f'<p style="margin: 0.6em 0 0.3em">{inner}</p>'


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool] | None = None) -> str:
    """A table of cells that are HTML already, under names that are not; without `left` only the first is."""
    left = [n == 0 for n in range(len(names))] if left is None else left
    style = "border-collapse: collapse; margin: 0; table-layout: auto; font-variant-numeric: tabular-nums; width: auto"
    head = "".join(
        f'<th scope="col" style="text-align: {_SIDES[flush]}; {_PADDED}; font-weight: 600">{_text(name)}</th>'
        for name, flush in zip(names, left, strict=True)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


_PADDED = "padding: 0.15em 0.6em; white-space: nowrap"
_SIDES = {True: "left", False: "right"}


def _whole(*parts: str) -> str:
    # A table that is wider than the page scrolls in its own box, which the keyboard can reach.
    return (
        f'<div class="regard" tabindex="0" style="line-height: 1.4; overflow-x: auto">{"".join(parts)}</div>'
    )


def _text(words: str, most: int = LETTERS) -> str:
    """Text as HTML: control characters written out, nothing left that could be markup."""
    shown = text.printable(words[: most + 1])
    return escape(shown if len(words) <= most else shown[:most] + "…")


def _name(words: str) -> str:
    return f'<th scope="row" style="text-align: left; {_PADDED}; font-weight: 600"><bdi>{_text(words)}</bdi></th>'


def _cell(words: str, left: bool = False) -> str:
    return f'<td style="text-align: {_SIDES[left]}; {_PADDED}">{_text(words)}</td>'


def _weight(weight: float, largest: float, hidden: bool) -> str:
    """A weight on a blue as strong as it is large beside the largest."""
    if hidden:
        return f'<td style="text-align: center; {_PADDED}; opacity: 0.8">–</td>'
    strength = STRONGEST * weight / largest if largest and math.isfinite(weight) else 0.0
    background = f"background: rgba({BLUE}, {strength:.3f})"
    return f'<td style="text-align: right; {_PADDED}; {background}">{weight:.4f}</td>'


def _bar(share: float) -> str:
    """A bar as long as the share; its number stands in the cell before it."""
    width = 100 * min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    fill = f"height: 0.8em; width: {width:.2f}%; background: rgba({BLUE}, 0.8)"
    return f'<td style="min-width: 14em; {_PADDED}"><div style="{fill}"></div></td>'
