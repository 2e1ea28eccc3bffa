"""The conformance report: a table of capabilities, and findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.render.table import format_table
from regard.testing.conformance.convention import CallingConvention
from regard.testing.conformance.finding import (
    ConformanceFinding,
    format_finding,
    list_arguments,
    wrap_text,
)


@dataclass(frozen=True)
class Capability:
    """One row of the report: whether a function handles one kind of call.

    Args:
        name: The name of the row.
        verdict: "yes", "no", "raises" if the failures are errors or wrong shapes, or "skipped".
        num_calls: The number of calls.
        max_error: The largest error of the output, where it is finite on both sides.
        reason: The numbers of its findings, or why it was skipped.

    >>> import regard
    >>> from regard.testing import check_conformance
    >>> report = check_conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> [row.verdict for row in report.capabilities][:3]
    ['no', 'no', 'no']
    """

    name: str
    verdict: str
    num_calls: int
    max_error: float
    reason: str


@dataclass(frozen=True)
class ConformanceReport:
    """The result of `check_conformance`.

    Args:
        function: The name of the function.
        convention: How it was called.
        size: "quick" or "full".
        capabilities: The rows of the table.
        findings: What is wrong, the finding that explains most first.

    >>> import regard
    >>> from regard.testing import check_conformance
    >>> report = check_conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> report.ok
    False
    """

    function: str
    convention: CallingConvention
    size: str
    capabilities: tuple[Capability, ...]
    findings: tuple[ConformanceFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def check(self) -> None:
        """Raise an AssertionError with the report, if there are findings."""
        if not self.ok:
            raise AssertionError(str(self))

    def __getitem__(self, capability: str) -> Capability:
        rows = {row.name: row for row in self.capabilities}
        if capability not in rows:
            raise ArgumentError(
                "ConformanceReport", received=f"the capability {capability!r}", expected=f"one of {'; '.join(rows)}",
                hint="The names are the rows of print(report).",
            )  # fmt: skip
        return rows[capability]

    def __str__(self) -> str:
        num_calls = sum(row.num_calls for row in self.capabilities)
        head = [
            f"{self.function}: {num_calls} calls, size {self.size}",
            *wrap_text(str(self.convention), "  "),
            "",
        ]
        rows = [("capability", "", "calls", "max error", "")]
        rows += [
            (
                row.name, row.verdict, str(row.num_calls) if row.num_calls else "",
                f"{row.max_error:.1e}" if np.isfinite(row.max_error) else "", row.reason,
            )
            for row in self.capabilities
        ]  # fmt: skip
        findings = [
            line
            for number, finding in enumerate(self.findings, 1)
            for line in ["", *format_finding(finding, f"{number}. ")]
        ]
        count = {0: "No findings.", 1: "One finding."}.get(
            len(self.findings), f"{len(self.findings)} findings."
        )
        return "\n".join([*head, format_table(rows, align="left", indent="  "), "", count, *findings])

    def to_json(self) -> str:
        """Return the report as JSON, for scripts."""
        record = {
            "function": self.function,
            "convention": {
                name: getattr(self.convention, name) for name in self.convention.__dataclass_fields__
            },
            "size": self.size,
            "ok": self.ok,
            "capabilities": [
                {**vars(row), "max_error": row.max_error if np.isfinite(row.max_error) else None}
                for row in self.capabilities
            ],
            "findings": [_to_record(finding) for finding in self.findings],
        }
        return json.dumps(record, indent=2, ensure_ascii=False)


def _to_record(finding: ConformanceFinding) -> dict[str, Any]:
    actual = finding.actual if isinstance(finding.actual, str) else _to_plain(finding.actual.output)
    arguments = {name: _to_plain(value) for name, value in list_arguments(finding.call)}
    return {
        "name": finding.name, "message": finding.message, "hint": finding.hint, "if_intended": finding.if_intended,
        "capabilities": list(finding.capabilities), "num_calls": finding.num_calls,
        "input": {**arguments, **finding.call.sizes},
        "actual": actual, "expected": _to_plain(finding.expected.output),
    }  # fmt: skip


def _to_plain(value: Any) -> Any:
    """Convert arrays to lists of numbers; NaN and inf, which JSON does not have, become text."""
    if isinstance(value, np.ndarray):
        return [_to_plain(x) for x in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else str(float(value))
    return value.item() if isinstance(value, np.generic) else value


def format_markdown(names: Sequence[str], reports: Sequence[ConformanceReport]) -> str:
    """Format reports side by side as a Markdown table, one row for each capability.

    Args:
        names: The heading of each report.
        reports: The reports.
    """
    rows = dict.fromkeys(row.name for report in reports for row in report.capabilities)
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for name in rows:
        cells = [_format_cell(report[name]) for report in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_cell(row: Capability) -> str:
    if row.verdict == "skipped":
        return "·"
    error = f" {row.max_error:.0e}" if row.verdict == "yes" and np.isfinite(row.max_error) else ""
    reason = f" ({row.reason})" if row.verdict != "yes" and row.reason else ""
    return f"{row.verdict}{error}{reason}"
