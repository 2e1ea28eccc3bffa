"""Figures of the computation: the four steps of one query, and the projections before them."""

from __future__ import annotations

import numpy as np

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import cat, projection
from regard.learn.figures.canvas import Canvas, Figure, format_cell

QUERY = cat.tokens.index("sat")


def draw_four_steps() -> Figure:
    """Draw how the query of "sat" becomes an output: compare, scale, normalise, aggregate."""
    attention = ScaledDotProductAttention(d_k=cat.K.shape[-1])
    raw = (cat.Q @ cat.K.T)[QUERY]
    scaled = raw / np.sqrt(cat.K.shape[-1])
    output, weights = (x[QUERY] for x in attention(cat.Q, cat.K, cat.V))
    token = cat.tokens[QUERY]

    canvas = Canvas()
    left, step = 72, 62
    centres = [left + (j + 0.5) * step for j in range(len(cat.tokens))]

    def label(y: float, name: str, detail: str = "") -> None:
        canvas.text(2, y, name, anchor="start", bold=True)
        if detail:
            canvas.text(2, y + 15, detail, anchor="start", size=11)

    def column(x: float, y: float, numbers: list[float], share: float, decimals: int = 1) -> None:
        for c, number in enumerate(numbers):
            canvas.box(
                x - 15, y + 19 * c, 30, 19, accent="second" if share < 0 else "first", share=abs(share)
            )
            canvas.text(x, y + 19 * c + 14, format_cell(number, decimals), size=11)

    label(24, "query", f"of “{token}”")
    canvas.matrix(
        centres[1] - 2, 10, cat.Q[QUERY : QUERY + 1], cell=(31, 22), decimals=1, size=12, shade=False
    )
    label(66, "keys")
    for x, name, key in zip(centres, cat.tokens, cat.K, strict=True):
        canvas.text(x, 56, name)
        column(x, 64, key.tolist(), 0)
        canvas.arrow((x, 144), (x, 162))
    label(179, "1. compare", "query · key")
    label(219, "2. scale", "÷ √4")
    label(285, "3. softmax", "weights")
    for x, score, divided, weight in zip(centres, raw, scaled, weights, strict=True):
        canvas.text(x, 179, format_cell(score, 2))
        canvas.arrow((x, 186), (x, 202))
        canvas.text(x, 219, format_cell(divided, 2))
        canvas.arrow((x, 226), (x, 242))
        canvas.bar(x - 15, 300 - 180 * weight, 30, 180 * weight)
        canvas.text(x, 316, f"{weight:.3f}", size=12)
    label(345, "4. mix", "weight · value")
    for x, value, weight in zip(centres, cat.V, weights, strict=True):
        canvas.text(x, 333, "×", size=12)
        column(x, 340, value.tolist(), weight / weights.max())
        canvas.line([(x, 420), (x, 430)])
    canvas.line([(centres[0], 430), (centres[-1], 430)])
    canvas.arrow((centres[2], 430), (centres[2], 448))
    label(466, "output", f"for “{token}”")
    canvas.matrix(
        centres[2] - 92, 452, output[None], cell=(46, 22), decimals=3, size=12, accent="second", largest=1
    )
    shares = ", ".join(f"{name} {weight:.3f}" for name, weight in zip(cat.tokens, weights, strict=True))
    return canvas.figure(
        "four-steps",
        f"One query, four steps: “{token}” is compared with five keys, and the values are mixed by the weights.",
        f"Flow of the four steps for the query of “{token}”. Its dot products with the five keys are "
        f"{', '.join(format_cell(x, 2) for x in raw)}; divided by 2 they are "
        f"{', '.join(format_cell(x, 2) for x in scaled)}. "
        f"Softmax gives the weights {shares}. The values mixed by them give the output "
        f"{', '.join(f'{x:.3f}' for x in output)}.",
    )


def draw_projections() -> Figure:
    """Draw X W_Q = Q, X W_K = K and X W_V = V with their numbers."""
    canvas = Canvas()
    X = projection.X
    matrices = {"Q": projection.W_Q, "K": projection.W_K, "V": projection.W_V}
    largest = max(float(np.abs(W).max()) for W in matrices.values())
    cell, width, top = (29.0, 20.0), 116, 0.0
    starts = (2, 2 + width + 14, 2 + 2 * (width + 14))
    for name, W in matrices.items():
        result = X @ W
        canvas.text(starts[0] + width / 2, top + 14, "X  3 × 4", bold=True)
        canvas.text(starts[1] + width / 2, top + 14, f"W_{name}  4 × 4", bold=True)
        canvas.text(starts[2] + width / 2, top + 14, f"{name}  3 × 4", bold=True)
        canvas.matrix(starts[0], top + 32, X, cell=cell, decimals=1, shade=False)
        canvas.matrix(starts[1], top + 22, W, cell=cell, decimals=1, largest=largest)
        canvas.matrix(starts[2], top + 32, result, cell=cell, decimals=1, largest=largest)
        canvas.text(starts[1] - 7, top + 66, "·", size=16, bold=True)
        canvas.text(starts[2] - 7, top + 66, "=", size=16, bold=True)
        top += 116
    canvas.height -= 2
    rows = "; ".join(
        f"{name} of “bank” is {', '.join(format_cell(x, 2) for x in (X @ W)[0])}"
        for name, W in matrices.items()
    )
    return canvas.figure(
        "projections",
        "The rows of X are “bank”, “river” and “loan”. Three matrices make three roles of the same token.",
        f"The embeddings X of bank, river and loan, three rows of four numbers, are multiplied by three matrices of "
        f"four by four numbers, W_Q, W_K and W_V. The results are the queries Q, the keys K and the values V: {rows}.",
    )
