"""The geometry explorer in a real browser: after every move the numbers are compared with the library's."""

from __future__ import annotations

import re

import numpy as np
import pytest

import regard
from regard import explore
from regard.learn import magnitude, pronoun, three_tokens, tiny_head
from regard.render.text import escape_unprintable, format_number, format_vector
from tests.helpers.pages import HOSTILE, LOADED, SCREENS, faults, format_column, format_vectors, pace, table

slow = pytest.mark.slow  # starts a browser


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def expected(query, key, tokens, *, mask=None, scaled=True, row=0) -> list[list[str]]:
    """The expected cells of the table, from the library and NumPy."""
    query, key = np.asarray(query, float), np.asarray(key, float)
    steps = regard.attention(query, key, mask=mask, scale=None if scaled else 1.0).explain(row)
    lengths = np.linalg.norm(key, axis=1)
    cosines = key @ query[row] / lengths / np.linalg.norm(query[row])
    names = [f"{name} {entries}" for name, entries in zip(tokens, format_vectors(key), strict=True)]
    scores = [text.replace("-inf", "masked") for text in format_column(steps.scores)]
    columns = [format_column(lengths), format_column(cosines), scores, format_column(steps.weights)]
    return [[*row, ""] for row in zip(names, *columns, strict=True)]


def output(query, key, value, row=0, **options) -> str:
    return f"output = {format_vector(regard.attention(query, key, **options).explain(row, value).output)}"


def drag(tab, name: str, by: tuple[float, float], reach: float) -> None:
    """Drag the tip of an arrow; `reach` is half the width of the plane."""
    spot = tab.get_by_role("slider", name=name, exact=True).locator("circle").bounding_box()
    scale = tab.locator("#compare").bounding_box()["width"] / 2 / reach
    x, y = spot["x"] + spot["width"] / 2, spot["y"] + spot["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    for part in (0.5, 1):  # Firefox refuses to move the pointer out of the window
        tab.mouse.move(max(x + part * by[0] * scale, 1), max(y - part * by[1] * scale, 1))
    tab.mouse.up()


@slow
def test_it_opens_with_the_numbers_of_the_library(show):
    tab = show(explore.geometry())
    assert table(tab) == expected(pronoun.Q, pronoun.K, pronoun.tokens)
    assert tab.locator("#output").text_content() == output(pronoun.Q, pronoun.K, pronoun.V)
    assert tab.locator("#query").text_content() == f"query = [3, 1], length {format_number(np.sqrt(10))}"
    assert tab.locator("#formula").text_content() == "score = 3.1623 × length × cosine × 0.7071"
    assert tab.locator("#reset").is_disabled()
    sizes = tab.locator("#mix .weighed").evaluate_all("dots => dots.map((d) => Number(d.getAttribute('r')))")
    weights = regard.attention(pronoun.Q, pronoun.K).to_dense()[0]
    assert np.argsort(sizes).tolist() == np.argsort(weights).tolist()
    np.testing.assert_allclose(sizes[0] ** 2 / sizes[1] ** 2, weights[0] / weights[1], rtol=1e-6)


# Whether the output lies in the hull, and the path ends there.
IN_THE_HULL = """() => {
  const [hull, output] = [".hull", ".output"].map((what) => document.querySelector(what));
  const [x, y] = ["cx", "cy"].map((name) => Number(output.getAttribute(name)));
  const end = [...document.querySelectorAll(".path")].at(-1);
  const gap = Math.hypot(end.getAttribute("x2") - x, end.getAttribute("y2") - y);
  return hull.isPointInFill(Object.assign(document.querySelector("#mix").createSVGPoint(), { x, y })) && gap < 1e-6;
}"""


@slow
def test_the_output_stays_among_the_values(show):
    tab = show(explore.geometry())
    tab.get_by_role("slider", name="query", exact=True).focus()
    for press in ["Shift+ArrowUp", "Shift+ArrowLeft", "Shift+ArrowLeft", "Shift+ArrowDown", "ArrowLeft"]:
        tab.keyboard.press(press)
        assert tab.evaluate(IN_THE_HULL)


@slow
@pytest.mark.parametrize("size", [1e100, 1e-100, 5e-324, 0.0])
def test_extreme_sizes_are_drawn(show, size):
    x = size * np.array([[1.0, 0.0], [1.0, 1.0]])
    tab = show(explore.geometry(x, x, x))
    tab.get_by_label("normalise").check()
    tab.get_by_role("slider", name="query", exact=True).focus()
    tab.keyboard.press("ArrowUp")
    assert "nan" not in tab.locator("main").text_content().lower()


@slow
def test_the_pointer_moves_query_and_keys(show):
    tab = show(explore.geometry())
    drag(tab, "query", (-2.0, 2.5), reach=5)
    query, key = np.array([[1.0, 3.5]]), np.array(pronoun.K)
    assert table(tab) == expected(query, key, pronoun.tokens)
    drag(tab, "key street", (-3.0, -1.5), reach=5)
    key[1] = [-2.0, 2.5]
    assert table(tab) == expected(query, key, pronoun.tokens)
    assert tab.locator("#output").text_content() == output(query, key, pronoun.V)
    drag(tab, "query", (0.0, 40.0), reach=5)  # not out of the picture
    assert tab.locator("#query").text_content().startswith("query = [1, 5],")
    tab.locator("#reset").click()
    assert table(tab) == expected(pronoun.Q, pronoun.K, pronoun.tokens)


@slow
def test_arrows_that_end_at_one_point_can_be_told_apart(show):
    tab = show(explore.geometry())  # the query "it" equals the key "animal"
    text = "“it” ends where another arrow ends. Drag it by the ring beside it."
    assert tab.locator("#same-place").text_content() == text
    spots = {
        name: tab.get_by_role("slider", name=name, exact=True).locator("circle").bounding_box()
        for name in ("query", "key animal")
    }
    gaps = [spots["query"][axis] - spots["key animal"][axis] for axis in ("x", "y")]
    sizes = [box["width"] / 2 for box in spots.values()]
    assert np.hypot(*gaps) > 10 and min(sizes) >= 8
    drag(tab, "key animal", (-2.0, -2.0), reach=5)  # each moves alone
    key = np.array(pronoun.K)
    key[0] = [1.0, -1.0]
    assert table(tab) == expected(pronoun.Q, key, pronoun.tokens)
    assert tab.locator("#same-place").text_content() == "" and tab.locator(".handle.apart").count() == 0
    same = np.array([[4.0, 0.0]] * 3)
    tab = show(explore.geometry(same[:1], same, tokens=["a", "b", "c"]))
    assert tab.locator("#same-place").text_content().startswith("“b”, “c”, “query 0” ends where")
    drag(tab, "key c", (-3.0, 1.0), reach=5)
    assert table(tab)[2][0] == "c [1, 1]"


@slow
def test_the_keyboard_moves_query_and_keys(show):
    tab = show(explore.geometry())
    names = []
    for _ in range(4):
        tab.keyboard.press("Tab")
        names.append(tab.evaluate("document.activeElement.getAttribute('aria-label')"))
        width = "getComputedStyle(document.activeElement.querySelector('circle')).strokeWidth"
        assert tab.evaluate(width) == "3px"  # the ring of the focus
    assert names == ["key animal", "key street", "key because", "query"]
    for press in ["ArrowLeft", "Shift+ArrowLeft", "ArrowUp", "ArrowUp", "Shift+ArrowDown", "ArrowRight"]:
        tab.keyboard.press(press)
    query = np.array([[2.0, 0.2]])
    assert table(tab) == expected(query, pronoun.K, pronoun.tokens)
    held = tab.get_by_role("slider", name="query", exact=True)
    top = format_number(regard.attention(query, pronoun.K).to_dense().max())
    assert held.get_attribute("aria-valuetext") == f"[2, 0.2], largest weight {top} on animal"
    assert held.get_attribute("aria-valuenow") == str(round(np.degrees(np.arctan2(0.2, 2.0))))
    assert top in tab.get_by_role("status").text_content()
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Shift+ArrowDown")
    key = np.array(pronoun.K)
    key[2] = [1.5, -0.5]
    assert table(tab) == expected(query, key, pronoun.tokens)


@slow
def test_switches_agree_with_the_library(show):
    tab = show(explore.geometry())
    for scaled in (True, False):
        tab.get_by_label("scale").set_checked(scaled)
        for normalised in (True, False):
            tab.get_by_label("normalise").set_checked(normalised)
            query, key = (unit(pronoun.Q), unit(pronoun.K)) if normalised else (pronoun.Q, pronoun.K)
            assert table(tab) == expected(query, key, pronoun.tokens, scaled=scaled)
            scale = None if scaled else 1.0
            assert tab.locator("#output").text_content() == output(query, key, pronoun.V, scale=scale)


@slow
def test_a_long_misaligned_key_wins_until_lengths_are_one(show):
    tab = show(explore.geometry(magnitude.Q, magnitude.K, tokens=magnitude.tokens))
    assert tab.locator("#mix").count() == 0  # no value: no second plane
    raw = [5, 15, 7]
    assert [row[3] for row in table(tab)] == format_column(np.array(raw) / np.sqrt(2))
    tab.get_by_label("scale").uncheck()
    assert [row[3] for row in table(tab)] == format_column(raw)
    tab.get_by_label("normalise").check()
    short, long, misaligned = [float(row[4]) for row in table(tab)]
    assert short == long > misaligned
    # A rotated arrow gets its length back.
    tab.get_by_role("slider", name="query", exact=True).focus()
    tab.keyboard.press("ArrowUp")
    turned = unit(unit(magnitude.Q) + [[0.0, 0.1]])
    assert table(tab) == expected(turned, unit(magnitude.K), magnitude.tokens, scaled=False)
    tab.get_by_label("normalise").uncheck()
    assert table(tab) == expected(turned * np.sqrt(10), magnitude.K, magnitude.tokens, scaled=False)


@slow
def test_each_query_has_its_own_position_and_mask(show):
    mask = regard.masks.dense([[True, False, True], [False, False, False]])
    tab = show(explore.geometry(tiny_head.Q, tiny_head.K, tiny_head.V, tokens=tiny_head.tokens, mask=mask))
    assert table(tab) == expected(tiny_head.Q, tiny_head.K, tiny_head.tokens, mask=mask)
    corners = "polygon => polygon.getAttribute('points').split(' ').length"
    assert tab.locator(".hull").evaluate(corners) == 2  # the masked value is not a corner
    tab.get_by_role("slider", name="query", exact=True).focus()
    tab.keyboard.press("ArrowUp")
    moved = np.array([[1.0, 0.1], [0.0, 1.0]])
    assert table(tab) == expected(moved, tiny_head.K, tiny_head.tokens, mask=mask)
    tab.get_by_role("radio", name="query 1").check()
    assert table(tab) == expected(tiny_head.Q, tiny_head.K, tiny_head.tokens, mask=mask, row=1)
    assert tab.locator("#output").text_content() == "output = [0, 0]"
    assert "every key is masked" in tab.get_by_role("status").text_content()


@slow
def test_zero_vectors(show):
    tab = show(explore.geometry([[0.0, 0.0]], [[0.0, 0.0], [1.0, 2.0]], [[1.0, 1.0], [3.0, 1.0]]))
    assert [row[4] for row in table(tab)] == ["0.5", "0.5"]
    assert [row[2] for row in table(tab)] == ["0", "0"]
    tab.get_by_label("normalise").check()
    tab.get_by_role("slider", name="query", exact=True).focus()
    tab.keyboard.press("ArrowUp")  # a zero has no length to keep
    assert tab.locator("#output").text_content() == "output = [2, 1]"


@slow
def test_hostile_tokens_are_text(show):
    rng = np.random.default_rng(2)
    numbers = rng.normal(size=(len(HOSTILE), 2))
    tab = show(explore.geometry(numbers, numbers, numbers, tokens=HOSTILE))
    shown = [escape_unprintable(token) for token in HOSTILE]
    for i in range(3):
        tab.locator(".chip").nth(i).click()
        assert tab.locator("tbody bdi").all_text_contents() == shown
        assert shown[i] in tab.get_by_role("status").text_content()
    drag(tab, f"key {shown[0]}", (0.4, 0.4), reach=1.25 * np.abs(numbers).max())
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0


@slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    tab = show(explore.geometry(mask=regard.masks.first(2)), **options)
    assert tab.evaluate(LOADED) < 20 * pace(tab)
    assert faults(tab) == []
    tab.get_by_label("normalise").check()
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator(".scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
    # At once, since the page may be scrolling.
    tops = tab.locator(".plane").evaluate_all(
        "nodes => nodes.map((node) => node.getBoundingClientRect().top)"
    )
    assert (tops[0] == tops[1]) == (width == 1280)


@slow
def test_touch_moves_the_query_and_not_the_page(show):
    tab = show(explore.geometry(), viewport={"width": 390, "height": 844}, has_touch=True)
    assert tab.locator(".handle").last.evaluate("node => getComputedStyle(node).touchAction") == "none"
    assert tab.locator(".plane").first.evaluate("node => getComputedStyle(node).touchAction") == "auto"


# -- What needs no browser --------------------------------------------------------------------------------


def test_tensors_are_accepted():
    torch = pytest.importorskip("torch")
    query = torch.tensor([[3.0, 1.0]], dtype=torch.float64, requires_grad=True)
    key = torch.tensor(np.array(pronoun.K))
    assert explore.geometry(query, key).html == explore.geometry(pronoun.Q, pronoun.K).html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(query=pronoun.Q), "a query without a key"),
        (
            dict(query=three_tokens.Q, key=three_tokens.K),
            "query with 4 entries each; expected query with 2 entries each, the coordinates in a plane.",
        ),
        (dict(query=pronoun.Q, key=pronoun.K, value=np.ones((3, 1))), "value with 1 entry each"),
        (dict(query=[[np.nan, 0]], key=[[1, 0]]), "query with entries that are not finite"),
        (dict(query=[[0, 1]], key=[[np.inf, 0]]), "key with entries that are not finite, or too large"),
        (dict(query=[[0, 1]], key=[[0, 1]], value=[[0, 1e101]]), "value with entries that are not finite"),
        (dict(query=np.ones((1, 2)), key=np.ones((41, 2))), "41 queries or keys; expected at most 40"),
        (dict(tokens=["a"]), "1 tokens; expected 3"),
    ],
)
def test_geometry_refuses(arguments, words):
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        explore.geometry(**arguments)


def test_the_largest_page_stays_below_300_kb():
    x = np.random.default_rng(0).normal(size=(40, 2))
    assert len(explore.geometry(x, x, x).html.encode()) <= 300_000
