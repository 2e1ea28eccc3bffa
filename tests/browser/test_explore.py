"""The explorer of the weights in a real browser; the numbers on screen are compared with Python's."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard import explore
from regard.learn import cat
from regard.render.text import escape_unprintable, format_factor, format_number, format_vector
from tests.helpers.pages import EXPLORERS, HOSTILE, LOADED, SCREENS, faults, format_matrix, pace, table

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
    terms = [f"{format_factor(q)}·{format_factor(k)}" for q, k in zip(steps.query, steps.key[j], strict=True)]
    says = {"weight": format_number(steps.weights[j]), "Compare": " + ".join(terms) + f" = {raw}"}
    if steps.scores[j] == -np.inf:
        return {**says, "Scale": "this key is masked"}
    return {
        **says,
        "Scale": f"{format_factor(steps.raw_scores[j])} × {format_number(steps.scale)} = {score}",
        "Normalise": f"exp({score} − {format_factor(steps.shift)}) / {format_number(steps.total)} = {says['weight']}",
    }


def point_at(tab, i: int, j: int, n: int, top: int, within: float = 0.5) -> None:
    """Move the pointer to a cell, counted from the lower right corner, which has no labels."""
    box = tab.locator("#picture").bounding_box()
    cell = (box["height"] - 2 - top) / n
    right, bottom = box["x"] + box["width"] - 1, box["y"] + box["height"] - 1
    tab.mouse.move(right - (n - j - within) * cell, bottom - (n - i - within) * cell)


def test_weights_by_pointer(show):
    mask = regard.causal()
    tab = show(explore.weights(cat.Q, cat.K, tokens=cat.tokens, mask=mask))
    for i in range(5):
        steps = regard.attention(cat.Q, cat.K, mask=mask).explain(i)
        for j in range(5):
            point_at(tab, i, j, 5, top=28, within=0.9 if (i + j) % 2 else 0.1)  # near the edges
            assert shown_computation(tab) == {
                "pair": f"{cat.tokens[i]} → {cat.tokens[j]}",
                **computation(steps, j),
            }


def test_weights_by_keyboard_and_as_a_table(show):
    tab = show(explore.weights())
    weights = regard.attention(cat.Q, cat.K).to_dense()
    for _ in ("weights or scores", "causal mask", "colours", "picture"):
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
    numbers = format_matrix(weights) + format_matrix(weights @ cat.V)
    assert table(tab) == [[name, *row] for name, row in zip(cat.tokens * 2, numbers, strict=True)]
    assert tab.locator("#top").text_content() == format_number(weights.max())


def test_weights_with_output_causal_mask_and_scores(show):
    tab = show(explore.weights(cat.Q, cat.K, cat.V, tokens=cat.tokens))
    tab.get_by_text("Show as a table").click()
    for causal in (True, False):
        tab.get_by_label("causal mask").set_checked(causal)
        A = regard.attention(cat.Q, cat.K, mask=regard.causal() if causal else None)
        numbers = format_matrix(A.to_dense()) + format_matrix(A @ cat.V)
        assert [row[1:] for row in table(tab)] == numbers
    tab.get_by_label("causal mask").check()
    A = regard.attention(cat.Q, cat.K, mask=regard.causal())
    tab.locator("#picture").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        tab.keyboard.press(key)
    steps = A.explain(2, cat.V, cat.tokens)
    contribution = f"{format_number(steps.weights[1])} · {format_vector(cat.V[1])}"
    assert shown_computation(tab) == {
        "pair": "sat → cat",
        **computation(steps, 1),
        "Aggregate": f"adds {contribution} = {format_vector(steps.contributions[1])}",
    }
    tab.keyboard.press("Tab")  # the output, where the row stays
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#cell .pair").text_content() == "sat → output, entry 1"
    terms = " + ".join(f"{format_number(steps.weights[j])}·{format_number(cat.V[j, 1])}" for j in range(3))
    assert tab.locator("#cell dd").text_content() == f"{terms} = {format_number(steps.output[1])}"
    tab.get_by_role("radio", name="scores").check()
    scores = A.scores[...]
    live = scores[np.isfinite(scores)]
    assert tab.locator("#low").text_content() == format_number(live.min())
    assert tab.locator("#top").text_content() == format_number(live.max())
    tab.get_by_label("scale colours to each row").check()
    assert tab.locator("#low").text_content() == "row minimum"


def test_a_sentence_describes_each_row(show):
    weights = np.array([[61, 30, 9], [1, 1, 1], [5, 5, 2], [98, 1, 1], [36, 33, 31], [1, 1, 1], [1, 1, 1]])
    mask = np.ones((7, 3), bool)
    mask[5, 1:] = mask[6] = False
    query = np.log(weights) * np.sqrt(3)
    tab = show(explore.weights(query, np.eye(3), tokens=["a", "b", "c"], mask=regard.masks.dense(mask)))
    assert tab.locator("#rows li").all_text_contents() == [
        "“query 0” looks most at “a” (61 %), then at “b” (30 %).",
        "“query 1” looks at all 3 alike, 33.3 % each.",
        "“query 2” looks most at “a” and “b”, 41.7 % each.",
        "“query 3” looks almost only at “a”: 98 %.",
        "“query 4” looks at all 3 about alike, a little more at “a”: 36 %.",
        "“query 5” sees only “a”, so it takes everything from there.",
        "“query 6” sees nothing: every key is masked.",
    ]
    tab.locator("#rows button").nth(3).click()
    assert tab.locator("#sentence").text_content() == "“query 3” looks almost only at “a”: 98 %."
    assert tab.locator("#rows [aria-current]").count() == 1
    assert tab.locator("#output").count() == 0  # no value was passed
    tab = show(explore.weights())
    want = "“on” looks most at itself (31.4 %), then at “The” (19 %) and “cat” (19 %)."
    assert tab.locator("#rows li").nth(3).text_content() == want


# The colour of each cell, near its lower right corner, where no number is. Read at once: Chromium remarks on more.
COLOURS = """([n, top]) => {
  const { width, height } = document.getElementById("picture");
  const { data } = document.getElementById("picture").getContext("2d").getImageData(0, 0, width, height);
  const cell = (height - 2 - top) / n, at = (size, i) => Math.floor(size - 1 - (n - i - 0.85) * cell);
  const cells = [...Array(n).keys()], pixel = (p) => [...data.subarray(p, p + 3)];
  return cells.map((i) => cells.map((j) => pixel(4 * (at(height, i) * width + at(width, j)))));
}"""


def oklab(colours) -> np.ndarray:
    """Convert sRGB colours (…, 3) to OKLab, where equal distances look equal (Ottosson 2020)."""
    parts = np.asarray(colours) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    opponents = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.cbrt(linear @ cones.T) @ opponents.T


def weights_as_inputs(weights) -> tuple[np.ndarray, np.ndarray]:
    """Return a query and a key whose attention has these weights."""
    n = weights.shape[1]
    return np.log(np.maximum(weights, 1e-9)) * np.sqrt(n), np.eye(n)


JUST_NOTICEABLE = 0.02  # distance in OKLab of two colours that can just be told apart


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("top", "least"), [(0.4, 5), (1.0, 2)])
def test_colours_separate_a_weight_of_19_percent_from_one_of_25(show, scheme, top, least):
    weights = np.array([[0.19, 0.25, 0.32, 0.24], *3 * [[top, (1 - top) / 2, (1 - top) / 2, 0]]])
    tab = show(explore.weights(*weights_as_inputs(weights)), color_scheme=scheme)
    assert tab.locator("#top").text_content() == format_number(top)
    seen = oklab(tab.evaluate(COLOURS, [4, 28]))
    assert np.linalg.norm(seen[0, 0] - seen[0, 1]) >= least * JUST_NOTICEABLE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_equal_differences_of_weights_look_equal(show, scheme):
    weights = np.array([[(i + j) % 5 for j in range(5)] for i in range(5)]) / 10
    tab = show(explore.weights(*weights_as_inputs(weights)), color_scheme=scheme)
    seen = oklab(tab.evaluate(COLOURS, [5, 28]))[0]
    steps = np.linalg.norm(np.diff(seen, axis=0), axis=1)
    assert steps.max() < 1.1 * steps.min()
    order = np.sign(np.diff(seen[:, 0]))
    assert (order == (-1 if scheme == "light" else 1)).all()  # more weight is farther from the background


def test_colours_of_a_row_of_its_own_scale(show):
    tab = show(explore.weights())
    tab.get_by_label("scale colours to each row").check()
    strongest = oklab(tab.evaluate(COLOURS, [5, 28]))[..., 0].min(axis=1)
    assert np.ptp(strongest) < JUST_NOTICEABLE
    assert tab.locator("#top").text_content() == "row maximum"


def test_weights_formats_a_small_weight_as_small(show):
    tab = show(explore.weights(8 * np.eye(3), np.eye(3) * 3))
    tab.evaluate(
        "() => { const write = CanvasRenderingContext2D.prototype.fillText; window.written = [];"
        " CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
        " window.written.push(text); write.call(this, text, ...at); }; }"
    )
    tab.locator("#picture").press("ArrowRight")  # paints again
    tab.wait_for_function("window.written.length > 0")
    assert tab.evaluate("window.written").count("<0.001") == 6
    assert float(tab.locator("#cell .weight").inner_text()) < 1e-3  # in full beside the image


@pytest.mark.chromium_only("a cell is about a pixel wide, and the pointer of Firefox is at whole pixels")
def test_weights_of_512_by_512(show):
    rng = np.random.default_rng(11)
    query, key = rng.normal(size=(2, 512, 8))
    A = regard.attention(query, key, mask=regard.causal())
    tab = show(explore.weights(query, key, mask=regard.causal()))
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


def test_weights_shows_hostile_tokens_as_text(show):
    numbers = np.eye(len(HOSTILE))
    tab = show(explore.weights(numbers, numbers, tokens=HOSTILE))
    tab.get_by_text("Show as a table").click()
    shown = [escape_unprintable(token) for token in HOSTILE]
    assert [row[0] for row in table(tab)] == shown
    assert tab.locator("thead th").all_text_contents() == shown
    tab.locator("#picture").focus()
    for name in shown:
        assert tab.locator("#cell .pair").text_content() == f"{shown[0]} → {name}"
        tab.keyboard.press("ArrowRight")
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_weights_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme, "has_touch": width == 390}
    tab = show(explore.weights(), **options)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [tab.locator(name).bounding_box() for name in ("#picture", "#output")]
    assert all(box["x"] + box["width"] <= width for box in boxes)
    assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1280)  # side by side, or one below the other
    if width == 1280:
        point_at(tab, 3, 3, 5, top=28)
    else:
        tab.locator("#picture").tap(position={"x": boxes[0]["width"] * 0.75, "y": boxes[0]["height"] * 0.75})
    assert tab.locator("#cell .pair").text_content() == "on → on"
    tab.get_by_text("Show as a table").click()
    tab.get_by_label("causal mask").check()
    assert faults(tab) == []


@pytest.mark.parametrize("make", EXPLORERS)
def test_the_example_loads_quickly(show, make):
    tab = show(make())
    assert tab.evaluate(LOADED) < 20 * pace(tab)
    assert tab.locator("h1").count() == 1


# -- Refused arguments ------------------------------------------------------------------------------------


def test_weights_refuses():
    with pytest.raises(regard.ArgumentError, match="263169 weights; expected at most 262144"):
        explore.weights(np.ones((513, 1)), np.ones((513, 1)))
    with pytest.raises(
        regard.ArgumentError, match="numbers of the output or the value; expected at most 262144"
    ):
        explore.weights(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 140_000)))
    with pytest.raises(regard.ArgumentError, match="value with 1 axes"):
        explore.weights(np.ones((2, 1)), np.ones((2, 1)), np.ones(2))
