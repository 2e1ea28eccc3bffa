"""Figures of structure: the axes of a batch, the masks, and the transformer block."""

from __future__ import annotations

import numpy as np

from regard.learn.attention import scaled_dot_product_attention
from regard.learn.block import TransformerBlock
from regard.learn.examples import cat
from regard.learn.figures.canvas import Canvas, Figure
from regard.learn.heads import MultiHeadAttention
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.masks import sliding_window


def draw_shapes() -> Figure:
    """Draw one token, a sequence, a batch and its heads, each with its shape."""
    batch = np.stack([cat.V] * 3)
    heads = MultiHeadAttention(embed_dim=4, num_heads=2).split_heads(batch)
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
        canvas.sheet(x, y, 72, 90)
        canvas.matrix(x, y, batch[layer], cell=size)
    caption(90, top + 146, "batch of sequences", batch.shape)
    for head in (0, 1):
        for layer in (2, 1, 0):
            x, y = 220 + 74 * head + 12 * layer, top + 30 - 12 * layer
            canvas.sheet(x, y, 36, 90)
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
        "token; add "
        f"again. The result has the shape of the input. It has {block.parameter_count()} parameters.",
    )
