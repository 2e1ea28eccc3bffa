"""`Comparison`: what `regard.compare` returns, as data and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from regard.findings import Finding, Findings
from regard.lens.table import Table
from regard.render.table import Alignment, format_table

NUMBERS = ("query", "key", "value", "weights", "output")
# Kinds of layers that do not differ in effect.
AGREEING = ("no difference", "rounding", "equivalent")
PRINTED_LAYERS = 40


@dataclass(frozen=True, repr=False)
class Comparison:
    """Where two runs part, and the differences of all layers.

    Args:
        findings: The differences that have a cause of their own, in the order of the layers.
        layers: A table with one row for each call: `layer`, `module_a`, `module_b`, `call`, `kind`, the relative
            differences of `query`, `key`, `value` and `output`, and `weights`, the mean share of weight that moved.
            NaN stands for what was not recorded or cannot be compared.
        notes: Remarks on what was compared, such as lengths that differ.
        output: Relative difference of the output of the model; NaN if it was not compared.
        missing_output: Why the output of the model was not compared; empty if it was.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> recordings = []
    >>> for _ in range(2):
    ...     with regard.watch(layer) as recording:
    ...         output = layer(torch.ones(1, 3, 8))
    ...     recordings.append(recording)
    >>> comparison = regard.compare(*recordings)
    >>> comparison.kind, comparison.first
    ('no difference', None)
    """

    findings: Findings
    layers: Table
    notes: tuple[str, ...] = ()
    output: float = math.nan
    missing_output: str = ""

    @property
    def first(self) -> Finding | None:
        """The first difference; None if the runs agree up to rounding."""
        return self.findings[0] if self.findings else None

    @property
    def kind(self) -> str:
        """The kind of the first difference, or "no difference", "rounding" or "equivalent"."""
        if self.first is not None:
            return self.first.kind
        kinds = set(self.layers.column("kind")) | ({"rounding"} if self.output > 0 else set())
        return next((kind for kind in reversed(AGREEING) if kind in kinds), "no difference")

    @property
    def agrees(self) -> bool:
        """Whether the runs agree up to rounding."""
        return self.first is None

    @property
    def summary(self) -> str:
        """The result in one line."""
        count = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        if self.first is not None:
            place = (
                f"layer {self.first.layer}" if self.first.layer >= 0 else self.first.module or "the output"
            )
            if self.first.kind in ("module", "NaN or inf") and self.first.module:
                place = self.first.module
            return f"The runs part in {place}: {self.kind}."
        count, rest = (
            (count, f"; {self.missing_output}") if self.missing_output else (f"{count} and the output", "")
        )
        if self.kind == "no difference":
            return f"No difference in {count}{rest}."
        sizes = [row[name] for row in self.layers for name in ("query", "key", "value", "output")]
        largest = max((size for size in (*sizes, self.output) if not math.isnan(size)), default=0.0)
        if self.kind == "rounding":
            return f"No difference but rounding in {count}, at most {largest:.1g} of a row's norm{rest}."
        return f"No difference in effect in {count}: queries and keys differ, their scores agree{rest}."

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON."""
        return {
            "kind": self.kind,
            "agrees": self.agrees,
            "first": None if self.first is None else self.first.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": list(self.notes),
            "output": None if math.isnan(self.output) else self.output,
            "layers": [dict(row) for row in self.layers],
        }

    def table_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the table as texts: the names of its columns, and its rows.

        Modules of run B are left out if they have the names of run A, and columns that are empty.
        """
        rows = self.layers
        same = all(row["module_a"] == row["module_b"] for row in rows)
        columns = ["layer", "module_a", *([] if same else ["module_b"])]
        columns += ["call"] if any(rows.column("call")) else []
        numbers = [name for name in NUMBERS if not all(math.isnan(row[name]) for row in rows)]
        texts = [
            [str(row[name]) for name in columns]
            + [row["kind"]]
            + [_format_size(row[name]) for name in numbers]
            for row in rows
        ]
        headers = ["module" if same and name == "module_a" else name for name in columns]
        return [*headers, "kind", *numbers], texts

    def __repr__(self) -> str:
        parts = [self.summary, *self.notes]
        blocks = ["\n".join(parts), *map(str, self.findings[:1])]
        headers, rows = self.table_rows()
        if rows:
            align: list[Alignment] = [
                "left" if name in ("module", "module_a", "module_b", "kind") else "right" for name in headers
            ]
            text = format_table(rows[:PRINTED_LAYERS], headers, align=align)
            more = len(rows) - PRINTED_LAYERS
            blocks.append(f"{text}\n… and {more:,} more layers" if more > 0 else text)
        others = self.findings[1:]
        if others:
            lines = [f"  {finding.where}: {finding.kind}. {finding.message}" for finding in others[:8]]
            more_text = [f"  … and {len(others) - 8} more"] if len(others) > 8 else []
            blocks.append("\n".join(["More differences:", *lines, *more_text]))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        from regard.render import notebook

        headers, rows = self.table_rows()
        is_text = [name in ("module", "module_a", "module_b", "kind") for name in headers]
        items = [finding._item() for finding in self.findings[: notebook.MAX_ROWS]]
        findings = notebook.render_findings(" ".join([self.summary, *self.notes]), items)
        more = len(rows) - notebook.MAX_ROWS
        closing = f"… and {more:,} more layers" if more > 0 else ""
        return findings + notebook.render_table("", headers, rows[: notebook.MAX_ROWS], is_text, closing)


def _format_size(size: float) -> str:
    """Format a relative difference: two digits, "0" if there is none, a dash if it is unknown."""
    if math.isnan(size):
        return "–"
    return "0" if size == 0 else f"{size:.1e}" if size < 0.01 else f"{size:.2g}"
