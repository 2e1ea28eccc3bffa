"""Measure the page of `regard.explore.model` in Chromium: size, first paint, and keystroke to new guesses.

python benchmarks/tiny_gpt.py [--rounds 15]

The text has 21 tokens. A keystroke at its end computes one or two rows, a keystroke at its start computes all rows;
switching a head of the first layer computes all layers. Times are medians in milliseconds, from the event to the drawn
guesses.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from regard import explore

TEXT = "Zobi and Rumo went to the park. Zobi had a kite, and gave it to"  # 21 tokens
SETTLED = """async () => {
  const app = document.querySelector("#app"), pause = () => new Promise((resolve) => setTimeout(resolve, 5));
  while (app.getAttribute("aria-busy") !== "false") await pause();
}"""
FIRST_GUESSES = """() => {
  const read = performance.getEntriesByName("read")[0];
  return read.startTime + read.duration;
}"""
TIMES = "name => performance.getEntriesByName(name).map((entry) => entry.duration)"


def measure_keystrokes(tab: Page, key: str, rounds: int) -> float:
    """Return the median time of a letter that is typed and deleted at the start or the end of the text."""
    tab.locator("#text").press(key)
    tab.evaluate("performance.clearMeasures()")
    for _ in range(rounds):
        for press in ("x", "Backspace"):
            tab.keyboard.press(press)
            tab.evaluate(SETTLED)
    return statistics.median(tab.evaluate(TIMES, "keystroke"))


def measure_switch(tab: Page, rounds: int) -> float:
    """Return the median time in which the worker reads the text after a head of the first layer is switched."""
    tab.evaluate("performance.clearMeasures()")
    for _ in range(rounds):
        for press in ("uncheck", "check"):
            getattr(tab.locator("input[data-pair='0']"), press)()
            tab.evaluate(SETTLED)
    return statistics.median(tab.evaluate(TIMES, "read"))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "model.html"
        explore.model(TEXT).save(path)
        print(f"size                      {path.stat().st_size / 1e6:8.2f} MB")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        paints, guesses = [], []
        for _ in range(5):
            tab = browser.new_page()
            tab.goto(path.as_uri())
            tab.locator("#guesses .share").first.wait_for()
            tab.evaluate(SETTLED)
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            guesses.append(tab.evaluate(FIRST_GUESSES))
        print(f"first paint               {statistics.median(paints):8.0f} ms")
        print(f"first guesses             {statistics.median(guesses):8.0f} ms")
        print(f"keystroke at the end      {measure_keystrokes(tab, 'End', rounds):8.1f} ms")
        print(f"keystroke at the start    {measure_keystrokes(tab, 'Home', rounds):8.1f} ms")
        print(f"head of the first layer   {measure_switch(tab, rounds):8.1f} ms")
        browser.close()


if __name__ == "__main__":
    main()
