"""The figures of the book in a browser: no text leaves the drawing or covers another, and all of it can be read."""

from __future__ import annotations

import pytest

from regard.learn import figures

TEXT_FAULTS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((it) => [it.textContent, it.getBoundingClientRect(), it]);
    texts.forEach(([text, box, it], index) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
        found.push(`"${text}" leaves its figure`);
      if (parseFloat(getComputedStyle(it).fontSize) * frame.width / svg.viewBox.baseVal.width < 10)
        found.push(`"${text}" is too small`);
      for (const [other, place] of texts.slice(index + 1)) {
        const across = Math.min(box.right, place.right) - Math.max(box.left, place.left);
        const down = Math.min(box.bottom, place.bottom) - Math.max(box.top, place.top);
        if (across > 1 && down > 4) found.push(`"${text}" covers "${other}"`);
      }
    });
  }
  return found;
}"""


@pytest.mark.parametrize("width", [390, 1280])
def test_every_text_can_be_read(browser, width):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    body = "".join(figures.draw(name)._repr_html_() for name in figures.NAMES)
    tab.set_content(f'<!DOCTYPE html><body style="margin: 0 16px">{body}')
    assert tab.locator("svg").count() == len(figures.NAMES) >= 8
    assert tab.evaluate(TEXT_FAULTS) == []
    assert not tab.evaluate("document.documentElement.scrollWidth > innerWidth")
    tab.close()


def test_a_covered_text_is_reported(browser):
    tab = browser.new_page()
    tab.set_content(
        '<svg viewBox="0 0 100 50" width="100"><text x="5" y="20">one</text><text x="9" y="20">two</text>'
        '<text x="90" y="45" font-size="5">three</text></svg>'
    )
    assert tab.evaluate(TEXT_FAULTS) == [
        '"one" covers "two"',
        '"three" leaves its figure',
        '"three" is too small',
    ]
    tab.close()
