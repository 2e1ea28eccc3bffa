"""Build the table of `Recording.heads`: the measures that identify kinds of heads, from one pass for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.capture.output_projections import OutputProjections
from regard.lens.find import as_numpy, compute_output_norms, require_weights
from regard.lens.joined_layers import measure_layers
from regard.lens.table import Table
from regard.lens.token_rows import TokenRows, as_token_lists, fit_tokens, token_count_error
from regard.lens.weight_measures import DistanceBands, ReceivedFrom, TokenCopies, WeightAt
from regard.measures import Entropy, Measure

# The fraction of the keys that count as heavy hitters.
HEAVY_FRACTION = 0.1


def build_head_table(
    layer_calls: Sequence[LayerCall],
    tokens: Any = None,
    windows: Sequence[int] = (16, 128),
    projections: OutputProjections | None = None,
) -> Table:
    """Build the table of `Recording.heads`.

    Args:
        layer_calls: The calls to measure.
        tokens: Token ids or texts, (n,) or (batch, n), or None.
        windows: Sizes of the `within_…` columns.
        projections: The output projections of the recording, for the column `contribution`.
    """
    table, fits, lengths = Table(), tokens is None, set()
    tiles: dict[Any, Any] = {}  # positions of copies, shared by all layers
    token_lists = None if tokens is None else as_token_lists(tokens, "recording.heads")
    norms = [
        None if projections is None else compute_output_norms(entry.call, projections)
        for entry in layer_calls
    ]
    for _, module, _, call in layer_calls:
        hint = f"The results are recording.calls({module!r})[0].measures. Or call regard.watch without measures, "
        require_weights(call, "recording.heads", f"{hint}with dtype=torch.bfloat16 to save memory.")

    def take_tokens(call: Call) -> list[list[Any]] | None:
        *lead, _, kv_len = call.shape
        return None if token_lists is None else fit_tokens(token_lists, math.prod(lead[:-1]), kv_len)

    measured = measure_layers(
        [entry.call for entry in layer_calls],
        lambda call: measure_heads(call, take_tokens(call), windows, tiles)[0],
    )
    for (layer, module, index, call), lengths_added, columns in zip(
        layer_calls, norms, measured, strict=True
    ):
        lengths.add(call.shape[-1])
        own = take_tokens(call)
        fits = fits or own is not None
        if token_lists is not None and own is None:
            nan = np.full(len(columns["entropy"]), np.nan)
            columns |= {"duplicate": nan, "induction": nan}
        if any(entry is not None for entry in norms):
            columns["contribution"] = np.full(len(columns["entropy"]), np.nan)
            if lengths_added is not None:
                rows = TokenRows.from_call(call).rows
                columns["contribution"] = mean_over_rows(as_numpy_per_head(lengths_added), rows)
        lists = {name: column.tolist() for name, column in columns.items()}
        for head in range(len(columns["entropy"])):
            numbers = {name: column[head] for name, column in lists.items()}
            table.append({"module": module, "layer": layer, "call": index, "head": head, **numbers})
    if not fits and token_lists is not None:
        raise token_count_error("recording.heads", token_lists, lengths)
    return table


def measure_heads(
    call: Call,
    tokens: list[list[Any]] | None,
    windows: Sequence[int],
    tiles: dict[Any, Any],
    **extra: Measure,
) -> tuple[dict[str, Any], Any]:
    """Measure the heads of one call: means over the tokens of all batch entries, without padding.

    Returns:
        Columns by name, (heads,) each, and the results of all measures, `extra` included; None instead of the results
        if the matrix is empty.
    """
    positional = ["distance", "previous", *(f"within_{window}" for window in windows)]
    names = ["entropy", "first", "previous", "distance", *positional[2:], "heavy"]
    names += [] if tokens is None else ["duplicate", "induction"]
    nan = np.full(call.shape[-3] if len(call.shape) > 2 else 1, np.nan)
    if not math.prod(call.shape):
        return dict.fromkeys(names, nan), None
    token_rows = TokenRows.from_call(call)
    measures: dict[str, Measure] = {
        "entropy": Entropy(),
        "first": WeightAt(token_rows.first_key),
        "received": ReceivedFrom(token_rows.rows),
    }
    counted_rows = {"entropy": token_rows.rows, "first": token_rows.rows}
    if token_rows.query_offset is not None:
        near = [(1 - int(window), int(window) - 1) for window in windows]
        # A sink has no position: the mean distance is over the weights of the keys.
        has_sink = call.matrix.problem.has_sink
        bands = [(-1, -1), *near, *([(-math.inf, math.inf)] if has_sink else [])]
        measures["bands"] = DistanceBands(bands, token_rows.query_offset)
        previous = token_rows.own_keys - 1
        has_previous = (previous >= 0) & token_rows.keys[..., np.maximum(previous, 0)]
        counted_rows |= dict.fromkeys(positional, token_rows.rows)
        counted_rows["previous"] = token_rows.rows & has_previous
        if tokens is not None:
            measures["copies"], has_copy = build_copies_measure(token_rows, tokens, tiles)
            counted_rows |= dict.fromkeys(("duplicate", "induction"), has_copy)
    results = call.matrix.measure(**measures, **extra)
    by_row = {"entropy": results.entropy, "first": results.first}
    if token_rows.query_offset is not None:
        by_row |= {name: results.bands[..., i] for i, name in enumerate(positional)}
        if has_sink:
            total = results.bands[..., -1]
            by_row["distance"] = by_row["distance"] / (total + (total == 0))
    if "copies" in measures:
        by_row |= {"duplicate": results.copies[..., 0], "induction": results.copies[..., 1]}
    columns = {
        name: mean_over_rows(as_numpy_per_head(rows), counted_rows[name]) for name, rows in by_row.items()
    }
    columns["heavy"] = heavy_hitter_share(as_numpy_per_head(results.received), token_rows)
    return {name: columns.get(name, nan) for name in names}, results


def build_copies_measure(
    token_rows: TokenRows, tokens: list[list[Any]], tiles: dict[Any, Any]
) -> tuple[Measure, Any]:
    """Build the measure of weight on copies of a token.

    Returns:
        The measure, and the rows whose token has an earlier copy, (…, 1, q_len).
    """
    numbers: dict[Any, int] = {}
    ids = np.array([[numbers.setdefault(token, len(numbers)) for token in row] for row in tokens])
    ids = np.where(token_rows.keys, ids.reshape(token_rows.keys.shape), -1)
    query_ids = np.where(token_rows.rows, ids[..., token_rows.own_keys], -2)  # padding copies nothing
    is_repeated: list[Any] = []
    for row in ids.reshape(-1, ids.shape[-1]):
        _, first_position, inverse = np.unique(row, return_index=True, return_inverse=True)
        is_repeated.append(first_position[inverse] < np.arange(len(row)))
    has_copy = np.reshape(is_repeated, ids.shape)[..., token_rows.own_keys] & token_rows.rows
    assert token_rows.query_offset is not None
    return TokenCopies(query_ids, ids, token_rows.query_offset, tiles=tiles), has_copy


def mean_over_rows(values: Any, rows: Any) -> Any:
    """Average over the rows that count and the batch, (…, heads, q_len) to (heads,); NaN if none counts."""
    rows = np.broadcast_to(rows, values.shape)
    axes = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 2)
    count = rows.sum(axes)
    total = np.where(rows, values, 0.0).sum(axes)
    return np.atleast_1d(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def heavy_hitter_share(received: Any, token_rows: TokenRows) -> Any:
    """Return the share of the received weight on the tenth of the keys that receives most, (heads,).

    Args:
        received: Weight that each key receives, (…, heads, kv_len).
        token_rows: The tokens of the call.
    """
    keys = np.broadcast_to(token_rows.keys, received.shape)
    count = np.ceil(HEAVY_FRACTION * keys.sum(-1, keepdims=True))
    descending = -np.sort(-received, -1)
    top = np.where(np.arange(received.shape[-1]) < count, descending, 0.0).sum(-1)
    axes = tuple(range(top.ndim - 1))
    return np.atleast_1d(top.sum(axes) / np.maximum(received.sum(-1).sum(axes), np.finfo(float).tiny))


def as_numpy_per_head(array: Any) -> Any:
    """Return a result as float64 NumPy, with an axis of heads."""
    array = as_numpy(array) if hasattr(array, "detach") else np.asarray(array)
    return array[None] if array.ndim == 1 else array
