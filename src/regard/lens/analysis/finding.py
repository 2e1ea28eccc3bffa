"""What `recording.diagnose` returns: findings, as data and as text."""

from __future__ import annotations

import textwrap
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
    ...               evidence={"dropout_p": 0.1}, hint="Pass dropout_p=0.0 unless self.training."))
    error: dropout. Dropout is on although the layer evaluates.
      where     layer 3, model.layers.3.self_attn
      evidence  dropout_p 0.1
      hint      Pass dropout_p=0.0 unless self.training.
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
    hint: str = ""

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
        lines = _filled(f"{self.severity}: {self.kind}. {self.what}", "", "  ")
        for word, text in self._lines().items():
            lines += _filled(text, f"  {word:10}", " " * 12)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from regard.render import notebook

        return notebook.findings("", [self._item()])

    def _item(self) -> Any:
        from regard.render.notebook import Item

        return Item(self.severity, self.kind, self.what, self._lines())

    def _lines(self) -> dict[str, str]:
        """Where, on what evidence, and the hint."""
        lines = {"where": self.where, "evidence": self.told, "hint": self.hint}
        return {word: text for word, text in lines.items() if text}


class Findings(list[Finding]):
    """Findings, the gravest first; prints them one to a block.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording.diagnose(causal=True).of("error")[0].kind
    'weight on the future'
    """

    def __init__(self, found: Any = (), looked: str = "") -> None:
        super().__init__(sorted(found, key=lambda each: (_ORDER.index(each.severity), each.layer)))
        self.looked = looked

    def of(self, severity: Severity) -> Findings:
        """Those of one severity: "error", "warning" or "note"."""
        return Findings([each for each in self if each.severity == severity], self.looked)

    def __repr__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self)])

    def _repr_html_(self) -> str:
        from regard.render import notebook

        items = [each._item() for each in self[: notebook.SHOWN]]
        return notebook.findings(self.summary, items, len(self) - len(items))

    @property
    def summary(self) -> str:
        """The number of findings of each severity, and the layers and heads that were checked, in one line."""
        among = f" in {self.looked}" if self.looked else ""
        if not self:
            return f"Nothing found{among}."
        counts = {name: sum(each.severity == name for each in self) for name in _ORDER}
        return ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n) + among


def _filled(text: str, begin: str, indent: str) -> list[str]:
    """The text in lines that fit a terminal and a page; none where there is no text."""
    return textwrap.wrap(
        text,
        92,
        initial_indent=begin,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


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
