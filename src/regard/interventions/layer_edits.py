"""The edits of one call of a layer: resolved to its heads, rows and keys, and applied to its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.capture.call import Call, CapturedArgs
from regard.errors import ArgumentError
from regard.interventions import edge_correction as correction
from regard.interventions.edge_correction import OutputWriter, RemovedEdges, ValueColumns
from regard.interventions.edits import (
    AblateEdit,
    Edit,
    HeadMeans,
    KnockoutEdit,
    PatchEdit,
    RescoreEdit,
    RestrictEdit,
)
from regard.interventions.given_weights import edit_given_weights, multiply_given_weights
from regard.interventions.masked_heads import compute_masked_heads
from regard.interventions.placement import (
    PlacedMask,
    Placement,
    depends_on_length,
    place_score_mod,
    resolve_positions,
    select_entries,
)
from regard.interventions.sources import (
    compute_mean_output,
    find_source,
    find_source_pairs,
    find_source_rows,
    patch_output,
    patch_pattern,
    patch_value,
)
from regard.masks import Mask, between
from regard.problem import Problem, broadcast_index
from regard.score_mods import ScoreMod
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed
BoolArray = Any


class BoundEdit(NamedTuple):
    """An edit with the tokens in which its texts are looked up.

    Args:
        edit: The edit.
        tokens: Tokens of the queries, one list for each batch entry or one for all; None if there are none.
        key_tokens: Tokens of the keys of cross-attention, alike.
    """

    edit: Edit
    tokens: list[list[Any]] | None
    key_tokens: list[list[Any]] | None


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
        )

    def join(self, first: LayerEdits, shape: tuple[int, ...]) -> LayerEdits:
        """Return the edits of a matrix that joins several calls.

        Args:
            first: The edits of the first call.
            shape: Shape of the joined matrix.
        """
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
        if call.weights is not None:
            weights = edit_given_weights(call.weights, self.masks, self.score_mods)
            call = replace(call, weights=weights)
        for edit, pairs, rows in self._patterns:
            call = patch_pattern(call, find_source(edit, self.name), pairs, rows, self.placement)
        return call

    # Resolved edits

    def _select(self, edit: Edit) -> BoolArray:
        return self.placement.select_pairs(edit.heads, edit.batch, edit.name)

    @cached_property
    def _patterns(self) -> list[tuple[PatchEdit, BoolArray, IntArray | None]]:
        """The patches of patterns: pairs and rows of each group of batch entries; None for all rows."""
        return [
            (entry.edit, pairs, rows)
            for entry in self.bound
            if isinstance(entry.edit, PatchEdit) and entry.edit.what == "pattern"
            for pairs, rows in self._find_rows(entry)
        ]

    @cached_property
    def _patterned(self) -> BoolArray:
        """Pairs whose pattern another run replaces in every row of the call."""
        flags = np.zeros(self.placement.batch * self.placement.heads, bool)
        for edit, pairs, rows in self._patterns:
            if rows is None:
                replaced, _ = find_source_rows(find_source(edit, self.name), None, self.placement)
                flags |= pairs if len(replaced) == self.placement.shape[-2] else False
        return flags

    @cached_property
    def removed(self) -> list[RemovedEdges]:
        """The edges that knockouts remove, as rows and columns of the call."""
        found = []
        for entry in self.bound:
            if isinstance(entry.edit, KnockoutEdit):
                for pairs, queries, keys in self._resolve_edges(entry):
                    edges = RemovedEdges(
                        pairs & ~self._patterned,
                        self.placement.find_rows(queries),
                        self.placement.find_columns(keys),
                    )
                    found += [] if edges.is_empty else [edges]
        return found

    @cached_property
    def masks(self) -> tuple[PlacedMask, ...]:
        """The masks of knockouts and restrictions."""
        masks = []
        for entry in self.bound:
            edit = entry.edit
            if isinstance(edit, RestrictEdit):
                masks.append((edit.mask, self._select(edit)))
            elif isinstance(edit, KnockoutEdit):
                masks += [
                    (~between(queries, keys), pairs) for pairs, queries, keys in self._resolve_edges(entry)
                ]
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

    def _resolve_edges(self, entry: BoundEdit) -> list[tuple[BoolArray, IntArray, IntArray]]:
        """Resolve a knockout to pairs, queries and keys; texts may be at other positions in each batch entry."""
        edit, placement = entry.edit, self.placement
        assert isinstance(edit, KnockoutEdit)
        of_keys = entry.key_tokens if placement.is_cross_attention else entry.tokens
        resolved = []
        for entries in self._split_batch(edit, (edit.queries, entry.tokens), (edit.keys, of_keys)):
            batch, tokens, key_tokens = entries
            queries = resolve_positions(edit.queries, placement.num_queries, tokens, "queries", edit.name)
            keys = resolve_positions(edit.keys, placement.num_keys, key_tokens, "keys", edit.name)
            resolved.append((self._select(edit) & batch, queries, keys))
        return resolved

    def _split_batch(self, edit: Edit, *axes: tuple[Any, list[list[Any]] | None]) -> list[tuple[Any, ...]]:
        """Return which pairs belong to each group of batch entries, and its tokens on each axis."""
        placement = self.placement
        has_texts = any(
            tokens is not None and len(tokens) > 1 and _has_text(chosen) for chosen, tokens in axes
        )
        if not has_texts:
            every = np.ones(placement.batch * placement.heads, bool)
            return [(every, *(None if tokens is None else tokens[0] for _, tokens in axes))]
        groups = []
        for i in range(placement.batch):
            flags = np.zeros((placement.batch, placement.heads), bool)
            flags[i] = True
            if (self._select(edit) & flags.ravel()).any():
                own = (None if t is None else _pick_tokens(t, i, placement.batch, edit) for _, t in axes)
                groups.append((flags.ravel(), *own))
        return groups

    def _find_rows(self, entry: BoundEdit) -> list[tuple[BoolArray, IntArray | None]]:
        """Resolve the rows of an ablation or patch for each group of batch entries; None for all rows."""
        edit = entry.edit
        positions = getattr(edit, "queries", None)
        if positions is None:
            return [(self._select(edit), None)]
        groups: list[tuple[BoolArray, IntArray | None]] = []
        for batch, tokens in self._split_batch(edit, (positions, entry.tokens)):
            found = resolve_positions(positions, self.placement.num_queries, tokens, "queries", edit.name)
            rows = self.placement.find_rows(found)
            if len(rows):
                groups.append((self._select(edit) & batch, rows))
        return groups

    def reaches(self, number: int, parameter: str, positions: Any) -> bool:
        """Return whether the call has a row, a key, a head or a batch entry that an edit selects.

        Args:
            number: Number of the edit.
            parameter: "queries", "keys", "heads" or "batch".
            positions: The positions, or the heads or batch entries.
        """
        if parameter in ("heads", "batch"):
            length = self.placement.heads if parameter == "heads" else self.placement.batch
            return len(select_entries(positions, length, parameter, self.bound[number].edit.name)) > 0
        entry, placement, is_keys = self.bound[number], self.placement, parameter == "keys"
        tokens = entry.key_tokens if is_keys and placement.is_cross_attention else entry.tokens
        length, find = (
            (placement.num_keys, placement.find_columns)
            if is_keys
            else (placement.num_queries, placement.find_rows)
        )
        return any(
            len(find(resolve_positions(positions, length, own, parameter, entry.edit.name)))
            for _, own in self._split_batch(entry.edit, (positions, tokens))
        )

    # Application

    def apply(self, call: Call, args: CapturedArgs, base_output: Tensor | None) -> tuple[Tensor | None, str]:
        """Apply the edits to the output of a call.

        Args:
            call: Record of the call without the edits.
            args: Its arguments, and the lse that the kernel returned.
            base_output: Output of the kernel: (…, heads, q_len, value_dim); None if it did not run, because the edits
                are masks alone.

        Returns:
            The new output, None if it is that of the kernel, and how it was computed.
        """
        value = flatten_value(args, call)
        if base_output is None:
            problem, edited = self._edit_problem(call)
            masked = np.zeros(self.placement.heads, bool)
            for mask in self.masks:
                masked |= mask.pairs[: self.placement.heads]
            output, is_masked = compute_masked_heads(problem, edited, masked, args, value)
            return output, "through the edited mask" if is_masked else ""
        writer, paths = OutputWriter(base_output), []
        new_value, revalued = self._patch_values(value)
        if call.weights is not None:
            paths.append(self._apply_to_given_weights(args, value, new_value, revalued, writer))
        elif self.masks or self.score_mods or revalued.any():
            paths.append(self._apply_to_weights(call, value, new_value, revalued, writer))
        for edit, pairs, rows in self._patterns:
            source = find_source(edit, self.name)
            paths.append(_apply_pattern(source, pairs, rows, new_value, self.placement, writer))
        for entry in self.bound:
            if isinstance(entry.edit, AblateEdit):
                for pairs, rows in self._find_rows(entry):
                    self._ablate(entry.edit, pairs, rows, call, writer)
            elif isinstance(entry.edit, PatchEdit) and entry.edit.what == "output":
                source = find_source(entry.edit, self.name)
                for pairs, rows in self._find_rows(entry):
                    patch_output(source, pairs, rows, self.placement, writer)
        return (writer.result if writer.is_changed else None), ", ".join(dict.fromkeys(filter(None, paths)))

    def _patch_values(self, value: ValueColumns) -> tuple[ValueColumns, BoolArray]:
        """Return the value after patches from other runs, and which pairs they change: (pairs,)."""
        revalued = np.zeros(len(value.pair_index), bool)
        for entry in self.bound:
            if isinstance(entry.edit, PatchEdit) and entry.edit.what == "value":
                pairs = self._select(entry.edit)
                value = patch_value(find_source(entry.edit, self.name), pairs, value, self.placement)
                revalued |= pairs
        return value, revalued

    def _edit_problem(self, call: Call) -> tuple[Problem, Problem]:
        """Return the problem of a call, and that after the edits."""
        problem = call.matrix.problem
        parts: tuple[Any, ...] = (*self.masks, *self.score_mods)
        for part in parts:
            part.check(problem.frame)
        mask, mods = self.edit_mask(problem.mask), self.edit_score_mods(problem.score_mods)
        return problem, replace(problem, mask=mask, score_mods=mods)

    def _apply_to_given_weights(
        self, args: CapturedArgs, value: ValueColumns, new_value: ValueColumns, revalued: BoolArray,
        writer: OutputWriter,
    ) -> str:  # fmt: skip
        """Compute the rows of a layer with its own softmax whose weights or values change; return how."""
        assert args.dense is not None
        old = args.dense.weights
        new = edit_given_weights(old, self.masks, self.score_mods)
        path = "the layer's own weights edited"
        path = path if new is not old and multiply_given_weights(old, new, value, writer) else ""
        chosen = np.flatnonzero(revalued & ~self._patterned)
        if len(chosen):
            flat = new.reshape(-1, *new.shape[-2:])[torch.as_tensor(chosen)]
            columns = new_value.array[torch.as_tensor(new_value.pair_index[chosen])]
            writer.write(chosen, None, flat @ columns.to(flat.dtype))
        return path

    def _apply_to_weights(
        self,
        call: Call,
        value: ValueColumns,
        new_value: ValueColumns,
        revalued: BoolArray,
        writer: OutputWriter,
    ) -> str:
        """Compute the rows whose weights or values change; return how."""
        problem, edited = self._edit_problem(call)
        chosen = np.flatnonzero(revalued & ~self._patterned)
        if len(chosen):
            writer.write(chosen, None, correction.compute_rows(edited, chosen, None, new_value))
        changed = np.zeros(len(revalued), bool)
        parts: tuple[Any, ...] = (*self.masks, *self.score_mods)
        for part in parts:
            changed |= part.pairs
        changed &= ~revalued
        if not changed.any():
            return ""
        only_knockouts = not self.score_mods and not any(
            isinstance(entry.edit, RestrictEdit) and self._select(entry.edit).any() for entry in self.bound
        )
        removed = [edges._replace(pairs=edges.pairs & changed) for edges in self.removed]
        removed = [edges for edges in removed if not edges.is_empty]
        if only_knockouts and not removed:
            return ""
        if only_knockouts:
            path = _correct(call.matrix, problem, edited, removed, value, writer)
            if path:
                return path
        return self._compute_again(
            problem, edited, changed, removed if only_knockouts else None, value, writer
        )

    def _compute_again(
        self, problem: Problem, edited: Problem, changed: BoolArray, removed: Sequence[RemovedEdges] | None,
        value: ValueColumns, writer: OutputWriter,
    ) -> str:  # fmt: skip
        """Compute whole rows with the edited mask: those that lose an edge, or all."""
        rows = None
        pairs = np.flatnonzero(changed)
        if removed is not None:
            rows = np.unique(np.concatenate([edges.rows for edges in removed]))
            pairs = np.flatnonzero(np.any([edges.pairs for edges in removed], 0))
            rows = None if len(rows) == problem.shape[1] else rows
        if not self.score_mods and not correction.touches(problem, edited, pairs):
            return ""
        writer.write(pairs, rows, correction.compute_rows(edited, pairs, rows, value))
        if rows is not None:
            return f"{len(rows) * len(pairs):,} rows computed again"
        return "through the edited mask" if not self.score_mods else "through the edited scores"

    def _ablate(
        self, edit: AblateEdit, pairs: BoolArray, rows: IntArray | None, call: Call, writer: OutputWriter
    ) -> None:
        index = np.flatnonzero(pairs)
        if not len(index):
            return
        old = writer.read(index, rows)
        if isinstance(edit.to, str) and edit.to == "zero":
            writer.write(index, rows, torch.zeros_like(old))
        elif isinstance(edit.to, (int, float)):
            writer.write(index, rows, old * edit.to)
        else:
            if isinstance(edit.to, str) and self.placement.query_offset:
                raise ArgumentError(
                    "ablate",
                    received="to='mean' in a cached step, which has no output of the earlier tokens",
                    expected="a run over the whole sequence, or a recording with the mean to use",
                    hint="Pass a recording made with watch(values=True): ablate(…, to=recording).",
                )
            if isinstance(edit.to, HeadMeans):
                mean = edit.to[self.name][self.call_index]  # (heads, value_dim)
            else:
                is_own = isinstance(edit.to, str)
                source = replace(call, output=writer.result) if is_own else find_source(edit, self.name)
                mean = compute_mean_output(source)
            heads = torch.as_tensor(index % self.placement.heads, device=old.device)
            writer.write(index, rows, mean.to(old)[heads][:, None].expand_as(old))


def _correct(
    matrix: Any, problem: Problem, edited: Problem, removed: Sequence[RemovedEdges], value: ValueColumns,
    writer: OutputWriter,
) -> str:  # fmt: skip
    """Correct the kernel's output if few edges are removed, and its lse is known; return how, or ""."""
    if problem.engine.requires_grad(problem, value.array):
        return ""  # the lse of a kernel has no gradient
    pairs, q_len, kv_len = problem.shape
    stats = matrix._get_stats()
    if stats is None or correction.count_grid(removed) > correction.MAX_SHARE * pairs * q_len * kv_len:
        return ""
    lse = stats.lse(problem.engine.xp)
    done = correction.correct_edges(problem, edited, removed, lse, value, writer)
    if done is None:
        return ""
    again = f", {done.recomputed:,} computed again" if done.recomputed else ""
    return f"{done.corrected:,} rows corrected from the kernel's lse{again}"


def _apply_pattern(
    source: Call, pairs: BoolArray, rows: IntArray | None, value: ValueColumns, placement: Placement,
    writer: OutputWriter,
) -> str:  # fmt: skip
    """Multiply the weights of another run by the values of this one."""
    problem = source.matrix.problem
    heads, kv_len = placement.heads, problem.frame.kv_len
    positions, source_rows = find_source_rows(source, rows, placement)
    by_batch = pairs.reshape(placement.batch, heads)
    for entry in range(placement.batch):
        chosen = np.flatnonzero(by_batch[entry])
        if not len(chosen) or not len(positions):
            continue
        source_pairs = find_source_pairs(source, chosen + entry * heads, placement)
        index = np.zeros(len(problem.pair_ids), np.int64)
        index[source_pairs] = value.pair_index[chosen + entry * heads]
        fitted = _fit_length(value.array, placement.key_offset, kv_len)
        output = correction.compute_rows(problem, source_pairs, source_rows, ValueColumns(fitted, index))
        writer.write(chosen + entry * heads, positions, output)
    return "pattern of another run times this run's values"


def _fit_length(value: Tensor, offset: int, kv_len: int) -> Tensor:
    """Return a value with `kv_len` rows: those from `offset` on, and zeros where it has none."""
    missing = kv_len - value.shape[-2] - offset
    if not offset and not missing:
        return value
    return torch.nn.functional.pad(value, (0, 0, offset, missing))


def flatten_value(args: CapturedArgs, call: Call) -> ValueColumns:
    """Return the value of a call in canonical form.

    Args:
        args: The arguments of the call.
        call: Its record.

    Raises:
        ArgumentError: If the axes of the value are not known.
    """
    value = args.dense.value if call.weights is not None and args.dense is not None else args.value
    *lead, _, kv_len = call.shape
    if value is None:
        raise ArgumentError(
            "intervene",
            received=f"{call.name!r}, whose value has axes that the lens does not know",
            expected="a value (…, heads, kv_len, value_dim)",
            hint="Load the model with attn_implementation='sdpa', or name other layers.",
        )
    groups = 1
    if lead and value.ndim > 2 and value.shape[-3] not in (1, lead[-1]):
        groups = lead[-1] // value.shape[-3]
    index = broadcast_index(value, tuple(lead), groups, "intervene", "value")
    return ValueColumns(value[..., :kv_len, :].reshape(-1, kv_len, value.shape[-1]), index)


def _has_text(positions: Any) -> bool:
    if isinstance(positions, str):
        return True
    return hasattr(positions, "__iter__") and any(isinstance(entry, str) for entry in positions)


def _pick_tokens(tokens: list[list[Any]], entry: int, batch: int, edit: Edit) -> list[Any]:
    if len(tokens) not in (1, batch):
        raise ArgumentError(
            edit.name,
            received=f"tokens of {len(tokens)} batch entries",
            expected=f"one list of tokens, or one for each of {batch} batch entries",
            hint="Pass the tokens of every batch entry to intervene(tokens=…).",
        )
    return tokens[entry if len(tokens) > 1 else 0]
