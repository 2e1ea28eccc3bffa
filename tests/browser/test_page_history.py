"""The page of `Monitor.page` in a real browser: the numbers at every step match the history, at two widths."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.pages import HOSTILE, faults

pytest.importorskip("torch")

from regard.monitor import history_page
from regard.monitor.alarms import Alarm
from regard.monitor.history import History, Snapshot
from regard.monitor.history_page import build_history_page, draw_history

pytestmark = pytest.mark.slow  # starts a browser

STEPS = [0, 50, 100, 150, 200]
HEADS = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def build_history() -> History:
    rng, history = np.random.default_rng(0), History(0)
    places = [(f"layers.{layer}.{HOSTILE[0]}", layer, head) for layer, head in HEADS]
    for i, step in enumerate(STEPS):
        values = [
            [
                (1 + i) * (1 + head) + rng.random(),
                np.nan if (layer, head, step) == (1, 1, 100) else 3 / (1 + i) + head / 10,
                64,
            ]
            for _, layer, head in places
        ]
        columns = ("max_score", "entropy", "rows")
        history.add(Snapshot(step, ("module", "layer", "head"), places, columns, np.array(values)))
    return history


@pytest.mark.parametrize("width", [1200, 390])
def test_numbers_at_every_step_and_no_faults(show, width: int) -> None:
    history = build_history()
    alarm = Alarm(
        "score growth", 150, history[3]["module"], 0, 3, 16.2, 16.0, f"it is {HOSTILE[1]}", "Lower it."
    )
    tab = show(build_history_page(history, [alarm], "Run"), viewport={"width": width, "height": 900})
    tab.locator("#app[data-ready]").wait_for()

    def read_cells() -> dict[str, float]:
        cells = tab.locator(".cell").evaluate_all(
            "nodes => nodes.map(n => [n.dataset.head, Number(n.dataset.value)])"
        )
        return dict(cells)

    for column in ("max_score", "entropy"):
        tab.locator("#column").select_option(column)
        for place, step in enumerate(STEPS):
            tab.locator("#time").fill(str(place))
            expected = {
                f"{row['layer']}.{row['head']}": np.float32(row[column]) for row in history.filter(step=step)
            }
            np.testing.assert_array_equal(list(read_cells().values()), list(expected.values()))
            assert list(read_cells()) == list(expected)
    tab.locator("#alarms button").click()
    assert tab.locator("#head h2").text_content() == "Layer 0, head 3"
    assert tab.locator("#time").input_value() == "3"
    assert tab.locator(".cell.alarm").count() == 1
    tab.locator("#time").fill("2")
    assert tab.locator(".cell.alarm").count() == 0  # it was raised later
    assert HOSTILE[1] in tab.locator(".own-alarm").text_content()
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_plot_draws_each_head_over_time() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = draw_history(build_history(), "max_score", None)
    drawn = ax.images[0].get_array()
    assert drawn.shape == (len(HEADS), len(STEPS))
    assert drawn[3, 4] == build_history().filter(layer=0, head=3, step=200)[0]["max_score"]
    pyplot.close(ax.figure)


def test_the_page_of_a_large_model_has_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_page, "MAX_NUMBERS", 2 * len(HEADS) * 3)
    record = build_history_page(build_history(), [], "Run").html
    assert '"steps":[0,100,200]' in record.replace(" ", "")
