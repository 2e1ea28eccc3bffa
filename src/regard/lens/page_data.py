"""Collect the plain data that the model page shows: maps, measures, tokens and findings of every head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.findings import Finding, Findings
from regard.lens.find import as_numpy, select_batch_entry, select_layers
from regard.lens.head_table import measure_heads
from regard.lens.token_rows import TokenRows, as_token_lists, fit_tokens, token_count_error
from regard.measures import Coarse
from regard.pages.html import Page
from regard.pages.model_page import PageLayer, build_model_page, map_cells

TokenLists = list[list[Any]] | None  # one list of tokens for each batch entry

OPERATION = "recording.page"
WINDOWS = (16, 128)
# The measures of `Recording.heads` in the order in which the page offers them, each with its caption.
CAPTIONS = {
    "entropy": "how widely a row is spread, in nats; 0 if all its weight is on one key",
    "first": "the share of the weight on the first token, the sink",
    "previous": "the share on the token before",
    "distance": "how many tokens away the keys are, on average",
    **{f"within_{window}": f"the share on keys less than {window} tokens away" for window in WINDOWS},
    "heavy": "the share that goes to the tenth of the keys that receives most",
    "duplicate": "the share on earlier copies of the token itself",
    "induction": "the share on what came after earlier copies",
}


def build_page(
    layer_calls: Sequence[LayerCall],
    findings: Findings,
    *,
    tokens: Any,
    key_tokens: Any,
    batch: int,
    layers: str | Sequence[str] | None,
    heads: Sequence[int] | None,
    title: str | None,
    max_bytes: int,
) -> Page:
    """Build the page that `Recording.page` returns.

    Args:
        layer_calls: The calls of the recording.
        findings: The findings to list.
        tokens: Tokens of queries and keys, or None.
        key_tokens: Tokens of the keys of cross-attention, or None.
        batch: The batch entry to show.
        layers: Names of modules or patterns; None for all.
        heads: The heads to show; None for all.
        title: Title of the page.
        max_bytes: Heads carry all their weights until the page has this size.

    Returns:
        The page.
    """
    token_lists, key_lists = (
        None if given is None else as_token_lists(given, OPERATION) for given in (tokens, key_tokens)
    )
    shown = build_page_layers(select_calls(layer_calls, layers), token_lists, key_lists, heads, batch)
    names = {layer.module for layer in shown}
    return build_model_page(
        shown,
        title=title or "All attention heads",
        captions=CAPTIONS,
        findings=[
            build_finding_record(finding, batch)
            for finding in findings
            if finding.module in names or finding.kind == "not captured"
        ],
        summary=findings.summary,
        max_bytes=max_bytes,
        operation=OPERATION,
    )


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
        hint = "list(recording) has the names; * in a pattern stands for any part."
    raise ArgumentError(OPERATION, received=received, expected="a layer that ran", hint=hint)


def build_page_layers(
    layer_calls: Sequence[LayerCall],
    tokens: TokenLists,
    key_tokens: TokenLists,
    heads: Sequence[int] | None,
    batch: int,
) -> list[PageLayer]:
    """Measure each call in one pass, and return it as plain data for the page.

    Args:
        layer_calls: The calls to show.
        tokens: Tokens of queries and keys, or None.
        key_tokens: Tokens of the keys of cross-attention, or None.
        heads: The heads to show; None for all.
        batch: The batch entry to show.

    Returns:
        One entry for each call.

    Raises:
        ArgumentError: If the number of tokens fits no layer.
        IndexOutOfRangeError: If there is no such head or batch entry.
    """
    shown: list[PageLayer] = []
    tiles: dict[Any, Any] = {}  # positions of copies, shared by all layers
    for layer, module, index, call in layer_calls:
        *lead, q_len, kv_len = call.shape
        num_heads, batch_size = lead[-1] if lead else 1, math.prod(lead[:-1])
        matrix = select_batch_entry(call, batch, OPERATION)  # checks `batch` before the pass
        token_rows = TokenRows.from_call(call)
        of_query, of_key = _fit_to_call(call, token_rows, tokens, key_tokens)
        cells = map_cells(q_len, kv_len)
        shared = of_key if token_rows.query_offset is not None else None
        columns, results = measure_heads(
            call, shared, WINDOWS, tiles, means=Coarse(cells), maxima=Coarse(cells, "max")
        )
        own_heads = range(num_heads)
        chosen = list(own_heads) if heads is None else [head for head in heads if head in own_heads]
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
    if not shown:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"heads={list(heads or ())}",
            expected=f"numbers from 0 to {max(entry.call.shape[-3] for entry in layer_calls) - 1}",
            hint="Heads are counted from 0.",
        )
    if tokens is not None and not any(layer.query_tokens or layer.key_tokens for layer in shown):
        raise token_count_error(OPERATION, tokens, {layer.shape[1] for layer in shown})
    return shown


def _fit_to_call(
    call: Call, token_rows: TokenRows, tokens: TokenLists, key_tokens: TokenLists
) -> tuple[TokenLists, TokenLists]:
    """Return the tokens of the queries and of the keys, None if their number does not fit."""
    *lead, q_len, kv_len = call.shape

    def fit(lists: TokenLists, length: int) -> TokenLists:
        return None if lists is None else fit_tokens(lists, math.prod(lead[:-1]), length)

    if token_rows.query_offset is None:
        return fit(tokens, q_len), fit(key_tokens, kv_len)
    # Both sequences may have the same length; an encoder reads the one that cross-attention takes its keys from.
    is_encoder = "encoder" in call.name and "decoder" not in call.name
    lists = (key_tokens, tokens) if is_encoder and key_tokens is not None else (tokens, key_tokens)
    fitted = fit(lists[0], kv_len) or fit(lists[1], kv_len)
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
