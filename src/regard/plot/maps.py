"""Heat maps: the weights of one head, and one measure of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from matplotlib.colors import ListedColormap

from regard.core import arguments
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.measures import Coarse
from regard.plot.axes import (
    COLORMAP,
    INK,
    ORANGE,
    check_axes,
    ensure_axes,
    format_label,
    format_labels,
    hatch_background,
    label_axis,
)
from regard.types import Array

MIN_CELL_WITH_NUMBER = 0.28  # inches
MAX_CELLS_WITH_NUMBERS = 12  # along an edge
REDUCTIONS = {"max": "the largest", "mean": "the mean", "sum": "the sum"}
COLORBAR_LABELS = {
    "entropy": "entropy (nats)",
    "distance": "mean distance (tokens)",
    "first": "weight on the first token",
    "previous": "weight on the previous token",
    "heavy": "share of the 10% of keys that receive most",
    "duplicate": "weight on earlier copies of the token",
    "induction": "weight on the tokens after earlier copies",
    "effect": "change of the metric",
}


@dataclass(frozen=True)
class Visible(Coarse):
    """Measure that is 1 for cells in which a query attends to a key and 0 for fully masked cells."""

    reduce: Literal["mean", "max", "sum"] = "max"
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
    reduce: Literal["mean", "max", "sum"] = "max",
    numbers: bool | None = None,
    colorbar: bool = True,
    **imshow: Any,
) -> Any:
    """Draw the weights of one head as an image, queries down and keys across.

    Masked cells are hatched, NaN is orange. Tokens are written if they fit, otherwise positions. Colours run from 0 to
    the largest weight drawn.

    An axis with more than `cells` tokens is reduced to `cells` cells by `A.coarsen`, and the labels say so. This takes
    one pass over the whole head: minutes at 131,072 tokens. To be faster, draw fewer rows: `A.lazy[::256]` draws every
    256th row at its own position, in seconds.

    Args:
        A: Matrix of one head, `(q_len, kv_len)`.
        tokens: Labels of the keys, `kv_len` strings, and of the queries if they are the same sequence.
        query_tokens: Labels of the queries, `q_len` strings, if they are another sequence.
        ax: Axes to draw on. Default: a new figure.
        cells: Number of cells along an edge above which the matrix is reduced.
        reduce: Reduction of the weights in a cell: "max", "mean" or "sum".
        numbers: Whether to write the weights into the cells. Default: if there are at most 12 × 12 and they fit.
        colorbar: Whether to draw a colour bar.
        **imshow: Arguments of `Axes.imshow`, such as `vmax=1`, `norm="log"` or `cmap=`.

    Returns:
        The Axes.

    Raises:
        ArgumentError: If the matrix has several heads or is empty, if the number of tokens is wrong, or if `reduce` is
            unknown.
        ArgumentTypeError: If an argument has the wrong type.

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
    check_one_head(A, "plot.heatmap")
    (q_len, kv_len), problem = A.shape[-2:], A.problem
    positions = problem.positions
    if tokens is not None and query_tokens is None and problem.frame.q_len == kv_len:
        format_labels(tokens, kv_len, "plot.heatmap", "tokens")
        query_tokens = [tokens[i] for i in positions]
    rows = format_labels(query_tokens, q_len, "plot.heatmap", "query_tokens")
    columns = format_labels(tokens, kv_len, "plot.heatmap", "tokens")
    if reduce not in REDUCTIONS:  # also if the matrix is too small to be reduced
        raise ArgumentError(
            "plot.heatmap",
            received=f"reduce={reduce!r}",
            expected='"max", "mean" or "sum"',
            hint="The reduction combines the weights of a cell into one number.",
        )
    weights = _compute_cells(A, cells, reduce)
    coarse = weights.shape != (q_len, kv_len)
    if coarse:
        rows = columns = None
    ax = ensure_axes(ax, *_figure_size(weights.shape, (columns, rows)))

    style = {"cmap": COLORMAP, "vmin": 0, "aspect": _choose_aspect(q_len, kv_len)}
    if "norm" in imshow:
        del style["vmin"]  # a norm has its own limits
    style["extent"] = (-0.5, kv_len - 0.5, q_len - 0.5, -0.5)
    title = _colorbar_label(weights.shape, (q_len, kv_len), reduce)
    _draw_image(ax, weights, numbers, title if colorbar else None, style | imshow)
    label_axis(ax.xaxis, columns, None, kv_len)
    label_axis(ax.yaxis, rows, positions.tolist(), q_len)
    notes = ["key"]
    if coarse:
        notes.append(f"{weights.shape[0]} × {weights.shape[1]} cells")
    if weights.mask.any():
        notes.append("hatched: masked")
    if np.isnan(weights.data[~weights.mask]).any():
        notes.append("orange: NaN")
    all_rows = problem.frame.q_len
    ax.set(
        xlabel="; ".join(notes),
        ylabel="query" if q_len == all_rows else f"query; {q_len:,} of {all_rows:,} rows",
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
    """Draw one measure of every head as an image, layers down and heads across.

    A layer that ran several times has one row for each call. Heads without a number are hatched.

    Args:
        recording: A recording from `regard.watch`, or a table of one. `recording.heads(tokens)` takes one pass for each
            layer and can be drawn for each of its columns; `recording.find("it", "cat", tokens)` has the column
            "weight".
        measure: Column of the table to draw.
        tokens: Tokens of the input, needed by the measures "duplicate" and "induction".
        ax: Axes to draw on. Default: a new figure.
        numbers: Whether to write the values into the cells. Default: if there are at most 12 × 12 and they fit.
        colorbar: Whether to draw a colour bar.
        **imshow: Arguments of `Axes.imshow`, such as `vmax=1` or `cmap=`.

    Returns:
        The Axes.

    Raises:
        ArgumentError: If the table does not have this column.
        ArgumentTypeError: If `recording` is neither a recording nor a table of heads, or `ax` is not an Axes.

    >>> from regard.plot import heads
    >>> table = [{"layer": 0, "head": 0, "entropy": 1.5}, {"layer": 0, "head": 1, "entropy": 0.5}]
    >>> heads(table).images[0].get_array().tolist()
    [[1.5, 0.5]]
    """
    check_axes(ax, "plot.heads")
    table = list(recording.heads(tokens) if hasattr(recording, "heads") else recording)
    if not table or not all(isinstance(row, Mapping) and {"layer", "head"} <= row.keys() for row in table):
        raise ArgumentTypeError(
            "plot.heads",
            received=describe_argument(recording) if table else "an empty table",
            expected="a recording, or a table with the columns layer and head such as recording.heads()",
            hint="Run the model inside `with regard.watch(model) as recording:` and pass recording.",
        )
    if any(measure not in row for row in table):
        columns = [name for name, value in table[0].items() if isinstance(value, float)]
        raise ArgumentError(
            "plot.heads",
            received=f"measure={measure!r}",
            expected=f"one of {', '.join(columns)}",
            hint="The measures duplicate and induction need tokens: plot.heads(recording, measure, tokens).",
        )
    calls = sorted({(row["layer"], row.get("call", 0)) for row in table})
    cells = np.full((len(calls), 1 + max(row["head"] for row in table)), np.nan)
    for row in table:
        cells[calls.index((row["layer"], row.get("call", 0))), row["head"]] = row[measure]
    values = np.ma.masked_invalid(cells)
    several = any(call for _, call in calls)
    layer_labels = [f"{layer}, call {call}" if several else f"{layer}" for layer, call in calls]
    head_labels = [str(head) for head in range(values.shape[1])]

    ax = ensure_axes(ax, *_figure_size(values.shape, (head_labels, layer_labels)))
    style = {"cmap": COLORMAP, "aspect": _choose_aspect(*values.shape)}
    title = COLORBAR_LABELS.get(measure, format_label(measure))
    _draw_image(ax, values, numbers, title if colorbar else None, style | imshow)
    label_axis(ax.xaxis, head_labels, None, len(head_labels))
    label_axis(ax.yaxis, layer_labels, None, len(calls))
    ax.set(xlabel="head; hatched: no number" if values.mask.any() else "head", ylabel="layer")
    return ax


def effects(
    table: Any, *, ax: Any = None, numbers: bool | None = None, colorbar: bool = True, **imshow: Any
) -> Any:
    """Draw the effect of an edit of each head as an image, layers down and heads across.

    Colours are centred at 0: blue lowers the metric, red raises it.

    Args:
        table: What `regard.interventions.effects` returned for every head.
        ax: Axes to draw on. Default: a new figure.
        numbers: Whether to write the values into the cells. Default: if there are at most 12 × 12 and they fit.
        colorbar: Whether to draw a colour bar.
        **imshow: Arguments of `Axes.imshow`, such as `vmax=1` or `cmap=`.

    Returns:
        The Axes.

    Raises:
        ArgumentTypeError: If `table` is not a table of heads, or `ax` is not an Axes.

    >>> from regard.plot import effects
    >>> table = [{"layer": 0, "head": 0, "effect": -1.5}, {"layer": 0, "head": 1, "effect": 0.5}]
    >>> effects(table).images[0].get_clim()
    (-1.5, 1.5)
    """
    rows = list(table)
    values = [abs(row["effect"]) for row in rows if isinstance(row, Mapping) and "effect" in row]
    largest = max((value for value in values if np.isfinite(value)), default=0.0) or 1.0
    style = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest} | imshow
    return heads(rows, "effect", ax=ax, numbers=numbers, colorbar=colorbar, **style)


def check_one_head(A: Any, operation: str) -> None:
    """Raise an error if `A` is not the matrix of one head with at least one query and one key."""
    if not isinstance(A, AttentionMatrix):
        raise ArgumentTypeError(
            operation,
            received=describe_argument(A),
            expected="an attention matrix",
            hint="Create one with regard.attention(query, key). To draw stored weights, call ax.imshow(weights).",
        )
    arguments.check_one_head(A.shape, operation, f"{operation}(A[{{}}])")
    if not min(A.shape):
        raise ArgumentError(
            operation,
            received=f"a matrix of shape {A.shape}",
            expected="at least one query and one key",
            hint="There is nothing to draw.",
        )


def _compute_cells(A: AttentionMatrix, cells: int, reduce: Literal["mean", "max", "sum"]) -> Any:
    """Compute the weights or their reductions to draw, `(rows, columns)`, as a NumPy masked array."""
    engine = A.problem.engine
    block = min(cells, A.shape[-2]), min(cells, A.shape[-1])
    with engine.no_grad():
        if block == A.shape[-2:]:
            weights, masked = A.to_dense(), A.scores[...] == -engine.xp.inf
        elif A.mask is None and not A.problem.score_mods:
            weights = A.coarsen(block, reduce)
            masked = engine.xp.zeros_like(weights, dtype=engine.xp.bool)
        else:
            measured = A.measure(weights=Coarse(block, reduce), visible=Visible(block))
            weights, masked = measured.weights, measured.visible == 0
        arrays = [engine.to_numpy(array).reshape(block) for array in (weights, masked)]
    return np.ma.array(arrays[0], mask=arrays[1])


def _colorbar_label(cells: tuple[int, int], lengths: tuple[int, int], reduce: str) -> str:
    """Describe the numbers that the colours stand for."""
    if cells == lengths:
        return "weight"
    sizes = [f"{n / cell:.4g}" for n, cell in zip(lengths, cells, strict=True)]
    return f"weight, {REDUCTIONS[reduce]} of {sizes[0]} × {sizes[1]}"


def _draw_image(
    ax: Any, cells: Any, numbers: bool | None, colorbar_label: str | None, style: dict[str, Any]
) -> None:
    """Draw the image with its colour bar, hatch masked cells, paint NaN orange, and write numbers into the cells."""
    if cells.mask.any():
        hatch_background(ax)
    image = ax.imshow(cells, **style)
    is_nan = np.isnan(np.where(cells.mask, 0.0, cells.data))
    if is_nan.any():
        nan_cells = np.ma.array(is_nan, mask=~is_nan)
        ax.imshow(
            nan_cells, cmap=ListedColormap([ORANGE]), aspect=style["aspect"], extent=style.get("extent")
        )
    if colorbar_label is not None:
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
        bar.set_label(colorbar_label)
        bar.outline.set_visible(False)
    if numbers is None:
        numbers = max(cells.shape) <= MAX_CELLS_WITH_NUMBERS and _fits_numbers(ax, cells.shape)
    if numbers:
        for (i, j), number in np.ndenumerate(cells.data):
            if not cells.mask[i, j]:
                dark = np.dot(image.cmap(image.norm(number))[:3], (0.3, 0.59, 0.11)) < 0.5
                ax.text(
                    j, i, f"{number:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else INK
                )


def _fits_numbers(ax: Any, shape: tuple[int, int]) -> bool:
    """Tell whether a number fits into a cell."""
    box, dpi = ax.get_window_extent(), ax.figure.dpi
    return bool(min(box.height / shape[0], box.width / shape[1]) / dpi >= MIN_CELL_WITH_NUMBER)


def _choose_aspect(rows: int, columns: int) -> str:
    """Return "equal" for square cells, or "auto" if they would make a narrow ribbon."""
    return "equal" if max(rows, columns) <= 4 * min(rows, columns) else "auto"


def _figure_size(
    shape: tuple[int, int], labels: tuple[list[str] | None, list[str] | None]
) -> tuple[float, float]:
    """Return width and height in inches for an image with these labels of columns and rows."""
    rows, columns = shape
    column_space, row_space = (
        0.08 * min(12, max(map(len, names), default=0)) if names else 0.0 for names in labels
    )
    limit = 11.0 if any(labels) else 4.8
    width, height = (min(limit, max(3.2, 0.18 * count)) for count in (columns, rows))
    if _choose_aspect(rows, columns) == "equal":  # the longer side decides, so that no space is left empty
        longest = max(width, height)
        width, height = longest * columns / max(shape), longest * rows / max(shape)
    return width + row_space + 1.9, height + column_space + 0.7
