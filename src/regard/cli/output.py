"""Print results to standard output, and progress, warnings and errors to standard error; write pages and pictures."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from regard.errors import ArgumentError
from regard.pages.html import Page
from regard.render.table import Alignment, format_bytes, format_cell, format_table
from regard.render.text import escape_unprintable

NUMBER_STYLE = "cyan"
INTERRUPTED = 130  # exit code


class Printer:
    """Prints the output of a command: text for people, or JSON or CSV for scripts.

    Text is never parsed as markup, and control characters are escaped: a token or a file name may contain anything.
    Output to a pipe is neither truncated nor wrapped.
    """

    def __init__(self, as_json: bool = False, as_csv: bool = False) -> None:
        if as_json and as_csv:
            raise ArgumentError(
                "--csv", received="--csv and --json", expected="at most one of them", hint="Omit one."
            )
        self.as_json, self.as_csv = as_json, as_csv

    @property
    def as_text(self) -> bool:
        """Whether standard output is for people to read."""
        return not self.as_json and not self.as_csv

    def print(self, text: str | Text = "", style: str = "") -> None:
        """Print text to standard output; nothing with --json or --csv."""
        if self.as_text:
            rendered = text if isinstance(text, Text) else Text(_escape_lines(text), style)
            build_console().print(rendered, soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        bold: str = "",
        right: Collection[str] = (),
    ) -> None:
        """Print a table: text columns aligned left, numbers right.

        If a terminal is too narrow, the last column is folded.
        """
        if not self.as_text:
            return
        sides: list[Alignment] = [
            "left" if name not in right and all(isinstance(row[i], str) for row in rows) else "right"
            for i, name in enumerate(columns)
        ]
        names = [escape_unprintable(name) for name in columns]
        cells = [[format_cell(value) for value in row] for row in rows]
        console = build_console()
        if not console.is_terminal:
            self.write(format_table(cells, names, align=sides) + "\n")
            return
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for i, (name, side) in enumerate(zip(names, sides, strict=True)):
            style, last = f"bold {NUMBER_STYLE}" if name and name == bold else "", i == len(columns) - 1
            table.add_column(Text(name), justify=side, style=style, no_wrap=not last, overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)

    def record(self, record: object) -> None:
        """Print the result as one JSON document; nothing without --json."""
        if self.as_json:
            self.write(json.dumps(to_json(record), indent=2, allow_nan=False) + "\n")

    def csv(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Print rows as CSV."""
        lines = io.StringIO()
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.write(lines.getvalue())

    def write(self, text: str) -> None:
        """Write text to standard output as it is."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise BrokenPipeError from None  # without its errno: typer would exit with 1

    def warn(self, text: str) -> None:
        """Print a warning to standard error, also with --json and --csv."""
        build_console(stderr=True).print(
            Text(f"warning: {escape_unprintable(text)}", "yellow"), soft_wrap=True
        )

    def info(self, text: Text) -> None:
        """Print information to standard error; nothing with --json or --csv."""
        if self.as_text:
            build_console(stderr=True).print(text, soft_wrap=True)

    @contextmanager
    def progress(
        self, description: str, total: int | None = None, count_done: Callable[[], int] | None = None
    ) -> Iterator[Callable[[], None]]:
        """Show a progress bar on standard error until the block ends, in a terminal and for people; yield a step.

        `count_done` returns the number of finished steps each time the bar is drawn.
        """
        console = build_console(stderr=True)
        if not console.is_terminal or not self.as_text:
            yield lambda: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            _PolledBar(bar_width=30),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(escape_unprintable(description), total=total, count_done=count_done)
            yield lambda: progress.advance(task)


class _PolledBar(BarColumn):  # type: ignore[misc]
    """A bar that polls the number of finished steps each time it is drawn."""

    def render(self, task: Task) -> RenderableType:
        if task.fields["count_done"] is not None:
            task.completed = task.fields["count_done"]()
        return super().render(task)


class _PipeConsole(Console):  # type: ignore[misc]
    """A console that raises BrokenPipeError when the reader of a pipe has closed it; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def build_console(stderr: bool = False) -> Console:
    """Build a console for standard output, or standard error."""
    console = _PipeConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def style_text(*parts: str | tuple[str, str]) -> Text:
    """Join texts, or (text, style) pairs, into one line; control characters are escaped."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((escape_unprintable(text), style) for text, style in pairs))


def _escape_lines(text: str) -> str:
    """Escape the control characters of a text, except line ends."""
    return "\n".join(map(escape_unprintable, text.split("\n")))


def print_error(command: str, message: str) -> None:
    """Print an error on one line of standard error."""
    build_console(stderr=True).print(
        style_text((f"{command}: ", "bold red"), " ".join(message.split())),
        soft_wrap=True,
        no_wrap=True,
        overflow="ignore",
        crop=False,
    )


def to_json(value: Any) -> Any:
    """Convert a value to one that JSON can hold.

    NaN becomes null, and an infinity the text that Python's float and JavaScript's Number parse.

    >>> to_json({"weights": (0.5, math.nan), "shift": -math.inf})
    {'weights': [0.5, None], 'shift': '-Infinity'}
    """
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def check_output(output: Path | None, operation: str, show: bool = False) -> None:
    """Raise an `ArgumentError` if a page cannot be written to a path, or shown, before any work is done."""
    if output is None:
        if show:
            raise ArgumentError(
                operation,
                received="--open without -o",
                expected="a page to open",
                hint="Add the file to write: -o page.html.",
            )
        return
    missing = not output.parent.is_dir()
    if missing or output.is_dir():
        raise ArgumentError(
            operation,
            received=f"-o {str(output)!r} ({'No such file or directory' if missing else 'Is a directory'})",
            expected="a file in an existing folder",
            hint=f"Create the folder first: mkdir -p {output.parent}."
            if missing
            else f"Add a file name: -o {output / 'page.html'}.",
        )


def has_display() -> bool:
    """Return whether the person at this terminal can see a browser; on Linux, a desktop sets a variable."""
    is_desktop = (
        sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    )
    return is_desktop and sys.stdout.isatty()


def save_page(printer: Printer, page: Page, output: Path, show: bool, record: dict[str, Any]) -> None:
    """Save a page, print its path and size, and open it in a browser if requested; `record` is for --json."""
    save_file(printer, page.title, output, show, record, page.save)


def save_file(
    printer: Printer,
    title: str,
    output: Path,
    show: bool,
    record: dict[str, Any],
    write: Callable[[Path], object],
) -> None:
    """Write a file, print its path and size, and open it in a browser if requested; `record` is for --json."""
    write(output)
    size = output.stat().st_size
    printer.record(record | {"title": title, "page": str(output), "bytes": size})
    printer.print(style_text((title, "bold"), f": {output}, ", (format_bytes(size), NUMBER_STYLE)))
    if show:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())
