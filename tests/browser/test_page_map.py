"""The head map in a real browser, operated as a reader would; the numbers on screen are compared with the matrix."""

from __future__ import annotations

import re
import statistics

import numpy as np
import pytest

from regard import alibi, attention, causal, padding, sliding_window, softcap
from regard.core.matrix_page import build_payload
from regard.errors import ArgumentError
from regard.masks import document, first
from regard.pages import html
from regard.render.text import escape_unprintable, format_number
from regard.score_mods import bias
from tests.helpers.nightly import keep_in_ci
from tests.helpers.pages import HOSTILE, SCREENS, assert_policy_said, faults, find_color, pace

LOWER = {"align": "lower_right"}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "because", "it", "was", "tired", "and", "lazy"]


def normal(*shape, seed=0, by=1.5):
    return np.random.default_rng(seed).normal(size=shape) * by


def square(n=40, width=8, **options):
    return attention(normal(n, width), normal(n, width, seed=1), **options)


def tokens(n):
    return [WORDS[i % len(WORDS)] for i in range(n)]


# -- The file ---------------------------------------------------------------------------------------------


def test_the_file_has_a_policy_for_its_worker_and_starts_before_it_is_loaded(tmp_path):
    page = square().page(tokens(40), title="A <b>head</b>")
    page.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page.html and repr(page).startswith('<page "A <b>head</b>", ')
    ((begin, script),) = re.findall(r'<script type="module"( async)?>(.*?)</script>', text, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert f"script-src {html.csp_hash(script)};" in policy and policy.endswith("; worker-src blob:")
    assert "unsafe" not in policy and begin == " async"
    places = [text.index(f'id="array{n}"') for n in range(text.count('type="text/plain"'))]
    # The overview is before the script, query and key come after it.
    assert len(places) > 5 and places[0] < text.index('type="module"') < places[1]
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=", text)
    assert "<title>A &lt;b&gt;head&lt;/b&gt;</title>" in text


def test_matrices_without_a_map_are_refused():
    heads = attention(np.ones((2, 3, 4, 5)), np.ones((2, 3, 4, 5)))
    with pytest.raises(ArgumentError, match=r"page: received a matrix of \(batch 2, .*A\[0, 0\]\.page"):
        heads.page()
    heads.lazy[0, 1].page()
    with pytest.raises(ArgumentError, match=r"page: received 0 queries and 4 keys; expected at least one"):
        attention(np.ones((0, 5)), np.ones((4, 5))).page()
    with pytest.raises(ArgumentError, match=r"page: received 3 tokens; expected 4, one for each key"):
        heads.lazy[0, 1].page(["a", "b", "c"])
    with pytest.raises(ArgumentError, match=r"page: received 1 query_tokens; expected 4, one for each query"):
        heads.lazy[0, 1].page(query_tokens=["a"])


def test_tokens_are_stored_once():
    names = [f"token{i}" for i in range(40)]
    page = square().page(names)
    assert page.html.count("token17") == 1
    assert square().page(names, query_tokens=names).html == page.html
    both = square().page(names, query_tokens=[name.upper() for name in names])
    saved = len(html.encode_record(names)) - len("null") - len("true") + len("false")
    assert both.html.count("TOKEN17") == 1 and len(both.html) - len(page.html) == saved


# -- In the browser ---------------------------------------------------------------------------------------


def settled(tab) -> str:
    """Wait until the map is drawn, and return its status line."""
    # The page draws a change in the next frame.
    tab.locator(".map-box").evaluate("() => new Promise(requestAnimationFrame)")
    tab.locator('.map-box[data-missing="0"]').wait_for()
    return tab.locator("#map-status").text_content()


def go(tab, i: int, j: int) -> dict[str, str]:
    """Go to a cell by its numbers, and return its details."""
    for name, number in (("query", i), ("key", j)):
        field = tab.get_by_role("spinbutton", name=name)
        field.press("Control+a")  # to fill a field of numbers, the driver of Firefox appends
        field.press_sequentially(str(number))
    tab.get_by_role("button", name="Go to this cell").click()
    return details(tab, i, j)


def details(tab, i: int, j: int) -> dict[str, str]:
    card = tab.locator(".cell-card")
    card.locator(".place", has_text=re.compile(f"query {i:,} → key {j:,}(:|$)")).wait_for()
    return {name: card.locator(f".{name}").text_content() for name in ("pair", "weight", "place")}


def stated(tab) -> float:
    """Return the relative error that the page states."""
    return (
        float(re.search(r"The bound for every weight is ([\d.]+) %", tab.locator(".exact").text_content())[1])
        / 100
    )


def check(shown: str, weight: float, relative: float) -> None:
    """Check that the number on screen is the weight, within the stated error and the digits shown."""
    if shown == "masked":
        assert weight == 0
        return
    digits = 5e-5 if "e" not in shown else 5.1e-4 * float(shown)
    assert abs(float(shown) - weight) <= relative * weight + digits


@pytest.mark.slow
def test_hostile_tokens_are_text(show):
    n = len(HOSTILE)
    tab = show(square(n).page(HOSTILE, title=HOSTILE[0]))
    assert tab.locator("h1").text_content() == escape_unprintable(HOSTILE[0])
    for i, name in enumerate(HOSTILE):
        at = go(tab, i, n - 1 - i)
        assert at["pair"] == f"{escape_unprintable(name)} → {escape_unprintable(HOSTILE[n - 1 - i])}"
        context = tab.locator(".cell-card dd").first.text_content()
        assert escape_unprintable(name) in context
    tab.locator(".top-keys li").first.wait_for()
    names = {escape_unprintable(name) for name in HOSTILE}
    assert set(tab.locator(".top-keys .name").all_text_contents()) <= names
    assert tab.locator("img, script:not([type])").count() == 0


@pytest.mark.slow
def test_the_policy_stops_a_script_that_got_in(browser):
    context = browser.new_context()
    tab = context.new_page()
    opened, said = [], []
    tab.on("dialog", lambda d: (opened.append(d.message), d.dismiss()))
    tab.on("console", lambda message: said.append(message.text))
    page = square().page(tokens(40))
    tab.set_content(
        page.html.replace("</main>", "</main><script>alert(1)</script><img src=x onerror=alert(2)>")
    )
    assert go(tab, 3, 4)["pair"] == "on → a"
    assert opened == []
    assert_policy_said(browser, said)
    context.close()


@pytest.mark.slow
def test_a_notebook_shows_it_in_a_sandbox(browser):
    context = browser.new_context()
    tab = context.new_page()
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.set_content(f"<!DOCTYPE html><title>notebook</title>{square().page(tokens(40))._repr_html_()}")
    frame = tab.frame_locator("iframe")
    assert settled(frame) == "Every weight of this view has its own cell."
    assert go(frame, 3, 4)["weight"] == format_number(float(square()[3, 4]))
    tab.wait_for_timeout(400)  # the delay before the address is written
    assert tab.locator("iframe").get_attribute("sandbox") == "allow-scripts" and said == []
    assert len(tab.workers) == 1
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["missing", "refused"])
def test_without_a_worker_the_page_computes_the_weights(browser, worker):
    context = browser.new_context()
    tab = context.new_page()
    text = square(mask=causal()).page(tokens(40)).html
    if worker == "missing":
        tab.evaluate("() => { delete window.Worker; }")
    else:
        text = text.replace("worker-src blob:", "worker-src 'none'")
    tab.set_content(text)
    settled(tab)
    weights = square(mask=causal())
    check(go(tab, 30, 12)["weight"], float(weights[30, 12]), 0.02)
    assert go(tab, 12, 30)["weight"] == "masked"
    assert tab.workers == []
    context.close()


def mixed():
    query, key = normal(2, 4, 50, 8), normal(2, 2, 70, 8, seed=1)
    mask = (
        padding([60, 70]) & causal(**LOWER) & (sliding_window(np.array([9, 30, 5, 70]), **LOWER) | first(2))
    )
    whole = attention(query, key, mask=mask, score_mod=[alibi(**LOWER), softcap(4.0)], sink=[1.0, 0.0, 2.0, 1.0],
                      enable_gqa=True)  # fmt: skip
    return whole.lazy[1, 2]


def documents():
    ids = np.repeat(np.arange(6), [3, 20, 9, 1, 40, 27])
    added = np.where(np.random.default_rng(0).random((100, 100)) < 0.1, -np.inf, normal(100, 100))
    return square(100, mask=document(ids) & causal(), score_mod=bias(added))


CASES = {"windows, cap, slope, sink, grouped": mixed, "documents, bias": documents, "all": lambda: square(90)}


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_cells_are_the_matrix_within_the_stated_error(show, make):
    A = make()
    error = build_payload(A.problem, "page").error
    tab = show(A.page())
    assert error.relative <= stated(tab) <= 1.1 * error.relative
    weights, live = A.to_dense(), A.scores[...] != -np.inf
    rng = np.random.default_rng(1)
    picked = [*zip(*(rng.integers(n, size=6) for n in A.shape), strict=True)]
    picked += [tuple(ij) for ij in rng.permutation(np.argwhere(live))[:6]]
    for i, j in picked:
        at = go(tab, i, j)
        assert at["pair"] == f"query {i} → key {j}"
        check(at["weight"], weights[i, j], error.relative)
    i = picked[-1][0]
    tab.get_by_role("heading", name=f"Largest weights of query {i}").wait_for()
    best = tab.locator(".top-keys .name").all_text_contents()
    wanted = np.argsort(-weights[i], kind="stable")[: min(8, (weights[i] > 0).sum())]
    assert best == [f"key {j}" for j in wanted]
    for text, weight in zip(
        tab.locator(".top-keys .number").all_text_contents(), weights[i, wanted], strict=True
    ):
        check(text, weight, error.relative)


@pytest.fixture(scope="module")
def long_page():
    """4,096 tokens with an overview of blocks of 16 × 16, so that all kinds of views occur."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.core.matrix_page.MAX_CELLS", 256)
        return square(4096, mask=causal()).page(tokens(4096))


NARROW = {"viewport": {"width": 360, "height": 800}}
WIDENED = " Weights from 0.5 are drawn larger."
KINDS = {
    "maximum": [
        f"Each point is the maximum of 16 × 16 weights, computed when the page was built.{WIDENED}",
        "Each point is the maximum of 8 × 8 weights, all computed in this page.",
        "Each point is the maximum of 4 × 4 weights, all computed in this page.",
        "Each point is the maximum of 2 × 2 weights, all computed in this page.",
        "Every weight of this view has its own cell.",
    ],
    "mean": [
        "Each point is the mean of 16 × 16 weights, computed when the page was built.",
        "A sample: each point is the mean of 16 weights chosen at random from 8 × 8 weights.",
        "Each point is the mean of 4 × 4 weights, all computed in this page.",
        "Each point is the mean of 2 × 2 weights, all computed in this page.",
        "Every weight of this view has its own cell.",
    ],
}


def until(tab, question, answer) -> None:
    """Wait until a question has an answer."""
    for _ in range(1200):
        if question() == answer:
            return
        tab.wait_for_timeout(50)
    assert question() == answer


def in_view(tab) -> str:
    return tab.locator(".map-range").text_content()


def choose(tab, kind: str) -> None:
    """Choose what a point shows."""
    tab.get_by_role("radio", name=kind).check(force=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_map_says_what_a_point_is(show, long_page, kind):
    tab = show(long_page, viewport={"width": 380, "height": 800})  # wide enough with a scrollbar, too
    settled(tab)
    assert tab.get_by_role("radio", name="maximum").is_checked()
    choose(tab, kind)
    status = [settled(tab)]
    tab.locator(".map").focus()
    for _ in range(10):
        before = in_view(tab)
        tab.keyboard.press("+")
        until(tab, lambda before=before: in_view(tab) != before, True)
        status += [settled(tab)] * (settled(tab) != status[-1])
    assert status == KINDS[kind]


DEVICES = {
    "wide": {"viewport": {"width": 1200, "height": 900}},
    "narrow, dark": {
        "viewport": {"width": 360, "height": 800},
        "color_scheme": "dark",
        "device_scale_factor": 3,
    },
    "small pixels": {"viewport": {"width": 1200, "height": 900}, "device_scale_factor": 0.5},
}


def plant(n: int, width: int, cells: list[tuple[int, int]], **options):
    """Return a matrix of small weights, but 1.0 at some cells."""
    query, key = (normal(n, width, seed=seed, by=0.5).astype(np.float32) for seed in (0, 1))
    query, key = (np.pad(array, ((0, 0), (0, len(cells)))) for array in (query, key))
    for at, (i, j) in enumerate(cells):
        query[i] = 0
        query[i, width + at] = key[j, width + at] = 60
    return attention(query, key, scale=1.0, **options)


def color_of_one(tab) -> tuple[int, ...]:
    """Return the colour of the weight 1 in the scheme of a page."""
    color = tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ramp-4')")
    return tuple(bytes.fromhex(color.strip().removeprefix("#")))


def darkest_points(tab, n: int):
    """Return the cells (query, key) of all pixels that have the colour of the weight 1, and the weights of a pixel."""
    pixels, width, height, shown = find_color(tab.locator(".map"), color_of_one(tab))
    ratio, left, top = width / shown, 56 if shown < 480 else 72, 26
    size = min((shown - left) / n, (height / ratio - top) / n)  # of a weight, in pixels of the page
    found = np.array(pixels).reshape(-1, 2) / ratio
    return (found - [top, left]) / size, 1 / (size * ratio)


def check_planted(tab, n: int, cells: list[tuple[int, int]]) -> None:
    """Check that each planted cell, and nothing else, has the colour of the weight 1."""
    assert settled(tab).startswith("Each point is the maximum of")
    found, pixel = darkest_points(tab, n)
    assert len(found) > 0, "no planted weight of 1.0 is drawn"
    # Of each pixel from each cell, in weights; a large weight is drawn up to three pixels wider.
    distance = np.abs(found[:, None] - np.array(cells)[None]).max(-1)
    assert (distance.min(0) <= 2.5 * pixel).all(), "a planted weight of 1.0 is not drawn"
    assert (distance.min(1) <= 6 * pixel).all(), "something else is drawn like a weight of 1.0"


@pytest.fixture(scope="module")
def planted_page():
    """32,768 tokens, with a weight of 1.0 at random cells and in the corners."""
    n, rng = 32_768, np.random.default_rng(3)
    rows = np.sort(rng.choice(np.arange(1, n - 1), 6, replace=False))
    cells = [
        (0, 0),
        (n - 1, 0),
        (20_001, 12_003),
        *zip(rows.tolist(), rng.integers(rows).tolist(), strict=True),
    ]
    return plant(n, 4, cells, mask=causal()).page(), n, cells


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("screen", DEVICES)
def test_a_weight_of_1_among_a_billion_is_seen_at_the_first_paint(show, planted_page, screen):
    page, n, cells = planted_page
    tab = show(page, **DEVICES[screen])
    check_planted(tab, n, cells)
    choose(tab, "mean")
    until(tab, lambda: settled(tab).startswith("Each point is the mean of"), True)
    assert len(darkest_points(tab, n)[0]) < len(cells)  # means hide them
    tab.wait_for_url("**#*reduce=mean*")
    tab.reload()
    assert settled(tab).startswith("Each point is the mean of")
    choose(tab, "maximum")
    until(tab, lambda: settled(tab).startswith("Each point is the maximum of"), True)
    check_planted(tab, n, cells)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_weight_of_1_is_seen_in_131072_rows(show):
    """Far keys are masked, so that the page is made in seconds; every row and its visible keys count."""
    n = 131_072
    cells = [(130_001, 17), (77_777, 77_600), (131_071, 130_900), (3, 2), (65_537, 63), (100_003, 99_999)]
    mask = causal() & (sliding_window(256) | first(64))
    tab = show(plant(n, 4, cells, mask=mask).page())
    check_planted(tab, n, cells)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_weight_of_1_is_seen_at_every_zoom(show, planted_page):
    page, _, cells = planted_page
    tab = show(page)
    row, column = cells[2]
    tab.evaluate("address => { location.hash = address; }", f"row={row}&column={column}&zoom=0.06")
    tab.reload()
    tab.locator(".map").focus()
    seen = set()
    for _ in range(8):
        seen.add(settled(tab))
        pixels, width, height, _ = find_color(tab.locator(".map"), color_of_one(tab))
        centre = np.array([(height + 26) / 2, (width + 72) / 2])
        assert np.abs(np.array(pixels).reshape(-1, 2) - centre).max(-1).min(initial=np.inf) < 9, settled(tab)
        before = in_view(tab)
        tab.keyboard.press("+")
        until(tab, lambda before=before: in_view(tab) != before, True)
    assert len(seen) >= 5


@pytest.mark.slow
def test_the_address_keeps_the_view(show, long_page):
    tab = show(long_page)
    go(tab, 700, 130)
    tab.get_by_role("button", name="Zoom in").click()
    tab.wait_for_url("**#*query=700&key=130*")
    tab.wait_for_timeout(400)
    kept, at = in_view(tab), tab.url
    assert re.search(r"#row=[\d.]+&column=[\d.]+&zoom=[\d.]+&query=700&key=130$", at)
    tab.reload()
    assert details(tab, 700, 130)["pair"] == f"{WORDS[700 % len(WORDS)]} → {WORDS[130 % len(WORDS)]}"
    until(tab, lambda: in_view(tab), kept)
    tab.get_by_role("button", name="Show the whole map").click()
    tab.wait_for_timeout(400)
    assert tab.url.endswith("#query=700&key=130")
    # An address that is entered into the open page moves the map.
    tab.evaluate("address => { location.hash = address; }", "row=90&column=80&zoom=40&query=91&key=81")
    details(tab, 91, 81)
    until(tab, lambda: in_view(tab).startswith("queries 8"), True)


@pytest.mark.slow
def test_some_rows_keep_their_names(show):
    A = square(mask=causal())
    tab = show(A.lazy[[30, 4]].page())
    at = go(tab, 0, 7)
    assert at["pair"] == "query 30 → key 7"
    check(at["weight"], float(A[30, 7]), 0.02)
    assert go(tab, 1, 7)["weight"] == "masked"
    tab = show(A.lazy[[30, 4]].page(tokens(40)))
    assert go(tab, 1, 3)["pair"] == f"{WORDS[4]} → {WORDS[3]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "nonsense",
    keep_in_ci(
        [
            "row=banana&column=&zoom=-1&query=1e99&key=0",
            "zoom=NaN&query=3",
            "query=-1&key=2&row=Infinity",
            "%%%&zoom=1e9",
            "constructor=1&__proto__=2",
        ],
        "row=banana&column=&zoom=-1&query=1e99&key=0",
    ),
)
def test_invalid_parts_of_an_address_are_ignored(show, long_page, nonsense):
    tab = show(long_page)
    whole = "queries 0 to 4,095, keys 0 to 4,095"
    until(tab, lambda: in_view(tab), whole)
    tab.evaluate("address => { location.hash = address; }", nonsense)
    tab.reload()
    settled(tab)
    until(tab, lambda: in_view(tab), whole)
    assert tab.locator(".cell-card .weight").count() == 0


@pytest.mark.slow
def test_keys(show):
    A = square(60, mask=causal())
    tab = show(A.page(tokens(60)))
    settled(tab)
    tab.keyboard.press("Tab")
    for _ in range(9):  # the search, the view and the buttons of the map come before it
        if tab.evaluate("document.activeElement.tagName") == "CANVAS":
            break
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('role')") == "application"
    at = [30, 30]
    moves = {"ArrowDown": (1, 0), "ArrowUp": (-1, 0), "ArrowLeft": (0, -1), "ArrowRight": (0, 1)}
    for key in ["ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowUp", "ArrowRight", "Shift+ArrowLeft"]:
        far = 16 if key.startswith("Shift") else 1
        at = [n + far * move for n, move in zip(at, moves[key.split("+")[-1]], strict=True)]
        tab.keyboard.press(key)
        check(details(tab, *at)["weight"], float(A[tuple(at)]), 0.02)
    for _ in range(5):
        tab.keyboard.press("Shift+ArrowUp")
    details(tab, 0, at[1])  # the selection stops at the edge
    tab.keyboard.press("+")
    tab.keyboard.press("+")
    until(tab, lambda: in_view(tab) == "queries 0 to 59, keys 0 to 59", False)
    for _ in range(8):
        tab.keyboard.press("Shift+ArrowDown")
    details(tab, 59, at[1])
    until(tab, lambda: "to 59, keys" in in_view(tab), True)  # the view follows the selection
    tab.keyboard.press("Home")
    tab.get_by_text("queries 0 to 59, keys 0 to 59").wait_for()


@pytest.mark.slow
def test_pointer_and_wheel(show, long_page):
    A = square(4096, mask=causal())
    tab = show(long_page)
    settled(tab)
    box = tab.locator(".map").bounding_box()
    x, y = box["x"] + 200, box["y"] + 400
    tab.mouse.move(x, y)
    tab.locator(".cell-card .weight").wait_for()

    def pointed():
        numbers = re.search(r"query ([\d,]+) → key ([\d,]+)", tab.locator(".place").first.text_content())
        return tuple(int(n.replace(",", "")) for n in numbers.groups())

    i, j = pointed()
    # On a picture of maxima, the details are those of the single cell under the pointer.
    check(tab.locator(".cell-card .weight").text_content(), float(A[i, j]), 0.02)
    for _ in range(12):
        tab.mouse.wheel(0, -120)
    tab.wait_for_timeout(100)
    settled(tab)
    tab.mouse.move(x + 1, y)
    tab.wait_for_timeout(100)
    near = pointed()
    assert abs(near[0] - i) <= 2 and abs(near[1] - j) <= 2  # the cell under the pointer stays there
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 60, y + 30, steps=5)
    tab.mouse.up()
    tab.mouse.move(x + 61, y + 30)
    tab.wait_for_timeout(100)
    assert (
        abs(pointed()[0] - near[0]) <= 1 and abs(pointed()[1] - near[1]) <= 1
    )  # the cell moves with the pointer
    tab.mouse.dblclick(x + 60, y + 30)  # it zooms, and opens the steps of the cell below the map
    tab.locator(".map").hover()
    for _ in range(60):
        tab.mouse.wheel(0, 240)
    until(tab, lambda: in_view(tab), "queries 0 to 4,095, keys 0 to 4,095")


@pytest.mark.slow
def test_two_fingers_zoom_and_one_selects(show, long_page):
    tab = show(long_page, has_touch=True)
    whole = "queries 0 to 4,095, keys 0 to 4,095"
    until(tab, lambda: in_view(tab), whole)
    box, hand = tab.locator(".map").bounding_box(), tab.context.new_cdp_session(tab)
    x, y = box["x"] + 300, box["y"] + 300

    def touch(kind, *apart):
        points = [{"x": x + n, "y": y + n, "id": int(n > 0)} for n in apart]
        hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", -20, 20)
    for apart in range(30, 170, 10):
        touch("touchMove", -apart, apart)
    touch("touchEnd")
    until(tab, lambda: in_view(tab) == whole, False)
    low, high = (
        int(n.replace(",", "")) for n in re.match(r"queries ([\d,]+) to ([\d,]+),", in_view(tab)).groups()
    )
    assert 300 < high - low < 1200  # zoomed by a factor of eight
    assert tab.locator(".cell-card .weight").count() == 0
    tab.touchscreen.tap(x, y)
    tab.locator(".cell-card .weight").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3000), (3000, 1), (2, 2), (1, 1), (30, 2000)])
def test_any_shape_has_room(show, shape):
    A = attention(normal(shape[0], 4), normal(shape[1], 4, seed=1))
    tab = show(A.page(tokens(shape[1]), query_tokens=[f"q{i}" for i in range(shape[0])]))
    # Of 1,024 cells along the long side, two may share a pixel.
    block = {(3000, 1): "up to 6 × 1", (1, 3000): "up to 1 × 6", (30, 2000): "up to 1 × 4"}.get(shape)
    single = KINDS["maximum"][-1]
    expected = (
        f"Each point is the maximum of {block} weights, computed when the page was built.{WIDENED}"
        if block
        else single
    )
    until(tab, lambda: settled(tab), expected)
    i, j = shape[0] - 1, shape[1] // 2
    at = go(tab, i, j)
    check(at["weight"], float(A[i, j]), 0.02)
    assert at["pair"] == f"q{i} → {WORDS[j % len(WORDS)]}"


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_axe_finds_no_serious_fault(show, long_page, scheme, width):
    tab = show(long_page, viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=True)
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    box = tab.locator(".map").bounding_box()
    tab.touchscreen.tap(box["x"] + 150, box["y"] + 150)
    tab.locator(".top-keys li").first.wait_for()
    assert faults(tab) == []


# -- 131,072 tokens ---------------------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    """Use one thread: on a busy machine, several take longer."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_long_context_in_one_file(show):
    import torch

    n, made = 131_072, torch.Generator().manual_seed(0)
    query, key = (torch.randn(n, 64, generator=made) for _ in range(2))
    # Far keys are masked, so that the page is made in seconds.
    A = attention(query, key, mask=causal() & (sliding_window(2048) | first(64)))
    page = A.page(tokens(n))
    assert len(page.html) <= 50_000_000
    tab = show(page)
    until(tab, lambda: in_view(tab), "queries 0 to 131,071, keys 0 to 131,071")
    overview = (
        f"Each point is the maximum of up to 256 × 256 weights, computed when the page was built.{WIDENED}"
    )
    assert settled(tab) == overview
    # The picture is painted before the arrays are loaded.
    tab.wait_for_load_state("load")
    painted, loaded = tab.evaluate(
        "() => [performance.getEntriesByName('first-contentful-paint')[0].startTime, "
        "performance.getEntriesByType('navigation')[0].domContentLoadedEventStart]"
    )
    assert painted < loaded
    relative = (
        float(re.search(r"The bound for every weight is ([\d.]+) %", tab.locator(".exact").text_content())[1])
        / 100
    )
    rng = np.random.default_rng(2)
    rows = np.sort(rng.integers(n, size=50))
    keys = rng.integers(np.maximum(rows - 2047, 0), rows + 1)
    weights = A[rows].numpy()[np.arange(50), keys]
    assert 0 < relative < 0.05
    for i, j, weight in zip(rows.tolist(), keys.tolist(), weights.tolist(), strict=True):
        check(go(tab, i, j)["weight"], weight, relative)
    assert go(tab, 5, n - 1)["weight"] == "masked"
    # Times of the tiles, relative to the speed of this browser.
    go(tab, 70_000, 69_900)
    tab.locator(".map").focus()
    for _ in range(7):
        tab.keyboard.press("-")
    until(
        tab, lambda: settled(tab).startswith("Each point is the maximum of 8 × 8 weights, all computed"), True
    )
    took = tab.evaluate("() => performance.getEntriesByName('picture').map((entry) => entry.detail)")
    assert len(took) > 8 and statistics.median(took[-8:]) < 12 * pace(tab)
    choose(tab, "mean")
    tab.locator(".map").focus()
    for _ in range(2):
        tab.keyboard.press("-")
    sample = "A sample: each point is the mean of 16 weights chosen at random from 32 × 32 weights"
    until(tab, lambda: settled(tab).startswith(sample), True)
    took = tab.evaluate("() => performance.getEntriesByName('picture').map((entry) => entry.detail)")
    assert statistics.median(took[-8:]) < 4 * pace(tab)
