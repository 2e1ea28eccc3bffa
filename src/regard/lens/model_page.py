"""The model page: every head of a model as a small map, and every weight while `max_bytes` allows it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.core.matrix import AttentionMatrix
from regard.core.matrix_page import ErrorEstimate, FittedPayload, MatrixPayload, combine_errors, fit_payload
from regard.errors import ArgumentError, IndexOutOfRangeError, RegardError
from regard.findings import Finding, Findings
from regard.lens.find import as_numpy, select_batch_entry, select_layers
from regard.lens.head_table import measure_heads
from regard.lens.token_rows import TokenRows, as_token_lists, fit_tokens, order_sequences, token_count_error
from regard.measures import Coarse
from regard.pages.encoding import encode_overview, live_cells
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable

TokenLists = list[list[Any]] | None  # one list of tokens for each batch entry

OPERATION = "recording.page"
WINDOWS = (16, 128)
# The measures of `Recording.heads` in the order in which the page offers them, each with its caption.
CAPTIONS = {
    "entropy": "how widely a row spreads its weight, in nats; 0 if all of it is on one key",
    "first": "the share of the weight on the first token, the sink",
    "previous": "the share on the previous token",
    "distance": "how many tokens away the keys are, on average",
    **{f"within_{window}": f"the share on keys less than {window} tokens away" for window in WINDOWS},
    "heavy": "the share on the 10 % of keys that receive most weight",
    "duplicate": "the share on earlier copies of the token itself",
    "induction": "the share on the tokens after earlier copies",
}

LONG_TEXT = 1024  # tokens above which the map of a head starts from an overview in the page
THUMBNAIL_CELLS = 64  # cells along the edge of a head's thumbnail
OVERVIEW_CELLS = 256  # cells along the edge of the overview of a head of a long text


@dataclass
class ShownCall:
    """One attention call on a page.

    Attributes:
        module: Name of the module.
        layer: Number of the layer, from 0.
        shape: (q_len, kv_len).
        heads: The heads that are shown.
        first: Position of query 0 among the keys, None if queries and keys are different sequences.
        query_tokens: Tokens of the queries, or None.
        key_tokens: Tokens of the keys, or None.
        matrix: Attention of one batch entry, (all heads, q_len, kv_len), or (q_len, kv_len) without a head axis.
        head_dim: Width of a query.
        groups: How many heads share a key.
    """

    module: str
    layer: int
    shape: tuple[int, int]
    heads: list[int]
    first: int | None
    query_tokens: list[Any] | None
    key_tokens: list[Any] | None
    matrix: AttentionMatrix
    head_dim: int
    groups: int

    def fit_payload(self, room: int) -> FittedPayload | None:
        """Build the payload of as many heads as fit into `room` characters; None if none fits."""
        return fit_payload(
            self.matrix.problem,
            self.heads,
            groups=self.groups,
            head_dim=self.head_dim,
            room=room,
            operation=OPERATION,
            add=self.extend_record,
        )

    def extend_record(self, record: dict[str, Any], payload: MatrixPayload) -> None:
        """Add what else the page needs to the record of a payload: nothing, unless a subclass has something."""


@dataclass
class PageLayer(ShownCall):
    """One attention call on the model page, measured.

    Attributes:
        call: Which call of the layer it is, from 0.
        measures: For each measure, one number for each head in `heads`.
        means: Mean weight of each block, (len(heads), rows, columns) with the cells of `map_cells`.
        maxima: Largest weight of each block, the same shape.
    """

    call: int
    measures: Mapping[str, Sequence[float]]
    means: Any
    maxima: Any

    def extend_record(self, record: dict[str, Any], payload: MatrixPayload) -> None:
        """Add an overview of each head if the text is long."""
        if max(self.shape) > LONG_TEXT:
            size = self.means.shape[1:]
            record["overviews"] = [
                encode_overview(means, maxima, live_cells(*intervals, self.shape, size), self.shape)
                for means, maxima, intervals in zip(self.means, self.maxima, payload.intervals, strict=False)
            ]


def map_cells(q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the number of cells of the map of a head, (rows, columns)."""
    edge = OVERVIEW_CELLS if max(q_len, kv_len) > LONG_TEXT else THUMBNAIL_CELLS
    return min(edge, q_len), min(edge, kv_len)


def build_model_page(
    layer_calls: Sequence[LayerCall],
    findings: Findings,
    *,
    tokens: Any,
    query_tokens: Any,
    batch: int,
    layers: str | Sequence[str] | None,
    heads: Sequence[int] | None,
    title: str | None,
    max_bytes: int,
) -> Page:
    """Build the page of `Recording.page`; the arguments are those of the method."""
    token_lists, query_lists = (
        None if given is None else as_token_lists(given, OPERATION) for given in (tokens, query_tokens)
    )
    shown = build_page_layers(select_calls(layer_calls, layers), token_lists, query_lists, heads, batch)
    modules = {layer.module for layer in shown}
    texts: dict[tuple[str, ...], int] = {}
    measures = [name for name in CAPTIONS if any(name in layer.measures for layer in shown)]
    stacks, calls = stack_names(modules), Counter(layer.module for layer in shown)
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
        for layer in shown
    ]
    name = escape_unprintable(title or "All attention heads")
    record: dict[str, Any] = {
        "title": name,
        "lead": _describe_sizes(shown),
        "texts": list(texts),
        "measures": measures,
        "captions": CAPTIONS,
        "layers": records,
        "findings": [
            build_finding_record(finding, batch)
            for finding in findings
            if finding.module in modules or finding.kind == "not captured"
        ],
        "summary": findings.summary,
    }
    room = max_bytes - len(build_page(name, "modelPage", record).html)
    errors: list[ErrorEstimate] = []
    for layer, layer_record in zip(shown, records, strict=True):
        try:
            payload = layer.fit_payload(room)
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


def select_calls(layer_calls: Sequence[LayerCall], layers: str | Sequence[str] | None) -> list[LayerCall]:
    """Select calls by module name or pattern; skip empty matrices."""
    selected = [
        entry for entry in select_layers(layer_calls, layers, OPERATION) if math.prod(entry.call.shape)
    ]
    if selected:
        return selected
    received, hint = "an empty recording", "Run the model inside the with block."
    if layer_calls:
        received = f"layers={layers!r}, which matches none of the layers"
        hint = "list(recording) lists the names; * in a pattern matches any text."
    raise ArgumentError(OPERATION, received=received, expected="a layer that ran", hint=hint)


def build_page_layers(
    layer_calls: Sequence[LayerCall],
    tokens: TokenLists,
    query_tokens: TokenLists,
    heads: Sequence[int] | None,
    batch: int,
) -> list[PageLayer]:
    """Measure each call in one pass; tokens are one list for each batch entry, `heads` None for all."""
    shown: list[PageLayer] = []
    tiles: dict[Any, Any] = {}  # positions of copies, shared by all layers
    for layer, module, index, call in layer_calls:
        *lead, q_len, kv_len = call.shape
        num_heads, batch_size = lead[-1] if lead else 1, math.prod(lead[:-1])
        matrix = select_batch_entry(call, batch, OPERATION)  # checks `batch` before the pass
        token_rows = TokenRows.from_call(call)
        of_query, of_key = fit_to_call(
            call, tokens, query_tokens, is_cross_attention=token_rows.query_offset is None
        )
        cells = map_cells(q_len, kv_len)
        shared = of_key if token_rows.query_offset is not None else None
        columns, results = measure_heads(
            call, shared, WINDOWS, tiles, means=Coarse(cells, "mean"), maxima=Coarse(cells, "max")
        )
        chosen = choose_heads(call, heads)
        if not chosen:
            continue
        means, maxima = (
            as_numpy(result).reshape(batch_size, num_heads, *cells)[batch, chosen].astype(np.float32)
            for result in (results.means, results.maxima)
        )
        shown.append(
            PageLayer(
                module=module,
                layer=layer,
                call=index,
                shape=(q_len, kv_len),
                heads=chosen,
                first=token_rows.query_offset,
                query_tokens=None if of_query is None else of_query[batch],
                key_tokens=None if of_key is None else of_key[batch],
                measures={name: [float(column[head]) for head in chosen] for name, column in columns.items()},
                means=means,
                maxima=maxima,
                matrix=matrix,
                head_dim=int(call.query.shape[-1]),
                groups=call.groups,
            )
        )
    check_shown(shown, layer_calls, heads, tokens or query_tokens)
    return shown


def choose_heads(call: Call, heads: Sequence[int] | None) -> list[int]:
    """Return the given heads that a call has; all for None."""
    own = range(call.shape[-3] if len(call.shape) > 2 else 1)
    return list(own) if heads is None else [head for head in heads if head in own]


def check_shown(
    shown: Sequence[ShownCall],
    layer_calls: Sequence[LayerCall],
    heads: Sequence[int] | None,
    tokens: TokenLists,
) -> None:
    """Refuse heads that no call has, and tokens whose number fits no call."""
    if not shown:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"heads={list(heads or ())}",
            expected=f"numbers from 0 to {max(entry.call.shape[-3] for entry in layer_calls) - 1}",
            hint="Heads are counted from 0.",
        )
    if tokens is not None and not any(layer.query_tokens or layer.key_tokens for layer in shown):
        raise token_count_error(OPERATION, tokens, {layer.shape[1] for layer in shown})


def fit_to_call(
    call: Call, tokens: TokenLists, query_tokens: TokenLists, *, is_cross_attention: bool
) -> tuple[TokenLists, TokenLists]:
    """Return the tokens of the queries and of the keys, None if their number does not fit."""
    *lead, q_len, kv_len = call.shape

    def fit(lists: TokenLists, length: int) -> TokenLists:
        return None if lists is None else fit_tokens(lists, math.prod(lead[:-1]), length)

    if is_cross_attention:
        of_key = fit(tokens, kv_len)
        # Tokens that are not those of the keys belong to the queries: the keys may be patches of an image or sound.
        return fit(tokens if query_tokens is None and of_key is None else query_tokens, q_len), of_key
    own, other = order_sequences(call.name, tokens, query_tokens)  # both may have the same length
    fitted = fit(own, kv_len) or fit(other, kv_len)
    return fitted, fitted


def build_finding_record(finding: Finding, batch: int) -> dict[str, Any]:
    """Return a finding as the page shows it; `here` says whether it concerns this batch entry."""
    return {
        **{name: getattr(finding, name) for name in ("kind", "severity", "module", "hint", "heads")},
        "message": finding.message,
        "rows": finding.rows[:1],
        "here": not finding.batch or batch in finding.batch,
        "where": finding.where,
        "evidence": finding.evidence_text,
    }


def stack_names(names: Iterable[str]) -> dict[str, str]:
    """Return what distinguishes the layers of several stacks: the parts of their names that differ, without numbers.

    >>> stack_names(["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"])["decoder.0.cross"]
    'decoder cross'
    >>> stack_names(["layers.0.attn", "layers.1.attn"])
    {'layers.0.attn': '', 'layers.1.attn': ''}
    """
    parts = {name: [part for part in name.split(".") if not part.isdigit()] for name in names}
    depth = max(map(len, parts.values()))
    differ = [i for i in range(depth) if len({tuple(own[i : i + 1]) for own in parts.values()}) > 1]
    return {name: " ".join(own[i] for i in differ if i < len(own)) for name, own in parts.items()}
