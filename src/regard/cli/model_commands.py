"""`regard look`, `doctor` and `heads`: a model, a text, and what its attention did."""

from __future__ import annotations

import csv
import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.cli.explain_commands import check_place, written
from regard.cli.files import text_of
from regard.cli.output import NUMBER, Out, styled
from regard.errors import ArgumentError
from regard.models import EncodedText, LoadedModel, load
from regard.render.text import escape_unprintable

SHOWN = 20
BY = (
    *(
        "layer",
        "call",
        "head",
        "entropy",
        "first",
        "previous",
        "distance",
        "within_16",
        "within_128",
        "heavy",
    ),
    *("duplicate", "induction"),
)
COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True)
class Asked:
    """What was asked of a model on the command line."""

    model: str
    text: str | None
    file: Path | None
    layers: tuple[str, ...]
    max_tokens: int | None
    dtype: str | None
    trust: bool


@dataclass(frozen=True)
class Ran:
    """A model that has read a text under the lens."""

    opened: LoadedModel
    text: EncodedText
    recording: Any
    record: dict[str, Any]


def look(out: Out, asked: Asked, output: Path, show: bool) -> int:
    """Write the page of a model on a text."""
    check_place(output, "look")
    ran = _run(out, asked, "look")
    with out.busy("Making the page"):
        # A page is mailed: of a folder's path it tells the end only.
        name = "/".join(Path(asked.model).parts[-2:]).strip("/")
        page = ran.recording.page(
            ran.text.tokens, title=f"{escape_unprintable(name)} on {len(ran.text):,} tokens"
        )
    written(out, page, output, show, ran.record)
    return 0


def doctor(out: Out, asked: Asked) -> int:
    """Print what looks wrong; 1 where something is."""
    ran = _run(out, asked, "doctor")
    with out.busy("Examining"):
        findings = ran.recording.diagnose(ran.text.tokens)
    errors = len(findings.by_severity("error"))
    counts = {severity: len(findings.by_severity(severity)) for severity in COLOURS}
    out.record(
        ran.record
        | {"scope": findings.scope, "counts": counts, "findings": [each.as_dict() for each in findings]}
    )
    first, *blocks = repr(findings).split("\n\n")
    out.say(first, "bold red" if errors else "bold" if findings else "bold green")
    for finding, block in zip(findings, blocks, strict=True):
        out.say()
        head, *rest = block.split("\n")
        severity, _, words = head.partition(": ")
        out.say(styled((f"{severity}: ", COLOURS[finding.severity]), (words, "bold")))
        for line in rest:
            out.say(styled((line[:12], "dim"), line[12:]))
    return 1 if errors else 0


def heads(out: Out, asked: Asked, by: str | None, smallest: bool, top: int | None) -> int:
    """Print the table of heads."""
    if out.as_csv and out.as_json:
        raise ArgumentError(
            "heads", received="--csv and --json", expected="one of them", hint="Leave one out."
        )
    if by is not None and by not in BY:  # known before the model has run
        raise ArgumentError(
            "heads", received=f"--by {by}", expected=f"one of {', '.join(BY)}", hint="Check the name."
        )
    ran = _run(out, asked, "heads")
    with out.busy("Measuring the heads"):
        table = ran.recording.heads(ran.text.ids)
    if by is not None:
        table = table.sort(by, largest_first=not smallest)
    everything = not out.for_people or not sys.stdout.isatty()
    rows = table[: top or (len(table) if everything else SHOWN)]
    if out.as_csv:
        lines = io.StringIO()
        writer = csv.DictWriter(lines, table.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        out.write(lines.getvalue())
        return 0
    out.record(ran.record | {"heads": rows})
    dropped = {"module"} | ({"call"} if not any(table.column("call")) else set())
    columns = [name for name in table.columns if name not in dropped]
    out.table(columns, [[row[name] for name in columns] for row in rows], bold=by or "")
    if len(rows) < len(table):
        out.say(f"… and {len(table) - len(rows):,} more heads: --top, --by, --csv", "dim")
    return 0


def _run(out: Out, asked: Asked, command: str) -> Ran:
    """The model opened, the text read, and the model run on it under the lens."""
    words = text_of(asked.text, asked.file, command)
    with out.busy(f"Opening {Path(asked.model).name}"):
        opened = load(asked.model, trust_remote_code=asked.trust, dtype=asked.dtype)
        text = opened.encode(words, asked.max_tokens)
    about = opened.info
    for note in opened.notes:
        out.note(note)
    if len(text) < text.full_length:
        limit = "--max-tokens" if len(text) == asked.max_tokens else "as many as the model has positions for"
        out.note(f"The text has {text.full_length:,} tokens; the first {len(text):,} are read, {limit}.")
    from regard.errors import NotCapturedError
    from regard.lens.watch import watch

    watching = watch(opened.model, layers=asked.layers or None)
    start = time.perf_counter()
    steps = opened.num_chunks(text)
    recording: Any = None
    try:
        with watching as recording:
            # Of one step the layers that have run are counted, of several the steps.
            total, done = (steps, None) if steps > 1 else (_layers(opened), lambda: len(recording))
            with out.busy(f"Reading {len(text):,} tokens", total, done) as step:
                for _ in opened.forward_chunks(text):
                    step()
    except NotCapturedError:
        # The doctor tells it as a finding, among the others.
        if command != "doctor" or not len(recording):
            raise
    seconds = time.perf_counter() - start
    calls = [call for name in recording for call in recording.calls(name)]
    count = sum(call.shape[-3] for call in calls)
    stored = (
        f" (stored as {about['stored_dtype']})"
        if about.get("stored_dtype", about["dtype"]) != about["dtype"]
        else ""
    )
    out.aside(
        styled(
            (asked.model, "bold"),
            f": {about['class']}, {about['parameters']:,} parameters, {about['dtype']}{stored}; ",
            (f"{len(text):,}", NUMBER), " tokens, ", (f"{len(recording):,}", NUMBER), " layers, ",
            (f"{count:,}", NUMBER), f" heads, {seconds:.1f} s",
        )
    )  # fmt: skip
    record: dict[str, Any] = {"model": {"name": opened.name, **about}, "notes": list(opened.notes)}
    record |= {
        "tokens": len(text),
        "text_tokens": text.full_length,
        "layers": len(recording),
        "seconds": seconds,
    }
    return Ran(opened, text, recording, record)


def _layers(opened: LoadedModel) -> int | None:
    """How many layers the model says it has, for a bar."""
    count = getattr(getattr(opened.model, "config", None), "num_hidden_layers", None)
    return count if isinstance(count, int) else None
