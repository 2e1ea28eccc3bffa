"""Maps: one head's weights, and one measure of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from matplotlib.colors import ListedColormap

from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.measures import Coarse
from regard.plot.axes import COLOURS, INK, ORANGE, axes, check_axes, label, literal, named, veil
from regard.types import Array

SPACIOUS = 0.28  # inches for a cell with a number in it
NUMBERED = 12  # cells along an edge up to which numbers are written into them
REDUCED = {"max": "the largest", "mean": "the mean", "sum": "the sum"}
UNITS = {
    "entropy": "entropy (nats)",
    "distance": "mean distance (tokens)",
    "first": "weight on the first token",
    "previous": "weight on the previous token",
    "heavy": "share of the tenth of the keys that get most",
    "duplicate": "weight on earlier copies of the token",
    "induction": "weight on what came after earlier copies",
}


@dataclass(frozen=True)
class Visible(Coarse):
    """1 for cells in which some query sees some key, 0 for the others."""

    reduce: str = "max"
    reads_scores: ClassVar[bool] = True

    def step(self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        return super().step(state, xp.astype(scores != -xp.inf, weights.dtype), scores, q_idx, kv_idx, xp)


def heatmap(
    A: AttentionMatrix,
    tokens: Sequence[str] | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    ax: Any = None,
    cells: int = 256,
    reduce: str = "max",
    numbers: bool | None = None,
    colorbar: bool = True,
    **imshow: Any,
) -> Any:
    """The weights of one head as a picture, queries down and keys across; returns the Axes.

    Hidden cells are hatched. `tokens` name the keys, and the queries too where they are the same sequence;
    `query_tokens` name the queries where they are another. Names are written where they fit, else positions; weights
    are written into the cells of a small matrix, or as `numbers` says. Colours run from 0 to the largest weight drawn;
    `vmax=1`, `norm="log"`, `cmap=` and whatever else `Axes.imshow` takes go through to it.

    Above `cells` tokens an axis is drawn as so many cells, each the largest of its weights, or their "mean" or "sum"
    (`reduce`), and the labels say so. That is `A.coarsen`, one pass over the whole head: minutes at 131,072 tokens.
    To be quicker read fewer rows: of `A.lazy[::256]` every 256th is drawn, at its own position, in seconds.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.eye(3), np.eye(3), mask=regard.causal())
    >>> ax = heatmap(A, tokens=["a", "b", "$c$"])
    >>> ax.images[0].get_array().round(2)
    masked_array(
      data=[[1.0, --, --],
            [0.36, 0.64, --],
            [0.26, 0.26, 0.47]],
      mask=[[False,  True,  True],
            [False, False,  True],
            [False, False, False]],
      fill_value=1e+20)
    """
    check_axes(ax, "plot.heatmap")
    check(A, "plot.heatmap")
    (q_len, kv_len), problem = A.shape[-2:], A._problem
    positions = problem.positions
    if tokens is not None and query_tokens is None and problem.frame.q_len == kv_len:
        named(tokens, kv_len, "plot.heatmap", "tokens")
        query_tokens = [tokens[i] for i in positions]
    rows = named(query_tokens, q_len, "plot.heatmap", "query_tokens")
    columns = named(tokens, kv_len, "plot.heatmap", "tokens")
    if reduce not in REDUCED:  # of a small matrix, which is not reduced, too
        raise ArgumentError(
            "plot.heatmap",
            received=f"reduce={reduce!r}",
            expected='"max", "mean" or "sum"',
            hint="It says how the weights of one of the cells become one number.",
        )
    shown = _weights(A, cells, reduce)
    coarse = shown.shape != (q_len, kv_len)
    if coarse:
        rows = columns = None
    ax = axes(ax, *_size(shown.shape, (columns, rows)))

    how = {"cmap": COLOURS, "vmin": 0, "aspect": _aspect(q_len, kv_len)}
    if "norm" in imshow:
        del how["vmin"]  # a norm has its own ends
    how["extent"] = (-0.5, kv_len - 0.5, q_len - 0.5, -0.5)
    _paint(ax, shown, numbers, colorbar, _told(shown.shape, (q_len, kv_len), reduce), how | imshow)
    label(ax.xaxis, columns, None, kv_len)
    label(ax.yaxis, rows, positions.tolist(), q_len)
    notes = ["key"]
    if coarse:
        notes.append(f"{shown.shape[0]} × {shown.shape[1]} cells")
    if shown.mask.any():
        notes.append("hatched: hidden")
    if np.isnan(shown.data[~shown.mask]).any():
        notes.append("orange: NaN")
    whole = problem.frame.q_len
    ax.set(
        xlabel="; ".join(notes), ylabel="query" if q_len == whole else f"query; {q_len:,} of {whole:,} rows"
    )
    return ax


def heads(
    recording: Any,
    measure: str = "entropy",
    tokens: Any = None,
    *,
    ax: Any = None,
    numbers: bool | None = None,
    colorbar: bool = True,
    **imshow: Any,
) -> Any:
    """One measure of every head, layers down and heads across; returns the Axes.

    `seen` is what a watched model gave, or a table of it: `recording.heads(tokens)`, which takes one pass for each layer and
    then serves for any of its columns, or `recording.find("it", "cat", tokens)`, whose column is "weight". A layer that ran
    several times has a line for each call. Heads without a number are hatched. The rest is as in `heatmap`.

    >>> table = [{"layer": 0, "head": 0, "entropy": 1.5}, {"layer": 0, "head": 1, "entropy": 0.5}]
    >>> heads(table).images[0].get_array().tolist()
    [[1.5, 0.5]]
    """
    check_axes(ax, "plot.heads")
    table = list(recording.heads(tokens) if hasattr(recording, "heads") else recording)
    if not table or not all(isinstance(each, Mapping) and {"layer", "head"} <= each.keys() for each in table):
        raise ArgumentTypeError(
            "plot.heads",
            received=describe_argument(recording) if table else "nothing",
            expected="what regard.watch gave, or a table with layer and head, such as recording.heads()",
            hint="Run the model inside `with regard.watch(model) as recording:` and pass seen.",
        )
    if any(measure not in each for each in table):
        known = [name for name, value in table[0].items() if isinstance(value, float)]
        raise ArgumentError(
            "plot.heads",
            received=f"measure={measure!r}",
            expected=f"one of {', '.join(known)}",
            hint="duplicate and induction need the tokens: plot.heads(recording, measure, tokens).",
        )
    lines = sorted({(each["layer"], each.get("call", 0)) for each in table})
    drawn = np.full((len(lines), 1 + max(each["head"] for each in table)), np.nan)
    for each in table:
        drawn[lines.index((each["layer"], each.get("call", 0))), each["head"]] = each[measure]
    shown = np.ma.masked_invalid(drawn)
    several = any(call for _, call in lines)
    names = [f"{layer}, call {call}" if several else f"{layer}" for layer, call in lines]

    numbered = [str(head) for head in range(shown.shape[1])]
    ax = axes(ax, *_size(shown.shape, (numbered, names)))
    how = {"cmap": COLOURS, "aspect": _aspect(*shown.shape)}
    _paint(ax, shown, numbers, colorbar, UNITS.get(measure, literal(measure)), how | imshow)
    label(ax.xaxis, numbered, None, len(numbered))
    label(ax.yaxis, names, None, len(lines))
    ax.set(xlabel="head; hatched: no number" if shown.mask.any() else "head", ylabel="layer")
    return ax


def check(A: Any, operation: str) -> None:
    """Refuse what is not one head of one matrix with something in it."""
    if not isinstance(A, AttentionMatrix):
        raise ArgumentTypeError(
            operation,
            received=describe_argument(A),
            expected="an attention matrix",
            hint="regard.attention(query, key) makes one; weights that are stored are drawn by ax.imshow(weights).",
        )
    A._check_one_head(operation, f"{operation}(A.lazy[{{}}])")
    if not min(A.shape):
        raise ArgumentError(
            operation,
            received=f"a matrix of shape {A.shape}",
            expected="a query and a key at least",
            hint="There is nothing to draw.",
        )


def _weights(A: AttentionMatrix, cells: int, reduce: str) -> Any:
    """The weights or cells to be drawn, (rows, columns), as a masked array: what is hidden is masked."""
    engine = A._problem.engine
    block = min(cells, A.shape[-2]), min(cells, A.shape[-1])
    with engine.detached():
        if block == A.shape[-2:]:
            shown, hidden = A.to_dense(), A.scores[...] == -engine.xp.inf
        elif A.mask is None and not A._problem.score_mods:
            shown = A.coarsen(block, reduce)
            hidden = shown != shown
            hidden[...] = False
        else:
            made = A.measure(shown=Coarse(block, reduce), recording=Visible(block))
            shown, hidden = made.shown, made.recording == 0
        both = [engine.to_numpy(each).reshape(block) for each in (shown, hidden)]
    return np.ma.array(both[0], mask=both[1])


def _told(cells: tuple[int, int], lengths: tuple[int, int], reduce: str) -> str:
    """What a colour stands for."""
    if cells == lengths:
        return "weight"
    sizes = [f"{n / cell:.4g}" for n, cell in zip(lengths, cells, strict=True)]
    return f"weight, {REDUCED[reduce]} of {sizes[0]} × {sizes[1]}"


def _paint(ax: Any, shown: Any, numbers: bool | None, colorbar: bool, told: str, how: dict[str, Any]) -> None:
    """The image, its colour bar, the hatching of what is masked, NaN in orange, and numbers in the cells."""
    if shown.mask.any():
        veil(ax)
    image = ax.imshow(shown, **how)
    broken = np.isnan(np.where(shown.mask, 0.0, shown.data))
    if broken.any():
        extent = how.get("extent")
        flat = np.ma.array(broken, mask=~broken)
        ax.imshow(flat, cmap=ListedColormap([ORANGE]), aspect=how["aspect"], extent=extent)
    if colorbar:
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
        bar.set_label(told)
        bar.outline.set_visible(False)
    if numbers or (numbers is None and max(shown.shape) <= NUMBERED and _spacious(ax, shown.shape)):
        for (i, j), number in np.ndenumerate(shown.data):
            if not shown.mask[i, j]:
                dark = np.dot(image.cmap(image.norm(number))[:3], (0.3, 0.59, 0.11)) < 0.5
                ax.text(
                    j, i, f"{number:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else INK
                )


def _spacious(ax: Any, shape: tuple[int, int]) -> bool:
    """Whether a cell has room for a number."""
    box, dpi = ax.get_window_extent(), ax.get_figure(root=True).dpi
    return bool(min(box.height / shape[0], box.width / shape[1]) / dpi >= SPACIOUS)


def _aspect(rows: int, columns: int) -> str:
    """Square cells, unless that would make a ribbon."""
    return "equal" if max(rows, columns) <= 4 * min(rows, columns) else "auto"


def _size(shape: tuple[int, int], names: tuple[list[str] | None, list[str] | None]) -> tuple[float, float]:
    """Inches for a figure of so many rows and columns; one with names to read is larger."""
    rows, columns = shape
    across, down = (0.08 * min(12, max(map(len, each), default=0)) if each else 0.0 for each in names)
    most = 11.0 if any(names) else 4.8
    width, height = (min(most, max(3.2, 0.18 * n)) for n in (columns, rows))
    if _aspect(rows, columns) == "equal":  # the longer side decides, so that no paper is left empty
        longest = max(width, height)
        width, height = longest * columns / max(shape), longest * rows / max(shape)
    return width + down + 1.9, height + across + 0.7
