"""`regard compare`: run two models on a text, or read two recordings, and print where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.cli.model_commands import SEVERITY_STYLES, ModelOptions, run_model
from regard.cli.output import Printer, style_text


def compare(printer: Printer, first: ModelOptions, second: ModelOptions) -> int:
    """Print where two models part on a text.

    Args:
        printer: Prints the result.
        first: Model A and the text.
        second: Model B and the text.

    Returns:
        The exit code: 1 if the models differ by more than rounding.
    """
    recordings, tokens, records = [], [], []
    for options in (first, second):
        recording, ids, record = _load_run(printer, options)
        recordings.append(recording)
        tokens.append(ids)
        records.append(record)
    from regard.diagnosis.compare import NUMBERS, compare

    with printer.progress("Comparing"):
        comparison = compare(*recordings, tokens_a=tokens[0], tokens_b=tokens[1])
    printer.record({"a": records[0], "b": records[1], **comparison.as_dict()})
    printer.print(comparison.summary, "bold green" if comparison.agrees else "bold red")
    for note in comparison.notes:
        printer.print(note)
    if comparison.first is not None:
        title, *lines = str(comparison.first).split("\n")
        severity, _, message = title.partition(": ")
        printer.print()
        printer.print(style_text((f"{severity}: ", SEVERITY_STYLES["error"]), (message, "bold")))
        for line in lines:
            printer.print(style_text((line[:12], "dim"), line[12:]))
    printer.print()
    columns, rows = comparison.table_rows()
    numbers = [name for name in columns if name in ("layer", "call", *NUMBERS)]
    printer.table(columns, rows, bold="kind", right=numbers)
    return 0 if comparison.agrees else 1


def _load_run(printer: Printer, options: ModelOptions) -> tuple[Any, Any, dict[str, Any]]:
    """Run a model, or read a recording: the recording, its token ids (None if unknown), and a record for --json."""
    path = Path(options.model)
    if path.suffix == ".safetensors" and path.is_file():
        from regard.lens.recording import load_recording

        return load_recording(path), None, {"recording": str(path)}
    run = run_model(printer, options, "compare", values=True)
    return run.recording, run.text.ids, run.record
