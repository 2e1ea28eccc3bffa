"""Run the compiled pass over a matrix: split it into jobs, run them in threads, and add up their parts in order.

How a matrix is split depends on its shape only, each job writes rows of its own, and sums over rows are added in the
order of the jobs, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.accumulators import (
    Accumulator,
    CellReduction,
    ColumnSum,
    DiagonalSum,
    DistanceSum,
    RowMaxScore,
    RowMoments,
    RowSum,
    RowTopK,
)
from regard.engines.native.library import (
    BLOCK_KEYS,
    BLOCK_ROWS,
    INSTRUCTION_SETS,
    MAX_KEPT_KEYS,
    Grid,
    Job,
    find_instruction_set,
    load_library,
)
from regard.masks.segments import SegmentRange, iterate_segments
from regard.problem import Problem
from regard.tiling import has_few_rows
from regard.types import Array, IntArray

# Jobs that a matrix is split into at least, if it has that many blocks of rows.
MIN_JOBS = 32
# Rows of a matrix from which the pass, whose vectors are rows, is faster than a fused kernel.
MIN_ROWS = 64
# Multiply-adds that are worth a thread of their own.
MIN_WORK_OF_THREAD = 1 << 22
# Bytes of mask tiles that are built before the jobs that read them run.
MAX_TILE_BYTES = 1 << 23
# Larger than any distance between a query and a key.
FAR = 1 << 40


def describe_pass(problem: Problem) -> str:
    """Return the name of the compiled pass for a matrix of float32 or float64; empty if there is none.

    Args:
        problem: Matrix in canonical form.
    """
    name = find_instruction_set()
    if name is None or problem.score_mods or not problem.is_softmax or has_few_rows(problem.shape):
        return ""
    return f"compiled pass ({name})"


def count_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keeps_exponentials(problem: Problem) -> bool:
    """Return whether the pass computes each score once, so that it needs no lse; it also has enough rows to be fast.

    Args:
        problem: Matrix in canonical form.
    """
    has_rows, is_short = problem.shape[1] >= MIN_ROWS, len(problem.kv_range) <= MAX_KEPT_KEYS
    return has_rows and is_short and bool(describe_pass(problem))


def accumulate(
    problem: Problem,
    query: Array,
    key: Array,
    accumulators: Sequence[Accumulator],
    known_max: Array | None,
    known_sum: Array | None,
    num_threads: int,
) -> tuple[list[Any], Array, Array | None]:
    """Run the compiled pass.

    Args:
        problem: Matrix in canonical form, without score modifications.
        query: Its query as a NumPy array of float32 or float64: (own pairs, rows, head_dim).
        key: Its key, of the same dtype: (own pairs, kv_len or the keys of a block, head_dim).
        accumulators: What to accumulate.
        known_max: Largest score of each row, or the lse if `known_sum` is None: (pairs, rows). None if unknown.
        known_sum: Σ exp(score − max) of each row: (pairs, rows).
        num_threads: Most threads to use.

    Returns:
        As NumPy arrays: the array, or the pair of arrays, of each accumulator; the largest score of each row, or the
        lse that was given; and Σ exp(score − max) of each row, None if an lse was given.
    """
    matrix_pass = _MatrixPass(problem, query, key, accumulators, known_max, known_sum)
    return matrix_pass.run(num_threads), matrix_pass.max, matrix_pass.sum


def multiply(
    problem: Problem,
    query: Array,
    key: Array,
    value: Array,
    value_index: IntArray,
    accumulators: Sequence[Accumulator],
    num_threads: int,
) -> tuple[Array, list[Any], Array, Array] | None:
    """Run the compiled pass, and multiply the weights by a value.

    Args:
        problem: Matrix in canonical form, without score modifications.
        query: Its query as a NumPy array of float32 or float64: (own pairs, rows, head_dim).
        key: Its key, of the same dtype: (own pairs, kv_len, head_dim).
        value: The value, of the same dtype: (own pairs, kv_len, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).
        accumulators: What to accumulate.
        num_threads: Most threads to use.

    Returns:
        The product, (pairs, rows, value_dim), then as `accumulate`. None if NaN or inf take part, which could reach
        rows that must not depend on them.
    """
    if not np.isfinite(np.sum(value)):
        return None
    matrix_pass = _MatrixPass(problem, query, key, accumulators, None, None)
    output = matrix_pass.add_value(value, value_index)
    results = matrix_pass.run(num_threads)
    assert matrix_pass.sum is not None
    if not (np.isfinite(np.sum(output)) and (matrix_pass.max < np.inf).all()):
        return None
    return output, results, matrix_pass.max, matrix_pass.sum


def _split_mask(problem: Problem) -> Iterator[list[SegmentRange]]:
    """Yield the segments of a matrix, as many at a time as a limit of bytes allows: almost always all at once."""
    ranges: list[SegmentRange] = []
    for part in iterate_segments(
        problem.mask, problem.frame, problem.positions, BLOCK_ROWS, BLOCK_KEYS, max_tile_bytes=MAX_TILE_BYTES,
        pack="rows", kv_range=problem.kv_range, xp=problem.engine.xp, to_numpy=problem.engine.to_numpy,
    ):  # fmt: skip
        ranges.append(part)
        if sum(own.segments.tiles.nbytes for own in ranges) > MAX_TILE_BYTES:
            yield ranges
            ranges.clear()  # the caller's list, too: the tiles go before others are built
    if ranges:
        yield ranges


@dataclass
class _PairJob:
    """A job, the arrays of its own, and whatever else its pointers must keep alive."""

    job: Job
    pair: int
    columns: Array | None
    diagonals: Array | None
    cells: list[tuple[int, Array]]  # first row of cells, and the cells, of each grid
    kept: list[Any] = field(default_factory=list)


class _RowOutputs:
    """The addresses of the row sums of all pairs, and what all jobs have in common."""

    def __init__(self, row_sums: dict[Any, Array], pairs: int) -> None:
        distances, shares, bands, offsets, shared_intervals = [], [], [], [], []
        self._kept: list[Array | None] = []  # what the addresses point to
        self.singles: dict[str, list[int]] = {}
        for accumulator, array in row_sums.items():
            addresses = _list_addresses(array, pairs)
            match accumulator:
                case RowSum("distance", offset):
                    offsets.append(offset)
                    distances.append(addresses)
                case RowSum("one", _, intervals) if intervals is not None:
                    shared_intervals.append(intervals)
                    shares.append(addresses)
                case DistanceSum(least, most, query_labels, key_labels):
                    limits = [np.full(pairs, int(max(-FAR, min(FAR, limit)))) for limit in (least, most)]
                    labels = [
                        None if array is None else np.ascontiguousarray(array, np.int32)
                        for array in (query_labels, key_labels)
                    ]
                    self._kept += labels
                    bands.append([*limits, *(_list_addresses(array, pairs) for array in labels), addresses])
                case RowSum(factor):
                    self.singles[factor] = addresses.tolist()
                case _:
                    self.singles["max_score"] = addresses.tolist()
        starts = np.cumsum([0, *map(len, shared_intervals)], dtype=np.int64)
        edges = np.array([edge for intervals in shared_intervals for edge in intervals], np.int64)
        # (pairs, distances), (pairs, shares) and (pairs, bands, fields of `Band`).
        tables = {
            name: np.ascontiguousarray(np.moveaxis(np.array(rows, np.int64), -1, 0))
            for name, rows in (("distances", distances), ("shares", shares), ("bands", bands))
            if rows
        }
        numbers = {
            "distance_offsets": np.array(offsets, np.int64),
            "share_starts": starts,
            "intervals": edges,
        }
        self._kept += [*tables.values(), *numbers.values()]
        self.common = {name: array.ctypes.data for name, array in numbers.items()}
        self.common |= {"num_distances": len(distances), "num_shares": len(shares), "num_bands": len(bands)}
        self.tables = {name: _list_addresses(table, pairs).tolist() for name, table in tables.items()}


def _list_addresses(array: Array | None, pairs: int) -> IntArray:
    """Return the address of each pair's part of an array, which may be the same for all: (pairs,); 0 without one."""
    if array is None:
        return np.zeros(pairs, np.int64)
    stride = array.strides[0] if len(array) > 1 else 0
    addresses: IntArray = array.ctypes.data + np.arange(pairs, dtype=np.int64) * stride
    return addresses


class _MatrixPass:
    """The arrays of one pass over a matrix."""

    def __init__(
        self, problem: Problem, query: Array, key: Array, accumulators: Sequence[Accumulator],
        known_max: Array | None, known_sum: Array | None,
    ) -> None:  # fmt: skip
        pairs, rows, kv_len = self.shape = problem.shape
        self.problem, self.accumulators = problem, accumulators
        self.query, self.key = (_make_rows_contiguous(array) for array in (query, key))
        self.positions = np.ascontiguousarray(problem.positions, np.int64)
        self.is_known, self.is_lse = known_max is not None, known_max is not None and known_sum is None
        self.keeps = not self.is_known and keeps_exponentials(problem)
        if known_max is None:
            self.max: Array = np.full((pairs, rows), -np.inf, query.dtype)
            self.sum: Array | None = np.zeros((pairs, rows))
        else:
            self.max = np.ascontiguousarray(known_max, query.dtype)
            self.sum = None if known_sum is None else np.ascontiguousarray(known_sum, np.float64)
        wanted = set(accumulators)
        self.row_sums = {
            accumulator: np.zeros((pairs, rows))
            for accumulator in dict.fromkeys(accumulators)
            if isinstance(accumulator, RowSum | DistanceSum | RowMaxScore)
        }
        self.row_outputs = _RowOutputs(self.row_sums, pairs)
        self._common: tuple[SegmentRange, Job] | None = None  # what `_describe_segments` returned last
        # Sums over rows: jobs of the same pair add to parts of their own.
        self.columns = np.zeros((pairs, len(problem.kv_range))) if ColumnSum() in wanted else None
        self.diagonals = np.zeros((pairs, rows + kv_len - 1)) if DiagonalSum() in wanted else None
        grids = [item for item in dict.fromkeys(accumulators) if isinstance(item, CellReduction)]
        self.grids = {grid: np.zeros((pairs, *grid.cells)) for grid in grids}
        # The k largest begin with the fewer largest that another accumulator needs.
        self.top_k = max((item.k for item in accumulators if isinstance(item, RowTopK)), default=0)
        self.top = (np.zeros((pairs, rows, self.top_k)), np.zeros((pairs, rows, self.top_k), np.int64))
        has_moments = any(isinstance(item, RowMoments) for item in accumulators)
        self.moments = np.zeros((pairs, rows, 3)) if has_moments else None
        self.output: Array | None = None

    def add_value(self, value: Array, value_index: IntArray) -> Array:
        """Let the pass multiply by a value; return the array of the product."""
        self.value, self.value_index = _make_rows_contiguous(value), value_index
        self.output = np.zeros((*self.shape[:2], value.shape[-1]), value.dtype)
        return self.output

    def run(self, num_threads: int) -> list[Any]:
        """Run all jobs, and return the result of each accumulator."""
        library, name = load_library(), find_instruction_set()
        assert name is not None, "describe_pass says that there is none"
        for ranges in _split_mask(self.problem):
            jobs = self.make_jobs(ranges)
            is_double = self.query.dtype == np.float64
            _run_jobs(library, INSTRUCTION_SETS.index(name), is_double, jobs, num_threads)
            self.add_parts(jobs)
        return [self.read(item) for item in self.accumulators]

    def make_jobs(self, ranges: Sequence[SegmentRange]) -> list[_PairJob]:
        """Split some rows of the matrix into jobs, the last rows first: under a causal mask they take longest."""
        pairs, rows, _ = self.shape
        blocks = -(-rows // BLOCK_ROWS)
        parts = min(blocks, -(-MIN_JOBS // max(pairs, 1)))
        edges = {blocks * i // parts for i in range(parts + 1)} if parts else set()
        split = []
        for own in ranges:
            # Some rows of an irregular mask are few jobs, so each block of them is one.
            is_whole = (own.first_block, own.last_block) == (0, blocks)
            own_edges = sorted(edges) if is_whole else range(own.first_block, own.last_block + 1)
            split += [
                (edge, pair, own) for edge in itertools.pairwise(own_edges) for pair in own.pairs.tolist()
            ]
        split.sort(key=lambda job: (-job[0][0], job[1]))
        return [self._make_job(pair, *block_range, own) for block_range, pair, own in split]

    def _describe_segments(self, own: SegmentRange) -> Job:
        """Return a job with what all jobs of some segments have in common, and the arrays of the first pair."""
        if self._common is not None and self._common[0] is own:
            return self._common[1]
        problem, (_, rows, kv_len), segments = self.problem, self.shape, own.segments
        itemsize, dim = self.query.itemsize, self.query.shape[-1]
        # The library counts blocks from the first row of the matrix.
        offsets = segments.offsets.ctypes.data - own.first_block * segments.offsets.itemsize
        job = Job(
            query=self.query.ctypes.data, key=self.key.ctypes.data,
            query_stride=self.query.strides[-2] // itemsize, key_stride=self.key.strides[-2] // itemsize,
            rows=rows, kv_len=kv_len, dim=dim, scale=problem.scale, positions=self.positions.ctypes.data,
            offsets=offsets, segments=segments.segments.ctypes.data, tiles=segments.tiles.ctypes.data,
            is_known=self.is_known, is_lse=self.is_lse, keeps=self.keeps, max=self.max.ctypes.data,
            sum=None if self.sum is None else self.sum.ctypes.data, has_measures=bool(self.accumulators),
            **self.row_outputs.common,
        )  # fmt: skip
        self._common = own, job
        return job

    def _make_job(self, pair: int, first_block: int, last_block: int, own: SegmentRange) -> _PairJob:
        problem, (_, rows, _) = self.problem, self.shape
        query, key = self.query, self.key
        first_key = problem.first_key
        job = Job.from_buffer_copy(self._describe_segments(own))
        job.first_block, job.last_block = first_block, last_block
        # The library counts keys from the start of the sequence, and reads those of the segments only.
        job.query += int(problem.query_index[pair]) * query.strides[0]
        job.key += int(problem.key_index[pair]) * key.strides[0] - first_key * key.strides[1]
        job.max += pair * self.max.strides[0]
        if self.sum is not None:
            job.sum += pair * self.sum.strides[0]
        if problem.sink is not None:
            sink = problem.engine.to_numpy(problem.frame.per_head(problem.sink, "sink"))
            job.has_sink, job.sink = True, float(sink[pair if len(sink) > 1 else 0])
        whole = first_block == 0 and last_block * BLOCK_ROWS >= rows
        columns, diagonals = (
            None if array is None else array[pair] if whole else np.zeros(array.shape[1])
            for array in (self.columns, self.diagonals)
        )
        job.columns = None if columns is None else columns.ctypes.data - first_key * columns.itemsize
        job.diagonals = None if diagonals is None else diagonals.ctypes.data
        if self.moments is not None:
            job.moments = self.moments[pair].ctypes.data
        made = _PairJob(job, pair, columns, diagonals, [], [query, key])
        if self.output is not None:
            value = self.value[self.value_index[pair]]
            job.value, job.value_stride = (
                value.ctypes.data - first_key * value.strides[0],
                value.strides[0] // value.itemsize,
            )
            job.value_dim, job.output = value.shape[1], self.output[pair].ctypes.data
            job.has_measures = True
            made.kept.append(value)
        self._set_row_outputs(made)
        grids = []
        for grid in self.grids:
            first, last = (
                row * grid.cells[0] // rows
                for row in (first_block * BLOCK_ROWS, min(last_block * BLOCK_ROWS, rows) - 1)
            )
            cells = np.zeros((last + 1 - first, grid.cells[1]))
            made.cells.append((first, cells))
            grids.append(Grid(*grid.cells, first, grid.reduce == "max", cells.ctypes.data))
        job.num_grids, job.grids = len(grids), (Grid * max(len(grids), 1))(*grids)
        if self.top_k:
            job.top_k = self.top_k
            job.top_values, job.top_indices = (array[made.pair].ctypes.data for array in self.top)
        return made

    def _set_row_outputs(self, made: _PairJob) -> None:
        """Point the row sums of a job to the arrays of its pair."""
        for name, addresses in (*self.row_outputs.singles.items(), *self.row_outputs.tables.items()):
            setattr(made.job, name, addresses[made.pair])

    def add_parts(self, jobs: list[_PairJob]) -> None:
        """Add the sums over rows of the jobs to those of their pairs, in the order of the rows."""
        for made in reversed(jobs):
            for array, part in ((self.columns, made.columns), (self.diagonals, made.diagonals)):
                if array is not None and part is not None and part.base is not array:
                    array[made.pair] += part
            for (grid, cells), (first, part) in zip(self.grids.items(), made.cells, strict=True):
                own = cells[made.pair, first : first + len(part)]
                own[...] = np.maximum(own, part) if grid.reduce == "max" else own + part

    def read(self, accumulator: Accumulator) -> Any:
        """Return the result of an accumulator: an array, or a pair of arrays."""
        match accumulator:
            case ColumnSum():
                return self.columns
            case DiagonalSum():
                return self.diagonals
            case CellReduction():
                return self.grids[accumulator]
            case RowTopK(k):
                return tuple(array[..., :k].copy() for array in self.top)
            case RowMoments(offset):
                assert self.moments is not None
                result = self.moments.copy()
                result[..., 1] -= self.positions + offset
                return result
            case RowSum() | DistanceSum() | RowMaxScore():
                return self.row_sums[accumulator]
        raise TypeError(accumulator)


def _make_rows_contiguous(array: Array) -> Array:
    """Return the array, or a copy if the numbers of a row are not adjacent, or not aligned."""
    itemsize = array.itemsize
    is_plain = (array.shape[-1] < 2 or array.strides[-1] == itemsize) and array.flags.aligned
    return array if is_plain and array.strides[-2] % itemsize == 0 else np.ascontiguousarray(array)


def _run_jobs(
    library: Any, instruction_set: int, is_double: bool, jobs: list[_PairJob], num_threads: int
) -> None:
    """Run jobs in this thread and others; the library is called without the interpreter's lock."""
    remaining = iter(jobs)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    made = next(remaining, None)
                if made is None or failures:
                    return
                if library.regard_run(instruction_set, is_double, ctypes.byref(made.job)):
                    raise MemoryError("no memory for a block of rows of the compiled pass")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_count_helpers(jobs, num_threads))]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _count_helpers(jobs: list[_PairJob], num_threads: int) -> int:
    """Return how many threads are worth starting beside this one."""
    if not jobs:
        return 0
    blocks = sum(made.job.last_block - made.job.first_block for made in jobs)
    work = blocks * BLOCK_ROWS * jobs[0].job.kv_len * max(jobs[0].job.dim, 1)
    return max(0, min(num_threads, len(jobs), int(work // MIN_WORK_OF_THREAD)) - 1)
