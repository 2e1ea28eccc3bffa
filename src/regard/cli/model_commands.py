"""`regard doctor` and `heads`: run a model on a text and inspect its attention."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.files import read_text
from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.errors import ArgumentError, NotCapturedError
from regard.models import EncodedText, LoadedModel, load

if TYPE_CHECKING:
    from regard.findings import Severity
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
    from regard.diagnosis.doctor import doctor

    with printer.progress("Running experiments"):
        findings = doctor(
            run.model,
            run.text.ids[:, :MAX_EXPERIMENT_TOKENS],
            causal=causal or (False if bidirectional else None),
            tokens=run.text.tokens,
            recording=run.recording,
        )
    record = findings.as_dict()
    has_errors = bool(record["counts"]["error"])
    printer.record(run.record | record)
    printer.print(findings.summary, "bold red" if has_errors else "bold" if findings else "bold green")
    for finding in findings.group_layers():
        printer.print()
        title, *rest = str(finding).split("\n")
        severity, _, message = title.partition(": ")
        printer.print(style_text((f"{severity}: ", SEVERITY_STYLES[finding.severity]), (message, "bold")))
        for line in rest:
            printer.print(style_text((line[:12], "dim"), line[12:]))
    printer.print()
    for check in findings.checks:
        printer.print(str(check), "dim")
    return 1 if has_errors else 0


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
    for note in loaded.notes:
        printer.warn(note)
    warn_if_truncated(printer, text, options.max_tokens)
    total = loaded.num_chunks(text)
    recording, seconds = record_run(
        printer,
        loaded,
        options.layers,
        f"{len(text):,} tokens",
        lambda advance: _run_chunks(loaded, text, advance),
        total=total if total > 1 else None,
        values=values,
        # `doctor` reports layers that were not captured as a finding.
        accept_missed=command == "doctor",
    )
    print_run(printer, options.model, loaded, f"{len(text):,} tokens", recording, seconds)
    record = describe_run(loaded, recording, seconds) | {"tokens": len(text), "text_tokens": text.full_length}
    return ModelRun(loaded.model, text, recording, record)


def warn_if_truncated(printer: Printer, text: EncodedText, max_tokens: int | None) -> None:
    """Print a warning if a text was truncated, and by what.

    Args:
        printer: Prints the warning.
        text: The text.
        max_tokens: The limit of --max-tokens.
    """
    if len(text) < text.full_length:
        limit = "--max-tokens" if len(text) == max_tokens else "the model's maximum length"
        printer.warn(
            f"The text has {text.full_length:,} tokens; truncated to the first {len(text):,} ({limit})."
        )


def record_run(
    printer: Printer,
    loaded: LoadedModel,
    layers: tuple[str, ...],
    description: str,
    run: Callable[[Callable[[], None]], None],
    *,
    total: int | None = None,
    values: bool = False,
    accept_missed: bool = False,
) -> tuple[Recording, float]:
    """Run a model under the lens.

    Args:
        printer: Prints progress.
        loaded: The model.
        layers: Names of modules or patterns; empty for all.
        description: What it runs on, such as "12 tokens".
        run: Runs the model, and calls its argument after each step.
        total: Number of steps; None for one, whose progress is the layers that have run.
        values: Record values and outputs, too.
        accept_missed: Return the recording if some layers were not captured.

    Returns:
        The recording, and the seconds that the run took.

    Raises:
        NotCapturedError: If nothing was recorded, or a layer was not and `accept_missed` is False.
    """
    from regard.lens.watch import watch

    watcher = watch(loaded.model, layers=layers or None, values=values)
    watcher._warns_if_empty = False  # it is an error below
    start = time.perf_counter()
    recording: Any = None
    try:
        with watcher as recording:
            steps, count_done = (total, None) if total else (_count_layers(loaded), lambda: len(recording))
            with printer.progress(f"Running {description}", steps, count_done) as advance:
                run(advance)
    except NotCapturedError:
        if not accept_missed or not len(recording):
            raise
    if not len(recording):
        raise NotCapturedError(
            "watch",
            received=f"--layers {' '.join(layers)}, whose modules computed no attention",
            expected="modules that compute attention",
            hint="Omit --layers: regard heads then lists the names of all attention layers.",
        )
    return recording, time.perf_counter() - start


def print_run(
    printer: Printer, name: str, loaded: LoadedModel, description: str, recording: Recording, seconds: float
) -> None:
    """Print one line about a run: the model, what it ran on, layers, heads and time.

    Args:
        printer: Prints the line.
        name: The name that the user gave.
        loaded: The model.
        description: What it ran on, such as "12 tokens".
        recording: The recording.
        seconds: How long it took.
    """
    info = loaded.info
    count = sum(call.shape[-3] for module in recording for call in recording.calls(module))
    stored = ""
    if info.get("stored_dtype", info["dtype"]) != info["dtype"]:
        stored = f" (stored as {info['stored_dtype']})"
    printer.info(
        style_text(
            (name, "bold"),
            f": {info['class']}, {info['parameters']:,} parameters, {info['dtype']}{stored}; ",
            description, ", ", (f"{len(recording):,}", NUMBER_STYLE), " layer" + "s" * (len(recording) != 1), ", ",
            (f"{count:,}", NUMBER_STYLE), " head" + "s" * (count != 1), f", {seconds:.1f} s",
        )
    )  # fmt: skip


def describe_run(loaded: LoadedModel, recording: Recording, seconds: float) -> dict[str, Any]:
    """Return the facts about a run, for --json.

    Args:
        loaded: The model.
        recording: The recording.
        seconds: How long it took.

    Returns:
        The facts by name.
    """
    return {
        "model": {"name": loaded.name, **loaded.info},
        "notes": list(loaded.notes),
        "layers": len(recording),
        "seconds": seconds,
    }


def _run_chunks(loaded: LoadedModel, text: EncodedText, advance: Callable[[], None]) -> None:
    for _ in loaded.forward_chunks(text):
        advance()


def _count_layers(loaded: LoadedModel) -> int | None:
    """Return the number of layers by the configuration, for a progress bar; None if unknown."""
    count = getattr(getattr(loaded.model, "config", None), "num_hidden_layers", None)
    return count if isinstance(count, int) else None
