"""The report of a survey: what each head does over a corpus, told by plain rules, as a page and as a record."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError
from regard.pages.html import Page, page
from regard.pages.parts import part
from regard.render.text import escape_unprintable
from regard.survey.aggregate import Ends, Gathered, edges_of, gather
from regard.survey.schema import WINDOWS

if TYPE_CHECKING:
    from regard.survey.dataset import Survey

# A head is local where a window holds so much of its weight; the page lets its readers choose among others.
LOCAL, LEVELS = 0.99, (0.9, 0.95, 0.99, 0.999)
# The window that is told of first.
WINDOW = 128
# Quarantined documents that are shown, and characters of a document's id.
SHOWN, LETTERS = 20, 160

MEANINGS = {
    "entropy": "How evenly a token spreads its weight, in nats: 0 is all on one token.",
    "distance": "How far away a token looks, in tokens, by weight.",
    "previous": "The share on the token before.",
    "first": "The share on the first token.",
    "heavy": "The share of all weight that the tenth of the tokens that receives most has.",
    "duplicate": "Of tokens that came before: the share on their earlier copies.",
    "induction": "Of tokens that came before: the share on what followed their earlier copies.",
}


class Rule(NamedTuple):
    """A behaviour: heads are named by the first that fits."""

    name: str
    measure: str
    above: float
    words: str
    source: str


RULES = (
    Rule(
        "previous-token",
        "previous",
        0.5,
        "more than half of the weight on the token before",
        "Measured as Olsson et al., 2209.11895, do; the threshold is ours.",
    ),
    Rule(
        "induction",
        "induction",
        0.3,
        "of tokens that came before, more than 0.3 of the weight on what followed them then",
        "The prefix matching of Olsson et al., 2209.11895; the threshold is ours.",
    ),
    Rule(
        "first-token sink",
        "first",
        0.3,
        "more than 0.3 of the weight on the first token",
        "α₁ of Gu et al., 2410.10781, who call it a sink above 0.3.",
    ),
)


class Behaviour(NamedTuple):
    """Heads that do alike, by their place in `Survey.heads`; the rule in words, and where it comes from."""

    name: str
    rule: str
    source: str
    heads: list[int]


class Report:
    """A survey, read once. `page()` shows it, `summary` is for scripts."""

    def __init__(self, survey: Survey) -> None:
        if not survey.documents:
            raise ArgumentError(
                "report",
                received=f"{str(survey.path)!r}, where no document is measured so far",
                expected="a survey with at least one",
                hint="Let the survey go on first; what it set aside is in its manifest.",
            )
        self.survey = survey

    @cached_property
    def table(self) -> dict[str, Any]:
        """`Survey.heads`, each column as an array."""
        return {
            name: np.array(column.to_pylist(), dtype=None if name == "module" else float)
            for name, column in zip(*_columns(self.survey.heads()), strict=True)
        }

    @cached_property
    def gathered(self) -> Gathered:
        """What else the rows tell."""
        return gather(self.survey)

    @cached_property
    def windows(self) -> list[int]:
        """Places in `WINDOWS` of those that some document is longer than."""
        return [place for place, count in enumerate(self.gathered.longer) if count.max(initial=0)]

    @cached_property
    def behaviours(self) -> list[Behaviour]:
        """Each head once, by the first rule that fits it."""
        left = np.ones(len(self.table["layer"]), bool)
        found: list[Behaviour] = []

        def add(name: str, fits: Any, rule: str, source: str = "") -> None:
            found.append(Behaviour(name, rule, source, np.flatnonzero(left & fits).tolist()))
            left[fits] = False

        for rule in RULES:
            if rule.measure in self.table:
                words = f"{rule.words} ({rule.measure} > {rule.above:g})"
                add(rule.name, self.table[rule.measure] > rule.above, words, rule.source)
        told = np.zeros_like(left)
        for place in self.windows:
            mass = self.gathered.within[place]
            told |= ~np.isnan(mass)
            words = f"at least {share(LOCAL)} of the weight within {WINDOWS[place]:,} tokens, in no smaller window"
            add(f"local within {WINDOWS[place]:,}", mass >= LOCAL, words, "The threshold is ours.")
        add("wide", told, f"less than {share(LOCAL)} in every window that some document is longer than")
        add("not told", left.copy(), "no window was measured that some document is longer than")
        always = {rule.name for rule in RULES} | {"wide"}
        return [each for each in found if each.heads or each.name in always]

    @property
    def summary(self) -> dict[str, Any]:
        """The report for scripts."""
        survey, gathered = self.survey, self.gathered
        windows = []
        for place in self.windows:
            within, kept = gathered.within[place], gathered.kept[place]
            windows.append(
                {
                    "window": WINDOWS[place],
                    "documents": int(gathered.longer[place].max()),
                    "heads": int((~np.isnan(within)).sum()),
                    "within": {f"{level:g}": int((within >= level).sum()) for level in LEVELS},
                    "kept": {f"{level:g}": int((kept >= level).sum()) for level in LEVELS},
                }
            )
        return {
            **_about(survey),
            "windows": windows,
            "behaviours": [
                {
                    "name": each.name,
                    "rule": each.rule,
                    "heads": [[int(self.table[name][at]) for name in ("layer", "head")] for at in each.heads],
                }
                for each in self.behaviours
            ],
            "answer": self.answer(),
        }

    def answer(self) -> str:
        """How many heads never look past the window that is told of first."""
        if not self.windows:
            return (
                f"No document has more than {min(WINDOWS)} tokens, or distances were not measured: "
                "of windows nothing can be told."
            )
        place = min(self.windows, key=lambda each: abs(WINDOWS[each] - WINDOW))
        within, longer = self.gathered.within[place], int(self.gathered.longer[place].max())
        fit, told = int((within >= LOCAL).sum()), int((~np.isnan(within)).sum())
        return (
            f"{fit:,} of {told:,} heads have {share(LOCAL)} of their weight within {WINDOWS[place]:,} tokens, "
            f"over {longer:,} documents that are longer."
        )

    def page(self, title: str | None = None) -> Page:
        """The page of `Survey.page`."""
        survey = self.survey
        if title is None:
            # A page is mailed: of a folder's path it tells the end only.
            name = "/".join(Path(survey.settings["model"]["name"]).parts[-2:]).strip("/")
            title = f"{name} over {survey.documents:,} documents"
        known: dict[Any, int] = {}
        record = {
            "title": escape_unprintable(title),
            "about": {name: each for name, each in _about(survey).items() if name not in ("model", "corpus")},
            "layers": self.table["layer"].astype(int),
            "heads": self.table["head"].astype(int),
            "kv_heads": self.table["kv_head"].astype(int),
            "modules": _modules(self.table),
            "measures": [self._measure(name, known) for name in self._measures()],
            "windows": [
                {"window": WINDOWS[place], "documents": int(self.gathered.longer[place].max())}
                for place in self.windows
            ],
            "within": part(self.gathered.within[self.windows], first=True),
            "kept": part(self.gathered.kept[self.windows], first=True),
            "far": self._far(),
            "levels": LEVELS,
            "level": LEVELS.index(LOCAL),
            "behaviours": [each._asdict() for each in self.behaviours],
            "quarantined": _quarantined(survey),
        }
        record["documents"] = [
            [_short(each.id), None if each.label is None else _short(each.label), each.tokens]
            for each in known
        ]
        return page(escape_unprintable(title), "report.js", record)

    def _measures(self) -> list[str]:
        """Those that say something: a window that holds every document whole holds all weight."""
        told = {WINDOWS[place] for place in self.windows}
        names = self.gathered.counts
        return [
            name
            for name in names
            if not name.startswith(("within_", "kept_")) or int(name.split("_")[1]) in told
        ]

    def _measure(self, name: str, known: dict[Any, int]) -> dict[str, Any]:
        """One measure; `known` are the documents that are named so far, and their numbers."""
        kind, _, window = name.partition("_")
        meaning = MEANINGS.get(name, "")
        if window:
            besides = " or on the first token" if kind == "kept" else ""
            meaning = f"The share less than {int(window):,} tokens away{besides}, over all documents, short ones too."
        largest, smallest = self.gathered.ends[name]
        return {
            "name": name,
            "meaning": meaning,
            "means": part(self.table[name], first=True),
            "edges": edges_of(name),
            "counts": part(self.gathered.counts[name], first=True),
            "ends": [_end(largest, 1, known), _end(smallest, -1, known)],
        }

    def _far(self) -> Any:
        """How much lies at each distance, (heads, bins), or None."""
        histogram = self.table.get("distance_histogram")
        return None if histogram is None else part(histogram, first=True)


def share(part: float) -> str:
    """A share in percent.

    >>> share(0.99), share(0.999)
    ('99 %', '99.9 %')
    """
    return f"{100 * part:g} %"


def _end(ends: Ends, sign: int, known: dict[Any, int]) -> dict[str, Any]:
    where = np.array(
        [
            [-1 if each is None else known.setdefault(each, len(known)) for each in row]
            for row in ends.documents
        ]
    )
    values = np.where(where >= 0, sign * ends.values, np.nan)
    return {"values": part(values.astype(np.float32), first=True), "documents": part(where, first=True)}


def _columns(table: Any) -> tuple[list[str], list[Any]]:
    return table.column_names, table.columns


def _modules(table: dict[str, Any]) -> list[str]:
    """The module of each layer."""
    names = dict(zip(table["layer"].astype(int).tolist(), table["module"].tolist(), strict=True))
    return [escape_unprintable(names[layer]) for layer in sorted(names)]


def _about(survey: Survey) -> dict[str, Any]:
    """What was surveyed."""
    settings = survey.settings
    return {
        "model": settings["model"]["name"],
        "corpus": settings["corpus"]["path"],
        "documents": survey.documents,
        "tokens": survey.tokens,
        "max_tokens": settings["max_tokens"],
        "quarantined": len(survey.quarantined),
        "complete": survey.complete,
        "shards": settings["shards"],
        "committed": len(survey.files),
    }


def _quarantined(survey: Survey) -> dict[str, Any]:
    """How many by kind, and the first few."""
    aside = survey.quarantined
    shown = [{name: _short(each[name]) for name in ("document", "kind", "reason")} for each in aside[:SHOWN]]
    return {"kinds": sorted(Counter(each["kind"] for each in aside).items()), "shown": shown}


def _short(text: str) -> str:
    r"""A text on one line, its middle left out where it is long.

    >>> _short("tab\t"), len(_short("long" * 100))
    ('tab\\t', 160)
    """
    text = escape_unprintable(text)
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 41]}…{text[-40:]}"
