"""One row for each layer and head: the measures that heads are named by, from one pass for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.lens.analysis.measures import At, Bands, Collected, Copies
from regard.lens.analysis.token_rows import Place, fitting, listed, misfit
from regard.lens.call import Call
from regard.lens.table import Table
from regard.measures import Entropy, Measure

# The share of the keys that count as heavy hitters.
HEAVY = 0.1


def heads(
    layers: Sequence[tuple[int, str, int, Call]], tokens: Any = None, windows: Sequence[int] = (16, 128)
) -> Table:
    """The rows of `Recording.heads`, for layers as (number, name, which call, the call)."""
    rows, fits, lengths = Table(), tokens is None, set()
    copies: dict[Any, Any] = {}  # where they are is the same for every layer
    given = None if tokens is None else listed(tokens, "recording.heads")
    for number, name, which, call in layers:
        if call.query is None:
            raise ArgumentError(
                "recording.heads",
                received=f'{name!r}, watched with keep="measures"',
                expected='keep="qk"',
                hint=f"What was measured is recording.calls({name!r})[0].measured; or watch again with "
                'keep="qk", dtype=torch.bfloat16 if memory is short.',
            )
        *lead, _, kv_len = call.shape
        lengths.add(kv_len)
        own = None if given is None else fitting(given, math.prod(lead[:-1]), kv_len)
        fits = fits or own is not None
        columns, _ = measured(call, own, windows, copies)
        if given is not None and own is None:
            nothing = np.full(len(columns["entropy"]), np.nan)
            columns |= {"duplicate": nothing, "induction": nothing}
        for head in range(len(columns["entropy"])):
            numbers = {key: float(column[head]) for key, column in columns.items()}
            rows.append({"module": name, "layer": number, "call": which, "head": head, **numbers})
    if not fits and given is not None:
        raise misfit("recording.heads", given, lengths)
    return rows


def measured(
    call: Call,
    tokens: list[list[Any]] | None,
    windows: Sequence[int],
    copies: dict[Any, Any],
    **also: Measure,
) -> tuple[dict[str, Any], Any]:
    """Columns of one number for each head, means over the rows of all batch entries that are no padding.

    Beside them, what the measures made that share the pass, `also` among them; None of a matrix without entries.
    """
    positional = ["distance", "previous", *(f"within_{window}" for window in windows)]
    order = ["entropy", "first", "previous", "distance", *positional[2:], "heavy"]
    order += [] if tokens is None else ["duplicate", "induction"]
    nothing = np.full(call.shape[-3] if len(call.shape) > 2 else 1, np.nan)
    if not math.prod(call.shape):
        return dict.fromkeys(order, nothing), None
    place = Place.of(call)
    first = np.where(place.rows, place.keys.argmax(-1)[..., None], -1)
    asked: dict[str, Measure] = {
        "entropy": Entropy(),
        "first": At(first),
        "received": Collected(place.rows),
    }
    counted = {"entropy": place.rows, "first": place.rows}
    if place.first is not None:
        near = [(1 - int(window), int(window) - 1) for window in windows]
        asked["bands"] = Bands([(-1, -1), *near], place.first)
        before = place.own - 1
        counted |= dict.fromkeys(positional, place.rows)
        counted["previous"] = place.rows & (before >= 0) & place.keys[..., np.maximum(before, 0)]
        if tokens is not None:
            asked["copies"], again = copies_of(place, tokens, copies)
    made = call.matrix.measure(**asked, **also)
    results = {"entropy": made.entropy, "first": made.first}
    if place.first is not None:
        results |= {name: made.bands[..., i] for i, name in enumerate(positional)}
    if "copies" in asked:
        results |= {"duplicate": made.copies[..., 0], "induction": made.copies[..., 1]}
        counted |= dict.fromkeys(("duplicate", "induction"), again)
    columns = {name: mean_of(numpy_of(result), counted[name]) for name, result in results.items()}
    columns["heavy"] = heavy_share(numpy_of(made.received), place)
    return {name: columns.get(name, nothing) for name in order}, made


def copies_of(place: Place, tokens: list[list[Any]], found: dict[Any, Any]) -> tuple[Measure, Any]:
    """The measure that looks at tokens, and the rows whose token came before."""
    numbers: dict[Any, int] = {}
    ids = np.array([[numbers.setdefault(token, len(numbers)) for token in row] for row in tokens])
    ids = np.where(place.keys, ids.reshape(place.keys.shape), -1)
    of_query = np.where(place.rows, ids[..., place.own], -2)  # padding is nobody's copy
    known: list[Any] = []
    for row in ids.reshape(-1, ids.shape[-1]):
        _, where, which = np.unique(row, return_index=True, return_inverse=True)
        known.append(where[which] < np.arange(len(row)))
    again = np.reshape(known, ids.shape)[..., place.own] & place.rows
    assert place.first is not None
    return Copies(of_query, ids, place.first, alike=found), again


def mean_of(values: Any, which: Any) -> Any:
    """The mean of each head over the rows that count, (…, heads, q_len) to (heads,); NaN where none does."""
    which = np.broadcast_to(which, values.shape)
    over = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 2)
    count = which.sum(over)
    total = np.where(which, values, 0.0).sum(over)
    return np.atleast_1d(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def heavy_share(received: Any, place: Place) -> Any:
    """The share of what all keys received that the tenth of them that received most has."""
    keys = np.broadcast_to(place.keys, received.shape)
    count = np.ceil(HEAVY * keys.sum(-1, keepdims=True))
    largest = -np.sort(-received, -1)
    top = np.where(np.arange(received.shape[-1]) < count, largest, 0.0).sum(-1)
    over = tuple(range(top.ndim - 1))
    return np.atleast_1d(top.sum(over) / np.maximum(received.sum(-1).sum(over), np.finfo(float).tiny))


def numpy_of(array: Any) -> Any:
    """A result as NumPy, with an axis of heads."""
    array = array.detach().double().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)
    return array[None] if array.ndim == 1 else array
