"""Figures of curves: what scaling does, and when attention becomes the largest cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.learn.cost import Cost
from regard.learn.figures.canvas import Accent, Canvas, Figure
from regard.learn.variance import variance_experiment

LEFT, RIGHT, TOP, BOTTOM = 44.0, 366.0, 24.0, 236.0


class Axes:
    """Two axes: x in powers of two with equal steps, y linear from 0.

    Args:
        canvas: The canvas to draw on.
        x: The values of x, rising.
        top: The largest value of y.
        ticks: The values of y to mark.
        labels: The names of the two axes.
    """

    def __init__(
        self, canvas: Canvas, x: Sequence[int], top: float, ticks: Sequence[float], labels: tuple[str, str]
    ) -> None:
        self.canvas, self.x, self.top = canvas, x, top
        canvas.line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)])
        for tick in ticks:
            y = self.place(x[0], tick)[1]
            canvas.line([(LEFT - 4, y), (LEFT, y)])
            canvas.text(LEFT - 8, y + 4, f"{tick:g}", anchor="end", size=12)
        for value in x:
            canvas.text(self.place(value, 0)[0], BOTTOM + 18, f"{value:,}", size=11)
        canvas.text((LEFT + RIGHT) / 2, BOTTOM + 38, labels[0])
        canvas.text(4, 13, labels[1], anchor="start")

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point."""
        first, last = np.log2(self.x[0]), np.log2(self.x[-1])
        share = (np.log2(x) - first) / (last - first)
        return float(LEFT + 14 + (RIGHT - LEFT - 28) * share), float(BOTTOM - (BOTTOM - TOP) * y / self.top)

    def curve(self, y: Sequence[float], accent: Accent, dashed: bool = False) -> None:
        """Draw a curve with a dot at each x."""
        points = [self.place(x, value) for x, value in zip(self.x, y, strict=True)]
        self.canvas.line(points, accent=accent, width=2.5, dashed=dashed)
        for point in points:
            self.canvas.dot(*point, accent=accent)


def draw_scaling() -> Figure:
    """Draw the largest of eight weights for growing d_k, with and without scaling."""
    sizes = (1, 4, 16, 64, 256, 1024)
    rows = variance_experiment(d_k=sizes, keys=8, samples=400).rows
    unscaled = [row.unscaled.largest_weight for row in rows]
    scaled = [row.scaled.largest_weight for row in rows]
    canvas = Canvas()
    axes = Axes(
        canvas, sizes, 1.0, (0, 0.25, 0.5, 0.75, 1), ("d_k", "largest of eight weights, mean of 400 rows")
    )
    axes.curve(unscaled, "second", dashed=True)
    axes.curve(scaled, "first")
    x, y = axes.place(64, unscaled[3])
    canvas.text(x - 12, y - 6, "without scaling", anchor="end", bold=True)
    x, y = axes.place(64, scaled[3])
    canvas.text(x, y + 22, "with ÷ √d_k", bold=True)
    return canvas.figure(
        "scaling",
        "Without scaling one key takes nearly everything as d_k grows. With it, heads of any size start equally sharp.",
        "Two curves of the largest of eight weights for d_k from 1 to 1024. Without scaling it rises from "
        f"{unscaled[0]:.3f} to {unscaled[-1]:.3f}; divided by the root of d_k it stays between {min(scaled):.3f} and "
        f"{max(scaled):.3f}.",
    )


def draw_crossing() -> Figure:
    """Draw the multiply-adds of attention and of the matrices around it, per token, for growing length."""
    d, heads = 768, 12
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    attention = [heads * Cost(n, n, d // heads, d // heads).multiply_adds / n / 1e6 for n in lengths]
    matrices = [12 * d * d / 1e6 for _ in lengths]
    equal = 6 * d
    canvas = Canvas()
    axes = Axes(canvas, lengths, 28, (0, 5, 10, 15, 20, 25), ("tokens", "million multiply-adds per token"))
    axes.curve(matrices, "second", dashed=True)
    axes.curve(attention, "first")
    x, y = axes.place(equal, matrices[0])
    canvas.line([(x, y), (x, BOTTOM)], dashed=True)
    canvas.text(x + 5, BOTTOM - 8, f"{equal:,} tokens", anchor="start", size=12)
    canvas.text(RIGHT, y + 22, "everything else", anchor="end", bold=True)
    x, y = axes.place(8192, attention[4])
    canvas.text(x - 10, y - 6, "attention", anchor="end", bold=True)
    return canvas.figure(
        "crossing",
        f"A layer with d = {d}: the matrices cost the same for every token, attention grows with the length. They are "
        f"equal at 6d = {equal:,} tokens.",
        f"Two curves of the multiply-adds per token in a layer of width {d}. Projections and feed-forward layer take "
        f"{matrices[0]:.1f} million at any length. Attention takes {attention[0]:.1f} million at {lengths[0]} "
        "tokens and "
        f"{attention[-1]:.1f} million at {lengths[-1]:,}; the curves cross at {equal:,} tokens.",
    )
