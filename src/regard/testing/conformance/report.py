"""The conformance report: a table of capabilities, and findings."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.findings import LINE_WIDTH, Finding, Findings
from regard.render.table import format_table
from regard.testing.conformance.convention import CallingConvention


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
        findings: What is wrong, the finding that explains most first. Their evidence has the smallest input.

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
    findings: Findings

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
            *textwrap.wrap(str(self.convention), LINE_WIDTH, initial_indent="  ", subsequent_indent="  "),
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
        head.append(format_table(rows, align="left", indent="  "))
        findings = [f"{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        return "\n\n".join(["\n".join(head), self.findings.summary, *findings])

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


def _to_record(finding: Finding) -> dict[str, Any]:
    evidence = {name: _to_plain(value) for name, value in finding.evidence.items()}
    arguments = {name: evidence[name] for name in ("query", "key", "value", "mask") if name in evidence}
    sizes = {"batch": 1, "heads": 1, **evidence["smallest input"]}
    return {
        "name": finding.kind, "severity": finding.severity, "message": finding.message, "hint": finding.hint,
        "if_intended": evidence.get("if intended", ""), "capabilities": evidence["capabilities"],
        "num_calls": evidence["calls"], "input": {**arguments, "kv_heads": sizes["heads"], **sizes},
        "actual": evidence["actual"], "expected": evidence["expected"],
    }  # fmt: skip


def _to_plain(value: Any) -> Any:
    """Return a value with NaN and inf, which JSON does not have, as text."""
    if isinstance(value, list):
        return [_to_plain(x) for x in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


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
