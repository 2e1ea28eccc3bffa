"""`regard doctor`, `heads`, `effects` and `compare`: run a model on a text and inspect its attention."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard.cli.files import read_text
from regard.cli.options import MODEL_HELP, JsonOption, ModelName, OpenOption, TextOptions
from regard.cli.output import NUMBER_STYLE, Printer, check_output, save_page, style_text
from regard.errors import ArgumentError, NotCapturedError
from regard.findings import Finding, Severity
from regard.jobs.options import WeightDtype
from regard.models import EncodedText, LoadedModel, load
from regard.pages.html import shorten_path

if TYPE_CHECKING:
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
class ModelRun:
    """A model after a recorded run on a text; `record` is for --json."""

    model: Any
    text: EncodedText
    recording: Recording
    record: dict[str, Any]


def doctor(
    model: ModelName,
    options: TextOptions,
    causal: Annotated[
        bool, typer.Option("--causal", help="The model must not attend to later tokens. Default: inferred.")
    ] = False,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="The model may attend to later tokens.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Find faults in the attention of a model: run it on a text and on modified copies of the text.

    Each finding has a hint. The exit code is 1 if any finding is an error.
    """
    printer = Printer(as_json)
    if causal and bidirectional:
        raise ArgumentError(
            "doctor",
            received="--causal and --bidirectional",
            expected="at most one of them",
            hint="Omit both to infer it from the masks.",
        )
    run = run_model(printer, model, options, "doctor")
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
        _print_finding(printer, finding)
    printer.print()
    for check in findings.checks:
        printer.print(str(check), "dim")
    return 1 if has_errors else 0


def _print_finding(printer: Printer, finding: Finding) -> None:
    printer.print()
    title, *lines = str(finding).split("\n")
    severity, _, message = title.partition(": ")
    printer.print(style_text((f"{severity}: ", SEVERITY_STYLES[finding.severity]), (message, "bold")))
    for line in lines:
        printer.print(style_text((line[:12], "dim"), line[12:]))


def heads(
    model: ModelName,
    options: TextOptions,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="MEASURE",
            help=f"Sort by one of {', '.join(COLUMNS[3:])}; largest first. Default: by layer.",
        ),
    ] = None,
    smallest: Annotated[bool, typer.Option("--smallest", help="With --by: smallest first.")] = False,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", "-n", metavar="N", min=1, help="Print N rows. Default: 20 in a terminal, else all."
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Print the measures of each head of a model on a text, such as entropy, distance and induction."""
    printer = Printer(as_json, as_csv)
    if by is not None and by not in COLUMNS:  # checked before the model runs
        raise ArgumentError(
            "heads", received=f"--by {by}", expected=f"one of {', '.join(COLUMNS)}", hint="Check the name."
        )
    run = run_model(printer, model, options, "heads", values=by == "contribution")
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
        printer.csv(table.columns, rows)
        return 0
    printer.record(run.record | {"heads": list(rows)})
    omitted = {"module"} | ({"call"} if not any(table.column("call")) else set())
    columns = [name for name in table.columns if name not in omitted]
    printer.table(columns, [[row[name] for name in columns] for row in rows], bold=by or "")
    if len(rows) < len(table):
        printer.print(f"… and {len(table) - len(rows):,} more heads: use --top, --by or --csv", "dim")
    return 0


def run_model(
    printer: Printer, model: str, options: TextOptions, command: str, *, values: bool = False
) -> ModelRun:
    """Load the model, encode the text, and record a run of the model on it, with values if requested."""
    loaded, text = load_model(printer, model, options, command)

    def run_chunks(advance: Callable[[], None]) -> str:
        for _ in loaded.forward_chunks(text):
            advance()
        return f"{len(text):,} tokens"

    recording, record = record_run(
        printer,
        loaded,
        options.layers,
        f"{len(text):,} tokens",
        run_chunks,
        loaded.num_chunks(text),
        values=values,
        # `doctor` reports layers that were not captured as a finding.
        accept_missed=command == "doctor",
    )
    record |= {"tokens": len(text), "text_tokens": text.full_length}
    return ModelRun(loaded.model, text, recording, record)


def load_model(
    printer: Printer, model: str, options: TextOptions, command: str
) -> tuple[LoadedModel, EncodedText]:
    """Load the model and encode the text."""
    content = read_text(options.text, options.file, command)
    with printer.progress(f"Loading {Path(model).name}"):
        loaded = load(model, trust_remote_code=options.trust_remote_code, dtype=options.dtype)
        text = loaded.encode(content, options.max_tokens)
    for note in loaded.notes:
        printer.warn(note)
    warn_if_truncated(printer, text, options.max_tokens)
    return loaded, text


def warn_if_truncated(printer: Printer, text: EncodedText, max_tokens: int | None) -> None:
    """Print a warning if a text was truncated, and by what: --max-tokens or the model."""
    if len(text) < text.full_length:
        limit = "--max-tokens" if len(text) == max_tokens else "the model's maximum length"
        printer.warn(
            f"The text has {text.full_length:,} tokens; truncated to the first {len(text):,} ({limit})."
        )


def record_run(
    printer: Printer,
    loaded: LoadedModel,
    layers: list[str] | None,
    description: str,
    run: Callable[[Callable[[], None]], str],
    steps: int,
    *,
    values: bool = False,
    accept_missed: bool = False,
) -> tuple[Recording, dict[str, Any]]:
    """Record a run of a model, print one line about it, and return the recording and the facts for --json.

    `run` calls its argument after each step, and returns what the model ran on. The progress of a single step is the
    layers that have run.
    """
    from regard.lens.watch import watch

    watcher = watch(loaded.model, layers=layers or None, values=values)
    watcher._warns_if_empty = False  # it is an error below
    start = time.perf_counter()
    recording: Any = None
    try:
        with watcher as recording:
            total, count_done = (
                (steps, None) if steps > 1 else (_count_layers(loaded), lambda: len(recording))
            )
            with printer.progress(f"Running {description}", total, count_done) as advance:
                description = run(advance)
    except NotCapturedError:
        if not accept_missed or not len(recording):
            raise
    if not len(recording):
        raise NotCapturedError(
            "watch",
            received=f"--layers {' '.join(layers or ())}, which match no module that computes attention",
            expected="modules that compute attention",
            hint="Omit --layers: regard heads then lists the names of all attention layers.",
        )
    seconds = time.perf_counter() - start
    info = loaded.info
    count = sum(call.shape[-3] for module in recording for call in recording.calls(module))
    stored = ""
    if info.get("stored_dtype", info["dtype"]) != info["dtype"]:
        stored = f" (stored as {info['stored_dtype']})"
    printer.info(
        style_text(
            (loaded.name, "bold"),
            f": {info['class']}, {info['parameters']:,} parameters, {info['dtype']}{stored}; ",
            description, ", ", (f"{len(recording):,}", NUMBER_STYLE), " layer" + "s" * (len(recording) != 1), ", ",
            (f"{count:,}", NUMBER_STYLE), " head" + "s" * (count != 1), f", {seconds:.1f} s",
        )
    )  # fmt: skip
    return recording, {
        "model": {"name": loaded.name, **info},
        "notes": list(loaded.notes),
        "layers": len(recording),
        "seconds": seconds,
    }


def _count_layers(loaded: LoadedModel) -> int | None:
    """Return the number of layers by the configuration, for a progress bar; None if unknown."""
    count = getattr(getattr(loaded.model, "config", None), "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def effects(
    model: ModelName,
    options: TextOptions,
    answer: Annotated[
        str,
        typer.Option(
            "--answer",
            "-a",
            metavar="TEXT",
            show_default=False,
            help='Right continuation of the text, usually with a leading space: " mat". Only its first token is used.',
        ),
    ],
    wrong: Annotated[
        str | None,
        typer.Option(
            "--wrong", "-w", metavar="TEXT", help="Wrong answer to compare with. Default: all other tokens."
        ),
    ] = None,
    baseline: Annotated[
        Literal["zero", "mean"],
        typer.Option(
            "--baseline", help="What replaces the output of a head: zero, or its mean over the text."
        ),
    ] = "zero",
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            metavar="SPAN",
            help="Keep the head, but hide keys from it: a token, a position or a range of positions (3:8).",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", "-n", metavar="N", min=1, help="Print the N largest effects.")
    ] = 20,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PAGE", help="Also write a page with all heads.")
    ] = None,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure how much an answer depends on each head of a model.

    Each head is removed in turn. The table shows how much this changes the log-probability of the answer,
    or, with --wrong, the difference between the logits of the two answers.
    """
    printer = Printer(as_json)
    check_output(output, "effects", show)
    content = read_text(options.text, options.file, "effects")
    loaded, text = load_model(printer, model, replace(options, text=content, file=None), "effects")
    from regard.interventions import effects, logit_difference

    right = _find_id(loaded, content, answer)
    metric = logit_difference(right, None if wrong is None else _find_id(loaded, content, wrong))
    heads = _count_heads(loaded)
    with printer.progress("Editing heads", heads) as advance:
        table = effects(
            loaded.model,
            text.ids,
            metric,
            baseline=baseline,
            keys=_parse_span(keys),
            layers=options.layers or None,
            tokens=text.tokens,
            progress=advance,
        )
    record: dict[str, Any] = {
        "model": {"name": loaded.name, **loaded.info},
        "notes": list(loaded.notes),
        "tokens": len(text),
        "text_tokens": text.full_length,
        "metric": table.metric,
        "edit": table.edit,
        "clean": table.clean,
        "heads": list(table),
    }
    ranked = sorted(table, key=lambda row: -abs(row["effect"]))[:top]
    printer.info(
        style_text(
            (model, "bold"), f": {table.metric} ", (f"{table.clean:.4g}", NUMBER_STYLE),
            f" on {len(text):,} tokens; one of {len(table):,} heads at a time: {table.edit}",
        )
    )  # fmt: skip
    columns = ["layer", "head", "metric", "effect"]
    printer.table(columns, [[row[name] for name in columns] for row in ranked], bold="effect")
    if output is None:
        printer.record(record)
        return 0
    save_page(printer, table.page(f"Effect of each head of {shorten_path(model)}"), output, show, record)
    return 0


def _find_id(loaded: LoadedModel, text: str, word: str) -> int:
    """Return the id of the first token of a word that follows a text, without special tokens."""
    tokenizer = loaded.tokenizer
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        ids = tokenizer.encode(word, add_special_tokens=False)
    else:  # the first token that the word changes: a tokenizer may begin each text with a token of its own
        before, after = (loaded.encode(given).ids[0].tolist() for given in (text, text + word))
        ids = [new for old, new in zip_longest(before, after) if old != new and new is not None]
    if not ids:
        raise ArgumentError(
            "effects",
            received=f"an answer {word!r} without tokens",
            expected="a word that the model can predict",
            hint="Begin it with a space if the text does not end with one: ' Paris'.",
        )
    return int(ids[0])


def _parse_span(keys: str | None) -> Any:
    """Return a position, a slice, or the text of a token."""
    if keys is None:
        return None
    bounds = keys.split(":")
    if len(bounds) <= 2 and all(bound.lstrip("-").isdigit() or not bound for bound in bounds) and any(bounds):
        numbers = [int(bound) if bound else None for bound in bounds]
        return numbers[0] if len(numbers) == 1 else slice(*numbers)
    return keys


def _count_heads(loaded: LoadedModel) -> int | None:
    """Return the number of heads by the configuration, for a progress bar; None if unknown."""
    config = getattr(loaded.model, "config", None)
    counts = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")]
    return counts[0] * counts[1] if all(isinstance(count, int) for count in counts) else None  # type: ignore[operator]


def compare(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_A",
            show_default=False,
            help=f"{MODEL_HELP} Or a file written by recording.save.",
        ),
    ],
    other: Annotated[
        str, typer.Argument(metavar="MODEL_B", show_default=False, help="The model to compare with MODEL_A.")
    ],
    options: TextOptions,
    other_dtype: Annotated[
        WeightDtype | None,
        typer.Option("--dtype-b", help="Dtype of the weights of MODEL_B. Default: the same as --dtype."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run two models on a text, and find the first layer or module where they diverge, and why.

    The exit code is 1 if they diverge. Rounding differences are ignored.
    """
    printer = Printer(as_json)
    other_options = replace(options, dtype=other_dtype or options.dtype)
    recording_a, tokens_a, record_a = _load_run(printer, model, options)
    recording_b, tokens_b, record_b = _load_run(printer, other, other_options)
    from regard.diagnosis.compare import NUMBERS, compare

    with printer.progress("Comparing"):
        comparison = compare(recording_a, recording_b, tokens_a=tokens_a, tokens_b=tokens_b)
    printer.record({"a": record_a, "b": record_b, **comparison.as_dict()})
    printer.print(comparison.summary, "bold green" if comparison.agrees else "bold red")
    for note in comparison.notes:
        printer.print(note)
    if comparison.first is not None:
        _print_finding(printer, comparison.first)
    printer.print()
    columns, rows = comparison.table_rows()
    numbers = [name for name in columns if name in ("layer", "call", *NUMBERS)]
    printer.table(columns, rows, bold="kind", right=numbers)
    return 0 if comparison.agrees else 1


def _load_run(printer: Printer, model: str, options: TextOptions) -> tuple[Any, Any, dict[str, Any]]:
    """Run a model, or read a recording: the recording, its token ids (None if unknown), and a record for --json."""
    path = Path(model)
    if path.suffix == ".safetensors" and path.is_file():
        from regard.lens.recording import load_recording

        return load_recording(path), None, {"recording": str(path)}
    run = run_model(printer, model, options, "compare", values=True)
    return run.recording, run.text.ids, run.record
