"""The report of a verification as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.pages.html import Page

if TYPE_CHECKING:
    from regard.policy.verification import Verification


def build_page(verification: Verification, title: str | None) -> Page:
    """Build the page of `Verification.page`."""
    raise NotImplementedError
