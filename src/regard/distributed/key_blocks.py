"""Split the work of a rank with a block of keys into parts that are full, or that the mask cuts through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from regard.distributed.layouts import Layout
from regard.problem import Problem
from regard.types import Array, IntArray


class Part(NamedTuple):
    """Some rows of a rank and some keys of a block, for one product.

    Attributes:
        rows: Rows of the rank.
        keys: Keys within the block.
        first_key: Position of the first of these keys in the sequence.
        is_full: Whether the mask allows all of it and nothing else changes the scores.
    """

    rows: slice
    keys: slice
    first_key: int
    is_full: bool


def find_runs(positions: IntArray) -> list[slice]:
    """Return the runs of rows whose positions are contiguous.

    >>> find_runs(np.array([0, 1, 6, 7, 8]))
    [slice(0, 2, None), slice(2, 5, None)]
    """
    if not len(positions):
        return []
    starts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist()]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True)]


def find_needs(problem: Problem, keys: Layout) -> list[int]:
    """Return the ranks whose keys the rows of a problem may attend to.

    Args:
        problem: The rows of this rank.
        keys: Layout of the keys.
    """
    runs = find_runs(problem.positions)
    return [
        owner
        for owner, chunks in enumerate(keys.chunks)
        if any(kind for chunk in chunks for kind in _classify(problem, runs, chunk))
    ]


def split_parts(problem: Problem, chunks: Sequence[range]) -> list[Part]:
    """Split the rows of a rank and the chunks of a block into parts, without those that the mask leaves empty.

    Parts that are full are joined: a product of many rows and keys is one call of a kernel. Rows are split where a
    diagonal of the mask enters and leaves a chunk, so that the part between is causal from its first corner: kernels
    take it without a mask tile.

    Args:
        problem: The rows of this rank.
        chunks: Chunks of keys of the block.
    """
    offsets = [int(offset) for offset in np.cumsum([0, *map(len, chunks)])]
    runs = find_runs(problem.positions)
    full: dict[tuple[int, int], list[tuple[int, int]]] = {}  # rows, and the chunks that are full for them
    partial: list[Part] = []
    for i, chunk in enumerate(chunks):
        split_runs = _split_at_diagonals(problem, runs, chunk)
        kinds = list(zip(split_runs, _classify(problem, split_runs, chunk), strict=True))
        for rows in _join_adjoining((run.start, run.stop) for run, kind in kinds if kind == "full"):
            full.setdefault(rows, []).append((i, i + 1))
        keys = slice(offsets[i], offsets[i + 1])
        partial += [Part(run, keys, chunk.start, False) for run, kind in kinds if kind == "partial"]
    joined = [
        Part(slice(*rows), slice(offsets[first], offsets[stop]), chunks[first].start, True)
        for rows, which in full.items()
        for first, stop in _join_adjoining(which)
    ]
    return joined + partial


def take_part(problem: Problem, key: Array, part: Part) -> Problem:
    """Return the problem of a part, without the sink, which belongs to no key.

    Args:
        problem: The rows of this rank.
        key: Keys of the block: (own pairs, keys, head_dim).
        part: Rows and keys to take.
    """
    positions, mask = problem.positions[part.rows], problem.mask
    if part.is_full:
        # Nothing depends on positions, so rows of several chunks are one run.
        positions, mask = np.arange(len(positions)), None
    return replace(
        problem, query=problem.query[:, part.rows], positions=positions, mask=mask, key=key[:, part.keys],
        first_key=0 if part.is_full else part.first_key, sink=None,
    )  # fmt: skip


def _classify(problem: Problem, runs: Sequence[slice], chunk: range) -> list[str]:
    """Classify each run of rows with a chunk of keys as "full", "partial" or "", which is empty."""
    full = "partial" if problem.score_mods else "full"
    if problem.mask is None:
        return [full] * len(runs)
    kinds = []
    for run in runs:
        first, last = (int(problem.positions[row]) for row in (run.start, run.stop - 1))
        nonempty, is_full = problem.mask.classify_blocks(
            problem.frame, first, last + 1, np.array([chunk.start]), np.array([chunk.stop])
        )
        kinds.append(full if is_full[0] else "partial" if nonempty[0] else "")
    return kinds


def _split_at_diagonals(problem: Problem, runs: Sequence[slice], chunk: range) -> list[slice]:
    """Split runs of rows where a diagonal of the mask crosses the first and the last column of a chunk."""
    diagonals = set() if problem.mask is None else problem.mask.diagonals(problem.frame)
    crossed = {edge - diagonal for diagonal in diagonals for edge in (chunk.start, chunk.stop)}
    result = []
    for run in runs:
        first = int(problem.positions[run.start]) - run.start
        inner = sorted(row - first for row in crossed if run.start < row - first < run.stop)
        result += [slice(*edges) for edges in pairwise([run.start, *inner, run.stop])]
    return result


def _join_adjoining(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals (start, stop) of which one ends where the next one begins.

    >>> _join_adjoining([(0, 2), (2, 5), (6, 8)])
    [(0, 5), (6, 8)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined
