"""The mask and bias of a captured call in O(q_len) memory: how they are stored, recognised and named.

Nearly every mask in use lets each query attend to one interval of keys: causal, padded on either side, sliding window,
packed, chunked. So a mask is stored as the intervals of its rows. Rows of several calls concatenate by their intervals,
and the name is derived from the intervals alone. A mask is recognised from the tensor that a model passes, from the
`BlockMask` of torch's `flex_attention`, or from the weights of a layer that computes its own softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from regard.engines.torch import TorchNamespace
from regard.errors import ArgumentError, format_shape
from regard.frame import Frame
from regard.masks import Mask, causal, dense, padding, sliding_window
from regard.masks.base import BlockKinds
from regard.score_mods import ScoreMod, bias
from regard.types import Align, Array, IntArray, Namespace

Tensor = Any  # the types of torch are not followed
BoolArray = Any

# Entries of a mask that are processed together, and sides of a tile that is classified as empty, partial or full.
CHUNK, TILE = 1 << 22, 512

_EMPTY, _PARTIAL, _FULL = 0, 1, 2  # kinds of blocks of a `BlockMask`


@dataclass(frozen=True)
class CompactMask:
    """The keys that each row attends to, and the bias added to the scores.

    Args:
        start: First key of each row's interval; broadcasts to (…, heads, q_len).
        stop: End of each row's interval, exclusive; broadcasts to (…, heads, q_len).
        visible_keys: (…, kv_len), False for keys inside intervals that are masked in every row; None if there are
            none.
        uniform_keys: Integers that broadcast to (…, heads, q_len). A row with n > 0 is fully masked, and gives equal
            weights to its first n keys, or to all if there are fewer.
        dense_mask: A boolean mask, True = attend, of rows that are not intervals.
        bias: What is added to the scores, or another modification of them.
        tiled_mask: A mask of rows that are not intervals, evaluated in tiles; `start` and `stop` contain its keys.
        visible_counts: Number of keys that each row of such a mask attends to; broadcasts to (…, heads, q_len).
    """

    start: IntArray
    stop: IntArray
    visible_keys: BoolArray | None = None
    uniform_keys: IntArray | None = None
    dense_mask: Tensor | None = None
    bias: ScoreMod | None = None
    tiled_mask: Mask | None = None
    visible_counts: IntArray | None = None

    @cached_property
    def _last_stop(self) -> int:
        """End of the last interval, exclusive: no row attends to a key from there on."""
        return int(self.stop.max(initial=0))

    def count_used_keys(self, kv_len: int) -> int:
        """Return the number of keys up to the last one that any row attends to; all keys if none does."""
        return min(self._last_stop or kv_len, kv_len)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of arrays of q_len × kv_len, which intervals could not replace."""
        return sum(int(array.nbytes) for array in self.stored_arrays)

    @property
    def stored_arrays(self) -> list[Tensor]:
        """The arrays of q_len × kv_len: the dense mask and the array of the bias, as far as there are any."""
        arrays = (self.dense_mask, getattr(self.bias, "array", None))
        return [array for array in arrays if array is not None]

    @property
    def stored_visible(self) -> Tensor | None:
        """True where a row attends to a key by the dense mask, or by the array of the bias; None without either."""
        return next(map(_as_boolean, self.stored_arrays), None)

    @property
    def is_intervals(self) -> bool:
        """Whether each row attends to one interval of keys, and the bias is not an array."""
        return not self.stored_arrays and self.tiled_mask is None

    def map_edges(self, function: Callable[[IntArray], IntArray]) -> CompactMask:
        """Apply a function to the arrays that have an entry for each row."""
        uniform_keys = None if self.uniform_keys is None else function(self.uniform_keys)
        return replace(self, start=function(self.start), stop=function(self.stop), uniform_keys=uniform_keys)

    def mask(self, q_len: int, kv_len: int) -> Mask | None:
        """Return the mask by its name, or None if nothing is masked."""
        if self.tiled_mask is not None:
            return self.tiled_mask
        mask = name_mask(self.start, self.stop, q_len, kv_len)
        if self.uniform_keys is not None and mask is not None:
            stop = np.minimum(self.uniform_keys, kv_len)
            mask |= IntervalMask(np.zeros_like(self.uniform_keys), stop, "fully masked rows")
        keys = None if self.visible_keys is None else torch.as_tensor(self.visible_keys)[..., None, :]
        for array in (keys, self.dense_mask):
            if array is not None:
                mask = dense(array) if mask is None else mask & dense(array)
        return mask

    def score_mods(self) -> tuple[ScoreMod, ...]:
        """Return the score modifications: the bias, and zero scores in fully masked rows with equal weights."""
        uniform = None if self.uniform_keys is None else UniformRows(self.uniform_keys > 0)
        return tuple(mod for mod in (self.bias, uniform) if mod is not None)

    @property
    def empty_rows(self) -> BoolArray | None:
        """Rows whose weights are all zero, broadcasting to (…, heads, q_len); None if there are none."""
        if self.dense_mask is not None:
            empty = ~self.dense_mask.any(-1).cpu().numpy()
        else:
            empty = self.start >= self.stop
            if self.uniform_keys is not None:
                empty = empty & (self.uniform_keys == 0)
        return empty if empty.any() else None


def name_mask(start: IntArray, stop: IntArray, q_len: int, kv_len: int) -> Mask | None:
    """Name the mask with these intervals, (…, q_len), by the shortest repr; None if every row attends to every key."""
    if not q_len or not ((start > 0) | (stop < kv_len)).any():
        return None
    shape = np.broadcast_shapes(start.shape, stop.shape)
    start, stop = np.broadcast_to(start, shape), np.broadcast_to(stop, shape)
    masks = []
    if len(shape) < 2 or shape[-2] == 1:  # the heads share the mask
        offsets = dict.fromkeys((kv_len - q_len, 0))
        masks = [
            mask
            for offset in offsets
            if (mask := _name_banded_mask(start, stop, q_len, kv_len, offset)) is not None
        ]
    return min(masks, key=lambda mask: len(repr(mask))) if masks else IntervalMask(start, stop)


def _name_banded_mask(start: IntArray, stop: IntArray, q_len: int, kv_len: int, offset: int) -> Mask | None:
    """Name a band about the diagonal with padding on either side; None if the intervals are something else."""
    position = np.arange(q_len) + offset  # of each query among the keys
    live = start < stop
    first = np.where(live, start, kv_len).min(-1, keepdims=True)
    last = np.where(live, stop, 0).max(-1, keepdims=True)
    first = np.minimum(first, last)
    lefts = np.broadcast_to(position - start, start.shape)[live & (start > first)]
    rights = np.broadcast_to(stop - 1 - position, start.shape)[live & (stop < last)]
    left, right = (int(widths.flat[0]) if widths.size else None for widths in (lefts, rights))
    if min(left or 0, right or 0) < 0:
        return None
    # Try without padding first: the band alone may mask the first and the last keys.
    for pads_left, pads_right in product((False, True), repeat=2):
        low, high = first if pads_left else 0, last if pads_right else kv_len
        low = low if left is None else np.maximum(low, position - left)
        high = high if right is None else np.minimum(high, position + 1 + right)
        if np.where(live, (low == start) & (high == stop), low >= high).all():
            break
    else:
        return None
    align: Align | None = None if q_len == kv_len else "lower_right" if offset else "upper_left"
    parts: list[Mask] = []
    if left is None and right == 0:
        parts.append(causal(align))
    elif right == 0 and left is not None:
        parts.append(sliding_window(left + 1, align=align))
    elif (left, right) != (None, None):
        parts.append(sliding_window(left=left, right=right, align=align))
    batch = start.shape[:-2]
    if pads_right:
        parts.append(padding(_as_lengths(last, batch)))
    if pads_left:
        parts.append(padding(_as_lengths(kv_len - first, batch), side="left"))
    mask = parts[0] if parts else None
    for part in parts[1:]:
        mask = part if mask is None else mask & part
    return mask


def _as_lengths(lengths: IntArray, batch: tuple[int, ...]) -> Any:
    return int(lengths.item()) if lengths.size == 1 else lengths.reshape(batch)


@dataclass(frozen=True, eq=False)
class IntervalMask(Mask):
    """Let each query attend to its own interval of keys, start ≤ kv_idx < stop.

    Args:
        start: First key of each row; broadcasts to (…, heads, q_len).
        stop: End of each row's interval, exclusive; broadcasts to (…, heads, q_len).
        label: What `repr` calls it.

    >>> IntervalMask(np.array([0, 0, 1]), np.array([1, 3, 2])).to_dense(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 1],
           [0, 1, 0]])
    """

    start: IntArray
    stop: IntArray
    label: str = "one interval of keys per row"

    def _intervals(self, frame: Frame, rows: IntArray | slice) -> tuple[IntArray, IntArray]:
        start, stop = (
            frame.take_pairs(edge[..., rows], 1, "interval mask") for edge in (self.start, self.stop)
        )
        return start, stop

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        start, stop = (xp.asarray(edge)[:, :, None] for edge in self._intervals(frame, q_idx))
        keys = xp.asarray(kv_idx)[None, None, :]
        return (keys >= start) & (keys < stop)

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        start, stop = (edge.reshape(-1, 1) for edge in self._intervals(frame, slice(q_lo, q_hi)))
        may = (np.maximum(kv_lo, start) < np.minimum(kv_hi, stop)).any(0)
        return BlockKinds(may, ((kv_lo >= start) & (kv_hi <= stop)).all(0))

    @property
    def varies_by_batch(self) -> bool:
        return bool(self.start.size > self.start.shape[-1])

    def __repr__(self) -> str:
        return f"<{self.label}: {int((self.start < self.stop).sum())}>"


@dataclass(frozen=True, eq=False)
class UniformRows(ScoreMod):
    """Set the scores of some rows to 0, so that their keys get equal weights.

    Models that mask by adding `torch.finfo(dtype).min` do this to a fully masked row: the sum absorbs every score.

    Args:
        rows: Booleans that broadcast to (…, heads, q_len), True for the rows to set to 0.
    """

    rows: Array

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        rows = xp.asarray(frame.take_pairs(self.rows[..., q_idx], 1, "uniform rows"))
        return xp.where(rows[:, :, None], xp.zeros((), dtype=scores.dtype), scores)

    def to_payload(self, frame: Frame, q_idx: IntArray, xp: Namespace, dtype: Any) -> dict[str, Any]:
        return {"kind": "flat", "rows": frame.take_pairs(self.rows[..., q_idx], 1, "uniform rows")}

    def __repr__(self) -> str:
        return f"<{int(self.rows.sum())} fully masked rows with equal weights>"


def recognise_mask(
    mask: Tensor | None,
    *,
    is_causal: bool,
    q_len: int,
    kv_len: int,
    lead: tuple[int, ...] = (),
    biases: Sequence[ScoreMod] = (),
    sinks: bool = False,
) -> CompactMask:
    """Recognise the mask of one call: intervals wherever it consists of them, else the mask or bias itself.

    Args:
        mask: Boolean, True = attend, or added to the scores; broadcasts to (*lead, q_len, kv_len).
        is_causal: The flag of `F.scaled_dot_product_attention`, used if there is no mask.
        q_len: Number of queries.
        kv_len: Number of keys.
        lead: Leading axes of the matrix, (…, heads).
        biases: Position biases of the model, which may explain an additive mask.
        sinks: The layer has a sink, which takes all the weight of a fully masked row.
    """
    if mask is None or not q_len or not kv_len:
        return _recognise_flag(is_causal, q_len, kv_len)
    mask = mask.detach()
    while mask.ndim < 2:
        mask = mask[None]

    def read_tiles(rows: slice) -> Iterator[tuple[int, BoolArray]]:
        # NumPy finds the edges of booleans much faster than torch.
        yield 0, _as_boolean(mask[..., rows, :]).expand(*mask.shape[:-2], -1, kv_len).cpu().numpy()

    found = _find_intervals(read_tiles, mask.shape, _split_rows(mask.shape), q_len, kv_len)
    compact = found if found.visible_counts is None else None
    whole = _recognise_flag(False, q_len, kv_len)
    if mask.dtype == torch.bool:
        return replace(whole, dense_mask=mask) if compact is None else compact
    lowest = torch.finfo(mask.dtype).min
    if compact is not None and not sinks:
        compact = _mark_masked_rows(compact, mask, lowest, q_len, kv_len)
    if compact is not None:
        for known in (None, *biases):
            if _equals_bias(mask, known, lowest, lead, q_len, kv_len):
                return replace(compact, bias=known)
    return replace(whole, bias=bias(mask))


def count_used_keys(mask: Tensor) -> int:
    """Return the number of keys up to the last one that any row attends to."""
    used = _as_boolean(mask).flatten(0, -2).any(0).nonzero()
    return int(used.max()) + 1 if len(used) else 0


@lru_cache(maxsize=8)
def _recognise_flag(is_causal: bool, q_len: int, kv_len: int) -> CompactMask:
    stop = np.minimum(np.arange(1, q_len + 1), kv_len) if is_causal else np.full(q_len, kv_len)
    return CompactMask(np.zeros(q_len, np.int64), stop)


def _mark_masked_rows(
    compact: CompactMask, mask: Tensor, lowest: float, q_len: int, kv_len: int
) -> CompactMask | None:
    """Mark the rows in which every entry is the lowest number; None if intervals cannot express it."""
    empty = compact.empty_rows
    if empty is None:
        return compact
    least, most = (
        torch.broadcast_to(reduce(mask, -1), (*mask.shape[:-2], q_len)) for reduce in (torch.amin, torch.amax)
    )
    uniform = (most == lowest).cpu().numpy() & empty
    if not uniform.any():
        return compact
    mixed = ((least != lowest).cpu().numpy() & uniform).any()
    # The lowest float16 is not low enough to absorb a score that is added to it.
    if mixed or compact.visible_keys is not None or mask.dtype == torch.float16:
        return None
    return replace(compact, uniform_keys=_merge_equal_axes(np.where(uniform, kv_len, 0)))


def _equals_bias(
    mask: Tensor, known: ScoreMod | None, lowest: float, lead: tuple[int, ...], q_len: int, kv_len: int
) -> bool:
    """Return whether a mask equals a bias at every entry that is not masked; None stands for a bias of zero."""
    if known is not None and (mask.ndim < 3 or mask.shape[-3:-1] != (lead[-1], q_len)):
        return False
    expected: Any = 0.0
    for rows in _split_rows(mask.shape):
        entries = mask[..., rows, :]
        if known is not None:
            frame, q_idx = Frame(lead[-1:], q_len, kv_len), np.arange(q_len)[rows]
            expected = known.additive_bias(
                frame, q_idx, np.arange(kv_len), TorchNamespace(mask.device), mask.dtype
            )
        if not bool(((entries == expected) | (entries <= lowest)).all()):
            return False
    return True


def _as_boolean(mask: Tensor) -> Tensor:
    """Return True at the entries that are not masked, of a boolean or additive mask."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _find_intervals(
    read_tiles: Callable[[slice], Iterable[tuple[int, BoolArray]]],
    shape: Sequence[int],
    bands: Iterable[slice],
    q_len: int,
    kv_len: int,
) -> CompactMask:
    """Find each row's interval of keys, from its first to its last.

    If the rows are not intervals, even without the keys that are masked for all, `visible_counts` has the number of
    keys of each row.

    Args:
        read_tiles: Returns the tiles of some rows from left to right, (…, rows or 1, keys), True = attend, each with
            the first of its keys. Those that are left out are masked.
        shape: Shape of the mask, which broadcasts to (…, q_len, kv_len).
        bands: Which rows to read together.
        q_len: Number of queries.
        kv_len: Number of keys.
    """
    if kv_len == 0 or q_len == 0:
        return _recognise_flag(False, q_len, kv_len)
    start, stop, count = (np.zeros(tuple(shape[:-1]), np.int64) for _ in range(3))
    keys = np.zeros((*shape[:-2], kv_len), bool)
    for rows in bands:
        for first, tile in read_tiles(rows):
            width, is_live, is_first = tile.shape[-1], tile.any(-1), stop[..., rows] == 0
            end = first + width - tile[..., ::-1].argmax(-1)
            start[..., rows] = np.where(is_live & is_first, first + tile.argmax(-1), start[..., rows])
            stop[..., rows] = np.where(is_live, end, stop[..., rows])
            count[..., rows] += np.count_nonzero(tile, axis=-1)
            keys[..., first : first + width] |= tile.any(-2)
    compact = CompactMask(_merge_equal_axes(start), _merge_equal_axes(stop))
    compact = compact.map_edges(lambda edge: np.broadcast_to(edge, (*edge.shape[:-1], q_len)))
    if (count == stop - start).all():
        return compact
    before = np.concatenate([np.zeros((*keys.shape[:-1], 1), np.int64), np.cumsum(keys, -1)], -1)
    inside = np.take_along_axis(before, stop, -1) - np.take_along_axis(before, start, -1)
    if (count == inside).all():
        return replace(compact, visible_keys=_merge_equal_axes(keys))
    return replace(compact, visible_counts=_merge_equal_axes(count))


def find_edges(visible: Tensor, axis: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the first True entry along an axis, and the end of the last one; 0 and 0 if there is none."""
    flags, live = visible.to(torch.uint8), visible.any(axis, keepdim=keepdim)
    from_end = flags.flip(axis).argmax(axis, keepdim=keepdim)
    stop = torch.where(live, visible.shape[axis] - from_end, 0)
    return torch.where(live, flags.argmax(axis, keepdim=keepdim), 0), stop


def _split_rows(shape: Sequence[int], largest: int | None = None) -> list[slice]:
    """Split the rows of a mask into slices of about CHUNK entries, and at most `largest` rows."""
    rows = shape[-2]
    step = max(1, min(CHUNK * rows // max(1, math.prod(shape)), largest or rows))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _merge_equal_axes(array: Any) -> Any:
    """Reduce each leading axis along which all entries are equal to length 1."""
    for axis in range(array.ndim - 1):
        if array.shape[axis] > 1 and (array == (first := array.take([0], axis))).all():
            array = first
    return array


def find_mask(weights: Tensor, intervals: Tensor | None = None) -> CompactMask:
    """Find the keys that each row attends to in any head: an interval that contains every weight above 0.

    Masks that add the lowest number give equal weights to all keys of a row that is masked altogether. Such rows are
    marked if the scores tell, or if they attend to later tokens and the other rows do not.

    Args:
        weights: (…, heads, q_len, kv_len).
        intervals: (…, heads, q_len, 2): first key and end of each row that the scores leave unmasked, both 0 if the
            row is masked altogether. They include keys whose weight is too small for a number. NaN if not known.

    Returns:
        The intervals, (…, 1, q_len).
    """
    q_len, kv_len = weights.shape[-2:]
    if 0 in weights.shape:
        return _recognise_flag(False, q_len, kv_len)
    if intervals is not None and not bool(intervals.isnan().any()):
        start, stop = intervals.unbind(-1)
        start = torch.where(start < stop, start, kv_len).amin(-2, keepdim=True)
        stop = stop.amax(-2, keepdim=True)
        largest = weights.amax(-1).amax(-2, keepdim=True)  # NaN where a weight is
        # Rows that are masked altogether have weights in spite of that.
        uniform = (stop == 0) & (largest > 0)
        start = torch.where((stop == 0) | largest.isnan(), 0, start)
        stop = torch.where(largest.isnan(), kv_len, stop)
        start, stop, uniform = (edge.long().cpu().numpy() for edge in (start, stop, uniform))
    else:
        visible = (weights != 0).any(-3, keepdim=True)
        start, stop = (edge.cpu().numpy() for edge in find_edges(visible))
        ahead = stop > np.arange(q_len) + (kv_len - q_len) + 1
        uniform = np.zeros_like(ahead)
        if ahead.any() and kv_len >= q_len:
            is_uniform = (weights.amax(-1) == weights.amin(-1)).all(-2, keepdim=True).cpu().numpy() & ahead
            is_causal = not (ahead & ~is_uniform).any() and not ahead[..., :-1].all()
            uniform = is_uniform if is_causal else uniform
    if not uniform.any():
        return CompactMask(start, stop)
    start, stop = np.where(uniform, 0, start), np.where(uniform, 0, stop)
    return CompactMask(start, stop, uniform_keys=np.where(uniform, kv_len, 0))


def recognise_tiles(mask: BlockMask | Mask, lead: tuple[int, ...], q_len: int, kv_len: int) -> CompactMask:
    """Recognise a mask from its tiles: intervals if the rows consist of them, else the mask itself.

    Args:
        mask: A `BlockMask` of torch, or a mask of regard.
        lead: Leading axes of the matrix, (…, heads); for a `BlockMask`, batch and heads as in `FlexMask`.
        q_len: Number of queries.
        kv_len: Number of keys.
    """
    frame = Frame(lead, q_len, kv_len)
    if isinstance(mask, BlockMask):
        batch, heads = lead
        mask = FlexMask(mask, batch, heads, q_len, kv_len)
    elif lead and q_len and _heads_share(mask, frame):
        frame = frame.select(np.arange(0, math.prod(lead), lead[-1]))
        lead = (*lead[:-1], 1)
    starts = np.arange(0, kv_len, TILE)
    stops = np.minimum(starts + TILE, kv_len)

    def read_tiles(rows: slice) -> Iterator[tuple[int, BoolArray]]:
        q_idx = np.arange(q_len)[rows]
        nonempty, full = mask.classify_blocks(frame, rows.start, rows.stop, starts, stops)
        for i in np.flatnonzero(nonempty):
            columns = np.arange(starts[i], stops[i])
            if full[i]:
                yield starts[i], np.ones((1, len(columns)), bool)
                continue
            visible = mask.allows(frame, q_idx, columns, np)
            visible = visible[0] if len(visible) == 1 else visible.reshape(*lead, *visible.shape[1:])
            yield starts[i], np.broadcast_to(visible, (*visible.shape[:-1], len(columns)))

    shape = (*lead, q_len, kv_len)
    bands = _split_rows((*lead, q_len, min(TILE, kv_len)), TILE)
    compact = _find_intervals(read_tiles, shape, bands, q_len, kv_len)
    return compact if compact.visible_counts is None else replace(compact, tiled_mask=mask)


def _heads_share(mask: Mask, frame: Frame) -> bool:
    """Return whether all heads have the same mask: it fits a matrix of one head, and some rows are equal."""
    *batch, heads = frame.leading_shape
    try:
        mask.check(replace(frame, leading_shape=(*batch, 1)))
    except ArgumentError:  # it holds numbers for each head
        return False
    rows = np.unique(np.linspace(0, frame.q_len - 1, 4).astype(int))
    visible = mask.allows(frame, rows, np.arange(frame.kv_len), np)
    by_head = visible.reshape(-1, heads if len(visible) > 1 else 1, *visible.shape[1:])
    return bool((by_head == by_head[:, :1]).all())


@dataclass(frozen=True, eq=False)
class FlexMask(Mask):
    """A `BlockMask`, evaluated one tile at a time.

    Empty blocks are masked, full ones are not, and in the others its `mask_mod` decides, as in the kernel.

    Args:
        block_mask: The mask of torch.
        batch: Number of batch entries to evaluate it for; 1 if all are equal.
        heads: Number of heads to evaluate it for; 1 if all are equal.
        q_len: Number of queries.
        kv_len: Number of keys.
    """

    block_mask: BlockMask
    batch: int
    heads: int
    q_len: int
    kv_len: int

    @cached_property
    def kinds(self) -> IntArray:
        """Which blocks are empty, partial and full: (batch, heads, rows of blocks, columns of blocks)."""
        mask = self.block_mask
        kinds = _mark_blocks(mask.kv_num_blocks, mask.kv_indices) * _PARTIAL
        if mask.full_kv_num_blocks is not None:
            kinds = np.maximum(kinds, _mark_blocks(mask.full_kv_num_blocks, mask.full_kv_indices) * _FULL)
        return np.broadcast_to(kinds, (self.batch, self.heads, *kinds.shape[2:]))

    def evaluate(self, batch_idx: IntArray, head_idx: IntArray, q_idx: IntArray, kv_idx: IntArray) -> Tensor:
        """Evaluate the mask: (pairs, r, c), for pairs of batch entry and head and for rows and columns."""
        device, (block_rows, block_columns) = self.block_mask.kv_indices.device, self.block_mask.BLOCK_SIZE
        kinds = self.kinds[batch_idx, head_idx][:, q_idx // block_rows][:, :, kv_idx // block_columns]
        visible = torch.from_numpy(kinds == _FULL).to(device)
        columns = (kinds == _PARTIAL).any((0, 1)).nonzero()[0]
        if len(columns):
            partial = torch.from_numpy(kinds[..., columns] == _PARTIAL).to(device)
            indices = (
                torch.as_tensor(index, device=device)
                for index in (batch_idx, head_idx, q_idx, kv_idx[columns])
            )
            with torch.no_grad():
                tile = _map_over_entries(self.block_mask.mask_mod, 0)(*indices)
            visible[..., torch.from_numpy(columns).to(device)] |= partial & tile
        return visible

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        batch_idx, head_idx = _split_pairs(frame)
        if self.batch == self.heads == 1:
            batch_idx = head_idx = np.zeros(1, np.int64)
        visible = self.evaluate(
            batch_idx if self.batch > 1 else np.zeros_like(batch_idx),
            head_idx if self.heads > 1 else np.zeros_like(head_idx),
            np.asarray(q_idx),
            np.asarray(kv_idx),
        )
        return xp.asarray(visible.cpu().numpy())

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        block_rows, block_columns = self.block_mask.BLOCK_SIZE
        kinds = self.kinds[:, :, q_lo // block_rows : -(-q_hi // block_rows)]
        first, end = kv_lo // block_columns, -(-kv_hi // block_columns)
        nonempty, partial = (
            np.concatenate([[0], np.cumsum(flags.any((0, 1, 2)))])
            for flags in (kinds > _EMPTY, kinds < _FULL)
        )
        return BlockKinds(nonempty[end] > nonempty[first], partial[end] == partial[first])

    def check(self, frame: Frame) -> None:
        if (frame.q_len, frame.kv_len) != (self.q_len, self.kv_len):
            raise ArgumentError(
                "flex mask",
                received=f"a matrix of {format_shape(q_len=frame.q_len, kv_len=frame.kv_len)}",
                expected=format_shape(q_len=self.q_len, kv_len=self.kv_len),
                hint="A mask read from a BlockMask fits only the matrix of its own call.",
            )

    @property
    def varies_by_batch(self) -> bool:
        return self.batch > 1

    def __repr__(self) -> str:
        return f"<BlockMask of {_name_function(self.block_mask.mask_mod)}>"


@dataclass(frozen=True, eq=False)
class FlexScoreMod(ScoreMod):
    """A `score_mod` of `flex_attention`, mapped over the entries of each tile."""

    function: Callable[..., Tensor]

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        indices = (
            torch.as_tensor(index, device=scores.device) for index in (*_split_pairs(frame), q_idx, kv_idx)
        )
        return _map_over_entries(self.function, 1)(scores, *indices).to(scores.dtype)

    def __repr__(self) -> str:
        return f"<score_mod {_name_function(self.function)}>"


def _mark_blocks(num_blocks: Tensor, indices: Tensor) -> IntArray:
    """Return 1 for the blocks that are listed, else 0: (batch, heads, rows of blocks, columns of blocks)."""
    count = indices.shape[-1]
    is_listed = torch.arange(count, device=indices.device) < num_blocks[..., None]
    marks = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.uint8, device=indices.device)
    marks.scatter_(-1, torch.where(is_listed, indices, count).long(), 1)
    marked: IntArray = marks[..., :count].cpu().numpy()
    return marked


def _map_over_entries(function: Callable[..., Tensor], num_scores: int) -> Callable[..., Tensor]:
    """Map a function of scores, batch entry, head, q_idx and kv_idx over pairs, rows and columns."""
    scores = (0,) * num_scores
    for axes in ((None, None, None, 0), (None, None, 0, None), (0, 0, None, None)):
        function = torch.vmap(function, in_dims=scores + axes)
    return function


def _split_pairs(frame: Frame) -> tuple[IntArray, IntArray]:
    """Return batch entry and head of each selected pair."""
    heads = frame.leading_shape[-1] if frame.leading_shape else 1
    return frame.selected // heads, frame.selected % heads


def _name_function(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
