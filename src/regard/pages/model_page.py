"""The model page: every head of a model as a small map, and every weight while `max_bytes` allows it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.pages.html import Page, embedded, page
from regard.pages.parts import Part, covered, levels
from regard.pages.payload import Carried, Error, carried
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix

# Cells along the edge of a head's small map, and of the map that a head of a long text opens with; above LONG tokens.
SMALL, LARGE, LONG = 64, 256, 1024
# Characters around each part in the page.
AROUND = 64


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
        maps: Mean weight of each block, (len(heads), rows, columns) with the cells of `map_cells`.
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
    maps: Any
    matrix: AttentionMatrix
    head_dim: int
    groups: int


def map_cells(q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the (rows, columns) of cells that a map of this many queries and keys has."""
    edge = LARGE if max(q_len, kv_len) > LONG else SMALL
    return min(edge, q_len), min(edge, kv_len)


def model_page(
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
    kinds, calls = _kinds([layer.module for layer in layers]), Counter(layer.module for layer in layers)
    records = [
        {
            "module": layer.module,
            "layer": layer.layer,
            "call": layer.call,
            "calls": calls[layer.module],
            "kind": kinds[layer.module],
            "shape": layer.shape,
            "first": layer.first,
            "heads": layer.heads,
            "query_text": _place(layer.query_tokens, texts),
            "key_text": _place(layer.key_tokens, texts),
            "measures": {name: layer.measures.get(name, [math.nan] * len(layer.heads)) for name in measures},
            "maps": _small(layer),
            "carried": None,
            "why": None,
        }
        for layer in layers
    ]
    name = escape_unprintable(title)
    record: dict[str, Any] = {
        "title": name,
        "lead": _lead(layers),
        "texts": list(texts),
        "measures": measures,
        "meanings": dict(captions),
        "entries": records,
        "findings": list(findings),
        "found": summary,
    }
    room = max_bytes - len(page(name, "model.js", record).html)
    errors: list[Error] = []
    for layer, made in zip(layers, records, strict=True):
        try:
            made["carried"], error, taken = _carry(layer, room, operation)
        except RegardError as wrong:  # the page says what it cannot compute; maps and measures are there
            made["why"] = str(wrong)
            continue
        room -= taken
        errors += error
    record["error"] = _largest(errors)
    return page(name, "model.js", record)


def _place(tokens: list[Any] | None, known: dict[tuple[str, ...], int]) -> int | None:
    """Return the index of these tokens among the texts of the page; layers share texts."""
    if tokens is None:
        return None
    return known.setdefault(tuple(escape_unprintable(str(token)) for token in tokens), len(known))


def _kinds(names: list[str]) -> dict[str, str]:
    """What tells the layers of several stacks apart: the parts of their names that differ, numbers left out.

    >>> _kinds(["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"])["decoder.0.cross"]
    'decoder cross'
    >>> _kinds(["layers.0.attn", "layers.1.attn"])
    {'layers.0.attn': '', 'layers.1.attn': ''}
    """
    parts = {name: [part for part in name.split(".") if not part.isdigit()] for name in names}
    places = range(max(map(len, parts.values())))
    differ = [i for i in places if len({tuple(each[i : i + 1]) for each in parts.values()}) > 1]
    return {name: " ".join(each[i] for i in differ if i < len(each)) for name, each in parts.items()}


# The maps


def _small(layer: PageLayer) -> dict[str, Any]:
    """The small maps of all heads as one part, and how many weights a cell is the mean of."""
    means = _means(layer)
    size, shape = means.shape[1:], layer.shape
    blocks = [n / count for n, count in zip(shape, size, strict=True)]
    return {"size": size, "block": blocks, **levels(means, means > 0)}


def _means(layer: PageLayer) -> Any:
    """The maps of at most SMALL cells along an edge, from those there are."""
    shape, cells = layer.shape, layer.maps.shape[1:]
    few = [min(SMALL, count) for count in cells]
    sums = layer.maps * np.multiply.outer(*map(_counts, shape, cells))
    for axis in (0, 1):
        # A cell of the larger map lies in one of the smaller: both are floors of the same ratio.
        which = np.arange(cells[axis]) * few[axis] // cells[axis]
        sums = np.add.reduceat(sums, np.searchsorted(which, np.arange(few[axis])), axis + 1)
    return sums / np.multiply.outer(*map(_counts, shape, few))


def _counts(length: int, cells: int) -> Any:
    """How many of so many rows fall into each cell."""
    return np.bincount(np.arange(length) * cells // length, minlength=cells).astype(float)


# What is carried


def _carry(layer: PageLayer, room: int, operation: str) -> tuple[dict[str, Any] | None, list[Error], int]:
    """As many of the heads as there is room for, with all that their weights are made from; their error and size."""
    matrix, fits = layer.matrix, layer.heads
    while fits:
        if _about(layer, fits) <= room:
            made = carried(matrix.lazy[fits] if len(matrix.shape) > 2 else matrix, operation)
            record = {"heads": fits, **made.record}
            if max(layer.shape) > LONG:
                record["overviews"] = _overviews(layer, made)
            size = _bytes(record)
            if size <= room:
                return record, [made.error], size
        fits = fits[:-1]
    return None, [], 0


def _overviews(layer: PageLayer, made: Carried) -> list[dict[str, Any]]:
    """The larger map of each head that is carried, which it opens with."""
    (rows, keys), size = layer.shape, layer.maps.shape[1:]
    block = [n / count for n, count in zip((rows, keys), size, strict=True)]
    return [
        {"size": size, "block": block, "taken": None, **levels(means, covered(*seen, (rows, keys), size))}
        for means, seen in zip(layer.maps, made.runs, strict=False)
    ]


def _about(layer: PageLayer, heads: list[int]) -> float:
    """The characters that heads take at least: halves for queries and keys, little compressed, and each lse."""
    q_len, kv_len = layer.shape
    keys = len({head // layer.groups for head in heads})
    return (1.7 * layer.head_dim * (len(heads) * q_len + keys * kv_len) + 3 * len(heads) * q_len) * 4 / 3


def _bytes(record: Any) -> int:
    """The characters that a record takes in a page, its parts too."""
    parts: list[Part] = []
    text = embedded(record, parts)
    return len(text) + sum(AROUND + len(part.text) for part in parts)


def _largest(errors: list[Any]) -> dict[str, Any] | None:
    """The largest of the layers' errors, and all that was compared."""
    if not errors:
        return None
    worst = {name: max(getattr(each, name) for each in errors) for name in Error._fields}
    return worst | {
        "compared": sum(each.compared for each in errors),
        "exact": all(each.exact for each in errors),
    }


def _lead(layers: Sequence[PageLayer]) -> str:
    """The sizes in a few words."""

    def counted(number: int, word: str) -> str:
        return f"{number:,} {word}{'s' * (number != 1)}"

    heads = sum(len(layer.heads) for layer in layers)
    lengths = sorted({layer.shape[1] for layer in layers})
    modules = counted(len({layer.module for layer in layers}), "layer")
    keys = " and ".join(f"{length:,}" for length in lengths) if len(lengths) < 4 else f"up to {lengths[-1]:,}"
    return f"{modules}, {counted(heads, 'head')}, {keys} tokens."
