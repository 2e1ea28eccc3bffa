"""`regard survey` and `regard report`: a model over a corpus, and what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from regard.cli.explain_commands import written
from regard.cli.output import NUMBER, Out, console_of, styled
from regard.render.text import escape_unprintable

SHOWN = 5  # of the documents that were set aside
STOPPED = 130  # as a shell tells of an interrupt


def survey(out: Out, model: str, corpus: str, folder: Path, options: dict[str, Any]) -> int:
    """Run a survey, or resume one."""
    from regard.survey import run

    notes: list[str] = []
    start = time.perf_counter()
    try:
        with _display(out, model, notes) as shown, _quiet():
            made = run(model, corpus, folder, progress=shown, **options)
    except KeyboardInterrupt:
        out.note(f"Stopped. The same command goes on where it stopped; what is committed is in {folder}.")
        return STOPPED
    seconds = time.perf_counter() - start
    aside = made.quarantined
    record = {"model": made.settings["model"]["name"], "corpus": corpus, "out": str(folder)}
    record |= {"documents": made.documents, "tokens": made.tokens, "layers": made.settings["layers"]}
    record |= {"heads": sum(made.settings["heads"]), "shards": made.settings["shards"]}
    record |= {"quarantined": len(aside), "notes": notes, "seconds": seconds}
    out.record(record)
    out.say(
        styled(
            (made.settings["model"]["name"], "bold"), ": ", (f"{made.documents:,}", NUMBER), " documents, ",
            (f"{made.tokens:,}", NUMBER), " tokens, ", (f"{sum(made.settings['heads']):,}", NUMBER),
            f" heads, {duration(seconds)}: {folder}",
        )
    )  # fmt: skip
    for each in aside[:SHOWN]:
        out.say(styled(("set aside: ", "yellow"), f"{each['document']} ({each['kind']}: {each['reason']})"))
    if len(aside) > SHOWN:
        out.say(f"… and {len(aside) - SHOWN:,} more: regard.survey.open(…).quarantined", "dim")
    out.say(f"regard report {folder} makes the page of it.", "dim")
    return 0


def report(out: Out, folder: Path, output: Path, show: bool) -> int:
    """Write the page of a survey."""
    from regard.survey import open as open_survey
    from regard.survey.report import Report

    with out.busy(f"Reading {folder.name}"):
        made = Report(open_survey(folder))
        page = made.page()
    out.say(made.answer())
    for behaviour in made.behaviours:
        out.say(styled(f"  {behaviour.name}: ", (f"{len(behaviour.heads):,}", NUMBER)))
    written(out, page, output, show, made.summary)
    return 0


@contextmanager
def _display(out: Out, model: str, notes: list[str]) -> Iterator[Callable[[Any], None]]:
    """A line that tells how far it is, in a terminal; notes stay, above it."""
    where = console_of(stderr=True)
    shown = where.is_terminal and out.for_people
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=10))
    with Progress(*columns, console=where, transient=True, disable=not shown) as bar:
        task = bar.add_task(escape_unprintable(f"Opening {Path(model).name}"), total=None)

        def tell(progress: Any) -> None:
            if progress.note:
                notes.append(progress.note)
                bar.console.print(styled((f"note: {progress.note}", "yellow")), soft_wrap=True)
            bar.update(task, description=words(progress), completed=progress.shards, total=progress.of)

        yield tell


def words(progress: Any) -> str:
    """How far a survey is, in a line.

    >>> from regard.survey import Progress
    >>> words(Progress(1234, 56789, 2, 3, 40, 8.0, 7098.6, 98.7))
    '1,234 documents, 56,789 tokens (7,099/s), 2 set aside, 1:39 left'
    """
    parts = [f"{progress.documents:,} documents", f"{progress.tokens:,} tokens ({progress.rate:,.0f}/s)"]
    parts += [f"{progress.quarantined:,} set aside"]
    parts += [] if progress.left is None else [f"{duration(progress.left)} left"]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time as a clock shows it.

    >>> duration(8.4), duration(98.7), duration(3725)
    ('0:08', '1:39', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Notes are shown here; where nobody listens, logging would say them again."""
    log, handler = logging.getLogger("regard.survey"), logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
