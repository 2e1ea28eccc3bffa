"""What the figures share: the colours of the house, an Axes to draw on, labels that are shown as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.render.text import escape_unprintable

# Those of the pages. One hue from light to dark, and orange beside blue: told apart by everybody, and in grey.
COOL, HOT, BLUE, ORANGE, INK, SOFT, LINE, VEIL = (
    "#f3f5f8",
    "#123c78",
    "#1f5aa8",
    "#d9480f",
    "#1c2330",
    "#58616f",
    "#b3afa4",
    "#efede6",
)
COLOURS = LinearSegmentedColormap.from_list("regard", [COOL, HOT])

# A token is no formula: neither its dollars nor its backslashes mean anything.
LITERAL: dict[str, Any] = {"parse_math": False, "usetex": False}
LETTERS = 24
SMALLEST = 5.0  # points of a letter that can still be read


def axes(ax: Any, width: float, height: float) -> Any:
    """The Axes that was given, or those of a new figure of so many inches."""
    if ax is not None:
        return ax
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def check_axes(ax: Any, operation: str) -> None:
    """Refuse what cannot be drawn on, before anything is computed."""
    if ax is not None and not isinstance(ax, Axes):
        raise ArgumentTypeError(
            operation,
            received=f"ax, {describe_argument(ax)}",
            expected="one Axes of Matplotlib",
            hint="Take one: fig, ax = plt.subplots(); of several axes ax[0].",
        )


def literal(token: Any) -> str:
    r"""A token as a label: on one line, control characters escaped, nothing but spaces made visible, a long one cut.

    >>> literal("a\n"), literal("$x$"), literal(" "), literal("y" * 100)
    ('a\\n', '$x$', '␣', 'yyyyyyyyyyyyyyyyyyyyyyy…')
    """
    shown = str(token)[: LETTERS + 1]
    shown = escape_unprintable(shown if len(shown) <= LETTERS else shown[: LETTERS - 1] + "…")
    return shown if shown.strip(" ") else shown.replace(" ", "␣")


def named(tokens: Any, count: int, operation: str, what: str) -> list[str] | None:
    """Labels for so many tokens; None where there are none."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
        raise ArgumentTypeError(
            operation,
            received=f"{what}, {describe_argument(tokens)}",
            expected="a sequence of texts",
            hint="Pass a list, as tokenizer.convert_ids_to_tokens(ids) returns it; list(text) are its letters.",
        )
    if len(tokens) != count:
        raise ArgumentError(
            operation,
            received=f"{len(tokens)} {what}",
            expected=f"{count}",
            hint="tokens name the keys, query_tokens the queries where those are another sequence.",
        )
    return [literal(token) for token in tokens]


def label(axis: Any, names: Sequence[str] | None, positions: Sequence[int] | None, count: int) -> None:
    """Names along an axis where they fit, one at each of `count` places; otherwise positions at round numbers."""
    box = axis.axes.get_window_extent()
    across = axis.axis_name == "x"
    points = (box.width if across else box.height) * 72 / axis.get_figure(root=True).dpi / max(count, 1)
    if names is not None and points >= SMALLEST + 1:
        size = min(_points(rcParams[f"{axis.axis_name}tick.labelsize"]), points - 1)
        turned = 90 if across and max(map(len, names), default=0) > 2 else 0
        axis.set_ticks(range(count), list(names), fontsize=size, rotation=turned, **LITERAL)
        axis.set_tick_params(length=0)
        return
    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))

    def position(place: float, _: Any) -> str:
        place = round(place)
        if not 0 <= place < count:
            return ""
        return f"{place if positions is None else positions[place]:,}"

    axis.set_major_formatter(FuncFormatter(position))


def _points(size: Any) -> float:
    """A size such as "medium" in points."""
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=size).get_size_in_points())


def veil(ax: Any) -> None:
    """Hatch what no artist covers."""
    ax.patch.set(facecolor=VEIL, hatch="////", hatchcolor=LINE)
