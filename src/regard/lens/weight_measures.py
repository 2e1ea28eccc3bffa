"""Measures of the lens: weight at one key per row, by distance, on copies of a token, and on groups of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from regard.accumulators import Accumulator, ColumnSum, DistanceSum, RowSum
from regard.measures import Measure
from regard.measures.base import as_slice
from regard.measures.sums import MAX_INTERVALS
from regard.problem import Problem
from regard.types import Array, IntArray

# No row's token.
NO_TOKEN = -3


@dataclass(frozen=True, eq=False)
class WeightAt(Measure):
    """Weight that each row puts on one given key: (…, q_len).

    Args:
        keys: The key of each row, (…, q_len), or of all rows, (…, 1); −1 for none, whose weight is 0.
        bounds: Lowest and highest key; set by `bind`.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(WeightAt(np.array([-1, 0, 1]))).weight_at.round(4)
    array([0.    , 0.5   , 0.3333])
    """

    keys: IntArray
    bounds: tuple[int, int] = (0, 0)
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        keys = problem.frame.take_pairs(self.keys, 1, "weight at")
        keys = np.broadcast_to(keys, (len(keys), problem.shape[1]))
        live = keys[keys >= 0]
        bounds = (int(live.min()), int(live.max())) if live.size else (1, 0)
        return replace(self, keys=keys, bounds=bounds)

    def accumulator(self, problem: Problem) -> Accumulator | None:
        first = int(self.keys.flat[0]) if self.keys.size else -1
        if first < 0 or (self.keys != first).any():
            return None
        return RowSum("one", intervals=((first, first + 1),))

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        columns = as_slice(kv_idx)
        if columns.stop <= self.bounds[0] or columns.start > self.bounds[1]:
            return state
        rows = as_slice(q_idx)
        keys = self.keys[:, rows]
        inside = (keys >= columns.start) & (keys < columns.stop)
        if inside.any():
            column = xp.asarray(np.where(inside, keys - columns.start, 0))
            column = xp.broadcast_to(column, weights.shape[:2])
            found = xp.take_along_axis(weights, column[..., None], axis=-1)[..., 0]
            state[:, rows] += xp.where(xp.asarray(inside), found, 0.0)
        return state


@dataclass(frozen=True)
class DistanceBands(Measure):
    """The sum of weight · distance from the row's own key, and the weight in bands of distances: (…, q_len, 1 + bands).

    Args:
        bands: Pairs (least, most) of signed distances, key minus row's own key; both ends are included.
        query_offset: Position of row 0 among the keys.
        factors: Factors of a tile, shared by the tiles along a diagonal.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(DistanceBands([(-1, -1), (-1, 1)])).distance_bands.round(4)
    array([[0.    , 0.    , 1.    ],
           [0.5   , 0.5   , 1.    ],
           [1.    , 0.3333, 0.6667]])
    """

    bands: Sequence[tuple[float, float]]
    query_offset: int = 0
    factors: dict[Any, Array] = field(default_factory=dict)
    reads_scores: ClassVar[bool] = False

    def accumulator(self, problem: Problem) -> tuple[Accumulator, ...]:
        offset = self.query_offset
        bands = (DistanceSum(least + offset, most + offset) for least, most in self.bands)
        return (RowSum("distance", offset=offset), *bands)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 1 + len(self.bands)))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        low = columns.start - (self.query_offset + rows.stop - 1)
        high = columns.stop - 1 - (self.query_offset + rows.start)
        contains_tile = [low >= least and high <= most for least, most in self.bands]
        misses_tile = [high < least or low > most for least, most in self.bands]
        if low <= 0 <= high or not all(map(max, contains_tile, misses_tile)):
            return self._step_through_edge(state, weights, q_idx, kv_idx, xp, (low, high))
        # The distance is that from the row to the nearest key of the tile, plus that to each key: nothing cancels.
        width, is_before = len(kv_idx), high < 0
        if (width, is_before) not in self.factors:
            steps = xp.flip(xp.arange(width)) if is_before else xp.arange(width)
            columns_of_one = xp.stack([steps, xp.ones_like(steps)], axis=-1)
            self.factors[width, is_before] = xp.astype(columns_of_one, weights.dtype)
        product = weights @ self.factors[width, is_before]
        position = q_idx + self.query_offset
        gap = position - (columns.stop - 1) if is_before else columns.start - position
        state[:, rows, 0] += product[..., 0] + gap * product[..., 1]
        for band, contains in enumerate(contains_tile):
            if contains:
                state[:, rows, 1 + band] += product[..., 1]
        return state

    def _step_through_edge(
        self, state: Any, weights: Array, q_idx: Array, kv_idx: Array, xp: Any, distances: tuple[int, int]
    ) -> Any:
        """Add a tile that the diagonal or the edge of a band crosses."""
        tile = (*distances, len(q_idx))
        if tile not in self.factors:
            distance = kv_idx[None, :] - (q_idx + self.query_offset)[:, None]
            parts = [
                xp.abs(distance),
                *((distance >= least) & (distance <= most) for least, most in self.bands),
            ]
            self.factors[tile] = xp.stack([xp.astype(part, weights.dtype) for part in parts], axis=-1)
        product = xp.permute_dims(weights, (1, 0, 2)) @ self.factors[tile]
        state[:, as_slice(q_idx)] += xp.permute_dims(product, (1, 0, 2))
        return state


@dataclass(frozen=True, eq=False)
class TokenCopies(Measure):
    """Weight of each row on earlier copies of its token, and on the tokens after them: (…, q_len, 2).

    A copy lies before the row; the token after it lies before the row or is the row's own.

    Args:
        query_ids: Tokens of the rows as numbers, (…, q_len).
        key_ids: Tokens of the keys as numbers, (…, kv_len).
        query_offset: Position of row 0 among the keys.
        sorted_keys: The keys sorted by token, then position, one number each; set by `bind`.
        token_hashes: A hash of the tokens of each batch entry; set by `bind`.
        tiles: Copies inside a tile, shared by heads and layers with the same tokens.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(TokenCopies(np.array([7, 8, 7]), np.array([7, 8, 7]))).token_copies[2].round(4)
    array([0.3333, 0.3333])
    """

    query_ids: IntArray
    key_ids: IntArray
    query_offset: int = 0
    sorted_keys: IntArray | None = None
    token_hashes: tuple[int, ...] = ()
    tiles: dict[Any, Any] = field(default_factory=dict)
    reads_scores: ClassVar[bool] = False
    MAX_CACHED: ClassVar[int] = 1 << 20  # entries of `tiles`

    def bind(self, problem: Problem) -> Measure:
        ids = [problem.frame.take_pairs(array, 1, "copies") for array in (self.query_ids, self.key_ids)]
        if all((array == array[:1]).all() for array in ids):
            ids = [array[:1] for array in ids]  # one batch entry: the heads share its tokens
        entries = max(map(len, ids))
        query_ids, key_ids = (np.broadcast_to(array, (entries, array.shape[1])) for array in ids)
        kv_len = key_ids.shape[1]
        sorted_keys = np.sort(key_ids * kv_len + np.arange(kv_len), -1)
        hashes = tuple(
            hash((queries.tobytes(), keys.tobytes(), self.query_offset))
            for queries, keys in zip(query_ids, sorted_keys, strict=True)
        )
        return replace(
            self, query_ids=query_ids * kv_len, key_ids=key_ids, sorted_keys=sorted_keys, token_hashes=hashes
        )

    def accumulator(self, problem: Problem) -> tuple[Accumulator, ...]:
        rows, keys = (problem.frame.take_pairs(ids, 1, "copies") for ids in (self.query_ids, self.key_ids))
        after = np.roll(keys, 1, -1)
        after[:, 0] = NO_TOKEN
        last = self.query_offset - 1
        return DistanceSum(-np.inf, last, rows, keys), DistanceSum(-np.inf, last + 1, rows, after)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 2))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        if columns.start > self.query_offset + rows.stop - 1:
            return state
        for entry in range(len(self.query_ids)):
            copies = self._find_copies(entry, rows, columns, xp)
            if copies is not None:
                row, column, start, stop = copies
                pairs = slice(None) if len(self.query_ids) == 1 else slice(entry, entry + 1)
                found = xp.astype(weights[pairs][:, row, column], xp.float64)
                sums = xp.zeros((found.shape[0], found.shape[1] + 1))
                sums[:, 1:] = xp.cumsum(found, axis=-1)  # NumPy 2.0 has no cumulative_sum
                state[pairs, rows] += sums[:, stop] - sums[:, start]
        return state

    def _find_copies(self, entry: int, rows: slice, columns: slice, xp: Any) -> Any:
        """Find the copies of each row's token inside a tile, and the keys after them.

        Returns:
            Rows and columns of the tile, sorted by row, then kind, and where those of each row and kind start and
            stop, (rows, 2); None if there are none.
        """
        assert self.sorted_keys is not None
        tile = (self.token_hashes[entry], rows.start, columns.start)
        if tile in self.tiles:
            return self.tiles[tile]
        keys, token = self.sorted_keys[entry], self.query_ids[entry, rows]
        position = np.arange(rows.start, rows.stop) + self.query_offset
        ranges = [
            (
                np.searchsorted(keys, token + max(columns.start - shift, 0)),
                np.searchsorted(keys, token + np.minimum(columns.stop - shift, position)),
            )
            for shift in (0, 1)  # copies, and the keys after them
        ]
        low, high = np.moveaxis(np.array(ranges), 0, -1)  # (rows, 2) each
        count = np.maximum(high - low, 0)
        total, copies = int(count.sum()), None
        if total:
            before = np.cumsum(count).reshape(count.shape) - count
            which = np.repeat(np.arange(count.size), count.ravel())
            copy = keys[low.ravel()[which] + np.arange(total) - before.ravel()[which]] - token[which // 2]
            column = copy + which % 2 - columns.start
            copies = tuple(xp.asarray(array) for array in (which // 2, column, before, before + count))
        self._cache(tile, copies, total)
        return copies

    def _cache(self, tile: Any, copies: Any, size: int) -> None:
        size += self.tiles.get("size", 0) + 1
        if size <= self.MAX_CACHED:
            self.tiles[tile], self.tiles["size"] = copies, size


@dataclass(frozen=True, eq=False)
class ReceivedFrom(Measure):
    """Weight that each key receives from some rows: (…, kv_len).

    Args:
        rows: Factor of each row, (…, q_len), such as 1 for tokens and 0 for padding.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((2, 2)))
    >>> A.measure(ReceivedFrom(np.array([1, 1, 0]))).received_from
    array([1., 1.])
    """

    rows: Array
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows = problem.frame.take_pairs(self.rows, 1, "received from")
        return replace(self, rows=problem.engine.xp.asarray(rows, dtype=problem.dtype)[:, None, :])

    def accumulator(self, problem: Problem) -> Accumulator | None:
        return ColumnSum() if (np.asarray(self.rows) == 1).all() else None

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], shape[2]))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        state[:, as_slice(kv_idx)] += (self.rows[..., as_slice(q_idx)] @ weights)[:, 0]
        return state


@dataclass(frozen=True, eq=False)
class GroupMass(Measure):
    """Weight of each row on groups of keys: (…, q_len, groups).

    Args:
        labels: The group of each key, (…, kv_len), counted from 0; other numbers are in no group.
        groups: Number of groups.
        columns: 1 for the keys of each group, (pairs or 1, kv_len, groups); set by `bind`.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> A.measure(GroupMass(np.array([0, 0, -1, 1]), 2)).group_mass
    array([[0.5 , 0.25]])
    """

    labels: IntArray
    groups: int
    columns: Array | None = None
    reads_scores: ClassVar[bool] = False

    def _build_columns(self, problem: Problem) -> Array:
        labels = problem.frame.take_pairs(self.labels, 1, "group mass")
        return problem.engine.xp.asarray(labels[..., None] == np.arange(self.groups), dtype=problem.dtype)

    def bind(self, problem: Problem) -> Measure:
        return replace(self, columns=self._build_columns(problem))

    def value_columns(self, problem: Problem) -> tuple[Array, IntArray]:
        columns = self._build_columns(problem)
        index = np.arange(len(columns)) if len(columns) > 1 else np.zeros(problem.shape[0], np.int64)
        return columns, index

    def finish_columns(self, product: Array, lse: Array, problem: Problem) -> Array:
        return product

    def accumulator(self, problem: Problem) -> tuple[Accumulator, ...] | None:
        labels = self.labels.reshape(-1, self.labels.shape[-1])
        if not labels.size or (labels != labels[:1]).any():
            return None  # the batch entries differ
        edges = [
            np.flatnonzero(np.diff(labels[0] == group, prepend=False, append=False)).reshape(-1, 2).tolist()
            for group in range(self.groups)
        ]
        if any(len(intervals) > MAX_INTERVALS for intervals in edges):
            return None
        return tuple(
            RowSum("one", intervals=tuple((start, stop) for start, stop in intervals)) for intervals in edges
        )

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], self.groups))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        assert self.columns is not None
        state[:, as_slice(q_idx)] += weights @ self.columns[:, as_slice(kv_idx)]
        return state
