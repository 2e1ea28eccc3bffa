"""What edits take from other runs: patterns, outputs and values of a recording."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.capture.compact_mask import find_mask
from regard.engines.torch_precision import widen
from regard.errors import ArgumentError
from regard.interventions.edge_correction import OutputWriter, ValueColumns
from regard.interventions.edits import AblateEdit, PatchEdit
from regard.interventions.placement import Placement
from regard.lens.token_rows import TokenRows
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed
BoolArray = Any


def find_source(edit: PatchEdit | AblateEdit, name: str) -> Call:
    """Return the call of a layer in the recording of an edit.

    Raises:
        NotCapturedError: If the recording has no such layer.
        ArgumentError: If it has several calls of it, or lacks what the edit takes.
    """
    recording: Any = edit.source if isinstance(edit, PatchEdit) else edit.to
    calls: tuple[Call, ...] = recording.calls(name)
    if len(calls) != 1 or calls[0].query is None:
        raise ArgumentError(
            edit.name,
            received=f"a recording with {len(calls)} calls of {name!r}"
            if len(calls) != 1
            else "a recording with measures only",
            expected="a recording of one run, with queries and keys",
            hint="Record one forward pass: with regard.watch(model, values=True) as source: model(**inputs).",
        )
    (call,) = calls
    field = "output" if isinstance(edit, AblateEdit) else {"pattern": "key"}.get(edit.what, edit.what)
    if getattr(call, field) is None:
        raise ArgumentError(
            edit.name,
            received=f"a recording without the {field} of {name!r}",
            expected=f"a recording with its {field}",
            hint="Record values, too: regard.watch(model, values=True).",
        )
    return call


def compute_mean_output(call: Call) -> Tensor:
    """Compute the mean output of each head over the tokens of a call, without padding: (heads, value_dim), widened."""
    assert call.output is not None
    output = widen(call.output)
    rows = TokenRows.from_call(call).rows  # (…, 1, q_len)
    rows = np.broadcast_to(rows, (*call.shape[:-3], 1, call.shape[-2]))
    share = torch.as_tensor(rows.copy(), device=output.device).to(output.dtype)[..., None]
    total = (output * share).flatten(0, -4).sum(0) if output.ndim > 3 else output * share
    mean = total.sum(-2) / share.sum().clamp(min=1)
    return mean if output.ndim > 2 else mean[None]


def find_source_rows(source: Call, rows: IntArray | None, placement: Placement) -> tuple[IntArray, IntArray]:
    """Return the rows of a call that the source has, and the rows of the source at the same positions."""
    positions = np.arange(placement.shape[-2]) if rows is None else rows
    offset = 0 if placement.is_cross_attention else source.query_offset
    source_rows = positions + placement.query_offset - offset
    inside = (source_rows >= 0) & (source_rows < source.shape[-2])
    return positions[inside], source_rows[inside]


def find_source_pairs(source: Call, pairs: IntArray, placement: Placement) -> IntArray:
    """Return the pairs of the source for some pairs of a call, whose batch may repeat the source's.

    Raises:
        ArgumentError: If heads or batch entries do not fit.
    """
    heads = source.shape[-3] if len(source.shape) > 2 else 1
    batch = int(np.prod(source.shape[:-3], dtype=np.int64)) if len(source.shape) > 3 else 1
    if heads != placement.heads or not batch or placement.batch % batch:
        raise ArgumentError(
            "patch",
            received=f"a source of shape {source.shape} for a call of shape {placement.shape}",
            expected="the same number of heads, and one batch entry, as many, or a part that the batch repeats",
            hint="Record the source with the same model.",
        )
    return pairs % (heads * batch)


def patch_output(
    source: Call, pairs: BoolArray, rows: IntArray | None, placement: Placement, writer: OutputWriter
) -> None:
    """Write the output of another run."""
    index = np.flatnonzero(pairs)
    own, theirs = find_source_rows(source, rows, placement)
    if len(index) and len(own):
        reader = OutputWriter(source.output)
        writer.write(index, own, reader.read(find_source_pairs(source, index, placement), theirs))


def patch_value(source: Call, pairs: BoolArray, value: ValueColumns, placement: Placement) -> ValueColumns:
    """Return a value with that of another run for some pairs, as far as its keys go.

    Each of these pairs gets a value of its own, so that heads which share one are not changed.
    """
    theirs = source.value
    assert theirs is not None
    index = np.flatnonzero(pairs)
    heads = source.shape[-3] if len(source.shape) > 2 else 1
    kv_heads = theirs.shape[-3] if theirs.ndim > 2 else 1
    source_pairs = find_source_pairs(source, index, placement)
    own_pairs = source_pairs // heads * kv_heads + source_pairs % heads // (heads // kv_heads)
    flat = theirs.reshape(-1, *theirs.shape[-2:])[torch.as_tensor(own_pairs)].to(value.array.dtype)
    array = value.array[torch.as_tensor(value.pair_index[index])]
    flat = flat[:, placement.key_offset :][:, : array.shape[-2]]
    patched = torch.cat([flat, array[:, flat.shape[-2] :]], -2)
    new_index = value.pair_index.copy()
    new_index[index] = len(value.array) + np.arange(len(index))
    return ValueColumns(torch.cat([value.array, patched]), new_index)


def patch_pattern(
    call: Call, source: Call, pairs: BoolArray, rows: IntArray | None, placement: Placement
) -> Call:
    """Return the record of a call in which some heads have the pattern of another run.

    If both runs agree in everything but query and key, those of the source are taken. Otherwise the record holds the
    weights themselves.
    """
    index = np.flatnonzero(pairs)
    theirs = find_source_pairs(source, index, placement)
    own_rows, source_rows = find_source_rows(source, rows, placement)
    is_whole = rows is None and source.shape[-2:] == call.shape[-2:]
    if is_whole and _agree(call, source):
        groups = call.groups
        query, key = (
            call.query.clone(),
            call.key.repeat_interleave(groups, -3) if groups > 1 else call.key.clone(),
        )
        for own, other in ((query, source.query), (key, source.key)):
            other = other.repeat_interleave(own.shape[-3] // other.shape[-3], -3)
            places = np.unravel_index(index, tuple(own.shape[:-2]))
            own[tuple(map(torch.as_tensor, places))] = OutputWriter(other).read(theirs)
        return replace(call, query=query, key=key, versions=(), source_key=None, lse=None)
    weights = call.matrix.to_dense() if call.weights is None else call.weights.clone()
    flat = weights.reshape(-1, *weights.shape[-2:])
    problem = source.matrix.problem
    dense = source.matrix.to_dense() if source.weights is None else source.weights
    dense = dense.reshape(len(problem.pair_ids), *dense.shape[-2:])
    part = dense[torch.as_tensor(theirs)[:, None], torch.as_tensor(source_rows)[None, :]]
    part = part[..., placement.key_offset :][..., : flat.shape[-1]]
    places = torch.as_tensor(index)[:, None], torch.as_tensor(own_rows)[None, :]
    flat[places] = torch.nn.functional.pad(part, (0, flat.shape[-1] - part.shape[-1])).to(flat.dtype)
    *lead, q_len, kv_len = call.shape
    kv_lead = tuple(call.key.shape[:-2])
    return replace(
        call,
        query=weights.new_empty((*lead, q_len, 0)),
        key=weights.new_empty((*kv_lead, kv_len, 0)),
        weights=flat.reshape(call.shape),
        compact_mask=find_mask(flat.reshape(call.shape)),
        softcap=None,
        sink=None,
        lse=None,
        versions=(),
        source_key=None,
        edits=None,
    )


def _agree(call: Call, source: Call) -> bool:
    """Return whether two calls have the same mask, scale, score modifications and sink."""
    if call.weights is not None or source.weights is not None or call.scale != source.scale:
        return False
    if call.compact_mask.score_mods() or source.compact_mask.score_mods() or call.softcap != source.softcap:
        return False
    same_sink = (call.sink is None) == (source.sink is None)
    if same_sink and call.sink is not None:
        same_sink = torch.equal(call.sink, source.sink)
    masks = [part.compact_mask.mask(*part.shape[-2:]) for part in (call, source)]
    return bool(same_sink and masks[0] == masks[1])
