"""The page with a GPT in a real browser: what the reader does changes the numbers as PyTorch says."""

from __future__ import annotations

import re
import statistics

import numpy as np
import pytest

import regard
from regard import explore
from regard.interventions import ablate
from regard.pages import html
from tests.helpers.pages import HOSTILE, faults, pace
from tests.helpers.story_model import load_torch, run_torch

pytest.importorskip("torch")
pytest.importorskip("safetensors")
slow = pytest.mark.slow  # starts a browser

TEXT = "Once upon a time, there was a little girl named Lily. One day, Li"
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
    """The bytes that are listed, with the model's probabilities."""
    read = "rows => rows.map((row) => [Number(row.dataset.byte), Number(row.dataset.probability)])"
    return dict(map(tuple, tab.locator("#guesses button").evaluate_all(read)))


def agrees(tab, text: str, edit=None, position: int = -1) -> bool:
    """Whether the list has the eight best guesses of PyTorch after a letter, with its probabilities."""
    expected = run_torch(text.encode(), edit=edit)["guess"][position]
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
    lens = run_torch(TEXT.encode())["lens"]
    final = lens[-1].argmax()
    read = "cells => cells.map((cell) => Number(cell.dataset.probability))"
    shown = tab.locator("#lens-table td.bars").evaluate_all(read)
    np.testing.assert_allclose(shown, lens[:, final], rtol=0, atol=1e-5)
    assert "Most likely next" in tab.locator("#announcement").text_content()
    assert tab.locator("#text-strip [role=option]").count() == len(TEXT)
    bits = load_torch().about["bits"]["model"]
    assert f"{bits:.2f}" in tab.locator("#bits tr").first.text_content()


@slow
def test_typing_changes_the_guess(open_page):
    tab = open_page()
    tab.locator("#text").press("End")
    tab.locator("#text").press_sequentially("ly s")
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT + "ly s")
    tab.locator("#text").fill("Café\nThe <b>dog</b>")  # edited at the start, with bytes that are no letters
    tab.evaluate(SETTLED)
    assert agrees(tab, "Café\nThe <b>dog</b>")
    assert tab.locator("#text-strip").text_content().startswith("CafC3A9⏎The")
    tab.locator("#text").fill("")
    tab.evaluate(SETTLED)
    assert agrees(tab, "\n")  # an empty page is the start of a story


@slow
def test_a_letter_is_selected_by_pointer_and_keyboard(open_page):
    tab = open_page()
    tab.locator("#text-strip-20").click()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=20)
    assert tab.locator("#next-title").text_content() == "What comes after letter 21?"
    assert f"It was “{TEXT[21]}”" in tab.locator("#guess-note").text_content()
    assert tab.locator("#head-strip-20").get_attribute("aria-selected") == "true"
    tab.keyboard.press("ArrowRight")
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=21)
    tab.keyboard.press("Home")
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=0)
    tab.locator("#guesses button").first.click()  # write on from there
    tab.evaluate(SETTLED)
    best = int(run_torch(TEXT.encode())["guess"][0].argmax())
    assert tab.locator("#text").input_value() == TEXT[0] + chr(best)


@slow
def test_a_head_shows_its_map_and_can_be_switched_off(open_page):
    tab = open_page()
    maps = run_torch(TEXT.encode())["maps"]
    tab.locator(".head-button[data-pair='6']").click()
    assert tab.locator("#head-title").text_content() == "Layer 2, head 3"
    row = maps[6, -1]
    heaviest = tab.locator(f"#head-strip-{row.argmax()}").get_attribute("aria-label")
    assert is_shown_as(heaviest, row.max())
    box = tab.locator("#head-map").bounding_box()
    size = box["width"] / len(TEXT)
    tab.mouse.move(box["x"] + 10.5 * size, box["y"] + 30.5 * size)
    shown = tab.locator("#cell").text_content()
    assert is_shown_as(shown, maps[6, 30, 10]) and "20 before" in shown
    tab.mouse.move(box["x"] + 30.5 * size, box["y"] + 10.5 * size)
    assert "cannot look" in tab.locator("#cell").text_content()

    tab.locator("input[data-pair='6']").uncheck()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, ablate(1, heads=2))
    assert "1 head off" in tab.locator("#off-note").text_content()
    assert "(switched off)" in tab.locator("#head-title").text_content()
    tab.locator("input[data-pair='1']").uncheck()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, [ablate(1, heads=2), ablate(0, heads=1)])
    tab.locator("#all-on").click()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT) and tab.locator("#off-note").is_hidden()
    tab.locator("#head-map").click(position={"x": 4, "y": 20.5 * size})  # a row of the map is a letter
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, position=20)


@pytest.mark.nightly
@slow
def test_every_head_is_tried(open_page):
    tab = open_page()
    tab.locator("#try").click()
    wait_until(tab, "document.querySelector('#effect-note').textContent !== ''")
    intact = run_torch(TEXT.encode())["guess"][-1]
    top = intact.argmax()
    effects = [
        run_torch(TEXT.encode(), edit=ablate(pair // 4, heads=pair % 4))["guess"][-1][top] - intact[top]
        for pair in range(16)
    ]
    shown = tab.locator(".effect").all_text_contents()
    for text, effect in zip(shown, effects, strict=True):
        assert is_shown_as(text, abs(effect))
        assert text == "0 %" or (text[0] == "+") == (effect > 0)
    tab.locator("#text").press("End")
    tab.keyboard.type("x")
    tab.evaluate(SETTLED)
    assert "".join(tab.locator(".effect").all_text_contents()) == ""  # they belong to the old text


@slow
def test_it_writes_what_pytorch_writes(open_page):
    from examples.induction import decode, encode

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
    expected = decode(load_torch().generate(encode(TEXT), len(written) - len(TEXT)))
    assert written == expected
    tab.locator("#back").click()
    tab.evaluate(SETTLED)
    assert tab.locator("#text").input_value() == written[:-1]


@slow
def test_temperature_and_top_k_change_the_bars(open_page):
    tab = open_page()
    guess = run_torch(TEXT.encode())["guess"][-1].astype(float)
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
    text = "The cat sat on the mat. " * 9 + "The c"  # 221 bytes
    tab.locator("#text").fill(text)
    tab.evaluate(SETTLED)
    assert tab.locator("#window-note").text_content() == "The model sees the last 157 bytes."
    assert agrees(tab, text[64:])


@slow
def test_letters_have_neighbours(open_page):
    tab = open_page()
    tab.locator(".letter-plane text[data-byte='97']").click()
    table = load_torch().embedding.weight.double().numpy()
    seen = load_torch().about["seen"][:60]
    cosines = table @ table[97] / np.linalg.norm(table, axis=1) / np.linalg.norm(table[97])
    order = sorted((byte for byte in seen if byte != 97), key=lambda byte: -cosines[byte])[:5]
    signs = tab.locator("#near .sign").all_text_contents()
    assert signs == [{10: "⏎", 32: "␣"}.get(byte, chr(byte)) for byte in order]
    first = [float(x) for x in tab.locator("#numbers").text_content().split(", …")[0].split(", ")]
    np.testing.assert_allclose(first, table[97, :6], atol=5.1e-5)


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
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
)
def test_it_fits_and_axe_finds_no_serious_fault(open_page, scheme, width):
    tab = open_page(viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=width == 390)
    act = "tap" if width == 390 else "click"
    getattr(tab.locator(".head-button[data-pair='9']"), act)()
    getattr(tab.locator("input[data-pair='9']"), act)()
    tab.evaluate(SETTLED)
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    getattr(tab.locator("#text-strip-30"), act)()
    tab.evaluate(SETTLED)
    assert agrees(tab, TEXT, ablate(2, heads=1), position=30)


@slow
def test_less_motion_writes_a_word_at_a_time(open_page):
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
    tab.locator("#text").fill(TEXT[:64])
    tab.evaluate(SETTLED)
    tab.evaluate("performance.clearMeasures()")
    tab.locator("#text").press("End")
    for letter in "ly saw a":
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
    assert len(text.encode()) <= 4_000_000
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    (script,) = re.findall(r'<script type="module" async>(.*?)</script>', text, re.DOTALL)
    assert f"script-src {html.csp_hash(script)};" in policy and policy.endswith("; worker-src blob:")
    assert "unsafe" not in policy and not re.search(r"https?:|src=|href=", text)


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
