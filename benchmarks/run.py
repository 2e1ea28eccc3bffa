"""Every ratio that regard states for PyTorch on the CPU, measured: sides alternated in one process, medians, spread.

python benchmarks/run.py [--rounds 9] [--only words]

Prints a table and appends it to benchmarks/history.jsonl. A ratio is that of the medians; its spread is the range of
the middle half of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from regard import (
    Coarse,
    Distance,
    Entropy,
    Received,
    TopK,
    attention,
    causal,
    document,
    sliding_window,
)

HISTORY = Path(__file__).with_name("history.jsonl")


class Duel(NamedTuple):
    """Two ways to the same thing, and the most that the second may take."""

    name: str
    bare: Callable[[], object]
    ours: Callable[[], object]
    limit: str


def alternate(duel: Duel, rounds: int) -> dict[str, object]:
    """The times of both sides, one after the other, and their ratio."""
    duel.bare(), duel.ours()
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for side in (duel.bare, duel.ours):
            start = time.perf_counter()
            side()
            pair.append(time.perf_counter() - start)
        times.append((pair[0], pair[1]))
    ratios = sorted(ours / bare for bare, ours in times)
    bare, ours = (statistics.median(column) for column in zip(*times, strict=True))
    quarter = len(ratios) // 4
    return {
        "name": duel.name,
        "bare_ms": bare * 1e3,
        "ours_ms": ours * 1e3,
        "ratio": ours / bare,
        "spread": [ratios[quarter], ratios[-1 - quarter]],
        "above_us": (ours - bare) * 1e6,
        "limit": duel.limit,
    }


def duels() -> list[Duel]:
    """What is compared: float32, (1, 8, 4096, 64), and the small sizes of decoding."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    q64, k64, v64 = (x[:, :, :64].contiguous() for x in (q, k, v))
    q1, v48 = q[:, :, :1].contiguous(), v[..., :48].contiguous()
    at = torch.arange(4096)
    window = (at[:, None] >= at) & (at[:, None] - at < 256)
    lengths = np.arange(136, 376, 16)  # 15 documents, and the rest
    lengths = np.append(lengths, 4096 - lengths.sum())
    ids = np.repeat(np.arange(16), lengths)
    documents = torch.tensor(ids[:, None] == ids)
    sdpa = F.scaled_dot_product_attention
    measures = (Entropy(), Received(), Distance(), Coarse(64))
    A64, C64, A1 = attention(q64, k64), attention(q64, k64, mask=causal()), attention(q1, k)

    def measured(mask: object, *more: object) -> Callable[[], object]:
        def run() -> object:
            A = attention(q, k, mask=mask)
            return A @ v, A.measure(*measures, *more)

        return run

    return [
        Duel("A @ v", lambda: sdpa(q, k, v), lambda: attention(q, k) @ v, "1.05×"),
        Duel(
            "A @ v, causal",
            lambda: sdpa(q, k, v, is_causal=True),
            lambda: attention(q, k, mask=causal()) @ v,
            "1.05×",
        ),
        Duel("A @ v, n = 64", lambda: sdpa(q64, k64, v64), lambda: A64 @ v64, "+30 µs"),
        Duel(
            "A @ v, n = 64, causal", lambda: sdpa(q64, k64, v64, is_causal=True), lambda: C64 @ v64, "+30 µs"
        ),
        Duel("A @ v, one query", lambda: sdpa(q1, k, v), lambda: A1 @ v, "+30 µs"),
        Duel("value_dim 48", lambda: sdpa(q, k, v48), lambda: attention(q, k) @ v48, "0.3×"),
        Duel("three axes", lambda: sdpa(q[0], k[0], v[0]), lambda: attention(q[0], k[0]) @ v[0], "0.3×"),
        Duel(
            "window of 256",
            lambda: sdpa(q, k, v, attn_mask=window),
            lambda: attention(q, k, mask=causal() & sliding_window(256)) @ v,
            "0.2×",
        ),
        Duel(
            "16 documents",
            lambda: sdpa(q, k, v, attn_mask=documents),
            lambda: attention(q, k, mask=document(ids)) @ v,
            "0.15×",
        ),
        Duel("output and four measures", lambda: sdpa(q, k, v), measured(None), "2×"),
        Duel(
            "output and four measures, causal",
            lambda: sdpa(q, k, v, is_causal=True),
            measured(causal()),
            "2.5×",
        ),
        Duel("and the top 8", lambda: sdpa(q, k, v), measured(None, TopK(8)), "3×"),
        Duel(
            "and the top 8, causal", lambda: sdpa(q, k, v, is_causal=True), measured(causal(), TopK(8)), "4×"
        ),
    ]


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only the rows whose name has these words")
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    print(f"{'':<34} {'bare':>10} {'regard':>10} {'ratio':>7}  {'middle half':<15} {'above':>10}  asked for")
    for duel in duels():
        if options.only not in duel.name:
            continue
        row = alternate(duel, options.rounds * (50 if "µs" in duel.limit else 1))
        rows.append(row)
        low, high = row["spread"]  # type: ignore[misc]
        print(
            f"{row['name']:<34} {row['bare_ms']:>7.2f} ms {row['ours_ms']:>7.2f} ms {row['ratio']:>6.2f}×"
            f"  {low:.2f} … {high:<8.2f} {row['above_us']:>7.0f} µs  {row['limit']}",
            flush=True,
        )
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    with HISTORY.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
