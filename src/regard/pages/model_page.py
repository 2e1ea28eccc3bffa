"""`seen.page`: every head of a model in one page, each as a small map, and every weight as far as there is room."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError, IndexOutOfRangeError, RegardError
from regard.lens.analysis.find import as_numpy, named, one_entry
from regard.lens.analysis.finding import Finding, Findings
from regard.lens.analysis.head_table import measured
from regard.lens.analysis.token_rows import Place, fitting, listed, misfit
from regard.lens.call import Call
from regard.measures import Coarse
from regard.pages.html import Page, embedded, page
from regard.pages.parts import Part, covered, levels
from regard.pages.payload import Carried, Error, carried
from regard.render.text import printable

Layer = tuple[int, str, int, Call]
Texts = list[list[Any]] | None

# Cells along the edge of a head's small map, and of the map that a long text's head opens with; and what is long.
SMALL, LARGE, LONG = 64, 256, 1024
WINDOWS = (16, 128)
# Characters around each part in the page.
AROUND = 64

MEANINGS = {
    "entropy": "how widely a row is spread, in nats",
    "first": "the share on the first token, the sink",
    "previous": "the share on the token before",
    "distance": "how many tokens away the keys are",
    **{f"within_{window}": f"the share on keys less than {window} tokens away" for window in WINDOWS},
    "heavy": "the share that the tenth of the keys with most of it has",
    "duplicate": "the share on earlier copies of the token itself",
    "induction": "the share on what came after earlier copies",
}


@dataclass
class _Entry:
    """A call on the page: the heads that are shown, the texts of its queries and keys, its measures and maps."""

    number: int
    name: str
    which: int
    call: Call
    heads: list[int]
    first: int | None
    texts: tuple[Texts, Texts]
    columns: dict[str, Any]
    maps: Any  # (heads, rows, columns), the mean weight of each block


def model_page(
    layers: Sequence[Layer],
    findings: Findings,
    *,
    tokens: Any,
    key_tokens: Any,
    batch: int,
    chosen: str | Sequence[str] | None,
    heads: Sequence[int] | None,
    title: str | None,
    max_bytes: int,
) -> Page:
    """What `Recording.page` returns."""
    own, other = (None if each is None else listed(each, "seen.page") for each in (tokens, key_tokens))
    entries = _entries(_shown(layers, chosen), own, other, heads, batch)
    texts: dict[tuple[str, ...], int] = {}
    measures = [name for name in MEANINGS if any(name in entry.columns for entry in entries)]
    kinds, calls = _kinds([entry.name for entry in entries]), Counter(entry.name for entry in entries)
    records = [
        {
            "module": entry.name,
            "layer": entry.number,
            "call": entry.which,
            "calls": calls[entry.name],
            "kind": kinds[entry.name],
            "shape": entry.call.shape[-2:],
            "first": entry.first,
            "heads": entry.heads,
            "query_text": _place(entry.texts[0], batch, texts),
            "key_text": _place(entry.texts[1], batch, texts),
            "measures": {name: _column(entry, name) for name in measures},
            "maps": _small(entry),
            "carried": None,
            "why": None,
        }
        for entry in entries
    ]
    name = printable(title or "Where every head looks")
    record: dict[str, Any] = {
        "title": name,
        "lead": _lead(entries),
        "texts": list(texts),
        "measures": measures,
        "meanings": MEANINGS,
        "entries": records,
        "findings": [
            _finding(each, batch) for each in findings if each.module in calls or each.kind == "not seen"
        ],
        "found": repr(findings).split("\n")[0],
    }
    room = max_bytes - len(page(name, "model.js", record).html)
    errors: list[Error] = []
    for entry, made in zip(entries, records, strict=True):
        try:
            made["carried"], error, taken = _carry(entry, batch, room)
        except RegardError as wrong:  # what a page cannot do by itself, it says; maps and measures are there
            made["why"] = str(wrong)
            continue
        room -= taken
        errors += error
    record["error"] = _largest(errors)
    return page(name, "model.js", record)


def _shown(layers: Sequence[Layer], chosen: str | Sequence[str] | None) -> list[Layer]:
    """The layers that are asked for, by name or pattern; those without entries have nothing to show."""
    found = [each for each in named(layers, chosen, "seen.page") if math.prod(each[3].shape)]
    if not found:
        raise ArgumentError(
            "seen.page",
            received="nothing that was seen"
            if not layers
            else f"layers={chosen!r}, which none of the layers is",
            expected="a layer that ran",
            hint="list(seen) has the names; * in a pattern stands for any part."
            if layers
            else "Run the model inside the with block.",
        )
    return found


def _entries(
    layers: list[Layer], own: Texts, other: Texts, heads: Sequence[int] | None, batch: int
) -> list[_Entry]:
    entries: list[_Entry] = []
    copies: dict[Any, Any] = {}  # where they are is the same for every layer
    for number, name, which, call in layers:
        *lead, q_len, kv_len = call.shape
        count, size = lead[-1] if lead else 1, math.prod(lead[:-1])
        if not -size <= batch < size:
            one_entry(call, batch, "seen.page")  # which raises, and says why
        place = Place.of(call)
        texts = _texts(call, place, own, other)
        edge = LARGE if max(q_len, kv_len) > LONG else SMALL
        blocks = min(edge, q_len), min(edge, kv_len)
        same = texts[1] if place.first is not None else None
        columns, made = measured(call, same, WINDOWS, copies, map=Coarse(blocks))
        shown = list(range(count)) if heads is None else [head for head in heads if 0 <= head < count]
        maps = as_numpy(made.map).reshape(size, count, *blocks)[batch, shown].astype(np.float32)
        if shown:
            entries.append(_Entry(number, name, which, call, shown, place.first, texts, columns, maps))
    if not entries:
        raise IndexOutOfRangeError(
            "seen.page",
            received=f"heads={list(heads or ())}",
            expected=f"numbers from 0 to {max(call.shape[-3] for _, _, _, call in layers) - 1}",
            hint="Heads are counted from 0.",
        )
    if own is not None and not any(entry.texts[0] or entry.texts[1] for entry in entries):
        raise misfit("seen.page", own, {entry.call.shape[-1] for entry in entries})
    return entries


def _texts(call: Call, place: Place, own: Texts, other: Texts) -> tuple[Texts, Texts]:
    """The texts of queries and of keys, one list for each batch entry, where they fit."""
    *lead, q_len, kv_len = call.shape

    def fit(texts: Texts, length: int) -> Texts:
        return None if texts is None else fitting(texts, math.prod(lead[:-1]), length)

    if place.first is None:
        return fit(own, q_len), fit(other, kv_len)
    # The tokens of both sequences may be as many; an encoder reads what others look at.
    encodes = "encoder" in call.name and "decoder" not in call.name
    given = (other, own) if encodes and other is not None else (own, other)
    same = fit(given[0], kv_len) or fit(given[1], kv_len)
    return same, same


def _place(texts: Texts, batch: int, known: dict[tuple[str, ...], int]) -> int | None:
    """Which of the page's texts this one is; layers share theirs."""
    if texts is None:
        return None
    return known.setdefault(tuple(printable(str(token)) for token in texts[batch]), len(known))


def _column(entry: _Entry, name: str) -> list[float]:
    """A measure of each head, NaN where the layer has none."""
    column = entry.columns.get(name)
    return [math.nan if column is None else float(column[head]) for head in entry.heads]


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


def _finding(found: Finding, batch: int) -> dict[str, Any]:
    """A finding as the page shows it: at its heads, if it is one of this batch entry."""
    return {
        **{name: getattr(found, name) for name in ("kind", "severity", "what", "module", "hint", "heads")},
        "rows": found.rows[:1],
        "here": not found.batch or batch in found.batch,
        "where": found.where,
        "evidence": found.told,
    }


# The maps


def _small(entry: _Entry) -> dict[str, Any]:
    """The small maps of all heads as one part, and how many weights a cell is the mean of."""
    means = _means(entry)
    size, shape = means.shape[1:], entry.call.shape[-2:]
    blocks = [n / count for n, count in zip(shape, size, strict=True)]
    return {"size": size, "block": blocks, **levels(means, means > 0)}


def _means(entry: _Entry) -> Any:
    """The maps of at most SMALL cells along an edge, from those there are."""
    shape, cells = entry.call.shape[-2:], entry.maps.shape[1:]
    few = [min(SMALL, count) for count in cells]
    sums = entry.maps * np.multiply.outer(*map(_counts, shape, cells))
    for axis in (0, 1):
        # A cell of the larger map lies in one of the smaller: both are floors of the same ratio.
        which = np.arange(cells[axis]) * few[axis] // cells[axis]
        sums = np.add.reduceat(sums, np.searchsorted(which, np.arange(few[axis])), axis + 1)
    return sums / np.multiply.outer(*map(_counts, shape, few))


def _counts(length: int, cells: int) -> Any:
    """How many of so many rows fall into each cell."""
    return np.bincount(np.arange(length) * cells // length, minlength=cells).astype(float)


# What is carried


def _carry(entry: _Entry, batch: int, room: int) -> tuple[dict[str, Any] | None, list[Error], int]:
    """As many of the heads as there is room for, with all that their weights are made from; their error and size."""
    call, fits = entry.call, entry.heads
    *lead, q_len, kv_len = call.shape
    matrix = one_entry(call, batch, "seen.page")
    while fits:
        if _about(call, fits) <= room:
            made = carried(matrix.lazy[fits] if lead else matrix, "seen.page")
            record = {"heads": fits, **made.record}
            if max(q_len, kv_len) > LONG:
                record["overviews"] = _overviews(entry, made)
            size = _bytes(record)
            if size <= room:
                return record, [made.error], size
        fits = fits[:-1]
    return None, [], 0


def _overviews(entry: _Entry, made: Carried) -> list[dict[str, Any]]:
    """The larger map of each head that is carried, which it opens with."""
    (rows, keys), size = entry.call.shape[-2:], entry.maps.shape[1:]
    block = [n / count for n, count in zip((rows, keys), size, strict=True)]
    return [
        {"size": size, "block": block, "taken": None, **levels(means, covered(*seen, (rows, keys), size))}
        for means, seen in zip(entry.maps, made.runs, strict=False)
    ]


def _about(call: Call, heads: list[int]) -> float:
    """The characters that heads take at least: halves for queries and keys, little compressed, and each lse."""
    q_len, kv_len = call.shape[-2:]
    keys, width = len({head // call.groups for head in heads}), int(call.query.shape[-1])
    return (1.7 * width * (len(heads) * q_len + keys * kv_len) + 3 * len(heads) * q_len) * 4 / 3


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


def _lead(entries: list[_Entry]) -> str:
    """The sizes in a few words."""

    def counted(number: int, word: str) -> str:
        return f"{number:,} {word}{'s' * (number != 1)}"

    heads, lengths = (
        sum(len(entry.heads) for entry in entries),
        sorted({entry.call.shape[-1] for entry in entries}),
    )
    layers = counted(len({entry.name for entry in entries}), "layer")
    keys = " and ".join(f"{length:,}" for length in lengths) if len(lengths) < 4 else f"up to {lengths[-1]:,}"
    return f"{layers}, {counted(heads, 'head')}, {keys} tokens."
