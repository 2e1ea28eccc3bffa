"""The explorer of a training run in a real browser, and chapter 17, which trains."""

from __future__ import annotations

import re
from pathlib import Path
from time import process_time

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore.code_explorer import read_listing
from regard.render.text import escape_unprintable, format_number
from tests.helpers.notebooks import list_cells
from tests.helpers.pages import HOSTILE, SCREENS, faults

slow = pytest.mark.slow  # starts a browser
CHAPTER = Path(__file__).parents[2] / "docs/book/17-train-one.md"
STEPS = [0, 10, 20, 40]
LOSS = {"repeat": [3.2, 2.5, 0.75, 0.125], "first time": [3.5, 3.25, 3.25, 3.5]}


def draw_maps(checkpoints: int = 4, heads: int = 3, tokens: int = 5) -> np.ndarray:
    """Random causal weights, float32 as in the page."""
    scores = np.random.default_rng(11).normal(size=(checkpoints, heads, tokens, tokens))
    exps = np.tril(np.exp(2 * scores))
    return (exps / exps.sum(-1, keepdims=True)).astype(np.float32)


def make(**changes) -> explore.Page:
    arguments = {"steps": STEPS, "loss": LOSS, "weights": draw_maps(), "tokens": list("abcde"), **changes}
    return explore.training(**arguments)


@slow
def test_every_checkpoint_and_head_shows_its_numbers(show):
    tab, maps = show(make()), draw_maps()
    for place, step in enumerate(STEPS):
        tab.locator("#step").fill(str(place))
        assert tab.locator("#step").get_attribute("aria-valuetext") == str(step)
        shown = [tab.locator(f"#loss-{i}").text_content() for i in range(2)]
        assert shown == [format_number(curve[place]) for curve in LOSS.values()]
        for head in range(3):
            tab.get_by_role("radio", name=f"head {head}").check()
            assert (
                tab.locator("#cell .pair").text_content() == f"e → a {format_number(maps[place, head, 4, 0])}"
            )
            largest = "abcde"[maps[place, head, 4].argmax()]
            said = tab.locator("#sentence").text_content()
            assert ("itself" if largest == "e" else f"“{largest}”") in said.removeprefix("“e”").split("then")[
                0
            ]
    heights = [
        float(pair.split(",")[1]) for pair in tab.locator(".curve.main").get_attribute("points").split(" ")
    ]
    np.testing.assert_allclose(1 - np.array(heights) / 100, np.array(LOSS["repeat"]) / 3.5, atol=1e-9)
    places = [
        float(pair.split(",")[0]) for pair in tab.locator(".curve.main").get_attribute("points").split(" ")
    ]
    np.testing.assert_allclose(places, [0, 25, 50, 100], atol=1e-9)


@slow
def test_by_keyboard_and_by_pointing_at_the_curve(show):
    tab, maps = show(make()), draw_maps()
    tab.keyboard.press("Tab")
    tab.keyboard.press("End")
    assert tab.locator("#step").get_attribute("aria-valuetext") == "40"
    tab.locator("#picture").focus()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#cell .pair").text_content() == f"d → b {format_number(maps[3, 0, 3, 1])}"
    tab.locator(".area").scroll_into_view_if_needed()
    box = tab.locator(".area").bounding_box()
    tab.mouse.click(box["x"] + 0.27 * box["width"], box["y"] + 5)
    assert tab.locator("#step").get_attribute("aria-valuetext") == "10"
    assert tab.locator("#cell .weight").text_content() == format_number(maps[1, 0, 3, 1])


@slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    tab = show(make(), viewport={"width": width, "height": 844}, color_scheme=scheme)
    tab.locator("#step").focus()
    tab.keyboard.press("ArrowRight")
    # The map that changed is on screen, once the page has scrolled to it.
    tab.wait_for_function("""() => {
      const { top, bottom } = document.querySelector("#picture").getBoundingClientRect();
      return top >= 0 && bottom <= innerHeight;
    }""")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert faults(tab) == []


@slow
def test_hostile_names_and_numbers_that_are_not_finite(show):
    names = [escape_unprintable(token) for token in HOSTILE]
    maps = draw_maps(2, 1, len(HOSTILE))
    maps[1, 0, 3, 2] = np.nan
    tab = show(
        make(steps=[0, 1], loss={HOSTILE[0]: [np.nan, 2.0]}, weights=maps, tokens=HOSTILE, heads=HOSTILE[:1])
    )
    assert tab.locator("#cell .pair").text_content().startswith(f"{names[-1]} → {names[0]}")
    assert tab.locator("#loss-0").text_content() == "nan"
    tab.locator("#step").fill("1")
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(tokens=["a"]), "1 tokens"),
        (dict(steps=[0]), "1 steps"),
        (dict(loss={}), "losses of lengths []"),
        (dict(loss=dict.fromkeys("wxyz", LOSS["repeat"])), "losses of lengths [4, 4, 4, 4]"),
        (dict(loss={"loss": [1.0]}), "losses of lengths [1]"),
        (dict(heads=["a"]), "1 heads"),
        (dict(weights=np.zeros((4, 0, 5, 5))), "(4, 0, 5, 5)"),
        (dict(weights=np.zeros((5, 5))), "weights of shape (5, 5)"),
        (dict(weights=np.zeros((4, 64, 64, 5))), "81920 weights"),
    ],
)
def test_training_refuses(changes, words, monkeypatch):
    monkeypatch.setattr("regard.explore.explorers.MAX_WEIGHTS", 1000)
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        make(**changes)


# -- The chapter ------------------------------------------------------------------------------------------


def test_the_chapter_has_the_class_of_the_code_page():
    (shown,) = (
        cell["source"] for cell in list_cells(CHAPTER) if "class ScaledDotProductAttention" in cell["source"]
    )
    listing = read_listing("torch").code
    assert shown.strip() == listing[listing.index("class") : listing.index("def attend")].strip()


@slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_the_claims_of_the_chapter_hold_for_a_seed(seed):
    """The hidden cells of the chapter assert what its text says; here they run with other seeds."""
    pytest.importorskip("torch")
    cells = [cell["source"] for cell in list_cells(CHAPTER) if cell["cell_type"] == "code"]
    assert sum("seed=0" in code for code in cells) == 1
    assert sum(code.count("\nassert ") for code in cells) >= 8
    names: dict[str, object] = {"__name__": "__main__"}
    start = process_time()
    for code in cells:
        exec(code.replace("seed=0", f"seed={seed}"), names)
    assert process_time() - start < 90
