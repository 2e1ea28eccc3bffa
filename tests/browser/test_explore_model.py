"""The page with a GPT in a real browser: what the reader does changes the numbers as PyTorch says."""

from __future__ import annotations

import re
import statistics

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore.explorers import CONTINUATIONS
from regard.interventions import ablate
from regard.pages import html
from tests.helpers.nightly import keep_in_ci
from tests.helpers.pages import HOSTILE, SCREENS, faults, pace
from tests.helpers.story_model import load_numpy, load_torch, run_torch, window

pytest.importorskip("torch")
pytest.importorskip("safetensors")
slow = pytest.mark.slow  # starts a browser

TEXT = "Zobi and Rumo went to the park. Zobi had a kite, and gave it to"
# Resolves when the page has read the text with its heads, and has drawn everything.
SETTLED = """async () => {
  const app = document.querySelector("#app"), pause = () => new Promise((resolve) => setTimeout(resolve, 10));
  while (app.getAttribute("aria-busy") !== "false") await pause();
}"""


def wait_until(tab, condition: str) -> None:
    """Wait for a JavaScript expression; Playwright's own waiting needs `eval`, which the policy of the page forbids."""
    tab.evaluate(
        f"async () => {{ while (!({condition})) await new Promise((resolve) => setTimeout(resolve, 20)); }}"
    )


@pytest.fixture(scope="module")
def page():
    return explore.model(TEXT)


@pytest.fixture
def open_page(show, page):
    def open_page(**options):
        tab = show(page, **{"viewport": {"width": 1280, "height": 900}, **options})
        tab.evaluate(SETTLED)
        return tab

    return open_page


def guesses(tab) -> dict[int, float]:
    """The tokens that are listed, with the model's probabilities."""
    read = "rows => rows.map((row) => [Number(row.dataset.token), Number(row.dataset.probability)])"
    return dict(map(tuple, tab.locator("#guesses button").evaluate_all(read)))


def agrees(tab, text: str, edit=None, position: int = -1) -> bool:
    """Whether the list has the eight best guesses of PyTorch after a token, with its probabilities."""
    expected = run_torch(window(text), edit=edit)["guess"][position]
    found = guesses(tab)
    order = np.argsort(-expected, kind="stable")[:8]
    np.testing.assert_allclose(list(found.values()), expected[list(found)], rtol=0, atol=1e-5)
    return set(found) == set(order.tolist()) or np.ptp(np.sort(expected)[-9:-7]) < 1e-6


def is_shown_as(text: str, share: float) -> bool:
    """Whether a text such as "97 %", "3.1 %" or "0.02 %" is a share, rounded to the digits of the text."""
    digits = re.search(r"(\d+)(?:\.(\d+))? %$", text)
    return abs(float(digits[0][:-2]) - 100 * share) <= 0.51 * 10.0 ** -len(digits[2] or "")


@slow
def test_it_opens_with_a_text_that_was_read(open_page):
    tab = open_page()
    assert tab.locator("#text").input_value() == TEXT
    assert agrees(tab, TEXT)
    lens = run_torch(window(TEXT))["lens"]
    final = lens[-1].argmax()
    read = "cells => cells.map((cell) => Number(cell.dataset.probability))"
    shown = tab.locator("#lens-table td.bars").evaluate_all(read)
    np.testing.assert_allclose(shown, lens[:, final], rtol=0, atol=1e-5)
    assert "Most likely next" in tab.locator("#announcement").text_content()
    assert tab.locator("#text-strip [role=option]").count() == len(window(TEXT))
    assert "temperature 0.8" in tab.locator("#guess-temperature").text_content()
    assert "temperature 1" in tab.locator("#lens-table thead").text_content()
    bits = load_torch().about["bits"]["model"]
    assert f"{bits:.2f}" in tab.locator("#bits tr").first.text_content()


@slow
def test_typing_changes_the_guess(open_page):
    tab = open_page()
    tab.locator("#text").press("End")
    tab.locator("#text").press_sequentially(" Rumo. Ru")
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT + " Rumo. Ru")
    tab.locator("#text").fill(
        "Café\nThe <b>dog</b>"
    )  # edited at the start, with a character that is not ASCII
    tab.evaluate(SETTLED)
    assert agrees(tab, "Café\nThe <b>dog</b>")
    assert tab.locator("#text-strip").text_content().startswith("⏎␣Caf?⏎The")
    tab.locator("#text").fill("")
    tab.evaluate(SETTLED)
    assert agrees(tab, "")  # an empty page is the start of a story


@slow
def test_a_token_is_selected_by_pointer_and_keyboard(open_page):
    tab = open_page()
    gpt, tokens = load_numpy(), window(TEXT)
    tab.locator("#text-strip-10").click()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=10)
    assert tab.locator("#next-title").text_content() == "What comes after token 10?"
    assert f"It was “{gpt.pieces[tokens[11]].strip()}”" in tab.locator("#guess-note").text_content()
    assert tab.locator("#head-strip-10").get_attribute("aria-selected") == "true"
    tab.keyboard.press("ArrowRight")
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=11)
    tab.keyboard.press("Home")
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=0)
    tab.locator("#guesses button").first.click()  # write on from there
    tab.evaluate(SETTLED)
    best = int(run_torch(window(TEXT))["guess"][0].argmax())
    assert tab.locator("#text").input_value() == gpt.decode([tokens[0], best])


@slow
def test_a_head_shows_its_map_and_can_be_switched_off(open_page):
    tab = open_page()
    maps = run_torch(window(TEXT))["maps"]
    tab.locator(".head-button[data-pair='6']").click()
    assert tab.locator("#head-title").text_content() == "Layer 1, head 7"
    row = maps[6, -1]
    heaviest = tab.locator(f"#head-strip-{row.argmax()}").get_attribute("aria-label")
    assert is_shown_as(heaviest, row.max())
    tab.locator("canvas.map").focus()
    move_to(tab, 9, 3)
    shown = tab.locator("#cell").text_content()
    assert is_shown_as(shown, maps[6, 9, 3]) and "6 before" in shown
    move_to(tab, 3, 9)
    assert "cannot look" in tab.locator("#cell").text_content()

    tab.locator("input[data-pair='6']").uncheck()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, ablate(0, heads=6))
    assert "1 head off" in tab.locator("#off-note").text_content()
    assert "(switched off)" in tab.locator("#head-title").text_content()
    tab.locator("input[data-pair='1']").uncheck()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, ablate(0, heads=[1, 6]))
    tab.locator("#all-on").click()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT) and tab.locator("#off-note").is_hidden()


def move_to(tab, i: int, j: int) -> None:
    """Select a cell of the map with the arrow keys."""
    for _ in range(len(window(TEXT))):
        tab.keyboard.press("ArrowUp")
        tab.keyboard.press("ArrowLeft")
    for key, count in (("ArrowDown", i), ("ArrowRight", j)):
        for _ in range(count):
            tab.keyboard.press(key)
    tab.wait_for_timeout(100)


def numbers(tab, selector: str) -> np.ndarray:
    """The numbers of cells, before they were rounded for the page."""
    return np.array(
        tab.locator(selector).evaluate_all("cells => cells.map((cell) => Number(cell.dataset.value))")
    )


@slow
@pytest.mark.parametrize("width", keep_in_ci([1280, 390], 390))
def test_a_cell_shows_how_its_weight_arose(open_page, width):
    tab = open_page(viewport={"width": width, "height": 844}, reduced_motion="reduce")  # scrolls at once
    run, (i, j), pair = load_numpy()(TEXT), (20, 4), 26
    layer, head = divmod(pair, 8)
    Q, K, V, A = (getattr(run, name)[layer, head] for name in ("query", "key", "value", "weights"))
    tab.locator(f".head-button[data-pair='{pair}']").click()
    tab.locator("canvas.map").focus()
    move_to(tab, i, j)
    assert tab.locator("#weight-steps").is_hidden()
    tab.keyboard.press("Enter")
    tab.locator("#steps-score td[data-value]").first.wait_for()

    def rows(name: str) -> list[np.ndarray]:
        tables = tab.locator(f"#steps-{name} table").count()
        return [
            np.concatenate(
                [
                    numbers(tab, f"#steps-{name} table:nth-child({n + 1}) tbody tr:nth-child({row}) td")
                    for n in range(tables)
                ]
            )
            for row in (1, 2, 3)
        ]

    np.testing.assert_allclose(rows("products"), [Q[i], K[j], Q[i] * K[j]], rtol=0, atol=1e-9)
    total, score = Q[i] @ K[j], Q[i] @ K[j] / 32**0.5
    np.testing.assert_allclose(
        numbers(tab, "#steps-score td[data-value]"), [total, 32**-0.5, score], rtol=1e-9
    )
    assert rows("softmax")[2].max() == pytest.approx(A[i].max()) and len(rows("softmax")[0]) == 8
    np.testing.assert_allclose(rows("value"), [V[j], A[i, j] * V[j], A[i] @ V], rtol=0, atol=1e-9)
    assert float(tab.locator("#steps-heading").text_content().split()[-1]) == pytest.approx(
        A[i, j], rel=0.05
    )  # two digits are shown
    for name in ("Scale", "Normalise", "Aggregate", "Write"):
        tab.locator("#steps-next").click()
        assert tab.locator("#weight-steps [aria-current]").text_content()[1:] == name
        changed = tab.locator("#weight-steps .at-work").first.bounding_box()
        assert changed["y"] >= 0 and changed["y"] + changed["height"] <= 844  # what changes is on screen
    assert tab.locator("#steps-next").is_disabled()
    promoted = numbers(tab, "#steps-promoted td")
    assert (np.diff(promoted) <= 0).all() and promoted[0] > 0
    tab.locator(".head-button[data-pair='0']").click()  # another head, the same cell
    wait_until(tab, f"document.querySelector('#steps-products td[data-value]').dataset.value !== '{Q[i, 0]}'")
    np.testing.assert_allclose(rows("products")[0], run.query[0, 0, i], rtol=0, atol=1e-9)
    tab.locator("canvas.map").focus()
    move_to(tab, 3, 9)
    tab.keyboard.press("Enter")
    wait_until(tab, "document.querySelector('#weight-steps').textContent.includes('masked')")
    tab.locator("#steps-close").click()
    assert tab.locator("#weight-steps").is_hidden()
    assert faults(tab) == []


@pytest.mark.nightly
@slow
def test_quick_readers_see_no_steps_of_what_is_gone(open_page):
    tab = open_page()
    run, steps = load_numpy()(TEXT), tab.locator("#weight-steps")
    act = """changes => {
      const input = document.querySelector("#text"), map = document.querySelector("canvas.map");
      const type = (text) => { input.value = text; input.dispatchEvent(new Event("input", { bubbles: true })); };
      const enter = () => map.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
      const press = (selector) => document.querySelector(selector).click();
      const known = { type, enter, press };
      for (const [name, ...args] of changes) known[name](...args);
    }"""

    def settle() -> None:
        tab.evaluate(SETTLED)
        tab.wait_for_timeout(100)

    tab.locator(".head-button[data-pair='20']").click()
    tab.locator("canvas.map").focus()
    move_to(tab, 20, 4)
    tab.evaluate(act, [["enter"], ["press", ".head-button[data-pair='3']"]])  # the cell of another head
    settle()
    assert steps.is_hidden() or numbers(tab, "#steps-products td[data-value]")[0] == pytest.approx(
        run.query[0, 3, 20, 0]
    )
    tab.evaluate(act, [["type", "a"], ["enter"]])  # a cell of a text that is gone
    settle()
    assert steps.is_hidden()
    tab.evaluate(act, [["type", "The cat"], ["press", "#play"], ["type", "The dog"]])
    settle()
    assert tab.locator("#text").input_value() == "The dog"
    assert tab.locator("#play").text_content() == "Write on"
    tab.locator("#text").fill("")
    settle()
    assert "the token itself: 100 %" in tab.locator("#habit").text_content()
    tab.locator("#heads input[data-pair='3']").uncheck()
    settle()
    tab.locator("canvas.map").focus()
    move_to(tab, 0, 0)
    tab.keyboard.press("Enter")
    tab.locator("#weight-steps", has_text="This head is switched off").wait_for()


@pytest.mark.nightly
@slow
def test_every_head_is_tried(open_page):
    tab = open_page()
    tab.locator("#try").click()
    wait_until(tab, "document.querySelector('#effect-note').textContent !== ''")
    intact = run_torch(window(TEXT))["guess"][-1]
    top = intact.argmax()
    effects = [
        run_torch(window(TEXT), edit=ablate(pair // 8, heads=pair % 8))["guess"][-1][top] - intact[top]
        for pair in range(32)
    ]
    assert "percentage points" in tab.locator("#effect-note").text_content()
    shown = tab.locator(".effect").all_text_contents()
    for text, effect in zip(shown, effects, strict=True):
        assert is_shown_as(f"{text} %", abs(effect))
        assert text == "0" or (text[0] == "+") == (effect > 0)
    tab.locator("#text").press("End")
    tab.keyboard.type("x")
    tab.evaluate(SETTLED)
    assert "".join(tab.locator(".effect").all_text_contents()) == ""  # they belong to the old text


@slow
def test_it_writes_what_python_writes(open_page):
    tab = open_page()
    slider = tab.locator("#temperature")
    slider.focus()
    slider.press("Home")
    assert slider.get_attribute("aria-valuetext") == "0: always the first"
    assert tab.locator("#guesses .share").all_text_contents() == ["100 %"] + ["–"] * 7
    for _ in range(3):
        tab.locator("#step").click()
        tab.evaluate(SETTLED)
    tab.locator("#play").click()
    assert tab.locator("#play").text_content() == "Stop"
    wait_until(tab, f"document.querySelector('#text').value.length >= {len(TEXT) + 10}")
    tab.locator("#play").click()
    tab.evaluate(SETTLED)
    written = tab.locator("#text").input_value()
    gpt = load_numpy()
    tokens = gpt.encode(written)
    assert written == gpt.generate(TEXT, len(tokens) - len(window(TEXT)))
    tab.locator("#back").click()
    tab.evaluate(SETTLED)
    assert tab.locator("#text").input_value() == gpt.decode(tokens[:-1])


@slow
def test_temperature_and_top_k_change_the_bars(open_page):
    tab = open_page()
    guess = run_torch(window(TEXT))["guess"][-1].astype(float)
    tab.locator("#top-k").focus()
    tab.keyboard.press("Home")
    for _ in range(2):
        tab.keyboard.press("ArrowRight")
    tab.locator("#temperature").focus()
    tab.keyboard.press("End")
    best = np.argsort(-guess, kind="stable")[:3]
    expected = guess[best] ** 0.5 / (guess[best] ** 0.5).sum()
    shown = [float(text[:-2]) / 100 for text in tab.locator("#guesses .share").all_text_contents()[:3]]
    np.testing.assert_allclose(shown, expected, atol=0.006)
    assert tab.locator("#guesses .cut").count() == 5


@slow
def test_a_long_text_is_read_in_a_window(open_page):
    tab = open_page()
    text = "The cat sat on the mat. " * 30 + "The c"  # more than 192 tokens
    tab.locator("#text").fill(text)
    tab.evaluate(SETTLED)
    assert (
        tab.locator("#window-note").text_content() == f"The model sees the last {len(window(text))} tokens."
    )
    assert agrees(tab, text) and len(window(text)) < 192


@slow
def test_words_have_neighbours(open_page):
    tab, gpt = open_page(), load_numpy()
    token = gpt.encode("cat")[1]
    tab.locator(f".word-plane text[data-token='{token}']").click()
    table = gpt.parameters["unembedding.weight"]
    cosines = table @ table[token] / np.linalg.norm(table, axis=1) / np.linalg.norm(table[token])
    order = np.argsort(-cosines)[1:6]
    signs = tab.locator("#near .sign").all_text_contents()
    assert [sign.strip("…") for sign in signs] == [gpt.pieces[other].strip() for other in order]
    first = [float(x) for x in tab.locator("#numbers").text_content().split(", …")[0].split(", ")]
    np.testing.assert_allclose(first, table[token, :6], atol=5.1e-5)


@slow
def test_hostile_text_stays_text(open_page, page):
    tab = open_page()
    for token in (HOSTILE[0], HOSTILE[1]):
        tab.locator("#text").fill(token)
        tab.evaluate(SETTLED)
        assert agrees(tab, token)
    assert tab.locator("img").count() == 0
    tab.goto(tab.url.split("#")[0] + "#text=%3Cimg+src%3Dx%3E+The")
    tab.reload()
    tab.evaluate(SETTLED)
    assert tab.locator("#text").input_value() == "<img src=x> The" and agrees(tab, "<img src=x> The")


@slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(open_page, scheme, width):
    tab = open_page(viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=width == 390)
    act = "tap" if width == 390 else "click"
    getattr(tab.locator(".head-button[data-pair='9']"), act)()
    getattr(tab.locator("input[data-pair='9']"), act)()
    tab.evaluate(SETTLED)
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    getattr(tab.locator("#text-strip-12"), act)()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, ablate(1, heads=1), position=12)


@slow
def test_less_motion_writes_a_sentence_at_a_time(open_page):
    tab = open_page(reduced_motion="reduce")
    assert (
        tab.locator(".guesses .fill").first.evaluate("node => getComputedStyle(node).transitionDuration")
        == "0s"
    )
    tab.locator("#play").click()
    wait_until(tab, f"document.querySelector('#text').value.length > {len(TEXT) + 3}")
    tab.locator("#play").click()
    tab.evaluate(SETTLED)
    assert agrees(tab, tab.locator("#text").input_value())


@slow
def test_a_notebook_runs_it_in_a_sandbox(browser, page):
    context = browser.new_context()
    tab = context.new_page()
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.set_content(f"<!DOCTYPE html><title>notebook</title>{page._repr_html_()}")
    frame = tab.frame_locator("iframe")
    frame.locator("#lens-table tbody tr").first.wait_for()
    assert frame.locator("#guesses button").count() == 8 and said == []
    context.close()


@pytest.mark.nightly
@slow
def test_it_is_fast(open_page):
    tab = open_page()
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert tab.evaluate(paint) < 20 * pace(tab)
    tab.locator("#text").fill(TEXT)
    tab.evaluate(SETTLED)
    tab.evaluate("performance.clearMeasures()")
    tab.locator("#text").press("End")
    for letter in " saw a k":
        tab.keyboard.press("Backspace")  # each keystroke is read by itself
        tab.evaluate(SETTLED)
        tab.keyboard.type(letter)
        tab.evaluate(SETTLED)
    times = tab.evaluate("performance.getEntriesByName('keystroke').map((entry) => entry.duration)")
    assert len(times) == 16
    assert statistics.median(times) < 3 * pace(tab)  # 150 ms if five million exponentials take 50 ms


# -- What needs no browser --------------------------------------------------------------------------------


def test_the_page_is_one_small_file_with_a_policy(page):
    text = page.html
    assert len(text.encode()) <= 8_000_000
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    (script,) = re.findall(r'<script type="module" async>(.*?)</script>', text, re.DOTALL)
    assert f"script-src {html.csp_hash(script)};" in policy and policy.endswith("; worker-src blob:")
    assert "unsafe" not in policy and not re.search(r"https?:|src=|href=", text)


@pytest.mark.parametrize("text", CONTINUATIONS)
def test_the_model_continues_the_examples_as_they_promise(text):
    gpt, expected = load_numpy(), CONTINUATIONS[text]
    count = len(gpt.encode(text + expected)) - len(gpt.encode(text))
    assert gpt.generate(text, count) == text + expected


@pytest.mark.parametrize("text", ["", 3, None])
def test_a_text_is_needed(text):
    with pytest.raises(regard.ArgumentError, match="expected a text of at least one character"):
        explore.model(text)


def test_other_files_are_refused(tmp_path):
    from examples.induction.model import HERE

    (tmp_path / "short").write_bytes(b"\x05")
    (tmp_path / "text").write_text("no model")
    for path, words in [
        (HERE / "text.safetensors", "another kind of model"),
        (HERE / "induction.safetensors", "another kind of model"),
        (tmp_path / "short", "which cannot be read"),
        (tmp_path / "text", "which cannot be read"),
        (tmp_path / "gone", "No such file"),
    ]:
        with pytest.raises(regard.ArgumentError, match=words):
            explore.model(path=path)
