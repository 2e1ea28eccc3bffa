"""Measure `A @ value` over several processes: processor time, balance, memory and bytes, beside one process.

python benchmarks/distributed.py [--ranks 2 3 4] [--tokens 32768] [--heads 2] [--layout zigzag contiguous] [--mask …]

Every rank is a process with one thread. In each round one process computes the whole, then the ranks compute it
together, after a first call of each that is not timed. "work" is the processor time of all ranks, all their threads
included, divided by that of one process: the median of the rounds, with the lowest and highest. As many processes
compute the whole at once as there are ranks, up to the number of processors, and their mean counts: processors that
share a core slow each other down. "imbalance" is by how much the largest of the ranks' median times exceeds their mean.
"memory" is the peak of a process in its first call above what it holds before it makes its tokens, as a multiple of the
whole's tokens and output; "expected" is 1/W of them and two blocks of keys and values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

MASKS = ("none", "causal", "window")
DIM, WINDOW = 64, 2048
# Processor time of each process, and the longest elapsed time.
Timed = tuple[list[float], float]


def read_memory(field: str) -> int:
    """Read a field of the process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def serve(pipe: Any, make: Callable[[int], Callable[[], Any]], warm: int, length: int) -> None:
    """Send the memory of the first call that `make(length)` returns, then its times whenever they are asked for."""
    make(warm)()
    before = read_memory("VmRSS")
    reset_peak()
    call = make(length)
    call()
    pipe.send(read_memory("VmHWM") - before)
    while pipe.recv():
        start, begun = time.process_time(), time.perf_counter()
        call()
        pipe.send((time.process_time() - start, time.perf_counter() - begun))


def make_mask(name: str) -> Any:
    import regard

    return {"none": None, "causal": regard.causal(), "window": regard.sliding_window(WINDOW)}[name]


def compute_whole(options: Any, mask: str, pipe: Any) -> None:
    import torch

    import regard

    torch.set_num_threads(1)

    def make(length: int) -> Callable[[], Any]:
        query, key, value = (torch.randn(1, options.heads, length, DIM) for _ in range(3))
        return lambda: regard.attention(query, key, mask=make_mask(mask)) @ value

    serve(pipe, make, 512, options.tokens)
    pipe.send(0)


def compute_rank(options: Any, mask: str, layout: str, rank: int, size: int, port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    import regard
    from regard.distributed.peer_group import PeerGroup

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    sent, start = [0], PeerGroup.start

    def count(self: Any, sends: Any, receives: Any) -> Any:
        sent[0] += sum(tensor.nbytes for tensor, _ in sends)
        return start(self, sends, receives)

    PeerGroup.start = count  # type: ignore[method-assign]

    def make(length: int) -> Callable[[], Any]:
        query, key, value = (torch.randn(1, options.heads, length, DIM) for _ in range(3))
        return lambda: regard.distributed.attention(query, key, mask=make_mask(mask), layout=layout) @ value

    serve(pipe, make, 256, options.tokens // size)
    sent[0] = 0
    make(options.tokens // size)()
    pipe.send(sent[0])
    dist.barrier()
    os._exit(0)


class Processes:
    """Processes that compute the same thing at the same time.

    Args:
        target: What each runs; its last argument is its end of a pipe.
        arguments: The other arguments of each.
    """

    def __init__(self, target: Any, arguments: list[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "regard.distributed"])
        pipes = [context.Pipe() for _ in arguments]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=target, args=(*own, theirs))
            for own, (_, theirs) in zip(arguments, pipes, strict=True)
        ]
        for process in self._processes:
            process.start()
        self.memory = max(self._receive())

    def measure(self) -> Timed:
        """Compute once more, and return the processor time of each process and the longest elapsed time."""
        for pipe in self._pipes:
            pipe.send(True)
        seconds, elapsed = zip(*self._receive(), strict=True)
        return list(seconds), max(elapsed)

    def stop(self) -> int:
        """End the processes, and return the number of bytes that they send to each other in one call."""
        for pipe in self._pipes:
            pipe.send(False)
        sent = sum(self._receive())
        for process in self._processes:
            process.join()
        return sent

    def _receive(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


def main() -> None:
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=["causal"])
    parser.add_argument("--layout", nargs="+", default=["zigzag", "contiguous"])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    tokens_and_output = 4 * options.tokens * options.heads * DIM * 4
    print(
        f"{options.tokens:,} tokens, {options.heads} heads of {DIM}, float32; {tokens_and_output / 1e6:.0f} MB"
    )
    for mask in options.mask:
        copies = min(max(options.ranks), len(os.sched_getaffinity(0)))
        whole = Processes(compute_whole, [(options, mask)] * copies)
        print(f"{mask}: one process, memory {whole.memory / tokens_and_output:.2f}", flush=True)
        for size in options.ranks:
            for layout in options.layout:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                arguments = [(options, mask, layout, rank, size, store.port) for rank in range(size)]
                ranks = Processes(compute_rank, arguments)
                rounds = [(whole.measure(), ranks.measure()) for _ in range(options.rounds)]
                print(f"  {size} ranks, {layout}: {summarise(rounds)}, ", end="")
                print(f"memory {ranks.memory / tokens_and_output:.2f} (expected {2 / size:.2f}), ", end="")
                print(f"sent {ranks.stop() / 1e6:.0f} MB", flush=True)
        whole.stop()


def summarise(rounds: list[tuple[Timed, Timed]]) -> str:
    """Describe the times of all rounds: those of one process, and those of the ranks."""
    whole = [mean(seconds) for (seconds, _), _ in rounds]
    work = [sum(seconds) / one for one, (_, (seconds, _)) in zip(whole, rounds, strict=True)]
    of_ranks = [median(times) for times in zip(*(seconds for _, (seconds, _) in rounds), strict=True)]
    elapsed = [median(side[1] for side in sides) for sides in zip(*rounds, strict=True)]
    return (
        f"work {median(work):.3f} ({min(work):.3f} to {max(work):.3f}) of {median(whole):.2f} s, "
        f"imbalance {max(of_ranks) / mean(of_ranks) - 1:.1%}, elapsed {elapsed[1]:.2f} s for {elapsed[0]:.2f} s"
    )


if __name__ == "__main__":
    main()
