"""What the pages share: where they are, the versions they name, their option and their tables."""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import regard

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def add_write_option(parser: argparse.ArgumentParser, page: str) -> None:
    """Add the option that writes a page of the docs."""
    parser.add_argument("--write", action="store_true", help=f"write docs/{page}.md as well")


def write_page(name: str, text: str) -> None:
    """Write a page of the docs, which ends with one line break."""
    (DOCS / f"{name}.md").write_text(text.rstrip() + "\n", "utf-8")


def describe_run(*packages: str) -> dict[str, str]:
    """Return the date and the versions of a run, by the names that the texts of pages have for them."""
    own = (f"regard {regard.__version__}", f"Python {platform.python_version()}")
    others = (f"{name} {metadata.version(name)}" for name in packages)
    return {"date": datetime.date.today().isoformat(), "versions": ", ".join((*own, *others))}


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
