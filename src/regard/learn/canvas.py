"""Draw an SVG figure that follows the colours of the page and can be read at the width of a phone.

Text and lines have the colour of the surrounding text (`currentColor`). The two accents are CSS variables that the page
may set, with a fallback that can be seen on light and dark grounds. Text is printed on accents of at most
`MAX_OPACITY`, so its contrast stays above 4.5. Coordinates are in units that are close to pixels: a figure is `WIDTH`
wide, and its smallest text is `SMALLEST_TEXT` high.
"""

from __future__ import annotations

import html
import math
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regard.learn.validation import Floats

WIDTH = 380
SMALLEST_TEXT = 11
MAX_OPACITY = 0.45
FIRST = "var(--color-brand-primary, #3f7fd0)"
SECOND = "var(--figure-second, #c2731a)"
# The ground of this site, of JupyterLab, of the browser.
GROUND = "var(--color-background-primary, var(--jp-layout-color0, Canvas))"

Anchor = Literal["start", "middle", "end"]
Accent = Literal["first", "second"]
COLOURS: dict[Accent, str] = {"first": FIRST, "second": SECOND}


@dataclass(frozen=True, repr=False)
class Figure:
    """A figure as SVG: a notebook shows it, `save` writes it.

    Attributes:
        name: The name that `figures.draw` takes.
        caption: The sentence below the figure.
        alt: The figure in words, for readers who cannot see it.
        svg: The drawing.

    >>> from regard.learn import figures
    >>> figures.draw("four-steps")
    <figure "four-steps": save(path) writes it>
    """

    name: str
    caption: str
    alt: str
    svg: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing to an SVG file.

        Args:
            path: Path of the file. An existing file is overwritten.
        """
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(self.svg + "\n")

    def _repr_html_(self) -> str:
        """Return the drawing inside the page, where it takes over the page's colours, with its caption."""
        return (
            f'<figure class="regard-figure" style="max-width: 30rem; margin: 1.5rem auto">{self.svg}'
            f'<figcaption style="font-size: 0.9em">{html.escape(self.caption)}</figcaption></figure>'
        )

    def __repr__(self) -> str:
        return f'<figure "{self.name}": save(path) writes it>'


class Canvas:
    """Collects the elements of a drawing, and its height.

    Args:
        width: Width in units; the height grows with the elements.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self.height = 0.0
        self.elements: list[str] = []

    def figure(self, name: str, caption: str, alt: str) -> Figure:
        """Return the finished figure; `alt` is the figure in words."""
        body = "".join(self.elements)
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {math.ceil(self.height + 4)}" '
            f'width="100%" role="img" aria-label="{html.escape(alt)}" '
            f'font-family="system-ui, sans-serif" font-size="13" fill="currentColor">{body}</svg>'
        )
        return Figure(name, caption, alt, svg)

    def text(
        self,
        x: float,
        y: float,
        text: object,
        *,
        anchor: Anchor = "middle",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """Write text on the baseline `y`."""
        weight = ' font-weight="600"' if bold else ""
        self._add(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>'
            f"{html.escape(str(text))}</text>",
            y,
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        accent: Accent | None = None,
        share: float = 1.0,
        opacity: float = MAX_OPACITY,
    ) -> None:
        """Draw a rectangle with an outline, filled with a share of an accent; without text on it, opacity may be 1."""
        fill = 'fill="none"'
        if accent is not None and share > 0:
            fill = f'fill="{COLOURS[accent]}" fill-opacity="{opacity * min(share, 1):.3f}"'
        self._add_rectangle(x, y, width, height, f'rx="2" {fill} stroke="currentColor" stroke-opacity="0.45"')

    def bar(self, x: float, y: float, width: float, height: float, fill: str = FIRST) -> None:
        """Draw a filled rectangle without an outline; `GROUND` as the filling covers what was drawn before."""
        self._add_rectangle(x, y, width, height, f'fill="{fill}"')

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        accent: Accent | None = None,
        width: float = 1,
        dashed: bool = False,
    ) -> None:
        """Draw a line through points."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        colour = 'currentColor" stroke-opacity="0.6' if accent is None else COLOURS[accent]
        self._add_path("polyline", points, f'fill="none" stroke="{colour}" stroke-width="{width}"{dash}')

    def polygon(self, points: list[tuple[float, float]], *, accent: Accent) -> None:
        """Draw a filled polygon with an outline."""
        style = f'fill="{COLOURS[accent]}" fill-opacity="0.15" stroke="currentColor" stroke-opacity="0.6"'
        self._add_path("polygon", points, style)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        accent: Accent | None = None,
        width: float = 1.2,
        dashed: bool = False,
    ) -> None:
        """Draw an arrow; the head is part of the line's length."""
        (x0, y0), (x1, y1) = start, end
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        head = min(7 + width, length)
        left = (x1 - head * dx - 0.45 * head * dy, y1 - head * dy + 0.45 * head * dx)
        right = (x1 - head * dx + 0.45 * head * dy, y1 - head * dy - 0.45 * head * dx)
        self.line([start, (x1 - head * dx, y1 - head * dy)], accent=accent, width=width, dashed=dashed)
        colour = 'currentColor" fill-opacity="0.75' if accent is None else COLOURS[accent]
        self._add_path("polygon", [end, left, right], f'fill="{colour}"')

    def dot(self, x: float, y: float, *, accent: Accent | None = None, radius: float = 4) -> None:
        """Draw a filled circle."""
        colour = "currentColor" if accent is None else COLOURS[accent]
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"/>', y + radius)

    def ring(self, x: float, y: float, radius: float) -> None:
        """Draw a circle without a filling."""
        self._add(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="none" stroke="currentColor" '
            'stroke-opacity="0.6"/>',
            y + radius,
        )

    def matrix(
        self,
        x: float,
        y: float,
        numbers: Floats,
        *,
        cell: tuple[float, float] = (26, 20),
        decimals: int | None = None,
        largest: float | None = None,
        size: int = SMALLEST_TEXT,
        shade: bool = True,
        accent: Accent = "first",
    ) -> None:
        """Draw a table of cells shaded by size: `accent` for numbers above 0, the other accent below.

        Numbers are printed with `decimals`, or not at all; `largest` has the full shade.
        """
        other: Accent = "second" if accent == "first" else "first"
        largest = largest or float(np.abs(numbers).max()) or 1.0
        width, height = cell
        for i, row in enumerate(np.asarray(numbers).tolist()):
            for j, number in enumerate(row):
                share = abs(number) / largest if shade else 0
                colour = accent if number >= 0 else other
                opacity = MAX_OPACITY if decimals is not None else 1.0
                self.box(
                    x + j * width, y + i * height, width, height, accent=colour, share=share, opacity=opacity
                )
                if decimals is not None:
                    at = (x + (j + 0.5) * width, y + (i + 0.5) * height + 0.36 * size)
                    self.text(*at, format_cell(number, decimals), size=size)

    def _add_path(self, element: str, points: list[tuple[float, float]], style: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<{element} points="{path}" {style}/>', max(y for _, y in points))

    def _add_rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._add(f"<rect {place} {style}/>", y + height)

    def _add(self, element: str, bottom: float) -> None:
        self.elements.append(element)
        self.height = max(self.height, bottom)


def format_cell(number: float, decimals: int) -> str:
    """Format a number for a small cell: no trailing zeros, and a real minus sign.

    >>> format_cell(-1.2523, 1), format_cell(2.0, 2), format_cell(-0.01, 1)
    ('−1.3', '2', '0')
    """
    text = f"{number:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text.replace("-", "−")
