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

from collections.abc import Callable, Sequence

import numpy as np

from regard.learn.block import NumpyMultiHeadAttention, TransformerBlock
from regard.learn.canvas import GROUND, WIDTH, Accent, Anchor, Canvas, Figure, format_cell
from regard.learn.checked import scaled_dot_product_attention
from regard.learn.cost import Cost
from regard.learn.examples import cat, magnitude, projection, tiny_head
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.learn.softmax_alternatives import variance_experiment
from regard.learn.validation import Floats, as_choice
from regard.masks import sliding_window

QUERY = cat.tokens.index("sat")


def draw_four_steps() -> Figure:
    """Draw how the query of "sat" becomes an output: compare, scale, normalise, aggregate."""
    raw = (cat.Q @ cat.K.T)[QUERY]
    scaled = raw / np.sqrt(cat.K.shape[-1])
    output, weights = (x[QUERY] for x in scaled_dot_product_attention(cat.Q, cat.K, cat.V))
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
        "vectors, with their true distances.",
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
        f"and one long; the third is long and points elsewhere. The scores: {words}.",
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
        "line comes close to the corners and never leaves the triangle.",
    )


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
        f"tokens and {attention[-1]:.1f} million at {lengths[-1]:,}; the curves cross at {equal:,} tokens.",
    )


def draw_shapes() -> Figure:
    """Draw one token, a sequence, a batch and its heads, each with its shape."""
    batch = np.stack([cat.V] * 3)
    heads = NumpyMultiHeadAttention(embed_dim=4, num_heads=2).split_heads(batch)
    canvas = Canvas()
    size = (18.0, 18.0)

    def caption(x: float, y: float, name: str, shape: tuple[int, ...]) -> None:
        canvas.text(x, y, name, bold=True)
        canvas.text(x, y + 17, shape)

    row = cat.V[1:2]
    canvas.matrix(54, 66, row, cell=size)
    canvas.text(90, 58, cat.tokens[1])
    caption(90, 164, "token", row[0].shape)
    for name, y in zip(cat.tokens, range(5), strict=True):
        canvas.text(240, 43 + 18 * y, name, anchor="end", size=12)
    canvas.matrix(248, 30, cat.V, cell=size)
    caption(284, 164, "sequence", cat.V.shape)

    top = 215
    for layer in (2, 1, 0):
        x, y = 40 + 12 * layer, top + 30 - 12 * layer
        canvas.bar(x, y, 72, 90, GROUND)
        canvas.matrix(x, y, batch[layer], cell=size)
    caption(90, top + 146, "batch of sequences", batch.shape)
    for head in (0, 1):
        for layer in (2, 1, 0):
            x, y = 220 + 74 * head + 12 * layer, top + 30 - 12 * layer
            canvas.bar(x, y, 36, 90, GROUND)
            canvas.matrix(x, y, heads[layer, head], cell=size, accent="first" if head == 0 else "second")
        canvas.text(238 + 74 * head, top + 136, f"head {head}", size=12)
    caption(284, top + 160, "batch with heads", heads.shape)
    return canvas.figure(
        "shapes",
        "From a token to a batch with heads: every step adds an axis in front, and the last two stay tokens and "
        "numbers.",
        f"Four drawings with their shapes. A token is a row of numbers, shape {row[0].shape}. A sequence is a "
        "table with a "
        f"row for each token, {cat.V.shape}. A batch is a stack of such tables, {batch.shape}. Split into heads, each "
        f"table is divided by columns, {heads.shape}.",
    )


def draw_masks() -> Figure:
    """Draw four masks of five tokens and the weights that they leave."""
    causal = create_causal_mask(5)
    padding = np.broadcast_to(create_padding_mask([3], 5)[0, 0], (5, 5))
    masks = {
        "causal": causal,
        "padding, 3 of 5": padding,
        "causal and padding": causal & padding,
        "window of 2": sliding_window(2).to_dense(5, 5),
    }
    canvas = Canvas()
    for number, (name, mask) in enumerate(masks.items()):
        x, y = 40 + 190 * (number % 2), 40 + 185 * (number // 2)
        _, weights = scaled_dot_product_attention(cat.Q, cat.K, cat.V, mask)
        canvas.text(x + 65, y - 24, name, bold=True)
        for i, token in enumerate(cat.tokens):
            canvas.text(x - 4, y + 26 * i + 17, token, anchor="end", size=11)
            canvas.text(x + 26 * i + 13, y - 6, token, size=11)
        canvas.matrix(x, y, np.where(mask, weights, 0), cell=(26, 26), largest=1)
        for i, j in np.argwhere(~mask).tolist():
            canvas.text(x + 26 * j + 13, y + 26 * i + 17, "×", size=11)
    counts = ", ".join(
        f"{name} leaves {int(mask.sum())} of {mask.size} pairs" for name, mask in masks.items()
    )
    return canvas.figure(
        "masks",
        "Queries down, keys across. A cross is a masked pair, and the shade of the others is their weight.",
        f"Four masks on the five tokens of the book as tables of queries and keys: {counts}. The remaining cells are "
        "shaded by their weights.",
    )


def draw_block() -> Figure:
    """Draw the flow through a transformer block, with the shapes of the example."""
    block = TransformerBlock(embed_dim=4, num_heads=2)
    x = cat.V
    _, weights = block.attention(block.attention_norm(x))
    hidden = block.feed_forward.W_1.shape[1]
    shape = " × ".join(map(str, x.shape))
    heads, n, _ = weights.shape
    head = f"{n} × {x.shape[1] // heads}"
    canvas = Canvas()
    main, y = 130.0, 0.0

    def box(y: float, text: str, detail: str, width: float = 200, accent: bool = False) -> float:
        canvas.box(main - width / 2, y, width, 40, accent="first" if accent else None, share=0.6)
        canvas.text(main, y + 17, text, bold=True)
        canvas.text(main, y + 33, detail, size=12)
        canvas.arrow((main, y + 40), (main, y + 58))
        return y + 58

    def add(start: float, y: float) -> float:
        """Draw the residual connection from `start` to a plus sign at `y`."""
        canvas.line([(main, start - 9), (300, start - 9), (300, y + 12)])
        canvas.arrow((300, y + 12), (main + 14, y + 12))
        canvas.text(306, (start + y) / 2, "residual", anchor="start", size=12)
        canvas.ring(main, y + 12, 12)
        canvas.text(main, y + 17, "+", size=16, bold=True)
        canvas.arrow((main, y + 24), (main, y + 42))
        return y + 42

    canvas.text(main, 15, f"tokens  {shape}", bold=True)
    canvas.arrow((main, 22), (main, 46))
    y = start = 46.0
    y = box(y, "normalise", f"each token, {shape}")
    y = box(y, "project to Q, K, V, split", f"{heads} heads of {head}")
    y = box(y, "attention", f"weights {heads} × {n} × {n}", accent=True)
    y = box(y, "concatenate, project", shape)
    y = start = add(start, y)
    y = box(y, "normalise", f"each token, {shape}")
    y = box(y, "feed-forward", f"{x.shape[1]} → {hidden} → {x.shape[1]}, token by token")
    y = add(start, y)
    canvas.text(main, y + 15, f"tokens  {shape}", bold=True)
    return canvas.figure(
        "block",
        "A transformer block. Only attention moves information between tokens; both residual connections go around.",
        f"Flow diagram of a transformer block on tokens of shape {shape}: normalise; project to queries, keys and "
        "values "
        f"and split them into {heads} heads of {head}; attention with weights {heads} × {n} × {n}; concatenate and "
        "project; "
        f"add the input. Then normalise; a feed-forward network from {x.shape[1]} to {hidden} and back, token by "
        f"token; add again. The result has the shape of the input. It has {block.parameter_count()} parameters.",
    )


def draw_memory() -> Figure:
    """Draw the memories of a graphics card with their sizes and speeds, and the bytes that attention moves."""
    canvas = Canvas()
    memories = (
        ("on the chip", "20 MB", "19 TB/s", 110),
        ("HBM, on the card", "40 GB", "1.5 TB/s", 210),
        ("memory of the computer", "over 1 TB", "12.8 GB/s", 310),
    )
    centre, y = WIDTH / 2, 30.0
    canvas.text(centre, 15, "arithmetic", bold=True)
    for name, size, speed, width in memories:
        canvas.arrow((centre - 8, y + 26), (centre - 8, y - 6))
        canvas.arrow((centre + 8, y - 6), (centre + 8, y + 26))
        canvas.text(centre + 18, y + 14, speed, anchor="start", size=12)
        canvas.box(centre - width / 2, y + 30, width, 40, accent="first", share=110 / width)
        canvas.text(centre, y + 47, name, bold=True)
        canvas.text(centre, y + 63, size, size=12)
        y += 80
    cost = Cost(8192, 8192, 64, 64, itemsize=2)
    steps, fused = cost.bytes_moved / 1e6, cost.bytes_moved_fused(rows=128) / 1e6
    canvas.text(centre - 18, 119, f"steps {steps:.0f} MB,", anchor="end", size=12)
    canvas.text(centre - 18, 133, f"fused {fused:.0f} MB", anchor="end", size=12)
    return canvas.figure(
        "memory",
        "The faster a memory, the smaller it is. Between the chip and the card, a head of 8,192 tokens moves "
        f"{steps:.0f} MB step by step, and {fused:.0f} MB fused.",
        "Three memories below each other, each larger and slower than the one above: on the chip, 20 MB at 19 TB a "
        "second; on the card, 40 GB at 1.5 TB a second; of the computer, over 1 TB at 12.8 GB a second. Between the "
        f"first and the second, the four steps move {steps:.0f} MB for a head of 8,192 tokens with 64 entries, and a "
        f"fused kernel {fused:.0f} MB.",
    )


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
    "memory": draw_memory,
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
