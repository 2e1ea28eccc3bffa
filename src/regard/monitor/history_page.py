"""Draw the history of a monitor: a picture over time, and a page with a slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.monitor.alarms import Alarm
from regard.monitor.history import History
from regard.monitor.loggers import SHARES
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable

MAX_ALARMS = 200  # that the page lists
MAX_NUMBERS = 2_000_000  # in the page
MAX_INCHES, MAX_TICKS = 12.0, 40  # of the picture

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


def _check_history(history: History, operation: str) -> None:
    if not len(history):
        raise ArgumentError(
            operation,
            received="a monitor without history",
            expected="at least one monitored step",
            hint="Attach the monitor and train: the first step is monitored.",
        )


def _list_columns(history: History) -> list[str]:
    """Return the columns that are drawn."""
    return [name for name in history.last.columns if name != "rows"] if history.last else []


def _order_places(history: History) -> list[int]:
    """Return the indices of the heads by layer and head."""
    places = history.places
    return sorted(range(len(places)), key=lambda i: (places[i][1], places[i][0], places[i][2]))


def draw_history(history: History, column: str, ax: Any) -> Any:
    """Draw one column of the history with matplotlib; see `Monitor.plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("monitor.plot: matplotlib is not installed. pip install 'regard[plot]'") from error
    _check_history(history, "monitor.plot")
    columns = _list_columns(history)
    if column not in columns:
        raise ArgumentError(
            "monitor.plot",
            received=f"column={column!r}",
            expected=f"one of {', '.join(columns)}",
            hint="monitor.history.columns lists all.",
        )
    steps, order = history.steps, _order_places(history)
    layers = [history.places[i][1] for i in order]
    if ax is None:
        height = min(1.5 + 0.18 * len(order), MAX_INCHES)
        _, ax = pyplot.subplots(figsize=(8, height), layout="constrained")
    image = ax.imshow(
        history.array(column)[:, order].T,
        aspect="auto",
        interpolation="nearest",
        vmin=0,
        vmax=1 if column in SHARES else None,
    )
    ax.figure.colorbar(image, ax=ax, label=column)
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
    ax.set_xticks(ticks, [f"{steps[i]:,}" for i in ticks])
    ax.set_xlabel("step")
    starts = [i for i, layer in enumerate(layers) if not i or layer != layers[i - 1]]
    named = starts[:: 1 + len(starts) // MAX_TICKS]
    ax.set_yticks(named, [f"layer {layers[i]}" for i in named])
    for start in starts[1:]:
        ax.axhline(start - 0.5, color="white", linewidth=min(1.0, MAX_TICKS / len(starts)))
    return ax


def build_history_page(history: History, alarms: Sequence[Alarm], title: str) -> Page:
    """Build the page of a history; see `Monitor.page`."""
    _check_history(history, "monitor.page")
    name, columns, order = escape_unprintable(title), _list_columns(history), _order_places(history)
    heads = [history.places[i] for i in order]
    modules = {layer: escape_unprintable(module) for module, layer, _ in heads}
    # The page of a large model has fewer steps: the first, the last and evenly spaced ones.
    count = max(MAX_NUMBERS // (len(heads) * len(columns)), 2)
    chosen = np.unique(
        np.linspace(0, len(history.steps) - 1, min(count, len(history.steps))).round().astype(int)
    )
    steps = [history.steps[i] for i in chosen]
    record = {
        "title": name,
        "steps": steps,
        "modules": [modules.get(layer, "") for layer in range(1 + max(modules))],
        "heads": [{"layer": layer, "head": head} for _, layer, head in heads],
        "columns": [
            {
                "name": escape_unprintable(column),
                "caption": CAPTIONS.get(column, "a measure of each row"),
                "values": encode_array(
                    history.array(column)[chosen][:, order].T.astype(np.float32), early=True
                ),
            }
            for column in columns
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
