"""Pass blocks of keys around the ranks, and compute with each block while the next one travels.

Rank j's block visits the ranks after it up to the last one that needs it, and from the other side those before it: all
ranks without a mask, the later ones of a causal mask, the neighbours of a window. What the visited ranks add to it (the
gradient of its keys, the weight that they received) travels behind it, and comes home from the last rank of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from regard.distributed.peer_group import PeerGroup, Transfer

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

    Args:
        needs: For each rank, the ranks whose blocks it needs.

    Returns:
        How far each block travels in both directions; the longest run of ranks that do not need it is left out.

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
        peers: The ranks.
        travel: How far each block travels.
        template: Shapes and dtypes of the tensors of each owner's block.
        compute: Computes with a block.
        returns: Shapes and dtypes of what is added to each owner's block on its way; None if nothing is.
        merge: Combines what two ranks add to a block.
    """

    def __init__(
        self, peers: PeerGroup, travel: Travel, template: Template, compute: Compute, returns: Template | None = None,
        merge: Merge = add_tensors,
    ) -> None:  # fmt: skip
        self._peers, self._travel, self._template, self._compute = peers, travel, template, compute
        self._returns, self._merge = returns, merge
        # What is added to blocks, on its way to the next rank and to the owner, which receives it after its loop.
        self._passed_on: list[Transfer] = []
        self._sent_home: list[Transfer] = []

    def run(self, own: list[Tensor], device: Any) -> list[Tensor]:
        """Compute with the blocks of all ranks, the own one first.

        Args:
            own: Tensors of this rank's block, contiguous.
            device: Device of the tensors that are received.

        Returns:
            What all ranks added to this rank's block; empty if nothing is added.
        """
        rank = self._peers.rank
        self._device = device
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
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
