"""Split the work of a rank with a block of keys into parts that are full, or that the mask cuts through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from regard.core.problem import Problem
from regard.distributed.layouts import Layout
from regard.frame import is_contiguous
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
        if any(kind for kinds in _classify(problem, runs, chunks) for kind in kinds)
    ]


def split_parts(problem: Problem, chunks: Sequence[range]) -> list[Part]:
    """Split the rows of a rank and the chunks of a block into parts, without those that the mask leaves empty.

    Parts that are full are joined: a product of many rows and keys is one call of a kernel.

    Args:
        problem: The rows of this rank.
        chunks: Chunks of keys of the block.
    """
    runs = find_runs(problem.positions)
    kinds = _classify(problem, runs, chunks)
    offsets = np.cumsum([0, *map(len, chunks)])
    columns = [slice(int(offsets[i]), int(offsets[i + 1])) for i in range(len(chunks))]
    everywhere = [runs != [] and all(row[i] == "full" for row in kinds) for i in range(len(chunks))]
    all_rows = slice(0, len(problem.positions))
    parts = list(_join_full(all_rows, columns, chunks, everywhere))
    for run, row in zip(runs, kinds, strict=True):
        full = [kind == "full" and not shared for kind, shared in zip(row, everywhere, strict=True)]
        parts += _join_full(run, columns, chunks, full)
        parts += [
            Part(run, columns[i], chunks[i].start, False) for i, kind in enumerate(row) if kind == "partial"
        ]
    return parts


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


def _classify(problem: Problem, runs: Sequence[slice], chunks: Sequence[range]) -> list[list[str]]:
    """Classify each run of rows and chunk of keys as "full", "partial" or "", which is empty."""
    full = "partial" if problem.score_mods else "full"
    if problem.mask is None:
        return [[full] * len(chunks) for _ in runs]
    result = []
    for run in runs:
        q_idx = problem.positions[run]
        row = []
        for chunk in chunks:
            nonempty, is_full = problem.mask.classify_blocks(
                problem.frame,
                int(q_idx[0]),
                int(q_idx[-1]) + 1,
                np.array([chunk.start]),
                np.array([chunk.stop]),
            )
            row.append(full if is_full[0] else "partial" if nonempty[0] else "")
        result.append(row)
    return result


def _join_full(
    rows: slice, columns: Sequence[slice], chunks: Sequence[range], full: Sequence[bool]
) -> Iterator[Part]:
    """Yield the parts of some rows with adjoining full chunks as one."""
    which = np.flatnonzero(full)
    while len(which):
        stop = 1
        while stop < len(which) and is_contiguous(which[: stop + 1]):
            stop += 1
        first, last = which[0], which[stop - 1]
        yield Part(rows, slice(columns[first].start, columns[last].stop), chunks[first].start, True)
        which = which[stop:]
