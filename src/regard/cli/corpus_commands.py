"""`regard survey`, `report` and `policy`: run a model over a corpus, and make, verify and tighten a cache policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar

from regard.cli.options import JsonOption, ModelName, OpenOption
from regard.cli.output import (
    INTERRUPTED,
    NUMBER_STYLE,
    Printer,
    build_console,
    check_output,
    save_page,
    style_text,
)
from regard.jobs.options import RunKeywords, RunOptions
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.survey import Progress


# Quarantined documents that are printed.
MAX_QUARANTINED = 5
REPORT_PAGE, POLICY_FILE = Path("report.html"), Path("policy.json")


PolicyArgument = Annotated[
    Path,
    typer.Argument(metavar="POLICY", show_default=False, help="File that regard policy make wrote, in JSON."),
]
CorpusArgument = Annotated[
    str,
    typer.Argument(
        metavar="CORPUS",
        show_default=False,
        help="Documents that were not in the survey: a file, directory or pattern, as for regard survey.",
    ),
]
BoundOption = Annotated[
    float,
    typer.Option(
        "--bound",
        metavar="NATS",
        min=1e-9,
        help="Largest mean KL divergence between predictions with and without the policy, in nats.",
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        help="Directory for finished parts. An interrupted run resumes from it.",
    ),
]


def as_keywords(options: RunOptions) -> RunKeywords:
    """Return the options as keyword arguments of `regard.survey.run`."""
    return cast(RunKeywords, asdict(options))


def survey(
    model: ModelName,
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            show_default=False,
            help="A file, directory or glob pattern: text files, JSON lines or Parquet.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            show_default=False,
            help="Directory to write to.",
        ),
    ],
    *,
    measures: Annotated[
        str | None,
        typer.Option(
            "--measures",
            metavar="NAMES",
            help="Some of these, separated by commas: entropy; distance; first, the weight on the first token; "
            "heavy, the weight on the tokens that receive the most; copies, the weight on earlier copies of a token. "
            "Default: all.",
        ),
    ] = None,
    prompt_field: Annotated[
        str | None,
        typer.Option(
            "--prompt-field",
            metavar="NAME",
            help="Field or column that holds the prompt; adds a measure of the weight on the prompt.",
        ),
    ] = None,
    options: RunOptions,
    as_json: JsonOption = False,
) -> int:
    """Measure each head of a model on each document of a corpus, and write the table as Parquet files.

    Run the same command again to resume an interrupted survey. regard report writes a page about it.
    """
    printer = Printer(as_json)
    selected = None if measures is None else [name.strip() for name in measures.split(",")]
    from regard.survey import run

    notes: list[str] = []
    start = time.perf_counter()
    hint = f"Run the same command again to resume; committed shards are kept in {output}."
    with show_progress(printer, model, notes, hint) as progress:
        result = run(
            model,
            corpus,
            output,
            measures=selected,
            prompt_field=prompt_field,
            progress=progress,
            **as_keywords(options),
        )
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
        printer.print(f"… and {more:,} more: see regard.survey.load({str(output)!r}).quarantined", "dim")
    printer.print(f"To write the report: regard report {output}", "dim")
    return 0


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", show_default=False, help="Directory written by regard survey, even if unfinished."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="Page to write.")
    ] = REPORT_PAGE,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write a page about a survey: what each head does, which heads need a long context, and on which documents."""
    printer = Printer(as_json)
    check_output(output, "report")
    from regard.survey import load as load_survey
    from regard.survey.dataset import build_report

    with printer.progress(f"Reading {folder.name}"):
        result = build_report(load_survey(folder))
        page = result.page()
    printer.print(result.answer())
    for behaviour in result.behaviours:
        printer.print(style_text(f"  {behaviour.name}: ", (f"{len(behaviour.heads):,}", NUMBER_STYLE)))
    save_page(printer, page, output, show, result.summary)
    return 0


@contextmanager
def show_progress(
    printer: Printer, model: str, notes: list[str], resume_hint: str
) -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a run, and collect its notes; yield the callback. An interrupt says how to resume."""
    logger, handler = logging.getLogger("regard.survey"), logging.NullHandler()
    logger.addHandler(handler)  # keeps logging from printing the notes a second time
    try:
        with _show_progress_line(printer, model, notes) as progress:
            yield progress
    except KeyboardInterrupt:
        printer.warn(f"Interrupted. {resume_hint}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        logger.removeHandler(handler)


@contextmanager
def _show_progress_line(
    printer: Printer, model: str, notes: list[str]
) -> Iterator[Callable[[Progress], None]]:
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


def make(
    survey: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="Directory that regard survey wrote.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Policy to write, as JSON.")
    ] = POLICY_FILE,
    keep: Annotated[
        float,
        typer.Option(
            "--keep", metavar="SHARE", help="Share of the attention weight that a head keeps, up to 1."
        ),
    ] = 0.99,
    sinks: Annotated[
        int, typer.Option("--sinks", metavar="N", help="First keys that every head keeps: 0, 1 or 4.")
    ] = 4,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Give the heads of a layer the same window.")
    ] = False,
    length: Annotated[
        int, typer.Option("--length", metavar="N", min=1, help="Context length for which sizes are printed.")
    ] = 8192,
    as_json: JsonOption = False,
) -> int:
    """Choose the window of each key/value head from a survey: how many of the latest keys it keeps in the cache."""
    printer = Printer(as_json)
    check_output(output, "policy make")
    from regard.survey import load as load_survey

    policy = load_survey(survey).cache_policy(keep, sinks, "layer" if by_layer else "kv_head")
    policy.save(output)
    printer.record(
        {
            "policy": str(output),
            "length": length,
            "bytes": policy.num_bytes(length),
            "saved": policy.savings(length),
            "windows": policy.windows.tolist(),
            "sinks": policy.sinks.tolist(),
        }
    )
    printer.print(f"{policy.summary(length)}\n{policy.table(length)!r}")
    printer.print(f"To verify it: regard policy verify MODEL {output} CORPUS", "dim")
    return 0


def verify(
    model: ModelName,
    policy: PolicyArgument,
    corpus: CorpusArgument,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write a page.")
    ] = None,
    bound: BoundOption = 0.01,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects",
            help="Also measure how much each head adds to the divergence; takes about 9 times as long.",
        ),
    ] = False,
    resume: ResumeOption = None,
    options: RunOptions,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Run documents with and without a policy, and compare the predictions.

    The exit code is 1 if they differ by more than the bound, or if the model no longer passes a synthetic test.
    """
    printer = Printer(as_json)
    check_output(output, "policy verify", show)
    from regard.policy import CachePolicy

    loaded, run = CachePolicy.load(policy), as_keywords(options)
    with show_progress(printer, model, [], _suggest_resume(resume)) as progress:
        result = loaded.verify(model, corpus, resume, bound=bound, effects=effects, progress=progress, **run)
    printer.print(str(result))
    if output is not None:
        save_page(printer, result.page(), output, show, result.summary)
    else:
        printer.record(result.summary)
    return 0 if result.holds else 1


def tighten(
    model: ModelName,
    policy: PolicyArgument,
    corpus: CorpusArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Policy to write.")
    ],
    *,
    bound: BoundOption = 0.01,
    max_rounds: Annotated[
        int, typer.Option("--max-rounds", metavar="N", min=1, help="Widen heads at most N times.")
    ] = 16,
    resume: ResumeOption = None,
    options: RunOptions,
    as_json: JsonOption = False,
) -> int:
    """Widen the windows of the heads that change the predictions most, until the change is within the bound."""
    printer = Printer(as_json)
    check_output(output, "policy tighten")
    from regard.policy import CachePolicy

    loaded, run = CachePolicy.load(policy), as_keywords(options)
    with show_progress(printer, model, [], _suggest_resume(resume)) as progress:
        result = loaded.tighten(bound, model, corpus, resume, max_rounds=max_rounds, progress=progress, **run)
    result.save(output)
    printer.record({"policy": str(output), **result.about["tightened"]})
    for change in result.about["tightened"]["changes"]:
        before, after = (
            f"{'full' if window < 0 else window} + {sinks}"
            for window, sinks in (change["before"], change["after"])
        )
        printer.print(f"layer {change['layer']}, kv head {change['kv_head']}: {before} -> {after}")
    printer.print(f"{result.summary()}\nwritten to {output}")
    return 0


def _suggest_resume(resume: Path | None) -> str:
    return "Pass --resume DIR to be able to resume." if resume is None else "Run the same command to resume."
