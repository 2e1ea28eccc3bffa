"""Measure `A @ value` over several processes: processor time, balance, memory and bytes, beside one process.

python benchmarks/distributed.py [--ranks 2 4] [--tokens 32768] [--heads 2] [--layout zigzag contiguous] [--mask …]

Every rank is a process with one thread. "work" is the processor time of all ranks, all their threads included, divided
by that of one process that computes the whole. As many processes compute the whole at once as there are ranks, up to
the number of processors, and their mean counts: processors that share a core slow each other down. "imbalance" is by
how much the slowest rank exceeds the mean. "memory" is the peak of a rank above what it holds before it makes its
tokens, as a multiple of the whole's tokens and output; "expected" is 1/W of them and two blocks of keys and values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MASKS = ("none", "causal", "window")
DIM, WINDOW = 64, 2048


def read_memory(field: str) -> int:
    """Read a field of the process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(make: Callable[[int], Any], warm: int, length: int) -> dict[str, float]:
    """Measure the call that `make(length)` returns, after a short one."""
    make(warm)()
    before = read_memory("VmRSS")
    reset_peak()
    call = make(length)
    start, begun = time.process_time(), time.perf_counter()
    call()
    return {
        "seconds": time.process_time() - start,
        "elapsed": time.perf_counter() - begun,
        "memory": read_memory("VmHWM") - before,
    }


def make_mask(name: str) -> Any:
    import regard

    return {"none": None, "causal": regard.causal(), "window": regard.sliding_window(WINDOW)}[name]


def compute_whole(options: Any, mask: str, results: Any) -> None:
    import torch

    import regard

    torch.set_num_threads(1)

    def make(length: int) -> Callable[[], Any]:
        query, key, value = (torch.randn(1, options.heads, length, DIM) for _ in range(3))
        return lambda: regard.attention(query, key, mask=make_mask(mask)) @ value

    results.put(measure(make, 512, options.tokens))


def compute_rank(options: Any, mask: str, layout: str, rank: int, size: int, port: int, results: Any) -> None:
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
        sent[0] = 0
        query, key, value = (torch.randn(1, options.heads, length, DIM) for _ in range(3))
        return lambda: regard.distributed.attention(query, key, mask=make_mask(mask), layout=layout) @ value

    found = measure(make, 256, options.tokens // size)
    results.put({**found, "rank": rank, "sent": sent[0]})
    dist.barrier()
    os._exit(0)


def run_processes(target: Any, arguments: list[tuple[Any, ...]]) -> list[dict[str, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "regard.distributed"])
    results = context.Queue()
    processes = [context.Process(target=target, args=(*own, results)) for own in arguments]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def main() -> None:
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=32_768)
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
        copies = min(max(options.ranks), os.cpu_count() or 1)
        whole = run_processes(compute_whole, [(options, mask)] * copies)
        seconds = sum(one["seconds"] for one in whole) / copies
        memory = max(one["memory"] for one in whole)
        print(f"{mask}: one process {seconds:.2f} s, memory {memory / tokens_and_output:.2f}")
        for size in options.ranks:
            for layout in options.layout:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                arguments = [(options, mask, layout, rank, size, store.port) for rank in range(size)]
                report(run_processes(compute_rank, arguments), size, layout, seconds, tokens_and_output)


def report(found: list[dict[str, float]], size: int, layout: str, seconds: float, unit: int) -> None:
    times = [rank["seconds"] for rank in found]
    mean = sum(times) / size
    print(
        f"  {size} ranks, {layout}: work {sum(times) / seconds:.3f}, imbalance {max(times) / mean - 1:.1%}, "
        f"elapsed {max(rank['elapsed'] for rank in found):.2f} s, "
        f"memory {max(rank['memory'] for rank in found) / unit:.2f} (expected {2 / size:.2f}), "
        f"sent {sum(rank['sent'] for rank in found) / 1e6:.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
