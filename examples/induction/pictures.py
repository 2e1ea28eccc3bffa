"""The pictures of this folder, drawn from the kept checkpoints: how the loss fell, and what the models look at.

python -m examples.induction.pictures
"""

from __future__ import annotations

from math import log
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from examples.induction.data import encode, repeats
from examples.induction.model import HERE, Model, load
from regard import Mass, document

BLUE, ORANGE, GREY = "#1f5fa8", "#c8500a", "#666666"
SENTENCE = "Return the value of the named attribute of the object, or the default."


def losses(model: Model, path: Path) -> None:
    """What was measured on the way; for the induction model also what its best head gives the right token."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.add_subplot()
    history = model.about["history"]
    steps = [found["step"] for found in history]
    if model.about["task"] == "induction":
        first, second = ([found[copy] for found in history] for copy in ("first", "second"))
        best = [max(found["heads"]) for found in history]
        axes.plot(steps, first, color=BLUE)
        axes.plot(steps, second, color=ORANGE)
        axes.annotate("first copy", (steps[-1], first[-1]), (0, 5), color=BLUE, **_END)
        axes.annotate("second copy", (steps[-1], second[-1]), (0, 5), color=ORANGE, **_END)
        axes.set(xlabel="steps", ylabel="loss in nats", ylim=(0, 5.6))
        axes.set_title("A block of random tokens, and the same again")
        right = axes.twinx()
        right.plot(steps, best, color=GREY, linestyle="--", linewidth=1)
        right.annotate("best head of the second layer", (steps[-1], best[-1]), (0, -12), color=GREY, **_END)
        right.set(ylim=(0, 1.3), yticks=[0, 0.25, 0.5, 0.75, 1], ylabel="weight on the token after")
    else:
        trained = [found["loss"] / log(2) for found in history]
        axes.plot(steps, trained, color=BLUE, label="a batch of the training text")
        axes.plot(steps, [found["held out"] for found in history], color=ORANGE, label="text held out")
        axes.set(xlabel="steps", ylabel="bits for each byte", ylim=(0, None), title="English, byte by byte")
        axes.legend(frameon=False)
    _write(figure, path)


def head(path: Path, seed: int = 7) -> None:
    """The best head of the second layer on one fresh sequence: rows are queries, columns the keys they look at."""
    model = load()
    fresh = repeats(1, seed, length=48, vocabulary=model.config.vocabulary, block=(14, 18))
    _, matrices = model(fresh.tokens, need_matrices=True)
    which = max(range(model.config.heads), key=model.about["heads"].__getitem__)
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(matrices[-1][0, which], cmap="Blues", vmin=0, vmax=1)
    rows = torch.nonzero(fresh.source[0] >= 0).flatten()
    axes.scatter(fresh.source[0][rows], rows, s=70, facecolors="none", edgecolors=ORANGE, linewidths=1)
    axes.set(
        xlabel="key", ylabel="query", title=f"Layer 1, head {which}; ringed: what came next the first time"
    )
    figure.colorbar(shown, label="weight", shrink=0.8)
    _write(figure, path)


def words(path: Path) -> None:
    """A head of the text model on a sentence: of all, the one that looks most at the space before its word."""
    model = load("text")
    _, matrices = model(encode(SENTENCE), need_matrices=True)
    at = range(len(SENTENCE))
    space = document(
        at, query_ids=[SENTENCE.rfind(" ", 0, i + 1) for i in at]
    )  # -1 in the first word: no key
    shares = torch.stack([A.measure(Mass(space)).mass[0].mean(-1) for A in matrices])  # (layers, heads)
    layer, which = divmod(int(shares.argmax()), model.config.heads)
    figure = Figure(figsize=(7.4, 6.4), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(matrices[layer][0, which], cmap="Blues", vmin=0, vmax=1)
    letters = SENTENCE.replace(" ", "␣")
    axes.set_xticks(at, letters, fontsize=7)
    axes.set_yticks(at, letters, fontsize=7)
    axes.tick_params(length=0)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(
        f"Layer {layer}, head {which}: {shares.max():.0%} of its weight on the space before the word"
    )
    figure.colorbar(shown, label="weight", shrink=0.8)
    _write(figure, path)


_END = {"textcoords": "offset points", "ha": "right"}


def _write(figure: Figure, path: Path) -> None:
    """The same bytes for the same numbers."""
    with mpl.rc_context({"svg.hashsalt": "regard"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    for name in ("induction", "text"):
        losses(load(name), HERE / f"{name}-loss.svg")
    head(HERE / "induction-head.png")
    words(HERE / "text-head.png")
