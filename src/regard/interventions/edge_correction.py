"""Compute the output of edited rows: corrected from the kernel's output and lse, or computed again.

A row without some of its keys is (output − Σ w·v) / (1 − Σ w) over the removed ones, with w = exp(score − lse). This
costs as much as the removed edges. Where they hold most of a row's weight, the subtraction would cancel digits, and
the row is computed again. If that happens to many rows, all rows run through the lowered mask instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.core.block_loop import run_block_loop
from regard.core.products import Product
from regard.frame import is_contiguous
from regard.problem import Problem
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed
BoolArray = Any

# A row that loses more than this share of its weight is computed again: the error of its output grows by 1/(1 − share).
MAX_REMOVED = 0.5
# Edges are removed one by one if they are at most this share of the matrix; otherwise the mask is lowered.
MAX_SHARE = 1 / 8
# Rows are computed again one group at a time if they are at most this share of the rows.
MAX_EXACT_ROWS = 1 / 8
# Scores held at once.
MAX_SCORES = 1 << 20


class RemovedEdges(NamedTuple):
    """Edges that a knockout removes: all between some rows and some columns of a call, for some pairs.

    Args:
        pairs: (batch, head) pairs: (pairs,), booleans.
        rows: Rows of the call, ascending.
        columns: Columns of the call, ascending.
    """

    pairs: BoolArray
    rows: IntArray
    columns: IntArray

    @property
    def is_empty(self) -> bool:
        """Whether nothing is removed."""
        return not (self.pairs.any() and len(self.rows) and len(self.columns))


class ValueColumns(NamedTuple):
    """A value in canonical form.

    Args:
        array: (own pairs, kv_len, value_dim).
        pair_index: For each pair of the matrix, its pair in `array`: (pairs,).
    """

    array: Tensor
    pair_index: IntArray


def compute_rows(problem: Problem, pairs: IntArray, rows: IntArray | None, value: ValueColumns) -> Tensor:
    """Compute the output of some pairs and rows.

    Args:
        problem: The matrix.
        pairs: Indices of pairs.
        rows: Rows; None for all.
        value: The value.

    Returns:
        (pairs, rows, value_dim), in the dtype of the value.
    """
    part = problem.select_pairs(pairs)
    if rows is not None:
        part = part.select_rows(rows)
    engine = part.engine
    with engine.suppress_warnings():
        fused = part.product(value.array, value.pair_index) if part.can_fuse else None
        if fused is not None:
            return fused[0].to(value.array.dtype)
        finite = bool(engine.xp.all(engine.xp.isfinite(value.array)))
        dtype = engine.working_dtype(part.query, part.key, value.array)
        (output,), _ = run_block_loop(part, [Product(value.array, value.pair_index, False, finite, dtype)])
    return output.to(value.array.dtype)


class OutputWriter:
    """Writes rows of an output; the tensor is copied before the first one.

    Args:
        output: (…, heads, q_len, value_dim).
    """

    def __init__(self, output: Tensor) -> None:
        self._output: Tensor = output
        self._copy: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """The output with everything that was written."""
        return self._output if self._copy is None else self._copy

    @property
    def is_changed(self) -> bool:
        """Whether anything was written."""
        return self._copy is not None

    def read(self, pairs: IntArray, rows: IntArray | None = None) -> Tensor:
        """Return some rows of some pairs: (pairs, rows, value_dim)."""
        band = self._find_band(pairs, rows)
        if band is not None:
            part = self.result[..., band, :]
            return part.reshape(-1, *part.shape[-2:])
        return self.result[self._index(pairs, rows)]

    def write(self, pairs: IntArray, rows: IntArray | None, values: Tensor) -> None:
        """Replace some rows of some pairs by (pairs, rows, value_dim)."""
        if self._copy is None:
            self._copy = self._output.clone()
        band = self._find_band(pairs, rows)
        if band is not None:
            part = self._copy[..., band, :]
            part.copy_(values.reshape(part.shape))
        else:
            self._copy[self._index(pairs, rows)] = values.to(self._output.dtype)

    def _find_band(self, pairs: IntArray, rows: IntArray | None) -> slice | None:
        """Return the rows as a slice if all pairs are chosen: slices copy in a fraction of the time of indices."""
        if len(pairs) != math.prod(self._output.shape[:-2]) or not np.array_equal(
            pairs, np.arange(len(pairs))
        ):
            return None
        if rows is None:
            return slice(None)
        return slice(int(rows[0]), int(rows[-1]) + 1) if is_contiguous(rows) else None

    def _index(self, pairs: IntArray, rows: IntArray | None) -> tuple[Any, ...]:
        lead = tuple(self._output.shape[:-2])
        places = np.unravel_index(pairs, lead) if lead else ()
        if rows is None:
            return tuple(map(torch.as_tensor, places))
        return (*(torch.as_tensor(place)[:, None] for place in places), torch.as_tensor(rows)[None, :])


class Correction(NamedTuple):
    """What `correct_edges` did.

    Args:
        corrected: Number of rows corrected from the lse.
        recomputed: Number of rows computed again.
    """

    corrected: int
    recomputed: int


def correct_edges(
    problem: Problem,
    edited: Problem,
    removed: Sequence[RemovedEdges],
    lse: Tensor,
    value: ValueColumns,
    writer: OutputWriter,
) -> Correction | None:
    """Remove edges from the output of a kernel.

    Args:
        problem: The matrix that the kernel multiplied.
        edited: The matrix without the edges.
        removed: The edges.
        lse: Logsumexp of each row of `problem`: (pairs, q_len).
        value: The value.
        writer: Holds the output of the kernel, and gets the result.

    Returns:
        How many rows were changed; None if so many rows lose most of their weight that the lowered mask is cheaper.
        Nothing is written then.
    """
    groups = _group_pairs(removed)
    changes: list[tuple[IntArray, IntArray, Tensor]] = []
    exact: list[tuple[IntArray, IntArray]] = []
    num_rows = num_exact = 0
    total = max(1, len(problem.pair_ids) * problem.shape[1])
    for pairs, parts in groups:
        rows, columns = _unite(parts)
        part = problem.select_pairs(pairs)
        step = max(1, MAX_SCORES // max(1, len(pairs) * len(columns)))
        for start in range(0, len(rows), step):
            band = rows[start : start + step]
            weights = _compute_removed_weights(part, parts, band, columns, lse[torch.as_tensor(pairs)])
            if weights is None:
                continue
            share = weights.sum(-1)
            carried = weights @ problem.engine.take(value.array, value.pair_index[pairs], columns, part.dtype)
            old = writer.read(pairs, band).to(part.dtype)
            is_exact = (share > MAX_REMOVED).cpu().numpy()
            kept = 1.0 - share
            new = (old - carried) / torch.where(share > MAX_REMOVED, 1.0, kept)[..., None]
            changes.append((pairs, band, new))
            num_rows += band.size * len(pairs)
            if is_exact.any():
                exact.append((pairs[is_exact.any(1)], band[is_exact.any(0)]))
                num_exact += len(exact[-1][0]) * len(exact[-1][1])
            if num_exact > MAX_EXACT_ROWS * total and num_exact > len(problem.pair_ids):
                return None
    for pairs, band, new in changes:
        writer.write(pairs, band, new)
    for owners, chosen in exact:
        writer.write(owners, chosen, compute_rows(edited, owners, chosen, value))
    return Correction(num_rows - num_exact, num_exact)


def _compute_removed_weights(
    part: Problem, parts: Sequence[RemovedEdges], rows: IntArray, columns: IntArray, lse: Tensor
) -> Tensor | None:
    """Compute the weights of the removed edges between rows and columns, 0 at the others; None if all are masked."""
    full = False
    if part.mask is not None:
        nonempty, every = part.mask.classify_blocks(
            part.frame, int(rows[0]), int(rows[-1]) + 1, columns[:1], columns[-1:] + 1
        )
        if not nonempty[0]:
            return None
        full = bool(every[0])
    scores = part.scores(rows, columns, full)
    shift = lse[:, torch.as_tensor(rows)][..., None].to(scores.dtype)
    weights = torch.exp(scores - torch.where(shift == -torch.inf, 0.0, shift))
    if len(parts) > 1:
        flags = np.zeros((len(rows), len(columns)), bool)
        for edges in parts:
            flags |= np.isin(rows, edges.rows)[:, None] & np.isin(columns, edges.columns)[None, :]
        if not flags.all():
            weights = weights * torch.as_tensor(flags, device=weights.device)
    return weights


def _group_pairs(removed: Sequence[RemovedEdges]) -> list[tuple[IntArray, list[RemovedEdges]]]:
    """Group the pairs from which the same edges are removed."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for pair in np.flatnonzero(np.any([edges.pairs for edges in removed], 0)):
        owners = tuple(i for i, edges in enumerate(removed) if edges.pairs[pair] and not edges.is_empty)
        if owners:
            groups.setdefault(owners, []).append(int(pair))
    return [(np.array(pairs), [removed[i] for i in owners]) for owners, pairs in groups.items()]


def _unite(parts: Sequence[RemovedEdges]) -> tuple[IntArray, IntArray]:
    """Return the rows and the columns that any of several removals has."""
    rows = np.unique(np.concatenate([edges.rows for edges in parts]))
    return rows, np.unique(np.concatenate([edges.columns for edges in parts]))


def count_grid(removed: Sequence[RemovedEdges]) -> int:
    """Count the scores that `correct_edges` computes."""
    total = 0
    for pairs, parts in _group_pairs(removed):
        rows, columns = _unite(parts)
        total += len(pairs) * len(rows) * len(columns)
    return total


def touches(problem: Problem, edited: Problem, pairs: IntArray) -> bool:
    """Return whether the mask of `edited` removes any entry that the mask of `problem` allows to some pairs.

    Blocks are classified first, and evaluated only if that does not decide.
    """
    mask, base = edited.mask, problem.mask
    if mask is None:
        return False
    frame = problem.frame.select(pairs)
    step = 512
    starts = np.arange(0, frame.kv_len, step)
    stops = np.minimum(starts + step, frame.kv_len)
    for start in range(0, frame.q_len, step):
        q_idx = np.arange(start, min(start + step, frame.q_len))
        _, full = mask.classify_blocks(frame, start, int(q_idx[-1]) + 1, starts, stops)
        live = np.ones(len(starts), bool)
        if base is not None:
            live, _ = base.classify_blocks(frame, start, int(q_idx[-1]) + 1, starts, stops)
        for i in np.flatnonzero(live & ~np.asarray(full)):
            columns = np.arange(starts[i], stops[i])
            removed = ~mask.allows(frame, q_idx, columns, torch)
            if base is not None:
                removed = removed & base.allows(frame, q_idx, columns, torch)
            if bool(removed.any()):
                return True
    return False
