"""Figures in the plane: vectors that move, lengths that count, and outputs between their values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regard.learn.attention import scaled_dot_product_attention
from regard.learn.examples import magnitude, projection, tiny_head
from regard.learn.figures.canvas import WIDTH, Anchor, Canvas, Figure, format_cell
from regard.learn.validation import Floats

START: Anchor = "start"
MIDDLE: Anchor = "middle"
Place = Callable[[Floats], tuple[float, float]]


def fit_plane(points: Floats, top: float, height: float, margin: float = 45) -> Place:
    """Return a function that maps points of the plane to the drawing, with the same scale on both axes."""
    low, high = points.min(axis=0), points.max(axis=0)
    scale = float(min((WIDTH - 2 * margin) / (high[0] - low[0]), (height - 50) / (high[1] - low[1])))
    middle = (low + high) / 2

    def place(point: Floats) -> tuple[float, float]:
        return (
            float(WIDTH / 2 + scale * (point[0] - middle[0])),
            float(top + height / 2 - scale * (point[1] - middle[1])),
        )

    return place


def draw_bank() -> Figure:
    """Draw the static vector of "bank" and the two that attention makes of it."""
    bank, river, loan = projection.X
    mixed = {
        name: scaled_dot_product_attention(text, text, text)[0][0]
        for name, text in {
            "by the river": np.array([bank, river]),
            "with the loan": np.array([bank, loan]),
        }.items()
    }
    points = np.array([bank, river, loan, *mixed.values()])
    centred = points - points.mean(axis=0)
    flat: Floats = centred @ np.linalg.svd(centred)[2][:2].T  # the plane that keeps most of the distances
    assert np.allclose(
        (flat**2).sum(), (centred**2).sum()
    )  # all five are mixtures of three, so a plane holds them

    canvas = Canvas()
    place = fit_plane(flat, 0, 250)
    at = [place(point) for point in flat]
    for index, name in ((1, "river"), (2, "loan")):
        canvas.dot(*at[index], radius=5)
        canvas.text(at[index][0], at[index][1] + (22 if at[index][1] > 125 else -12), name, bold=True)
    for index, name, down in ((3, "by the river", -10), (4, "with the loan", 24)):
        canvas.line([at[index], at[index - 2]], dashed=True)
        canvas.arrow(at[0], at[index], accent="first", width=2.5)
        canvas.dot(*at[index], accent="first", radius=5)
        canvas.text(at[index][0] - 8, at[index][1] + down, f"bank {name}", anchor="end")
    canvas.dot(*at[0], accent="second", radius=7)
    canvas.text(at[0][0], at[0][1] - 14, "bank, static", bold=True)
    canvas.height = max(canvas.height, 250)
    cosine = {name: _cosines(vector, river, loan) for name, vector in {"static": bank, **mixed}.items()}
    words = "; ".join(f"{name}: {a:.3f} to river, {b:.3f} to loan" for name, (a, b) in cosine.items())
    return canvas.figure(
        "bank",
        "One static vector becomes two contextual ones, each nearer to its neighbour. The plane contains all five "
        "vectors, "
        "with their true distances.",
        "A plane with the vectors of river and loan, and the static vector of bank between them. One arrow leads "
        "from it "
        "towards river, to “bank by the river”, the other towards loan, to “bank with the loan”. Cosines of bank, "
        f"{words}.",
    )


def _cosines(vector: Floats, *others: Floats) -> tuple[float, ...]:
    return tuple(float(vector @ other / np.linalg.norm(vector) / np.linalg.norm(other)) for other in others)


def draw_magnitude() -> Figure:
    """Draw a query and three keys, with the scores that depend on their lengths."""
    query, keys = magnitude.Q[0], magnitude.K
    scores = keys @ query
    canvas = Canvas()
    corners = np.array([[0, 0], query, *keys, [4.5, 4.4]])
    place = fit_plane(corners, 0, 290, margin=30)
    origin = place(np.zeros(2))
    canvas.arrow(origin, place(np.array([4.8, 0])), width=0.8)
    canvas.arrow(origin, place(np.array([0, 4.5])), width=0.8)
    for name, key, score in zip(magnitude.tokens, keys, scores, strict=True):
        tip = place(key)
        canvas.arrow(origin, tip, accent="second", width=2.5)
        at, anchor = (tip[0] + 10, tip[1] + 4), START
        if name != "misaligned":  # below the axis, with a line to the tip
            at, anchor = (tip[0] - (20 if name.startswith("long") else 0), origin[1] + 24), MIDDLE
            canvas.line([tip, (tip[0], origin[1] + 8)], dashed=True)
        canvas.text(*at, name, anchor=anchor)
        canvas.text(at[0], at[1] + 17, f"score {format_cell(score, 2)}", anchor=anchor, bold=True)
    tip = place(query)
    canvas.arrow(origin, tip, accent="first", width=3)
    canvas.text(tip[0] - 8, tip[1] - 10, "query", anchor="end", bold=True)
    words = ", ".join(
        f"{name} {format_cell(score, 2)}" for name, score in zip(magnitude.tokens, scores, strict=True)
    )
    return canvas.figure(
        "magnitude",
        "A long key that points elsewhere scores higher than a short one that points the right way.",
        "A query and three keys as arrows in the plane. Two keys point in the direction of the query, one short "
        "and one "
        f"long; the third is long and points elsewhere. The scores: {words}.",
    )


def draw_hull() -> Figure:
    """Draw the outputs of the smallest head inside the triangle of its values."""
    outputs, _ = scaled_dot_product_attention(tiny_head.Q, tiny_head.K, tiny_head.V)
    values, mean = tiny_head.V, tiny_head.V.mean(axis=0)
    angles = np.linspace(0, 2 * np.pi, 121)
    turned = 6 * np.stack(
        [np.cos(angles), np.sin(angles)], axis=1
    )  # a long query that looks in every direction
    path, _ = scaled_dot_product_attention(turned, tiny_head.K, values)

    canvas = Canvas()
    place = fit_plane(values, 0, 300, margin=90)
    corners = [place(value) for value in values]
    canvas.polygon(corners, accent="second")
    canvas.line([place(point) for point in path], accent="first", width=1.5, dashed=True)
    for token, value, (x, y) in zip(tiny_head.tokens, values, corners, strict=True):
        canvas.dot(x, y, accent="second", radius=6)
        canvas.text(x + 10, y - 2, f"value {token}", anchor="start")
        canvas.text(x + 10, y + 14, f"({', '.join(format_cell(v, 1) for v in value)})", anchor="start")
    for i, output in enumerate(outputs):
        x, y = place(output)
        canvas.dot(x, y, accent="first", radius=6)
        canvas.text(x - 10, y + 5, f"output {i}", anchor="end", bold=True)
    x, y = place(mean)
    canvas.dot(x, y, radius=4)
    canvas.text(x + 4, y + 19, "mean")
    canvas.height = max(canvas.height, 300)
    places = "; ".join(
        f"output {i} at ({output[0]:.4f}, {output[1]:.4f})" for i, output in enumerate(outputs)
    )
    return canvas.figure(
        "hull",
        "Outputs stay inside the triangle of the values. The dashed line shows the outputs of a long query as it "
        "turns.",
        f"A triangle whose corners are the three values of the smallest head. Inside it are its outputs: {places}; the "
        "mean of the values; and a dashed line, the outputs of a query of length 6 that turns once around. The "
        "line comes "
        "close to the corners and never leaves the triangle.",
    )
