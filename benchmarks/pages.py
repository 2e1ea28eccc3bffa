"""What a page takes: to make, to mail, to open and to look at.

python benchmarks/pages.py [--tokens 131072] [--width 64] [--rounds 5] [--write]

The deep map of one causal head of random numbers in float32, made with torch and opened in Chromium: seconds and peak
memory to make it, the size of the file, the first paint, when a weight could be read first, and milliseconds of a tile
of 128 × 128 points at three depths: each point a weight, a mean of 4 × 4, a sample of 16 from 32 × 32.
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

DEPTHS = {"each weight": 1.5, "mean of 4 × 4": 0.3, "sample of 32 × 32": 0.04}


def peak() -> float:
    """The most memory this process has had, in MB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def made(tokens: int, width: int, path: Path) -> dict[str, float]:
    """Seconds, and MB that the process grew by; the page is at `path`."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    before, start = peak(), time.perf_counter()
    page = regard.attention(query, key, mask=regard.causal()).page([f"w{i % 5000}" for i in range(tokens)])
    page.save(path)
    return {
        "seconds": time.perf_counter() - start,
        "MB more": peak() - before,
        "MB file": path.stat().st_size / 1e6,
    }


def opened(browser: Any, path: Path, tokens: int) -> dict[str, float]:
    """Milliseconds from opening the file, and of a tile at each depth."""
    found: dict[str, float] = {}
    for depth, zoom in DEPTHS.items():
        tab = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
        middle = tokens // 2
        view = f"row={middle}&column={middle // 2}&zoom={zoom}&query={middle}&key={middle // 2}"
        tab.goto(f"{path.as_uri()}#{view}")
        tab.locator(".reading-card .weight").wait_for(timeout=120_000)
        tab.locator('.map-box[data-missing="0"]').wait_for(timeout=120_000)
        paint, read, tiles = tab.evaluate(
            "() => [performance.getEntriesByName('first-contentful-paint')[0].startTime,"
            " Math.min(...performance.getEntriesByName('cell').map((each) => each.startTime + each.duration)),"
            " performance.getEntriesByName('picture').map((each) => each.detail)]"
        )
        found |= {
            "first paint": min(paint, found.get("first paint", paint)),
            "first weight": min(read, found.get("first weight", read)),
        }
        if tiles:  # a short context is all overview from afar
            found |= {f"tile, {depth}": statistics.median(tiles), f"slowest tile, {depth}": max(tiles)}
        tab.context.close()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, default=131_072)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--write", action="store_true", help="keep the figures for the README")
    given = arguments.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        found |= made(given.tokens, given.width, path)
        for name, value in found.items():
            print(f"{name:<38} {value:8.1f}")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        rounds = [opened(browser, path, given.tokens) for _ in range(given.rounds)]
        browser.close()
        found |= compute_medians(rounds)
    if given.write:
        store_figures("deep map", found)


if __name__ == "__main__":
    main()
