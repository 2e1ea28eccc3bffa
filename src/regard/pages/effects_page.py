"""Build the page of an effect sweep: the change of a metric with an edit of each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable


def build_effects_page(
    rows: Sequence[Mapping[str, Any]], *, title: str, metric: str, edit: str, clean: float
) -> Page:
    """Build the page from plain data.

    Args:
        rows: module, layer, head, metric and effect of each head.
        title: Title of the page.
        metric: Name of the metric.
        edit: What was done to each head.
        clean: The metric without an edit.

    Returns:
        The page.
    """
    modules = {int(row["layer"]): str(row["module"]) for row in rows}
    record = {
        "title": escape_unprintable(title),
        "metric": escape_unprintable(metric),
        "edit": escape_unprintable(edit),
        "clean": clean,
        "modules": [escape_unprintable(modules.get(layer, "")) for layer in range(max(modules) + 1)],
        "layers": [int(row["layer"]) for row in rows],
        "heads": [int(row["head"]) for row in rows],
        "metrics": [float(row["metric"]) for row in rows],
        "effects": [float(row["effect"]) for row in rows],
    }
    return build_page(escape_unprintable(title), "effectsPage", record)
