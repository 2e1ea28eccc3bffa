"""Measure `A @ value` over lengths, batches and masks, beside the faster of SDPA and eager attention.

python benchmarks/shapes.py [--lengths 64 256] [--rounds 7] [--write]

Eight heads of 64, float32, one thread; the sides alternate in one process, in processor time. SDPA
gets the mask as booleans, or `is_causal`. A size is skipped if its dense mask or its work would be too large, and the
table says so. With --write, the table is written into docs/speed.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from run import HISTORY, write_lines  # beside this file

from regard import attention, causal, padding, sliding_window
from regard.masks import Mask, dense, document

LENGTHS = (4, 16, 64, 256, 1024, 4096, 8192, 16_384, 32_768, 131_072)
BATCHES = (1, 8, 64)
HEADS = 8
# Most bytes of the boolean mask of a batch and the numbers that SDPA converts it to, most weights that eager attention
# stores, and most weights of a batch: more entries only take longer.
MAX_MASK_BYTES, MAX_STORED, MAX_WEIGHTS = 2 << 30, 1 << 27, 1 << 29


def make_masks(batch: int, n: int) -> dict[str, Callable[[], Mask | None]]:
    """Return functions that make the masks of a size."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(max(1, n // 4), n + 1, batch)
    ids = np.sort(generator.integers(0, 8, (batch, n)), -1)
    random_ids = generator.integers(0, 8, n)

    @cache
    def draw() -> torch.Tensor:
        return torch.from_numpy(generator.random((n, n), np.float32) < 0.9)

    return {
        "no mask": lambda: None,
        "causal": causal,
        "window": lambda: sliding_window(max(2, n // 16)),
        "padding": lambda: padding(lengths),
        "causal & padding": lambda: causal() & padding(lengths),
        "documents": lambda: document(ids[0]),
        "documents per entry": lambda: document(ids),
        "random documents": lambda: document(random_ids),
        "dense": lambda: dense(draw()),  # drawn outside what is timed, unless it is too large
    }


def time_sides(sides: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median processor time of each side; they alternate."""
    times: list[list[float]] = [[] for _ in sides]
    warm = []
    for side in sides:
        start = time.process_time()
        side()
        warm.append(time.process_time() - start)
    took = statistics.mean(warm)
    if took > 30:
        return warm  # nothing is left to warm up
    repeats = max(1, int(1e-3 / max(took, 1e-7)))
    for _ in range(rounds if took < 1 else 1):
        for side, own in zip(sides, times, strict=True):
            start = time.process_time()
            for _ in range(repeats):
                side()
            own.append((time.process_time() - start) / repeats)
    return [statistics.median(own) for own in times]


def measure(batch: int, n: int, name: str, rounds: int) -> float | None:
    """Return the ratio to the faster reference; None if no reference fits."""
    make = make_masks(batch, n)[name]
    if name not in ("no mask", "causal") and n * n * 5 > MAX_MASK_BYTES:
        return None
    mask = make()
    varies = mask is not None and mask.varies_by_batch
    if varies and n * n * 5 * batch > MAX_MASK_BYTES:
        return None
    q, k, v = torch.randn(3, batch, HEADS, n, 64).unbind()
    options: dict[str, Any] = {"is_causal": name == "causal"}
    allowed = None
    is_stored = batch * HEADS * n * n <= MAX_STORED
    if mask is not None and (name != "causal" or is_stored):
        allowed = torch.from_numpy(mask.to_dense(batch if varies else 1, 1, n, n))
        options = options if name == "causal" else {"attn_mask": allowed}

    def eager() -> object:
        scores = q @ k.mT * 0.125
        return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1) @ v

    sides = [
        lambda: attention(q, k, mask=make()) @ v,
        lambda: F.scaled_dot_product_attention(q, k, v, **options),
    ]
    ours, *references = time_sides([*sides, *([eager] if is_stored else [])], rounds)
    return ours / min(references)


def main() -> None:
    """Measure every size, and print the worst and the median ratio of each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the table into docs/speed.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = ["| tokens | measured | median | worst | worst case | skipped |", "| --- " * 6 + "|"]
    print("\n".join(lines), flush=True)
    for n in options.lengths:
        found: dict[str, float] = {}
        skipped = []
        for batch in BATCHES:
            if batch > 1 and batch * HEADS * n * n > MAX_WEIGHTS:
                skipped.append(f"batch {batch}")
                continue
            for name in make_masks(batch, n):
                ratio = measure(batch, n, name, options.rounds)
                if ratio is None:
                    skipped.append(name if batch == 1 else f"{name} of batch {batch}")
                else:
                    found[f"{name}, batch {batch}"] = ratio
        worst = max(found, key=lambda case: found[case])
        lines.append(
            f"| {n:,} | {len(found)} | {statistics.median(found.values()):.2f}× | {found[worst]:.2f}× | {worst} |"
            f" {', '.join(skipped)} |"
        )
        print(lines[-1], {case: round(ratio, 2) for case, ratio in found.items()}, flush=True)
    if options.write:
        caption = f"Measured on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, 1 thread."
        write_lines(HISTORY.parents[1] / "docs" / "speed.md", "shapes", caption, lines)


if __name__ == "__main__":
    main()
