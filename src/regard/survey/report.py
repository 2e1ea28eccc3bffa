"""The report of a survey: the behaviour of each head over a corpus, by simple rules, as a page and for scripts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError
from regard.pages.html import Page
from regard.pages.report_page import ReportMeasure, build_report_page
from regard.survey.aggregate import CorpusStats, DocumentRef, TopDocuments, aggregate_rows, get_bin_edges
from regard.survey.schema import WINDOWS
from regard.types import Array

if TYPE_CHECKING:
    from regard.survey.dataset import Survey

# A head is local if a window holds this share of its weight; the page offers the other shares as well.
LOCAL_SHARE, SHARES = 0.99, (0.9, 0.95, 0.99, 0.999)
# The window that the answer names.
ANSWER_WINDOW = 128

CAPTIONS = {
    "entropy": "How evenly a token spreads its weight, in nats: 0 is all on one token.",
    "distance": "Mean distance to the keys, in tokens, by weight.",
    "previous": "The share on the previous token.",
    "first": "The share on the first token.",
    "heavy": "The share of all weight that goes to the tenth of the tokens that receives most.",
    "duplicate": "Of repeated tokens: the share on their earlier copies.",
    "induction": "Of repeated tokens: the share on the tokens after their earlier copies.",
    "lookback": "Of answers: the mean weight of a token of the prompt, divided by itself plus that of one answered.",
}


class BehaviourRule(NamedTuple):
    """A rule that names a behaviour: the mean of a measure is above a threshold. The first rule that fits counts."""

    name: str
    measure: str
    threshold: float
    description: str
    source: str


RULES = (
    BehaviourRule(
        "previous-token",
        "previous",
        0.5,
        "more than half of the weight on the previous token",
        "Measured as in Olsson et al., 2209.11895; the threshold is ours.",
    ),
    BehaviourRule(
        "induction",
        "induction",
        0.3,
        "of repeated tokens, more than 0.3 of the weight on the tokens after their earlier copies",
        "The prefix matching of Olsson et al., 2209.11895; the threshold is ours.",
    ),
    BehaviourRule(
        "first-token sink",
        "first",
        0.3,
        "more than 0.3 of the weight on the first token",
        "α₁ of Gu et al., 2410.10781, who call it a sink above 0.3.",
    ),
)


class Behaviour(NamedTuple):
    """Heads that behave alike, as indices into `Survey.heads`, with the rule in words and its source."""

    name: str
    rule: str
    source: str
    heads: list[int]


class SurveyReport:
    """The report of a survey: `page` builds the page, `summary` is for scripts.

    Args:
        survey: A survey with at least one measured document.

    Raises:
        ArgumentError: If no document is measured yet.
    """

    def __init__(self, survey: Survey) -> None:
        if not survey.documents:
            raise ArgumentError(
                "survey.page",
                received=f"{str(survey.path)!r}, where no document is measured yet",
                expected="a survey with at least one measured document",
                hint="Resume the survey first. Its manifest lists the quarantined documents.",
            )
        self.survey = survey

    @cached_property
    def heads(self) -> dict[str, Array]:
        """The columns of `Survey.heads` as NumPy arrays."""
        table = self.survey.heads()
        return {
            name: np.array(column.to_pylist(), dtype=None if name == "module" else float)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }

    @cached_property
    def stats(self) -> CorpusStats:
        """The statistics over the documents."""
        return aggregate_rows(self.survey)

    @cached_property
    def windows(self) -> list[int]:
        """Indices into `WINDOWS` of the windows that some document is longer than."""
        return [place for place, count in enumerate(self.stats.longer) if count.max(initial=0)]

    @cached_property
    def behaviours(self) -> list[Behaviour]:
        """The behaviours with their heads; each head has the first one that fits."""
        unnamed = np.ones(len(self.heads["layer"]), bool)
        behaviours: list[Behaviour] = []

        def add(name: str, fits: Array, rule: str, source: str = "") -> None:
            behaviours.append(Behaviour(name, rule, source, np.flatnonzero(unnamed & fits).tolist()))
            unnamed[fits] = False

        for rule in RULES:
            if rule.measure in self.heads:
                words = f"{rule.description} ({rule.measure} > {rule.threshold:g})"
                add(rule.name, self.heads[rule.measure] > rule.threshold, words, rule.source)
        measured = np.zeros_like(unnamed)
        local = format_share(LOCAL_SHARE)
        for place in self.windows:
            within, window = self.stats.within[place], f"{WINDOWS[place]:,}"
            measured |= ~np.isnan(within)
            words = f"at least {local} of the weight within {window} tokens, in no smaller window"
            add(f"local within {window}", within >= LOCAL_SHARE, words, "The threshold is ours.")
        add("wide", measured, f"less than {local} in every window that some document is longer than")
        add("undetermined", unnamed.copy(), "no document is longer than a measured window")
        always = {rule.name for rule in RULES} | {"wide"}
        return [behaviour for behaviour in behaviours if behaviour.heads or behaviour.name in always]

    @property
    def summary(self) -> dict[str, Any]:
        """The report as a dictionary that JSON can hold."""
        windows = []
        for place in self.windows:
            within, kept = self.stats.within[place], self.stats.kept[place]
            windows.append(
                {
                    "window": WINDOWS[place],
                    "documents": int(self.stats.longer[place].max()),
                    "heads": int((~np.isnan(within)).sum()),
                    "within": {f"{share:g}": int((within >= share).sum()) for share in SHARES},
                    "kept": {f"{share:g}": int((kept >= share).sum()) for share in SHARES},
                }
            )
        return {
            **_describe_survey(self.survey),
            "windows": windows,
            "behaviours": [
                {
                    "name": behaviour.name,
                    "rule": behaviour.rule,
                    "heads": [
                        [int(self.heads[name][head]) for name in ("layer", "head")]
                        for head in behaviour.heads
                    ],
                }
                for behaviour in self.behaviours
            ],
            "answer": self.answer(),
        }

    def answer(self) -> str:
        """Return how many heads stay within 128 tokens, or the measured window nearest to that, as a sentence."""
        if not self.windows:
            return (
                f"No document has more than {min(WINDOWS)} tokens, or distances were not measured: "
                "there is no window to compare with."
            )
        place = min(self.windows, key=lambda place: abs(WINDOWS[place] - ANSWER_WINDOW))
        within, longer = self.stats.within[place], int(self.stats.longer[place].max())
        local, measured = int((within >= LOCAL_SHARE).sum()), int((~np.isnan(within)).sum())
        return (
            f"{local:,} of {measured:,} heads have {format_share(LOCAL_SHARE)} of their weight within "
            f"{WINDOWS[place]:,} tokens, over {longer:,} documents that are longer."
        )

    def page(self, title: str | None = None) -> Page:
        """Build the page of `Survey.page`.

        Args:
            title: Title of the page; the model and the number of documents by default.

        Returns:
            The page.
        """
        survey = self.survey
        if title is None:
            # Pages are shared, so the title has only the end of a folder's path.
            name = "/".join(Path(survey.settings["model"]["name"]).parts[-2:]).strip("/")
            title = f"{name} over {survey.documents:,} documents"
        facts = _describe_survey(survey)
        return build_report_page(
            title=title,
            facts={name: fact for name, fact in facts.items() if name not in ("model", "corpus")},
            heads=self.heads,
            measures=[self._build_measure(name) for name in self._list_measures()],
            windows=[(WINDOWS[place], int(self.stats.longer[place].max())) for place in self.windows],
            within=self.stats.within[self.windows],
            kept=self.stats.kept[self.windows],
            shares=SHARES,
            default_share=LOCAL_SHARE,
            behaviours=[behaviour._asdict() for behaviour in self.behaviours],
            quarantined=survey.quarantined,
        )

    def _list_measures(self) -> list[str]:
        """List the measures that vary: a window that no document exceeds holds all weight."""
        exceeded = {WINDOWS[place] for place in self.windows}
        return [
            name
            for name in self.stats.counts
            if not name.startswith(("within_", "kept_")) or int(name.split("_")[1]) in exceeded
        ]

    def _build_measure(self, name: str) -> ReportMeasure:
        kind, _, window = name.partition("_")
        caption = CAPTIONS.get(name, "")
        if window:
            first = " or on the first token" if kind == "kept" else ""
            caption = f"The share less than {int(window):,} tokens away{first}, over all documents, even short ones."
        largest, smallest = self.stats.extremes[name]
        return ReportMeasure(
            name,
            caption,
            self.heads[name],
            get_bin_edges(name),
            self.stats.counts[name],
            _list_extremes(largest, 1),
            _list_extremes(smallest, -1),
        )


def format_share(share: float) -> str:
    """Format a share in percent.

    >>> format_share(0.99), format_share(0.999)
    ('99 %', '99.9 %')
    """
    return f"{100 * share:g} %"


def _list_extremes(top: TopDocuments, sign: int) -> tuple[Array, list[list[DocumentRef | None]]]:
    return sign * top.values, top.documents.tolist()


def _describe_survey(survey: Survey) -> dict[str, Any]:
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
