"""`regard look`, `doctor` and `heads`: run a model on a text and inspect its attention."""

from __future__ import annotations

import csv
import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.files import read_text
from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.cli.page_files import check_output, save_page
from regard.errors import ArgumentError, NotCapturedError
from regard.models import EncodedText, LoadedModel, load
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.lens.analysis.finding import Severity
    from regard.lens.recording import Recording

# Rows of the table in a terminal.
MAX_ROWS = 20
# Tokens of the text that the experiments of `doctor` repeat; the recording is of all.
MAX_EXPERIMENT_TOKENS = 512
COLUMNS = (
    *("layer", "call", "head", "entropy", "first", "previous", "distance", "within_16", "within_128", "heavy"),
    *("duplicate", "induction", "contribution"),
)  # fmt: skip
SEVERITY_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True)
class ModelOptions:
    """The arguments of a command that runs a model on a text."""

    model: str
    text: str | None
    file: Path | None
    layers: tuple[str, ...]
    max_tokens: int | None
    dtype: str | None
    trust: bool


@dataclass(frozen=True)
class ModelRun:
    """A model after a run on a text under the lens; `record` is for --json."""

    model: Any
    text: EncodedText
    recording: Recording
    record: dict[str, Any]


def look(printer: Printer, options: ModelOptions, output: Path, show: bool) -> int:
    """Write the page of a model on a text.

    Args:
        printer: Prints the result.
        options: The model and the text.
        output: File to write.
        show: Open the page in a browser.

    Returns:
        The exit code.
    """
    check_output(output, "look")
    run = run_model(printer, options, "look")
    with printer.progress("Building the page"):
        # Pages are shared, so the title has only the end of a folder's path.
        name = escape_unprintable("/".join(Path(options.model).parts[-2:]).strip("/"))
        page = run.recording.page(run.text.tokens, title=f"{name} on {len(run.text):,} tokens")
    save_page(printer, page, output, show, run.record)
    return 0


def doctor(printer: Printer, options: ModelOptions, causal: bool = False, bidirectional: bool = False) -> int:
    """Print the findings about a model on a text.

    Args:
        printer: Prints the result.
        options: The model and the text.
        causal: No token may attend to later ones.
        bidirectional: Tokens may attend to later ones. If neither is set, it is inferred.

    Returns:
        The exit code: 1 if a finding is an error.
    """
    if causal and bidirectional:
        raise ArgumentError(
            "doctor",
            received="--causal and --bidirectional",
            expected="at most one of them",
            hint="Omit both to infer it from the masks.",
        )
    run = run_model(printer, options, "doctor")
    from regard.lens.experiments.examination import doctor

    with printer.progress("Running experiments"):
        findings = doctor(
            run.model,
            run.text.ids[:, :MAX_EXPERIMENT_TOKENS],
            causal=causal or (False if bidirectional else None),
            tokens=run.text.tokens,
            recording=run.recording,
        )
    counts = {severity: len(findings.by_severity(severity)) for severity in SEVERITY_STYLES}
    printer.record(
        run.record
        | {
            "scope": findings.scope,
            "counts": counts,
            "findings": [finding.as_dict() for finding in findings],
        }
    )
    summary, *blocks = repr(findings).split("\n\n")
    printer.print(summary, "bold red" if counts["error"] else "bold" if findings else "bold green")
    for finding, block in zip(findings, blocks, strict=True):
        printer.print()
        title, *rest = block.split("\n")
        severity, _, message = title.partition(": ")
        printer.print(style_text((f"{severity}: ", SEVERITY_STYLES[finding.severity]), (message, "bold")))
        for line in rest:
            printer.print(style_text((line[:12], "dim"), line[12:]))
    return 1 if counts["error"] else 0


def heads(printer: Printer, options: ModelOptions, by: str | None, smallest: bool, top: int | None) -> int:
    """Print the table of heads.

    Args:
        printer: Prints the result.
        options: The model and the text.
        by: Column to sort by.
        smallest: Sort smallest first.
        top: Number of rows; by default 20 in a terminal, else all.

    Returns:
        The exit code.
    """
    if printer.as_csv and printer.as_json:
        raise ArgumentError(
            "heads", received="--csv and --json", expected="at most one of them", hint="Omit one."
        )
    if by is not None and by not in COLUMNS:  # checked before the model runs
        raise ArgumentError(
            "heads", received=f"--by {by}", expected=f"one of {', '.join(COLUMNS)}", hint="Check the name."
        )
    run = run_model(printer, options, "heads", values=by == "contribution")
    with printer.progress("Measuring the heads"):
        table = run.recording.heads(run.text.ids)
    if by is not None and table and by not in table.columns:
        raise ArgumentError(
            "heads",
            received=f"--by {by}, for a model whose output projections were not found",
            expected="layers whose output is the input of one linear layer",
            hint="Sort by another column.",
        )
    if by is not None:
        table = table.sort(by, largest_first=not smallest)
    limited = printer.as_text and sys.stdout.isatty()
    rows = table[: top or (MAX_ROWS if limited else len(table))]
    if printer.as_csv:
        lines = io.StringIO()
        writer = csv.DictWriter(lines, table.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        printer.write(lines.getvalue())
        return 0
    printer.record(run.record | {"heads": list(rows)})
    omitted = {"module"} | ({"call"} if not any(table.column("call")) else set())
    columns = [name for name in table.columns if name not in omitted]
    printer.table(columns, [[row[name] for name in columns] for row in rows], bold=by or "")
    if len(rows) < len(table):
        printer.print(f"… and {len(table) - len(rows):,} more heads: use --top, --by or --csv", "dim")
    return 0


def run_model(printer: Printer, options: ModelOptions, command: str, *, values: bool = False) -> ModelRun:
    """Load the model, encode the text, and run the model on it under the lens.

    Args:
        printer: Prints progress, warnings, and one line about the run.
        options: The model and the text.
        command: Name of the command, for errors.
        values: Record values and outputs, too.

    Returns:
        The run.
    """
    content = read_text(options.text, options.file, command)
    with printer.progress(f"Loading {Path(options.model).name}"):
        loaded = load(options.model, trust_remote_code=options.trust, dtype=options.dtype)
        text = loaded.encode(content, options.max_tokens)
    info = loaded.info
    for note in loaded.notes:
        printer.warn(note)
    if len(text) < text.full_length:
        limit = "--max-tokens" if len(text) == options.max_tokens else "the model's maximum length"
        printer.warn(
            f"The text has {text.full_length:,} tokens; truncated to the first {len(text):,} ({limit})."
        )
    from regard.lens.watch import watch

    watcher = watch(loaded.model, layers=options.layers or None, values=values)
    start = time.perf_counter()
    chunks = loaded.num_chunks(text)
    recording: Any = None
    try:
        with watcher as recording:
            # The bar counts chunks if there are several, else the layers that have run.
            total, count_done = (
                (chunks, None) if chunks > 1 else (_count_layers(loaded), lambda: len(recording))
            )
            with printer.progress(f"Running {len(text):,} tokens", total, count_done) as advance:
                for _ in loaded.forward_chunks(text):
                    advance()
    except NotCapturedError:
        # `doctor` reports layers that were not captured as a finding.
        if command != "doctor" or not len(recording):
            raise
    seconds = time.perf_counter() - start
    calls = [call for name in recording for call in recording.calls(name)]
    count = sum(call.shape[-3] for call in calls)
    stored = ""
    if info.get("stored_dtype", info["dtype"]) != info["dtype"]:
        stored = f" (stored as {info['stored_dtype']})"
    printer.info(
        style_text(
            (options.model, "bold"),
            f": {info['class']}, {info['parameters']:,} parameters, {info['dtype']}{stored}; ",
            (f"{len(text):,}", NUMBER_STYLE), " tokens, ", (f"{len(recording):,}", NUMBER_STYLE), " layers, ",
            (f"{count:,}", NUMBER_STYLE), f" heads, {seconds:.1f} s",
        )
    )  # fmt: skip
    record: dict[str, Any] = {
        "model": {"name": loaded.name, **info},
        "notes": list(loaded.notes),
        "tokens": len(text),
        "text_tokens": text.full_length,
        "layers": len(recording),
        "seconds": seconds,
    }
    return ModelRun(loaded.model, text, recording, record)


def _count_layers(loaded: LoadedModel) -> int | None:
    """Return the number of layers by the configuration, for a progress bar; None if unknown."""
    count = getattr(getattr(loaded.model, "config", None), "num_hidden_layers", None)
    return count if isinstance(count, int) else None
