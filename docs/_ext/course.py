"""The course as data: minutes and contents of the chapters, citations, what the course covers, drawings in pages."""

from __future__ import annotations

import doctest
import html
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from regard.learn import figures
from regard.learn.exercises.catalog import EXERCISES

WORDS_PER_MINUTE, MINUTES_PER_CELL, MINUTES_PER_EXPLORER = 200, 0.5, 3
CELL = re.compile(r"^```\{code-cell\}.*?^```$", re.MULTILINE | re.DOTALL)
OBJECTIVES = re.compile(r"^\*\*After this chapter you can\*\*\n\n(.*?)\n\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Chapter:
    """A chapter of the book as its source describes it."""

    number: int
    title: str
    file: str
    objectives: tuple[str, ...]
    minutes: int


def read_chapter(path: Path) -> Chapter:
    """Read the title, the objectives and the time of a chapter."""
    text = path.read_text("utf-8")
    number, title = re.findall(r"^# (\d+)\. (.+)$", text, re.MULTILINE)[0]
    objectives = OBJECTIVES.search(text)
    items = re.split(r"^- ", objectives[1], flags=re.MULTILINE)[1:] if objectives else []
    return Chapter(
        int(number),
        title,
        path.name,
        tuple(" ".join(item.split()).rstrip(";.") for item in items),
        estimate_minutes(text),
    )


def estimate_minutes(text: str) -> int:
    """Estimate how long a chapter takes: its words, half a minute for each cell, three for each interactive page.

    The result is rounded up to five minutes.
    """
    cells = CELL.findall(text)
    words = len(CELL.sub("", text).split())
    pages = sum("explore." in cell for cell in cells)
    minutes = words / WORDS_PER_MINUTE + MINUTES_PER_CELL * len(cells) + MINUTES_PER_EXPLORER * pages
    return 5 * math.ceil(minutes / 5)


def read_chapters(folder: Path) -> list[Chapter]:
    """Read all chapters of the book, in order."""
    return [read_chapter(path) for path in sorted(folder.glob("[01][0-9]-*.md"))]


def contents_table(chapters: list[Chapter]) -> str:
    """Return the contents of the book as a table in Markdown, with times and exercises."""
    lines = ["| | chapter | minutes | after it you can | exercises |", "| --- | --- | --- | --- | --- |"]
    for chapter in chapters:
        numbers = [n for n, exercise in enumerate(EXERCISES, start=1) if exercise.chapter == chapter.number]
        links = ", ".join(f"[{n}](../exercises/{exercise_file(n)})" for n in numbers)
        lines.append(
            f"| {chapter.number} | [{chapter.title}]({chapter.file}) | {chapter.minutes} | "
            f"{'; '.join(chapter.objectives)} | {links} |"
        )
    total = sum(chapter.minutes for chapter in chapters)
    hours = f"{total / 60:.0f}"
    return "\n".join(lines) + f"\n\nTogether that is about {hours} hours, without the exercises."


def exercise_file(n: int) -> str:
    """Return the file name of an exercise's page."""
    folder = Path(__file__).parents[1] / "exercises"
    return next(folder.glob(f"0{n}-*.md")).name


def coverage_table(entries: list[dict[str, str]]) -> str:
    """Return the features of the course as a table in Markdown, row by row of the list that they come from."""
    lines = ["| row | described | where it is | shown by |", "| --- | --- | --- | --- |"]
    for entry in sorted(entries, key=lambda entry: entry["row"]):
        lines.append(f"| {entry['row']} | {entry['described']} | {entry['where']} | `{entry['check']}` |")
    return "\n".join(lines)


CITATION = re.compile(r"\[(?:arXiv|doi):([^\]]+)\]")
# Sources that chapters print.
PRINTED = {
    "src/regard/learn/family/mechanisms.toml": "11-family.md",
    "src/regard/learn/cost.py": "10-cost.md",
}


def add_citations(text: str, docs: Path) -> str:
    """Add the chapters and guides that cite it to each line of the bibliography."""
    citing = {path.name: path.read_text("utf-8") for path in sorted((docs / "book").glob("[01][0-9]-*.md"))}
    for source, chapter in PRINTED.items():
        citing[chapter] += (docs.parent / source).read_text("utf-8")
    guides = {path.name: path.read_text("utf-8") for path in sorted((docs / "guides").glob("[01][0-9]-*.md"))}
    lines = []
    for line in text.split("\n"):
        found = CITATION.search(line)
        if found:
            chapters = [
                f"[{int(name[:2])}](book/{name})" for name, page in citing.items() if found[1] in page
            ]
            pages = [f"[{int(name[:2])}](guides/{name})" for name, page in guides.items() if found[1] in page]
            line += f" Chapter {', '.join(chapters)}." if chapters else ""
            line += f" Guide {', '.join(pages)}." if pages else ""
        lines.append(line)
    return "\n".join(lines)


class Drawing(SphinxDirective):
    """Show a figure of `regard.learn.figures` in a page that is no notebook."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        figure = figures.draw(self.arguments[0])
        return [nodes.raw("", figure._repr_html_(), format="html")]


class LivePage(SphinxDirective):
    """Run the Python block above, and show the `page` that it made in a frame.

    The frame loads a file of its own, so that the text around it is there first.
    """

    def run(self) -> list[nodes.Node]:
        *_, block = self.state.document.findall(nodes.literal_block)
        examples = doctest.DocTestParser().get_examples(block.astext() + "\n")
        names: dict[str, Any] = {}
        exec("".join(example.source for example in examples), names)
        folder = Path(self.env.app.outdir) / "_live"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.env.docname.replace('/', '-')}.html"
        names["page"].save(file)
        depth = "../" * self.env.docname.count("/")
        frame = (
            f'<iframe class="live" title="{html.escape(names["page"].title)}" sandbox="allow-scripts" '
            f'src="{depth}{folder.name}/{file.name}"></iframe>'
        )
        return [nodes.raw("", frame, format="html")]


# -- Sphinx hooks -----------------------------------------------------------------------------------------


def insert_tables(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the minutes under the title of a chapter, and the tables into their pages."""
    docs = Path(app.srcdir)
    if re.fullmatch(r"book/[01][0-9]-.*", docname):
        minutes = estimate_minutes(source[0])
        source[0] = re.sub(
            r"^(# .+)\n", rf"\1\n\n*About {minutes} minutes.*\n", source[0], count=1, flags=re.MULTILINE
        )
    elif docname == "book/index":
        source[0] = source[0].replace("<!-- contents -->", contents_table(read_chapters(docs / "book")))
    elif docname == "bibliography":
        source[0] = add_citations(source[0], docs)
    elif docname == "course-coverage":
        entries = json.loads((docs / "course-coverage.json").read_text("utf-8"))
        source[0] = source[0].replace("<!-- table -->", coverage_table(entries))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("drawing", Drawing)
    app.add_directive("live-page", LivePage)
    app.connect("source-read", insert_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
