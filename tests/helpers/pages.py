"""Hostile tokens, accessibility faults and timings shared by the tests of pages."""

from __future__ import annotations

import numpy as np
import pytest

from regard import explore

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "a\u2028b",
    "\"'`",
    "\u200fx\u202e",
    "nul\0",
    "\ud800",
    "&lt;b&gt;",
    "${alert(1)}",
]


EXPLORERS = [getattr(explore, name) for name in explore.__all__ if name != "Page"]


def rows_of_scores() -> list[list[float]]:
    rng = np.random.default_rng(5)
    inf, nan = np.inf, np.nan
    rows = [
        [0.0],
        [-inf],
        [-inf, -inf, -inf],
        [1e4, 1e4 - 1, -1e4],
        [1.0, -inf, 2.0],
        [nan, 1.0, -inf],
        [inf, 1.0],
    ]
    rows += [list(rng.normal(size=n) * scale) for n in (2, 5, 31, 257) for scale in (0.1, 3, 300)]
    for row in rows[-6:]:
        row[1] = -inf
    return [[float(x) for x in row] for row in rows]


def faults(tab) -> list[str]:
    """What axe-core finds that is serious or worse."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(tab).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in ("serious", "critical")]


LOADED = "performance.timing.domComplete - performance.timing.responseEnd"


def pace(tab) -> float:
    """Milliseconds that this browser takes for five million exponentials: what its times are compared with."""
    return tab.evaluate(
        "() => { const t = performance.now(); let x = 0; for (let i = 0; i < 5e6; i++) x += Math.exp(-i % 7);"
        " return Math.max(performance.now() - t, 1 + x * 0); }"
    )


def table(tab) -> list[list[str]]:
    """The rows of the table on screen, heads left out."""
    return tab.locator("tbody tr").evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent))")
