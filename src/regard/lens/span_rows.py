"""Compute `SpanMass`: choose the rows and the groups of keys of each layer, and measure them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regard.capture.call import Call, LayerCall
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.lens.find import select_layers
from regard.lens.layer_spans import LayerSpans
from regard.lens.span_mass import SpanMass
from regard.lens.spans import GENERATED, OTHER, Spans
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import GroupMass
from regard.types import IntArray

if TYPE_CHECKING:
    from regard.lens.recording import Recording

OPERATION = "recording.span_mass"


def select_call(
    recording: Recording, layer_calls: Sequence[LayerCall], call: int | None
) -> Sequence[LayerCall]:
    """Select one call of each layer.

    Args:
        recording: The recording.
        layer_calls: All its calls.
        call: Which call of each layer; None if each has one.

    Returns:
        One call of each layer.

    Raises:
        ArgumentError: If a layer has several calls, and none is chosen.
        IndexOutOfRangeError: If there is no such call.
    """
    if call is None:
        for name in recording:
            if len(recording.calls(name)) > 1:
                recording[name]  # raises, and says why
        return layer_calls
    selected = []
    for layer, name in enumerate(recording):
        calls = recording.calls(name)
        if not -len(calls) <= call < len(calls):
            raise IndexOutOfRangeError(
                OPERATION,
                received=f"call={call}",
                expected=f"one of {len(calls)} calls of {name!r}",
                hint="Calls are counted from 0, -1 is the last; the calls of one cache are one.",
            )
        selected.append(LayerCall(layer, name, call % len(calls), calls[call]))
    return selected


def compute_span_mass(
    layer_calls: Sequence[LayerCall],
    spans: Spans,
    prompt: int | None,
    layers: str | Sequence[str] | None,
) -> SpanMass:
    """Compute the masses of every layer.

    Args:
        layer_calls: The calls of a recording, at most one for each layer.
        spans: The spans.
        prompt: Number of tokens of the prompt; None to find it out from the steps of the cache.
        layers: Names of modules or patterns; None for all.

    Returns:
        The masses.

    Raises:
        ArgumentError: If the layers do not belong to one sequence, or the spans do not fit it.
        IndexOutOfRangeError: If a span or the prompt exceeds the sequence.
    """
    calls = [entry for entry in select_layers(layer_calls, layers, OPERATION) if math.prod(entry.call.shape)]
    if not calls:
        raise ArgumentError(
            OPERATION,
            received="an empty recording" if layers is None else f"layers={layers!r}, which matches none",
            expected="a layer that ran",
            hint="list(recording) has the names; run the model inside the with block.",
        )
    rows = [TokenRows.from_call(entry.call) for entry in calls]
    if any(own.query_offset is None for own in rows):
        # An encoder-decoder model reads its prompt by cross-attention.
        pairs = [pair for pair in zip(calls, rows, strict=True) if pair[1].query_offset is None]
        calls, rows = [entry for entry, _ in pairs], [own for _, own in pairs]
    sequences = {_find_sequence(entry.call, own, prompt) for entry, own in zip(calls, rows, strict=True)}
    if len(sequences) > 1:
        shapes = ", ".join(f"{entry.module} {entry.call.shape[-2:]}" for entry in (calls[0], calls[-1]))
        raise ArgumentError(
            OPERATION,
            received=f"layers over different sequences: {shapes}",
            expected="layers that read the same tokens",
            hint="Choose some: recording.span_mass(layers='decoder.*').",
        )
    (sequence,) = sequences
    names = (*spans.names, OTHER) if sequence.generated_from is None else (*spans.names, OTHER, GENERATED)
    labels = _label_keys(spans, calls[0].call, sequence)
    results = [
        _measure_layer(entry, own, sequence, labels, len(names))
        for entry, own in zip(calls, rows, strict=True)
    ]
    positions = np.arange(sequence.first_position, sequence.first_position + results[0].mass.shape[2])
    is_token = rows[0].keys.reshape(-1, rows[0].keys.shape[-1])[:, : sequence.context]
    own = np.where(is_token, labels[:, : sequence.context], -1)
    return SpanMass(names, positions, sequence.prompt, results, own)


@dataclass(frozen=True)
class _Sequence:
    """Which rows and keys of a layer are counted.

    Args:
        first_row: First row of the matrix that is counted.
        first_position: Position of the token that it belongs to.
        context: Number of keys that spans may lie in.
        generated_from: First key that was generated; None if there is none.
        prompt: Number of tokens of the prompt; None for one pass.
    """

    first_row: int
    first_position: int
    context: int
    generated_from: int | None
    prompt: int | None


def _find_sequence(call: Call, rows: TokenRows, prompt: int | None) -> _Sequence:
    q_len, kv_len = call.shape[-2:]
    offset = rows.query_offset
    if prompt is not None and not 1 <= prompt <= (offset or 0) + q_len:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"prompt={prompt}",
            expected=f"a number of tokens from 1 to {(offset or 0) + q_len}",
            hint="It counts the tokens before the first generated one, padding included.",
        )
    if prompt is None and call.prompt_len:
        prompt = (offset or 0) + call.prompt_len
    first_row = 0 if prompt is None else max(0, prompt - 1 - (offset or 0))
    # The row of a token of the prompt belongs to the token itself, that of a generated one to the token before it.
    first_position = first_row + (offset or 0) + (prompt is not None)
    if offset is None:
        return _Sequence(first_row, first_position, kv_len, None, prompt)
    return _Sequence(first_row, first_position, kv_len if prompt is None else prompt, prompt, prompt)


def _label_keys(spans: Spans, call: Call, sequence: _Sequence) -> IntArray:
    """Return the index of the name of each key, (batch or 1, kv_len)."""
    *lead, _, kv_len = call.shape
    what = "the sequence" if sequence.generated_from is None else "the prompt"
    own = spans.label_keys(math.prod(lead[:-1]), sequence.context, what, OPERATION)
    labels = np.full((len(own), kv_len), len(spans.names) + 1, np.int64)
    labels[:, : sequence.context] = own
    return labels


def _measure_layer(
    entry: LayerCall, rows: TokenRows, sequence: _Sequence, labels: IntArray, groups: int
) -> LayerSpans:
    call, matrix = entry.call, entry.call.matrix
    *lead, _, kv_len = call.shape
    if sequence.first_row:
        matrix = matrix.lazy[..., sequence.first_row :, :]
    # The axis of batch entries; a matrix without batch has none.
    shaped = labels.reshape(
        *(lead[:-1] if len(labels) > 1 else (1,) * len(lead[:-1])), *(1,) * bool(lead), -1
    )
    measure = GroupMass(shaped, groups)
    plan = matrix.plan(spans=measure)
    mass = matrix.measure(spans=measure).spans
    dtype = np.float64 if "float64" in str(call.query.dtype) else np.float32
    mass = mass.detach().cpu().numpy() if hasattr(mass, "detach") else np.asarray(mass)
    mass = mass.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, -1, groups).astype(dtype)
    lookback = np.full(mass.shape[:-1], np.nan, dtype)
    if sequence.generated_from is not None:
        keys = rows.keys.reshape(-1, kv_len)[:, : sequence.context].sum(-1)[:, None, None]
        counts = np.arange(mass.shape[2]) + sequence.first_position - sequence.generated_from
        context = mass[..., :-1].sum(-1, dtype=np.float64) / np.maximum(keys, 1)
        generated = mass[..., -1] / np.maximum(counts, 1)
        total = np.where((counts > 0) & (context + generated > 0), context + generated, np.nan)
        lookback = (context / total).astype(dtype)
    return LayerSpans(entry.module, entry.layer, mass, lookback, plan)
