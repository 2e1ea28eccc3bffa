"""Measure a causal attention matrix of 70,000 tokens on NumPy alone; stored, it would take 19.6 GB.

python examples/long_context.py [tokens]
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np

import regard
from regard import Coarse, Entropy, Received, causal


def peak_memory() -> float:
    """Return the peak memory of this process in MB; `ru_maxrss` would include its parent's."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def current_memory() -> float:
    """Return the current memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(tokens: int = 70_000) -> dict[str, np.ndarray]:
    """Measure one head of random queries and keys, and print results, time and memory growth."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(tokens, 64)).astype(np.float32) for _ in range(2))
    A = regard.attention(query, key, mask=causal())
    print(f"{A}\nstored as a dense matrix: {A.nbytes / 1e9:.1f} GB")
    before, started, clock = current_memory(), time.perf_counter(), time.perf_counter()

    def report(step: str) -> None:
        nonlocal clock
        took, grown = time.perf_counter() - clock, peak_memory() - before
        print(f"{step:<42} {took:6.1f} s   memory +{grown:4.0f} MB", flush=True)
        clock = time.perf_counter()

    results = {"lse": A.lse}
    report(f"lse, mean {results['lse'].mean():.3f}")
    results["entropy"], results["received"], results["coarse"] = A.measure(
        Entropy(), Received(), Coarse(512, "mean")
    )
    report(f"entropy, mean {results['entropy'].mean():.3f} nats; received; coarse")
    sampled = np.sort(rng.choice(tokens, 256, replace=False))
    results["sampled"] = sampled
    results["top"] = A.lazy[sampled].topk(8).indices
    report("top 8 keys of 256 sampled rows")
    results["rows"] = A[sampled[:10]]
    report(f"ten rows, largest weight {results['rows'].max():.4f}")
    grown = peak_memory() - before
    print(f"total {time.perf_counter() - started:.1f} s, memory growth {grown:.0f} MB")
    return {**results, "query": query, "key": key, "grown": np.array(grown)}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
