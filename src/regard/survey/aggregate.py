"""What a report needs of a survey's rows, from one pass over them: as much for ten documents as for a billion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.survey.schema import WINDOWS, column_to_numpy

if TYPE_CHECKING:
    from regard.survey.dataset import Survey

# The edges of the bins that documents are counted in, finer where numbers crowd; what lies beyond the last is in it.
_ENDS = np.array([0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05])
SHARES = np.concatenate([_ENDS, np.arange(1, 10) / 10, np.round(1 - _ENDS[::-1], 3)])
NATS = np.arange(49) / 4
TOKENS = np.concatenate([[0.0], np.outer(2.0 ** np.arange(17), [1, 1.5]).ravel()])  # 0, 1, 1.5, 2, 3, 4, 6, …
# So many documents at either end are kept for each head and measure, and fewer where heads are many.
EXTREME, EXTREMES = 5, 60_000
# Rows that are looked at together.
ROWS = 1 << 15


class Document(NamedTuple):
    """One that stands at an end."""

    id: str
    label: str | None
    tokens: int


class Gathered(NamedTuple):
    """Of each head, in the order of `Survey.heads`: how documents spread, which stand at the ends, what windows hold.

    `counts` and `ends` are by measure: counts (heads, bins), and the largest and the smallest. `within` and `kept`
    are means (windows, heads) over the documents that are longer than the window, `longer` how many those are:
    of a shorter document all is inside, which tells nothing.
    """

    counts: dict[str, Any]
    ends: dict[str, tuple[Ends, Ends]]
    within: Any
    kept: Any
    longer: Any
    longest: int


def edges_of(measure: str) -> Any:
    """The edges of a measure's bins."""
    return {"entropy": NATS, "distance": TOKENS}.get(measure, SHARES)


def gather(survey: Survey) -> Gathered:
    """Read the rows, a batch at a time."""
    heads = survey.settings["heads"]
    begins, total = np.concatenate([[0], np.cumsum(heads)]), int(sum(heads))
    most = survey.settings["max_tokens"]
    measures = [
        name for name, width in survey.settings["columns"].items() if width == 1 and _tells(name, most)
    ]
    keep = max(1, min(EXTREME, EXTREMES // max(1, 2 * total * len(measures))))
    counts = {name: np.zeros((total, len(edges_of(name)) - 1), np.int64) for name in measures}
    ends = {name: (Ends(total, keep), Ends(total, keep)) for name in measures}
    sums, longer = np.zeros((2, len(WINDOWS), total)), np.zeros((len(WINDOWS), total))
    longest = 0
    columns = ["document", "label", "tokens", "layer", "head", *measures]
    for column in _together(survey.batches(columns)):
        at = begins[column["layer"].to_numpy()] + column["head"].to_numpy()
        tokens = column["tokens"].to_numpy()
        longest = max(longest, int(tokens.max()))

        def of(row: int, column: dict[str, Any] = column) -> Document:
            return Document(*(column[name][row].as_py() for name in ("document", "label", "tokens")))

        for name in measures:
            values = column_to_numpy(column[name])
            there, edges = ~np.isnan(values), edges_of(name)
            bins = np.clip(np.searchsorted(edges, values[there], "right") - 1, 0, len(edges) - 2)
            flat = np.bincount(at[there] * (len(edges) - 1) + bins, minlength=counts[name].size)
            counts[name] += flat.reshape(counts[name].shape)
            for sign, end in zip((1, -1), ends[name], strict=True):
                end.take(at, sign * values, of)
            kind, _, window = name.partition("_")
            if kind in ("within", "kept"):
                which = WINDOWS.index(int(window))
                counted = there & (tokens > int(window))
                sums[int(kind == "kept"), which] += np.bincount(at[counted], values[counted], total)
                if kind == "within":
                    longer[which] += np.bincount(at[counted], minlength=total)
    with np.errstate(invalid="ignore"):
        within, kept = sums / longer
    return Gathered(counts, ends, within, kept, longer, longest)


def _tells(measure: str, most: int) -> bool:
    """Whether a measure can differ: a window that is as wide as the longest document holds it all.

    >>> _tells("within_512", 512), _tells("within_512", 513), _tells("first", 512)
    (False, True, True)
    """
    return not measure.startswith(("within_", "kept_")) or int(measure.rpartition("_")[2]) < most


def _together(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Columns by name, some tens of thousands of rows at a time: a shard alone may have few."""
    import pyarrow as pa

    waiting: list[Any] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch)
        if rows >= ROWS:
            yield _columns(pa.Table.from_batches(waiting))
            waiting, rows = [], 0
    if waiting:
        yield _columns(pa.Table.from_batches(waiting))


def _columns(table: Any) -> dict[str, Any]:
    return {name: table.column(name).combine_chunks() for name in table.column_names}


class Ends:
    """The few largest values of each head, (heads, keep) in descending order, and where they were found.

    Of equal ones the first in the corpus stands first.
    """

    def __init__(self, heads: int, keep: int) -> None:
        self.values = np.full((heads, keep), -np.inf)
        self.documents = np.full((heads, keep), None, object)

    def take(self, at: Any, values: Any, of: Any) -> None:
        """Values of rows that belong to heads `at`; `of` gives the document of a row. NaN is passed over."""
        (rows,) = np.nonzero(values > self.values[at, -1])
        if not len(rows):
            return
        rows = rows[np.lexsort((rows, -values[rows], at[rows]))]  # by head, the largest first
        keep = self.values.shape[1]
        for head, start, count in zip(
            *np.unique(at[rows], return_index=True, return_counts=True), strict=True
        ):
            new = rows[start : start + min(count, keep)]
            merged = np.concatenate([self.values[head], values[new]])
            best = np.argsort(-merged, kind="stable")[:keep]
            documents = [*self.documents[head], *(None for _ in new)]
            for place in best[best >= keep]:
                documents[place] = of(int(new[place - keep]))
            self.values[head] = merged[best]
            self.documents[head] = [documents[place] for place in best]
