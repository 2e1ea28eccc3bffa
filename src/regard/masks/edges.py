"""A mask of chosen edges: some queries attend to some keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.frame import Frame
from regard.masks.base import BlockKinds, Mask, SplitPoints
from regard.masks.parameters import sort_splits
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace

Positions = int | slice | Array | None

# With more runs of positions than this, blocks are not split at their edges: each split is a kernel call.
MAX_RUNS = 16


def between(queries: Positions = None, keys: Positions = None) -> Mask:
    """Return a mask that lets some queries attend to some keys, and no other query to any key.

    Its complement `~between(queries, keys)` removes these edges from another mask.

    Args:
        queries: Rows of the matrix: an integer, a slice, or a list of integers. Negative ones count from the end.
            Default: all.
        keys: Columns of the matrix, alike.

    Returns:
        The mask.

    Raises:
        ArgumentTypeError: If positions are not integers.

    >>> from regard import between, causal
    >>> (causal() & ~between(queries=2, keys=[0, 1])).to_dense(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [1, 1, 1, 1]])
    """
    return EdgeMask(PositionSet(queries, "queries"), PositionSet(keys, "keys"))


class PositionSet:
    """Positions along one axis, with equality and hash by content.

    Args:
        positions: An integer, a slice, integers, or None for all.
        parameter: Name of the parameter, for error messages.
    """

    def __init__(self, positions: Positions, parameter: str) -> None:
        self.parameter = parameter
        self.chosen: slice | IntArray = slice(None) if positions is None else _check(positions, parameter)

    @property
    def is_all(self) -> bool:
        """Whether every position is chosen."""
        return isinstance(self.chosen, slice) and self.chosen == slice(None)

    def select(self, length: int) -> Any:
        """Return which positions are chosen, (length,), booleans."""
        flags = np.zeros(length, bool)
        flags[self.chosen] = True
        return flags

    def count_before(self, length: int) -> IntArray:
        """Return how many positions are chosen before each one: (length + 1,)."""
        return np.concatenate([[0], np.cumsum(self.select(length))])

    def find_edges(self, length: int) -> IntArray:
        """Return the positions at which a run of chosen positions begins or ends."""
        return np.flatnonzero(np.diff(self.select(length).astype(np.int8), prepend=0)).astype(np.int64)

    def check(self, length: int) -> None:
        """Raise an `IndexOutOfRangeError` if a position is outside the axis."""
        if isinstance(self.chosen, slice) or not self.chosen.size:
            return
        lowest, highest = int(self.chosen.min()), int(self.chosen.max())
        if lowest < -length or highest >= length:
            raise IndexOutOfRangeError(
                "between",
                received=f"{self.parameter} with position {highest if highest >= length else lowest}",
                expected=f"positions from 0 to {length - 1}, or from −{length} to −1 from the end",
                hint="Queries count the rows of the matrix, keys its columns.",
            )

    def _key(self) -> tuple[Any, ...]:
        if isinstance(self.chosen, slice):
            return self.chosen.start, self.chosen.stop, self.chosen.step
        return (self.chosen.tobytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionSet) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        if isinstance(self.chosen, slice):
            return "all" if self.is_all else repr(self.chosen)
        positions = self.chosen.tolist()
        if len(positions) == 1:
            return repr(positions[0])
        return repr(positions) if len(positions) <= 16 else f"<{len(positions)} positions>"


def _check(positions: Any, parameter: str) -> slice | IntArray:
    if isinstance(positions, slice):
        return positions
    if hasattr(positions, "tolist"):
        positions = positions.tolist()
    entries = np.asarray([] if isinstance(positions, str) else positions)
    is_whole = entries.dtype.kind in "iu" or not entries.size
    if isinstance(positions, str) or not is_whole or entries.ndim > 1:
        raise ArgumentTypeError(
            "between",
            received=f"{parameter} as {describe_argument(positions)}",
            expected="an integer, a slice, or a list of integers",
            hint="For example between(queries=slice(8, None), keys=[0, 1]).",
        )
    return np.unique(entries.astype(np.int64))


@dataclass(frozen=True)
class EdgeMask(Mask):
    """The edges between some queries and some keys."""

    queries: PositionSet
    keys: PositionSet

    def resolve(self, frame: Frame) -> tuple[IntArray, IntArray]:
        """Return how many queries and keys are chosen before each position: (q_len + 1,) and (kv_len + 1,)."""
        return self.queries.count_before(frame.q_len), self.keys.count_before(frame.kv_len)

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        queries, keys = frame.resolve(self)
        rows, columns = queries[q_idx + 1] > queries[q_idx], keys[kv_idx + 1] > keys[kv_idx]
        return xp.asarray(rows)[None, :, None] & xp.asarray(columns)[None, None, :]

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        rows, columns = frame.resolve(self)
        num_rows, num_columns = rows[q_hi] - rows[q_lo], columns[kv_hi] - columns[kv_lo]
        return BlockKinds(
            (num_columns > 0) & (num_rows > 0), (num_columns == kv_hi - kv_lo) & (num_rows == q_hi - q_lo)
        )

    def split_points(self, frame: Frame) -> SplitPoints:
        rows, columns = self.queries.find_edges(frame.q_len), self.keys.find_edges(frame.kv_len)
        if len(rows) > 2 * MAX_RUNS:
            rows = np.arange(0, frame.q_len, tile_sizes().mask_rows)
        if len(columns) > 2 * MAX_RUNS:
            columns = np.zeros(0, np.int64)
        return SplitPoints(sort_splits(rows, frame.q_len), sort_splits(columns, frame.kv_len))

    @property
    def is_key_only(self) -> bool:
        return self.queries.is_all

    def check(self, frame: Frame) -> None:
        self.queries.check(frame.q_len)
        self.keys.check(frame.kv_len)

    def __repr__(self) -> str:
        given = [
            f"{name}={chosen}"
            for name, chosen in (("queries", self.queries), ("keys", self.keys))
            if not chosen.is_all
        ]
        return f"between({', '.join(given)})"
