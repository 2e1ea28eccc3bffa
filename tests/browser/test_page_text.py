"""Reading a text coloured by one token, the mean over heads, and the search in a map; compared with the matrix."""

from __future__ import annotations

import re

import numpy as np
import pytest

import regard
from regard import attention, causal
from regard.core.matrix_page import build_payload
from regard.render.text import escape_unprintable
from tests.helpers.pages import HOSTILE, SCREENS, darkest_pixel, faults

WORDS = ["the", "cat", "sat", "on", "a", "mat", "because", "it", "was", "tired", "and", "lazy"]
# The name, the position and the weight of each token on screen, read from the label that a screen reader gets.
READ = "nodes => nodes.map(n => n.getAttribute('aria-label'))"
LABEL = re.compile(r"^(.*), token (\d+)(?:, weight (\S+))?$", re.DOTALL)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) * 1.5


def square(n=40, **options):
    return attention(normal(n, 8), normal(n, 8, seed=1), **options)


def tokens(n):
    return [WORDS[i % len(WORDS)] for i in range(n)]


def find_words(tab, block="Text"):
    # By the label: Firefox ESR 153 may crash while the driver computes roles.
    return tab.locator(f"section[aria-label='{block}'] .word")


def read(tab, block="Text"):
    """Return the positions and weights of the tokens on screen; a token without a weight has NaN."""
    words = find_words(tab, block).evaluate_all(READ)
    found = [LABEL.match(word).groups() for word in words]
    return [name for name, _, _ in found], np.array([float(weight or "nan") for _, _, weight in found])


def choose(tab, name):
    tab.get_by_role("radio", name=name, exact=True).check(force=True)


def click(tab, position, ready, block="Text"):
    find_words(tab, block).nth(position).click()
    tab.locator(f'.text-view[data-ready="{ready}"]').wait_for()


def check(found, expected, relative):
    np.testing.assert_allclose(found, expected, rtol=relative + 6e-4, atol=6e-5)


@pytest.mark.slow
def test_a_text_is_coloured_by_what_a_token_attends_to_and_by_what_attends_to_it(show):
    A = square(mask=causal())
    relative = build_payload(A.problem, "page").error.relative
    tab = show(A.page(tokens(40)))
    choose(tab, "Text")
    tab.locator('.text-view[data-ready="0 39"]').wait_for()  # the last query, if none was selected
    check(read(tab)[1], A[39], relative)
    click(tab, 17, "0 17")
    names, weights = read(tab)
    assert names == tokens(40)
    check(weights, A[17], relative)
    shares = tab.locator(".word").evaluate_all(
        "nodes => nodes.map(n => +n.style.getPropertyValue('--share'))"
    )
    np.testing.assert_allclose(shares, np.sqrt(A[17] / A[17].max()), rtol=relative + 1e-3)
    assert tab.locator(".text-status").text_content() == f"What {WORDS[17 % 12]}17 attends to"
    best = [int(text) for text in tab.locator(".text-view .where").all_text_contents()]
    assert best == np.argsort(-A[17], kind="stable")[:8].tolist()
    choose(tab, "what attends to the token")
    tab.locator('.text-view[data-ready="1 17"]').wait_for()
    check(read(tab)[1], A[:, 17], relative)
    assert tab.locator(".text-status").text_content() == f"What attends to {WORDS[17 % 12]}17"
    # The details are those of the pair that is pointed at.
    tab.locator(".word").nth(30).hover()
    tab.get_by_text("query 30 → key 17").wait_for()
    check(float(tab.locator(".cell-card .weight").text_content()), A[30, 17], relative)
    tab.wait_for_url("**#*direction=received*")
    tab.wait_for_timeout(400)
    tab.reload()
    tab.locator('.text-view[data-ready="1 17"]').wait_for()
    choose(tab, "Map")
    tab.locator('.map-box[data-missing="0"]').wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("pointer", [(0, 0), (180, 240), (180, 380)])  # text scrolls under the last two
def test_a_text_is_read_with_the_keyboard(show, pointer):
    A = square(60, mask=causal())
    tab = show(A.page(tokens(60)), viewport={"width": 360, "height": 800})
    choose(tab, "Text")
    tab.locator('.text-view[data-ready="0 59"]').wait_for()
    tab.mouse.move(*pointer)
    tab.get_by_role("radio", name="what the token attends to").focus()
    tab.keyboard.press("Tab")  # the text is one tab stop
    focused = "document.activeElement.getAttribute('aria-label')"
    position = lambda: int(LABEL.match(tab.evaluate(focused))[2])  # noqa: E731
    assert position() == 59
    for key, expected in {"Home": 0, "ArrowRight": 1, "End": 59, "ArrowLeft": 58}.items():
        tab.keyboard.press(key)
        assert position() == expected
    tab.keyboard.press("ArrowUp")
    above = position()
    assert 40 < above < 58
    tab.get_by_text(f"query 59 → key {above}").wait_for()  # as if it was pointed at
    tab.wait_for_timeout(500)  # the browser tells a node late that it is under the pointer
    assert tab.get_by_text(f"query 59 → key {above}").is_visible()
    tab.keyboard.press("ArrowDown")
    assert position() > above
    tab.keyboard.press("Enter")
    tab.locator(f'.text-view[data-ready="0 {position()}"]').wait_for()
    assert tab.locator('.word[aria-pressed="true"]').count() == 1


@pytest.mark.slow
def test_two_texts_if_queries_and_keys_differ(show):
    A = attention(normal(5, 8), normal(7, 8, seed=1))
    names = [f"q{i}" for i in range(5)]
    relative = build_payload(A.problem, "page").error.relative
    tab = show(A.page(tokens(7), query_tokens=names))
    choose(tab, "Text")
    click(tab, 2, "0 2", "Queries")
    assert read(tab, "Queries")[0] == names and np.isnan(read(tab, "Queries")[1]).all()
    check(read(tab, "Keys")[1], A[2], relative)
    click(tab, 6, "1 6", "Keys")
    check(read(tab, "Queries")[1], A[:, 6], relative)
    assert (
        tab.get_by_role("radio", name="what the token attends to").count() == 0
    )  # the text that is clicked decides


@pytest.mark.nightly
@pytest.mark.slow
def test_a_long_text_is_read_in_parts(show):
    n = 2500
    query, key = np.zeros((n, 2)), np.zeros((n, 2))
    query[2400, 0] = key[3, 0] = 30
    tab = show(attention(query, key, mask=causal()).page(tokens(n)))
    choose(tab, "Text")
    assert tab.locator(".word").count() == 500
    tab.get_by_text("tokens 2,000 to 2,499 of 2,500").wait_for()
    click(tab, 400, "0 2400")
    # The strip shows where in the whole text the weight is.
    column = (
        "(canvas) => { const { data } = canvas.getContext('2d').getImageData(0, 9, canvas.width, 1); const alpha = [];"
        " for (let x = 0; x < canvas.width; x++) alpha.push(data[4 * x + 3]); return alpha; }"
    )
    alpha = np.array(tab.locator(".strip").evaluate(column))
    assert np.flatnonzero(alpha[: len(alpha) // 2] == 255).tolist() == [3 * len(alpha) // n]
    tab.locator(".text-view .top-keys button").first.click()
    tab.get_by_text("tokens 0 to 999 of 2,500").wait_for()
    assert (
        tab.evaluate("document.activeElement.getAttribute('aria-label')") == f"{WORDS[3]}, token 3, weight 1"
    )
    tab.keyboard.press("PageDown")
    tab.get_by_text("tokens 1,000 to 1,999 of 2,500").wait_for()
    tab.get_by_role("button", name="Previous part of the text").click()
    tab.get_by_text("tokens 0 to 999 of 2,500").wait_for()


@pytest.mark.slow
def test_running_text_joins_the_parts_of_words(show):
    def running(names):
        tab = show(square(len(names)).page(names))
        choose(tab, "Text")
        return tab.locator(".running").inner_text()

    assert running(["ĠThe", "Ġcat", "nap", "ĊĊ", "ĠIt", "."]) == "The catnap↵\nIt."
    assert running(["▁The", "▁cat", "nap", "."]) == "The catnap."
    assert running(["[CLS]", "cat", "##nap", "now"]) == "[CLS] catnap now"


@pytest.mark.slow
def test_hostile_tokens_are_text(show):
    tab = show(square(len(HOSTILE)).page(HOSTILE))
    choose(tab, "Text")
    names = [escape_unprintable(name) for name in HOSTILE]
    assert read(tab)[0] == names
    tab.get_by_label("Query token").fill(names[0])
    tab.get_by_role("button", name="Find").click()
    tab.locator("#results[data-ready]").wait_for(state="attached")
    assert tab.locator(".hit .pair .token").first.text_content() == names[0]
    assert tab.locator("img, script:not([type])").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_axe_finds_no_serious_fault(show, scheme, width):
    tab = show(
        square(mask=causal()).page(tokens(40)), viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    choose(tab, "Text")
    click(tab, 30, "0 30")
    find(tab, "it", "cat")
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


# -- The search in a map ----------------------------------------------------------------------------------


def find(tab, query, key):
    """Search, and return the pairs and weights on screen."""
    tab.get_by_label("Query token").fill(query)
    tab.get_by_label("Key token").fill(key)
    tab.get_by_role("button", name="Find").click()
    tab.locator("#results[data-ready]").wait_for(state="attached")
    return tab.locator(".hit").evaluate_all(
        "nodes => nodes.map(n => [...n.dataset.pair.split(',').map(Number), "
        "Number(n.querySelector('.much').dataset.weight)])"
    )


def largest(A, rows, columns):
    """Return the eight pairs with the largest weights, in the order of the page."""
    weights = A.to_dense()[np.ix_(rows, columns)]
    order = np.argsort(-weights, axis=None, kind="stable")[:8]
    return [
        (rows[n // len(columns)], columns[n % len(columns)], weights.flat[n])
        for n in order
        if weights.flat[n]
    ]


@pytest.mark.slow
def test_the_search_finds_the_largest_weights_of_all_occurrences(show):
    A = square(100, mask=causal())
    tab = show(A.page(tokens(100)))
    it, cat, every = list(range(7, 100, 12)), list(range(1, 100, 12)), list(range(100))
    for query, key, rows, columns in [
        ("it", "cat", it, cat),
        ("IT", "", it, every),
        ("", "#20", every, [20]),
    ]:
        found, expected = find(tab, query, key), largest(A, rows, columns)
        assert [(i, j) for i, j, _ in found] == [(i, j) for i, j, _ in expected]
        check([weight for *_, weight in found], [weight for *_, weight in expected], 0.03)
    find(tab, "it", "cat")
    assert tab.locator("#search-status").text_content() == (
        "8 queries and 9 keys found, marked on the map. The largest weights:"
    )
    marked = marks(tab)
    assert marked == (len(it), len(cat))
    i, j, _ = largest(A, it, cat)[1]
    tab.locator(".hit").nth(1).click()
    tab.get_by_text(f"query {i} → key {j}").wait_for()
    tab.wait_for_url(re.compile(r"#(?=.*from=it)(?=.*to=cat)"))
    tab.reload()
    assert tab.locator(".hit").nth(1).get_attribute("data-pair") == f"{i},{j}"
    tab.get_by_role("button", name="Clear").click()
    assert tab.locator(".hit").count() == 0 and marks(tab) == (0, 0)
    find(tab, "cats", "it")
    assert tab.locator("#search-status").text_content().startswith("No token cats. Similar: cat, sat, mat.")


def marks(tab):
    """Return how many rows and columns are marked at the edges of the map, by the pixels of the mark's colour."""
    tab.wait_for_timeout(100)
    return tuple(
        tab.locator(".map").evaluate(
            """(canvas) => {
          const copy = new OffscreenCanvas(canvas.width, canvas.height);
          const context = copy.getContext("2d", { willReadFrequently: true });
          context.drawImage(canvas, 0, 0);
          const count = (x, y, width, height) => {
            const { data } = context.getImageData(x, y, width, height);
            let marks = 0, before = false;
            for (let at = 0; at < data.length; at += 4) {
              const here = data[at] > 180 && data[at + 1] < 120 && data[at + 2] < 90 && data[at + 3] > 60;
              marks += here && !before;
              before = here;
            }
            return marks;
          };
          return [count(100, 27, 1, canvas.height - 28), count(105, 21, canvas.width - 106, 1)];
        }"""
        )
    )


@pytest.mark.slow
def test_a_search_of_positions_needs_no_tokens(show):
    A = square(30)
    tab = show(A.page())
    assert tab.get_by_role("radio", name="Text").count() == 0
    assert [(i, j) for i, j, _ in find(tab, "#5", "")] == [
        (i, j) for i, j, _ in largest(A, [5], list(range(30)))
    ]
    find(tab, "cat", "")
    assert "This map has no tokens; write a position as #7." in tab.locator("#search-status").text_content()


# -- The model page ---------------------------------------------------------------------------------------


class Layer:
    """A function that attends with given queries and keys, recorded as one layer."""

    def __new__(cls, query, key):
        torch = pytest.importorskip("torch")

        class Attend(torch.nn.Module):
            def forward(self, value):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        return torch.nn.ModuleDict({"attention": Attend()})


def recorded(query, key):
    """Return the recording of one causal layer, (1, heads, n, head_dim) each."""
    torch = pytest.importorskip("torch")
    query, key = (torch.tensor(array, dtype=torch.float32) for array in (query, key))
    model = Layer(query, key)
    with torch.no_grad(), regard.watch(model) as recording:
        model["attention"](key)
    return recording


@pytest.mark.slow
def test_the_mean_over_heads_is_a_choice_beside_the_heads(show):
    recording = recorded(normal(1, 3, 20, 4), normal(1, 3, 20, 4, seed=1))
    weights = recording["attention"].to_dense()[0].numpy()
    mean = weights.mean(0)
    tab = show(recording.page(tokens(20)))
    heads = tab.locator("button.head")
    assert [head.get_attribute("aria-label") for head in heads.all()] == [
        "Layer 0, head 0", "Layer 0, head 1", "Layer 0, head 2", "Layer 0, mean of 3 heads"
    ]  # fmt: skip
    heads.nth(1).click()
    button = tab.get_by_role("button", name="Mean of heads")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert tab.locator("#which").text_content() == "Layer 0, mean of 3 heads"
    assert button.get_attribute("aria-pressed") == "true"
    choose(tab, "Text")
    click(tab, 11, "0 11")
    check(read(tab)[1], mean[11], 0.02)
    choose(tab, "what attends to the token")
    tab.locator('.text-view[data-ready="1 11"]').wait_for()
    check(read(tab)[1], mean[:, 11], 0.02)
    button.click()  # back to the head
    assert tab.locator("#which").text_content() == "Layer 0, head 1"
    tab.locator('.text-view[data-ready="1 11"]').wait_for()
    check(read(tab)[1], weights[1, :, 11], 0.02)
    button.click()
    choose(tab, "Lines")
    tab.locator('.lines[data-ready="3"]').wait_for()
    choose(tab, "Map")
    tab.evaluate("location.hash = 'layer=0&head=mean&query=15&key=4'")
    tab.get_by_text("query 15 → key 4").wait_for()
    check(float(tab.locator(".cell-card .weight").text_content()), mean[15, 4], 0.02)
    tab.get_by_role("button", name="All heads").click()
    tab.get_by_label("Sort heads by").select_option("entropy")
    assert heads.count() == 3  # measures belong to single heads


@pytest.mark.slow
def test_a_head_whose_rows_start_later_is_read_at_its_positions(show):
    torch = pytest.importorskip("torch")
    query, key = torch.tensor(normal(1, 2, 3, 4)), torch.tensor(normal(1, 2, 9, 4, seed=1))
    bottom_right = torch.ones(3, 9, dtype=torch.bool).tril(6)

    class Attend(torch.nn.Module):
        def forward(self):
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=bottom_right)

    model = Attend()
    with torch.no_grad(), regard.watch(model) as recording:
        model()
    weights = recording[next(iter(recording))].to_dense()[0, 1].numpy()
    tab = show(recording.page(tokens(9)))
    tab.evaluate("location.hash = 'layer=0&head=1&view=text'")
    tab.locator('.text-view[data-ready="0 2"]').wait_for()
    check(read(tab)[1], weights[2], 0.02)
    click(tab, 7, "0 1")
    check(read(tab)[1], weights[1], 0.02)
    click(tab, 4, "none")
    assert tab.locator(".text-status").text_content() == "This call has no query at token 4, only a key."
    choose(tab, "what attends to the token")
    tab.locator('.text-view[data-ready="1 4"]').wait_for()
    found = read(tab)[1]
    assert np.isnan(found[:6]).all()
    check(found[6:], weights[:, 4], 0.02)


@pytest.mark.slow
def test_thumbnails_and_maps_of_a_long_text_show_a_single_weight(show):
    """A weight of 1.0 of 2,048 tokens is the darkest cell of its thumbnail and of its map, and of those of the mean."""
    n, row, column = 2048, 1501, 617
    query, key = (normal(1, 2, n, 4, seed=seed) * 0.3 for seed in (0, 1))
    query, key = (np.pad(array, ((0, 0), (0, 0), (0, 0), (0, 1))) for array in (query, key))
    query[0, 1, row] = 0
    query[0, 1, row, 4] = key[0, 1, column, 4] = 90
    tab = show(recorded(query, key).page(tokens(n)), viewport={"width": 380, "height": 800})
    cell = [row * 64 // n, column * 64 // n]
    for head in ("0.0.1", "0.0.mean"):
        canvas = tab.locator(f'button.head[data-head="{head}"] canvas[data-reduce="max"]')
        canvas.wait_for()
        assert darkest_pixel(canvas, 0.5) == cell, head  # the first rows have large weights too
    assert "the maximum of a block of 32 × 32 weights" in tab.locator("#thumbnail-caption").text_content()
    points = {
        "1": "Each point is the maximum of 8 × 8",
        "mean": "Each point is the mean over 2 heads of the max",
    }
    for head, start in points.items():
        tab.evaluate("address => { location.hash = address; }", f"layer=0&head={head}")
        tab.locator(".map-status", has_text=start).wait_for()
        tab.locator('.map-box[data-missing="0"]').wait_for()
        box = tab.locator(".map").bounding_box()
        size = min((box["width"] - 72) / n, (box["height"] - 26) / n)  # of a weight, beside the margins
        x, y = darkest_pixel(tab.locator(".map"), 0.5, left=73)[::-1]
        assert abs(x - 72 - column * size) < 20 * size + 2 and abs(y - 26 - row * size) < 20 * size + 2, head
    tab.get_by_role("button", name="All heads").click()
    tab.get_by_label("Cells show").select_option("mean")
    tab.locator('button.head[data-head="0.0.1"] canvas[data-reduce="mean"]').wait_for()
    tab.wait_for_url("**#*reduce=mean*")
    tab.evaluate("location.hash = 'layer=0&head=1&reduce=mean'")
    tab.locator(".map-status", has_text="Each point is the mean of 8 × 8 weights").wait_for()
