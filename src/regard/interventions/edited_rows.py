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

from regard.capture.call import CapturedArgs
from regard.core.block_loop import run_block_loop
from regard.core.products import Product
from regard.engines import torch_kernels as kernels
from regard.engines.torch import TorchNamespace
from regard.errors import ArgumentError
from regard.frame import Frame, is_contiguous
from regard.masks import Mask
from regard.problem import Problem
from regard.score_mods import ScoreMod
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

    def take(self, pairs: IntArray) -> Tensor:
        """Return the value of each of some pairs: (pairs, kv_len, value_dim)."""
        return self.array[torch.as_tensor(self.pair_index[pairs])]


def compute_rows(problem: Problem, pairs: IntArray, rows: IntArray | None, value: ValueColumns) -> Tensor:
    """Compute the output of some pairs and rows, or all rows: (pairs, rows, value_dim), in the value's dtype."""
    part = problem.select_pairs(pairs)
    if rows is not None:
        part = part.select_rows(rows)
    engine = part.engine
    with engine.suppress_warnings():
        fused = part.product(value.array, value.pair_index) if part.can_fuse else None
        if fused is not None:
            return fused[0].to(value.array.dtype)
        (output,), _ = run_block_loop(part, [Product(value.array, value.pair_index)])
    return output.to(value.array.dtype)


class OutputWriter:
    """Writes rows of an output, (…, heads, q_len, value_dim); the tensor is copied before the first one."""

    def __init__(self, output: Tensor) -> None:
        self.result: Tensor = output
        self.is_changed = False

    def read(self, pairs: IntArray, rows: IntArray | None = None) -> Tensor:
        """Return some rows of some pairs: (pairs, rows, value_dim)."""
        band = self._find_band(pairs, rows)
        if band is not None:
            part = self.result[..., band, :]
            return part.reshape(-1, *part.shape[-2:])
        return self.result[self._index(pairs, rows)]

    def write(self, pairs: IntArray, rows: IntArray | None, values: Tensor) -> None:
        """Replace some rows of some pairs by (pairs, rows, value_dim)."""
        if not self.is_changed:
            self.result, self.is_changed = self.result.clone(), True
        band = self._find_band(pairs, rows)
        if band is not None:
            part = self.result[..., band, :]
            part.copy_(values.reshape(part.shape))
        else:
            self.result[self._index(pairs, rows)] = values.to(self.result.dtype)

    def _find_band(self, pairs: IntArray, rows: IntArray | None) -> slice | None:
        """Return the rows as a slice if all pairs are chosen: slices copy in a fraction of the time of indices."""
        total = math.prod(self.result.shape[:-2])
        if len(pairs) != total or not np.array_equal(pairs, np.arange(total)):
            return None
        if rows is None:
            return slice(None)
        return slice(int(rows[0]), int(rows[-1]) + 1) if is_contiguous(rows) else None

    def _index(self, pairs: IntArray, rows: IntArray | None) -> tuple[Any, ...]:
        lead = tuple(self.result.shape[:-2])
        places = np.unravel_index(pairs, lead) if lead else ()
        if rows is None:
            return tuple(map(torch.as_tensor, places))
        return (*(torch.as_tensor(place)[:, None] for place in places), torch.as_tensor(rows)[None, :])


def correct_edges(
    matrix: Any, edited: Problem, removed: Sequence[RemovedEdges], value: ValueColumns, writer: OutputWriter
) -> str:
    """Remove edges from the output of a kernel if its lse is known, and few rows lose most of their weight."""
    problem = matrix.problem
    # The lse of a kernel has no gradient.
    stats = None if problem.engine.requires_grad(problem, value.array) else matrix._get_stats()
    if stats is None:
        return ""
    owners: dict[tuple[int, ...], list[int]] = {}  # pairs by the edges that they lose
    for pair in np.flatnonzero(np.any([edges.pairs for edges in removed], 0)):
        owners.setdefault(tuple(i for i, edges in enumerate(removed) if edges.pairs[pair]), []).append(
            int(pair)
        )
    groups = []
    for numbers, members in owners.items():
        parts = [removed[i] for i in numbers]
        rows, columns = (np.unique(np.concatenate([edges[axis] for edges in parts])) for axis in (1, 2))
        groups.append((np.array(members), parts, rows, columns))
    num_scores = sum(len(pairs) * len(rows) * len(columns) for pairs, _, rows, columns in groups)
    if num_scores > MAX_SHARE * math.prod(problem.shape):
        return ""
    lse = stats.lse(problem.engine.xp)
    changes: list[tuple[IntArray, IntArray, Tensor]] = []
    exact: list[tuple[IntArray, IntArray]] = []
    num_rows = num_exact = 0
    total = max(1, len(problem.pair_ids) * problem.shape[1])
    for pairs, parts, rows, columns in groups:
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
            new = (old - carried) / torch.where(share > MAX_REMOVED, 1.0, 1.0 - share)[..., None]
            changes.append((pairs, band, new))
            num_rows += band.size * len(pairs)
            if is_exact.any():
                exact.append((pairs[is_exact.any(1)], band[is_exact.any(0)]))
                num_exact += len(exact[-1][0]) * len(exact[-1][1])
            if num_exact > MAX_EXACT_ROWS * total and num_exact > len(problem.pair_ids):
                return ""
    for pairs, band, new in changes:
        writer.write(pairs, band, new)
    for pairs, band in exact:
        writer.write(pairs, band, compute_rows(edited, pairs, band, value))
    again = f", {num_exact:,} computed again" if num_exact else ""
    return f"{num_rows - num_exact:,} rows corrected from the kernel's lse{again}"


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
            removed = ~mask.allows(frame, q_idx, columns, np)
            if base is not None:
                removed = removed & base.allows(frame, q_idx, columns, np)
            if bool(removed.any()):
                return True
    return False


def compute_masked_heads(
    problem: Problem, edited: Problem, masked: BoolArray, args: CapturedArgs, value: ValueColumns
) -> tuple[Tensor, bool]:
    """Compute each head once: the masked ones through the edited mask, the others by the function of the model.

    Args:
        masked: Heads that the edits select, (heads,), booleans; the same in each batch entry.

    Returns:
        The output, (batch, heads, q_len, value_dim), and whether a mask removes any entry.
    """
    batch, num_heads = args.query.shape[:2]
    pairs = np.flatnonzero(np.tile(masked, batch))
    if not touches(problem, edited, pairs):
        return kernels.SDPA(*args[:6], scale=args.scale, enable_gqa=args.enable_gqa), False
    rows = compute_rows(edited, pairs, None, value).unflatten(0, (batch, -1))
    if masked.all():
        return rows, True
    heads = np.flatnonzero(~masked)

    def select(tensor: Tensor) -> Tensor:
        index = torch.as_tensor(heads // (num_heads // tensor.shape[-3]), device=tensor.device)
        return tensor.index_select(-3, index)

    mask = args.attn_mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = select(mask)
    query, key, own_value = map(select, (args.query, args.key, args.value))
    output = rows.new_empty(batch, num_heads, *rows.shape[-2:])
    output[:, masked] = rows
    output[:, heads] = kernels.SDPA(query, key, own_value, mask, is_causal=args.is_causal, scale=args.scale)
    return output, True


def edit_given_weights(weights: Tensor, masks: Sequence[Mask], score_mods: Sequence[ScoreMod]) -> Tensor:
    """Apply masks and score modifications to the weights of a layer with its own softmax, (…, heads, q_len, kv_len).

    If all rows of a head have the same sum, the layer multiplied its softmax by that factor. Otherwise what a row lacks
    to a sum of 1 belongs to a sink, and keeps its part in the normalisation. Sums run over the remaining weights, so
    that nothing cancels. Rows that do not change keep their weights.
    """
    if not masks and not score_mods:
        return weights
    shape = tuple(weights.shape)
    frame = Frame.from_shape(shape)
    rows, columns = np.arange(shape[-2]), np.arange(shape[-1])
    old = weights.reshape(-1, *shape[-2:])
    wide = old.to(torch.promote_types(weights.dtype, torch.float32))
    new, changed = wide, torch.zeros(old.shape[:2], dtype=torch.bool, device=old.device)
    xp = TorchNamespace(wide.device)
    for mask in masks:
        mask.check(frame)
        allowed = mask.allows(frame, rows, columns, xp)
        changed = changed | ((wide != 0) & ~allowed).any(-1)
        new = torch.where(allowed, new, 0.0)
    sums, is_live = wide.sum(-1, keepdim=True), (wide != 0).any(-1, keepdim=True)
    tolerance = 8 * torch.finfo(weights.dtype).eps + 1e-5
    # A head either has a sink in every row or has none. Rows with little of it may lose all other keys.
    has_sink = (is_live & (1.0 - sums > tolerance)).any(-2, keepdim=True)
    # The sums of one row in each head are compared with those of the other heads.
    axes = (-2,) if int(is_live.sum(-2).amax()) > 1 else (0, -2)
    least = torch.where(is_live, sums, torch.inf).amin(axes, keepdim=True)
    largest = torch.where(is_live, sums, 0.0).amax(axes, keepdim=True)
    has_factor = has_sink & (largest - least <= tolerance) & (is_live.sum(axes, keepdim=True) > 1)
    rest = torch.where(has_sink & ~has_factor, (1.0 - sums).clamp(min=0.0), 0.0)
    for score_mod in score_mods:
        score_mod.check(frame)
        bias = score_mod.additive_bias(frame, rows, columns, xp, wide.dtype)
        if bias is None:
            raise ArgumentError(
                "rescore",
                received=f"{score_mod!r} for a layer that computes its own softmax",
                expected="an additive modification such as regard.score_mods.bias(…) or alibi(), because the scores "
                "are unknown",
                hint="Load the model with attn_implementation='sdpa' if it supports that.",
            )
        bias = bias.to(wide.device)
        shift = bias.amax(-1, keepdim=True)
        new, rest = new * torch.exp(bias - shift), rest * torch.exp(-shift)
        changed = changed | (bias != 0).any(-1)
    total = new.sum(-1, keepdim=True) + rest
    new = new / torch.where(total == 0, 1.0, total) * torch.where(has_factor, sums, 1.0)
    return torch.where(changed[..., None], new.to(weights.dtype), old).reshape(shape)
