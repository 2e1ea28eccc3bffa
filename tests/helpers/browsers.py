"""Start the system's Chromium or Firefox with Playwright."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserType

RELAY = Path(__file__).with_name("firefox_relay.py")


def start_chromium(chromium: BrowserType, *, scrollbars: bool = False) -> Browser:
    """Start Chromium; without one the test is skipped, and fails in CI.

    Args:
        chromium: Playwright's type of browser.
        scrollbars: show those that take width, as on a desktop; Firefox always does.
    """
    path = shutil.which("chromium")
    if path is None:
        assert os.environ.get("CI") != "true", "CI installs chromium"
        pytest.skip("no chromium here")
    options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
    hidden = ["--hide-scrollbars"] if scrollbars else None
    return chromium.launch(executable_path=path, headless=True, args=options, ignore_default_args=hidden)


def start_firefox(firefox: BrowserType) -> Browser:
    """Start Firefox over WebDriver BiDi; without one the test is skipped."""
    if not (shutil.which("firefox-esr") or shutil.which("firefox")):
        pytest.skip("no Firefox here")
    return firefox.launch(
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
