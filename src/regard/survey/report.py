"""The report of a survey: the behaviour of each head over a corpus, by simple rules, as a page and for scripts.

The rows are aggregated in one pass, in memory that does not grow with the documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.jobs.shards import column_to_numpy
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page, shorten, shorten_path
from regard.render.text import escape_unprintable
from regard.survey.schema import WINDOWS
from regard.types import Array, IntArray

if TYPE_CHECKING:
    import pyarrow as pa

# Edges of the histogram bins, finer where values cluster; values beyond the last edge count in the last bin.
_NEAR_ZERO = np.array([0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05])
SHARE_EDGES = np.concatenate([_NEAR_ZERO, np.arange(1, 10) / 10, np.round(1 - _NEAR_ZERO[::-1], 3)])
ENTROPY_EDGES = np.arange(49) / 4
DISTANCE_EDGES = np.concatenate(
    [[0.0], np.outer(2.0 ** np.arange(17), [1, 1.5]).ravel()]
)  # 0, 1, 1.5, 2, 3, 4, …
# Documents kept at either end for each head and measure, and the most over all of them.
MAX_EXTREMES, MAX_TOTAL_EXTREMES = 5, 60_000
# Rows processed together.
BATCH_ROWS = 1 << 15
# A head is local if a window holds this share of its weight; the page offers the other shares as well.
LOCAL_SHARE, SHARES = 0.99, (0.9, 0.95, 0.99, 0.999)
# The window that the answer names.
ANSWER_WINDOW = 128

CAPTIONS = {
    "entropy": "How evenly a token spreads its weight, in nats: 0 is all on one token.",
    "distance": "Mean distance to the keys, in tokens, by weight.",
    "previous": "The share on the previous token.",
    "first": "The share on the first token.",
    "heavy": "The share of all weight on the 10 % of tokens that receive most.",
    "duplicate": "For repeated tokens: the share on their earlier copies.",
    "induction": "For repeated tokens: the share on the tokens after their earlier copies.",
    "lookback": "For answers: C / (C + G), with the mean weight C on a prompt token and G on a generated token.",
}
MAX_QUARANTINED = 20  # quarantined documents that the page lists


class DocumentRef(NamedTuple):
    """A document as the report lists it."""

    id: str
    name: str | None
    tokens: int


class CorpusStats(NamedTuple):
    """Statistics over the documents for each head, in the order of `Survey.heads`.

    Attributes:
        counts: For each measure, documents in each bin, (heads, bins).
        extremes: For each measure, the documents with the largest and the smallest values.
        within: Mean of `within_*` over the documents longer than the window, (windows, heads). A shorter document lies
            inside the window, so it is left out.
        kept: Mean of `kept_*` over the same documents, (windows, heads).
        longer: Number of those documents, (windows, heads).
    """

    counts: dict[str, IntArray]
    extremes: dict[str, tuple[TopDocuments, TopDocuments]]
    within: Array
    kept: Array
    longer: Array


def get_bin_edges(measure: str) -> Array:
    """Return the edges of a measure's bins."""
    return {"entropy": ENTROPY_EDGES, "distance": DISTANCE_EDGES}.get(measure, SHARE_EDGES)


def index_heads(counts: list[int], layers: pa.Array, heads: pa.Array) -> IntArray:
    """Return the index of each row's head among the heads of all layers, of which a layer has `counts[layer]`."""
    starts = np.cumsum([0, *counts])
    return np.asarray(starts[layers.to_numpy()] + heads.to_numpy())


def aggregate_rows(
    settings: dict[str, Any], iter_batches: Callable[[list[str]], Iterator[pa.RecordBatch]]
) -> CorpusStats:
    """Read the rows of a survey in batches of some columns, and aggregate them."""
    heads = settings["heads"]
    total = sum(heads)
    longest = settings["max_tokens"]
    measures = [
        name for name, width in settings["columns"].items() if width == 1 and _can_vary(name, longest)
    ]
    count = max(1, min(MAX_EXTREMES, MAX_TOTAL_EXTREMES // max(1, 2 * total * len(measures))))
    counts = {name: np.zeros((total, len(get_bin_edges(name)) - 1), np.int64) for name in measures}
    extremes = {name: (TopDocuments(total, count), TopDocuments(total, count)) for name in measures}
    sums, longer = np.zeros((2, len(WINDOWS), total)), np.zeros((len(WINDOWS), total))
    columns = ["document", "name", "tokens", "layer", "head", *measures]
    for column in _merge_batches(iter_batches(columns)):
        index = index_heads(heads, column["layer"], column["head"])
        tokens = column["tokens"].to_numpy()

        def get_document(row: int, column: dict[str, pa.Array] = column) -> DocumentRef:
            return DocumentRef(*(column[name][row].as_py() for name in ("document", "name", "tokens")))

        for name in measures:
            values = column_to_numpy(column[name])
            defined, edges = ~np.isnan(values), get_bin_edges(name)
            bins = np.clip(np.searchsorted(edges, values[defined], "right") - 1, 0, len(edges) - 2)
            flat = np.bincount(index[defined] * (len(edges) - 1) + bins, minlength=counts[name].size)
            counts[name] += flat.reshape(counts[name].shape)
            for sign, top in zip((1, -1), extremes[name], strict=True):
                top.update(index, sign * values, get_document)
            kind, _, window = name.partition("_")
            if kind in ("within", "kept"):
                place = WINDOWS.index(int(window))
                counted = defined & (tokens > int(window))
                sums[int(kind == "kept"), place] += np.bincount(index[counted], values[counted], total)
                if kind == "within":
                    longer[place] += np.bincount(index[counted], minlength=total)
    with np.errstate(invalid="ignore"):
        within, kept = sums / longer
    return CorpusStats(counts, extremes, within, kept, longer)


def _can_vary(measure: str, max_tokens: int) -> bool:
    """Return whether a measure can vary: a window as wide as the longest document contains all of its weight.

    >>> _can_vary("within_512", 512), _can_vary("within_512", 513), _can_vary("first", 512)
    (False, True, True)
    """
    return not measure.startswith(("within_", "kept_")) or int(measure.rpartition("_")[2]) < max_tokens


def _merge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, pa.Array]]:
    """Yield the columns of about `BATCH_ROWS` rows at a time; a single shard may have few."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    for batch in itertools.chain(batches, [None]):
        if batch is not None:
            waiting.append(batch)
        if waiting and (batch is None or sum(map(len, waiting)) >= BATCH_ROWS):
            table = pa.Table.from_batches(waiting)
            yield {name: table.column(name).combine_chunks() for name in table.column_names}
            waiting = []


class TopDocuments:
    """The `count` largest values of each head, (heads, count) in descending order, and their documents.

    Of equal values, the first in the corpus comes first.
    """

    def __init__(self, heads: int, count: int) -> None:
        self.values = np.full((heads, count), -np.inf)
        self.documents = np.full((heads, count), None, object)

    def update(self, index: IntArray, values: Array, get_document: Callable[[int], object]) -> None:
        """Add rows; NaN is skipped.

        Args:
            index: The head of each row, (rows,).
            values: The value of each row, (rows,).
            get_document: Returns the document of a row.
        """
        (rows,) = np.nonzero(values > self.values[index, -1])
        if not len(rows):
            return
        rows = rows[np.lexsort((rows, -values[rows], index[rows]))]  # by head, the largest first
        count = self.values.shape[1]
        for head, start, found in zip(
            *np.unique(index[rows], return_index=True, return_counts=True), strict=True
        ):
            new = rows[start : start + min(found, count)]
            merged = np.concatenate([self.values[head], values[new]])
            best = np.argsort(-merged, kind="stable")[:count]
            documents = [*self.documents[head], *(None for _ in new)]
            for place in best[best >= count]:
                documents[place] = get_document(int(new[place - count]))
            self.values[head] = merged[best]
            self.documents[head] = [documents[place] for place in best]


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
        "for repeated tokens, more than 0.3 of the weight on the tokens after their earlier copies",
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


@dataclass(frozen=True)
class SurveyReport:
    """The report of a survey: `page` builds the page, `summary` is for scripts."""

    facts: dict[str, Any]
    heads: dict[str, Array]
    stats: CorpusStats
    quarantined: list[dict[str, str]]

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
            words = f"at least {local} of the weight within {window} tokens, but not within a smaller window"
            add(f"local within {window}", within >= LOCAL_SHARE, words, "The threshold is ours.")
        add("wide", measured, f"less than {local} in every window shorter than some document")
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
            **self.facts,
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
            f"{WINDOWS[place]:,} tokens, measured on {longer:,} longer documents."
        )

    def page(self, title: str | None = None) -> Page:
        """Build the page of `Survey.page`."""
        heads, stats, places = self.heads, self.stats, self.windows
        if title is None:
            title = f"{shorten_path(self.facts['model'])} over {self.facts['documents']:,} documents"
        documents: dict[DocumentRef, int] = {}
        modules = dict(zip(heads["layer"].astype(int).tolist(), heads["module"].tolist(), strict=True))
        distances = heads.get("distance_histogram")
        # A window that no document exceeds holds all weight.
        widest = max((WINDOWS[place] for place in places), default=0)
        record = {
            "title": escape_unprintable(title),
            "about": {name: fact for name, fact in self.facts.items() if name not in ("model", "corpus")},
            "layers": heads["layer"].astype(int),
            "heads": heads["head"].astype(int),
            "kv_heads": heads["kv_head"].astype(int),
            "modules": [escape_unprintable(modules[layer]) for layer in sorted(modules)],
            "measures": [
                {
                    "name": name,
                    "caption": _caption(name),
                    "means": encode_array(heads[name], early=True),
                    "edges": get_bin_edges(name),
                    "counts": encode_array(counts, early=True),
                    "ends": [
                        _encode_extremes(top, sign, documents)
                        for top, sign in zip(stats.extremes[name], (1, -1), strict=True)
                    ],
                }
                for name, counts in stats.counts.items()
                if _can_vary(name, widest + 1)
            ],
            "windows": [
                {"window": WINDOWS[place], "documents": int(stats.longer[place].max())} for place in places
            ],
            "within": encode_array(stats.within[places], early=True),
            "within_or_first": encode_array(stats.kept[places], early=True),
            "distances": None if distances is None else encode_array(distances, early=True),
            "levels": SHARES,
            "level": SHARES.index(LOCAL_SHARE),
            "behaviours": [behaviour._asdict() for behaviour in self.behaviours],
            "quarantined": {
                "kinds": sorted(Counter(document["kind"] for document in self.quarantined).items()),
                "shown": [
                    {name: shorten(document[name]) for name in ("document", "kind", "reason")}
                    for document in self.quarantined[:MAX_QUARANTINED]
                ],
            },
        }
        record["documents"] = [
            [shorten(document.id), None if document.name is None else shorten(document.name), document.tokens]
            for document in documents
        ]
        return build_page(escape_unprintable(title), "reportPage", record)


def _caption(measure: str) -> str:
    kind, _, window = measure.partition("_")
    if not window:
        return CAPTIONS.get(measure, "")
    first = " or on the first token" if kind == "kept" else ""
    return f"The share less than {int(window):,} tokens away{first}, over all documents, even short ones."


def _encode_extremes(top: TopDocuments, sign: int, documents: dict[DocumentRef, int]) -> dict[str, Any]:
    """Encode the values and documents at one end; a document is stored once and referred to by its number."""
    numbers = np.array(
        [
            [-1 if document is None else documents.setdefault(document, len(documents)) for document in row]
            for row in top.documents.tolist()
        ]
    )
    values = np.where(numbers >= 0, sign * top.values, np.nan)
    return {
        "values": encode_array(values.astype(np.float32), early=True),
        "documents": encode_array(numbers, early=True),
    }


def format_share(share: float) -> str:
    """Format a share in percent.

    >>> format_share(0.99), format_share(0.999)
    ('99 %', '99.9 %')
    """
    return f"{100 * share:g} %"
