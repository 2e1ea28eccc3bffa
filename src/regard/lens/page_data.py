"""Collect the plain data that the model page shows: maps, measures, tokens and findings of every head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.lens.analysis.find import as_numpy, named, one_entry
from regard.lens.analysis.finding import Finding, Findings
from regard.lens.analysis.head_table import measured
from regard.lens.analysis.token_rows import Place, fitting, listed, misfit
from regard.lens.call import Call
from regard.measures import Coarse
from regard.pages.html import Page
from regard.pages.model_page import PageLayer, map_cells, model_page

Layer = tuple[int, str, int, Call]
TokenLists = list[list[Any]] | None  # one list of tokens for each batch entry

OPERATION = "recording.page"
WINDOWS = (16, 128)
# The measures of `Recording.heads` in the order in which the page offers them, each with its caption.
CAPTIONS = {
    "entropy": "how widely a row is spread, in nats",
    "first": "the share on the first token, the sink",
    "previous": "the share on the token before",
    "distance": "how many tokens away the keys are",
    **{f"within_{window}": f"the share on keys less than {window} tokens away" for window in WINDOWS},
    "heavy": "the share of the top tenth of the keys",
    "duplicate": "the share on earlier copies of the token itself",
    "induction": "the share on what came after earlier copies",
}


def build_page(
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
    """Build the page that `Recording.page` returns."""
    own, other = (None if given is None else listed(given, OPERATION) for given in (tokens, key_tokens))
    shown = page_layers(select_layers(layers, chosen), own, other, heads, batch)
    names = {layer.module for layer in shown}
    return model_page(
        shown,
        title=title or "Where every head looks",
        captions=CAPTIONS,
        findings=[
            finding_record(finding, batch)
            for finding in findings
            if finding.module in names or finding.kind == "not captured"
        ],
        summary=findings.summary,
        max_bytes=max_bytes,
        operation=OPERATION,
    )


def select_layers(layers: Sequence[Layer], chosen: str | Sequence[str] | None) -> list[Layer]:
    """Select layers by name or pattern; skip empty matrices.

    Raises:
        ArgumentError: No layer is left.
    """
    selected = [layer for layer in named(layers, chosen, OPERATION) if math.prod(layer[3].shape)]
    if not selected:
        raise ArgumentError(
            OPERATION,
            received=f"layers={chosen!r}, which matches none of the layers"
            if layers
            else "an empty recording",
            expected="a layer that ran",
            hint="list(recording) has the names; * in a pattern stands for any part."
            if layers
            else "Run the model inside the with block.",
        )
    return selected


def page_layers(
    layers: list[Layer], own: TokenLists, other: TokenLists, heads: Sequence[int] | None, batch: int
) -> list[PageLayer]:
    """Measure each call in one pass and return it as plain data for the page."""
    shown: list[PageLayer] = []
    copies: dict[Any, Any] = {}  # positions of repeated tokens, shared by all layers
    for number, name, which, call in layers:
        *lead, q_len, kv_len = call.shape
        count, size = lead[-1] if lead else 1, math.prod(lead[:-1])
        matrix = one_entry(call, batch, OPERATION)  # checks the batch index before the pass
        place = Place.of(call)
        query_tokens, key_tokens = _fit_tokens(call, place, own, other)
        cells = map_cells(q_len, kv_len)
        same = key_tokens if place.first is not None else None
        columns, results = measured(call, same, WINDOWS, copies, map=Coarse(cells))
        kept = list(range(count)) if heads is None else [head for head in heads if 0 <= head < count]
        if not kept:
            continue
        maps = as_numpy(results.map).reshape(size, count, *cells)[batch, kept].astype(np.float32)
        shown.append(
            PageLayer(
                module=name,
                layer=number,
                call=which,
                shape=(q_len, kv_len),
                heads=kept,
                first=place.first,
                query_tokens=None if query_tokens is None else query_tokens[batch],
                key_tokens=None if key_tokens is None else key_tokens[batch],
                measures={
                    measure: [float(column[head]) for head in kept] for measure, column in columns.items()
                },
                maps=maps,
                matrix=matrix,
                head_dim=int(call.query.shape[-1]),
                groups=call.groups,
            )
        )
    if not shown:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"heads={list(heads or ())}",
            expected=f"numbers from 0 to {max(call.shape[-3] for _, _, _, call in layers) - 1}",
            hint="Heads are counted from 0.",
        )
    if own is not None and not any(layer.query_tokens or layer.key_tokens for layer in shown):
        raise misfit(OPERATION, own, {layer.shape[1] for layer in shown})
    return shown


def _fit_tokens(
    call: Call, place: Place, own: TokenLists, other: TokenLists
) -> tuple[TokenLists, TokenLists]:
    """Return the tokens of the queries and of the keys, None where the lengths differ."""
    *lead, q_len, kv_len = call.shape

    def fit(tokens: TokenLists, length: int) -> TokenLists:
        return None if tokens is None else fitting(tokens, math.prod(lead[:-1]), length)

    if place.first is None:
        return fit(own, q_len), fit(other, kv_len)
    # Both sequences may have the same length; an encoder reads the one that cross-attention takes its keys from.
    encodes = "encoder" in call.name and "decoder" not in call.name
    preferred, fallback = (other, own) if encodes and other is not None else (own, other)
    tokens = fit(preferred, kv_len) or fit(fallback, kv_len)
    return tokens, tokens


def finding_record(finding: Finding, batch: int) -> dict[str, Any]:
    """Return a finding as the page shows it; `here` says whether it concerns this batch entry."""
    return {
        **{name: getattr(finding, name) for name in ("kind", "severity", "module", "hint", "heads")},
        "what": finding.message,
        "rows": finding.rows[:1],
        "here": not finding.batch or batch in finding.batch,
        "where": finding.where,
        "evidence": finding.evidence_text,
    }
