"""70,000 tokens under a causal mask: the whole matrix measured, 19.6 GB if it were stored, on NumPy alone.

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


def peak() -> float:
    """The most memory this process has had so far, in MB; `ru_maxrss` would be at least its parent's."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def now() -> float:
    """The memory this process has at the moment, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(tokens: int = 70_000) -> dict[str, np.ndarray]:
    """Measure one head of random queries and keys; print what came out, how long it took and what it grew by."""
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(tokens, 64)).astype(np.float32) for _ in range(2))
    A = regard.attention(query, key, mask=causal())
    print(f"{A}\nstored whole: {A.nbytes / 1e9:.1f} GB")
    before, started, clock = now(), time.perf_counter(), time.perf_counter()

    def said(what: str) -> None:
        nonlocal clock
        print(
            f"{what:<42} {time.perf_counter() - clock:6.1f} s   memory +{peak() - before:4.0f} MB", flush=True
        )
        clock = time.perf_counter()

    found = {"lse": A.lse}
    said(f"lse, the mean {found['lse'].mean():.3f}")
    found["entropy"], found["received"], found["coarse"] = A.measure(Entropy(), Received(), Coarse(512))
    said(f"entropy, the mean {found['entropy'].mean():.3f} nats; received")
    chosen = np.sort(rng.choice(tokens, 256, replace=False))
    found["chosen"] = chosen
    found["top"] = A.lazy[chosen].topk(8).indices
    said("top 8 keys of 256 chosen rows")
    found["rows"] = A[chosen[:10]]
    said(f"ten exact rows, largest weight {found['rows'].max():.4f}")
    print(f"in all {time.perf_counter() - started:.1f} s, memory grown by {peak() - before:.0f} MB")
    return {**found, "query": query, "key": key, "grown": np.array(peak() - before)}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
