"""The heatmap explorer in a real browser; the numbers on screen are compared with Python's."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard import explore
from regard.learn import cat
from regard.render.text import escape_unprintable, format_factor, format_number
from tests.helpers.pages import EXPLORERS, HOSTILE, LOADED, pace, table

pytestmark = pytest.mark.slow  # starts a browser


# -- Heatmap ----------------------------------------------------------------------------------------------


def shown_computation(tab) -> dict[str, str]:
    """The texts about the chosen cell."""
    return tab.locator("#cell").evaluate("""(cell) => {
      const text = (what) => [...cell.querySelectorAll(what)].map((node) => node.textContent);
      const names = ["pair", "weight", ...text("dt")];
      return Object.fromEntries([...text(".pair, .weight"), ...text("dd")].map((says, i) => [names[i], says]));
    }""")


def computation(steps, j: int) -> dict[str, str]:
    """The expected texts about a cell."""
    raw, score = format_number(steps.raw_scores[j]), format_number(steps.scores[j])
    terms = [f"{format_number(q)}·{format_factor(k)}" for q, k in zip(steps.query, steps.key[j], strict=True)]
    says = {"weight": format_number(steps.weights[j]), "Compare": " + ".join(terms) + f" = {raw}"}
    if steps.scores[j] == -np.inf:
        return {**says, "Scale": "this key is masked"}
    return {
        **says,
        "Scale": f"{raw} × {format_number(steps.scale)} = {score}",
        "Normalise": f"exp({score} − {format_number(steps.shift)}) / {format_number(steps.total)} = {says['weight']}",
    }


def point_at(tab, i: int, j: int, n: int, top: int, within: float = 0.5) -> None:
    """Move the pointer to a cell, counted from the lower right corner, which has no labels."""
    box = tab.locator("#picture").bounding_box()
    cell = (box["height"] - 2 - top) / n
    right, bottom = box["x"] + box["width"] - 1, box["y"] + box["height"] - 1
    tab.mouse.move(right - (n - j - within) * cell, bottom - (n - i - within) * cell)


def test_heatmap_by_pointer(show):
    mask = regard.causal()
    tab = show(explore.heatmap(cat.Q, cat.K, tokens=cat.tokens, mask=mask))
    for i in range(5):
        steps = regard.attention(cat.Q, cat.K, mask=mask).explain(i)
        for j in range(5):
            point_at(tab, i, j, 5, top=28, within=0.9 if (i + j) % 2 else 0.1)  # near the edges
            assert shown_computation(tab) == {
                "pair": f"{cat.tokens[i]} → {cat.tokens[j]}",
                **computation(steps, j),
            }


def test_heatmap_by_keyboard_and_as_a_table(show):
    tab = show(explore.heatmap())
    weights = regard.attention(cat.Q, cat.K).to_dense()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "picture"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    i = j = 0
    for key in [
        "ArrowDown",
        "ArrowRight",
        "ArrowRight",
        "End",
        "ArrowUp",
        "ArrowUp",
        "Home",
        "PageDown",
        "ArrowRight",
    ]:
        tab.keyboard.press(key)
        i += {"ArrowDown": 1, "ArrowUp": -1, "PageDown": 16}.get(key, 0)
        j += {"ArrowRight": 1, "End": 9, "Home": -9}.get(key, 0)
        i, j = min(max(i, 0), 4), min(max(j, 0), 4)
        assert tab.locator("#cell .place").text_content() == f"query {i}, key {j}"
        assert tab.locator("#cell .weight").text_content() == format_number(weights[i, j])
    tab.get_by_text("Show as a table").click()
    rows = [[name, *map(format_number, row)] for name, row in zip(cat.tokens, weights, strict=True)]
    assert table(tab) == rows
    assert tab.locator("#top").text_content() == format_number(weights.max())


# The brightness of each cell, near its lower right corner, where no number is. Read at once: Chromium remarks on more.
BRIGHTNESS = """([n, top]) => {
  const { width, height } = document.getElementById("picture");
  const { data } = document.getElementById("picture").getContext("2d").getImageData(0, 0, width, height);
  const cell = (height - 2 - top) / n, at = (size, i) => Math.floor(size - 1 - (n - i - 0.85) * cell);
  const sum = (p) => data[p] + data[p + 1] + data[p + 2], cells = [...Array(n).keys()];
  return cells.map((i) => cells.map((j) => sum(4 * (at(height, i) * width + at(width, j)))));
}"""


def test_heatmap_colours_follow_the_weights(show):
    tab = show(explore.heatmap())
    weights = regard.attention(cat.Q, cat.K).to_dense()
    tab.locator("#picture").focus()
    seen = np.array(tab.evaluate(BRIGHTNESS, [5, 28]))
    fit = np.polyfit(weights.ravel(), seen.ravel(), 1)
    assert fit[0] < 0 and np.abs(np.polyval(fit, weights) - seen).max() <= 3  # linear, darker for more
    tab = show(explore.heatmap())
    tab.get_by_label("scale colours to each row").check()
    seen = np.array(tab.evaluate(BRIGHTNESS, [5, 28]))
    assert np.ptp(seen.min(axis=1)) <= 3
    assert tab.locator("#top").text_content() == "row maximum"


def test_heatmap_formats_a_small_weight_as_small(show):
    tab = show(explore.heatmap(8 * np.eye(3), np.eye(3) * 3))
    tab.evaluate(
        "() => { const write = CanvasRenderingContext2D.prototype.fillText; window.written = [];"
        " CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
        " window.written.push(text); write.call(this, text, ...at); }; }"
    )
    tab.locator("#picture").press("ArrowRight")  # paints again
    tab.wait_for_function("window.written.length > 0")
    assert tab.evaluate("window.written").count("<0.001") == 6
    assert float(tab.locator("#cell .weight").inner_text()) < 1e-3  # in full beside the image


def test_heatmap_of_512_by_512(show):
    rng = np.random.default_rng(11)
    query, key = rng.normal(size=(2, 512, 8))
    A = regard.attention(query, key, mask=regard.causal())
    tab = show(explore.heatmap(query, key, mask=regard.causal()))
    assert tab.evaluate(LOADED) < 80 * pace(tab)
    assert tab.locator("table").count() == 0
    for i, j in [(0, 0), (511, 511), (511, 0), (300, 41), (41, 300)]:
        point_at(tab, i, j, 512, top=0)
        assert shown_computation(tab) == {"pair": f"query {i} → key {j}", **computation(A.explain(i), j)}
    moved = """() => {
      const canvas = document.getElementById("picture"), start = performance.now();
      for (let i = 0; i < 60; i++) {
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      }
      canvas.getContext("2d").getImageData(0, 0, 1, 1); // waits until all is drawn
      return (performance.now() - start) / 60;
    }"""
    assert tab.evaluate(moved) < 3 * pace(tab)


def test_heatmap_shows_hostile_tokens_as_text(show):
    numbers = np.eye(len(HOSTILE))
    tab = show(explore.heatmap(numbers, numbers, tokens=HOSTILE))
    tab.get_by_text("Show as a table").click()
    shown = [escape_unprintable(token) for token in HOSTILE]
    assert [row[0] for row in table(tab)] == shown
    assert tab.locator("thead th").all_text_contents() == shown
    tab.locator("#picture").focus()
    for name in shown:
        assert tab.locator("#cell .pair").text_content() == f"{shown[0]} → {name}"
        tab.keyboard.press("ArrowRight")
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_heatmap_fits_a_phone(show, scheme):
    tab = show(explore.heatmap(), viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    box = tab.locator("#picture").bounding_box()
    assert box["x"] + box["width"] <= 360
    point_at(tab, 3, 3, 5, top=28)
    assert tab.locator("#cell .pair").text_content() == "on → on"


@pytest.mark.parametrize("make", EXPLORERS)
def test_the_example_loads_quickly(show, make):
    tab = show(make())
    assert tab.evaluate(LOADED) < 20 * pace(tab)
    assert tab.locator("h1").count() == 1


# -- Refused arguments ------------------------------------------------------------------------------------


def test_heatmap_refuses():
    with pytest.raises(regard.ArgumentError, match="263169 weights; expected at most 262144"):
        explore.heatmap(np.ones((513, 1)), np.ones((513, 1)))
