"""Compare layers with torch.nn.MultiheadAttention, and decode with a cache: alternating sides, medians, spread.

python benchmarks/layers.py [--rounds 9] [--only text]

Inputs are (8, 512, 512), with 8 heads and equal weights on both sides. Decoding is timed for growing numbers of tokens;
the exponent of time over tokens is fitted, and 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from run import HEADINGS, Comparison, format_row, time_alternating  # beside this file
from torch import nn

from regard import causal
from regard.nn import KVCache, MultiheadAttention

TOKENS = (32, 64, 128, 256)


def list_comparisons() -> list[Comparison]:
    """Return the comparisons; the baseline is torch's module with need_weights=False, or the layer without a matrix."""
    torch.manual_seed(0)
    x = torch.randn(8, 512, 512)
    ignored = torch.ones(512, 512, dtype=torch.bool).triu(1)

    def pair(dropout: float = 0.0) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
        theirs = nn.MultiheadAttention(512, 8, dropout=dropout, batch_first=True)
        return theirs, MultiheadAttention.from_torch(theirs)

    theirs, ours = pair()
    dropping, ours_dropping = pair(0.1)
    rotary = MultiheadAttention(512, 8, rope="half")

    def forward(run: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        def once() -> object:
            with torch.no_grad():
                return run(x)

        return once

    def step(module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        optimiser = torch.optim.SGD(module.parameters(), lr=1e-9)

        def once() -> object:
            optimiser.zero_grad()
            run(x).square().mean().backward()
            return optimiser.step()

        return once

    def bare(x: torch.Tensor) -> torch.Tensor:
        return theirs(x, x, x, need_weights=False)[0]

    def bare_causal(x: torch.Tensor) -> torch.Tensor:
        return theirs(x, x, x, attn_mask=ignored, is_causal=True, need_weights=False)[0]

    def with_matrix(x: torch.Tensor) -> torch.Tensor:
        return ours(x, need_matrix=True)[0]

    return [
        Comparison("forward", forward(bare), forward(ours), "1.05×"),
        Comparison(
            "forward, causal", forward(bare_causal), forward(lambda x: ours(x, mask=causal())), "1.05×"
        ),
        Comparison("training step", step(theirs, bare), step(ours, ours), "1.05×"),
        Comparison(
            "training step, causal",
            step(theirs, bare_causal),
            step(ours, lambda x: ours(x, mask=causal())),
            "1.05×",
        ),
        Comparison("forward, and the matrix", forward(ours), forward(with_matrix), "1×"),
        Comparison("training step, and the matrix", step(ours, ours), step(ours, with_matrix), "1×"),
        Comparison("forward, rotary", forward(bare), forward(rotary), ""),
        Comparison(
            "training step, weights dropped",
            step(dropping, lambda x: dropping(x, x, x, need_weights=False)[0]),
            step(ours_dropping, ours_dropping),
            "",
        ),
    ]


def time_decoding(rounds: int) -> list[tuple[str, list[float], float]]:
    """Return the name, the seconds for each number of tokens, and the exponent of their growth, for each cache."""
    layer = MultiheadAttention(512, 8, rope="half").eval()
    x = torch.randn(1, max(TOKENS), 512)

    def decode(tokens: int, cache: KVCache | None) -> None:
        with torch.no_grad():
            for i in range(tokens):
                if cache is None:
                    layer(x[:, : i + 1], mask=causal())
                else:
                    layer(x[:, i : i + 1], mask=causal(), cache=cache)

    caches: dict[str, Callable[[], KVCache | None]] = {
        "with a cache": KVCache,
        "with a window of 64": lambda: KVCache(window=64, keep_first=4),
        "without": lambda: None,
    }
    results = []
    for name, build_cache in caches.items():
        decode(TOKENS[0], build_cache())
        times: list[list[float]] = []
        for _ in range(rounds):
            row = []
            for tokens in TOKENS:
                start = time.perf_counter()
                decode(tokens, build_cache())
                row.append(time.perf_counter() - start)
            times.append(row)
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        logs = [(math.log(n), math.log(t)) for n, t in zip(TOKENS, medians, strict=True)]
        exponent = statistics.linear_regression(*zip(*logs, strict=True)).slope
        results.append((name, medians, exponent))
    return results


def main() -> None:
    """Run the benchmarks and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="run only the rows whose name contains this text")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{HEADINGS}  limit")
    for comparison in list_comparisons():
        if options.only in comparison.name:
            row = time_alternating(comparison, options.rounds)
            print(f"{format_row(row)}  {row['limit']}", flush=True)
    print(f"\n{'decoding, ms':<34}" + "".join(f" {n:>6} tokens" for n in TOKENS) + "  exponent")
    for name, times, exponent in time_decoding(max(1, options.rounds // 3)):
        print(f"{name:<34}" + "".join(f" {t * 1e3:>13.1f}" for t in times) + f"  {exponent:.2f}", flush=True)


if __name__ == "__main__":
    main()
