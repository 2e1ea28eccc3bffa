"""Start the system's Chromium or Firefox with Playwright."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

RELAY = Path(__file__).with_name("firefox_relay.py")


def start_chromium(playwright: Playwright) -> Browser:
    """Start Chromium; without one the test is skipped, and fails in CI."""
    chromium = shutil.which("chromium")
    if chromium is None:
        assert os.environ.get("CI") != "true", "CI installs chromium"
        pytest.skip("no chromium here")
    options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    return playwright.chromium.launch(executable_path=chromium, headless=True, args=options)


def start_firefox(playwright: Playwright) -> Browser:
    """Start Firefox over WebDriver BiDi; without one the test is skipped."""
    if not (shutil.which("firefox-esr") or shutil.which("firefox")):
        pytest.skip("no Firefox here")
    return playwright.firefox.launch(
        executable_path=RELAY,
        channel="moz-firefox",  # a Firefox as Mozilla builds it, not Playwright's own
        headless=True,
        timeout=120_000,
        # Light colours and motion, whatever the desktop is set to.
        firefox_user_prefs={
            "layout.css.prefers-color-scheme.content-override": 1,
            "ui.prefersReducedMotion": 0,
        },
    )
