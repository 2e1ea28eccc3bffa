"""Render results as HTML for a notebook, without a script and without a style sheet.

Every text is escaped where it enters the HTML. Text keeps the notebook's own colour, and colours are translucent
backgrounds, so both light and dark themes are readable. The numbers stay readable where a viewer drops inline styles.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from regard.render.table import PrintedStep
from regard.render.text import escape_unprintable
from regard.types import Array

# A blue between the blues of the light and the dark pages; at MAX_OPACITY, text of either theme is readable on it.
BLUE, MAX_OPACITY = "74, 134, 216", 0.55
SEVERITY_COLORS = {"error": "#d9480f", "warning": "#b58900", "note": "#4a86d8"}
MAX_CHARS = 200  # of a text in a cell; a token may be a whole book
MAX_ROWS = 50  # rows of a table, findings of a list
MAP_SIZE, MAX_WIDTH = 40, 900  # pixels: the edge of a map, and of all maps side by side
LEVELS = 64  # of opacity of a map; the first is the gap between maps

_CELL_STYLE = "padding: 0.15em 0.6em; white-space: nowrap"


class WeightSample(NamedTuple):
    """Weights of some rows of a matrix, to be shown as a table.

    `numbers` and `masked` have shape `(rows, columns)`; `q_idx` and `kv_idx` are the positions of rows and columns;
    `caption` says what was sampled.
    """

    q_idx: Sequence[int]
    kv_idx: Sequence[int]
    numbers: Array
    masked: Array
    caption: str


class PictureRow(NamedTuple):
    """Maps to be drawn side by side, `(maps, rows, columns)`, from 0 to 1, and their name."""

    name: str
    maps: Array


class FindingItem(NamedTuple):
    """A finding to be shown: its severity, a heading, a sentence, and named lines below it."""

    severity: str
    heading: str
    message: str
    lines: dict[str, str]


def render_matrix(description: str, sample: WeightSample | None, closing: str = "") -> str:
    """Return a matrix as its description, a coloured table of some of its weights, and a closing sentence.

    >>> sample = WeightSample([0], [0, 1], np.array([[0.75, 0.25]]), np.zeros((1, 2), bool), "All weights.")
    >>> html = render_matrix("a matrix of (1, 2)", sample)
    >>> "0.7500</td>" in html, "<script" in html
    (True, False)
    """
    parts = [_paragraph(description, strong=True)]
    if sample is not None:
        with np.errstate(invalid="ignore"):
            largest = float(np.nanmax(sample.numbers, initial=0.0, where=np.isfinite(sample.numbers)))
        headers = ["query \\ key", *(f"{j:,}" for j in sample.kv_idx)]
        rows = []
        for i, numbers, masked in zip(sample.q_idx, sample.numbers, sample.masked, strict=True):
            cells = [_weight_cell(float(x), largest, bool(m)) for x, m in zip(numbers, masked, strict=True)]
            rows.append([_row_header(f"{i:,}"), *cells])
        parts += [_paragraph(sample.caption), _table(headers, rows)]
    return _box(*parts, _paragraph(closing) if closing else "")


def render_steps(heading: str, steps: Sequence[PrintedStep]) -> str:
    """Return a heading and steps, each as a table."""
    parts = [_paragraph(heading, strong=True)]
    for step in steps:
        rows = []
        for n, (name, *cells) in enumerate(step.rows):
            row = [_row_header(name), *map(_cell, cells)]
            rows.append([*row, _bar_cell(step.shares[n])] if step.shares else row)
        headers = [*step.columns, *(["share"] if step.shares else [])]
        align_left = [name in ("key", "share") for name in headers]
        parts += [_paragraph(step.title), _table(headers, rows, align_left)]
        parts += [_paragraph(step.closing, strong=True)] if step.closing else []
    return _box(*parts)


def render_table(
    description: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    align_left: Sequence[bool],
    closing: str = "",
) -> str:
    """Return rows of texts as a table; `align_left` says of each column whether its cells are aligned left."""
    cells = [[_cell(text, left) for text, left in zip(row, align_left, strict=True)] for row in rows]
    table = _table(headers, cells, align_left)
    return _box(
        _paragraph(description, strong=True) if description else "",
        table,
        _paragraph(closing) if closing else "",
    )


def render_pictures(description: str, rows: Sequence[PictureRow], closing: str = "") -> str:
    """Return rows of maps as pictures, each with its name; the colour is translucent, as that of a weight.

    >>> html = render_pictures("2 layers", [PictureRow("attn", np.eye(3)[None])])
    >>> html.count("<img"), "<script" in html
    (1, False)
    """
    lines = []
    for row in rows:
        heads = len(row.maps)
        size = max(8, min(MAP_SIZE, MAX_WIDTH // heads))
        picture = base64.b64encode(_encode_png(row.maps)).decode("ascii")
        style = f"height: {size}px; width: {heads * size}px; max-width: none; image-rendering: pixelated"
        image = (
            f'<img alt="{heads} head{"s" * (heads != 1)} of {_escape(row.name)}" style="{style}" '
            f'src="data:image/png;base64,{picture}"/>'
        )
        lines.append([_row_header(row.name), f'<td style="{_CELL_STYLE}">{image}</td>'])
    table = _table(["layer", "heads"], lines, [True, True])
    return _box(_paragraph(description, strong=True), table, _paragraph(closing) if closing else "")


def render_findings(
    summary: str, items: Sequence[FindingItem], more: int = 0, checks: Sequence[str] = ()
) -> str:
    """Return a list of findings, each with its severity as a word and as a colour; `checks` are folded.

    >>> item = FindingItem("error", "mask", "It is <b>severe</b>.", {"hint": "Invert the mask."})
    >>> "severe" in render_findings("1 error", [item])
    True
    """
    blocks = []
    for item in items:
        lines = "".join(
            f'<div><span style="opacity: 0.8">{_escape(name)}:</span> {_escape(line)}</div>'
            for name, line in item.lines.items()
        )
        color = SEVERITY_COLORS[item.severity]
        blocks.append(
            f'<li style="border-left: 4px solid {color}; padding: 0 0 0 0.8em; margin: 0.8em 0">'
            f"<div><strong>{_escape(item.severity)}: {_escape(item.heading)}</strong></div>"
            f"<div>{_escape(item.message)}</div>{lines}</li>"
        )
    listing = f'<ul style="list-style: none; margin: 0; padding: 0">{"".join(blocks)}</ul>' if blocks else ""
    rest = _paragraph(f"… and {more:,} more; print() shows all of them.") if more else ""
    lines = "".join(f"<div>{_escape(check)}</div>" for check in checks)
    left_out = sum(check.startswith("not run") for check in checks)
    count = f"{len(checks)} checks, {left_out} of them not run"
    folded = f"<details><summary>{count}</summary>{lines}</details>" if checks else ""
    return _box(_paragraph(summary, strong=True) if summary else "", listing, rest, folded)


def _encode_png(maps: Array) -> bytes:
    """Encode maps side by side, `(maps, rows, columns)` from 0 to 1, as a PNG whose opacity is the value."""
    levels = 1 + np.round((LEVELS - 2) * np.clip(maps, 0.0, 1.0)).astype(np.uint8)
    levels = np.pad(levels, ((0, 0), (0, 1), (0, 1)))  # level 0 is the gap between maps
    image = levels.transpose(1, 0, 2).reshape(levels.shape[1], -1)
    height, width = image.shape
    colors = bytes(map(int, BLUE.split(","))) * LEVELS
    opacity = bytes([0, *np.linspace(20, 255, LEVELS - 1).astype(np.uint8).tolist()])
    lines = np.pad(image, ((0, 0), (1, 0))).tobytes()  # each line starts with its filter, 0 for none
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),  # 8 bits that are numbers of colours
        b"PLTE": colors,
        b"tRNS": opacity,
        b"IDAT": zlib.compress(lines, 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )


def _paragraph(text: str, *, strong: bool = False) -> str:
    inner = _escape(text, 10 * MAX_CHARS)
    return f'<p style="margin: 0.6em 0 0.3em">{f"<strong>{inner}</strong>" if strong else inner}</p>'


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], align_left: Sequence[bool] | None = None
) -> str:
    """Return a table of cells that are HTML already; headers are escaped here. Default: align column 0 left."""
    align_left = [n == 0 for n in range(len(headers))] if align_left is None else align_left
    style = "border-collapse: collapse; margin: 0; table-layout: auto; font-variant-numeric: tabular-nums; width: auto"
    head = "".join(
        f'<th scope="col" style="text-align: {_side(left)}; {_CELL_STYLE}; font-weight: 600">{_escape(name)}</th>'
        for name, left in zip(headers, align_left, strict=True)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _side(left: bool) -> str:
    return "left" if left else "right"


def _box(*parts: str) -> str:
    # A table that is wider than the page scrolls in its own box, which the keyboard can reach.
    return (
        f'<div class="regard" tabindex="0" style="line-height: 1.4; overflow-x: auto">{"".join(parts)}</div>'
    )


def _escape(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return text as HTML without markup and control characters, cut to a length."""
    shown = escape_unprintable(text[: max_chars + 1])
    return escape(shown if len(text) <= max_chars else shown[:max_chars] + "…")


def _row_header(text: str) -> str:
    style = f"text-align: left; {_CELL_STYLE}; font-weight: 600"
    return f'<th scope="row" style="{style}"><bdi>{_escape(text)}</bdi></th>'


def _cell(text: str, left: bool = False) -> str:
    return f'<td style="text-align: {_side(left)}; {_CELL_STYLE}">{_escape(text)}</td>'


def _weight_cell(weight: float, largest: float, masked: bool) -> str:
    """Return a weight on a blue whose opacity is proportional to the weight."""
    if masked:
        return f'<td style="text-align: center; {_CELL_STYLE}; opacity: 0.8">–</td>'
    opacity = MAX_OPACITY * weight / largest if largest and math.isfinite(weight) else 0.0
    background = f"background: rgba({BLUE}, {opacity:.3f})"
    return f'<td style="text-align: right; {_CELL_STYLE}; {background}">{weight:.4f}</td>'


def _bar_cell(share: float) -> str:
    """Return a bar as long as the share; the cell before it holds the number."""
    width = 100 * min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    fill = f"height: 0.8em; width: {width:.2f}%; background: rgba({BLUE}, 0.8)"
    return f'<td style="min-width: 14em; {_CELL_STYLE}"><div style="{fill}"></div></td>'
