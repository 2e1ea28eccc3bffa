"""The three listings of attention: their code, their notes, and the page that explains them line by line."""

from __future__ import annotations

import re

import numpy as np
import pytest

from regard import explore
from regard.explore import code_explorer
from regard.explore.code_explorer import AnnotatedListing, load_listing, read_listing
from regard.learn import CheckedAttention, cat, create_causal_mask
from regard.render.text import format_number
from tests.helpers.pages import LOADED, SCREENS, faults, pace

slow = pytest.mark.slow  # starts a browser
LISTINGS = [tab.listing for tab in code_explorer.LISTING_TABS]
TABS = [tab.name for tab in code_explorer.LISTING_TABS]


# -- The listings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTINGS)
def test_every_line_of_code_has_a_note(name):
    listing = read_listing(name)
    lines = {i for i, line in enumerate(listing.lines, start=1) if line.strip()}
    assert set(listing.notes) == lines and len(lines) <= 30
    assert all(len(note) > 15 and note.endswith(".") for note in listing.notes.values())
    assert "#" not in listing.code  # the notes are beside the code, not in it
    assert max(map(len, listing.lines)) <= 79


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_computes_attention(name, masked):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    Q, K, V = rng.normal(size=(7, 5)), rng.normal(size=(11, 5)), rng.normal(size=(11, 3))
    mask = rng.random((7, 11)) < 0.5
    mask[:, 2] = True
    arrays = [Q, K, V, mask] if masked else [Q, K, V]
    convert = np.asarray if name == "numpy" else torch.tensor
    found = load_listing(read_listing(name))(*map(convert, arrays))
    expected = CheckedAttention(d_k=5)(*arrays)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-12, atol=1e-14)


def test_a_note_belongs_to_the_next_line_of_code(monkeypatch, tmp_path):
    (tmp_path / "listings").mkdir()
    text = "#: First,\n#: in two lines.\nx = 1\n\n#: Second.\ny = 2\nz = 3\n"
    (tmp_path / "listings/own.txt").write_text(text)
    monkeypatch.setattr(code_explorer.resources, "files", lambda package: tmp_path)
    expected = AnnotatedListing("own", "x = 1\n\ny = 2\nz = 3\n", {1: "First, in two lines.", 3: "Second."})
    assert read_listing.__wrapped__("own") == expected


def test_the_page_gives_the_largest_difference_of_the_results():
    pytest.importorskip("torch")
    same = [[np.ones(2), np.ones(2)] for _ in range(6)]
    assert code_explorer._describe_agreement(same).endswith("They agree exactly.")
    same[5] = [np.ones(2), np.array([1.0, 1.25])]
    assert code_explorer._describe_agreement(same).endswith("They agree to within 2.5e-01.")
    assert "to within" in explore.code().html or "agree exactly" in explore.code().html


# -- The page ---------------------------------------------------------------------------------------------

# Clicks every line of the shown tab: the line, its note, and the matrices that it produced.
CLICK_LINES = """() => [...document.querySelectorAll(".line:not([aria-disabled])")].map((line) => {
  line.click();
  const text = (node) => node.textContent;
  return {
    code: line.querySelector("code").textContent, selected: line.getAttribute("aria-selected"),
    note: document.querySelector("#note").textContent, event: document.querySelector("#event")?.textContent ?? "",
    fresh: Object.fromEntries([...document.querySelectorAll(".fresh")].map((it) => [text(it.querySelector("strong")),
      [...it.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td.entry")].map(text))])),
  };
})"""


def formatted(array) -> list[list[str]]:
    return [[format_number(x) for x in row] for row in array]


@slow
def test_a_click_on_any_line_explains_it_with_its_numbers(show):
    pytest.importorskip("torch")
    tab = show(explore.code())
    for masked in (False, True):
        mask = create_causal_mask(5) if masked else None
        output, weights = CheckedAttention(4)(cat.Q, cat.K, cat.V, mask)
        raw = cat.Q @ cat.K.T
        scaled = np.where(mask, raw / 2, -np.inf) if masked else raw / 2
        numbers = {"scores": raw, "scaled": scaled, "weights": weights, "output": output}
        expected = {name: formatted(array) for name, array in numbers.items()}
        for name, file in zip(TABS, LISTINGS, strict=True):
            tab.get_by_role("tab", name=name).click()
            tab.get_by_label("causal mask").set_checked(masked)
            listing = read_listing(file)
            seen = tab.evaluate(CLICK_LINES)
            assert [(line["code"], line["note"]) for line in seen] == [
                (listing.lines[i - 1], note) for i, note in listing.notes.items()
            ]
            assert {line["selected"] for line in seen} == {"true"}
            shown = [(name, rows) for line in seen for name, rows in line["fresh"].items()]
            names = ("weights", "output") if file == "builtin" else tuple(expected)
            assert all((name, expected[name]) in shown for name in names)
            unmasked = [line["event"] for line in seen if line["code"].startswith("            scaled")]
            assert unmasked == (
                [] if file == "builtin" else ["" if masked else "This line did not run this time."]
            )
    labels = tab.locator(".fresh tbody th").all_text_contents()
    assert labels[:5] == list(cat.tokens)
    assert "They agree to within" in tab.locator("#agreement").text_content()


@slow
def test_the_page_opens_at_the_first_step_and_by_keyboard(show):
    tab = show(explore.code())
    assert tab.locator("#source").text_content() == "scores = self.compute_scores(Q, K)"
    assert tab.locator(".fresh tbody td").first.text_content() == "0"
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "NumPy"
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.textContent") == "PyTorch"
    assert tab.locator("#source").text_content() == "scores = Q @ K.transpose(-2, -1)"
    tab.keyboard.press("ArrowLeft")
    lines = tab.get_by_role("listbox")
    lines.focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#source").text_content() == "scaled = self.scale_scores(scores)"
    active = lines.get_attribute("aria-activedescendant")
    assert tab.locator(f"#{active}").text_content() == "30        scaled = self.scale_scores(scores)"
    for _ in range(40):
        tab.keyboard.press("ArrowUp")
    assert tab.locator("#source").text_content() == "import math"  # it has a note and no step
    assert "square root" in tab.get_by_role("status").text_content()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#count").text_content() == "step 4 of 28"  # after the last step that was shown
    tab.locator(".line", has_text="if mask").click()
    tab.get_by_label("causal mask").check()
    assert tab.locator("#source").text_content() == "if mask is not None:"  # the run changes, the line stays


@slow
def test_the_copied_code_runs(show):
    tab = show(explore.code())
    tab.evaluate("document.body.append(document.createElement('textarea'))")
    for name in TABS[:2]:
        tab.get_by_role("tab", name=name).click()
        button = tab.get_by_role("button", name="Copy code")
        button.click()
        assert tab.locator("button.copy").text_content() == "Copied"
        assert tab.get_by_role("status").text_content() == "Copied"
        area = tab.locator("textarea")
        area.fill("")
        area.press("Control+V")
        pasted = area.input_value()
        assert pasted == read_listing({"NumPy": "numpy", "PyTorch": "torch"}[name]).code
        button.wait_for()  # its text is back
        scope: dict = {}
        exec(pasted, scope)
        assert scope["ScaledDotProductAttention"](d_k=4).scale == 0.5


@slow
def test_without_torch_the_lines_still_have_notes(show, monkeypatch):
    monkeypatch.setattr(code_explorer, "find_spec", lambda package: package == "numpy")
    tab = show(explore.code())
    assert tab.locator("#agreement").count() == 0
    tab.get_by_role("tab", name="PyTorch").click()
    assert "torch is not installed here" in tab.locator("#about").text_content()
    assert not tab.locator(".stepper").is_visible()
    tab.locator(".line", has_text="class Scaled").click()
    assert "a part of a model" in tab.locator("#note").text_content()
    tab.keyboard.press("ArrowRight")
    tab.get_by_role("tab", name="NumPy").click()
    assert tab.locator(".stepper").is_visible()


@slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_axe_finds_no_serious_fault(show, scheme, width):
    options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme, "has_touch": width == 390}
    tab = show(explore.code(), **options)
    assert tab.evaluate(LOADED) < 20 * pace(tab)
    for name in TABS:
        button = tab.get_by_role("tab", name=name)
        (button.tap if width == 390 else button.click)()
        for _ in range(3):
            for _ in range(4):
                tab.keyboard.press("ArrowRight")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("#details").evaluate("box => box.scrollWidth <= box.clientWidth")
    assert faults(tab) == []
    line = tab.locator(".line", has_text="weights = A.to_dense()")
    (line.tap if width == 390 else line.click)()
    assert re.match("Ask for all shares", tab.locator("#note").text_content())
    # At once, since the page may be scrolling.
    tops = tab.locator("#listing, #details").evaluate_all(
        "nodes => nodes.map((node) => node.getBoundingClientRect().top)"
    )
    assert (tops[0] == tops[1]) == (width == 1280)
