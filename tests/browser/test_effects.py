"""The page of an effect sweep in a real browser."""

from __future__ import annotations

import pytest

from tests.helpers.pages import HOSTILE, faults

pytest.importorskip("torch")

from regard.interventions import EffectTable

ROWS = [
    {
        "module": f"layers.{layer}.{HOSTILE[1]}",
        "layer": layer,
        "head": head,
        "metric": 2.0 + layer - head,
        "effect": 0.5 + layer - head,
    }
    for layer in range(3)
    for head in range(4)
]


@pytest.fixture
def tab(show):
    table = EffectTable(ROWS)
    table.metric, table.edit, table.clean = "logit(answer)", "its output was set to 0", 1.5
    tab = show(table.page(title=HOSTILE[0]))
    tab.locator("#app[data-ready]").wait_for()
    return tab


def read_cells(tab):
    return tab.locator(".cell").evaluate_all(
        "nodes => nodes.map(n => [n.dataset.head, Number(n.dataset.value)])"
    )


def test_every_head_is_a_cell_and_can_be_sorted_and_selected(tab):
    expected = [[f"{row['layer']}.{row['head']}", row["effect"]] for row in ROWS]
    assert read_cells(tab) == expected
    tab.locator("#order").select_option("largest")
    assert [value for _, value in read_cells(tab)] == sorted((row["effect"] for row in ROWS), reverse=True)
    tab.locator(".cell[data-head='2.3']").click()
    assert tab.locator("#selected").inner_text().startswith("Layer 2, head 3: 1 instead of 1.5, a change of ")
    tab.wait_for_url(lambda url: "head=2.3" in url and "order=largest" in url)
    assert tab.locator("h1").inner_text() == HOSTILE[0]


def test_the_page_has_no_serious_faults_of_accessibility(tab):
    assert faults(tab) == []
