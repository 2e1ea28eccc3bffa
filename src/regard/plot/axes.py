"""Colours, Axes and labels shared by the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.render.text import escape_unprintable

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

    >>> from regard.plot.axes import format_label
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
            hint="Pass one token for each key. If the queries are another sequence, pass query_tokens too.",
        )
    return [format_label(token) for token in tokens]


def label_axis(axis: Any, names: Sequence[str] | None, positions: Sequence[int] | None, count: int) -> None:
    """Label the `count` ticks of an axis with names if they fit, otherwise label round positions."""
    box = axis.axes.get_window_extent()
    is_x = axis.axis_name == "x"
    points = (box.width if is_x else box.height) * 72 / axis.figure.dpi / max(count, 1)
    if names is not None and points >= MIN_FONT_SIZE + 1:
        size = min(_to_points(rcParams[f"{axis.axis_name}tick.labelsize"]), points - 1)
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


def _to_points(size: Any) -> float:
    """Convert a font size such as "medium" to points."""
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=size).get_size_in_points())


def hatch_background(ax: Any) -> None:
    """Hatch the area that no artist covers."""
    ax.patch.set(facecolor=HATCHED, hatch="////", edgecolor=LINE, linewidth=0)
