"""Aggregate the rows of a survey for its report, in one pass and in memory that does not grow with the documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regard.jobs.row_schema import column_to_numpy
from regard.survey.schema import WINDOWS
from regard.types import Array, IntArray

if TYPE_CHECKING:
    import pyarrow as pa

    from regard.survey.dataset import Survey

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


def aggregate_rows(survey: Survey) -> CorpusStats:
    """Read the rows of a survey in batches and aggregate them."""
    heads = survey.settings["heads"]
    starts, total = np.concatenate([[0], np.cumsum(heads)]), int(sum(heads))
    max_tokens = survey.settings["max_tokens"]
    measures = [
        name
        for name, width in survey.settings["columns"].items()
        if width == 1 and _is_informative(name, max_tokens)
    ]
    count = max(1, min(MAX_EXTREMES, MAX_TOTAL_EXTREMES // max(1, 2 * total * len(measures))))
    counts = {name: np.zeros((total, len(get_bin_edges(name)) - 1), np.int64) for name in measures}
    extremes = {name: (TopDocuments(total, count), TopDocuments(total, count)) for name in measures}
    sums, longer = np.zeros((2, len(WINDOWS), total)), np.zeros((len(WINDOWS), total))
    columns = ["document", "name", "tokens", "layer", "head", *measures]
    for column in _merge_batches(survey.iter_batches(columns)):
        index = starts[column["layer"].to_numpy()] + column["head"].to_numpy()
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


def _is_informative(measure: str, max_tokens: int) -> bool:
    """Return whether a measure can vary: a window as wide as the longest document contains all of its weight.

    >>> _is_informative("within_512", 512), _is_informative("within_512", 513), _is_informative("first", 512)
    (False, True, True)
    """
    return not measure.startswith(("within_", "kept_")) or int(measure.rpartition("_")[2]) < max_tokens


def _merge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, pa.Array]]:
    """Yield the columns of about `BATCH_ROWS` rows at a time; a single shard may have few."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch)
        if rows >= BATCH_ROWS:
            yield _get_columns(pa.Table.from_batches(waiting))
            waiting, rows = [], 0
    if waiting:
        yield _get_columns(pa.Table.from_batches(waiting))


def _get_columns(table: pa.Table) -> dict[str, pa.Array]:
    return {name: table.column(name).combine_chunks() for name in table.column_names}


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
