"""Products by fused kernels: a mask lowered to calls that a kernel takes, and the calls put together.

A mask is lowered to the cheapest form the kernel takes: no mask, `is_causal`, or blocks of such calls, each block
full, causal, or with a small mask of its own; blocks of one band of rows are put together by their lse. Nothing of
size q_len × kv_len is made. What the kernels do not keep of what is promised is mended here: rows that see nothing,
and NaN or inf where nobody may see it (then the block loop takes over).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.engines import torch_kernels as kernels
from regard.engines.torch_kernels import Kernel
from regard.frame import EXACT_ROWS_LIMIT, Frame, is_contiguous
from regard.masks import Mask
from regard.masks.atoms import Band
from regard.score_mods import ScoreMod
from regard.tiling import TileSizes, tile_sizes
from regard.types import IntArray

Tensor = Any  # the types of torch are not followed
# A regard.core.problem.Problem; that module is to the right of this one.
Pairs = Any


class Piece(NamedTuple):
    """Columns of a band that one call takes: all seen, causal from the first corner, or tested by a mask tile."""

    columns: range
    causal: bool
    tested: bool


class Rows(NamedTuple):
    """A band of rows and the pieces that it sees."""

    rows: range
    pieces: tuple[Piece, ...]


_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# With fewer keys the kernel returns zeros for a row whose scores are all NaN.
FEW_KEYS = 64


def plan(frame: Frame, mask: Mask | None, q_range: range, biased: bool) -> list[Rows]:
    """Bands of rows of a matrix, q_idx in `q_range`, and what to call for each."""
    sizes = tile_sizes()
    every = range(frame.kv_len)
    if mask is None and not biased:
        return [Rows(q_range, (Piece(every, False, False),))]
    row_cuts = np.arange(0, frame.q_len, sizes.mask_tile_rows)
    column_cuts = np.array([0])
    if mask is not None:
        cuts = mask.cuts(frame)
        row_cuts, column_cuts = (np.union1d(row_cuts, cuts.rows) if biased else cuts.rows), cuts.columns
    bands: list[Rows] = []
    starts = [q_range.start, *(int(r) for r in row_cuts if q_range.start < r < q_range.stop)]
    edges = set() if mask is None else mask.diagonals(frame)
    for start, stop in zip(starts, [*starts[1:], q_range.stop], strict=True):
        # Where rows begin in the middle, columns cut at the same corner leave a full and a causal piece.
        corners = [
            corner for edge in edges for corner in (start + edge, stop + edge) if 0 < corner < frame.kv_len
        ]
        columns = np.union1d(column_cuts, np.array(corners, np.int64)) if corners else column_cuts
        band = _band(frame, mask, range(start, stop), columns, biased, sizes)
        if len(band.rows) > sizes.mask_tile_rows and any(piece.tested for piece in band.pieces):
            steps = range(start, stop, sizes.mask_tile_rows)
            parts = [range(r, min(r + sizes.mask_tile_rows, stop)) for r in steps]
            bands += [_band(frame, mask, part, column_cuts, biased, sizes) for part in parts]
        else:
            bands.append(band)
    return bands


def _band(
    frame: Frame, mask: Mask | None, rows: range, cuts: IntArray, biased: bool, sizes: TileSizes
) -> Rows:
    stops = np.append(cuts[1:], frame.kv_len)
    may, must = np.ones(len(cuts), bool), np.ones(len(cuts), bool)
    if mask is not None:
        may, must = mask.bounds(frame, rows.start, rows.stop, cuts, stops)
    live = np.flatnonzero(may)
    if _joins(live, must, cuts, stops, len(rows), sizes):
        return Rows(rows, (Piece(range(int(cuts[live[0]]), int(stops[live[-1]])), False, True),))
    pieces: list[Piece] = []
    for i in live:
        columns = range(int(cuts[i]), int(stops[i]))
        piece = Piece(columns, False, biased)
        if not must[i] and mask is not None:
            left = mask.within(frame, rows, columns)
            if left is False:
                continue
            causal = isinstance(left, Mask) and left.diagonal(frame) == columns.start - rows.start
            piece = Piece(columns, causal and not biased, biased or not (causal or left is True))
        before = pieces[-1] if pieces else None
        alike = before and not (before.causal or piece.causal) and before.tested == piece.tested
        if before and alike and before.columns.stop == columns.start:
            pieces[-1] = piece._replace(columns=range(before.columns.start, columns.stop))
        else:
            pieces.append(piece)
    return Rows(rows, tuple(pieces))


def _joins(live: IntArray, must: Any, cuts: IntArray, stops: IntArray, rows: int, sizes: TileSizes) -> bool:
    """Whether small adjoining blocks become one that is tested: a call costs more than the test that it saves."""
    if len(live) < 2 or rows > sizes.mask_tile_rows or must[live].all() or not is_contiguous(live):
        return False
    return bool(stops[live[-1]] - cuts[live[0]] <= sizes.joined_columns)


class Call(NamedTuple):
    """What the kernel is called with: the bands of one group of pairs, and how to make a mask tile."""

    kernel: Kernel
    bands: list[Rows]
    first_row: int
    tile: Callable[[range, range], Tensor]
    scale: float


def _run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse, (1, heads, rows, …), of all bands."""
    outputs, lses = [], []
    for rows, pieces in call.bands:
        part = q[:, :, rows.start - call.first_row : rows.stop - call.first_row]
        found = [_run_piece(part, k, v, rows, piece, call) for piece in pieces]
        if not found:
            shape = part.shape[:-1]
            found = [(part.new_zeros((*shape, v.shape[-1])), _lse_like(part, shape))]
        output, lse = found[0]
        for more, more_lse in found[1:]:
            output, lse = _together(output, lse, more, more_lse)
        lse = lse.to(found[0][1].dtype)
        if sink is not None:
            total = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None])
            output, lse = output * _share(lse, total)[..., None].to(output.dtype), total
        outputs.append(output)
        lses.append(lse)
    if len(outputs) == 1:
        return outputs[0], lses[0]
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def _run_piece(
    q: Tensor, k: Tensor, v: Tensor, rows: range, piece: Piece, call: Call
) -> tuple[Tensor, Tensor]:
    columns = slice(piece.columns.start, piece.columns.stop)
    tile = call.tile(rows, piece.columns) if piece.tested else None
    output, lse = call.kernel.forward(q, k[:, :, columns], v[:, :, columns], piece.causal, tile, call.scale)
    if tile is not None:
        # The kernel gives a row that sees nothing an lse of 0.
        empty = (tile == -math.inf).all(-1) if (lse == 0).any() else lse.new_zeros((), dtype=torch.bool)
        if empty.any():
            lse = lse.masked_fill(empty, -math.inf)
            output = output.masked_fill(empty[..., None], 0.0)
    return output, lse


def _lse_like(part: Tensor, shape: Any) -> Tensor:
    dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
    return torch.full(shape, -math.inf, dtype=dtype, device=part.device)


def _share(lse: Tensor, total: Tensor) -> Tensor:
    return torch.exp(lse - torch.where(total == -math.inf, 0.0, total))


def _together(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two pieces of the same rows as one."""
    # Rounded to float32 at every piece, the lse would err by an ulp for each.
    lse = torch.logaddexp(a_lse.double(), b_lse.double())
    wide = _WIDE.get(a.dtype, a.dtype)
    parts = (x.to(wide) * _share(x_lse, lse)[..., None].to(wide) for x, x_lse in ((a, a_lse), (b, b_lse)))
    return sum(parts), lse


class _Blocks(torch.autograd.Function):  # type: ignore[misc]
    """`_run` with its gradient: each piece's, given the final output and lse, as the kernel itself does it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        output, lse = _run(q, k, v, sink, call)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, output, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        q, k, v, sink, output, lse = ctx.saved_tensors
        call: Call = ctx.call
        assert call.kernel.backward is not None
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        finite = torch.where(lse == -math.inf, 0.0, lse)
        for rows, pieces in call.bands:
            r = slice(rows.start - call.first_row, rows.stop - call.first_row)
            for piece in pieces:
                c = slice(piece.columns.start, piece.columns.stop)
                tile = call.tile(rows, piece.columns) if piece.tested else None
                found = call.kernel.backward(
                    grad[:, :, r].contiguous(), q[:, :, r], k[:, :, c], v[:, :, c],
                    output[:, :, r], finite[:, :, r], piece.causal, tile, call.scale,
                )  # fmt: skip
                dq[:, :, r] += found[0]
                dk[:, :, c] += found[1]
                dv[:, :, c] += found[2]
        dsink = None
        if sink is not None:
            inner = (grad * output).sum(-1).to(lse.dtype)  # (1, heads, rows)
            share = _share(sink.to(lse.dtype)[None, :, None].expand_as(lse), lse)
            dsink = -(share * inner).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, dsink, None


def product(pairs: Pairs, value: Tensor, value_of: IntArray) -> tuple[Tensor, Tensor, str] | None:
    """Output (pairs, rows, value_dim), lse (pairs, rows) and what ran; None where no fused kernel may be used."""
    kernel, _ = usable(pairs)
    if kernel is None or not value.numel():
        return None
    mask, tensors = pairs.mask, (pairs.query, pairs.key, value)
    biases = any(is_learnt(array) for change in pairs.score_mods for array in vars(change).values())
    learning = biases or any(map(is_learnt, (*tensors, pairs.sink)))
    if biases or (learning and kernel.backward is None):
        return None  # the kernel has no gradient for them
    watched = tensors if mask is not None or pairs.score_mods else tensors[:2]
    if (len(watched) > 2 or pairs.key.shape[-2] < FEW_KEYS) and not _finite(*watched):
        return None
    width = max(pairs.query.shape[-1], value.shape[-1])
    if width != min(pairs.query.shape[-1], value.shape[-1]):
        width = -(-width // 16) * 16  # what is filled up anyway is filled up to whole vectors
    common = torch.promote_types(torch.promote_types(pairs.query.dtype, pairs.key.dtype), value.dtype)
    outputs, lses, calls = [], [], 0
    for group in _groups(pairs):
        part = pairs.select_pairs(group)
        of = value_of[part.pair_ids]
        k_of, v_of = part.key_index, of
        shared = _groups_of(k_of) if np.array_equal(k_of, v_of) else 1
        q = _heads(part.query, part.query_index, width, common)
        scale = part.scale
        if scale <= 0:  # the kernel hides before it scales: −inf · 0 would be NaN
            q, scale = (-q, -scale) if scale else (q * 0.0, 1.0)
        k = _heads(part.key, k_of[::shared], width, common)
        v = _heads(value, v_of[::shared], width, common)
        q_range = range(int(part.positions[0]), int(part.positions[-1]) + 1)
        bands = plan(part.frame, mask, q_range, bool(part.score_mods))
        sink = (
            None if part.sink is None else part.frame.per_head(part.sink, "sink").expand(len(part.pair_ids))
        )
        # The operator reads a mask tile as the dtype of the query, whatever it is.
        wide = replace(part, dtype=torch.promote_types(part.dtype, common))
        call = Call(kernel, bands, q_range.start, _tile_maker(wide), scale)
        single = (
            len(bands) == 1 and len(bands[0].pieces) == 1 and not bands[0].pieces[0].tested and sink is None
        )
        if learning and not single:
            output, lse = _Blocks.apply(q, k, v, sink, call)
        else:
            output, lse = _run(q, k, v, sink, call)
        if not (bool((lse < math.inf).all()) and _finite(output)):
            return None  # a live NaN or inf, which the kernel does not treat as promised
        outputs.append(output[0, ..., : value.shape[-1]])
        lses.append(lse[0])
        calls += sum(len(band.pieces) for band in bands)
    name = f"torch: {kernel.name}, {describe(bands, calls)}"
    if len(outputs) == 1:
        return outputs[0], lses[0], name
    return torch.cat(outputs), torch.cat(lses), name


def is_learnt(array: Any) -> bool:
    """Whether a gradient is wanted of it."""
    return isinstance(array, torch.Tensor) and array.requires_grad and torch.is_grad_enabled()


def usable(pairs: Pairs) -> tuple[Kernel | None, str]:
    """The kernel for a problem, or why there is none."""
    if not (pairs.query.numel() and pairs.key.numel() and len(pairs.pair_ids)):
        return None, "an axis is empty"
    kernel = kernels.kernel_on(pairs.query.device.type)
    if kernel is None:
        return None, f"no fused kernel on {pairs.query.device.type}"
    if not is_contiguous(pairs.positions):
        return None, "the rows are not in one piece"
    for change in pairs.score_mods:
        if type(change).added is ScoreMod.added:
            return None, f"no fused kernel takes {change}"
    return kernel, ""


def quick(query: Tensor, key: Tensor, value: Any, mask: Mask | None, scale: float) -> Any:
    """Output, lse and what ran of the plain call, where the arrays are as the kernel takes them; None otherwise."""
    if type(value) is not torch.Tensor:
        return None
    shape, k_shape = query.shape, key.shape
    if len(shape) != 4 or value.shape != k_shape or shape[0] != k_shape[0] or 0 in shape or 0 in k_shape:
        return None
    if not query.dtype is key.dtype is value.dtype:
        return None
    if scale <= 0 or query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        return None
    causal = False
    if mask is not None:
        edge = _edge(mask, shape[2], k_shape[2])
        if edge is None or 0 != edge < k_shape[2] - 1:
            return None
        causal = edge == 0 and k_shape[2] > 1
    kernel = kernels.kernel_on(query.device.type)
    if kernel is None or (k_shape[2] < FEW_KEYS and not _finite(query, key)):
        return None
    output, lse = kernel.forward(query, key, value, causal, None, scale)
    # NaN or inf anywhere that the kernel looked shows in its output; then the block loop sees to it who may see it.
    if not math.isfinite(output.detach().sum(dtype=_WIDE.get(output.dtype)).item()):
        return None
    return output, lse, kernel.causal if causal else kernel.unmasked


def _edge(mask: Mask, q_len: int, kv_len: int) -> int | None:
    """The last key that query 0 sees, where a mask is causal and nothing else."""
    if not isinstance(mask, Band) or mask.left is not None or mask.right is None or mask.right.array.ndim:
        return None
    return int(mask.right.array) + (kv_len - q_len if mask.align == "lower_right" else 0)


def describe(bands: list[Rows], calls: int) -> str:
    """What a plan does, in a few words."""
    if calls == 1 and len(bands) == 1 and bands[0].pieces:
        piece = bands[0].pieces[0]
        return "causal" if piece.causal else "masked" if piece.tested else "no mask"
    tested = sum(piece.tested for band in bands for piece in band.pieces)
    return f"{calls} blocks" + (f", {tested} with a mask tile" if tested else "")


def needs_exact_rows(pairs: Pairs) -> bool:
    """Whether scores are so large, or cancel so much, that a weight recomputed from the kernel's lse loses digits.

    The kernel adds up its scores in another order: a weight then errs by eps · |query| · |key| · scale, relative.
    """
    if not (pairs.query.numel() and pairs.key.numel()):
        return False
    longest = [float(x.detach().to(pairs.dtype).norm(dim=-1).amax()) for x in (pairs.query, pairs.key)]
    return not math.prod(longest) * abs(pairs.scale) < EXACT_ROWS_LIMIT  # NaN is rough, too


def _finite(*tensors: Tensor) -> bool:
    """One sum tells whether anything is not finite; an overflowing sum only sends the work to the block loop."""
    with torch.no_grad():
        return all(math.isfinite(tensor.sum(dtype=_WIDE.get(tensor.dtype)).item()) for tensor in tensors)


def _groups(pairs: Pairs) -> list[IntArray]:
    """All pairs at once, or those of each batch entry where they reach differently far."""
    count = len(pairs.pair_ids)
    if pairs.mask is None or not pairs.mask.ragged or count < 2:
        return [np.arange(count)]
    heads = pairs.frame.leading_shape[-1] if pairs.frame.leading_shape else 1
    entry = pairs.frame.selected // max(heads, 1)
    return np.split(np.arange(count), np.flatnonzero(np.diff(entry)) + 1)


def _groups_of(of: IntArray) -> int:
    """How many pairs in a row share each key pair, where that is regular; 1 otherwise."""
    changes = np.flatnonzero(np.diff(of)) + 1
    size = int(changes[0]) if len(changes) else len(of)
    regular = (
        len(of) % size == 0 and np.array_equal(of, of[::size].repeat(size)) and is_contiguous(of[::size])
    )
    return size if regular else 1


def _heads(array: Tensor, of: IntArray, width: int, dtype: Any) -> Tensor:
    """(1, heads, length, width) as the kernel reads it: the last axis in one piece, filled up with zeros."""
    if is_contiguous(of):
        array = array[int(of[0]) : int(of[-1]) + 1]
    else:
        array = array[torch.tensor(of, device=array.device)]
    array = array.to(dtype)[None]
    if array.shape[-1] != width:
        return torch.nn.functional.pad(array, (0, width - array.shape[-1]))
    return array if array.stride(-1) == 1 else array.contiguous()


def _tile_maker(pairs: Pairs) -> Callable[[range, range], Tensor]:
    xp, dtype = pairs.engine.xp, pairs.dtype
    slides = pairs.mask is not None and pairs.mask.slides and not pairs.score_mods
    kept: dict[tuple[int, int, int], Tensor] = {}  # blocks along a diagonal share one

    def tile(rows: range, columns: range) -> Tensor:
        """What is added to the scores of a block, −inf where masked: (1, heads or 1, rows, columns)."""
        alike = (columns.start - rows.start, len(rows), len(columns))
        if alike in kept:
            return kept[alike]
        q_idx, kv_idx = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        total: Any = 0.0
        hidden: Any = False
        for change in pairs.score_mods:
            added = change.added(pairs.frame, q_idx, kv_idx, xp, dtype).detach()
            hidden = hidden | (added == -math.inf)
            total = total + added
        left = True if pairs.mask is None else pairs.mask.within(pairs.frame, rows, columns)
        if isinstance(left, Mask):
            hidden = hidden | ~left.allows(pairs.frame, q_idx, kv_idx, xp)
        if not isinstance(total, torch.Tensor):
            total = torch.zeros((1, 1, 1), dtype=dtype, device=pairs.query.device)
        if isinstance(hidden, torch.Tensor):
            total = torch.where(hidden, -math.inf, total)
        made = total.expand(-1, len(q_idx), len(kv_idx))[None]
        if slides:
            kept[alike] = made
        return made

    return tile
