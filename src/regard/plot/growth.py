"""The growth of memory, work and time with the length."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.learn.cost import Cost, CostTable, Profile, cost_table
from regard.plot.axes import BLUE, DARK, ORANGE, SOFT, check_axes, ensure_axes
from regard.render.table import format_bytes, format_seconds

LENGTHS = tuple(2**n for n in range(7, 18))  # 128 … 131,072


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
        ax.plot(lengths, _fit_line(lengths, measured, exponent), color=ORANGE, linewidth=1)
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


def _fit_line(lengths: list[int], amounts: list[float], exponent: float) -> Any:
    """Return the line with this exponent through the geometric mean of the points."""
    x, y = np.log(lengths), np.log(amounts)
    return np.exp(y.mean() + exponent * (x - x.mean()))


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
