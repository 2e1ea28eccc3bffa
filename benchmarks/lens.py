"""Time a model with and without `regard.watch`: alternating runs, medians, spread.

python benchmarks/lens.py [--rounds 5] [--only words] [--eager] [--write]

A Llama of four layers, hidden 512, 8 heads over 2, random weights, 8,192 tokens. `--eager` adds
`output_attentions=True`, which takes about 11 GB. Memory is the peak of one call above what was allocated before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from run import (  # beside this file
    HEADINGS,
    Comparison,
    format_row,
    make_record,
    time_alternating,
    write_table,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import regard

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536}


def build_model(model_class: type, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return model_class._from_config(LlamaConfig(**SIZES, **HEADS), attn_implementation=implementation).eval()


def run_watched(
    model: torch.nn.Module, tokens: torch.Tensor, analyse: Callable[[regard.lens.Recording], object]
) -> object:
    with torch.no_grad(), regard.watch(model) as recording:
        model(tokens)
    return analyse(recording)


def build_runs(tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    model = build_model(LlamaModel, "sdpa")

    @torch.no_grad()
    def bare() -> object:
        return model(tokens)

    @torch.no_grad()
    def eager() -> object:
        return build_model(LlamaModel, "eager")(tokens, output_attentions=True).attentions[0].shape

    return {
        "bare": bare,
        "watched": lambda: run_watched(model, tokens, len),
        "heads": lambda: run_watched(model, tokens, lambda recording: recording.heads()),
        "heads with tokens": lambda: run_watched(model, tokens, lambda recording: recording.heads(tokens)),
        "eager": eager,
    }


def measure_peak(name: str, length: int) -> int:
    """Return the bytes that one call adds to the peak memory of a new process."""
    code = f"import lens; lens.print_peak({name!r}, {length})"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=sys.path[0]
    )
    return int(process.stdout)


def print_peak(name: str, length: int) -> None:
    """Print the bytes that one call adds to the peak memory of this process."""
    run = build_runs(torch.randint(1000, (1, length)))[name]
    before = peak_memory()
    run()
    print(peak_memory() - before)


def peak_memory() -> int:
    """Return the peak memory of this process; `ru_maxrss` would be at least its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def build_generation(*, with_spans: bool) -> Comparison:
    """Compare plain `generate()` with a watched one, or with one whose spans are measured as well."""
    model, prompt = build_model(LlamaForCausalLM, "sdpa"), torch.randint(1000, (1, 32))
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "pad_token_id": 0}

    spans = {"system": (0, 8), "document 1": (8, 18), "document 2": (18, 28)} if with_spans else None

    def ours() -> object:
        with regard.watch(model, spans=spans) as recording:
            text = model.generate(prompt, **options)
        return recording.span_mass() if with_spans else text

    name, limit = (
        ("generate 256 tokens, three spans", "1.15×") if with_spans else ("generate 256 tokens", "1.1×")
    )
    return Comparison(name, lambda: model.generate(prompt, **options), ours, limit)


def main() -> None:
    """Run the benchmarks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the rows whose name contains these words")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the table into docs/speed.md")
    options = parser.parse_args()
    tokens = torch.randint(1000, (1, options.length))
    runs = build_runs(tokens)
    comparisons = [
        Comparison("watched", runs["bare"], runs["watched"], "1.05×"),
        Comparison("watched, every head measured", runs["bare"], runs["heads"], "1.6×"),
        Comparison("watched, measured with tokens", runs["bare"], runs["heads with tokens"], "2×"),
        build_generation(with_spans=False),
        build_generation(with_spans=True),
    ]
    print(f"{HEADINGS}  limit")
    rows = []
    for comparison in comparisons:
        if options.only in comparison.name:
            row = time_alternating(comparison, options.rounds)
            rows.append(row)
            print(f"{format_row(row)}  {row['limit']}", flush=True)
    if options.write:
        write_table(make_record(rows), "models")
    if options.eager:
        start = time.perf_counter()
        runs["heads with tokens"]()
        middle = time.perf_counter()
        runs["eager"]()
        end = time.perf_counter()
        print(
            f"against output_attentions=True: {(end - middle) / (middle - start):.1f} times as fast, required 4"
        )
        bare, ours, eager = (
            measure_peak(name, options.length) for name in ("bare", "heads with tokens", "eager")
        )
        share = (ours - bare) / (eager - bare)
        print(
            f"memory above the bare call: {ours - bare:,} of {eager - bare:,} bytes, {share:.1%}, limit 15%"
        )


if __name__ == "__main__":
    main()
