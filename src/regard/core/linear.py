"""Linear attention: scores are logarithms of φ(query) · φ(key), and products need no scores.

A weight is φ(query) · φ(key) divided by the row's sum. The sum over the keys that a query attends to is φ(query) times
the sum of φ(key) [value, 1]; its last column is the divisor. Keys that a whole chunk of queries attends to are summed
once, and a tile is computed explicitly only where the mask cuts through it. Everything else is the block loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from regard.engines import Engine
from regard.frame import Frame, take_block
from regard.masks.base import classify_blocks
from regard.problem import Problem
from regard.score_mods import ScoreMod
from regard.tiling import tile_sizes
from regard.types import Array, IntArray, Namespace

# The features of a query are rescaled if their largest is above this or below its inverse.
RESCALE_LIMIT = 2.0**32


@dataclass(frozen=True, eq=False)
class LogScores(ScoreMod):
    """The logarithm of the products of features; −inf if query and key have no feature in common.

    Attributes:
        feature_map: Name of the feature map.
        offset: Logarithm of the divisor of each query's features: (…, q_len, 1).
    """

    feature_map: str
    offset: Array | None = None

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        is_zero = scores == 0
        logs = xp.where(is_zero, -xp.inf, xp.log(xp.where(is_zero, 1.0, scores)))  # gradient 0 at 0, not NaN
        return logs + self.offsets(frame, q_idx)

    def offsets(self, frame: Frame, q_idx: IntArray) -> Any:
        """Return the offsets of some rows: (pairs or 1, len(q_idx), 1), or 0 if there are none."""
        if self.offset is None:
            return 0.0
        column = np.zeros(1, np.int64)
        return frame.take_pairs(take_block(self.offset, q_idx, column), 2, "linear_attention")

    def __repr__(self) -> str:
        return "log"


def rescale_features(features: Array, engine: Engine) -> tuple[Array, Array | None]:
    """Divide very large or very small features of a query by the largest of them; the divisor cancels in the weights.

    Otherwise products of features would underflow or overflow although the weights do neither.

    Args:
        features: (…, q_len, features).
        engine: The array library.

    Returns:
        The features, and the logarithm of the divisor of each row, (…, q_len, 1); None if no row needs one.
    """
    if not features.shape[-1] or not features.shape[-2]:
        return features, None
    xp = engine.xp
    with engine.no_grad():
        largest = xp.max(features, axis=-1)[..., None]
        extreme = (largest < 1 / RESCALE_LIMIT) | (largest > RESCALE_LIMIT)
        extreme = extreme & (largest > 0) & xp.isfinite(largest)
        if not bool(xp.any(extreme)):
            return features, None
        divisor = xp.where(extreme, largest, 1.0)
    return features / divisor, xp.log(divisor)


class RowChunk(NamedTuple):
    """A chunk of rows and the chunks of keys it attends to.

    Attributes:
        rows: The rows.
        full_runs: (first, stop) of each run of key chunks that the mask allows as a whole.
        partial_chunks: Key chunks that the mask cuts through.
    """

    rows: IntArray
    full_runs: list[tuple[int, int]]
    partial_chunks: list[int]


class LinearProblem(Problem):
    """A problem over the features of query and key; its only score modification is `LogScores`."""

    is_softmax: ClassVar[bool] = False

    @property
    def _log_scores(self) -> LogScores:
        (log_scores,) = self.score_mods
        assert isinstance(log_scores, LogScores)
        return log_scores

    @property
    def title_suffix(self) -> str:
        return f" by the features {self._log_scores.feature_map} of query and key"

    def describe(self) -> list[str]:
        return [f"linear attention ({self._log_scores.feature_map})"]

    @property
    def can_fuse(self) -> bool:
        return 0 not in self.shape

    @property
    def has_large_scores(self) -> bool:
        return False  # features are never negative: their products do not cancel, and logarithms are small

    @property
    def kernel(self) -> str:
        if not self.can_fuse:
            return f"{self.engine.name}: block loop (an axis is empty)"
        return self._name_kernel([part.row_chunks() for part in self._split_pairs()])

    def _name_kernel(self, groups: list[list[RowChunk]]) -> str:
        computed = sum(len(chunk.partial_chunks) for group in groups for chunk in group)
        tiles = sum(map(len, groups)) * len(self._key_chunks())
        return f"{self.engine.name}: linear attention, {computed} of {tiles} tiles computed explicitly"

    @property
    def fallback_kernel(self) -> str:
        return f"{self.engine.name}: block loop (non-finite values)" if self.can_fuse else self.kernel

    @property
    def placeholder_value(self) -> tuple[Array, IntArray]:
        empty = self.engine.xp.zeros((1, self.frame.kv_len, 0), dtype=self.dtype)
        return empty, np.zeros(self.shape[0], np.int64)

    def compute_unnormalised_weights(self, rows: IntArray, columns: IntArray, full: bool) -> Array:
        products = replace(self, score_mods=()).scores(rows, columns, full)
        return self.engine.xp.where(products == -self.engine.xp.inf, 0.0, products)

    def product(self, value: Array, value_index: IntArray) -> tuple[Array, Array | None, str] | None:
        engine, xp = self.engine, self.engine.xp
        dtype = engine.working_dtype(self.query, self.key, value)
        if not self.can_fuse:
            return None
        with engine.suppress_warnings():
            ones = xp.full((*value.shape[:-1], 1), 1.0, dtype=dtype)
            value = xp.concat([engine.cast(value, dtype), ones], axis=-1)
            parts = list(self._split_pairs())
            groups = [part.row_chunks() for part in parts]
            sums = xp.concat(
                [
                    part.sum_values(value, value_index[part.pair_ids], dtype, row_chunks)
                    for part, row_chunks in zip(parts, groups, strict=True)
                ]
            )
            total = sums[..., -1:]
            output = sums[..., :-1] / xp.where(total == 0, 1.0, total)
            # A NaN or inf in what was read shows here; then the block loop decides which rows it reaches.
            if not all(bool(xp.isfinite(xp.sum(array))) for array in (output, total)):
                return None
            with engine.no_grad():
                lse = xp.log(total) + self._log_scores.offsets(self.frame, self.positions)
                lse = engine.cast(lse, self.dtype)[..., 0]
        return output, lse, self._name_kernel(groups)

    def sum_values(
        self, value: Array, value_index: IntArray, dtype: Any, row_chunks: list[RowChunk]
    ) -> Array:
        """Compute φ(query) · Σ φ(key) value over the keys that each query attends to: (pairs, rows, width)."""
        engine, xp = self.engine, self.engine.xp
        key_chunks, features = self._key_chunks(), np.arange(self.query.shape[-1])
        # Pairs that share both key and value share their sums.
        own, which = np.unique(np.stack([self.key_index, value_index]), axis=1, return_inverse=True)
        range_sums = RangeSums(
            xp.matrix_transpose(engine.take(self.key, own[0], chunk, dtype))
            @ engine.take(value, own[1], chunk, dtype)
            for chunk in (key_chunks if any(chunk.full_runs for chunk in row_chunks) else ())
        )
        # The sum of no entries is 0. It gives the inputs a gradient, zero, also if no row attends to anything.
        zero = sum(xp.sum(array[..., :0]) for array in (self.query, self.key, value))
        parts: list[Array] = []
        mask_cache: dict[Any, Array] = {}
        for row_chunk in row_chunks:
            query = engine.take(self.query, self.query_index, row_chunk.rows, dtype)
            part = xp.zeros((self.shape[0], len(row_chunk.rows), value.shape[-1]), dtype=dtype) + zero
            for first, stop in row_chunk.full_runs:
                part = part + query @ engine.take(range_sums(first, stop), which.reshape(-1), features, dtype)
            for i in row_chunk.partial_chunks:
                key = engine.take(self.key, self.key_index, key_chunks[i], dtype)
                chunk_value = engine.take(value, value_index, key_chunks[i], dtype)
                multiply = partial(self._multiply_tile, (row_chunk.rows, key_chunks[i], mask_cache))
                part = part + engine.checkpoint(multiply, query, key, chunk_value)
            parts.append(part)
        return xp.concat(parts, axis=1)

    def _multiply_tile(self, tile: tuple[Any, ...], query: Array, key: Array, value: Array) -> Array:
        """Compute the part of the sums from one masked tile, given as the arguments of `mask_tile`."""
        return (query @ self.engine.xp.matrix_transpose(key) * self.mask_tile(*tile)) @ value

    def row_chunks(self) -> list[RowChunk]:
        """Split the rows into chunks, each with the keys it attends to."""
        row_chunks, key_chunks = [], self._key_chunks()
        kv_lo, kv_hi = (np.array([chunk[i] for chunk in key_chunks]) for i in (0, -1))
        for start in range(0, self.shape[1], self._chunk_size):
            rows = np.arange(start, min(start + self._chunk_size, self.shape[1]))
            q_idx = self.positions[rows]
            nonempty, full = classify_blocks(
                self.mask, self.frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi + 1
            )
            edges = np.flatnonzero(np.diff(np.concatenate([[0], nonempty & full, [0]])))
            full_runs = [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]
            row_chunks.append(RowChunk(rows, full_runs, np.flatnonzero(nonempty & ~full).tolist()))
        return row_chunks

    @property
    def _chunk_size(self) -> int:
        """Keys of a chunk: at least as many as features, so that the sums of chunks are no larger than the keys."""
        return max(tile_sizes().linear_chunk, int(self.key.shape[-1]))

    def _key_chunks(self) -> list[IntArray]:
        """Split the keys into chunks."""
        size = self._chunk_size
        return np.split(np.arange(self.frame.kv_len), range(size, self.frame.kv_len, size))

    def _split_pairs(self) -> Iterator[LinearProblem]:
        """Split the pairs into groups whose tiles fit; per batch entry if the mask differs between batch entries."""
        varies = self.mask is not None and self.mask.varies_by_batch
        groups = self.frame.split_batch() if varies else [np.arange(len(self.pair_ids))]
        entries = tile_sizes(on_device=self.engine.is_asynchronous).entries
        size = max(1, entries // self._chunk_size**2)
        for pairs in groups:
            for start in range(0, len(pairs), size):
                part = self.select_pairs(pairs[start : start + size])
                assert isinstance(part, LinearProblem)
                yield part


class RangeSums:
    """Sums over ranges of blocks by a binary tree: few additions each, and no subtraction.

    Args:
        blocks: Arrays of one shape.
    """

    def __init__(self, blocks: Iterable[Array]) -> None:
        level = list(blocks)
        self.levels = [level]
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
            self.levels.append(level)

    def __call__(self, first: int, stop: int) -> Array:
        """Sum the blocks first … stop − 1, at least one."""
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
