"""What a command says: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from regard.render.table import format_cell
from regard.render.text import escape_unprintable

NUMBER = "cyan"


class Out:
    """Where a command speaks: `say` and `table` for people, `record` for scripts, `note` and `busy` meanwhile.

    Texts are never read as markup, and control characters are shown, not obeyed: a token or a file name may be
    anything. What goes into a pipe is neither cut nor wrapped.
    """

    def __init__(self, as_json: bool = False, as_csv: bool = False) -> None:
        self.as_json, self.as_csv = as_json, as_csv

    @property
    def for_people(self) -> bool:
        """Whether standard output is for people to read."""
        return not self.as_json and not self.as_csv

    def say(self, text: str | Text = "", style: str = "") -> None:
        """Lines for people; with --json there are none."""
        if self.for_people:
            console_of().print(text if isinstance(text, Text) else Text(_lines(text), style), soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        bold: str = "",
        right: Collection[str] = (),
    ) -> None:
        """Rows in columns: texts to the left, numbers and the columns named in `right` to the right.

        In a terminal that is too narrow the last column is folded; `bold` names one that stands out.
        """
        if not self.for_people:
            return
        made = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for i, name in enumerate(columns):
            texts = name not in right and all(isinstance(row[i], str) for row in rows)
            style, last = f"bold {NUMBER}" if name and name == bold else "", i == len(columns) - 1
            justify = "left" if texts else "right"
            made.add_column(
                Text(escape_unprintable(name)),
                justify=justify,
                style=style,
                no_wrap=not last,
                overflow="fold",
            )
        for row in rows:
            made.add_row(*(Text(format_cell(value)) for value in row))
        console = console_of()
        if console.is_terminal:
            console.print(made)
            return
        with console.capture() as capture:
            console.print(made)
        self.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))

    def record(self, record: Any) -> None:
        """The result for scripts, with --json: one JSON document, and nothing else on standard output."""
        if self.as_json:
            self.write(json.dumps(plain(record), indent=2, allow_nan=False) + "\n")

    def write(self, text: str) -> None:
        """A text as it is, to standard output."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise BrokenPipeError from None  # without its number: typer would exit with 1

    def note(self, text: str) -> None:
        """A sentence beside the result, which is always told."""
        console_of(stderr=True).print(Text(f"note: {escape_unprintable(text)}", "yellow"), soft_wrap=True)

    def aside(self, text: Text) -> None:
        """What people like to know and scripts do not."""
        if self.for_people:
            console_of(stderr=True).print(text, soft_wrap=True)

    @contextmanager
    def busy(
        self, words: str, total: int | None = None, done: Callable[[], int] | None = None
    ) -> Iterator[Callable[[], None]]:
        """A bar while something takes its time, gone when it is done; none into a pipe, and none with --json.

        `done` is asked how far it has come, or the function that is handed over is called for each step.
        """
        console = console_of(stderr=True)
        shown = console.is_terminal and self.for_people
        columns = TextColumn("{task.description}", markup=False), _Bar(bar_width=30), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
            task = progress.add_task(escape_unprintable(words), total=total, done=done)
            yield lambda: progress.advance(task)


class _Bar(BarColumn):  # type: ignore[misc]
    """A bar that asks how far a task has come each time it is drawn."""

    def render(self, task: Any) -> Any:
        if task.fields["done"] is not None:
            task.completed = task.fields["done"]()
        return super().render(task)


class _Console(Console):  # type: ignore[misc]
    """A console that leaves it to the command what to do when nobody reads any more; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_of(stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def styled(*parts: str | tuple[str, str]) -> Text:
    """One line of texts, each with its style or without; what is not printable is escaped."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((escape_unprintable(text), style) for text, style in pairs))


def _lines(text: str) -> str:
    """Text of several lines, everything else that is not printable escaped."""
    return "\n".join(map(escape_unprintable, text.split("\n")))


def fail(command: str, words: str) -> None:
    """The one line of an error."""
    said = " ".join(words.split())
    console_of(stderr=True).print(
        styled((f"{command}: ", "bold red"), said),
        soft_wrap=True,
        no_wrap=True,
        overflow="ignore",
        crop=False,
    )


def plain(thing: Any) -> Any:
    """What JSON can hold: NaN becomes null, an infinity the text that Python's float and JavaScript's Number read.

    >>> plain({"weights": (0.5, math.nan), "shift": -math.inf})
    {'weights': [0.5, None], 'shift': '-Infinity'}
    """
    if isinstance(thing, dict):
        return {str(name): plain(each) for name, each in thing.items()}
    if isinstance(thing, list | tuple):
        return [plain(each) for each in thing]
    if hasattr(thing, "tolist"):
        return plain(thing.tolist())
    if isinstance(thing, float) and not math.isfinite(thing):
        return None if math.isnan(thing) else "Infinity" if thing > 0 else "-Infinity"
    return thing if isinstance(thing, bool | int | float | str | None) else str(thing)
