"""The explorers in a real browser, worked as a reader would; what is on screen is compared with Python's numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore._pipeline import MOST_NUMBERS
from regard.learn import cat
from regard.view import html
from regard.view.text import number, printable, vector

CHROMIUM = shutil.which("chromium")
NODE = shutil.which("node")
PAGES = Path(html.__file__).parent / "pages"

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


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        assert os.environ.get("CI") != "true", "CI installs chromium"
        pytest.skip("no chromium here")
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=options)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page as a file; at the end nothing was said on the console, asked of anyone, or run that should not."""
    events: list[str] = []
    contexts = []

    def dialog(opened):
        events.append(f"dialog {opened.message}")
        opened.dismiss()

    def show(page: html.Page, **options):
        path = tmp_path / f"page{len(contexts)}.html"
        page.save(path)
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(5000)
        tab.on("console", lambda message: events.append(f"console {message.text}"))
        tab.on("pageerror", lambda error: events.append(f"error {error}"))
        tab.on("dialog", dialog)
        tab.on("request", lambda r: r.url == path.as_uri() or events.append(f"request {r.url}"))
        tab.goto(path.as_uri())
        return tab

    yield show
    for context in contexts:
        context.close()
    assert events == []


def table(tab) -> list[list[str]]:
    """The rows of the table on screen, heads left out."""
    return tab.locator("tbody tr").evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent))")


# -- The shell --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [explore.pipeline, explore.heatmap])
def test_a_page_is_small_and_has_a_policy(make, tmp_path):
    page = make()
    page.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page.html
    assert len(text.encode()) <= 300_000
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src {html.digest(script)};" in policy
    assert "unsafe" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script")
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=", text)


def test_modules_use_no_markup_from_text():
    files = [path for path in PAGES.iterdir() if path.suffix in (".js", ".css")]
    assert len(files) >= 4
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|</|url\(|@import", text
        )
        assert len(text.splitlines()) < 400


@pytest.mark.parametrize("token", HOSTILE)
def test_nothing_breaks_out_of_the_record(token):
    text = html.embedded({"token": token, token: 1})
    assert text.isascii() and not set("<>&\0\u2028\u2029") & set(text)
    assert json.loads(text) == {"token": token, token: 1}


def test_a_notebook_shows_the_page_in_a_sandbox(browser):
    context = browser.new_context()
    tab = context.new_page()
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.set_content(f"<!DOCTYPE html><title>notebook</title>{explore.pipeline()._repr_html_()}")
    frame = tab.frame_locator("iframe")
    frame.get_by_role("button", name="Next").click()
    assert frame.locator("h2").text_content() == "2. Scale"
    assert tab.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert said == []
    context.close()


def test_the_policy_stops_a_script_that_got_in(browser):
    context = browser.new_context()
    tab = context.new_page()
    opened, said = [], []
    tab.on("dialog", lambda d: (opened.append(d.message), d.dismiss()))
    tab.on("console", lambda message: said.append(message.text))
    broken = explore.pipeline().html.replace(
        "</main>", "</main><script>alert(1)</script><img src=x onerror=alert(2)>"
    )
    tab.set_content(broken)
    tab.get_by_role("button", name="Next").click()
    assert opened == []
    assert any("Content Security Policy" in text for text in said)
    context.close()


# -- The shared softmax and the numbers, in Node and in the browser ---------------------------------------


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


def shown_numbers() -> list[float]:
    rng = np.random.default_rng(7)
    ties = [
        0.03125,
        0.09375,
        -0.15625,
        1234500.0,
        1233500.0,
        0.5,
        2.0,
        100.0,
        1e6,
        999999.99999,
        1e-3,
        9.9999e-4,
    ]
    plain = [
        0.0,
        -0.0,
        1e-9,
        1e-300,
        1e300,
        float("inf"),
        float("-inf"),
        float("nan"),
        0.29756,
        120.0,
        5e-324,
    ]
    drawn = rng.normal(size=300) * 10.0 ** rng.integers(-8, 9, size=300)
    eighths = rng.integers(-(2**20), 2**20, size=100) / 2.0 ** rng.integers(1, 12, size=100)
    return [float(x) for x in (*ties, *plain, *drawn, *eighths)]


SCRIPT = """
const read = numbers, input = JSON.parse(INPUT);
const answer = JSON.stringify({
  softmax: read(input.rows).map(softmax)
    .map((s) => [s.shift, s.total, ...s.exponentials, ...s.weights].map(String)),
  shown: read(input.shown).map(number),
});
"""


def in_javascript() -> str:
    modules = html.bundle("softmax.js") + html.bundle("numbers.js")
    data = html.embedded({"rows": rows_of_scores(), "shown": shown_numbers()})
    return modules + SCRIPT.replace("INPUT", json.dumps(data))


def check_javascript(answer: str) -> None:
    told = json.loads(answer)
    assert told["shown"] == [number(x) for x in shown_numbers()]
    for row, got in zip(rows_of_scores(), told["softmax"], strict=True):
        # A query of 1 against keys that are the scores, −inf by a mask: the library's own softmax of the row.
        key = np.array([[0.0 if x == -np.inf else x] for x in row])
        mask = regard.dense(np.array([[x != -np.inf for x in row]]))
        steps = regard.attention([[1.0]], key, mask=mask, scale=1.0).explain(0)
        want = [steps.shift, steps.total, *steps.exponentials, *steps.weights]
        np.testing.assert_allclose([float(x) for x in got], want, rtol=1e-13, atol=0)


def test_softmax_and_numbers_in_node():
    if NODE is None:
        pytest.skip("no node here; the browser runs the same")
    run = [NODE, "--input-type=module", "-e", in_javascript() + "console.log(answer);"]
    check_javascript(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_softmax_and_numbers_in_the_browser(browser):
    context = browser.new_context()
    check_javascript(context.new_page().evaluate(f"() => {{ {in_javascript()} return answer; }}"))
    context.close()


# -- Pipeline ---------------------------------------------------------------------------------------------


def expected(steps, step: int) -> list[list[str]]:
    """What the table must say of an explanation, cell by cell."""
    rows = []
    for j, name in enumerate(steps.key_tokens):
        score = "hidden" if steps.scores[j] == -np.inf else number(steps.scores[j])
        if step == 0:
            products = " + ".join(
                f"{number(q)}·{number(k)}" for q, k in zip(steps.query, steps.key[j], strict=True)
            )
            rows.append([name, vector(steps.key[j]), products, number(steps.raw_scores[j])])
        elif step == 1:
            rows.append([name, number(steps.raw_scores[j]), f"× {number(steps.scale)}", score])
        elif step == 2:
            rows.append([name, score, number(steps.exponentials[j]), number(steps.weights[j]), ""])
        else:
            rows.append(
                [name, number(steps.weights[j]), vector(steps.value[j]), vector(steps.contributions[j])]
            )
    return rows


def test_pipeline_by_click_shows_every_number(show):
    tab = show(explore.pipeline())
    A = regard.attention(cat.Q, cat.K)
    for i, token in enumerate(cat.tokens):
        tab.get_by_role("radio", name=token, exact=True).check()
        for step, name in enumerate(["Compare", "Scale", "Normalise", "Aggregate"]):
            tab.get_by_role("navigation").get_by_role("button", name=name).click()
            assert tab.locator("h2").text_content() == f"{step + 1}. {name}"
            assert table(tab) == expected(A.explain(i, cat.V, cat.tokens), step)
    steps = A.explain(4, cat.V, cat.tokens)
    assert tab.locator("tfoot td").last.text_content() == vector(steps.output)
    assert tab.locator("#formula").text_content() == f"output = {vector(steps.output)}"


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
                [*(expected(steps, step) for step in range(4)), f"output = {vector(steps.output)}"]
                for steps in every
            ]


def test_pipeline_of_ones_own(show):
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(2, 11)), rng.normal(size=(3, 11))
    tab = show(explore.pipeline(query, key, mask=regard.dense([[True, False, True], [False] * 3])))
    assert tab.get_by_label("causal mask").count() == 0  # which corner would be meant?
    assert tab.locator(".steps li").count() == 3  # no value: nothing to aggregate
    tab.get_by_role("radio", name="query 1").check()
    tab.get_by_role("button", name="Normalise").click()
    assert "sees no key" in tab.locator("#says").text_content()
    assert [row[3] for row in table(tab)] == ["0", "0", "0"]
    tab.get_by_role("button", name="Compare").click()
    assert table(tab)[0][1] == vector(key[0])


def test_pipeline_shows_hostile_tokens_as_text(show):
    n = len(HOSTILE)
    numbers = np.eye(n)
    tab = show(explore.pipeline(numbers, numbers, numbers, tokens=HOSTILE))
    shown = [printable(token) for token in HOSTILE]
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
        tab.keyboard.press("ArrowRight")
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")


# -- Heatmap ----------------------------------------------------------------------------------------------


def told(tab) -> dict[str, str]:
    """What the page says of the chosen cell."""
    names = tab.locator("#cell dt").all_text_contents()
    says = dict(zip(names, tab.locator("#cell dd").all_text_contents(), strict=True))
    parts = {name: tab.locator(f"#cell .{name}").text_content() for name in ("pair", "weight")}
    return {**parts, **says}


def computation(steps, j: int) -> dict[str, str]:
    """What it must say."""
    raw, score = number(steps.raw_scores[j]), number(steps.scores[j])
    terms = [f"{number(q)}·{number(k)}" for q, k in zip(steps.query, steps.key[j], strict=True)]
    says = {"weight": number(steps.weights[j]), "Compare": " + ".join(terms) + f" = {raw}"}
    if steps.scores[j] == -np.inf:
        return {**says, "Scale": "the mask hides this key"}
    return {
        **says,
        "Scale": f"{raw} × {number(steps.scale)} = {score}",
        "Normalise": f"exp({score} − {number(steps.shift)}) / {number(steps.total)}",
    }


def point_at(tab, i: int, j: int, n: int, top: int) -> None:
    """Move the pointer to a cell, counted from the corner at the lower right, where no labels are."""
    box = tab.locator("#picture").bounding_box()
    cell = (box["height"] - 2 - top) / n
    right, bottom = box["x"] + box["width"] - 1, box["y"] + box["height"] - 1
    tab.mouse.move(right - (n - j - 0.5) * cell, bottom - (n - i - 0.5) * cell)


def test_heatmap_by_pointer(show):
    mask = regard.causal()
    tab = show(explore.heatmap(cat.Q, cat.K, tokens=cat.tokens, mask=mask))
    for i in range(5):
        steps = regard.attention(cat.Q, cat.K, mask=mask).explain(i)
        for j in range(5):
            point_at(tab, i, j, 5, top=28)
            assert told(tab) == {"pair": f"{cat.tokens[i]} → {cat.tokens[j]}", **computation(steps, j)}


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
        assert tab.locator("#cell .weight").text_content() == number(weights[i, j])
    tab.get_by_text("As a table").click()
    rows = [[name, *map(number, row)] for name, row in zip(cat.tokens, weights, strict=True)]
    assert table(tab) == rows
    assert tab.locator("#top").text_content() == number(weights.max())


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
    tab.get_by_label("colour each row by its own largest").check()
    seen = np.array(tab.evaluate(BRIGHTNESS, [5, 28]))
    assert np.ptp(seen.min(axis=1)) <= 3
    assert tab.locator("#top").text_content() == "largest of the row"


def test_heatmap_of_512_by_512(show):
    rng = np.random.default_rng(11)
    query, key = rng.normal(size=(2, 512, 8))
    A = regard.attention(query, key, mask=regard.causal())
    tab = show(explore.heatmap(query, key, mask=regard.causal()))
    assert tab.evaluate("performance.timing.domComplete - performance.timing.responseEnd") < 2000
    assert tab.locator("table").count() == 0
    for i, j in [(0, 0), (511, 511), (511, 0), (300, 41), (41, 300)]:
        point_at(tab, i, j, 512, top=0)
        assert told(tab) == {"pair": f"query {i} → key {j}", **computation(A.explain(i), j)}
    moved = """() => {
      const canvas = document.getElementById("picture"), start = performance.now();
      for (let i = 0; i < 60; i++) {
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      }
      canvas.getContext("2d").getImageData(0, 0, 1, 1); // waits until all is drawn
      return (performance.now() - start) / 60;
    }"""
    assert tab.evaluate(moved) < 100  # milliseconds a move


def test_heatmap_shows_hostile_tokens_as_text(show):
    numbers = np.eye(len(HOSTILE))
    tab = show(explore.heatmap(numbers, numbers, tokens=HOSTILE))
    tab.get_by_text("As a table").click()
    shown = [printable(token) for token in HOSTILE]
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


@pytest.mark.parametrize("make", [explore.pipeline, explore.heatmap])
def test_the_example_is_drawn_within_a_second(show, make):
    tab = show(make())
    assert tab.evaluate("performance.timing.domComplete - performance.timing.responseEnd") < 1000
    assert tab.locator("h1").count() == 1


# -- What is refused --------------------------------------------------------------------------------------


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
    assert 13 * (13 * (6 + 48) + 2 * 48) + 13 * 2 * 48 > 0.95 * MOST_NUMBERS
    assert len(explore.pipeline(x, x, x).html.encode()) <= 300_000
