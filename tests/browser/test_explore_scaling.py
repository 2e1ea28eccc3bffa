"""The scaling explorer in a real browser: at every stop of the sliders the numbers match the library's."""

from __future__ import annotations

import json
import math
import re
from functools import cache

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore.explorers import MAX_SCORES, SIGMAS, TEMPERATURES, row_payload, slider_stops
from regard.learn import cat, sharpness, softmax, softmax_jacobian, variance_experiment
from regard.pages import html
from regard.render.text import escape_unprintable, format_number
from tests.helpers.pages import HOSTILE, SCREENS, faults, format_column, rows_of_scores, run_in_node, table

pytestmark = pytest.mark.slow  # starts a browser


@cache
def drawn(seed: int = 0, keys: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """The queries (64, 1, 1024) and keys (64, keys, 1024) of the experiment, generated again."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(64, 1, 1024)), rng.normal(size=(64, keys, 1024))


def dots(query: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """The dot products of the first entries, as they are embedded in the page."""
    return (query[..., :size] * key[..., :size]).sum(axis=-1).astype(np.float32).astype(float)


def put(tab, **places: int) -> None:
    """Move sliders as a reader does."""
    for name, place in places.items():
        tab.locator(f"#{name}").fill(str(place))


def shown(tab) -> dict[str, str]:
    """The numbers about the row, all scores, and the mean."""
    names = (
        "largest",
        "entropy",
        "slope",
        "gradient",
        "deviation",
        "predicted",
        "mean-scaled",
        "mean-unscaled",
    )
    return tab.evaluate(
        "names => Object.fromEntries(names.map((n) => [n, document.getElementById(n).textContent]))",
        list(names),
    )


def wanted(
    raw, i: int, size: int, predicted: float, scaled: bool, sigma: float, temperature: float
) -> dict[str, str]:
    """The expected numbers, from the functions of the library on dot products (queries, keys)."""
    scores = {True: raw * sigma**2 / math.sqrt(size), False: raw * sigma**2}
    weights = {each: softmax(scores[each], temperature=temperature) for each in scores}
    row = sharpness(weights[scaled][i])
    n = raw.shape[1]
    return {
        "largest": format_number(row.largest_weight),
        "entropy": f"{format_number(row.entropy)} of log {n} = {format_number(math.log(n))}",
        "slope": f"{format_number(np.abs(softmax_jacobian(weights[scaled][i])).max())} of at most 0.25",
        "gradient": format_number(row.gradient),
        "deviation": f"{format_number(scores[scaled].std())} measured",
        "predicted": format_number(predicted * sigma**2 / (math.sqrt(size) if scaled else 1)),
        "mean-scaled": format_number(sharpness(weights[True]).largest_weight),
        "mean-unscaled": format_number(sharpness(weights[False]).largest_weight),
    }


def test_the_page_opens_with_the_numbers_of_the_library(show):
    tab = show(explore.scaling())
    raw = dots(*drawn(), 64)
    scores = raw[0] / 8
    names = [f"key {j}" for j in range(8)]
    assert table(tab) == [
        [name, s, w, ""]
        for name, s, w in zip(names, format_column(scores), format_column(softmax(scores)), strict=True)
    ]
    assert shown(tab) == wanted(raw, 0, 64, 8.0, True, 1.0, 1.0)
    assert tab.locator("#size").get_attribute("aria-valuetext") == "64"
    # The script computes none of them: a page with corrupted dot products opens with equal numbers.
    page = explore.scaling()
    record = json.loads(re.search(r'id="record">(.*?)<', page.html, re.DOTALL)[1])
    spoiled = page.html.replace(record["dots"], html.encode_float32(np.full(20 * 64 * 8, np.nan)))
    assert spoiled != page.html
    assert shown(show(html.Page("spoiled", spoiled))) == wanted(raw, 0, 64, 8.0, True, 1.0, 1.0)


@pytest.mark.parametrize("scaled", [True, False])
def test_every_place_of_the_sliders_agrees_with_python(show, scaled):
    tab = show(explore.scaling(seed=3))
    query, key = drawn(seed=3)
    tab.locator("#scaled").set_checked(scaled)
    places = slider_stops(1024)
    for place, size in enumerate(places):
        sigma, warmth, i = place % len(SIGMAS), (5 * place + 3) % len(TEMPERATURES), 7 * place % 64
        put(tab, size=place, sigma=sigma, temperature=warmth)
        tab.locator("#query").select_option(str(i))
        raw = dots(query, key, size)
        settings = (scaled, SIGMAS[sigma], TEMPERATURES[warmth])
        got, want = shown(tab), wanted(raw, i, size, math.sqrt(size), *settings)
        for name in ("slope", "gradient"):  # of a row close to one-hot they are near 0, mostly rounding error
            ours, theirs = (float(says.pop(name).split()[0]) for says in (got, want))
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-12)
        assert got == want
        scores = raw[i] * SIGMAS[sigma] ** 2 / (math.sqrt(size) if scaled else 1)
        weights = softmax(scores, temperature=TEMPERATURES[warmth])
        assert [row[1:3] for row in table(tab)] == [
            [s, w] for s, w in zip(format_column(scores), format_column(weights), strict=True)
        ]


def test_the_weights_collapse_and_scaling_stops_it(show):
    tab = show(explore.scaling())
    last = len(slider_stops(1024)) - 1
    spread = {}
    for scaled in (True, False):
        tab.locator("#scaled").set_checked(scaled)
        for place in (0, last):
            put(tab, size=place)
            spread[scaled, place] = float(shown(tab)["deviation"].split()[0])
    says = shown(tab)
    assert float(says["mean-scaled"]) < 0.5 and float(says["mean-unscaled"]) > 0.9
    assert spread[True, last] == pytest.approx(1, abs=0.15) == spread[True, 0]
    assert spread[False, last] == pytest.approx(32, rel=0.15)
    # The experiment of the book, with new random entries for each d_k, agrees within sampling error.
    (row,) = variance_experiment(1024, samples=64).rows
    assert float(says["mean-unscaled"]) == pytest.approx(row.unscaled.largest_weight, abs=0.05)


def points(tab, kind: str) -> np.ndarray:
    """The heights of a curve, 0 at the bottom and 1 at the top."""
    text = tab.locator(f"polyline.{kind}").get_attribute("points")
    return 1 - np.array([float(pair.split(",")[1]) for pair in text.split(" ")]) / 100


@pytest.mark.parametrize(
    ("name", "field", "highest"),
    [
        ("largest weight", "largest_weight", 1),
        ("entropy", "entropy", math.log(8)),
        ("gradient", "gradient", 0.5),
    ],
)
def test_the_curves_are_the_means_of_the_library(show, name, field, highest):
    tab = show(explore.scaling())
    tab.get_by_role("radio", name=name).check()
    for warmth in (TEMPERATURES.index(1.0), 1):
        put(tab, temperature=warmth)
        for kind, by in (("scaled", 0.5), ("unscaled", 0.0)):
            rows = [
                softmax(dots(*drawn(), d) / d**by, temperature=TEMPERATURES[warmth])
                for d in slider_stops(1024)
            ]
            want = [getattr(sharpness(weights), field) / highest for weights in rows]
            np.testing.assert_allclose(points(tab, kind), want, atol=1e-9)
    assert f"Mean {name} over d_k. At d_k 64: " in tab.get_by_role("img").get_attribute("aria-label")


def test_by_keyboard_and_by_pointing_at_the_curves(show):
    tab = show(explore.scaling())
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "size"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Home")
    assert tab.locator("#size").get_attribute("aria-valuetext") == "1"
    tab.keyboard.press("ArrowRight")
    assert tab.get_by_role("status").text_content().startswith("d_k 2, scaled: largest weight 0.")
    for _ in range(3):
        tab.keyboard.press("Tab")
    tab.keyboard.press("Space")
    assert tab.get_by_role("status").text_content().startswith("d_k 2, not scaled: ")
    tab.locator(".area").scroll_into_view_if_needed()
    box = tab.locator(".area").bounding_box()
    tab.mouse.click(box["x"] + 0.81 * box["width"], box["y"] + 5)
    assert tab.locator("#size").get_attribute("aria-valuetext") == "256"
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 1, box["y"] + 9)
    tab.mouse.up()
    assert tab.locator("#size").input_value() == str(len(slider_stops(1024)) - 1)


def test_own_query_and_key(show):
    tab = show(explore.scaling(cat.Q, cat.K, tokens=cat.tokens))
    A = regard.attention(cat.Q, cat.K)
    assert [row[2] for row in table(tab)] == format_column(A[0])
    for i in range(5):
        tab.locator("#query").select_option(cat.tokens[i])
        for place, size in enumerate([1, 2, 3, 4]):
            put(tab, size=place)
            raw = cat.Q[:, :size] @ cat.K[:, :size].T
            predicted = math.sqrt(size * (cat.Q[:, :size] ** 2).mean() * (cat.K[:, :size] ** 2).mean())
            assert shown(tab) == wanted(raw, i, size, predicted, True, 1.0, 1.0)
            steps = regard.attention(cat.Q[:, :size], cat.K[:, :size]).explain(i)
            assert [row[1:3] for row in table(tab)] == [
                [s, w] for s, w in zip(format_column(steps.scores), format_column(steps.weights), strict=True)
            ]


def test_one_key_one_entry_and_nonfinite_numbers(show):
    tab = show(explore.scaling([[2.0]], [[3.0]]))
    assert table(tab) == [["key 0", "6", "1", ""]]
    assert shown(tab)["entropy"] == "0 of log 1 = 0"
    tab.locator("#scaled").uncheck()
    assert shown(tab)["deviation"] == "0 measured"
    tab = show(explore.scaling([[1.0, 1.0]], [[1.0, np.nan], [2.0, np.inf], [1e300, 0.0]]))
    assert [row[2] for row in table(tab)] == ["nan"] * 3
    put(tab, size=0, sigma=2)
    assert [row[1] for row in table(tab)] == ["0.5625", "1.1250", "inf"]


def test_hostile_tokens_are_shown_as_text(show):
    names = [escape_unprintable(token) for token in HOSTILE]
    numbers = np.eye(len(HOSTILE))
    for page in (explore.scaling(tokens=HOSTILE), explore.scaling(numbers, numbers, tokens=HOSTILE)):
        tab = show(page)
        assert [row[0] for row in table(tab)] == names
        tab.locator("#query").select_option("3")
        assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0
    assert tab.locator("option").all_text_contents() == names
    assert names[3] in tab.locator("h2").first.text_content()


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    tab = show(explore.scaling(), viewport={"width": width, "height": 800}, color_scheme=scheme)
    for scaled in (True, False):
        tab.locator("#scaled").set_checked(scaled)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator(".scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
        assert faults(tab) == []


def test_the_seed_determines_the_page():
    assert explore.scaling().html == explore.scaling(seed=0).html != explore.scaling(seed=1).html


def test_the_largest_stays_below_300_kb():
    x = np.random.default_rng(0).normal(size=(50, 400))
    assert 0.9 * MAX_SCORES < 50 * 44 * len(slider_stops(400)) <= MAX_SCORES
    assert len(explore.scaling(x, x[:44]).html.encode()) <= 300_000


def test_tensors_make_the_same_page():
    torch = pytest.importorskip("torch")
    query, key = (torch.tensor(np.array(x), requires_grad=True) for x in (cat.Q, cat.K))
    assert explore.scaling(query, key).html == explore.scaling(cat.Q, cat.K).html


# -- The measures in JavaScript ---------------------------------------------------------------------------


def test_sharpness_in_node():
    rows = [row for row in rows_of_scores() if np.isfinite(row).any() and len(row) < 100]
    rows = [[x for x in row if np.isfinite(x)] for row in rows]
    script = f"""
        const rows = {json.dumps(rows)}.map((row) => rowStats(softmax(row).weights));
        console.log(JSON.stringify(rows));
    """
    output = json.loads(run_in_node(script, "matrix/softmax", "matrix/rowStats"))
    for row, got in zip(rows, output, strict=True):
        want = row_payload(np.array(row))
        for name in ("largest", "entropy", "gradient", "slope"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-15)


# -- Refused arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(query=cat.Q), "a query without a key"),
        (dict(query=cat.Q[None], key=cat.K), "query with 3 axes"),
        (dict(query=cat.Q, key=cat.K, tokens=["a"]), "1 tokens; expected 5"),
        (dict(tokens=[]), "no tokens; expected at least one token, or None for eight keys"),
        (dict(tokens=["a"] * 100), "128000 scores to show; expected at most 40000"),
        (
            dict(query=np.ones((300, 4)), key=np.ones((99, 4))),
            "118800 scores to show; expected at most 40000",
        ),
    ],
)
def test_scaling_refuses(arguments, words):
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        explore.scaling(**arguments)
