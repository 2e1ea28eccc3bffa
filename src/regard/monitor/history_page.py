"""Draw the history of a monitor: a picture over time, and a page with a slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.lens.table import Table
from regard.monitor.alarms import Alarm
from regard.monitor.loggers import KEYS, SHARES
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable

MAX_ALARMS = 200  # that the page lists

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


def _collect_history(
    history: Table, operation: str
) -> tuple[list[int], list[dict[str, Any]], dict[str, Any]]:
    """Collect the history as arrays.

    Returns:
        The monitored steps; module, layer and head of each head; and each column, (heads, steps), NaN where a head has
        no row.
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
    steps, heads, columns = _collect_history(history, "monitor.plot")
    if column not in columns:
        raise ArgumentError(
            "monitor.plot",
            received=f"column={column!r}",
            expected=f"one of {', '.join(columns)}",
            hint="monitor.history.columns lists all.",
        )
    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 1.5 + 0.18 * len(heads)), layout="constrained")
    image = ax.imshow(
        columns[column], aspect="auto", interpolation="nearest", vmin=0, vmax=1 if column in SHARES else None
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
    steps, heads, columns = _collect_history(history, "monitor.page")
    name = escape_unprintable(title)
    modules = {head["layer"]: escape_unprintable(head["module"]) for head in heads}
    record = {
        "title": name,
        "steps": steps,
        "modules": [modules.get(layer, "") for layer in range(1 + max(modules))],
        "heads": [{"layer": head["layer"], "head": head["head"]} for head in heads],
        "columns": [
            {
                "name": escape_unprintable(column),
                "caption": CAPTIONS.get(column, "a measure of each row"),
                "values": encode_array(np.asarray(values, np.float32), early=True),
            }
            for column, values in columns.items()
        ],
        "alarms": [
            {name: getattr(alarm, name) for name in ("kind", "step", "layer", "head")}
            | {
                "module": escape_unprintable(alarm.module),
                "text": escape_unprintable(f"{alarm.message}. {alarm.hint}"),
            }
            for alarm in alarms[:MAX_ALARMS]
        ],
        "num_alarms": len(alarms),
    }
    return build_page(name, "historyPage", record)
