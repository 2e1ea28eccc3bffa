"""The pipeline and heatmap explorers in a real browser; the numbers on screen are compared with Python's."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore.pipeline_explorer import MAX_NUMBERS
from regard.learn import cat
from regard.render.text import escape_unprintable, format_factor, format_number, format_vector
from tests.helpers.pages import EXPLORERS, HOSTILE, LOADED, pace, table

pytestmark = pytest.mark.slow  # starts a browser


# -- Pipeline ---------------------------------------------------------------------------------------------


def expected(steps, step: int) -> list[list[str]]:
    """The cells of the table for an explanation."""
    rows = []
    for j, name in enumerate(steps.key_tokens):
        score = "masked" if steps.scores[j] == -np.inf else format_number(steps.scores[j])
        if step == 0:
            products = " + ".join(
                f"{format_number(q)}·{format_factor(k)}"
                for q, k in zip(steps.query, steps.key[j], strict=True)
            )
            rows.append([name, format_vector(steps.key[j]), products, format_number(steps.raw_scores[j])])
        elif step == 1:
            rows.append([name, format_number(steps.raw_scores[j]), f"× {format_number(steps.scale)}", score])
        elif step == 2:
            rows.append(
                [name, score, format_number(steps.exponentials[j]), format_number(steps.weights[j]), ""]
            )
        else:
            rows.append(
                [
                    name,
                    format_number(steps.weights[j]),
                    format_vector(steps.value[j]),
                    format_vector(steps.contributions[j]),
                ]
            )
    return rows


def test_pipeline_by_click_shows_every_number(show):
    tab = show(explore.pipeline())
    A = regard.attention(cat.Q, cat.K)
    for i in (1, 4):
        tab.get_by_role("radio", name=cat.tokens[i], exact=True).check()
        for step, name in enumerate(["Compare", "Scale", "Normalise", "Aggregate"]):
            tab.get_by_role("navigation").get_by_role("button", name=name).click()
            assert tab.locator("h2").text_content() == f"{step + 1}. {name}"
            assert table(tab) == expected(A.explain(i, cat.V, cat.tokens), step)
    steps = A.explain(4, cat.V, cat.tokens)
    assert tab.locator("tfoot td").last.text_content() == format_vector(steps.output)
    assert tab.locator("#formula").text_content() == f"output = {format_vector(steps.output)}"


def test_pipeline_by_keyboard(show):
    tab = show(explore.pipeline())
    keys = tab.keyboard
    for want in ["2. Scale", "3. Normalise", "4. Aggregate", "4. Aggregate"]:
        keys.press("ArrowRight")
        assert tab.locator("h2").text_content() == want
    keys.press("ArrowLeft")
    assert tab.locator("h2").text_content() == "3. Normalise"
    keys.press("Tab")  # the radios, where arrows choose the query
    assert tab.evaluate("getComputedStyle(document.activeElement.nextSibling).outlineStyle") == "solid"
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    assert "query sat" in tab.get_by_role("status").text_content()
    steps = regard.attention(cat.Q, cat.K).explain(2, cat.V, cat.tokens)
    assert table(tab) == expected(steps, 2)
    keys.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "1Compare"
    keys.press("Enter")
    assert tab.locator("h2").text_content() == "1. Compare"
    assert tab.locator("#previous").is_disabled()
    tab.locator("#next").click()
    assert tab.locator('[aria-current="step"]').text_content() == "2Scale"


# Goes through queries and steps in the page itself, one call instead of hundreds.
HARVEST = """() => [...document.querySelectorAll(".chip input")].map((radio) => {
  radio.click();
  return [...document.querySelectorAll(".steps button")].map((button) => {
    button.click();
    return [...document.querySelectorAll("tbody tr")].map((r) => [...r.cells].map((c) => c.textContent));
  }).concat(document.querySelector("#formula").textContent);
})"""


@pytest.mark.parametrize("mask", [None, regard.first(3), regard.padding([4])], ids=repr)
def test_pipeline_switches_agree_with_the_library(show, mask):
    tab = show(explore.pipeline(cat.Q, cat.K, cat.V, tokens=cat.tokens, mask=mask))
    for scaled in (True, False):
        tab.get_by_label("scale", exact=True).set_checked(scaled)
        for causal in (True, False):
            tab.get_by_label("causal mask").set_checked(causal)
            both = regard.causal() if mask is None else regard.causal() & mask
            A = regard.attention(cat.Q, cat.K, mask=both if causal else mask, scale=None if scaled else 1.0)
            every = [A.explain(i, cat.V, cat.tokens) for i in range(5)]
            assert tab.evaluate(HARVEST) == [
                [*(expected(steps, step) for step in range(4)), f"output = {format_vector(steps.output)}"]
                for steps in every
            ]


def test_pipeline_of_own_arrays(show):
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(2, 11)), rng.normal(size=(3, 11))
    mask = regard.dense([[True, False, True], [False] * 3])
    tab = show(explore.pipeline(query, key, mask=mask))
    assert tab.get_by_label("causal mask").count() == 0  # not square
    assert tab.locator(".steps li").count() == 3  # no value: nothing to aggregate
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#formula").text_content() == "score = sum × 0.3015, then " + repr(mask)
    tab.get_by_role("radio", name="query 1").check()
    tab.get_by_role("button", name="Normalise").click()
    assert "Every key is masked" in tab.locator("#description").text_content()
    assert [row[3] for row in table(tab)] == ["0", "0", "0"]
    tab.get_by_role("button", name="Compare").click()
    assert table(tab)[0][1] == format_vector(key[0])
    tab = show(explore.pipeline(query, key, key, mask=~regard.first(3)))
    tab.get_by_role("button", name="Aggregate").click()
    assert "Every key is masked" in tab.locator("#description").text_content()
    assert tab.locator("#formula").text_content() == f"output = {format_vector([0] * 11)}"


def test_pipeline_of_masked_values_that_are_not_finite(show):
    key = np.array([[1.0, 2.0], [np.nan, np.inf], [0.5, -1.0]])
    value = np.array([[1.0], [np.nan], [3.0]])
    mask = regard.dense([[True, False, True]])
    tab = show(explore.pipeline([[1.0, 1.0]], key, value, mask=mask))
    tab.get_by_label("scale", exact=True).uncheck()
    steps = regard.attention([[1.0, 1.0]], key, mask=mask, scale=1.0).explain(0, value)
    for step in range(4):
        assert table(tab) == expected(steps, step)
        tab.keyboard.press("ArrowRight")
    assert tab.locator("#formula").text_content() == f"output = {format_vector(steps.output)}"


def test_tensors_and_arrays_make_equal_pages():
    torch = pytest.importorskip("torch")
    Q, K, V = (torch.tensor(np.array(x), requires_grad=True) for x in (cat.Q, cat.K, cat.V))

    def record(page):
        return json.loads(re.search(r'id="record">(.*?)<', page.html, re.DOTALL)[1])

    ours, theirs = record(explore.pipeline()), record(explore.pipeline(Q, K, V, tokens=cat.tokens))
    assert ours["tokens"] == theirs["tokens"]
    for mine, yours in zip(ours["rows"], theirs["rows"], strict=True):
        for name in ("weights", "contributions", "output"):
            np.testing.assert_allclose(yours[name], mine[name], rtol=1e-12)
    assert record(explore.heatmap(Q, K))["raw_scores"] == record(explore.heatmap())["raw_scores"]


def test_pipeline_shows_hostile_tokens_as_text(show):
    n = len(HOSTILE)
    numbers = np.eye(n)
    tab = show(explore.pipeline(numbers, numbers, numbers, tokens=HOSTILE))
    shown = [escape_unprintable(token) for token in HOSTILE]
    for step in range(4):
        assert [row[0] for row in table(tab)] == shown
        assert tab.locator(".chip").all_text_contents() == shown
        assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0
        if step < 3:
            tab.keyboard.press("ArrowRight")
    tab.locator(".chip").nth(0).click()
    assert shown[0] in tab.get_by_role("status").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pipeline_fits_a_phone(show, scheme):
    tab = show(explore.pipeline(), viewport={"width": 360, "height": 740}, color_scheme=scheme)
    for _ in range(4):
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.locator(".scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
        tab.keyboard.press("ArrowRight")
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(query=cat.Q), "a query without a key"),
        (dict(key=cat.K), "a key without a query"),
        (dict(query=np.ones((2, 3, 4)), key=cat.K), "query with 3 axes"),
        (dict(tokens=["a"]), "1 tokens; expected 5"),
        (dict(query=np.ones((0, 4)), key=cat.K), "0 queries and 5 keys"),
        (dict(query=np.ones((99, 4)), key=np.ones((99, 4))), "numbers to show; expected at most 12000"),
    ],
)
def test_pipeline_refuses(arguments, words):
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        explore.pipeline(**arguments)


def test_heatmap_refuses():
    with pytest.raises(regard.ArgumentError, match="263169 weights; expected at most 262144"):
        explore.heatmap(np.ones((513, 1)), np.ones((513, 1)))


def test_the_largest_pipeline_stays_below_300_kb():
    x = np.random.default_rng(0).normal(size=(13, 48))
    assert 13 * (13 * (6 + 48) + 2 * 48) + 13 * 2 * 48 > 0.95 * MAX_NUMBERS
    assert len(explore.pipeline(x, x, x).html.encode()) <= 300_000
