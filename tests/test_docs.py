"""Every Python block of README and docs runs, and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = "---\nfile_format: mystnb\n"  # run when the site is built, see test_site.py
MADE = ROOT / "docs/reference"  # from the docstrings, whose examples run where they stand
WRITTEN = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - set(MADE.glob("*.md")))
PAGES = [
    page for page in WRITTEN if not page.read_text().startswith(NOTEBOOK) and "```python" in page.read_text()
]


def run_page(text: str, name: str) -> int:
    """Run the blocks of a page one after the other with the same names; how many there were."""
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks):
        if ">>>" not in block:
            exec(compile(block, f"{name}, block {number}", "exec"), names)
            continue
        example = doctest.DocTestParser().get_doctest(block, names, f"{name}, block {number}", name, 0)
        report: list[str] = []
        failed = doctest.DocTestRunner(verbose=False).run(example, out=report.append, clear_globs=False)
        names = example.globs
        assert not failed.failed, "".join(report)
    return len(blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page):
    assert run_page(page.read_text(), page.name) > 0


@pytest.mark.parametrize("block", ["assert 1 == 2", ">>> 1 + 1\n3\n", "import regard.nonexistent"])
def test_a_wrong_block_is_seen(block):
    with pytest.raises((AssertionError, ImportError)):
        run_page(f"```python\n{block}\n```", "page")


def test_relative_links_lead_somewhere():
    for page in [*WRITTEN, ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md"]:
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_figures_of_the_readme_are_what_the_benchmarks_kept(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures = importlib.import_module("figures")
    readme = (ROOT / "README.md").read_text()
    assert figures.written(readme) == readme
    assert figures.written(readme.replace("| `A @ value`, 8 heads", "| faster")) == readme
