"""What `seen.diagnose` returns: findings, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_ORDER = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong: what, how bad, where, the numbers it rests on, and what to do.

    `kind` is its name, `what` a sentence. `heads`, `rows` and `batch` count from 0; they are empty where it holds for
    all.

    >>> print(Finding("dropout", "error", "Dropout is on although the layer evaluates.", "model.layers.3.self_attn", 3,
    ...               evidence={"dropout_p": 0.1}, cure="Pass dropout_p=0.0 unless self.training."))
    error: dropout. Dropout is on although the layer evaluates.
      where     layer 3, model.layers.3.self_attn
      evidence  dropout_p 0.1
      cure      Pass dropout_p=0.0 unless self.training.
    """

    kind: str
    severity: Severity
    what: str
    module: str
    layer: int
    heads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    cure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or a data frame."""
        return asdict(self)

    @property
    def where(self) -> str:
        """Its place in words: layer, module, heads, rows and batch entries."""
        where = [f"layer {self.layer}" + (f", {self.module}" if self.module else "")]
        for word, numbers in (("head", self.heads), ("row", self.rows), ("batch entry", self.batch)):
            if numbers:
                where.append(_plural(word, numbers))
        return ", ".join(where)

    @property
    def told(self) -> str:
        """The evidence in words."""
        return ", ".join(f"{name} {_text(value)}" for name, value in self.evidence.items())

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.kind}. {self.what}", f"  where     {self.where}"]
        lines += [f"  evidence  {self.told}"] if self.evidence else []
        return "\n".join([*lines, f"  cure      {self.cure}"])


class Findings(list[Finding]):
    """Findings, the gravest first; prints them one to a block."""

    def __init__(self, found: Any = (), looked: str = "") -> None:
        super().__init__(sorted(found, key=lambda each: (_ORDER.index(each.severity), each.layer)))
        self.looked = looked

    def of(self, severity: Severity) -> Findings:
        """Those of one severity: "error", "warning" or "note"."""
        return Findings([each for each in self if each.severity == severity], self.looked)

    def __repr__(self) -> str:
        if not self:
            return f"Nothing found{' in ' + self.looked if self.looked else ''}."
        counts = {name: sum(each.severity == name for each in self) for name in _ORDER}
        summary = ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)
        return "\n\n".join([f"{summary}{' in ' + self.looked if self.looked else ''}", *map(str, self)])


def _plural(word: str, numbers: tuple[int, ...]) -> str:
    """One word and its numbers, those that follow each other as a range.

    >>> _plural("row", (0, 1, 2, 5))
    'rows 0–2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    shown = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:6]]
    many = "batch entries" if word == "batch entry" else f"{word}s"
    return f"{word if len(numbers) == 1 else many} {', '.join(shown)}{' …' if len(runs) > 6 else ''}"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
