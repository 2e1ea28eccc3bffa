"""Measure the head map: time, memory and size to build it, and times in the browser.

python benchmarks/pages.py [--tokens 131072] [--width 64] [--rounds 5] [--write]

The page has one causal head of random numbers in float32, built with torch and opened in Chromium. The figures are the
seconds and peak memory to build it, the size of the file, the first paint, the first weight shown, and the milliseconds
of a tile of 128 × 128 points at three zooms: each point a weight, a mean of 4 × 4, a sample of 16 from 32 × 32.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import compute_medians, store_figures
from playwright.sync_api import sync_playwright

import regard

ZOOMS = {"each weight": 1.5, "mean of 4 × 4": 0.3, "sample of 32 × 32": 0.04}


def read_peak_memory() -> float:
    """Return the peak memory of this process in MiB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def build(tokens: int, width: int, path: Path) -> dict[str, float]:
    """Build the page and save it; return its size, the seconds, and the growth of the process."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    before, start = read_peak_memory(), time.perf_counter()
    page = regard.attention(query, key, mask=regard.causal()).page([f"w{i % 5000}" for i in range(tokens)])
    page.save(path)
    return {
        "seconds": time.perf_counter() - start,
        "MiB grown": read_peak_memory() - before,
        "MB file": path.stat().st_size / 1e6,
    }


def open_page(browser: Any, path: Path, tokens: int) -> dict[str, float]:
    """Open the page at each zoom; return milliseconds since opening it, and milliseconds of a tile."""
    figures: dict[str, float] = {}
    for name, zoom in ZOOMS.items():
        tab = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
        middle = tokens // 2
        view = f"row={middle}&column={middle // 2}&zoom={zoom}&query={middle}&key={middle // 2}"
        tab.goto(f"{path.as_uri()}#{view}")
        tab.locator(".cell-card .weight").wait_for(timeout=120_000)
        tab.locator('.map-box[data-missing="0"]').wait_for(timeout=120_000)
        paint, weight, tiles = tab.evaluate(
            "() => [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
            " Math.min(...performance.getEntriesByName('cell').map((entry) => entry.startTime + entry.duration)),"
            " performance.getEntriesByName('picture').map((entry) => entry.detail)]"
        )
        figures |= {
            "first paint": min(paint, figures.get("first paint", paint)),
            "first weight": min(weight, figures.get("first weight", weight)),
        }
        if tiles:  # the overview of a short context needs no tiles
            figures |= {f"tile, {name}": statistics.median(tiles), f"slowest tile, {name}": max(tiles)}
        tab.context.close()
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, default=131_072)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--write", action="store_true", help="store the figures for the README")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        figures = build(options.tokens, options.width, path)
        for name, value in figures.items():
            print(f"{name:<38} {value:8.1f}")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        rounds = [open_page(browser, path, options.tokens) for _ in range(options.rounds)]
        browser.close()
        figures |= compute_medians(rounds)
    if options.write:
        store_figures("head map", figures)


if __name__ == "__main__":
    main()
