"""The page of a verified cache policy in a real browser."""

from __future__ import annotations

import numpy as np
import pytest

from regard.policy import FULL, CachePolicy, Verification
from tests.helpers.pages import HOSTILE, faults

EFFECTS = [[0.25 * layer - 0.5 * head for head in range(4)] for layer in range(2)]
DOCUMENT = {
    "document": "a",
    "name": HOSTILE[0],
    "tokens": 64,
    "kl": 0.5,
    "agreement": 1,
    "loss": 2,
    "policy_loss": 3,
}
TEST = {"test": HOSTILE[1], "length": 64, "able": False, "plain": 0.1}


@pytest.fixture
def tab(show):
    layers = [f"layers.{layer}.{HOSTILE[1]}" for layer in range(2)]
    policy = CachePolicy([[1, 2, 4, FULL]] * 2, np.zeros((2, 4), int), layers)
    settings = {"model": {"name": "tiny"}, "max_tokens": 64, "tests": [TEST]}
    sums = {"lost": np.zeros(8), "effect": 64 * np.ravel(EFFECTS)}
    verification = Verification(policy, 0.01, settings, [DOCUMENT], sums, np.ones((2, 4)), [])
    page = verification.page(HOSTILE[0])
    tab = show(page)
    tab.locator("#app[data-ready]").wait_for()
    return tab


def test_heads_are_shown_by_each_measure(tab):
    cells = tab.locator(".cell")
    assert [text.split()[0] for text in cells.all_inner_texts()] == ["1", "2", "4", "–"] * 2
    tab.locator("#measure").select_option("effect")
    tab.locator("#order").select_option("largest")
    values = cells.evaluate_all("nodes => nodes.map(node => Number(node.dataset.value))")
    assert values == sorted(np.ravel(EFFECTS), reverse=True)
    tab.locator(".cell[data-head='1.3']").click()
    assert tab.locator("#selected").inner_text().startswith("Layer 1, head 3: window –, lost ")
    assert tab.locator("#verdict").inner_text().startswith("The policy fails: KL 0.5 ")
    assert tab.locator("#facts").inner_text().startswith("documents")
    assert tab.locator("h1").inner_text() == HOSTILE[0]
    assert faults(tab) == []
