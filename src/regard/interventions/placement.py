"""Where the rows and keys of a call are in the whole sequence, and masks evaluated by these positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.capture.cache_store import match_cache
from regard.capture.call import Call
from regard.capture.record import Uncaptured
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.frame import Frame
from regard.interventions.edits import list_entries
from regard.lens.find import find_positions
from regard.lens.token_rows import TokenRows
from regard.masks.base import BlockKinds, Mask, SplitPoints, sort_splits
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace

BoolArray = Any


class Placement(NamedTuple):
    """Where a call is in the sequence.

    Args:
        shape: Shape of its matrix, (…, heads, q_len, kv_len).
        query_offset: Position of its first row in the sequence of the queries.
        key_offset: Position of its first key in the sequence of the keys.
        is_cross_attention: Whether queries and keys are two sequences.
    """

    shape: tuple[int, ...]
    query_offset: int = 0
    key_offset: int = 0
    is_cross_attention: bool = False

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.shape[-3] if len(self.shape) > 2 else 1

    @property
    def batch(self) -> int:
        """Number of batch entries."""
        return int(np.prod(self.shape[:-3], dtype=np.int64)) if len(self.shape) > 3 else 1

    @property
    def num_queries(self) -> int:
        """Number of tokens of the queries read so far."""
        return self.query_offset + self.shape[-2]

    @property
    def num_keys(self) -> int:
        """Number of tokens of the keys read so far; a static cache may have room for more."""
        return self.key_offset + self.shape[-1] if self.is_cross_attention else self.num_queries

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix: square, unless it is cross-attention."""
        keys = self.key_offset + self.shape[-1]
        if self.is_cross_attention:
            return self.num_queries, keys
        return max(self.num_queries, keys), max(self.num_queries, keys)

    def view(self, frame: Frame) -> Frame:
        """Return the frame of the whole sequence."""
        return Frame(frame.leading_shape, *self.lengths, frame.selection)

    def select_pairs(self, heads: Any, batch: Any, operation: str) -> BoolArray:
        """Return which (batch, head) pairs are chosen: (pairs,)."""
        flags = np.zeros((self.batch, self.heads), bool)
        entries = (
            select_entries(chosen, length, parameter, operation)
            for chosen, length, parameter in ((batch, self.batch, "batch"), (heads, self.heads, "heads"))
        )
        flags[np.ix_(*entries)] = True
        return flags.ravel()

    def find_rows(self, positions: IntArray) -> IntArray:
        """Return the rows of the call at positions of the sequence, those that it has."""
        rows = positions - self.query_offset
        return rows[(rows >= 0) & (rows < self.shape[-2])]

    def find_columns(self, positions: IntArray) -> IntArray:
        """Return the columns of the call at positions of the sequence, those that it has."""
        columns = positions - self.key_offset
        return columns[(columns >= 0) & (columns < self.shape[-1])]


def select_entries(chosen: Any, length: int, parameter: str, operation: str) -> IntArray:
    """Return the indices of chosen heads or batch entries: an integer, integers, a slice, or None for all."""
    if chosen is None or isinstance(chosen, slice):
        return np.arange(length)[slice(None) if chosen is None else chosen]
    entries = np.array(list_entries(chosen), np.int64)
    if entries.size and (entries.min() < -length or entries.max() >= length):
        raise IndexOutOfRangeError(
            operation,
            received=f"{parameter}={chosen}",
            expected=f"one of {length} {'heads' if parameter == 'heads' else 'batch entries'}, counted from 0",
            hint="Layers may differ in their number of heads; name the layers that have these.",
        )
    return entries % max(length, 1)


def resolve_positions(
    positions: Any, length: int, tokens: Sequence[Any] | None, parameter: str, operation: str
) -> IntArray:
    """Return positions of a sequence as ascending integers; those that it does not have yet are left out."""
    if positions is None or isinstance(positions, slice):
        return np.arange(length)[slice(None) if positions is None else positions]
    found: list[IntArray] = []
    for entry in list_entries(positions):
        if isinstance(entry, str):
            if tokens is None:
                raise ArgumentError(
                    operation,
                    received=f"{parameter}={entry!r} and no tokens",
                    expected="tokens, to look up the text",
                    hint="Pass them to intervene: tokens=tokenizer.convert_ids_to_tokens(input_ids[0]).",
                )
            found.append(find_positions(entry, list(tokens), len(tokens), parameter, operation))
        else:
            found.append(np.array([entry + (length if entry < 0 else 0)], np.int64))
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
    return every[(every >= 0) & (every < length)]


def depends_on_length(positions: Any) -> bool:
    """Return whether positions count from the end, so that they move as a sequence grows."""
    if isinstance(positions, slice):
        return any(bound is not None and bound < 0 for bound in (positions.start, positions.stop))
    return any(not isinstance(entry, str) and entry < 0 for entry in list_entries(positions))


@dataclass(frozen=True, eq=False)
class PlacedMask(Mask):
    """A mask of the whole sequence, evaluated at the rows and keys of a call; it restricts some pairs only.

    Args:
        mask: The mask.
        pairs: Which (batch, head) pairs it restricts: (pairs,). It allows everything to the others.
        placement: Where the call is in the sequence.
    """

    mask: Mask
    pairs: BoolArray
    placement: Placement

    def _is_plain(self, frame: Frame) -> bool:
        """Return whether the mask itself may be asked: it restricts all selected pairs, in the same frame."""
        lengths = (frame.q_len, frame.kv_len)
        return lengths == self.placement.lengths and bool(self.pairs[frame.selected].all())

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        chosen = self.pairs[frame.selected]
        allowed = self.mask.allows(
            self.placement.view(frame),
            q_idx + self.placement.query_offset,
            kv_idx + self.placement.key_offset,
            xp,
        )
        return allowed if chosen.all() else allowed | ~xp.asarray(chosen)[:, None, None]

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        chosen = self.pairs[frame.selected]
        if not chosen.any():
            return BlockKinds(np.ones(len(kv_lo), bool), np.ones(len(kv_lo), bool))
        rows, columns = self.placement.query_offset, self.placement.key_offset
        kinds = self.mask.classify_blocks(
            self.placement.view(frame).select(np.flatnonzero(chosen)), q_lo + rows, q_hi + rows, kv_lo + columns,
            kv_hi + columns,
        )  # fmt: skip
        return kinds if chosen.all() else BlockKinds(np.ones(len(kv_lo), bool), kinds.full)

    def restrict(self, frame: Frame, rows: range, columns: range) -> Mask | bool:
        if self._is_plain(frame):
            return self.mask.restrict(frame, rows, columns)
        return super().restrict(frame, rows, columns)

    def split_points(self, frame: Frame) -> SplitPoints:
        rows, columns = self.mask.split_points(self.placement.view(frame))
        return SplitPoints(
            sort_splits(rows - self.placement.query_offset, frame.q_len),
            sort_splits(columns - self.placement.key_offset, frame.kv_len),
        )

    def diagonal(self, frame: Frame) -> int | None:
        return self.mask.diagonal(frame) if self._is_plain(frame) else None

    def diagonals(self, frame: Frame) -> set[int]:
        return self.mask.diagonals(frame) if self._is_plain(frame) else set()

    @property
    def varies_by_batch(self) -> bool:
        by_batch = self.pairs.reshape(-1, self.placement.heads)
        return self.mask.varies_by_batch or bool((by_batch != by_batch[:1]).any())

    def check(self, frame: Frame) -> None:
        self.mask.check(self.placement.view(frame))

    def __repr__(self) -> str:
        count = np.count_nonzero(self.pairs)
        return f"{self.mask}" if count == len(self.pairs) else f"[{self.mask} for {count} heads]"


@dataclass(frozen=True, eq=False)
class PlacedScoreMod(ScoreMod):
    """A score modification of the whole sequence, evaluated at the rows and keys of a call, for some pairs.

    Args:
        score_mod: The modification.
        pairs: Which (batch, head) pairs it modifies: (pairs,).
        placement: Where the call is in the sequence.
    """

    score_mod: ScoreMod
    pairs: BoolArray
    placement: Placement

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        rows, columns = q_idx + self.placement.query_offset, kv_idx + self.placement.key_offset
        changed = self.score_mod.apply(scores, self.placement.view(frame), rows, columns, xp)
        chosen = self.pairs[frame.selected]
        return changed if chosen.all() else xp.where(xp.asarray(chosen)[:, None, None], changed, scores)

    def check(self, frame: Frame) -> None:
        self.score_mod.check(self.placement.view(frame))

    def __repr__(self) -> str:
        return repr(self.score_mod)


class PlacedBias(PlacedScoreMod):
    """A placed score modification that is an addition, which fused kernels take."""

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array | None:
        rows, columns = q_idx + self.placement.query_offset, kv_idx + self.placement.key_offset
        bias = self.score_mod.additive_bias(self.placement.view(frame), rows, columns, xp, dtype)
        chosen = self.pairs[frame.selected]
        return (
            bias if bias is None or chosen.all() else xp.where(xp.asarray(chosen)[:, None, None], bias, 0.0)
        )


def place_score_mod(score_mod: ScoreMod, pairs: BoolArray, placement: Placement) -> ScoreMod:
    """Place a score modification; an addition stays one."""
    is_additive = type(score_mod).additive_bias is not ScoreMod.additive_bias
    return (PlacedBias if is_additive else PlacedScoreMod)(score_mod, pairs, placement)


Tensor = Any  # the types of torch are not followed

# Caches of one layer that may take turns; only a cache that evicts keys needs to be recognised.
RECENT_CACHES = 16


class SequencePositions:
    """Where the calls of each layer are in the sequence.

    If a call extends the keys of an earlier one, it continues its sequence: at the end of all keys, or of those that a
    rolling cache has not evicted. Otherwise it begins a sequence. The rows of cross-attention are where the decoder's
    self-attention before it was.
    """

    def __init__(self) -> None:
        # By name, after each of the last calls: the keys in use, or values if the layer computes its own softmax,
        # (…, kv_heads, held, dim), and the position of the first one.
        self._caches: dict[str, deque[tuple[Tensor, int]]] = {}
        self._newest_rows: Placement | None = None  # of self-attention
        # Builds the record of the last call, if no edit changes it and cross-attention needs its rows.
        self.preceding: Callable[[], Call | Uncaptured] | None = None

    def locate(self, call: Call) -> Placement:
        """Return where a call is, and remember it."""
        *_, q_len, kv_len = call.shape
        used = call.compact_mask.count_used_keys(kv_len)
        call.query_offset = max(0, used - q_len)
        if TokenRows.from_call(call).query_offset is None:
            return Placement(call.shape, self._count_rows_before(call), 0, True)
        self.preceding = None
        past, key_offset = call.query_offset, 0
        keys = call.key if call.weights is None else call.cached
        if keys is not None:
            key_offset = self._find_key_offset(call.name, keys[..., :used, :].detach(), past)
        placement = Placement(call.shape, key_offset + past, key_offset, False)
        self._newest_rows = placement
        return placement

    def _find_key_offset(self, name: str, keys: Tensor, past: int) -> int:
        """Return the position of the first key of a call, and remember the keys."""
        caches = self._caches.setdefault(name, deque(maxlen=RECENT_CACHES))
        offsets = []
        for i, (held, offset) in reversed(list(enumerate(caches))):
            match = match_cache(held, keys, past)
            if match is None:
                continue
            offsets.append(offset + match.evicted)
            if past + match.evicted == held.shape[-2]:
                offsets = offsets[-1:]
                del caches[i]  # others may continue a cache that was cut back, but not this one
                break
        key_offset = offsets[0] if offsets else 0
        caches.append((keys, key_offset))
        return key_offset

    def _count_rows_before(self, call: Call) -> int:
        """Count the rows before those of cross-attention by the self-attention that ran before it."""
        if self.preceding is not None:
            preceding, self.preceding, self._newest_rows = self.preceding(), None, None
            if isinstance(preceding, Call):
                self.locate(preceding)
        newest = self._newest_rows
        if newest is None or newest.shape[-2] != call.shape[-2] or newest.batch != len(call.query):
            return 0
        return newest.query_offset
