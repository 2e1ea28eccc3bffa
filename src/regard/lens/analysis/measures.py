"""Measures of the kinds of head that have names: the weight at one key of each row, near it, and where tokens match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from regard.core.problem import Problem
from regard.measures import Measure, span
from regard.types import Array, IntArray


@dataclass(frozen=True, eq=False)
class At(Measure):
    """The weight that each row puts on one key of its own: (…, q_len). `keys` (…, q_len) has −1 for none, which is 0.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(At(np.array([-1, 0, 1]))).at.round(4)
    array([0.    , 0.5   , 0.3333])
    """

    keys: IntArray
    ends: tuple[int, int] = (0, 0)  # the lowest key and the highest
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        keys = problem.frame.take_pairs(self.keys, 1, "at")
        live = keys[keys >= 0]
        ends = (int(live.min()), int(live.max())) if live.size else (1, 0)
        return replace(self, keys=keys, ends=ends)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        columns = span(kv_idx)
        if columns.stop <= self.ends[0] or columns.start > self.ends[1]:
            return state
        rows = span(q_idx)
        keys = self.keys[:, rows]
        inside = (keys >= columns.start) & (keys < columns.stop)
        if inside.any():
            local = xp.asarray(np.where(inside, keys - columns.start, 0))
            local = xp.broadcast_to(local, weights.shape[:2])
            found = xp.take_along_axis(weights, local[..., None], axis=-1)[..., 0]
            state[:, rows] += xp.where(xp.asarray(inside), found, 0.0)
        return state


@dataclass(frozen=True)
class Bands(Measure):
    """The mean distance of each row from its own key, and its share in each band: (…, q_len, 1 + bands).

    A band is (least, most), how far after a row's own key a key may be, negative before it. Row 0 stands at key
    `first`.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Bands([(-1, -1), (-1, 1)])).bands.round(4)
    array([[0.    , 0.    , 1.    ],
           [0.5   , 0.5   , 1.    ],
           [1.    , 0.3333, 0.6667]])
    """

    bands: Sequence[tuple[float, float]]
    first: int = 0
    alike: dict[Any, Array] = field(default_factory=dict)  # tiles along a diagonal share their factors
    reads_scores: ClassVar[bool] = False

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 1 + len(self.bands)))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        rows, columns = span(q_idx), span(kv_idx)
        low = columns.start - (self.first + rows.stop - 1)
        high = columns.stop - 1 - (self.first + rows.start)
        whole = [low >= least and high <= most for least, most in self.bands]
        empty = [high < least or low > most for least, most in self.bands]
        if low <= 0 <= high or not all(map(max, whole, empty)):
            return self._cut(state, weights, q_idx, kv_idx, xp, (low, high, rows, columns))
        # From a row to the nearest key of the tile, and on from there to each key: nothing cancels.
        width, before = len(kv_idx), high < 0
        if (width, before) not in self.alike:
            on = xp.flip(xp.arange(width)) if before else xp.arange(width)
            self.alike[width, before] = xp.astype(xp.stack([on, xp.ones_like(on)], axis=-1), weights.dtype)
        product = weights @ self.alike[width, before]
        place = q_idx + self.first
        gap = place - (columns.stop - 1) if before else columns.start - place
        state[:, rows, 0] += product[..., 0] + gap * product[..., 1]
        for band in range(len(whole)):
            if whole[band]:
                state[:, rows, 1 + band] += product[..., 1]
        return state

    def _cut(self, state: Any, weights: Array, q_idx: Array, kv_idx: Array, xp: Any, tile: Any) -> Any:
        """The same for a tile that a band's edge or the diagonal cuts."""
        low, high, rows, _ = tile
        if (low, high, len(q_idx)) not in self.alike:
            after = kv_idx[None, :] - (q_idx + self.first)[:, None]
            parts = [xp.abs(after), *((after >= least) & (after <= most) for least, most in self.bands)]
            found = xp.stack([xp.astype(part, weights.dtype) for part in parts], axis=-1)
            self.alike[low, high, len(q_idx)] = found
        product = xp.permute_dims(weights, (1, 0, 2)) @ self.alike[low, high, len(q_idx)]
        state[:, rows] += xp.permute_dims(product, (1, 0, 2))
        return state


@dataclass(frozen=True, eq=False)
class Copies(Measure):
    """The share of each row on earlier copies of its token, and on what came after them: (…, q_len, 2).

    `of_query` (…, q_len) and `of_key` (…, kv_len) are the tokens as numbers; row 0 stands at key `first`. A copy lies
    before the row, what came after it there or before.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Copies(np.array([7, 8, 7]), np.array([7, 8, 7]))).copies[2].round(4)
    array([0.3333, 0.3333])
    """

    of_query: IntArray
    of_key: IntArray
    first: int = 0
    in_order: IntArray | None = None  # the keys by token, then by position, as one number each
    names: tuple[int, ...] = ()  # of the tokens of each batch entry
    alike: dict[Any, Any] = field(default_factory=dict)  # what a tile has: other heads look there too
    reads_scores: ClassVar[bool] = False
    KEPT: ClassVar[int] = 1 << 20

    def bind(self, problem: Problem) -> Measure:
        ids = [problem.frame.take_pairs(each, 1, "copies") for each in (self.of_query, self.of_key)]
        if all((each == each[:1]).all() for each in ids):
            ids = [each[:1] for each in ids]  # heads of one batch entry have the same tokens
        most = max(map(len, ids))
        of_query, of_key = (np.broadcast_to(each, (most, each.shape[1])) for each in ids)
        length = of_key.shape[1]
        found = np.sort(of_key * length + np.arange(length), -1)
        names = tuple(
            hash((*(each.tobytes() for each in ids), self.first)) for ids in zip(of_query, found, strict=True)
        )
        return replace(self, of_query=of_query * length, of_key=of_key, in_order=found, names=names)

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((*shape[:2], 2))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        rows, columns = span(q_idx), span(kv_idx)
        if columns.start > self.first + rows.stop - 1:
            return state
        for one in range(len(self.of_query)):
            found = self._found(one, rows, columns, xp)
            if found is not None:
                row, column, start, stop = found
                pairs = slice(None) if len(self.of_query) == 1 else slice(one, one + 1)
                sums = xp.astype(weights[pairs][:, row, column], xp.float64)
                sums = xp.cumulative_sum(sums, axis=-1, include_initial=True)
                state[pairs, rows] += sums[:, stop] - sums[:, start]
        return state

    def _found(self, one: int, rows: slice, columns: slice, xp: Any) -> Any:
        """Rows and columns, in a tile, of each row's copies and then of the keys after them; where each row's begin."""
        assert self.in_order is not None
        tile = (self.names[one], rows.start, columns.start)
        if tile in self.alike:
            return self.alike[tile]
        keys, own = self.in_order[one], self.of_query[one, rows]
        place = np.arange(rows.start, rows.stop) + self.first
        ends = [
            (
                np.searchsorted(keys, own + max(columns.start - kind, 0)),
                np.searchsorted(keys, own + np.minimum(columns.stop - kind, place)),
            )
            for kind in (0, 1)
        ]
        low, high = np.moveaxis(np.array(ends), 0, -1)  # (rows, 2) each
        count = np.maximum(high - low, 0)
        total, found = int(count.sum()), None
        if total:
            before = np.cumsum(count).reshape(count.shape) - count
            which = np.repeat(np.arange(count.size), count.ravel())
            copy = keys[low.ravel()[which] + np.arange(total) - before.ravel()[which]] - own[which // 2]
            column = copy + which % 2 - columns.start
            found = tuple(xp.asarray(each) for each in (which // 2, column, before, before + count))
        self._keep(tile, found, total)
        return found

    def _keep(self, tile: Any, found: Any, size: int) -> None:
        size += self.alike.get("size", 0) + 1
        if size <= self.KEPT:
            self.alike[tile], self.alike["size"] = found, size


@dataclass(frozen=True, eq=False)
class Collected(Measure):
    """What each key received from some rows: (…, kv_len). `rows` (…, q_len) is how much each row counts.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((2, 2)))
    >>> A.measure(Collected(np.array([1, 1, 0]))).collected
    array([1., 1.])
    """

    rows: Array
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows = problem.frame.take_pairs(self.rows, 1, "collected")
        return replace(self, rows=problem.engine.xp.asarray(rows, dtype=problem.dtype)[:, None, :])

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], shape[2]))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        state[:, span(kv_idx)] += (self.rows[..., span(q_idx)] @ weights)[:, 0]
        return state
