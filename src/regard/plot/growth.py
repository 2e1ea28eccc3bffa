"""How cost grows with length."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.learn.cost import Cost, CostTable, Profile, cost_table
from regard.learn.tables import in_bytes, in_seconds
from regard.plot.axes import BLUE, HOT, ORANGE, SOFT, axes, check_axes

LENGTHS = tuple(2**n for n in range(7, 18))  # 128 … 131,072


def cost(of: CostTable | Profile | None = None, what: str = "memory", *, ax: Any = None) -> Any:
    """How memory, work or time grows with the length, on logarithmic axes; returns the Axes.

    `of` is a `regard.learn.cost_table(lengths)`, which counts, or a `regard.learn.profile(lengths)`, which measures
    too; without either, one head of 64 numbers from 128 to 131,072 tokens. `what` is "memory": the matrix of weights,
    if it is stored, beside query, key, value and output; "work": the operations of each of the four steps; or "time"
    of a profile. Measured amounts are points, with the exponent that fits them.

    >>> ax = cost(what="work")
    >>> [line.get_label() for line in ax.lines][:2]
    ['1. compare: multiply-adds', '2. scale: multiplications']
    """
    check_axes(ax, "plot.cost")
    of = cost_table(LENGTHS) if of is None else of
    if not isinstance(of, CostTable | Profile):
        raise ArgumentTypeError(
            "plot.cost",
            received=describe_argument(of),
            expected="a table of costs or a profile",
            hint="regard.learn.cost_table([256, 512]) counts, regard.learn.profile([256, 512]) measures too.",
        )
    costs = [each.cost for each in of.rows] if isinstance(of, Profile) else list(of.rows)
    kinds = ["memory", "work", *(["time"] if isinstance(of, Profile) else [])]
    if what not in kinds:
        raise ArgumentError(
            "plot.cost",
            received=f"what={what!r} of a {type(of).__name__}",
            expected=" or ".join(f'"{kind}"' for kind in kinds),
            hint='Time is measured: plot.cost(regard.learn.profile(), "time").',
        )
    ax = axes(ax, 6.4, 4.2)
    lengths = [each.q_len for each in costs]
    for name, amounts, style in _counted(costs, what):
        ax.plot(lengths, amounts, label=name, **style)
    if isinstance(of, Profile) and what != "work":
        name, word = {"memory": ("peak_bytes", "peak memory"), "time": ("seconds", "time")}[what]
        told = f"{word}, measured: n^{of.exponents[name]:.2f}"
        measured = [getattr(each, name) for each in of.rows]
        ax.plot(lengths, measured, "o", color=ORANGE, label=told)
        ax.plot(lengths, _fitted(lengths, measured, of.exponents[name]), color=ORANGE, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2 if what == "memory" else 10)
    inches = ax.get_window_extent().width / ax.get_figure(root=True).dpi
    ax.xaxis.set_major_locator(LogLocator(2, numticks=max(3, int(1.4 * inches))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    ax.yaxis.set_major_locator(LogLocator(2 if what == "memory" else 10, numticks=9))
    if what != "work":
        told_in = in_bytes if what == "memory" else in_seconds
        ax.yaxis.set_major_formatter(FuncFormatter(lambda amount, _: told_in(amount)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    one = costs[0]
    ax.set(
        xlabel=f"tokens; one head, d_k {one.d_k}, d_v {one.d_v}",
        ylabel={"work": "operations"}.get(what, what),
    )
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _fitted(lengths: list[int], amounts: list[float], exponent: float) -> Any:
    """The line of that slope through the middle of the points, on logarithmic axes."""
    x, y = np.log(lengths), np.log(amounts)
    return np.exp(y.mean() + exponent * (x - x.mean()))


def _counted(costs: list[Cost], what: str) -> list[tuple[str, list[float], dict[str, Any]]]:
    """The lines that are known before anything runs: a name, the amounts, and how each is drawn."""
    if what == "time":
        return []
    if what == "memory":
        beside = [(each.q_len + each.kv_len) * (each.d_k + each.d_v) * each.itemsize for each in costs]
        return [
            ("weights, stored", [each.bytes for each in costs], {"color": HOT}),
            ("query, key, value and output", list(map(float, beside)), {"color": SOFT, "linestyle": "--"}),
        ]
    steps = {
        "1. compare: multiply-adds": "score_multiply_adds",
        "2. scale: multiplications": "entries",
        "3. normalise: exponentials": "entries",
        "4. aggregate: multiply-adds": "value_multiply_adds",
    }
    # Steps that cost the same lie on one another: the later of two is dashed, and both are seen.
    styles: list[dict[str, Any]] = [
        {"color": HOT, "linewidth": 2.5},
        {"color": BLUE, "linewidth": 2.5, "alpha": 0.5},
        {"color": ORANGE, "linestyle": (0, (2, 4))},
        {"color": ORANGE, "linestyle": (0, (6, 4))},
    ]
    return [
        (name, [float(getattr(each, field)) for each in costs], style)
        for (name, field), style in zip(steps.items(), styles, strict=True)
    ]
