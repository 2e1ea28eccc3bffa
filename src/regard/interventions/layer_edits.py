"""The edits of one call of a layer: resolved to its heads, rows and keys, and applied to its output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.capture.call import Call, CapturedArgs
from regard.capture.compact_mask import find_mask
from regard.engines.torch_precision import widen
from regard.errors import ArgumentError
from regard.interventions.edited_rows import (
    OutputWriter,
    RemovedEdges,
    ValueColumns,
    compute_masked_heads,
    compute_rows,
    correct_edges,
    edit_given_weights,
    touches,
)
from regard.interventions.edits import (
    AblateEdit,
    Edit,
    HeadMeans,
    InputEdit,
    KnockoutEdit,
    PatchEdit,
    RescoreEdit,
    RestrictEdit,
    list_entries,
)
from regard.interventions.placement import (
    PlacedMask,
    Placement,
    depends_on_length,
    place_score_mod,
    resolve_positions,
    select_entries,
)
from regard.lens.token_rows import TokenRows, order_sequences
from regard.masks import Mask, between
from regard.problem import Problem, broadcast_index
from regard.score_mods import ScoreMod
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed
BoolArray = Any


class BoundEdit(NamedTuple):
    """An edit with the tokens in which its texts are looked up: one list for each batch entry, or one for all."""

    edit: Edit
    tokens: list[list[Any]] | None = None
    query_tokens: list[list[Any]] | None = None  # of the queries of cross-attention
    source: Call | None = None  # the call that the layer would make with a changed input

    def patches(self, *what: str) -> bool:
        """Return whether the edit takes one of these from another call."""
        return isinstance(self.edit, PatchEdit | InputEdit) and self.edit.what in what


@dataclass(frozen=True, eq=False)
class LayerEdits:
    """The edits of one call.

    Args:
        name: Name of the module.
        bound: The edits that select the layer, in order.
        placement: Where the call is in the sequence.
        call_index: Number of calls of the layer before.
    """

    name: str
    bound: tuple[BoundEdit, ...]
    placement: Placement
    call_index: int = 0

    # What a recording asks

    def extends(self, other: LayerEdits) -> bool:
        """Return whether calls with these and with other edits may be joined into one."""
        same = [entry.edit for entry in self.bound] == [entry.edit for entry in other.bound]
        return (
            same
            and not any(
                depends_on_length(getattr(entry.edit, axis, None))
                for entry in self.bound
                for axis in ("queries", "keys")
            )
            and not self._patterned.any()
            and not self._vectors
        )

    def join(self, first: LayerEdits, shape: tuple[int, ...]) -> LayerEdits:
        """Return the edits of a matrix of some shape that joins several calls, from those of the first."""
        _, query_offset, key_offset, _ = first.placement
        placement = self.placement._replace(shape=shape, query_offset=query_offset, key_offset=key_offset)
        return replace(self, placement=placement)

    def edit_mask(self, mask: Mask | None) -> Mask | None:
        """Return the mask of a call after the edits."""
        for placed in self.masks:
            mask = placed if mask is None else mask & placed
        return mask

    def edit_score_mods(self, score_mods: tuple[ScoreMod, ...]) -> tuple[ScoreMod, ...]:
        """Return the score modifications of a call after the edits."""
        return score_mods + self.score_mods

    def edit_call(self, call: Call) -> Call:
        """Return the record of a call with the weights that a layer with its own softmax would have, and patterns."""
        call = self._patch_vectors(call)
        if call.weights is not None:
            weights = edit_given_weights(call.weights, self.masks, self.score_mods)
            call = replace(call, weights=weights)
        for source, pairs, rows in self._patterns:
            call = self._patch_pattern(call, source, pairs, rows)
        return call

    # Resolved edits

    def _select(self, edit: Edit) -> BoolArray:
        return self.placement.select_pairs(edit.heads, edit.batch, edit.name)

    @cached_property
    def _patterns(self) -> list[tuple[Call, BoolArray, IntArray | None]]:
        """The patches of patterns: source, pairs and rows of each group of batch entries; None for all rows."""
        return [
            (find_source(entry, self.name), pairs, rows)
            for entry in self.bound
            if entry.patches("pattern")
            for pairs, rows in self._find_rows(entry)
        ]

    @cached_property
    def _vectors(self) -> list[tuple[str, Call, BoolArray, IntArray | None]]:
        """The patches of queries and keys: "query" or "key", and source, pairs and rows as in `_patterns`."""
        return [
            (entry.edit.what, find_source(entry, self.name), pairs, rows)
            for entry in self.bound
            if isinstance(entry.edit, PatchEdit | InputEdit) and entry.patches("query", "key")
            for pairs, rows in self._find_rows(entry)
        ]

    @cached_property
    def _patterned(self) -> BoolArray:
        """Pairs whose pattern another run replaces in every row of the call."""
        flags = np.zeros(self.placement.batch * self.placement.heads, bool)
        for source, pairs, rows in self._patterns:
            if rows is None and len(self._find_source_rows(source, None)[0]) == self.placement.shape[-2]:
                flags |= pairs
        return flags

    @cached_property
    def masks(self) -> tuple[PlacedMask, ...]:
        """The masks of knockouts and restrictions."""
        masks = []
        for entry in self.bound:
            edit = entry.edit
            if isinstance(edit, RestrictEdit):
                masks.append((edit.mask, self._select(edit)))
            elif isinstance(edit, KnockoutEdit):
                edges = self._resolve(entry, queries=edit.queries, keys=edit.keys)
                masks += [(~between(queries, keys), pairs) for pairs, queries, keys in edges]
        placed = (PlacedMask(mask, pairs & ~self._patterned, self.placement) for mask, pairs in masks)
        return tuple(mask for mask in placed if mask.pairs.any())

    @cached_property
    def score_mods(self) -> tuple[ScoreMod, ...]:
        """The score modifications."""
        mods = (
            (entry.edit.score_mod, self._select(entry.edit) & ~self._patterned)
            for entry in self.bound
            if isinstance(entry.edit, RescoreEdit)
        )
        return tuple(place_score_mod(mod, pairs, self.placement) for mod, pairs in mods if pairs.any())

    def _resolve(self, entry: BoundEdit, **chosen: Any) -> list[tuple[Any, ...]]:
        """Resolve queries and keys of an edit for each group of batch entries whose texts are at the same positions.

        Returns:
            For each group its pairs, (pairs,), booleans, and the positions of each parameter.
        """
        edit, placement, pairs = entry.edit, self.placement, self._select(entry.edit)
        lengths = {"queries": placement.num_queries, "keys": placement.num_keys}
        of_queries, of_keys = entry.query_tokens, entry.tokens
        if not placement.is_cross_attention:
            of_queries = of_keys = order_sequences(self.name, entry.tokens, entry.query_tokens)[0]
        tokens = {"queries": of_queries, "keys": of_keys}
        has_texts = any(
            len(tokens[parameter] or ()) > 1
            and any(isinstance(position, str) for position in list_entries(positions))
            for parameter, positions in chosen.items()
        )
        groups = [(0, pairs)]
        if has_texts:
            by_batch = np.arange(len(pairs)) // placement.heads
            groups = [(i, pairs & (by_batch == i)) for i in np.unique(by_batch[pairs])]
        resolved = []
        for i, own_pairs in groups:
            found = []
            for parameter, positions in chosen.items():
                lists = tokens[parameter]
                if has_texts and lists is not None and len(lists) not in (1, placement.batch):
                    raise ArgumentError(
                        edit.name,
                        received=f"tokens of {len(lists)} batch entries",
                        expected=f"one list of tokens, or one for each of {placement.batch} batch entries",
                        hint="Pass the tokens of every batch entry to intervene(tokens=…).",
                    )
                own = None if lists is None else lists[i if len(lists) > 1 else 0]
                found.append(resolve_positions(positions, lengths[parameter], own, parameter, edit.name))
            resolved.append((own_pairs, *found))
        return resolved

    def _find_rows(self, entry: BoundEdit) -> list[tuple[BoolArray, IntArray | None]]:
        """Resolve the rows of an ablation or patch for each group of batch entries; None for all rows."""
        positions = getattr(entry.edit, "queries", None)
        if positions is None:
            return [(self._select(entry.edit), None)]
        found = self._resolve(entry, queries=positions)
        groups = ((pairs, self.placement.find_rows(queries)) for pairs, queries in found)
        return [(pairs, rows) for pairs, rows in groups if len(rows)]

    def reaches(self, number: int, parameter: str, positions: Any) -> bool:
        """Return whether the call has a row, a key, a head or a batch entry that an edit selects."""
        entry, placement = self.bound[number], self.placement
        if parameter in ("heads", "batch"):
            length = placement.heads if parameter == "heads" else placement.batch
            return len(select_entries(positions, length, parameter, entry.edit.name)) > 0
        find = placement.find_columns if parameter == "keys" else placement.find_rows
        return any(len(find(found)) for _, found in self._resolve(entry, **{parameter: positions}))

    # Application

    def apply(self, call: Call, args: CapturedArgs, base_output: Tensor | None) -> tuple[Tensor | None, str]:
        """Apply the edits to the output of a call.

        Args:
            base_output: Output of the kernel: (…, heads, q_len, value_dim); None if it did not run, because the edits
                are masks alone.
        """
        value = flatten_value(args, call)
        if base_output is None:
            masked = np.zeros(self.placement.heads, bool)
            for mask in self.masks:
                masked |= mask.pairs[: self.placement.heads]
            problem, edited = self._edit_problem(call)
            output, is_masked = compute_masked_heads(problem, edited, masked, args, value)
            return output, "through the edited mask" if is_masked else ""
        writer, paths = OutputWriter(base_output), []
        new_value, revalued = value, np.zeros(len(value.pair_index), bool)
        for entry in self.bound:
            if entry.patches("value"):
                pairs = self._select(entry.edit)
                new_value = self._patch_value(find_source(entry, self.name), pairs, new_value)
                revalued |= pairs
        rewritten = np.flatnonzero(revalued & ~self._patterned)
        patched_call = self._patch_vectors(call)
        if call.weights is not None:
            assert args.dense is not None
            paths.append(
                self._apply_to_given_weights(args.dense.weights, value, new_value, rewritten, writer)
            )
        elif self.masks or self.score_mods or revalued.any() or self._vectors:
            _, edited = self._edit_problem(patched_call)
            if len(rewritten):
                writer.write(rewritten, None, compute_rows(edited, rewritten, None, new_value))
            kept = ~revalued
            paths.append(self._apply_to_weights(call, edited, value, kept, writer))
            for what, _, pairs, rows in self._vectors:
                chosen = np.flatnonzero(pairs & kept & ~self._patterned)
                if len(chosen):
                    writer.write(chosen, rows, compute_rows(edited, chosen, rows, value))
                    paths.append(f"rows computed again with the {what} of another run")
        for source, pairs, rows in self._patterns:
            self._apply_pattern(source, pairs, rows, new_value, writer)
            paths.append("pattern of another run times this run's values")
        for entry in self.bound:
            if isinstance(entry.edit, AblateEdit):
                for pairs, rows in self._find_rows(entry):
                    self._ablate(entry.edit, np.flatnonzero(pairs), rows, call, writer)
            elif entry.patches("output"):
                source = find_source(entry, self.name)
                for pairs, rows in self._find_rows(entry):
                    index = np.flatnonzero(pairs)
                    own, theirs = self._find_source_rows(source, rows)
                    if len(index) and len(own):
                        output = OutputWriter(source.output).read(
                            self._find_source_pairs(source, index), theirs
                        )
                        writer.write(index, own, output)
        return (writer.result if writer.is_changed else None), ", ".join(dict.fromkeys(filter(None, paths)))

    def _edit_problem(self, call: Call) -> tuple[Problem, Problem]:
        """Return the problem of a call, and that after the edits."""
        problem = call.matrix.problem
        parts: Any = (*self.masks, *self.score_mods)
        for part in parts:
            part.check(problem.frame)
        mask, mods = self.edit_mask(problem.mask), self.edit_score_mods(problem.score_mods)
        return problem, replace(problem, mask=mask, score_mods=mods)

    def _apply_to_given_weights(
        self,
        old: Tensor,
        value: ValueColumns,
        new_value: ValueColumns,
        rewritten: IntArray,
        writer: OutputWriter,
    ) -> str:
        """Compute the rows of a layer with its own softmax whose weights or values change; return how."""
        new, path = edit_given_weights(old, self.masks, self.score_mods), ""
        flat = new.reshape(-1, *new.shape[-2:])
        if new is not old:
            differs = (old.reshape(flat.shape) != flat).any(-1)
            pairs = np.flatnonzero(differs.any(1).cpu().numpy())
            if len(pairs):
                index, path = torch.as_tensor(pairs), "the layer's own weights edited"
                output = flat[index] @ value.take(pairs).to(flat.dtype)
                before = writer.read(pairs).to(output.dtype)
                writer.write(pairs, None, torch.where(differs[index][..., None], output, before))
        if len(rewritten):
            output = flat[torch.as_tensor(rewritten)] @ new_value.take(rewritten).to(flat.dtype)
            writer.write(rewritten, None, output)
        return path

    def _apply_to_weights(
        self, call: Call, edited: Problem, value: ValueColumns, kept: BoolArray, writer: OutputWriter
    ) -> str:
        """Compute the rows whose weights change, of pairs that keep their values; return how."""
        parts: Any = (*self.masks, *self.score_mods)
        changed = np.any([part.pairs for part in parts], 0) & kept
        if not changed.any():
            return ""
        pairs, rows = np.flatnonzero(changed), None
        if not self.score_mods and not any(
            isinstance(entry.edit, RestrictEdit) and self._select(entry.edit).any() for entry in self.bound
        ):
            removed = self._find_removed(changed)
            if not removed:
                return ""
            path = correct_edges(call.matrix, edited, removed, value, writer)
            if path:
                return path
            # Whole rows are computed again: those that lose an edge.
            rows = np.unique(np.concatenate([edges.rows for edges in removed]))
            pairs = np.flatnonzero(np.any([edges.pairs for edges in removed], 0))
            rows = None if len(rows) == edited.shape[1] else rows
        if not self.score_mods and not touches(call.matrix.problem, edited, pairs):
            return ""
        writer.write(pairs, rows, compute_rows(edited, pairs, rows, value))
        if rows is not None:
            return f"{len(rows) * len(pairs):,} rows computed again"
        return "through the edited mask" if not self.score_mods else "through the edited scores"

    def _find_removed(self, changed: BoolArray) -> list[RemovedEdges]:
        """Find the edges that knockouts remove from some pairs, as rows and columns of the call."""
        edges = (
            RemovedEdges(
                pairs & ~self._patterned & changed,
                self.placement.find_rows(queries),
                self.placement.find_columns(keys),
            )
            for entry in self.bound
            if isinstance(entry.edit, KnockoutEdit)
            for pairs, queries, keys in self._resolve(entry, queries=entry.edit.queries, keys=entry.edit.keys)
        )
        return [removed for removed in edges if not removed.is_empty]

    def _ablate(
        self, edit: AblateEdit, index: IntArray, rows: IntArray | None, call: Call, writer: OutputWriter
    ) -> None:
        """Replace or scale the output of some pairs and rows."""
        if not len(index):
            return
        old = writer.read(index, rows)
        if isinstance(edit.baseline, (int, float)):
            writer.write(index, rows, old * edit.baseline)
            return
        if edit.baseline == "zero":
            writer.write(index, rows, torch.zeros_like(old))
            return
        if isinstance(edit.baseline, HeadMeans):
            mean = edit.baseline[self.name][self.call_index]  # (heads, value_dim)
        elif not isinstance(edit.baseline, str):
            mean = compute_mean_output(find_source(BoundEdit(edit), self.name))
        elif self.placement.query_offset:
            raise ArgumentError(
                "ablate",
                received="baseline='mean' in a cached step, which has no output of the earlier tokens",
                expected="a run over the whole sequence, or a recording with the mean to use",
                hint="Pass a recording made with watch(values=True): ablate(…, baseline=recording).",
            )
        else:
            mean = compute_mean_output(replace(call, output=writer.result))
        heads = torch.as_tensor(index % self.placement.heads, device=old.device)
        writer.write(index, rows, mean.to(old)[heads][:, None].expand_as(old))

    # What edits take from other runs

    def _find_source_rows(self, source: Call, rows: IntArray | None) -> tuple[IntArray, IntArray]:
        """Return the rows of the call that the source has, and the rows of the source at the same positions."""
        placement = self.placement
        positions = np.arange(placement.shape[-2]) if rows is None else rows
        offset = 0 if placement.is_cross_attention else source.query_offset
        source_rows = positions + placement.query_offset - offset
        inside = (source_rows >= 0) & (source_rows < source.shape[-2])
        return positions[inside], source_rows[inside]

    def _find_source_pairs(self, source: Call, pairs: IntArray) -> IntArray:
        """Return the pairs of the source for some pairs of the call, whose batch may repeat the source's."""
        theirs, own = Placement(source.shape), self.placement
        if theirs.heads != own.heads or not theirs.batch or own.batch % theirs.batch:
            raise ArgumentError(
                "patch",
                received=f"a source of shape {source.shape} for a call of shape {own.shape}",
                expected="the same number of heads, and a batch size that divides the batch size of the call",
                hint="Record the source with the same model.",
            )
        return pairs % (theirs.heads * theirs.batch)

    def _patch_vectors(self, call: Call) -> Call:
        """Return a call with the queries and keys of other calls, as far as these have them.

        If a key is patched, each head has a key of its own, so that heads which share one are not changed.
        """
        if not self._vectors:
            return call
        if call.weights is not None or any(source.weights is not None for _, source, *_ in self._vectors):
            raise ArgumentError(
                "patch",
                received=f"the query or key of {self.name!r}, which computes its own softmax",
                expected="a layer whose query and key are known",
                hint="Load the model with attn_implementation='sdpa', or patch its pattern or value.",
            )
        writers = {"query": OutputWriter(call.query)}
        if any(what == "key" for what, *_ in self._vectors):
            key = call.key.repeat_interleave(call.groups, -3) if call.groups > 1 else call.key
            writers["key"] = OutputWriter(key.expand(*call.query.shape[:-2], *key.shape[-2:]))
        for what, source, pairs, rows in self._vectors:
            index = np.flatnonzero(pairs)
            if what == "query":
                theirs = source.query
                own_rows, source_rows = self._find_source_rows(source, rows)
            else:
                theirs = source.key.repeat_interleave(source.groups, -3) if source.groups > 1 else source.key
                source_rows = np.arange(self.placement.key_offset, theirs.shape[-2])[: call.shape[-1]]
                own_rows = source_rows - self.placement.key_offset
            if len(own_rows) and len(index):
                theirs = theirs.expand(*source.query.shape[:-2], *theirs.shape[-2:])
                vectors = OutputWriter(theirs).read(self._find_source_pairs(source, index), source_rows)
                writers[what].write(index, own_rows, vectors.to(theirs.dtype))
        changed = {what: writer.result for what, writer in writers.items() if writer.is_changed}
        return replace(call, **changed, versions=(), source_key=None, lse=None)

    def _patch_value(self, source: Call, pairs: BoolArray, value: ValueColumns) -> ValueColumns:
        """Return a value with that of another run for some pairs, as far as its keys go.

        Each of these pairs gets a value of its own, so that heads which share one are not changed.
        """
        theirs = source.value
        assert theirs is not None
        index, heads = np.flatnonzero(pairs), self.placement.heads
        kv_heads = theirs.shape[-3] if theirs.ndim > 2 else 1
        source_pairs = self._find_source_pairs(source, index)
        own_pairs = source_pairs // heads * kv_heads + source_pairs % heads // (heads // kv_heads)
        flat = theirs.reshape(-1, *theirs.shape[-2:])[torch.as_tensor(own_pairs)].to(value.array.dtype)
        array = value.take(index)
        flat = flat[:, self.placement.key_offset :][:, : array.shape[-2]]
        patched = torch.cat([flat, array[:, flat.shape[-2] :]], -2)
        new_index = value.pair_index.copy()
        new_index[index] = len(value.array) + np.arange(len(index))
        return ValueColumns(torch.cat([value.array, patched]), new_index)

    def _apply_pattern(
        self,
        source: Call,
        pairs: BoolArray,
        rows: IntArray | None,
        value: ValueColumns,
        writer: OutputWriter,
    ) -> None:
        """Multiply the weights of another run by the values of this one."""
        problem, heads, offset = source.matrix.problem, self.placement.heads, self.placement.key_offset
        positions, source_rows = self._find_source_rows(source, rows)
        if not len(positions):
            return
        fitted = value.array  # with the keys of the source: zeros where this run has none
        missing = problem.frame.kv_len - fitted.shape[-2] - offset
        if offset or missing:
            fitted = torch.nn.functional.pad(fitted, (0, 0, offset, missing))
        index = np.flatnonzero(pairs)
        for entry in np.unique(index // heads):  # batch entries may share the pairs of the source
            chosen = index[index // heads == entry]
            source_pairs = self._find_source_pairs(source, chosen)
            pair_index = np.zeros(len(problem.pair_ids), np.int64)
            pair_index[source_pairs] = value.pair_index[chosen]
            output = compute_rows(problem, source_pairs, source_rows, ValueColumns(fitted, pair_index))
            writer.write(chosen, positions, output)

    def _patch_pattern(self, call: Call, source: Call, pairs: BoolArray, rows: IntArray | None) -> Call:
        """Return the record of a call in which some heads have the pattern of another run.

        If both runs agree in everything but query and key, those of the source are taken. Otherwise the record holds
        the weights themselves.
        """
        index = np.flatnonzero(pairs)
        theirs = self._find_source_pairs(source, index)
        if rows is None and source.shape[-2:] == call.shape[-2:] and _agree(call, source):
            query, groups = call.query.clone(), call.groups
            key = call.key.repeat_interleave(groups, -3) if groups > 1 else call.key.clone()
            for own, other in ((query, source.query), (key, source.key)):
                other = other.repeat_interleave(own.shape[-3] // other.shape[-3], -3)
                places = np.unravel_index(index, tuple(own.shape[:-2]))
                own[tuple(map(torch.as_tensor, places))] = OutputWriter(other).read(theirs)
            return replace(call, query=query, key=key, versions=(), source_key=None, lse=None)
        own_rows, source_rows = self._find_source_rows(source, rows)
        weights = call.matrix.to_dense() if call.weights is None else call.weights.clone()
        flat = weights.reshape(-1, *weights.shape[-2:])
        dense = source.matrix.to_dense() if source.weights is None else source.weights
        dense = dense.reshape(-1, *dense.shape[-2:])
        part = dense[torch.as_tensor(theirs)[:, None], torch.as_tensor(source_rows)[None, :]]
        part = part[..., self.placement.key_offset :][..., : flat.shape[-1]]
        places = torch.as_tensor(index)[:, None], torch.as_tensor(own_rows)[None, :]
        flat[places] = torch.nn.functional.pad(part, (0, flat.shape[-1] - part.shape[-1])).to(flat.dtype)
        weights = flat.reshape(call.shape)
        return replace(
            call,
            query=weights.new_empty((*call.shape[:-1], 0)),
            key=weights.new_empty((*call.key.shape[:-2], call.shape[-1], 0)),
            weights=weights,
            compact_mask=find_mask(weights),
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


def find_source(entry: BoundEdit, name: str) -> Call:
    """Return the call of a layer in the recording of an edit, or the one that a changed input would lead to."""
    if entry.source is not None:
        return entry.source
    edit: Any = entry.edit
    recording: Any = edit.source if isinstance(edit, PatchEdit) else edit.baseline
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
            hint="Record the values: regard.watch(model, values=True).",
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


def flatten_value(args: CapturedArgs, call: Call) -> ValueColumns:
    """Return the value of a call in canonical form."""
    value = args.dense.value if call.weights is not None and args.dense is not None else args.value
    *lead, _, kv_len = call.shape
    if value is None:
        raise ArgumentError(
            "intervene",
            received=f"{call.name!r}, whose value has an unknown layout",
            expected="a value (…, heads, kv_len, value_dim)",
            hint="Load the model with attn_implementation='sdpa', or name other layers.",
        )
    groups = 1
    if lead and value.ndim > 2 and value.shape[-3] not in (1, lead[-1]):
        groups = lead[-1] // value.shape[-3]
    index = broadcast_index(value, tuple(lead), groups, "intervene", "value")
    return ValueColumns(value[..., :kv_len, :].reshape(-1, kv_len, value.shape[-1]), index)
