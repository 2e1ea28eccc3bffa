"""Build the page of a training run: every head at each monitored step, with a slider for the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable
from regard.types import Array

MAX_ALARMS = 200  # that the page lists


def build_history_page(
    *,
    title: str,
    steps: Sequence[int],
    heads: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Array],
    captions: Mapping[str, str],
    alarms: Sequence[Mapping[str, Any]],
) -> Page:
    """Build the page from plain data.

    Args:
        title: Title of the page.
        steps: The monitored steps, ascending.
        heads: module, layer and head of each head, ordered by layer.
        columns: Numbers by name, (heads, steps).
        captions: What the columns mean.
        alarms: kind, step, module, layer, head and text of each alarm.

    Returns:
        The page.
    """
    name = escape_unprintable(title)
    modules = {head["layer"]: escape_unprintable(head["module"]) for head in heads}
    record = {
        "title": name,
        "steps": list(steps),
        "modules": [modules.get(layer, "") for layer in range(1 + max(modules))],
        "heads": [{"layer": head["layer"], "head": head["head"]} for head in heads],
        "columns": [
            {
                "name": escape_unprintable(column),
                "caption": captions.get(column, "a measure of each row"),
                "values": encode_array(np.asarray(values, np.float32), early=True),
            }
            for column, values in columns.items()
        ],
        "alarms": [
            {
                **alarm,
                "module": escape_unprintable(alarm["module"]),
                "text": escape_unprintable(alarm["text"]),
            }
            for alarm in alarms[:MAX_ALARMS]
        ],
        "num_alarms": len(alarms),
    }
    return build_page(name, "historyPage", record)
