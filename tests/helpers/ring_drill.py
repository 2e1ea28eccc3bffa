"""Kill or stop one rank in the middle of a ring, and time how long the others take to name it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from regard import causal, distributed
from regard.distributed import ring
from tests.helpers.rank_processes import CONTEXT

# Seconds within which every other rank must name the rank that stopped.
LIMIT = 35.0
MAX_STEP = 30


class Drill(NamedTuple):
    """A drill: the signal, the rank that gets it, the ring step at which it does, and where the store is."""

    signal: signal.Signals
    size: int
    victim: int
    step: int
    store: str = "parent"

    @classmethod
    def draw(cls, seed: int) -> Drill:
        """Draw a drill; even seeds kill, odd ones stop."""
        rng = random.Random(seed)
        size = rng.choice([2, 3, 4])
        kind = signal.SIGSTOP if seed % 2 else signal.SIGKILL
        return cls(kind, size, rng.randrange(size), rng.randrange(1, MAX_STEP))


class Report(NamedTuple):
    """What a rank that was left raised: the ranks it names, the message, and seconds after the signal."""

    rank: int
    ranks: tuple[int, ...]
    message: str
    seconds: float
    exitcode: int | None


def run_drill(drill: Drill) -> list[Report]:
    """Run a drill and return the reports of the other ranks; all processes have ended then."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = None
    if drill.store == "parent":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = server.port
    struck = CONTEXT.Value("d", 0.0)
    pipes, processes = [], []
    for rank in range(drill.size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_work, args=(drill, rank, port, struck, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [
            _collect(rank, pipes[rank], processes[rank], struck)
            for rank in range(drill.size)
            if rank != drill.victim
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(rank: int, pipe: Any, process: multiprocessing.Process, struck: Any) -> Report:
    """Wait for the report of a rank and for the end of its process."""
    if not pipe.poll(LIMIT + 120):
        return Report(rank, (), "no report", float("inf"), None)
    try:
        ranks, message, raised = pipe.recv()
    except EOFError:
        return Report(rank, (), "the process ended without a report", float("inf"), process.exitcode)
    process.join(30)  # it must end by itself
    return Report(rank, ranks, message, raised - struck.value, process.exitcode)


def _work(drill: Drill, rank: int, port: int, struck: Any, pipe: Any) -> None:
    """Compute products and gradients in a loop until a rank stops."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    is_master = drill.store == "rank 0" and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=drill.size)
    if rank == drill.victim:
        _arm(drill, struck)
    generator = torch.Generator().manual_seed(rank)
    query, key, value = torch.randn(3, 1, 2, 64, 16, generator=generator).unbind()
    try:
        for _ in range(2 * MAX_STEP):
            A = distributed.attention(query.requires_grad_(), key, mask=causal(), layout="zigzag")
            (A @ value).sum().backward()
            with torch.no_grad():
                A.entropy()
        pipe.send(((), "no error", time.time()))
    except distributed.RankError as error:
        pipe.send((error.ranks, str(error), time.time()))


def _arm(drill: Drill, struck: Any) -> None:
    """Send this process its signal when it starts the given hop of a ring."""
    count, start_hop = 0, ring.RingPass._start_hop

    def strike(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == drill.step:
            struck.value = time.time()
            os.kill(os.getpid(), drill.signal)
        return start_hop(*args)

    ring.RingPass._start_hop = strike
