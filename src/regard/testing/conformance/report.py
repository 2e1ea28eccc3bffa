"""The report: a table of capabilities, and findings in words."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.render.table import format_table
from regard.render.text import format_number
from regard.testing.conformance.attention_call import Call
from regard.testing.conformance.attention_steps import Answer
from regard.testing.conformance.convention import Convention
from regard.testing.conformance.diagnosis import Finding

WIDTH = 88


@dataclass(frozen=True)
class Capability:
    """One row of the table: how a function does with one kind of call.

    >>> import regard
    >>> from regard.testing import conformance
    >>> report = conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> [row.verdict for row in report.capabilities][:3]
    ['no', 'no', 'no']
    """

    name: str
    verdict: str  # "yes", "no", "refused" or "not asked"
    asked: int
    error: float  # the largest of the output, where it is finite on both sides
    why: str  # the numbers of its findings, or why it was not asked


@dataclass(frozen=True)
class Report:
    """What the kit has to say of a function; `ok` where there is no finding.

    >>> import regard
    >>> from regard.testing import conformance
    >>> report = conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> report.ok
    False
    """

    function: str
    convention: Convention
    size: str
    capabilities: tuple[Capability, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def check(self) -> None:
        """Pass where nothing was found; else an AssertionError with the words."""
        if not self.ok:
            raise AssertionError(str(self))

    def __getitem__(self, capability: str) -> Capability:
        rows = {row.name: row for row in self.capabilities}
        if capability not in rows:
            raise ArgumentError(
                "Report", received=f"the capability {capability!r}", expected=f"one of {'; '.join(rows)}",
                hint="They are the rows of print(report).",
            )  # fmt: skip
        return rows[capability]

    def __str__(self) -> str:
        asked = sum(row.asked for row in self.capabilities)
        head = [
            f"{self.function}: {asked} calls, size {self.size}",
            *_wrapped(str(self.convention), "  "),
            "",
        ]
        rows = [("capability", "", "calls", "max error", "")]
        rows += [
            (
                row.name, row.verdict, str(row.asked) if row.asked else "",
                f"{row.error:.1e}" if np.isfinite(row.error) else "", row.why,
            )
            for row in self.capabilities
        ]  # fmt: skip
        found = [
            line for at, finding in enumerate(self.findings, 1) for line in ["", *told(finding, f"{at}. ")]
        ]
        count = {0: "No findings.", 1: "One finding."}.get(
            len(self.findings), f"{len(self.findings)} findings."
        )
        return "\n".join([*head, format_table(rows, align="left", indent="  "), "", count, *found])

    def to_json(self) -> str:
        """The whole report for scripts."""
        record = {
            "function": self.function,
            "convention": {
                name: getattr(self.convention, name) for name in self.convention.__dataclass_fields__
            },
            "size": self.size,
            "ok": self.ok,
            "capabilities": [
                {**vars(row), "error": row.error if np.isfinite(row.error) else None}
                for row in self.capabilities
            ],
            "findings": [_record(finding) for finding in self.findings],
        }
        return json.dumps(record, indent=2, ensure_ascii=False)


def _record(finding: Finding) -> dict[str, Any]:
    came = finding.came if isinstance(finding.came, str) else _plain(finding.came.output)
    return {
        "name": finding.name, "words": finding.words, "hint": finding.hint, "meant": finding.meant,
        "capabilities": list(finding.capabilities), "calls": finding.count,
        "input": {**{name: _plain(value) for name, value in _arguments(finding.call)}, **finding.call.sizes},
        "came": came, "expected": _plain(finding.expected.output),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Lists of numbers; what JSON has no number for is text."""
    if isinstance(value, np.ndarray):
        return [_plain(x) for x in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else str(float(value))
    return value.item() if isinstance(value, np.generic) else value


def _arguments(call: Call) -> list[tuple[str, Any]]:
    """What the smallest input is made of, as far as it says something."""
    options = [("mask", call.mask), ("causal", call.causal), ("scale", call.scale)]
    arrays = [("query", call.query), ("key", call.key), ("value", call.value)]
    return arrays + [(name, value) for name, value in options if value is not None]


def told(finding: Finding, number: str = "") -> list[str]:
    """A finding as lines."""
    lines = _wrapped(f"{number}{finding.words}", "   ", first="")
    lines += _wrapped(f"{finding.hint} {finding.meant}", "   ")
    calls = "one call" if finding.count == 1 else f"{finding.count} calls"
    lines += _wrapped(f"Recording in {calls}: {'; '.join(finding.capabilities)}.", "   ")
    call = finding.call
    usual = {"batch": 1, "heads": 1, "kv_heads": call.sizes["heads"]}
    sizes = ", ".join(f"{name} {n}" for name, n in call.sizes.items() if usual.get(name) != n)
    lines += _wrapped(f"Smallest input: {sizes}, {call.dtype}", "   ")
    rows = [(name, _short(value)) for name, value in _arguments(call)]
    came = finding.came if isinstance(finding.came, str) else _short(finding.came.output)
    rows += [("came", textwrap.shorten(came, WIDTH - 20, placeholder=" …"))]
    rows += [("expected", _short(finding.expected.output))]
    if isinstance(finding.came, Answer):
        rows += _apart(finding.came, finding.expected)
    return [*lines, *format_table(rows, align="left", indent="     ").split("\n")]


def _apart(came: Answer, expected: Answer) -> list[tuple[str, str]]:
    """Weights and gradients, where the outputs alone do not show it."""
    same = came.output.shape == expected.output.shape and np.allclose(
        came.output.astype(float), expected.output.astype(float), rtol=1e-3, atol=1e-3, equal_nan=True
    )
    if not same:
        return []
    rows = []
    if came.weights is not None and came.gradients is None:
        rows += [("weights", _short(came.weights)), ("… expected", _short(expected.weights))]
    if came.gradients is not None:
        for name, found, right in zip(
            ("query", "key", "value"), came.gradients, expected.gradients, strict=True
        ):
            rows += [(f"gradient of {name}", _short(found)), ("… expected", _short(right))]
    return rows


def _short(value: Any) -> str:
    """A small array in brackets, leading axes of one left out; a large one by its shape."""
    if not isinstance(value, np.ndarray):
        return str(value)
    while value.ndim > 2 and value.shape[0] == 1:
        value = value[0]
    if value.size > 24:
        return f"an array of shape {value.shape}"
    return _brackets(value)


def _brackets(value: Any) -> str:
    if value.ndim:
        return "[" + ", ".join(_brackets(x) for x in value) + "]"
    return str(bool(value)) if value.dtype == bool else format_number(float(value) + 0.0)  # −0 + 0 is 0


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent,
        break_on_hyphens=False,
    )  # fmt: skip


def table(names: Sequence[str], reports: Sequence[Report]) -> str:
    """Reports side by side as a Markdown table, a row for each capability."""
    rows = dict.fromkeys(row.name for report in reports for row in report.capabilities)
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for name in rows:
        cells = [_cell(report[name]) for report in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Capability) -> str:
    if row.verdict == "not asked":
        return "·"
    error = f" {row.error:.0e}" if row.verdict == "yes" and np.isfinite(row.error) else ""
    why = f" ({row.why})" if row.verdict != "yes" and row.why else ""
    return f"{row.verdict}{error}{why}"
