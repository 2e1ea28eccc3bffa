"""`regard survey` and `regard report`: run a model over a corpus, and write the page of the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar

from regard.cli.output import NUMBER_STYLE, Printer, build_console, style_text
from regard.cli.page_files import check_output, save_page
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.survey import Progress

# Quarantined documents that are printed.
MAX_QUARANTINED = 5
INTERRUPTED = 130


def survey(printer: Printer, model: str, corpus: str, output: Path, options: dict[str, Any]) -> int:
    """Run or resume a survey.

    Args:
        printer: Prints the result.
        model: A folder, a name on the Hub, or `module:function`.
        corpus: A file, directory or pattern.
        output: Directory to write to.
        options: Further arguments of `regard.survey.run`.

    Returns:
        The exit code.
    """
    from regard.survey import run

    notes: list[str] = []
    start = time.perf_counter()
    try:
        with show_progress(printer, model, notes) as progress, silence_logging():
            result = run(model, corpus, output, progress=progress, **options)
    except KeyboardInterrupt:
        printer.warn(
            f"Interrupted. Run the same command again to resume; committed shards are kept in {output}."
        )
        return INTERRUPTED
    seconds = time.perf_counter() - start
    name, heads, quarantined = (
        result.settings["model"]["name"],
        sum(result.settings["heads"]),
        result.quarantined,
    )
    printer.record(
        {
            "model": name,
            "corpus": corpus,
            "output": str(output),
            "documents": result.documents,
            "tokens": result.tokens,
            "layers": result.settings["layers"],
            "heads": heads,
            "shards": result.settings["shards"],
            "quarantined": len(quarantined),
            "notes": notes,
            "seconds": seconds,
        }
    )
    printer.print(
        style_text(
            (name, "bold"), ": ", (f"{result.documents:,}", NUMBER_STYLE), " documents, ",
            (f"{result.tokens:,}", NUMBER_STYLE), " tokens, ", (f"{heads:,}", NUMBER_STYLE),
            f" heads in {format_duration(seconds)}, written to {output}",
        )
    )  # fmt: skip
    for document in quarantined[:MAX_QUARANTINED]:
        problem = f"{document['document']} ({document['kind']}: {document['reason']})"
        printer.print(style_text(("quarantined: ", "yellow"), problem))
    if len(quarantined) > MAX_QUARANTINED:
        more = len(quarantined) - MAX_QUARANTINED
        printer.print(f"… and {more:,} more: see regard.survey.open({str(output)!r}).quarantined", "dim")
    printer.print(f"To write the report: regard report {output}", "dim")
    return 0


def report(printer: Printer, folder: Path, output: Path, show: bool) -> int:
    """Write the page of a survey.

    Args:
        printer: Prints the result.
        folder: Directory of the survey.
        output: File to write.
        show: Open the page in a browser.

    Returns:
        The exit code.
    """
    check_output(output, "report")
    from regard.survey import open as open_survey
    from regard.survey.report import SurveyReport

    with printer.progress(f"Reading {folder.name}"):
        result = SurveyReport(open_survey(folder))
        page = result.page()
    printer.print(result.answer())
    for behaviour in result.behaviours:
        printer.print(style_text(f"  {behaviour.name}: ", (f"{len(behaviour.heads):,}", NUMBER_STYLE)))
    save_page(printer, page, output, show, result.summary)
    return 0


@contextmanager
def show_progress(printer: Printer, model: str, notes: list[str]) -> Iterator[Callable[[Progress], None]]:
    """Show a progress line in a terminal, with notes above it; yield the callback, which also collects the notes."""
    console = build_console(stderr=True)
    visible = console.is_terminal and printer.as_text

    def collect(progress: Progress) -> None:
        if progress.note:
            notes.append(progress.note)
            console.print(style_text((f"warning: {progress.note}", "yellow")), soft_wrap=True)

    if not visible:  # a disabled bar of rich 13 prints an empty line
        yield collect
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=10))
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape_unprintable(f"Loading {Path(model).name}"), total=None)

        def update(progress: Progress) -> None:
            collect(progress)
            description = format_progress(progress)
            bar.update(task, description=description, completed=progress.shards, total=progress.total_shards)

        yield update


def format_progress(progress: Progress) -> str:
    """Format the progress of a survey on one line.

    >>> from regard.survey import Progress
    >>> format_progress(Progress(1234, 56789, 2, 3, 40, 8.0, 7098.6, 98.7))
    '1,234 documents, 56,789 tokens (7,099/s), 2 quarantined, 1:39 left'
    """
    parts = [
        f"{progress.documents:,} documents",
        f"{progress.tokens:,} tokens ({progress.tokens_per_second:,.0f}/s)",
        f"{progress.quarantined:,} quarantined",
    ]
    if progress.remaining is not None:
        parts.append(f"{format_duration(progress.remaining)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours if there are any.

    >>> format_duration(8.4), format_duration(98.7), format_duration(3725)
    ('0:08', '1:39', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def silence_logging() -> Iterator[None]:
    """Keep logging from printing the notes of a survey a second time."""
    logger, handler = logging.getLogger("regard.survey"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
