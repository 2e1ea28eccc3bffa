"""Measure every ratio that regard states for PyTorch on the CPU: both sides alternate in one process.

python benchmarks/run.py [--rounds 9] [--only words] [--draw] [--write]

Prints a table, appends it to benchmarks/history.jsonl, and with --draw draws the history to benchmarks/history.svg.
A ratio is the ratio of the medians; its spread is the interquartile range of the ratios of neighbouring runs.
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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from regard import (
    Coarse,
    Distance,
    Entropy,
    Mass,
    Output,
    Position,
    Received,
    TopK,
    attention,
    causal,
    sliding_window,
)
from regard.engines.native import find_instruction_set, use_instruction_set
from regard.masks import document, first

HISTORY = Path(__file__).with_name("history.jsonl")


class Comparison(NamedTuple):
    """Two ways to compute something, the limit for the second, and the share of the rounds that it runs."""

    name: str
    bare: Callable[[], object]
    ours: Callable[[], object]
    limit: str
    rounds_share: float = 1.0


def time_alternating(comparison: Comparison, rounds: int) -> dict[str, object]:
    """Time both sides alternately and compute the ratio."""
    comparison.bare(), comparison.ours()
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for side in (comparison.bare, comparison.ours):
            start = time.perf_counter()
            side()
            pair.append(time.perf_counter() - start)
        times.append((pair[0], pair[1]))
    ratios = sorted(ours / bare for bare, ours in times)
    bare, ours = (statistics.median(column) for column in zip(*times, strict=True))
    quarter = len(ratios) // 4
    return {
        "name": comparison.name,
        "bare_ms": bare * 1e3,
        "ours_ms": ours * 1e3,
        "ratio": ours / bare,
        "spread": [ratios[quarter], ratios[-1 - quarter]],
        "above_us": (ours - bare) * 1e6,
        "limit": comparison.limit,
    }


def format_row(row: dict[str, Any]) -> str:
    """Format the columns that the tables of all benchmarks share."""
    low, high = row["spread"]
    times = f"{row['bare_ms']:>8.2f} ms {row['ours_ms']:>8.2f} ms {row['ratio']:>6.2f}×"
    return f"{row['name']:<34} {times}  {low:.2f} … {high:<8.2f}"


HEADINGS = f"{'':<34} {'bare':>11} {'regard':>11} {'ratio':>7}  {'middle half':<15}"


def list_comparisons() -> list[Comparison]:
    """List the comparisons: float32, (1, 8, 4096, 64), and the small sizes of decoding."""
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
    measures = (Entropy(), Received(), Distance(), Coarse(64, "mean"))
    A64, C64, A1 = attention(q64, k64), attention(q64, k64, mask=causal()), attention(q1, k)

    def make_measured(mask: object, *more: object) -> Callable[[], object]:
        def run() -> object:
            A = attention(q, k, mask=mask)
            return A @ v, A.measure(*measures, *more)

        return run

    segments = {f"segment_{i}": Mass(first(512 * (i + 1)) & ~first(512 * i)) for i in range(8)}

    def make_with_columns(mask: object) -> Callable[[], object]:
        def run() -> object:
            A = attention(q, k, mask=mask)
            return A.measure(Output(v), Position(), sink=Mass(first(1)), **segments), A.lse

        return run

    return [
        Comparison("A @ v", lambda: sdpa(q, k, v), lambda: attention(q, k) @ v, "1.05×"),
        Comparison(
            "A @ v, causal",
            lambda: sdpa(q, k, v, is_causal=True),
            lambda: attention(q, k, mask=causal()) @ v,
            "1.05×",
        ),
        Comparison("A @ v, n = 64", lambda: sdpa(q64, k64, v64), lambda: A64 @ v64, "+30 µs"),
        Comparison(
            "A @ v, n = 64, causal", lambda: sdpa(q64, k64, v64, is_causal=True), lambda: C64 @ v64, "+30 µs"
        ),
        Comparison("A @ v, one query", lambda: sdpa(q1, k, v), lambda: A1 @ v, "+30 µs"),
        Comparison("value_dim 48", lambda: sdpa(q, k, v48), lambda: attention(q, k) @ v48, "0.3×"),
        Comparison(
            "three axes", lambda: sdpa(q[0], k[0], v[0]), lambda: attention(q[0], k[0]) @ v[0], "0.3×"
        ),
        Comparison(
            "window of 256",
            lambda: sdpa(q, k, v, attn_mask=window),
            lambda: attention(q, k, mask=causal() & sliding_window(256)) @ v,
            "0.2×",
        ),
        Comparison(
            "16 documents",
            lambda: sdpa(q, k, v, attn_mask=documents),
            lambda: attention(q, k, mask=document(ids)) @ v,
            "0.15×",
        ),
        Comparison("output and four measures", lambda: sdpa(q, k, v), make_measured(None), "1.8×"),
        Comparison(
            "output and four measures, causal",
            lambda: sdpa(q, k, v, is_causal=True),
            make_measured(causal()),
            "1.8×",
        ),
        Comparison("and the top 8", lambda: sdpa(q, k, v), make_measured(None, TopK(8)), "2.1×"),
        Comparison(
            "and the top 8, causal",
            lambda: sdpa(q, k, v, is_causal=True),
            make_measured(causal(), TopK(8)),
            "2.1×",
        ),
        Comparison("output, lse, masses, position", lambda: sdpa(q, k, v), make_with_columns(None), "1.35×"),
        Comparison(
            "output, lse, masses, position, causal",
            lambda: sdpa(q, k, v, is_causal=True),
            make_with_columns(causal()),
            "1.35×",
        ),
        Comparison("dense: four measures", lambda: compute_dense(q, k, v), make_measured(None), "0.33×"),
        Comparison(
            "dense: with the top 8",
            lambda: compute_dense(q, k, v, top=8),
            make_measured(None, TopK(8)),
            "0.33×",
        ),
        Comparison(
            "NumPy: block loop and compiled pass",
            make_numpy_measures(q, k, None),
            make_numpy_measures(q, k, find_instruction_set()),
            "0.5×",
            0.4,
        ),
        *list_long_comparisons(),
    ]


def make_numpy_measures(
    q: torch.Tensor, k: torch.Tensor, instruction_set: str | None
) -> Callable[[], object]:
    """Make the four measures of NumPy arrays, by the block loop or by the compiled pass."""
    arrays = q.numpy(), k.numpy()

    def run() -> object:
        with use_instruction_set(instruction_set):
            return attention(*arrays).measure(Entropy(), Received(), Distance(), Coarse(64, "mean"))

    return run


def compute_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, top: int = 0
) -> object:
    """Compute the output and the four measures from stored weights, in plain torch."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    at = torch.arange(weights.shape[-1])
    entropy = torch.special.entr(weights).sum(-1)
    distance = (weights * (at[:, None] - at).abs()).sum(-1)
    coarse = weights.unflatten(-1, (64, -1)).mean(-1).unflatten(-2, (64, -1)).mean(-2)
    results = weights @ v, entropy, weights.sum(-2), distance, coarse
    return (*results, weights.topk(top)) if top else results


def list_long_comparisons(tokens: int = 131_072) -> list[Comparison]:
    """List the comparisons of one long causal head: 68.7 GB if it were stored."""
    q, k, v = torch.randn(3, 1, 1, tokens, 64, generator=torch.Generator().manual_seed(1)).unbind()
    matrices: list[object] = []

    def run_measures() -> object:
        A = attention(q, k, mask=causal())
        matrices[:] = [A]
        return A @ v, A.lse, A.measure(Entropy(), Received(), Coarse(512, "mean"))

    def bare() -> object:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def tile() -> object:
        return matrices[0][0, 0, -512:, 1000:1512]  # type: ignore[index]

    return [
        Comparison(f"{tokens:,} tokens, causal", bare, run_measures, "1.7×", 0.2),
        Comparison(f"{tokens:,} tokens: then any tile", bare, tile, "0.01×", 0.2),
    ]


def main() -> None:
    """Run the comparisons, print the table and append it to the history."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    parser.add_argument("--draw", action="store_true", help="draw the history, which needs the plot extra")
    parser.add_argument("--write", action="store_true", help="write the table into docs/speed.md")
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    print(f"{HEADINGS} {'above':>10}  limit")
    for comparison in list_comparisons():
        if options.only not in comparison.name:
            continue
        row = time_alternating(
            comparison,
            max(1, round(options.rounds * (50 if "µs" in comparison.limit else comparison.rounds_share))),
        )
        rows.append(row)
        print(f"{format_row(row)} {row['above_us']:>7.0f} µs  {row['limit']}", flush=True)
    record = make_record(rows)
    with HISTORY.open("a") as file:
        file.write(json.dumps(record) + "\n")
    if options.draw:
        draw_history()
    if options.write:
        write_table(record)


def make_record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rows with the date, the versions and the number of threads that they were measured with."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "compiled": find_instruction_set(),
        "rows": rows,
    }


def write_table(record: dict[str, Any], mark: str = "table") -> None:
    """Write a table of docs/speed.md.

    Args:
        record: Rows, date and versions.
        mark: Name of the comment before the table.
    """
    page = HISTORY.parents[1] / "docs" / "speed.md"
    lines = ["| | bare or dense | regard | ratio | middle half | above | aim |", "| --- " * 7 + "|"]
    for row in record["rows"]:
        above = f"{row['above_us']:.0f} µs" if "µs" in row["limit"] else ""
        low, high = row["spread"]
        lines.append(
            f"| {row['name']} | {row['bare_ms']:,.2f} ms | {row['ours_ms']:,.2f} ms | {row['ratio']:.2f}× |"
            f" {low:.2f} … {high:.2f} | {above} | {row['limit']} |"
        )
    caption = (
        f"Measured on {record['when'][:10]}, torch {record['torch']}, {record['machine']}, "
        f"{record['threads']} threads."
    )
    start = f"<!-- {mark} -->\n"
    before, rest = page.read_text().split(start)
    after = rest.split("<!-- end -->\n", 1)[1]
    page.write_text(f"{before}{start}{caption}\n\n" + "\n".join(lines) + f"\n<!-- end -->\n{after}")


def draw_history() -> None:
    """Draw every ratio of the history over the runs, one small panel each, with its limit."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    runs = [json.loads(line) for line in HISTORY.read_text().splitlines()]
    names = list(dict.fromkeys(row["name"] for run in runs for row in run["rows"]))
    figure, axes = plt.subplots(
        -(-len(names) // 4), 4, figsize=(14, 2.2 * -(-len(names) // 4)), squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        rows = [(i, row) for i, run in enumerate(runs) for row in run["rows"] if row["name"] == name]
        at, ratios = zip(*((i, row["ratio"]) for i, row in rows), strict=True)
        low, high = zip(*(row["spread"] for _, row in rows), strict=True)
        axis.fill_between(at, low, high, alpha=0.2)
        axis.plot(at, ratios, marker="o", markersize=3)
        limit = rows[-1][1]["limit"]
        if limit.endswith("×"):
            axis.axhline(float(limit[:-1]), linestyle=":", color="black")
        axis.set_title(f"{name} (limit: {limit})", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(HISTORY.with_suffix(".svg"))


if __name__ == "__main__":
    main()
