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
from functools import partial
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
    Spread,
    TopK,
    attention,
    causal,
    padding,
    sliding_window,
    softcap,
)
from regard.engines.native import find_instruction_set, use_instruction_set
from regard.masks import dense, document, first
from regard.score_mods import bias

HISTORY = Path(__file__).with_name("history.jsonl")


class Comparison(NamedTuple):
    """Two ways to compute something, the limit for the second, its share of the rounds, and the threads."""

    name: str
    bare: Callable[[], object]
    ours: Callable[[], object]
    limit: str
    rounds_share: float = 1.0
    threads: int = 0  # 0 for those that are set


def time_alternating(
    comparison: Comparison, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Time both sides alternately and compute the ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(comparison.threads or threads)
    # The processor time of one thread does not depend on what else runs.
    clock = time.process_time if comparison.threads == 1 else time.perf_counter
    sides = (comparison.bare, comparison.ours)
    first = []
    for side in (*sides, *sides):  # the second time is warm
        start = clock()
        side()
        first.append(clock() - start)
    # A call of microseconds is repeated for a millisecond, as in timeit: reading the clock takes half a microsecond.
    repeats = max(1, round(1e-3 / max(min(first[2:]), 1e-7)))
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        pair = []
        for side in sides:
            start = clock()
            for _ in range(repeats):
                side()
            pair.append((clock() - start) / repeats)
        times.append((pair[0], pair[1]))
    torch.set_num_threads(threads)
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
        *list_small_comparisons(),
        *list_measure_comparisons(),
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


def list_small_comparisons() -> list[Comparison]:
    """List small problems, ragged batches and one row of a decode step, with one thread."""
    generator = torch.Generator().manual_seed(2)
    sdpa = F.scaled_dot_product_attention
    rows: list[tuple[str, Callable[[], object], Callable[[], object], str, float]] = []

    def add(
        name: str, bare: Callable[[], object], ours: Callable[[], object], limit: str, share: float = 1.0
    ) -> None:
        rows.append((name, bare, ours, limit, share))

    def add_small(n: int) -> None:
        x = torch.randn(1, 1, n, 8, generator=generator)
        allowed = torch.ones(n, n, dtype=torch.bool).tril()
        was = "(was +100 µs)" if n == 4 else ""

        def weigh() -> torch.Tensor:
            return torch.softmax(x @ x.mT * 8**-0.5, -1)

        add(f"n = {n}", lambda: sdpa(x, x, x), lambda: attention(x, x) @ x, f"+25 µs {was}")
        add(
            f"n = {n}, causal",
            lambda: sdpa(x, x, x, is_causal=True),
            lambda: attention(x, x, mask=causal()) @ x,
            f"+25 µs {was}",
        )
        add(
            f"n = {n}, dense mask",
            lambda: sdpa(x, x, x, attn_mask=allowed),
            lambda: attention(x, x, mask=dense(allowed)) @ x,
            "+80 µs (was 1.6 ms)" if n == 4 else "+80 µs",
        )
        was = " (was 30×)" if n == 4 else ""
        add(f"n = {n}: one row", lambda: weigh()[0, 0, 2], lambda: attention(x, x)[0, 0, 2], f"5×{was}", 50)
        add(
            f"n = {n}: entropy",
            lambda: torch.special.entr(weigh()).sum(-1),
            lambda: attention(x, x).entropy(),
            f"5×{was}",
            50,
        )
        add(f"n = {n}: to_dense", weigh, lambda: attention(x, x).to_dense(), f"5×{was}", 50)

    def add_numpy(shape: tuple[int, ...], limit: str) -> None:
        x = torch.randn(shape, generator=generator).numpy()

        def multiply() -> object:
            scores = x @ x.swapaxes(-1, -2) * (1 / np.sqrt(x.shape[-1]))
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            return scores @ x

        add(f"NumPy, n = {shape[-2]}", multiply, lambda: attention(x, x) @ x, limit, 50)

    for n in (4, 16, 64):
        add_small(n)
    add_numpy((1, 1, 4, 8), "4× (was 16×)")
    add_numpy((1, 4, 64, 64), "1.5× (was 3.5×)")
    query, keys = (torch.randn(1, 32, n, 64, generator=generator) for n in (1, 8192))
    add(
        "decode: one row of one head of 32 × 8,192",
        lambda: torch.softmax(query[0, 3] @ keys[0, 3].mT * 0.125, -1),
        lambda: attention(query, keys)[0, 3, 0],
        "2× (was 53×)",
        50,
    )
    x = torch.randn(64, 12, 128, 64, generator=generator)
    leaf, grad = x.clone().requires_grad_(), torch.randn(x.shape, generator=generator)
    lengths = torch.randint(20, 128, (64,), generator=generator).numpy()
    ids = torch.randint(0, 8, (64, 128), generator=generator).sort(-1).values.numpy()
    masks = {
        "padding": (lambda: padding(lengths), "2.7×"),
        "causal & padding": (lambda: causal() & padding(lengths), "3.9×"),
        "documents per entry": (lambda: document(ids), "5.3×"),
    }
    for name, (make, was) in masks.items():
        allowed = torch.from_numpy(make().to_dense(64, 1, 128, 128))

        def multiply(x: Any, make: Any = make) -> Any:
            return attention(x, x, mask=make()) @ x

        def bare(x: Any, allowed: Any = allowed) -> Any:
            return sdpa(x, x, x, attn_mask=allowed)

        def differentiate(side: Callable[[Any], Any]) -> None:
            leaf.grad = None
            side(leaf).backward(grad)

        add(f"64 × 12 × 128, {name}", partial(bare, x), partial(multiply, x), f"1.1× (was {was})")
        add(
            f"64 × 12 × 128, {name}: backward",
            partial(differentiate, bare),
            partial(differentiate, multiply),
            "1.2×",
        )
    return [Comparison(*row, threads=1) for row in rows]


def list_measure_comparisons() -> list[Comparison]:
    """List measures and gradients beside eager torch, with one thread, and outputs with measures in one call."""
    torch.manual_seed(2)
    x, bias_array = torch.randn(1, 8, 1024, 64), torch.randn(8, 1024, 1024).requires_grad_()
    leaf = x.clone().requires_grad_()
    query, keys = torch.randn(1, 32, 1, 64), torch.randn(1, 32, 8192, 64)
    q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    at = torch.arange(1024.0)
    sdpa = F.scaled_dot_product_attention
    four = (Entropy(), Received(), Distance(), Coarse(64, "mean"))

    def weigh(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.softmax(queries @ keys.mT * 0.125, -1)

    def compute_spread() -> torch.Tensor:
        weights = weigh(x, x)
        return ((weights @ at**2) - (weights @ at) ** 2).sqrt()

    def alone(side: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return side()
            finally:
                torch.set_num_threads(threads)

        return run

    def backward(side: Callable[[], torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            leaf.grad = bias_array.grad = None
            side().sum().backward()

        return run

    def softcapped() -> torch.Tensor:
        return torch.softmax(30 * torch.tanh(leaf @ leaf.mT * 0.125 / 30), -1) @ leaf

    def entropy() -> torch.Tensor:
        return torch.special.entr(weigh(leaf, leaf)).sum(-1)

    def measure(
        mask: object, arrays: tuple[torch.Tensor, ...], *more: object
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        queries, keys, values = arrays
        return (
            lambda: sdpa(queries, keys, values, is_causal=mask is not None),
            lambda: attention(queries, keys, mask=mask).measure(Output(values), *four, *more),
        )

    single: list[tuple[str, Callable[[], object], Callable[[], object], str]] = [
        ("Spread", compute_spread, lambda: attention(x, x).measure(Spread()), "2× (was 4.0×)"),
        ("topk(100)", lambda: weigh(x, x).topk(100), lambda: attention(x, x).topk(100), "2× (was 3.5×)"),
        (
            "backward of a learned bias",
            backward(lambda: sdpa(leaf, leaf, leaf, attn_mask=bias_array)),
            backward(lambda: attention(leaf, leaf, score_mod=bias(bias_array)) @ leaf),
            "2× (was 3.9×)",
        ),
        (
            "backward of softcap",
            backward(softcapped),
            backward(lambda: attention(leaf, leaf, score_mod=softcap(30.0)) @ leaf),
            "2× (was 2.6×)",
        ),
        (
            "backward of entropy",
            backward(entropy),
            backward(lambda: attention(leaf, leaf).entropy()),
            "2× (was 2.6×)",
        ),
        (
            "decode, topk(8) of 32 × 8,192",
            lambda: weigh(query, keys).topk(8),
            lambda: attention(query, keys).topk(8),
            "1.5× (was 5.5×)",
        ),
    ]
    half = {
        name: tuple(part.to(dtype) for part in (q, k, v))
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    }
    return [
        *(
            Comparison(f"{name}, 1 thread", alone(bare), alone(ours), limit)
            for name, bare, ours, limit in single
        ),
        Comparison("Output and four measures", *measure(None, (q, k, v)), "1.55× (was 1.74×)"),
        Comparison("Output and four measures, causal", *measure(causal(), (q, k, v)), "1.55× (was 1.68×)"),
        Comparison("Output, four, the top 8", *measure(None, (q, k, v), TopK(8)), "1.8× (was 1.96×)"),
        Comparison(
            "Output, four, the top 8, causal", *measure(causal(), (q, k, v), TopK(8)), "1.8× (was 2.13×)"
        ),
        *(
            Comparison(f"Output and four, {name}", *measure(None, arrays), "2×", 0.5)
            for name, arrays in half.items()
        ),
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
    write_lines(HISTORY.parents[1] / "docs" / "speed.md", mark, caption, lines)


def write_lines(page: Path, mark: str, caption: str, lines: list[str]) -> None:
    """Replace the table of a page that follows the comment `mark`."""
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
