"""Measure a causal head of a million tokens, 4.4 TB of weights, in bands of rows, and recompute tiles on request.

python examples/million.py [tokens]

Needs the torch extra. The run computes the lse of each row, the weight that each key receives, and a picture of
512 × 512 cells. Afterwards any tile is recomputed from query, key and lse.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch

import regard
from regard import Coarse, Received, causal

CELLS, BANDS = 512, 64


def current_memory() -> float:
    """Return the current memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(tokens: int = 1 << 20) -> dict[str, torch.Tensor]:
    """Measure one head of random queries and keys, and print progress and results."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(tokens, 64, generator=generator) for _ in range(2))
    A = regard.attention(query, key, mask=causal())
    print(f"{A}\nstored as a dense matrix: {A.nbytes / 1e12:.3f} TB")
    before, started = current_memory(), time.perf_counter()
    lse, received = torch.empty(tokens), torch.zeros(tokens, dtype=torch.float64)
    coarse = torch.empty(CELLS, CELLS, dtype=torch.float64)
    for band in range(BANDS):
        rows = slice(band * tokens // BANDS, (band + 1) * tokens // BANDS)
        cells = slice(band * CELLS // BANDS, (band + 1) * CELLS // BANDS)
        part = A.lazy[rows]
        measures = part.measure(Received(), Coarse((CELLS // BANDS, CELLS), "mean"))
        lse[rows] = part.lse
        received += measures.received
        coarse[cells] = measures.coarse
        # The work of a causal band grows with its last row.
        done, took = ((band + 1) / BANDS) ** 2, time.perf_counter() - started
        print(
            f"\rband {band + 1:>2} of {BANDS}  {done:4.0%}  {took:5.0f} s, about {took / done - took:5.0f} s left"
            f"  memory +{current_memory() - before:4.0f} MB", end="", flush=True,
        )  # fmt: skip
    print(f"\nlse: mean {lse.mean():.4f}; received: sum {received.sum():.1f}, max {received.max():.2f}")
    corners = [(0, 0), (tokens - 512, 0), (tokens - 512, tokens - 512), (tokens // 2, tokens // 3)]
    max_error = 0.0
    for row, column in corners:
        clock = time.perf_counter()
        tile = A[row : row + 512, column : column + 512]
        took = time.perf_counter() - clock
        scores = query[row : row + 512].double() @ key[column : column + 512].double().mT / 8
        live = torch.arange(row, row + 512)[:, None] >= torch.arange(column, column + 512)
        exact = torch.where(live, torch.exp(scores - lse[row : row + 512, None].double()), 0.0)
        error = float((tile - exact).abs().max() / exact.max())
        max_error = max(max_error, error)
        print(
            f"tile at {row:,}, {column:,}: {took:.2f} s, largest weight {tile.max():.3e}, relative error {error:.1e}"
        )
    print(f"total {time.perf_counter() - started:.0f} s, memory growth {current_memory() - before:.0f} MB")
    return {"lse": lse, "received": received, "coarse": coarse, "max_error": torch.tensor(max_error)}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
