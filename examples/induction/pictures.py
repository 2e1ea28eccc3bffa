"""Draw the pictures of this folder from the stored checkpoints: the loss, and what the models attend to.

python -m examples.induction.pictures
"""

from __future__ import annotations

from math import log
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from examples.induction.data import draw_repeats, encode
from examples.induction.model import HERE, load
from regard import Mass
from regard.learn.gpt import GPT
from regard.masks import document

BLUE, ORANGE, GREY = "#1f5fa8", "#c8500a", "#666666"
SENTENCE = "Return the value of the named attribute of the object, or the default."


def plot_losses(model: GPT, path: Path) -> None:
    """Plot the loss during training; for the induction model also the weight of its best head on the right token.

    Args:
        model: A trained model with its history in `about`.
        path: The file to write.
    """
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    history = model.about["history"]
    steps = [figures["step"] for figures in history]
    if model.about["task"] == "induction":
        first, second = ([figures[copy] for figures in history] for copy in ("first", "second"))
        best = [max(figures["heads"]) for figures in history]
        axes.plot(steps, first, color=BLUE)
        axes.plot(steps, second, color=ORANGE)
        axes.annotate("first copy", (steps[-1], first[-1]), (0, 5), color=BLUE, **_END)
        axes.annotate("second copy", (steps[-1], second[-1]), (0, 5), color=ORANGE, **_END)
        axes.set(xlabel="steps", ylabel="loss in nats", ylim=(0, 5.6))
        axes.set_title("A block of random tokens, and its repeat")
        twin = axes.twinx()
        twin.plot(steps, best, color=GREY, linestyle="--", linewidth=1)
        twin.annotate("best head of the second layer", (steps[-1], best[-1]), (0, -12), color=GREY, **_END)
        twin.set(ylim=(0, 1.3), yticks=[0, 0.25, 0.5, 0.75, 1], ylabel="weight on the token after")
    else:
        trained = [figures["loss"] / log(2) for figures in history]
        axes.plot(steps, trained, color=BLUE, label="a batch of the training text")
        axes.plot(steps, [figures["held out"] for figures in history], color=ORANGE, label="held-out text")
        axes.set(xlabel="steps", ylabel="bits per byte", ylim=(0, None), title="English, byte by byte")
        axes.legend(frameon=False)
    _write(figure, path)


def plot_induction_head(path: Path, seed: int = 7) -> None:
    """Plot the weights of the best head of the second layer on a new sequence; rows are queries, columns are keys.

    Args:
        path: The file to write.
        seed: Seed of the sequence.
    """
    model = load()
    sample = draw_repeats(1, seed, length=48, vocabulary=model.config.vocabulary, block=(14, 18))
    _, matrices = model(sample.tokens, need_matrices=True)
    head = max(range(model.config.heads), key=model.about["heads"].__getitem__)
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(matrices[-1][0, head], cmap="Blues", vmin=0, vmax=1)
    rows = torch.nonzero(sample.source[0] >= 0).flatten()
    axes.scatter(sample.source[0][rows], rows, s=70, facecolors="none", edgecolors=ORANGE, linewidths=1)
    title = f"Layer 1, head {head}; circled: what came next in the first copy"
    axes.set(xlabel="key", ylabel="query", title=title)
    figure.colorbar(shown, label="weight", shrink=0.8)
    _write(figure, path)


def plot_text_head(path: Path) -> None:
    """Plot the head of the text model that attends most to the space before the current word.

    Args:
        path: The file to write.
    """
    model = load("text")
    _, matrices = model(encode(SENTENCE), need_matrices=True)
    positions = range(len(SENTENCE))
    spaces = [SENTENCE.rfind(" ", 0, i + 1) for i in positions]  # -1 in the first word: no key
    mask = document(positions, query_ids=spaces)
    shares = torch.stack([A.measure(Mass(mask)).mass[0].mean(-1) for A in matrices])  # (layers, heads)
    layer, head = divmod(int(shares.argmax()), model.config.heads)
    figure = Figure(figsize=(7.4, 6.4), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(matrices[layer][0, head], cmap="Blues", vmin=0, vmax=1)
    letters = SENTENCE.replace(" ", "␣")
    axes.set_xticks(positions, letters, fontsize=7)
    axes.set_yticks(positions, letters, fontsize=7)
    axes.tick_params(length=0)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(
        f"Layer {layer}, head {head}: {shares.max():.0%} of its weight on the space before the word"
    )
    figure.colorbar(shown, label="weight", shrink=0.8)
    _write(figure, path)


_END = {"textcoords": "offset points", "ha": "right"}


def _write(figure: Figure, path: Path) -> None:
    """Write a figure reproducibly: equal numbers give equal bytes."""
    with mpl.rc_context({"svg.hashsalt": "regard"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    for name in ("induction", "text"):
        plot_losses(load(name), HERE / f"{name}-loss.svg")
    plot_induction_head(HERE / "induction-head.png")
    plot_text_head(HERE / "text-head.png")
