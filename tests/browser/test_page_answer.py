"""The page of an answer in a real browser: shares and colours match the masses, and hostile texts stay text."""

from __future__ import annotations

import numpy as np
import pytest

from regard.lens.span_mass import LayerSpans, SpanMass, mean_defined
from tests.helpers.nightly import keep_in_ci
from tests.helpers.pages import HOSTILE, faults

pytestmark = pytest.mark.slow  # starts a browser

NAMES = ("system prompt", HOSTILE[1], "doc 2", "other", "generated")
PROMPT, LAYERS, HEADS = 40, 3, 4
ANSWER = [*(f"Ġword{i}" for i in range(24)), *(f"Ġ{text}" for text in HOSTILE)]

COUNT = len(ANSWER)


def build_mass(layers=LAYERS, heads=HEADS, tokens=COUNT) -> SpanMass:
    rng = np.random.default_rng(0)
    labels = np.repeat([-1, 3, 0, 1, 2, 3], [2, 2, 8, 12, 12, 4])
    made = []
    for layer in range(layers):
        logits = rng.normal(size=(2, heads, tokens, len(NAMES)))
        # A run of the answer reads one part, as an answer does that quotes it.
        logits[..., np.arange(tokens), np.arange(tokens) * 3 // tokens] += 2.0
        mass = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        lookback = rng.random((2, heads, tokens))
        lookback[..., 0] = np.nan
        made.append(
            LayerSpans(f"layers.{layer}", layer, mass.astype(np.float32), lookback.astype(np.float32), "")
        )
    return SpanMass(NAMES, np.arange(PROMPT, PROMPT + tokens), PROMPT, made, labels[None])


TOKENS = [*(f"Ġprompt{i}" for i in range(PROMPT - 1)), HOSTILE[0], *ANSWER]


def read_words(tab):
    words = tab.locator(".answer .word").evaluate_all(
        "nodes => nodes.map(n => [n.dataset.span, +n.dataset.value, +n.style.getPropertyValue('--share')])"
    )
    return [name for name, _, _ in words], *(
        np.array(column) for column in list(zip(*words, strict=True))[1:]
    )


@pytest.mark.parametrize("width", keep_in_ci([1280, 390], 390))
def test_shares_and_colours_match_the_masses(show, width):
    mass = build_mass()
    page = mass.page(TOKENS, batch=1, title=HOSTILE[0])
    assert len(page.html.encode()) < 200_000
    tab = show(page, viewport={"width": width, "height": 900})
    tab.locator("#app[data-ready]").wait_for()
    assert "Attention is not causation" in tab.locator(".statement").inner_text()
    assert "regard.intervene" in tab.locator(".statement").inner_text()
    assert tab.locator("h1").inner_text() == HOSTILE[0]

    def check(shares, color):
        names, values, strengths = read_words(tab)
        columns = shares[:, :3].argmax(1) if color is None else np.full(len(shares), color)
        expected = shares[np.arange(len(shares)), columns]
        assert names == [NAMES[column] for column in columns]
        np.testing.assert_allclose(values, expected, rtol=2e-3)
        np.testing.assert_allclose(strengths, np.sqrt(expected / expected.max()), rtol=2e-3)

    everything = np.concatenate([layer.mass[1] for layer in mass.layers]).mean(0)
    check(everything, None)
    means = tab.locator("[data-mean]").all_inner_texts()
    np.testing.assert_allclose(
        [float(text.split()[0]) for text in means], 100 * everything.mean(0), rtol=6e-3
    )
    tab.get_by_role("radio", name="doc 2", exact=True).check()
    check(everything, 2)
    tab.locator("#layer").select_option("2")
    check(mass["layers.2"][1].mean(0), 2)
    tab.locator("#head").select_option("3")
    tab.get_by_role("radio", name="largest span", exact=True).check()
    check(mass["layers.2"][1, 3], None)
    tab.locator(".answer .word").nth(7).click()
    shown = tab.locator("[data-share]").evaluate_all("nodes => nodes.map(n => Number(n.dataset.share))")
    np.testing.assert_allclose(shown, mass["layers.2"][1, 3, 7], rtol=2e-3)
    ratio = float(tab.locator("#lookback b").inner_text())
    assert ratio == pytest.approx(mass.lookback["layers.2"][1, 3, 7], rel=6e-3)
    tab.wait_for_url(lambda url: "layer=2" in url and "head=3" in url and "token=7" in url)
    tab.locator(".answer .word").first.click()
    assert "undefined" in tab.locator("#lookback").inner_text()
    tab.locator("#prompt summary").click()
    runs = tab.locator(".run").evaluate_all("nodes => nodes.map(n => n.title)")
    assert runs == ["padding", "other", *NAMES[:3], "other"]
    assert HOSTILE[0] in tab.locator(".run").last.inner_text()
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_address_and_the_keyboard(show):
    tab = show(build_mass().page(TOKENS))
    tab.locator("#app[data-ready]").wait_for()
    tab.goto(tab.url.split("#")[0] + "#layer=1&head=2&color=0&token=3")
    tab.reload()
    tab.locator("#app[data-ready]").wait_for()
    assert tab.locator("#layer").input_value() == "1" and tab.locator("#head").input_value() == "2"
    assert (
        tab.locator('.word[aria-pressed="true"]').get_attribute("aria-label").startswith("Ġword3, token 43, ")
    )
    tab.locator(".answer .word").first.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert tab.locator("#token sub").inner_text() == "41"
    tab.locator(".layer-row").nth(2).click()
    assert tab.locator("#layer").input_value() == "2"


def test_a_large_answer_keeps_within_its_bytes():
    mass = build_mass(layers=4, heads=32, tokens=300)
    texts = ["token"] * (PROMPT + 300)
    whole, layers, one = (
        len(mass.page(texts, max_bytes=size).html) for size in (10_000_000, 300_000, 10_000)
    )
    assert 200_000 < whole - layers and whole < 800_000 and one < layers
    assert "Means over the heads" in mass.page(texts, max_bytes=300_000).html
    assert "Means over 4 layers" in mass.page(texts, max_bytes=10_000).html
    means = mean_defined(mass.lookback["layers.0"], (0, 1))
    assert np.isnan(means[0]) and not np.isnan(means[1:]).any()
