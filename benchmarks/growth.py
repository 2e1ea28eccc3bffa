"""Measure how time and memory grow with the length: one head, causal, from 2,048 tokens to 131,072.

python benchmarks/growth.py [--to 131072]

Three sides, each run in its own process: the bare kernel; regard with output, lse, entropy, received attention and a
coarse picture; and these results from stored weights, up to the length that 8 GB can hold. Writes docs/growth.json and
the log-log plot docs/growth.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIDES = ("bare kernel", "regard", "stored weights")
LIMIT = 8 << 30


def peak_memory() -> float:
    """Return the peak memory of this process in MB; unlike `getrusage`, without that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(side: str, tokens: int) -> dict[str, float]:
    """Return the seconds of one side, and the MB that the process grew by."""
    import torch
    import torch.nn.functional as F

    from regard import Coarse, Entropy, Received, attention, causal

    torch.set_num_threads(2)
    q, k, v = torch.randn(3, 1, 1, tokens, 64).unbind()
    cells = min(512, tokens)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        if side == "bare kernel":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if side == "regard":
            A = attention(q, k, mask=causal())
            return A @ v, A.lse, A.measure(Entropy(), Received(), Coarse(cells, "mean"))
        scores = (q @ k.mT / 8).masked_fill_(
            torch.ones(tokens, tokens, dtype=torch.bool).triu_(1), -torch.inf
        )
        weights = scores.softmax(-1)
        coarse = weights.unflatten(-1, (cells, -1)).mean(-1).unflatten(-2, (cells, -1)).mean(-2)
        return weights @ v, scores.logsumexp(-1), torch.special.entr(weights).sum(-1), weights.sum(-2), coarse

    if side != "stored weights":
        run(q[:, :, :600], k[:, :, :600], v[:, :, :600])  # first-call imports and caches
    before = peak_memory()
    if side == "stored weights":
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    times = []
    for _ in range(5 if tokens <= 16384 else 1):
        start = time.perf_counter()
        run(q, k, v)
        times.append(time.perf_counter() - start)
    return {"tokens": tokens, "seconds": statistics.median(times), "grown_mb": peak_memory() - before}


def growth_exponent(rows: list[dict[str, float]], field: str) -> float:
    """Return the log-log slope between the two longest lengths."""
    (a, b) = rows[-2:]
    return math.log(b[field] / a[field]) / math.log(b["tokens"] / a["tokens"])


def draw(results: dict[str, list[dict[str, float]]]) -> None:
    """Draw time and memory over the length."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    labels = (("seconds", "seconds"), ("grown_mb", "memory grown by, MB"))
    for axis, (field, label) in zip(axes, labels, strict=True):
        for side, rows in results.items():
            points = [(row["tokens"], row[field]) for row in rows if row[field] > 0]
            axis.loglog(*zip(*points, strict=True), marker="o", label=side)
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(DOCS / "growth.svg")


def main() -> None:
    """Measure every side at every length; print, store and draw the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, default=131_072)
    parser.add_argument(
        "--one", nargs=2, metavar=("SIDE", "TOKENS"), help="make one measurement in this process"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    stopped: set[str] = set()
    tokens = 2048
    while tokens <= options.to:
        for side in SIDES:
            if side in stopped:
                continue
            command = [sys.executable, __file__, "--one", side, str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                stopped.add(side)
                print(
                    f"{tokens:>8,} {side:<16} stopped: {done.stderr.strip().splitlines()[-1][:80]}",
                    flush=True,
                )
                continue
            row = json.loads(done.stdout)
            results[side].append(row)
            print(f"{tokens:>8,} {side:<16} {row['seconds']:8.3f} s  +{row['grown_mb']:7.1f} MB", flush=True)
        tokens *= 2
    for side in SIDES[:2]:
        print(f"{side}: time grows as n^{growth_exponent(results[side], 'seconds'):.2f} at the end")
    (DOCS / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results)


if __name__ == "__main__":
    main()
