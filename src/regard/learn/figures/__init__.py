"""The figures of the book, drawn from computed numbers as SVG: `draw("four-steps")`.

They take over the colours of the page that shows them, light or dark, and can be read at the width of a phone. Imports
from `regard.learn` and below.

>>> from regard.learn import figures
>>> figures.NAMES[:3]
('bank', 'projections', 'magnitude')
>>> figures.draw("hull").caption.split(".")[0]
'Outputs stay inside the triangle of the values'
"""

from __future__ import annotations

from collections.abc import Callable

from regard.learn.figures.canvas import Figure
from regard.learn.figures.curves import draw_crossing, draw_scaling
from regard.learn.figures.diagrams import draw_block, draw_masks, draw_shapes
from regard.learn.figures.planes import draw_bank, draw_hull, draw_magnitude
from regard.learn.figures.steps import draw_four_steps, draw_projections
from regard.learn.validation import as_choice

__all__ = ["Figure", "NAMES", "draw"]

_FIGURES: dict[str, Callable[[], Figure]] = {
    "bank": draw_bank,
    "projections": draw_projections,
    "magnitude": draw_magnitude,
    "four-steps": draw_four_steps,
    "scaling": draw_scaling,
    "hull": draw_hull,
    "masks": draw_masks,
    "block": draw_block,
    "shapes": draw_shapes,
    "crossing": draw_crossing,
}
# The names of the figures, in the order of the chapters.
NAMES: tuple[str, ...] = tuple(_FIGURES)


def draw(name: str) -> Figure:
    """Compute the numbers of a figure and draw it.

    Args:
        name: One of `NAMES`.

    Returns:
        The figure; a notebook shows it, and `save` writes it as SVG.

    Raises:
        ArgumentError: If there is no such figure.

    >>> draw("masks").alt.split(":")[0]
    'Four masks on the five tokens of the book as tables of queries and keys'
    """
    return _FIGURES[as_choice("figures.draw", "name", name, NAMES)]()
