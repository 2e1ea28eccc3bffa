"""The layers beside torch.nn.MultiheadAttention, and decoding with a cache: sides alternated, medians, spread.

python benchmarks/layers.py [--rounds 9] [--only words]

(8, 512, 512), 8 heads, the same weights on both sides. Decoding is timed for more and more tokens; the exponent is
that of the time over the tokens, fitted: 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from run import HEADINGS, Duel, alternate, told  # beside this file
from torch import nn

from regard import causal
from regard.nn import KVCache, MultiheadAttention

TOKENS = (32, 64, 128, 256)


def duels() -> list[Duel]:
    """What is compared: the bare side is torch's module with need_weights=False, or the layer without its matrix."""
    torch.manual_seed(0)
    x = torch.randn(8, 512, 512)
    hidden = torch.ones(512, 512, dtype=torch.bool).triu(1)

    def pair(dropout: float = 0.0) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
        theirs = nn.MultiheadAttention(512, 8, dropout=dropout, batch_first=True)
        return theirs, MultiheadAttention.from_torch(theirs)

    theirs, ours = pair()
    dropping, ours_dropping = pair(0.1)
    turning = MultiheadAttention(512, 8, rope="half")

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
        return theirs(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]

    def with_matrix(x: torch.Tensor) -> torch.Tensor:
        return ours(x, need_matrix=True)[0]

    return [
        Duel("forward", forward(bare), forward(ours), "1.05×"),
        Duel("forward, causal", forward(bare_causal), forward(lambda x: ours(x, mask=causal())), "1.05×"),
        Duel("training step", step(theirs, bare), step(ours, ours), "1.05×"),
        Duel(
            "training step, causal",
            step(theirs, bare_causal),
            step(ours, lambda x: ours(x, mask=causal())),
            "1.05×",
        ),
        Duel("forward, and the matrix", forward(ours), forward(with_matrix), "1×"),
        Duel("training step, and the matrix", step(ours, ours), step(ours, with_matrix), "1×"),
        Duel("forward, rotary", forward(bare), forward(turning), ""),
        Duel(
            "training step, weights dropped",
            step(dropping, lambda x: dropping(x, x, x, need_weights=False)[0]),
            step(ours_dropping, ours_dropping),
            "",
        ),
    ]


def decoding(rounds: int) -> list[tuple[str, list[float], float]]:
    """Seconds for each number of tokens, one after the other, and the exponent of their growth."""
    layer = MultiheadAttention(512, 8, rope="half").eval()
    x = torch.randn(1, max(TOKENS), 512)

    def decode(tokens: int, cache: KVCache | None) -> None:
        with torch.no_grad():
            for i in range(tokens):
                if cache is None:
                    layer(x[:, : i + 1], mask=causal())
                else:
                    layer(x[:, i : i + 1], mask=causal(), cache=cache)

    ways: dict[str, Callable[[], KVCache | None]] = {
        "with a cache": KVCache,
        "with a window of 64": lambda: KVCache(window=64, keep_first=4),
        "without": lambda: None,
    }
    found = []
    for name, make in ways.items():
        decode(TOKENS[0], make())
        times: list[list[float]] = []
        for _ in range(rounds):
            row = []
            for tokens in TOKENS:
                start = time.perf_counter()
                decode(tokens, make())
                row.append(time.perf_counter() - start)
            times.append(row)
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        logs = [(math.log(n), math.log(t)) for n, t in zip(TOKENS, medians, strict=True)]
        exponent = statistics.linear_regression(*zip(*logs, strict=True)).slope
        found.append((name, medians, exponent))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only the rows whose name has these words")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{HEADINGS}  asked for")
    for duel in duels():
        if options.only in duel.name:
            row = alternate(duel, options.rounds)
            print(f"{told(row)}  {row['limit']}", flush=True)
    print(f"\n{'decoding, ms':<34}" + "".join(f" {n:>6} tokens" for n in TOKENS) + "  exponent")
    for name, times, exponent in decoding(max(1, options.rounds // 3)):
        print(f"{name:<34}" + "".join(f" {t * 1e3:>13.1f}" for t in times) + f"  {exponent:.2f}", flush=True)


if __name__ == "__main__":
    main()
