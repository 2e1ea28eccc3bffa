"""Build the page of a survey: how many heads fit a window, every head by a measure, and the documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable
from regard.types import Array, IntArray

if TYPE_CHECKING:
    from regard.survey.aggregate import DocumentRef

MAX_QUARANTINED = 20  # quarantined documents that the page lists
MAX_CHARACTERS = 160  # of a document's id or name


class ReportMeasure(NamedTuple):
    """One measure on the page.

    Attributes:
        name: Name of the measure.
        caption: What it means.
        means: Mean of each head over the documents, (heads,).
        edges: Edges of the bins, (bins + 1,).
        counts: Documents in each bin, (heads, bins).
        largest: The largest values of each head, (heads, count), and their documents (id, name, tokens) or None.
        smallest: The smallest values and their documents, alike.
    """

    name: str
    caption: str
    means: Array
    edges: Array
    counts: IntArray
    largest: tuple[Array, list[list[DocumentRef | None]]]
    smallest: tuple[Array, list[list[DocumentRef | None]]]


def build_report_page(
    *,
    title: str,
    facts: Mapping[str, Any],
    heads: Mapping[str, Array],
    measures: Sequence[ReportMeasure],
    windows: Sequence[tuple[int, int]],
    within: Array,
    kept: Array,
    shares: Sequence[float],
    default_share: float,
    behaviours: Sequence[dict[str, Any]],
    quarantined: Sequence[Mapping[str, str]],
) -> Page:
    """Build the page of a survey from plain data.

    Args:
        title: Title of the page.
        facts: documents, tokens, max_tokens, quarantined, complete, shards and committed.
        heads: The columns layer, head, kv_head, module, and distance_histogram if it was measured, (heads, …).
        measures: The measures that the page offers.
        windows: Each window, with the number of documents longer than it.
        within: Weight within each window, (windows, heads).
        kept: Weight within each window or on the first token, (windows, heads).
        shares: The shares of the weight that the page offers.
        default_share: The share that is selected at first.
        behaviours: name, rule, source and heads (indices) of each behaviour.
        quarantined: document, kind and reason of each quarantined document.

    Returns:
        The page.
    """
    documents: dict[DocumentRef, int] = {}
    modules = dict(zip(heads["layer"].astype(int).tolist(), heads["module"].tolist(), strict=True))
    distances = heads.get("distance_histogram")
    record = {
        "title": escape_unprintable(title),
        "about": dict(facts),
        "layers": heads["layer"].astype(int),
        "heads": heads["head"].astype(int),
        "kv_heads": heads["kv_head"].astype(int),
        "modules": [escape_unprintable(modules[layer]) for layer in sorted(modules)],
        "measures": [
            {
                "name": measure.name,
                "caption": measure.caption,
                "means": encode_array(measure.means, early=True),
                "edges": measure.edges,
                "counts": encode_array(measure.counts, early=True),
                "ends": [_encode_extremes(*end, documents) for end in (measure.largest, measure.smallest)],
            }
            for measure in measures
        ],
        "windows": [{"window": window, "documents": longer} for window, longer in windows],
        "within": encode_array(within, early=True),
        "within_or_first": encode_array(kept, early=True),
        "distances": None if distances is None else encode_array(distances, early=True),
        "levels": tuple(shares),
        "level": list(shares).index(default_share),
        "behaviours": list(behaviours),
        "quarantined": {
            "kinds": sorted(Counter(document["kind"] for document in quarantined).items()),
            "shown": [
                {name: shorten(document[name]) for name in ("document", "kind", "reason")}
                for document in quarantined[:MAX_QUARANTINED]
            ],
        },
    }
    record["documents"] = [
        [shorten(document.id), None if document.name is None else shorten(document.name), document.tokens]
        for document in documents
    ]
    return build_page(escape_unprintable(title), "reportPage", record)


def _encode_extremes(
    values: Array, rows: Sequence[Sequence[DocumentRef | None]], documents: dict[DocumentRef, int]
) -> dict[str, Any]:
    """Encode the values and documents at one end; a document is stored once and referred to by its number."""
    numbers = np.array(
        [
            [-1 if document is None else documents.setdefault(document, len(documents)) for document in row]
            for row in rows
        ]
    )
    values = np.where(numbers >= 0, values, np.nan)
    return {
        "values": encode_array(values.astype(np.float32), early=True),
        "documents": encode_array(numbers, early=True),
    }


def shorten(text: str) -> str:
    r"""Return a text on one line, without its middle if it is long.

    >>> shorten("tab\t"), len(shorten("long" * 100))
    ('tab\\t', 160)

    Args:
        text: Any text.

    Returns:
        The text, of at most 160 characters.
    """
    text = escape_unprintable(text)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 41]}…{text[-40:]}"
