"""Processes that are the ranks of a gloo group, started once and used for many calls; the store is in this process."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# One process imports everything, and the ranks are forks of it: an import of torch costs seconds, and so does the
# module that torch imports in the first backward pass.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.fx.experimental.symbolic_shapes",
        "regard.distributed",
        "tests.helpers.ring_cases",
        "tests.helpers.parallel_training",
    ]
)


class Outcome(NamedTuple):
    """What a call did on one rank: its result, or the error and its traceback."""

    result: Any
    error: BaseException | None
    trace: str


class RankProcesses:
    """A group of `size` processes; `run` calls a function on each of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._launch()

    def _launch(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self.processes = [], []
        for rank in range(self.size):
            ours, theirs = CONTEXT.Pipe()
            arguments = (rank, self.size, self._store.port, theirs)
            process = CONTEXT.Process(target=_serve_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any, ranks: range | None = None) -> None:
        """Begin to call function(group, *args) on some ranks, which form a group of their own; all by default."""
        ranks = range(self.size) if ranks is None else ranks
        for rank in ranks:
            self._pipes[rank].send((function, args, list(ranks)))

    def collect(self, ranks: range | None = None, timeout: float = 120.0) -> list[Outcome | None]:
        """Return the outcome on each rank; None for a rank that died or did not answer in time."""
        deadline, outcomes = time.monotonic() + timeout, []
        for rank in range(self.size) if ranks is None else ranks:
            pipe = self._pipes[rank]
            try:
                outcomes.append(pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else None)
            except EOFError:
                outcomes.append(None)
        return outcomes

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: range | None = None, timeout: float = 120.0
    ) -> list[Any]:
        """Call function(group, *args) on some ranks, and return the results; raise the first error."""
        self.start(function, *args, ranks=ranks)
        outcomes = self.collect(ranks, timeout)
        if None in outcomes:  # a late answer would be taken for that of the next call
            self.stop()
            self._launch()
        failures = [
            f"rank {rank}: {'no answer' if outcome is None else outcome.trace}"
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome.error is not None
        ]
        assert not failures, "\n".join(failures)
        return [outcome.result for outcome in outcomes]

    def stop(self) -> None:
        """End all processes, also stopped ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve_rank(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # All ranks make all groups, in the same order.
    groups = {tuple(range(count)): dist.new_group(list(range(count))) for count in range(1, size)}
    groups[tuple(range(size))] = dist.group.WORLD
    while True:
        try:
            function, args, ranks = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            outcome = Outcome(function(groups[tuple(ranks)], *args), None, "")
        except BaseException as error:
            outcome = Outcome(None, error, traceback.format_exc())
        pipe.send(outcome)
