"""Take the screenshot of the README: the page that `regard look` writes.

Needs pip install -e ".[torch,dev]" and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .page import DOCS

WIDTH, HEIGHT = 1100, 712  # down to the last layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=DOCS, help="default: docs")


def run(options: argparse.Namespace) -> None:
    from playwright.sync_api import sync_playwright

    path = options.folder / "page.png"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "look.html"
        subprocess.run([sys.executable, "-m", "regard", "look", "--no-open", "-o", page], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(page.as_uri())
        tab.wait_for_load_state("networkidle")
        tab.wait_for_timeout(2000)  # the thumbnails are drawn
        tab.screenshot(path=path)
        browser.close()
    print(path)
