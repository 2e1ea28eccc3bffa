"""How time and memory grow with the length: one head, causal, from 2,048 tokens to 131,072, drawn log-log.

python benchmarks/growth.py [--to 131072]

Three ways, each run in a process of its own: the bare kernel, regard with output, lse, entropy, received mass and a
coarse picture, and the same from stored weights, up to where 8 GB do not hold them. Writes docs/growth.json and
docs/growth.svg.
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


def peak() -> float:
    """The most memory this process has had, in MB; what its parent had is not counted, as `getrusage` would."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(side: str, tokens: int) -> dict[str, float]:
    """Seconds, and MB that the process grew by."""
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
            return A @ v, A.lse, A.measure(Entropy(), Received(), Coarse(cells))
        scores = (q @ k.mT / 8).masked_fill_(
            torch.ones(tokens, tokens, dtype=torch.bool).triu_(1), -torch.inf
        )
        weights = scores.softmax(-1)
        coarse = weights.unflatten(-1, (cells, -1)).mean(-1).unflatten(-2, (cells, -1)).mean(-2)
        return weights @ v, scores.logsumexp(-1), torch.special.entr(weights).sum(-1), weights.sum(-2), coarse

    if side != "stored weights":
        run(q[:, :, :600], k[:, :, :600], v[:, :, :600])  # what is loaded and kept at the first call
    before = peak()
    if side == "stored weights":
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    times = []
    for _ in range(5 if tokens <= 16384 else 1):
        start = time.perf_counter()
        run(q, k, v)
        times.append(time.perf_counter() - start)
    return {"tokens": tokens, "seconds": statistics.median(times), "grown_mb": peak() - before}


def exponent(rows: list[dict[str, float]], what: str) -> float:
    """The slope between the two longest lengths, log-log."""
    (a, b) = rows[-2:]
    return math.log(b[what] / a[what]) / math.log(b["tokens"] / a["tokens"])


def draw(found: dict[str, list[dict[str, float]]]) -> None:
    """Time and memory over the length."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    labels = (("seconds", "seconds"), ("grown_mb", "memory grown by, MB"))
    for axis, (what, label) in zip(axes, labels, strict=True):
        for side, rows in found.items():
            kept = [(row["tokens"], row[what]) for row in rows if row[what] > 0]
            axis.loglog(*zip(*kept, strict=True), marker="o", label=side)
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(DOCS / "growth.svg")


def main() -> None:
    """Measure every side at every length, print, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, default=131_072)
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "TOKENS"), help="one measurement, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    stopped: set[str] = set()
    tokens = 2048
    while tokens <= options.to:
        for side in SIDES:
            if side in stopped:
                continue
            command = [sys.executable, __file__, "--one", side, str(tokens)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                stopped.add(side)
                print(
                    f"{tokens:>8,} {side:<16} stopped: {result.stderr.strip().splitlines()[-1][:80]}",
                    flush=True,
                )
                continue
            row = json.loads(result.stdout)
            found[side].append(row)
            print(f"{tokens:>8,} {side:<16} {row['seconds']:8.3f} s  +{row['grown_mb']:7.1f} MB", flush=True)
        tokens *= 2
    for side in SIDES[:2]:
        print(f"{side}: time grows as n^{exponent(found[side], 'seconds'):.2f} at the end")
    (DOCS / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found)


if __name__ == "__main__":
    main()
