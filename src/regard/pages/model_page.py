"""The model page: every head of a model as a small map, and every weight while `max_bytes` allows it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.pages.encoding import encode_overview, live_cells
from regard.pages.fitted_payload import FittedPayload, combine_errors, fit_payload
from regard.pages.html import Page, build_page
from regard.pages.payload import ErrorEstimate, MatrixPayload
from regard.pages.stack_names import stack_names
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix

LONG_TEXT = 1024  # tokens above which the map of a head starts from an overview in the page
THUMBNAIL_CELLS = 64  # cells along the edge of a head's thumbnail
OVERVIEW_CELLS = 256  # cells along the edge of the overview of a head of a long text


@dataclass
class PageLayer:
    """One attention call on the page.

    Attributes:
        module: Name of the module.
        layer: Number of the layer, from 0.
        call: Which call of the layer it is, from 0.
        shape: (q_len, kv_len).
        heads: The heads that are shown.
        first: Position of query 0 among the keys, None for cross-attention.
        query_tokens: Tokens of the queries, or None.
        key_tokens: Tokens of the keys, or None.
        measures: For each measure, one number for each head in `heads`.
        means: Mean weight of each block, (len(heads), rows, columns) with the cells of `map_cells`.
        maxima: Largest weight of each block, the same shape.
        matrix: Attention of one batch entry, (all heads, q_len, kv_len), or (q_len, kv_len) without a head axis.
        head_dim: Width of a query.
        groups: How many heads share a key.
    """

    module: str
    layer: int
    call: int
    shape: tuple[int, int]
    heads: list[int]
    first: int | None
    query_tokens: list[Any] | None
    key_tokens: list[Any] | None
    measures: Mapping[str, Sequence[float]]
    means: Any
    maxima: Any
    matrix: AttentionMatrix
    head_dim: int
    groups: int


def map_cells(q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the number of cells of the map of a head.

    Args:
        q_len: Number of queries.
        kv_len: Number of keys.

    Returns:
        (rows, columns).
    """
    edge = OVERVIEW_CELLS if max(q_len, kv_len) > LONG_TEXT else THUMBNAIL_CELLS
    return min(edge, q_len), min(edge, kv_len)


def build_model_page(
    layers: Sequence[PageLayer],
    *,
    title: str,
    captions: Mapping[str, str],
    findings: Sequence[dict[str, Any]],
    summary: str,
    max_bytes: int,
    operation: str,
) -> Page:
    """Build the page of `Recording.page`.

    Args:
        layers: The calls to show, in order.
        title: Title of the page.
        captions: A caption for each measure, in the order in which the page offers them.
        findings: Records of the findings of `Recording.diagnose`.
        summary: The findings in one line.
        max_bytes: Heads carry all their weights until the page has this size.
        operation: Name of the calling function, for error messages.

    Returns:
        The page.
    """
    texts: dict[tuple[str, ...], int] = {}
    measures = [name for name in captions if any(name in layer.measures for layer in layers)]
    stacks, calls = (
        stack_names([layer.module for layer in layers]),
        Counter(layer.module for layer in layers),
    )
    records = [
        {
            "module": layer.module,
            "layer": layer.layer,
            "call": layer.call,
            "calls": calls[layer.module],
            "stack": stacks[layer.module],
            "shape": layer.shape,
            "first": layer.first,
            "heads": layer.heads,
            "query_text": _text_index(layer.query_tokens, texts),
            "key_text": _text_index(layer.key_tokens, texts),
            "measures": {name: layer.measures.get(name, [math.nan] * len(layer.heads)) for name in measures},
            "thumbnails": _thumbnails(layer),
            "payload": None,
            "payload_error": None,
        }
        for layer in layers
    ]
    name = escape_unprintable(title)
    record: dict[str, Any] = {
        "title": name,
        "lead": _describe_sizes(layers),
        "texts": list(texts),
        "measures": measures,
        "captions": dict(captions),
        "layers": records,
        "findings": list(findings),
        "summary": summary,
    }
    room = max_bytes - len(build_page(name, "modelPage", record).html)
    errors: list[ErrorEstimate] = []
    for layer, layer_record in zip(layers, records, strict=True):
        try:
            payload = _build_layer_payload(layer, room, operation)
        except RegardError as error:  # the page prints it; thumbnails and measures are there
            layer_record["payload_error"] = str(error)
            continue
        if payload is not None:
            layer_record["payload"] = payload.record
            room -= payload.size
            errors.append(payload.error)
    record["error"] = combine_errors(errors)
    return build_page(name, "modelPage", record)


def _text_index(tokens: list[Any] | None, texts: dict[tuple[str, ...], int]) -> int | None:
    """Return the index of these tokens among the texts of the page; layers share texts."""
    if tokens is None:
        return None
    return texts.setdefault(tuple(escape_unprintable(str(token)) for token in tokens), len(texts))


# Thumbnails


def _thumbnails(layer: PageLayer) -> dict[str, Any]:
    """Encode the thumbnails of all heads together, reduced to at most THUMBNAIL_CELLS along an edge."""
    shape, cells = layer.shape, layer.means.shape[1:]
    fewer = [min(THUMBNAIL_CELLS, count) for count in cells]
    sums, maxima = layer.means * np.multiply.outer(*map(_rows_per_cell, shape, cells)), layer.maxima
    for axis in (0, 1):
        # A cell of the larger map lies in one of the smaller: both are floors of the same ratio.
        cell = np.arange(cells[axis]) * fewer[axis] // cells[axis]
        starts = np.searchsorted(cell, np.arange(fewer[axis]))
        sums = np.add.reduceat(sums, starts, axis + 1)
        maxima = np.maximum.reduceat(maxima, starts, axis + 1)
    means = sums / np.multiply.outer(*map(_rows_per_cell, shape, fewer))
    return encode_overview(means, maxima, maxima > 0, shape)


def _rows_per_cell(length: int, cells: int) -> Any:
    return np.bincount(np.arange(length) * cells // length, minlength=cells).astype(float)


# Payloads


def _build_layer_payload(layer: PageLayer, room: int, operation: str) -> FittedPayload | None:
    """Build the payload of as many heads as fit into `room` characters, with overviews if the text is long."""

    def add_overviews(record: dict[str, Any], payload: MatrixPayload) -> None:
        if max(layer.shape) > LONG_TEXT:
            record["overviews"] = _overviews(layer, payload)

    return fit_payload(
        layer.matrix,
        layer.heads,
        groups=layer.groups,
        head_dim=layer.head_dim,
        room=room,
        operation=operation,
        add=add_overviews,
    )


def _overviews(layer: PageLayer, payload: MatrixPayload) -> list[dict[str, Any]]:
    """Encode the overview of each head of a payload."""
    size = layer.means.shape[1:]
    return [
        encode_overview(means, maxima, live_cells(*intervals, layer.shape, size), layer.shape)
        for means, maxima, intervals in zip(layer.means, layer.maxima, payload.intervals, strict=False)
    ]


def _describe_sizes(layers: Sequence[PageLayer]) -> str:
    """Return the number of layers, heads and tokens in one line."""

    def count(number: int, noun: str) -> str:
        return f"{number:,} {noun}{'s' * (number != 1)}"

    heads = sum(len(layer.heads) for layer in layers)
    lengths = sorted({layer.shape[1] for layer in layers})
    modules = count(len({layer.module for layer in layers}), "layer")
    tokens = (
        " and ".join(f"{length:,}" for length in lengths) if len(lengths) < 4 else f"up to {lengths[-1]:,}"
    )
    return f"{modules}, {count(heads, 'head')}, {tokens} tokens."
