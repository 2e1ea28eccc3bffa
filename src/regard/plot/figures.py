"""The figures: the weights of a head, one row, one measure of every head, a map over an image, and the growth of costs.

All share the colours of the pages, and the way in which axes are labelled.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from regard.core import arguments
from regard.core.arguments import resolve_row
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.images.patch_grid import PatchGrid
from regard.images.pixels import load_pixels
from regard.learn.cost import Cost, CostTable, Profile, cost_table
from regard.measures import Coarse
from regard.render.table import format_bytes, format_seconds
from regard.render.text import escape_unprintable, format_number
from regard.types import Array
from regard.validation import as_array

# The colours of the pages: one hue from light to dark, and orange beside blue, which also differ in grey.
LIGHT, DARK, BLUE, ORANGE, INK, SOFT, LINE, HATCHED = (
    "#f3f5f8",
    "#123c78",
    "#1f5aa8",
    "#d9480f",
    "#1c2330",
    "#58616f",
    "#b3afa4",
    "#efede6",
)
COLORMAP = LinearSegmentedColormap.from_list("regard", [LIGHT, DARK])

# Tokens are not formulas: show dollars and backslashes as they are.
LITERAL: dict[str, Any] = {"parse_math": False, "usetex": False}
MAX_LABEL = 24  # characters
MIN_FONT_SIZE = 5.0  # points
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
OVERLAY_COLOR = "#0090ff"
OVERLAY_COLORMAP = LinearSegmentedColormap.from_list("regard overlay", [(0, 0.56, 1, 0), OVERLAY_COLOR])
UNIFORM_LIFT = (
    1.25  # a map whose largest weight is at most this many times the mean is called practically uniform
)
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])  # of red, green and blue
MAX_OTHERS = 10  # tokens beside the patches that are drawn one by one
LENGTHS = tuple(2**n for n in range(7, 18))  # 128 … 131,072


def ensure_axes(ax: Any, width: float, height: float) -> Any:
    """Return `ax`, or the Axes of a new figure of this size in inches if it is None."""
    if ax is not None:
        return ax
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def check_axes(ax: Any, operation: str) -> None:
    """Raise `ArgumentTypeError` if `ax` is neither None nor an Axes."""
    if ax is not None and not isinstance(ax, Axes):
        raise ArgumentTypeError(
            operation,
            received=f"ax, {describe_argument(ax)}",
            expected="a Matplotlib Axes",
            hint="Create one with fig, ax = plt.subplots(). If you have several axes, pass one of them: ax[0].",
        )


def format_label(token: Any) -> str:
    r"""Return a token as a label: control characters escaped, spaces visible if there is nothing else, truncated.

    >>> from regard.plot.figures import format_label
    >>> format_label("a\n"), format_label("$x$"), format_label(" "), format_label("y" * 100)
    ('a\\n', '$x$', '␣', 'yyyyyyyyyyyyyyyyyyyyyyy…')
    """
    text = str(token)[: MAX_LABEL + 1]
    text = escape_unprintable(text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…")
    return text if text.strip(" ") else text.replace(" ", "␣")


def format_labels(tokens: Any, count: int, operation: str, argument: str) -> list[str] | None:
    """Return the labels of `count` tokens, or None if `tokens` is None.

    Raises:
        ArgumentTypeError: If `tokens` is not a sequence of strings.
        ArgumentError: If there are not `count` of them.
    """
    if tokens is None:
        return None
    if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
        raise ArgumentTypeError(
            operation,
            received=f"{argument}, {describe_argument(tokens)}",
            expected="a sequence of strings",
            hint="Pass a list such as tokenizer.convert_ids_to_tokens(ids), or list(text) for characters.",
        )
    if len(tokens) != count:
        raise ArgumentError(
            operation,
            received=f"{len(tokens)} {argument}",
            expected=f"{count}",
            hint="Pass one token for each key. If the queries are another sequence, also pass query_tokens.",
        )
    return [format_label(token) for token in tokens]


def label_axis(axis: Any, names: Sequence[str] | None, positions: Sequence[int] | None, count: int) -> None:
    """Label the `count` ticks of an axis with names if they fit, otherwise label round positions."""
    box = axis.axes.get_window_extent()
    is_x = axis.axis_name == "x"
    points = (box.width if is_x else box.height) * 72 / axis.figure.dpi / max(count, 1)
    if names is not None and points >= MIN_FONT_SIZE + 1:
        font_size = FontProperties(size=rcParams[f"{axis.axis_name}tick.labelsize"]).get_size_in_points()
        size = min(float(font_size), points - 1)
        rotation = 90 if is_x and max(map(len, names), default=0) > 2 else 0
        axis.set_ticks(range(count), list(names), fontsize=size, rotation=rotation, **LITERAL)
        axis.set_tick_params(length=0)
        return
    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))

    def format_position(tick: float, _: Any) -> str:
        tick = round(tick)
        if not 0 <= tick < count:
            return ""
        return f"{tick if positions is None else positions[tick]:,}"

    axis.set_major_formatter(FuncFormatter(format_position))


@dataclass(frozen=True)
class Visible(Coarse):
    """Measure that is 1 for cells in which a query attends to a key and 0 for fully masked cells."""

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

    Masked cells are hatched, and NaN cells are orange. The axes are labelled with tokens if they
    fit, otherwise with positions. Colours run from 0 to the largest weight drawn.

    An axis with more than `cells` tokens is reduced to `cells` cells by `A.coarsen`, and the labels say so. This takes
    one pass over the whole head: minutes at 131,072 tokens. For speed, draw fewer rows: `A.lazy[::256]` draws every
    256th row at its own position, in seconds.

    Args:
        A: Matrix of one head, `(q_len, kv_len)`.
        tokens: Labels of the keys: `kv_len` strings. They also label the queries if both are the same sequence.
        query_tokens: Labels of the queries, `q_len` strings, if the queries are a different sequence.
        ax: Axes to draw on. Default: a new figure.
        cells: Number of cells along an edge above which the matrix is reduced.
        reduce: Reduction of the weights in a cell: "max", "mean" or "sum".
        numbers: Whether to write the weights into the cells. Default: if there are at most 12 × 12 cells and the
            numbers fit.
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
    title = "weight"
    if coarse:
        sizes = [f"{n / cell:.4g}" for n, cell in zip((q_len, kv_len), weights.shape, strict=True)]
        title = f"weight, {REDUCTIONS[reduce]} of {sizes[0]} × {sizes[1]}"
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
        recording: A recording from `regard.watch`, or a table made from one. `recording.heads(tokens)` needs one pass
            per layer, and each of its columns can be drawn; `recording.find("it", "cat", tokens)` has the column
            "weight".
        measure: Column of the table to draw.
        tokens: Tokens of the input, needed by the measures "duplicate" and "induction".
        ax: Axes to draw on. Default: a new figure.
        numbers: Whether to write the values into the cells. Default: if there are at most 12 × 12 cells and the numbers
            fit.
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
        table: The table of all heads from `regard.interventions.effects`.
        ax: Axes to draw on. Default: a new figure.
        numbers: Whether to write the values into the cells. Default: if there are at most 12 × 12 cells and the numbers
            fit.
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


def _draw_image(
    ax: Any, cells: Any, numbers: bool | None, colorbar_label: str | None, style: dict[str, Any]
) -> None:
    """Draw the image with its colour bar, hatch masked cells, paint NaN orange, and write numbers into the cells."""
    if cells.mask.any():
        ax.patch.set(
            facecolor=HATCHED, hatch="////", edgecolor=LINE, linewidth=0
        )  # seen where no cell covers it
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
        box, (rows, columns) = ax.get_window_extent(), cells.shape
        smallest = min(box.height / rows, box.width / columns) / ax.figure.dpi
        numbers = max(rows, columns) <= MAX_CELLS_WITH_NUMBERS and smallest >= MIN_CELL_WITH_NUMBER
    if numbers:
        for (i, j), number in np.ndenumerate(cells.data):
            if not cells.mask[i, j]:
                dark = np.dot(image.cmap(image.norm(number))[:3], (0.3, 0.59, 0.11)) < 0.5
                ax.text(
                    j, i, f"{number:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else INK
                )


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


def row(
    A: AttentionMatrix,
    query: int,
    tokens: Sequence[str] | None = None,
    *,
    ax: Any = None,
    max_bars: int = 24,
    **barh: Any,
) -> Any:
    """Draw the weights of one query as bars, one for each key, the first key at the top.

    If the row is longer than `max_bars`, its largest weights are drawn in the order of the keys, and a grey bar shows
    the sum of the others. The weight of a sink is also grey. Masked keys are labelled. Only this row is computed.

    Args:
        A: Matrix of one head, `(q_len, kv_len)`.
        query: Position of the query. Negative positions count from the end.
        tokens: Labels of the keys, `kv_len` strings. Default: positions.
        ax: Axes to draw on. Default: a new figure.
        max_bars: Number of keys to draw.
        **barh: Arguments of `Axes.barh`.

    Returns:
        The Axes.

    Raises:
        ArgumentError: If the matrix has several heads or is empty, or if there are not `kv_len` tokens.
        ArgumentTypeError: If an argument has the wrong type.
        IndexOutOfRangeError: If there is no such query.

    >>> import numpy as np, regard
    >>> ax = row(regard.attention(np.eye(2), np.eye(2), scale=1.0), 0, tokens=["a", "b"])
    >>> [f"{bar.get_width():.4f}" for bar in ax.patches]
    ['0.7311', '0.2689']
    """
    check_axes(ax, "plot.row")
    check_one_head(A, "plot.row")
    problem, kv_len = A.problem, A.shape[-1]
    at = resolve_row(A.shape, "plot.row", query)
    labels = format_labels(tokens, kv_len, "plot.row", "tokens")
    with problem.engine.no_grad():
        weights, scores = (
            problem.engine.to_numpy(matrix[..., at, :]).reshape(kv_len).astype(float)
            for matrix in (A, A.scores)
        )
    keys = np.arange(kv_len)
    if kv_len > max_bars:
        keys = np.sort(np.argsort(-np.nan_to_num(weights, nan=np.inf), kind="stable")[:max_bars])
    names = [f"key {j}" if labels is None else labels[j] for j in keys]
    if len(keys) < kv_len and labels is not None:
        names = [f"{name}  {j:,}" for name, j in zip(names, keys, strict=True)]
    lengths, notes = weights[keys].tolist(), ["masked" if scores[j] == -np.inf else "" for j in keys]
    if len(keys) < kv_len:
        names.append(f"({kv_len - len(keys):,} other keys)")
        lengths.append(float(np.delete(weights, keys).sum()))
    if problem.sink is not None:
        names.append("(sink)")
        lengths.append(max(0.0, 1.0 - float(weights.sum())))
    notes += [""] * (len(names) - len(notes))

    ax = ensure_axes(ax, 6.4, min(11.0, max(2.0, 0.24 * len(names) + 1)))
    colours = [BLUE] * len(keys) + [LINE] * (len(names) - len(keys))
    bars = ax.barh(range(len(names)), lengths, **{"color": colours, "height": 0.75} | barh)
    ax.bar_label(
        bars,
        [note or format_number(length) for note, length in zip(notes, lengths, strict=True)],
        padding=3,
        color=SOFT,
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    label_axis(ax.yaxis, names, None, len(names))
    finite = [length for length in lengths if np.isfinite(length)]
    ax.set_xlim(0, 1.15 * max([*finite, 1e-12]))
    ax.set_xlabel("weight")
    position = int(problem.positions[at])
    is_self_attention = problem.frame.q_len == kv_len
    token = f' "{format_label(tokens[position])}"' if tokens is not None and is_self_attention else ""
    ax.set_title(f"query {position}{token}", **LITERAL)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def cost(costs: CostTable | Profile | None = None, quantity: str = "memory", *, ax: Any = None) -> Any:
    """Draw how memory, work or time grows with the length, on logarithmic axes.

    Measured amounts are drawn as points, with the exponent that fits them.

    Args:
        costs: Counted costs from `regard.learn.cost_table(lengths)`, or measured ones from
            `regard.learn.profile(lengths)`. Default: one head with head_dim 64, from 128 to 131,072 tokens.
        quantity: "memory" compares the stored weights with query, key, value and output. "work" counts the operations
            of each of the four steps. "time" needs a profile.
        ax: Axes to draw on. Default: a new figure.

    Returns:
        The Axes.

    Raises:
        ArgumentError: If `costs` does not have this quantity.
        ArgumentTypeError: If an argument has the wrong type.

    >>> from regard.plot import cost
    >>> ax = cost(quantity="work")
    >>> [line.get_label() for line in ax.lines][:2]
    ['1. compare: multiply-adds', '2. scale: multiplications']
    """
    check_axes(ax, "plot.cost")
    costs = cost_table(LENGTHS) if costs is None else costs
    if not isinstance(costs, CostTable | Profile):
        raise ArgumentTypeError(
            "plot.cost",
            received=describe_argument(costs),
            expected="a cost table or a profile",
            hint="Pass regard.learn.cost_table([256, 512]), or regard.learn.profile([256, 512]) to measure.",
        )
    counted = [row.cost for row in costs.rows] if isinstance(costs, Profile) else list(costs.rows)
    quantities = ["memory", "work", *(["time"] if isinstance(costs, Profile) else [])]
    if quantity not in quantities:
        raise ArgumentError(
            "plot.cost",
            received=f"quantity={quantity!r} of a {type(costs).__name__}",
            expected=" or ".join(f'"{name}"' for name in quantities),
            hint='To draw the time, pass a profile: plot.cost(regard.learn.profile(), "time").',
        )
    ax = ensure_axes(ax, 6.4, 4.2)
    lengths = [row.q_len for row in counted]
    for name, amounts, style in _counted_lines(counted, quantity):
        ax.plot(lengths, amounts, label=name, **style)
    if isinstance(costs, Profile) and quantity != "work":
        field, title = {"memory": ("peak_bytes", "peak memory"), "time": ("seconds", "time")}[quantity]
        exponent = costs.exponents[field]
        measured = [getattr(row, field) for row in costs.rows]
        ax.plot(lengths, measured, "o", color=ORANGE, label=f"{title}, measured: n^{exponent:.2f}")
        x, y = np.log(lengths), np.log(measured)
        fitted = np.exp(y.mean() + exponent * (x - x.mean()))  # through the geometric mean of the points
        ax.plot(lengths, fitted, color=ORANGE, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    inches = ax.get_window_extent().width / ax.figure.dpi
    ax.xaxis.set_major_locator(LogLocator(2, numticks=max(3, int(1.4 * inches))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    ax.yaxis.set_major_locator(LogLocator(10, numticks=9))
    if quantity != "work":
        format_amount = format_bytes if quantity == "memory" else format_seconds
        ax.yaxis.set_major_formatter(FuncFormatter(lambda amount, _: format_amount(amount)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    first = counted[0]
    ax.set(
        xlabel=f"tokens; one head, d_k {first.d_k}, d_v {first.d_v}",
        ylabel={"work": "operations"}.get(quantity, quantity),
    )
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _counted_lines(costs: list[Cost], quantity: str) -> list[tuple[str, list[float], dict[str, Any]]]:
    """Return the lines that follow from formulas: a name, the amounts, and the style of each."""
    if quantity == "time":
        return []
    if quantity == "memory":
        inputs = [float((row.q_len + row.kv_len) * (row.d_k + row.d_v) * row.itemsize) for row in costs]
        return [
            ("weights, stored", [row.bytes for row in costs], {"color": DARK}),
            ("query, key, value and output", inputs, {"color": SOFT, "linestyle": "--"}),
        ]
    steps = {
        "1. compare: multiply-adds": "score_multiply_adds",
        "2. scale: multiplications": "entries",
        "3. normalise: exponentials": "entries",
        "4. aggregate: multiply-adds": "value_multiply_adds",
    }
    # Lines of equal cost overlap: the later one is dashed, so that both are visible.
    styles: list[dict[str, Any]] = [
        {"color": DARK, "linewidth": 2.5},
        {"color": BLUE, "linewidth": 2.5, "alpha": 0.5},
        {"color": ORANGE, "linestyle": (0, (2, 4))},
        {"color": ORANGE, "linestyle": (0, (6, 4))},
    ]
    return [
        (name, [float(getattr(row, field)) for row in costs], style)
        for (name, field), style in zip(steps.items(), styles, strict=True)
    ]


def overlay(
    image: Any,
    weights: Any,
    grid: PatchGrid,
    *,
    query: tuple[int, int] | None = None,
    tokens: Sequence[str] | None = None,
    ax: Any = None,
    alpha: float = 0.85,
    grey: bool = True,
    colorbar: bool = True,
    **imshow: Any,
) -> Any:
    r"""Draw the weights of the patches over their image, and list the weights of the other tokens below it.

    The image is grey, and weight is the amount of colour: a patch without weight stays grey, and the patch with the
    largest weight has the full colour. The light of the image does not change the amount of colour, so a bright patch
    cannot be taken for one with weight. The line below the map says how many times the mean the largest weight is, or
    that the map is practically uniform. Other tokens (class token, registers, text) are listed there with their
    weights: each if there are at most ten and the list fits in two lines, otherwise their sum. NaN is orange.

    Args:
        image: Path, Pillow image or array, as the model saw it; see `regard.images.load_pixels`. It is stretched over
            the grid. If the processor crops, pass `regard.images.undo_normalisation(pixel_values[0], processor)`.
        weights: One row of a matrix, (tokens,): `recording[name][0, head, query]`, or the mean of several rows.
        grid: Where the patches are: `recording.grids(name)[0]`, or `regard.images.read_grids(config, inputs)[0][0]`.
        query: Row and column of the patch that attends, which is outlined.
        tokens: Names of all tokens; only names of tokens other than patches are shown. Default: the names in the grid.
        ax: Axes to draw on. Default: a new figure.
        alpha: Opacity of the colour of the largest weight, from 0 to 1. With `cmap`, opacity of the whole map.
        grey: Draw the image in grey, so that colours mean weights only.
        colorbar: Whether to draw a colour bar.
        **imshow: Arguments of `Axes.imshow` for the map, such as `vmax=1`, `norm="log"` or `cmap=`.

    Returns:
        The Axes; `ax.images[-1]` is the map.

    Raises:
        ArgumentError: If there is not one weight for each token of the grid, `query` is not a patch, `alpha` is out of
            range, or the image cannot be read.
        ArgumentTypeError: If an argument has the wrong type.

    >>> import numpy as np
    >>> from regard.images import PatchGrid
    >>> grid = PatchGrid(2, 2, before=1, names=("class",))
    >>> ax = overlay(np.zeros((8, 8, 3), np.uint8), [0.5, 0.1, 0.2, 0.0, 0.2], grid)
    >>> ax.images[-1].get_array().data
    array([[0.1, 0.2],
           [0. , 0.2]])
    >>> ax.get_xlabel()
    'patches 0.5; class 0.5\nlargest patch 1.60 × the mean'
    """
    check_axes(ax, "plot.overlay")
    if not isinstance(grid, PatchGrid):
        raise ArgumentTypeError(
            "plot.overlay",
            received=f"grid as {describe_argument(grid)}",
            expected="a regard.images.PatchGrid",
            hint="recording.grids(name)[0] is the grid of a recorded layer.",
        )
    row = as_array(weights.detach() if hasattr(weights, "detach") else weights, "plot.overlay", "weights")
    if row.ndim != 1:
        raise ArgumentError(
            "plot.overlay",
            received=f"weights as {describe_argument(row)}",
            expected=f"one row of weights, ({grid.length},)",
            hint="Select batch entry, head and query: recording[name][0, head, query].",
        )
    grid.check_length(len(row), "plot.overlay")
    inside = query is None or (len(query) == 2 and 0 <= query[0] < grid.rows and 0 <= query[1] < grid.columns)
    if not inside or not 0 <= alpha <= 1:
        raise ArgumentError(
            "plot.overlay",
            received=f"alpha={alpha!r}" if inside else f"query={query!r}",
            expected=f"query as (row, column) in a grid of {grid}; alpha from 0 to 1",
            hint="Rows are counted from the top and columns from the left, both from 0.",
        )
    names = format_labels(tokens, grid.length, "plot.overlay", "tokens")
    pixels = load_pixels(image, "plot.overlay")

    ax = ensure_axes(ax, 6.4, 6.4 * min(2.0, max(0.4, pixels.shape[0] / pixels.shape[1])))
    height, width = pixels.shape[:2]
    extent = (0, width, height, 0)
    if grey:
        pixels = np.repeat((pixels @ LUMINANCE).round().astype(np.uint8)[..., None], 3, -1)
    ax.imshow(pixels, extent=extent, interpolation="antialiased")
    drawn = np.ma.masked_invalid(grid.to_map(row.astype(np.float64)))
    style: dict[str, Any] = {"vmin": 0, "interpolation": "nearest"}
    if "cmap" in imshow:
        style["alpha"] = alpha
    else:
        ramp = OVERLAY_COLORMAP(np.arange(256))
        ramp[:, -1] *= alpha
        style["cmap"] = ListedColormap(ramp, "regard overlay")
    if "norm" in imshow:
        del style["vmin"]  # a norm has its own limits
    shown = ax.imshow(drawn, **style | {"extent": extent} | imshow)
    shown.set_cmap(shown.get_cmap().with_extremes(bad=ORANGE))
    if colorbar:
        ax.figure.colorbar(shown, ax=ax, label="weight", fraction=0.046, pad=0.03)
    if query is not None:
        patch = (width / grid.columns, height / grid.rows)
        corner = (query[1] * patch[0], query[0] * patch[1])
        for color, line in ((INK, 4), ("white", 2)):  # visible on any image
            ax.add_patch(Rectangle(corner, *patch, fill=False, edgecolor=color, linewidth=line))
    ax.set(xticks=[], yticks=[])
    inches = ax.get_window_extent().width / ax.figure.dpi
    columns = max(20, int(inches * 72 / (0.6 * ax.xaxis.label.get_fontsize())))  # characters that fit
    lines = _describe_weights(row, grid, names, columns) if len(grid.others) else []
    lines += textwrap.wrap(_describe_contrast(grid.to_map(row)), columns)
    ax.set_xlabel("\n".join(lines), color=SOFT, **LITERAL)
    return ax


def _describe_contrast(weights: Any) -> str:
    """Return how far the largest weight of a map is above the mean, in one line."""
    finite = weights[np.isfinite(weights)].astype(np.float64)
    mean = float(finite.mean()) if finite.size else 0.0
    if mean <= 0:
        return "no weight on a patch"
    lift = float(finite.max()) / mean
    largest = f"largest patch {lift:.2f} × the mean"
    return f"{largest}: practically uniform" if lift <= UNIFORM_LIFT else largest


def _describe_weights(row: Any, grid: PatchGrid, names: list[str] | None, columns: int) -> list[str]:
    """Return the sum over the patches and the weights of the other tokens, in one or two lines if there is room."""
    patches, others = f"patches {format_number(float(row[grid.positions].sum()))}", grid.others
    parts = [patches]
    for position in others[:MAX_OTHERS]:
        own = grid.names[position] if position < len(grid.names) else f"token {position}"
        label = own if names is None else names[position]
        parts.append(f"{format_label(label)} {format_number(float(row[position]))}")
    lines = _wrap(parts, columns)
    if len(others) <= MAX_OTHERS and len(lines) <= 2:
        return lines
    return _wrap([patches, f"{len(others)} other tokens {format_number(float(row[others].sum()))}"], columns)


def _wrap(parts: list[str], columns: int) -> list[str]:
    """Join parts with semicolons in lines of so many characters, breaking none of them."""
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]}; {part}"
        lines[-1:] = [joined] if len(joined) <= columns else [f"{lines[-1]};", part]
    return lines
