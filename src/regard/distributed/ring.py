"""Pass blocks of keys around the ranks, and compute with each block while the next one travels.

Rank j's block visits the ranks after it up to the last one that needs it, and from the other side those before it: all
ranks without a mask, the later ones of a causal mask, the neighbours of a window. What the visited ranks add to it (the
gradient of its keys, the weight that they received) travels behind it, and comes home from the last rank of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.distributed.layouts import Layout
from regard.distributed.peer_group import PeerGroup, Transfer
from regard.errors import RegardError
from regard.masks.base import classify_blocks
from regard.problem import Problem
from regard.types import Array, IntArray


class BlockPart(NamedTuple):
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


def split_parts(problem: Problem, chunks: Sequence[range]) -> list[BlockPart]:
    """Split the rows of a rank and the chunks of a block into parts, without those that the mask leaves empty.

    Parts that are full are joined: a product of many rows and keys is one call of a kernel. Rows are split where a
    diagonal of the mask enters and leaves a chunk, so that the part between is causal from its first corner: kernels
    take it without a mask tile.
    """
    offsets = [int(offset) for offset in np.cumsum([0, *map(len, chunks)])]
    runs = find_runs(problem.positions)
    full: dict[tuple[int, int], list[tuple[int, int]]] = {}  # rows, and the chunks that are full for them
    partial: list[BlockPart] = []
    for i, chunk in enumerate(chunks):
        split_runs = _split_at_diagonals(problem, runs, chunk)
        kinds = list(zip(split_runs, _classify(problem, split_runs, chunk), strict=True))
        for rows in _join_adjoining((run.start, run.stop) for run, kind in kinds if kind == "full"):
            full.setdefault(rows, []).append((i, i + 1))
        keys = slice(offsets[i], offsets[i + 1])
        partial += [BlockPart(run, keys, chunk.start, False) for run, kind in kinds if kind == "partial"]
    joined = [
        BlockPart(slice(*rows), slice(offsets[first], offsets[stop]), chunks[first].start, True)
        for rows, which in full.items()
        for first, stop in _join_adjoining(which)
    ]
    return joined + partial


def take_block_part(problem: Problem, key: Array, part: BlockPart) -> Problem:
    """Return the problem of a part of a block of keys, (own pairs, keys, head_dim), without the sink."""
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
    kinds, start, stop = [], np.array([chunk.start]), np.array([chunk.stop])
    for run in runs:
        first, last = (int(problem.positions[row]) for row in (run.start, run.stop - 1))
        nonempty, is_full = classify_blocks(problem.mask, problem.frame, first, last + 1, start, stop)
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


Tensor = Any  # torch's types are not checked


class Travel(NamedTuple):
    """How far the block of each rank travels.

    Attributes:
        forward: Number of ranks after its own that the block of each rank visits.
        backward: Number of ranks before its own that it visits.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def plan_travel(needs: Sequence[Sequence[int]]) -> Travel:
    """Plan the shortest way of each block to the ranks that need it.

    >>> plan_travel([[0], [0, 1], [0, 1, 2]])  # causal
    Travel(forward=(2, 1, 0), backward=(0, 0, 0))
    >>> plan_travel([[0, 1, 3], [0, 1, 2], [1, 2, 3], [2, 3, 0]])  # neighbours on both sides
    Travel(forward=(1, 1, 1, 1), backward=(1, 1, 1, 1))
    """
    size = len(needs)
    forward, backward = [], []
    for owner in range(size):
        distances = [hops for hops in range(1, size) if owner in needs[(owner + hops) % size]]
        stops = [0, *distances, size]
        gaps = [after - before for before, after in pairwise(stops)]
        # The last of equal gaps: a full ring goes forward only.
        widest = max(range(len(gaps)), key=lambda i: (gaps[i], i))
        forward.append(stops[widest])
        backward.append(size - stops[widest + 1])
    return Travel(tuple(forward), tuple(backward))


class KeyBlock(NamedTuple):
    """The tensors of one rank's keys, as they arrive."""

    owner: int
    tensors: list[Tensor]


# Computes with a block, and returns what is added to it on its way; None if nothing ever is.
Compute = Callable[[KeyBlock], list[Tensor] | None]
# The shapes and dtypes of the tensors of an owner's block.
Template = Callable[[int], list[tuple[tuple[int, ...], Any]]]
Merge = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def add_tensors(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """Add the tensors of two lists."""
    return [x + y for x, y in zip(a, b, strict=True)]


class RingPass:
    """One pass of the blocks of all ranks.

    Args:
        ring: The rows of this rank.
        travel: How far each block travels.
        payload: Tensors of this rank's keys: (pairs, keys, width) each.
        compute: Computes with a block.
        returns: Shapes and dtypes of what is added to each owner's block on its way; None if nothing is.
        merge: Combines what two ranks add to a block.
    """

    def __init__(
        self,
        ring: RingProblem,
        travel: Travel,
        payload: Sequence[Tensor],
        compute: Compute,
        returns: Template | None = None,
        merge: Merge = add_tensors,
    ) -> None:
        self._ring, self._peers, self._travel = ring, ring.peers, travel
        self._own = [tensor.contiguous() for tensor in payload]
        self._compute, self._returns, self._merge = compute, returns, merge
        # What is added to blocks, on its way to the next rank and to the owner, which receives it after its loop.
        self._passed_on: list[Transfer] = []
        self._sent_home: list[Transfer] = []

    def _template(self, owner: int) -> list[tuple[tuple[int, ...], Any]]:
        length = self._ring.keys.lengths[owner]
        return [((len(x), length, *x.shape[2:]), x.dtype) for x in self._own]

    def run(self) -> list[Tensor]:
        """Compute with the blocks of all ranks, the own one first; return what all ranks added to the own block."""
        own, rank = self._own, self._peers.rank
        home: list[Tensor] = []
        is_own_computed = False
        for direction, reach in ((1, self._travel.forward), (-1, self._travel.backward)):
            if max(reach) == 0:
                continue
            block, added = KeyBlock(rank, own), None
            for hop in range(1, max(reach) + 1):
                # Both ends of a connection name their messages in the same order.
                incoming = self._start_hop(block, direction, hop, reach)
                if hop > 1:
                    self._visit(block, added, direction, hop - 1, reach)
                elif not is_own_computed:
                    home = self._compute(KeyBlock(rank, own)) or []
                    is_own_computed = True
                block, transfer = incoming
                self._peers.finish(transfer)
                del incoming, transfer  # they hold the block before this one
                added = self._start_added(block, direction, hop, reach)
            self._visit(block, added, direction, max(reach), reach)
            home = self._receive_home(home, direction, reach)
        if not is_own_computed:
            home = self._compute(KeyBlock(rank, own)) or []
        for transfer in (*self._passed_on, *self._sent_home):
            self._peers.finish(transfer)
        return home

    def _start_hop(
        self, block: KeyBlock, direction: int, hop: int, reach: Sequence[int]
    ) -> tuple[KeyBlock, Transfer]:
        """Pass on the block that is here, and receive the next one."""
        rank, size = self._peers.rank, self._peers.size
        sends = []
        if block.tensors and reach[block.owner] >= hop:
            sends = [(tensor, (rank + direction) % size) for tensor in block.tensors]
        owner = (rank - direction * hop) % size
        tensors = self._allocate(self._template(owner)) if reach[owner] >= hop else []
        receives = [(tensor, (rank - direction) % size) for tensor in tensors]
        return KeyBlock(owner, tensors), self._peers.start(sends, receives)

    def _start_added(
        self, block: KeyBlock, direction: int, hop: int, reach: Sequence[int]
    ) -> Transfer | None:
        """Start to receive what the ranks before this one added to a block."""
        if self._returns is None or hop == 1 or reach[block.owner] < hop:
            return None
        tensors = self._allocate(self._returns(block.owner))
        sender = (self._peers.rank - direction) % self._peers.size
        return self._peers.start([], [(tensor, sender) for tensor in tensors])

    def _visit(
        self, block: KeyBlock, before: Transfer | None, direction: int, hop: int, reach: Sequence[int]
    ) -> None:
        """Compute with a block that is `hop` ranks from home, and pass on what is added to it."""
        if reach[block.owner] < hop:
            return  # it did not come this far
        added = self._compute(block)
        if self._returns is None:
            return
        assert added is not None
        if before is not None:
            self._peers.finish(before)
            added = self._merge(before.tensors, added)
        rank, size = self._peers.rank, self._peers.size
        receiver = (rank + direction) % size if reach[block.owner] > hop else block.owner
        sends = [(tensor.contiguous(), receiver) for tensor in added]
        if receiver != block.owner:
            # The next rank receives it in this loop, so that one at a time is kept.
            while self._passed_on:
                self._peers.finish(self._passed_on.pop())
            self._passed_on.append(self._peers.start(sends, []))
        else:
            self._sent_home.append(self._peers.start(sends, []))

    def _receive_home(self, home: list[Tensor], direction: int, reach: Sequence[int]) -> list[Tensor]:
        """Receive what other ranks added to this rank's block from the last rank of its path."""
        rank, size = self._peers.rank, self._peers.size
        if self._returns is None or not reach[rank]:
            return home
        added = self._allocate(self._returns(rank))
        last = (rank + direction * reach[rank]) % size
        self._peers.finish(self._peers.start([], [(tensor, last) for tensor in added]))
        return self._merge(home, added)

    def _allocate(self, shapes: list[tuple[tuple[int, ...], Any]]) -> list[Tensor]:
        device = self._ring.problem.query.device
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]


@dataclass(frozen=True)
class RingProblem:
    """The rows of a rank, and what it needs to compute them together with the other ranks.

    Attributes:
        problem: The rows of this rank in canonical form: `positions` and `frame` are those of the whole sequence, and
            `key` has the keys of this rank alone.
        peers: The ranks.
        queries: Layout of the queries.
        keys: Layout of the keys.
        layout_name: Name of the layout.
    """

    problem: Problem
    peers: PeerGroup
    queries: Layout
    keys: Layout
    layout_name: str

    @cached_property
    def needs(self) -> list[int]:
        """The ranks whose keys the rows of this rank may attend to."""
        runs = find_runs(self.problem.positions)
        return [
            owner
            for owner, chunks in enumerate(self.keys.chunks)
            if any(kind for chunk in chunks for kind in _classify(self.problem, runs, chunk))
        ]

    @cached_property
    def key_pairs(self) -> IntArray:
        """The own pairs of the key that the pairs of the matrix use."""
        return np.unique(self.problem.key_index)

    @contextmanager
    def operate(
        self, operation: str, same: Mapping[str, Any] | None = None, own: Mapping[str, Any] | None = None, *,
        error: RegardError | None = None,
    ) -> Iterator[tuple[Travel, list[Any]]]:  # fmt: skip
        """Begin an operation, as in `PeerGroup.operate`; yield how far blocks travel, and the reply of each rank."""
        same = {"heads": _describe_pairs(self.problem), **(same or {})}
        with self.peers.operate(
            operation, same, {"needs": self.needs, **(own or {})}, error=error
        ) as replies:
            yield plan_travel([reply["needs"] for reply in replies]), replies

    def take_keys(self) -> tuple[Tensor, Problem]:
        """Return the keys that travel, without heads that are not used, and the problem whose index refers to them."""
        problem, used = self.problem, self.key_pairs
        if len(used) == len(problem.key):
            return problem.key, problem
        return problem.key[used], replace(problem, key_index=np.searchsorted(used, problem.key_index))


def _describe_pairs(problem: Problem) -> str:
    """Describe which (batch, head) pairs of the whole matrix a problem has."""
    selected = problem.frame.selected
    names = ", ".join(map(str, selected[:8].tolist())) + (", …" if len(selected) > 8 else "")
    return f"{len(selected)} ({names})" if problem.frame.selection is not None else str(len(selected))
