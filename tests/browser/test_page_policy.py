"""The page of a verified cache policy in a real browser."""

from __future__ import annotations

import pytest

from regard.pages.policy_page import build_policy_page
from tests.helpers.pages import HOSTILE, faults

HEADS = [
    {
        "module": f"layers.{layer}.{HOSTILE[1]}",
        "layer": layer,
        "head": head,
        "window": None if head == 3 else 2**head,
        "effect": 0.25 * layer - 0.5 * head,
    }
    for layer in range(2)
    for head in range(4)
]
DOCUMENTS = [
    {
        "document": "a",
        "name": HOSTILE[0],
        "tokens": 64,
        "kl": 0.5,
        "agreement": 1,
        "loss": 2,
        "policy_loss": 3,
    }
]


@pytest.fixture
def tab(show):
    page = build_policy_page(
        title=HOSTILE[0],
        verdict="The policy fails.",
        holds=False,
        facts=[("KL divergence", HOSTILE[1])],
        heads=HEADS,
        measures=[("window", "Keys that are kept."), ("effect", "Part in the divergence.")],
        documents=DOCUMENTS,
    )
    tab = show(page)
    tab.locator("#app[data-ready]").wait_for()
    return tab


def test_heads_are_shown_by_each_measure(tab):
    cells = tab.locator(".cell")
    assert [text.split()[0] for text in cells.all_inner_texts()] == ["1", "2", "4", "–"] * 2
    tab.locator("#measure").select_option("effect")
    tab.locator("#order").select_option("largest")
    values = cells.evaluate_all("nodes => nodes.map(node => Number(node.dataset.value))")
    assert values == sorted((row["effect"] for row in HEADS), reverse=True)
    tab.locator(".cell[data-head='1.3']").click()
    assert tab.locator("#selected").inner_text().startswith("Layer 1, head 3: window –, effect ")
    assert tab.locator("#verdict").inner_text() == "The policy fails."
    assert tab.locator("#facts").inner_text().startswith("KL divergence")
    assert tab.locator("h1").inner_text() == HOSTILE[0]
    assert faults(tab) == []
