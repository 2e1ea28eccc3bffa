"""Draw the history of a monitor: a picture over time, and a page with a slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.lens.table import Table
from regard.monitor.alarms import Alarm
from regard.monitor.loggers import KEYS
from regard.pages.history_page import build_history_page as build_page
from regard.pages.html import Page

CAPTIONS = {
    "max_score": "the largest score; growth without bound precedes divergence",
    "max_score_mean": "the largest score of a row, mean over rows",
    "entropy": "the mean entropy of a row, in nats; near 0 a head has collapsed",
    "entropy_min": "the smallest entropy of a row, in nats",
    "first": "the mean weight on the first token, the sink",
    "first_max": "the largest weight on the first token",
    "saturated": "the share of rows with a weight above 0.99",
    "nonfinite": "rows with NaN or inf",
}


def collect_history(history: Table, operation: str) -> tuple[list[int], list[dict[str, Any]], dict[str, Any]]:
    """Collect the history as arrays.

    Args:
        history: `Monitor.history`.
        operation: Name of the calling function, for error messages.

    Returns:
        The monitored steps; module, layer and head of each head; and each column, (heads, steps), NaN where a head has
        no row.

    Raises:
        ArgumentError: If nothing was monitored yet.
    """
    if not history:
        raise ArgumentError(
            operation,
            received="a monitor without history",
            expected="at least one monitored step",
            hint="Attach the monitor and train: step 0 is monitored.",
        )
    steps = sorted({row["step"] for row in history})
    heads = {(row["module"], row["head"]): row["layer"] for row in history}
    places = {place: i for i, place in enumerate(sorted(heads, key=lambda place: (heads[place], *place)))}
    columns = {
        name: np.full((len(places), len(steps)), np.nan)
        for name in history.columns
        if name not in (*KEYS, "rows")
    }
    step_index = {step: i for i, step in enumerate(steps)}
    for row in history:
        at = places[row["module"], row["head"]], step_index[row["step"]]
        for name, values in columns.items():
            values[at] = row[name]
    named = [{"module": module, "head": head, "layer": heads[module, head]} for module, head in places]
    return steps, named, columns


def draw_history(history: Table, column: str, ax: Any) -> Any:
    """Draw one column of the history with matplotlib; see `Monitor.plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("monitor.plot: matplotlib is not installed. pip install 'regard[plot]'") from error
    steps, heads, columns = collect_history(history, "monitor.plot")
    if column not in columns:
        raise ArgumentError(
            "monitor.plot",
            received=f"column={column!r}",
            expected=f"one of {', '.join(columns)}",
            hint="monitor.history.columns lists all.",
        )
    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 1.5 + 0.18 * len(heads)), layout="constrained")
    is_share = column in ("first", "first_max", "saturated")
    image = ax.imshow(
        columns[column], aspect="auto", interpolation="nearest", vmin=0, vmax=1 if is_share else None
    )
    ax.figure.colorbar(image, ax=ax, label=column)
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
    ax.set_xticks(ticks, [f"{steps[i]:,}" for i in ticks])
    ax.set_xlabel("step")
    starts = [i for i, head in enumerate(heads) if not i or head["layer"] != heads[i - 1]["layer"]]
    ax.set_yticks(starts, [f"layer {heads[i]['layer']}" for i in starts])
    for start in starts[1:]:
        ax.axhline(start - 0.5, color="white", linewidth=1)
    return ax


def build_history_page(history: Table, alarms: Sequence[Alarm], title: str) -> Page:
    """Build the page of a history; see `Monitor.page`."""
    steps, heads, columns = collect_history(history, "monitor.page")
    return build_page(
        title=title,
        steps=steps,
        heads=heads,
        columns=columns,
        captions=CAPTIONS,
        alarms=[
            {name: getattr(alarm, name) for name in ("kind", "step", "module", "layer", "head")}
            | {"text": f"{alarm.message}. {alarm.hint}"}
            for alarm in alarms
        ],
    )
