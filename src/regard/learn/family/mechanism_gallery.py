"""The fifteen mechanisms side by side as small heatmaps."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from regard.learn.family.catalog import MECHANISMS
from regard.learn.family.mechanism import Mechanism
from regard.learn.figures.canvas import Canvas
from regard.learn.validation import Floats
from regard.render.text import format_vector

TILE = 150  # width of a heatmap in units
LABELS = 32  # width of the query tokens
DARKEST = 0.6  # weights from here on have the full colour
GRID = (
    "display: grid; grid-template-columns: repeat(auto-fill, minmax(9.2rem, 1fr)); gap: 1.25rem 1rem; padding: 0; "
    "list-style: none; margin: 1.5rem 0"
)


@dataclass(frozen=True, eq=False, repr=False)
class Gallery:
    """The weights of all mechanisms as heatmaps; a notebook shows them side by side.

    Attributes:
        tiles: The number, the mechanism and the weights (…, q_len, kv_len) of each.

    >>> from regard.learn import family
    >>> family.gallery()
    <15 heatmaps, scaled_dot_product to sink_softcap>
    """

    tiles: tuple[tuple[int, Mechanism, Floats], ...]

    def __repr__(self) -> str:
        return f"<{len(self.tiles)} heatmaps, {self.tiles[0][1].name} to {self.tiles[-1][1].name}>"

    def _repr_html_(self) -> str:
        items = []
        for number, mechanism, weights in self.tiles:
            link = f'<a href="#{make_anchor(mechanism.title)}">{number}. {html.escape(mechanism.title)}</a>'
            items.append(
                f'<li style="margin: 0">{draw_heatmap(mechanism, weights)}<div><b>{link}</b></div>'
                f'<div style="font-size: 0.85em">{html.escape(mechanism.changes)}</div></li>'
            )
        return f'<ul class="regard-gallery" style="{GRID}">{"".join(items)}</ul>'


def make_anchor(title: str) -> str:
    """Return the anchor of the section with this title in the book.

    >>> make_anchor("Relative position bias (T5)")
    'relative-position-bias-t5'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def draw_heatmap(mechanism: Mechanism, weights: Floats) -> str:
    """Draw the weights of a mechanism as SVG; several heads stand side by side."""
    heads = weights if weights.ndim == 3 else weights[None]
    q_len, kv_len = heads.shape[1:]
    per_row = 1 if len(heads) == 1 else 2
    room = (TILE - LABELS) / per_row
    side = min(room / kv_len, 22) - (0.8 if per_row > 1 else 0)
    canvas = Canvas(TILE)
    for h, head in enumerate(heads):
        x, y = LABELS + (h % per_row) * room, (h // per_row) * (side * q_len + 5) + 1
        canvas.matrix(x, y, head, cell=(side, side), largest=DARKEST)
    if per_row == 1:
        for i, token in enumerate(mechanism.query_tokens):
            canvas.text(LABELS - 4, (i + 0.5) * side + 5, token, anchor="end", size=12)
    canvas.height = max(canvas.height, 5 * 22 + 1)
    rows = "; ".join(
        f"{token} {format_vector(row)}" for token, row in zip(mechanism.query_tokens, heads[0], strict=True)
    )
    more = f"{len(heads)} heads, the first: " if len(heads) > 1 else ""
    return canvas.figure(mechanism.name, "", f"Weights of {mechanism.title}: {more}{rows}.").svg


def gallery() -> Gallery:
    """Run all fifteen mechanisms on the example, and show their weights as heatmaps side by side.

    Returns:
        The heatmaps; a notebook shows them.

    >>> len(gallery().tiles)
    15
    """
    return Gallery(
        tuple((n, mechanism, mechanism.run()[1]) for n, mechanism in enumerate(MECHANISMS, start=1))
    )
