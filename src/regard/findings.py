"""`Finding`, `Findings` and `Check`: what `diagnose`, `doctor`, `compare` and the conformance kit report.

A new check is one `Check` in the table of its command.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from regard.render.text import format_number

T = TypeVar("T")

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
LINE_WIDTH = 92  # fits a terminal and a page
MAX_ENTRIES = 24  # of an array that is printed
MAX_MODULES = 4  # that have the same finding, and are named
MAX_INLINE = 40  # characters of a text of the evidence that is printed on one line with others


@dataclass(frozen=True)
class Finding:
    """One problem, with its severity, its location, the evidence and a hint for fixing it.

    Args:
        kind: Short name of the problem, such as "weight on padding".
        severity: "error", "warning" or "note".
        message: One sentence that describes the problem.
        module: Name of the module or function; empty for the whole model.
        layer: Number of the attention layer, from 0; −1 for none.
        heads: The affected heads, from 0; empty means all.
        rows: The affected query rows; empty means all.
        batch: The affected batch entries; empty means all.
        evidence: The measured numbers by name. Each list, mapping or long text is printed on a separate line.
        hint: How to fix the problem.

    >>> from regard.lens import Finding
    >>> print(Finding("dropout", "error", "Dropout is active in eval mode.", "model.layers.3.self_attn", 3,
    ...               evidence={"dropout_p": 0.1}, hint="Pass dropout_p=0.0 unless self.training."))
    error: dropout. Dropout is active in eval mode.
      where     layer 3, model.layers.3.self_attn
      evidence  dropout_p 0.1
      hint      Pass dropout_p=0.0 unless self.training.
    """

    kind: str
    severity: Severity
    message: str
    module: str = ""
    layer: int = -1
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON or a data frame."""
        return asdict(self)

    @property
    def where(self) -> str:
        """The location as text: layer, module, heads, rows and batch entries."""
        where = [f"layer {self.layer}"] if self.layer >= 0 else []
        where += [self.module] if self.module else []
        where = where or ["the whole model"]
        for word, numbers in (("head", self.heads), ("row", self.rows), ("batch entry", self.batch)):
            if numbers:
                where.append(format_numbers(word, numbers))
        return ", ".join(where)

    @property
    def evidence_text(self) -> str:
        """The evidence as text."""
        return _format_value(self.evidence)

    def __str__(self) -> str:
        lines = _wrap(f"{self.severity}: {self.kind}. {self.message}", "", "  ")
        details = self._details()
        width = max(8, *map(len, details)) + 2
        for word, text in details.items():
            lines += _wrap(text, f"  {word:{width}}", " " * (width + 2))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from regard.render import notebook

        return notebook.render_findings("", [self._item()])

    def _item(self) -> Any:
        from regard.render.notebook import FindingItem

        return FindingItem(self.severity, self.kind, self.message, self._details())

    def _details(self) -> dict[str, str]:
        """Return location, evidence and hint, without those that are empty, then the long entries of the evidence."""
        long = {name: _format_value(value) for name, value in self.evidence.items() if _is_long(value)}
        short = {name: value for name, value in self.evidence.items() if name not in long}
        lines = {"where": self.where, "evidence": _format_value(short), "hint": self.hint, **long}
        return {word: text for word, text in lines.items() if text}


@dataclass(frozen=True)
class CheckRun:
    """One check or experiment: whether it was run, and if not, why.

    Args:
        name: What was checked, such as "padding on the left".
        reason: Why it was not run; empty if it was.

    >>> from regard.lens import CheckRun
    >>> print(CheckRun("padding", "no attention_mask was passed"))
    not run  padding: no attention_mask was passed
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"not run  {self.name}: {self.reason}" if self.reason else f"run      {self.name}"


@dataclass(frozen=True)
class Check(Generic[T]):
    """One entry of a table of checks.

    Args:
        name: What is checked.
        find: Returns the findings about a subject, one of them, or None. A subject is a layer, a recording, a model.
        why_not: Returns why the subject cannot be checked; empty if it can.

    >>> from regard.findings import Check, Finding, run_check
    >>> is_odd = Check("odd", lambda n: [Finding("odd", "error", "The number is odd.")] * (n % 2))
    >>> findings, run = run_check(is_odd, 3)
    >>> findings[0].kind, str(run)
    ('odd', 'run      odd')
    """

    name: str
    find: Callable[[T], Finding | Iterable[Finding] | None]
    why_not: Callable[[T], str] = lambda subject: ""


def run_check(check: Check[T], subject: T) -> tuple[list[Finding], CheckRun]:
    """Run a check, unless its subject cannot be checked; return the findings, and whether it was run."""
    reason = check.why_not(subject)
    found = None if reason else check.find(subject)
    return [found] if isinstance(found, Finding) else list(found or ()), CheckRun(check.name, reason)


class Findings(list[Finding]):
    """A list of findings, sorted by severity and layer, with the checks that ran and those that did not.

    Args:
        findings: The findings, in any order.
        scope: What was checked, such as "4 layers, 16 heads".
        checks: The checks and experiments.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording.diagnose(causal=True).by_severity("error")[0].kind
    'weight on the future'
    """

    def __init__(
        self, findings: Iterable[Finding] = (), scope: str = "", checks: Iterable[CheckRun] = ()
    ) -> None:
        super().__init__(
            sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.layer))
        )
        self.scope, self.checks = scope, tuple(checks)

    def by_severity(self, severity: Severity) -> Findings:
        """Return the findings of one severity.

        Args:
            severity: "error", "warning" or "note".

        Returns:
            The findings; an empty list if there are none.
        """
        return Findings(
            [finding for finding in self if finding.severity == severity], self.scope, self.checks
        )

    @property
    def summary(self) -> str:
        """The number of findings of each severity and what was checked, in one line."""
        scope = f" in {self.scope}" if self.scope else ""
        if not self:
            return f"No problems found{scope}."
        counts = {severity: len(self.by_severity(severity)) for severity in SEVERITIES}
        return ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n) + scope

    def group_layers(self) -> list[Finding]:
        """Merge findings that are equal except for the layer; the evidence lists the other layers.

        >>> findings = Findings([Finding("dropout", "error", "Dropout is active.", f"h.{n}", n) for n in range(3)])
        >>> [finding.evidence for finding in findings.group_layers()]
        [{'also in': 'layers 1–2: h.1, h.2'}]
        """
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self:
            groups.setdefault((finding.severity, finding.kind, finding.message, finding.hint), []).append(
                finding
            )
        grouped = []
        for first, *others in groups.values():
            if others:
                layers = format_numbers("layer", tuple(finding.layer for finding in others))
                modules = [finding.module for finding in others]
                shown = ", ".join(modules[:MAX_MODULES]) + ", …" * (len(modules) > MAX_MODULES)
                first = replace(first, evidence={**first.evidence, "also in": f"{layers}: {shown}"})
            grouped.append(first)
        return grouped

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON."""
        return {
            "scope": self.scope,
            "counts": {severity: len(self.by_severity(severity)) for severity in SEVERITIES},
            "findings": [finding.as_dict() for finding in self],
            "checks": [asdict(check) for check in self.checks],
        }

    def __repr__(self) -> str:
        checks = ["\n".join(map(str, self.checks))] if self.checks else []
        return "\n\n".join([self.summary, *map(str, self.group_layers()), *checks])

    def _repr_html_(self) -> str:
        from regard.render import notebook

        grouped = self.group_layers()
        items = [finding._item() for finding in grouped[: notebook.MAX_ROWS]]
        checks = [str(check) for check in self.checks]
        return notebook.render_findings(self.summary, items, len(grouped) - len(items), checks)


def _wrap(text: str, first_indent: str, indent: str) -> list[str]:
    """Wrap a text; an empty text gives no lines."""
    return textwrap.wrap(
        text,
        LINE_WIDTH,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def format_numbers(word: str, numbers: tuple[int, ...]) -> str:
    """Format a word and ascending numbers, consecutive ones as a range.

    >>> format_numbers("row", (0, 1, 2, 5))
    'rows 0–2, 5'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    shown = [f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in ranges[:6]]
    plural = "batch entries" if word == "batch entry" else f"{word}s"
    return f"{word if len(numbers) == 1 else plural} {', '.join(shown)}{' …' if len(ranges) > 6 else ''}"


def _is_long(value: Any) -> bool:
    """Return whether a value of the evidence has a line of its own: a list, a mapping, or a long text."""
    return len(value) > MAX_INLINE if isinstance(value, str) else isinstance(value, list | Mapping)


def _format_value(value: Any) -> str:
    """Format a value of the evidence.

    >>> _format_value({"keys": 2, "weights": [[0.25, 0.75]], "rows": ["first", "last"]})
    'keys 2, weights [[0.25, 0.75]], rows first; last'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_format_value(x)}" for name, x in value.items())
    if isinstance(value, list):
        is_text = value and all(isinstance(x, str) for x in value)
        return "; ".join(value) if is_text else _format_array(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _format_array(array: list[Any]) -> str:
    """Format nested lists in brackets without leading axes of one, and a large array by its shape."""
    shape, entries = [], [array]
    while entries and isinstance(entries[0], list):
        shape.append(len(entries[0]))
        entries = [entry for row in entries for entry in row]
    if len(entries) > MAX_ENTRIES:
        return f"an array of shape {tuple(shape)}"
    while len(shape) > 2 and shape[0] == 1:
        array, shape = array[0], shape[1:]
    return _format_nested(array)


def _format_nested(value: Any) -> str:
    """Format nested lists in brackets, numbers to four digits."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_nested, value)) + "]"
    return format_number(value + 0.0) if isinstance(value, float) else str(value)  # −0 + 0 is 0
