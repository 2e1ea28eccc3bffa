"""The part of a matrix that one rank computes: its rows, and the keys of all ranks as they pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from regard.distributed.key_blocks import find_needs
from regard.distributed.layouts import Layout
from regard.distributed.peer_group import PeerGroup
from regard.distributed.ring import Compute, Merge, RingPass, Template, Travel, add_tensors, plan_travel
from regard.errors import RegardError
from regard.problem import Problem
from regard.types import IntArray

Tensor = Any  # torch's types are not checked


class Operation(NamedTuple):
    """An operation that all ranks have begun.

    Attributes:
        travel: How far the block of each rank travels.
        told: What each rank told the others.
    """

    travel: Travel
    told: list[Any]


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
        return find_needs(self.problem, self.keys)

    @cached_property
    def key_pairs(self) -> IntArray:
        """The own pairs of the key that the pairs of the matrix use."""
        return np.unique(self.problem.key_index)

    @contextmanager
    def operate(
        self, operation: str, same: Mapping[str, Any] | None = None, own: Mapping[str, Any] | None = None, *,
        error: RegardError | None = None,
    ) -> Iterator[Operation]:  # fmt: skip
        """Begin an operation that all ranks take part in.

        Args:
            operation: Name of the operation, as the caller wrote it.
            same: What must be equal on all ranks, by name.
            own: What every rank tells the others.
            error: What is wrong with the arguments of this rank alone.

        Yields:
            The operation.

        Raises:
            RankError: If a rank died, stopped, failed, or called with other arguments.
        """
        same = {"heads": _describe_pairs(self.problem), **(same or {})}
        with self.peers.operate(operation, same, {"needs": self.needs, **(own or {})}, error=error) as told:
            yield Operation(plan_travel([other["needs"] for other in told]), told)

    def run_pass(
        self, travel: Travel, payload: list[Tensor], compute: Compute, returns: Template | None = None,
        merge: Merge = add_tensors,
    ) -> list[Tensor]:  # fmt: skip
        """Compute with the blocks of all ranks.

        Args:
            travel: How far each block travels.
            payload: Tensors of this rank's keys: (pairs, keys, width) each.
            compute: Computes with a block.
            returns: Shapes and dtypes of what is added to each block on its way; None if nothing is.
            merge: Combines what two ranks add to a block.

        Returns:
            What all ranks added to this rank's block.
        """
        own = [tensor.contiguous() for tensor in payload]

        def template(owner: int) -> list[tuple[tuple[int, ...], Any]]:
            return [((len(x), self.keys.lengths[owner], *x.shape[2:]), x.dtype) for x in own]

        ring = RingPass(self.peers, travel, template, compute, returns, merge)
        return ring.run(own, self.problem.query.device)

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
