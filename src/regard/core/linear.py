"""Linear attention: scores that are logarithms of φ(query) · φ(key), and products that need no score.

A weight is φ(query) · φ(key) divided by the row's sum. A sum over keys that a query sees is φ(query) times the sum of
φ(key) [value, 1], the last column being the divisor; so keys that a whole chunk of queries sees are summed up once, and
only where the mask cuts through a chunk is a tile multiplied out. Everything else is the block loop's, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from regard.core.problem import Problem
from regard.engines import Engine
from regard.frame import Frame, take_block
from regard.score_mods import ScoreMod
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace

# Features of a query are brought near 1 where the largest is farther from it than this, either way.
FAR = 2.0**32


@dataclass(frozen=True, eq=False)
class LogScores(ScoreMod):
    """The logarithm of the products of features; −inf where query and key have none in common.

    `offset`, (…, q_len, 1), is the logarithm of what the features of a query were divided by.
    """

    feature_map: str
    offset: Array | None = None

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        none = scores == 0
        logs = xp.where(none, -xp.inf, xp.log(xp.where(none, 1.0, scores)))  # the gradient at 0 is 0, not NaN
        return logs + self.offsets(frame, q_idx)

    def offsets(self, frame: Frame, q_idx: IntArray) -> Any:
        """The offset of some rows, `(pairs or 1, len(q_idx), 1)`."""
        if self.offset is None:
            return 0.0
        return frame.take_pairs(take_block(self.offset, q_idx, np.zeros(1, np.int64)), 2, "linear_attention")

    def __repr__(self) -> str:
        return "log"


def rescale_features(features: Array, engine: Engine) -> tuple[Array, Array | None]:
    """Features of queries, those of rows far from 1 divided by their largest, and its logarithm; it cancels out.

    Else the products of small features would underflow, and large ones overflow, where their shares do neither.
    """
    if not features.shape[-1] or not features.shape[-2]:
        return features, None
    xp = engine.xp
    with engine.no_grad():
        largest = xp.max(features, axis=-1)[..., None]
        far = ((largest < 1 / FAR) | (largest > FAR)) & (largest > 0) & xp.isfinite(largest)
        if not bool(xp.any(far)):
            return features, None
        by = xp.where(far, largest, 1.0)
    return features / by, xp.log(by)


class ChunkPlan(NamedTuple):
    """A chunk of rows: runs of chunks of keys that all of it sees, and chunks that the mask cuts through."""

    rows: IntArray
    runs: list[tuple[int, int]]
    tested: list[int]


class LinearProblem(Problem):
    """A problem over the features of query and key, whose only score modification is `LogScores`."""

    is_softmax: ClassVar[bool] = False
    product_name: ClassVar[str] = "one linear product"

    @property
    def _log(self) -> LogScores:
        (log,) = self.score_mods
        assert isinstance(log, LogScores)
        return log

    @property
    def title_suffix(self) -> str:
        return f" by the features {self._log.feature_map} of query and key"

    def describe(self) -> list[str]:
        return [f"linear attention ({self._log.feature_map})"]

    @property
    def can_fuse(self) -> bool:
        return 0 not in self.shape

    @property
    def needs_exact_rows(self) -> bool:
        return False  # features are never negative: their products do not cancel, and logarithms are small

    @property
    def kernel(self) -> str:
        if not self.can_fuse:
            return f"{self.engine.name}: streaming tiles (an axis is empty)"
        return self._ran([part.bands() for part in self._groups()])

    def _ran(self, bands: list[list[ChunkPlan]]) -> str:
        tested = sum(len(band.tested) for group in bands for band in group)
        tiles = sum(map(len, bands)) * len(self._chunks())
        return f"{self.engine.name}: linear attention, {tested} of {tiles} tiles multiplied out"

    @property
    def fallback_kernel(self) -> str:
        if not self.can_fuse:
            return self.kernel
        return f"{self.engine.name}: streaming tiles (something is not finite)"

    @property
    def placeholder_value(self) -> tuple[Array, IntArray]:
        empty = self.engine.xp.zeros((1, self.frame.kv_len, 0), dtype=self.dtype)
        return empty, np.zeros(self.shape[0], np.int64)

    def unnormalised_weights(self, rows: IntArray, columns: IntArray, full: bool) -> Array:
        products = replace(self, score_mods=()).scores(rows, columns, full)
        return self.engine.xp.where(products == -self.engine.xp.inf, 0.0, products)

    def product(self, value: Array, value_index: IntArray) -> tuple[Array, Array, str] | None:
        engine, xp = self.engine, self.engine.xp
        dtype = engine.working_dtype(self.query, self.key, value)
        if not self.can_fuse:
            return None
        with engine.suppress_warnings():
            ones = xp.full((*value.shape[:-1], 1), 1.0, dtype=dtype)
            value = xp.concat([engine.cast(value, dtype), ones], axis=-1)
            groups = list(self._groups())
            bands = [part.bands() for part in groups]
            sums = xp.concat(
                [
                    part.sums(value, value_index[part.pair_ids], dtype, seen)
                    for part, seen in zip(groups, bands, strict=True)
                ]
            )
            total = sums[..., -1:]
            output = sums[..., :-1] / xp.where(total == 0, 1.0, total)
            # NaN or inf in what was touched shows here; then the block loop sees to it who may see it.
            if not all(bool(xp.isfinite(xp.sum(each))) for each in (output, total)):
                return None
            with engine.no_grad():
                lse = xp.log(total) + self._log.offsets(self.frame, self.positions)
                lse = engine.cast(lse, self.dtype)[..., 0]
        return output, lse, self._ran(bands)

    def sums(self, value: Array, value_index: IntArray, dtype: Any, bands: list[ChunkPlan]) -> Array:
        """φ(query) · Σ φ(key) value over the keys that each query sees: (pairs, rows, width)."""
        engine, xp = self.engine, self.engine.xp
        chunks, every = self._chunks(), np.arange(self.query.shape[-1])
        # Pairs that share both key and value share their sums.
        own, which = np.unique(np.stack([self.key_index, value_index]), axis=1, return_inverse=True)
        sums_of = RangeSums(
            xp.matrix_transpose(engine.take(self.key, own[0], chunk, dtype))
            @ engine.take(value, own[1], chunk, dtype)
            for chunk in (chunks if any(band.runs for band in bands) else ())
        )
        found, kept = [], {}  # type: list[Array], dict[Any, Array]
        for band in bands:
            query = engine.take(self.query, self.query_index, band.rows, dtype)
            part = xp.zeros((self.shape[0], len(band.rows), value.shape[-1]), dtype=dtype)
            for first, stop in band.runs:
                part = part + query @ engine.take(sums_of(first, stop), which.reshape(-1), every, dtype)
            for i in band.tested:
                key = engine.take(self.key, self.key_index, chunks[i], dtype)
                seen = engine.take(value, value_index, chunks[i], dtype)
                tile = partial(self._multiplied_out, (band.rows, chunks[i], kept))
                part = part + engine.checkpoint(tile, query, key, seen)
            found.append(part)
        return xp.concat(found, axis=1)

    def _multiplied_out(self, tile: tuple[Any, ...], query: Array, key: Array, value: Array) -> Array:
        """The part of the sums that a tile makes, given its rows, its columns, and tests that may serve again."""
        return (query @ self.engine.xp.matrix_transpose(key) * self.mask_tile(*tile)) @ value

    def bands(self) -> list[ChunkPlan]:
        """Chunks of rows, and what of the keys each sees."""
        bands, chunks = [], self._chunks()
        kv_lo, kv_hi = (np.array([chunk[i] for chunk in chunks]) for i in (0, -1))
        for start in range(0, self.shape[1], self._chunk):
            rows = np.arange(start, min(start + self._chunk, self.shape[1]))
            may, must = np.ones(len(chunks), bool), np.ones(len(chunks), bool)
            if self.mask is not None:
                q_idx = self.positions[rows]
                may, must = self.mask.classify_blocks(
                    self.frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi + 1
                )
            edges = np.flatnonzero(np.diff(np.concatenate([[0], may & must, [0]])))
            runs = [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]
            bands.append(ChunkPlan(rows, runs, np.flatnonzero(may & ~must).tolist()))
        return bands

    @property
    def _chunk(self) -> int:
        """As many keys as features at least, so that the sums of chunks take no more memory than the keys."""
        return max(tile_sizes().linear_chunk, int(self.key.shape[-1]))

    def _chunks(self) -> list[IntArray]:
        """The keys of each chunk."""
        return np.split(np.arange(self.frame.kv_len), range(self._chunk, self.frame.kv_len, self._chunk))

    def _groups(self) -> Iterator[LinearProblem]:
        """Pairs whose tiles fit together; of one batch entry only, where batch entries reach differently far."""
        heads = max(self.frame.leading_shape[-1] if self.frame.leading_shape else 1, 1)
        ragged = self.mask is not None and self.mask.varies_by_batch
        entry = self.frame.selected // heads if ragged else np.zeros_like(self.frame.selected)
        size = max(1, tile_sizes().entries // self._chunk**2)
        for pairs in np.split(np.arange(len(entry)), np.flatnonzero(np.diff(entry)) + 1):
            for start in range(0, len(pairs), size):
                part = self.select_pairs(pairs[start : start + size])
                assert isinstance(part, LinearProblem)
                yield part


class RangeSums:
    """Sums over runs of blocks, each of few additions and no subtraction: blocks, sums of two, of four, and so on."""

    def __init__(self, each: Iterable[Array]) -> None:
        blocks = list(each)
        self.levels = [blocks]
        while len(blocks) > 1:
            blocks = [a + b for a, b in zip(blocks[::2], blocks[1::2], strict=False)]
            self.levels.append(blocks)

    def __call__(self, first: int, stop: int) -> Array:
        """The sum of blocks first … stop − 1, one at least."""
        parts = []
        for level in self.levels:
            if first % 2 and first < stop:
                parts.append(level[first])
                first += 1
            if stop % 2 and first < stop:
                stop -= 1
                parts.append(level[stop])
            first, stop = first // 2, stop // 2
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
