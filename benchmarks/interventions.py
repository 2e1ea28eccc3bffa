"""Time a model with and without interventions: alternating runs, medians, ratios, peak memory.

python benchmarks/interventions.py [--rounds 5] [--lengths 2048 8192] [--peak 32768] [--sweep]

A Llama of four layers, hidden 512, 8 heads over 2, random weights. "keys" removes 1% of the keys from each row of each
head and layer, "edges" the edges between 20 queries and 10 keys in three heads, "rows" half of the keys of 1% of the
rows. Eager attention makes the edit "keys" by hand, up to 8,192 tokens. `--sweep` compares `effects` over the 144 heads
of a GPT-2 of 12 layers with 144 plain forward passes. Times are those of the process, so other load matters little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import transformers as hf

import regard
from regard.interventions import effects, knockout, logit_difference

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536}


def build_model(implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, **HEADS)
    return hf.LlamaModel._from_config(config, attn_implementation=implementation).eval()


def list_edits(length: int) -> dict[str, regard.interventions.Edit]:
    share = max(1, length // 100)
    return {
        "keys": knockout(keys=slice(length // 4, length // 4 + share)),
        "edges": knockout(heads=[1, 2, 5], queries=slice(length - 20, None), keys=slice(100, 110)),
        "rows": knockout(queries=slice(length - share, None), keys=slice(0, length // 2)),
    }


def build_runs(length: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    model, tokens = build_model("sdpa"), torch.randint(1000, (1, length))

    def run_edited(edit: regard.interventions.Edit) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad(), regard.intervene(model, edit):
                return model(tokens, use_cache=False)

        return run

    @torch.no_grad()
    def bare() -> object:
        return model(tokens, use_cache=False)

    return {"bare": bare, **{name: run_edited(edit) for name, edit in list_edits(length).items()}}


def build_eager(length: int) -> Callable[[], object]:
    """Return a run of eager attention that removes the same keys by hand: -inf in a mask of q_len × kv_len."""
    model, tokens = build_model("eager"), torch.randint(1000, (1, length))
    mask = torch.full((length, length), -torch.inf).triu(1)
    share = max(1, length // 100)
    mask[:, length // 4 : length // 4 + share] = -torch.inf

    @torch.no_grad()
    def eager() -> object:
        return model(tokens, attention_mask=mask[None, None], use_cache=False)

    return eager


def time_rounds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of the process for each run; runs alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if i:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def print_peak(name: str, length: int) -> None:
    """Print the bytes that one call adds to the peak memory of this process."""
    run = build_runs(length)[name]
    before = read_peak()
    run()
    print(read_peak() - before)


def read_peak() -> int:
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])


def measure_peak(name: str, length: int) -> int:
    """Return the bytes that one call adds to the peak memory of a new process."""
    code = f"import interventions; interventions.print_peak({name!r}, {length})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=sys.path[0]
    )
    return int(done.stdout)


def time_sweep(length: int, width: int, vocabulary: int) -> tuple[float, float]:
    """Return the seconds of `effects` over all heads, and of as many plain forward passes."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=width, n_layer=12, n_head=12, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2
    )
    model = hf.GPT2LMHeadModel._from_config(config).eval()
    tokens = torch.randint(vocabulary, (1, length))
    metric = logit_difference(3, 4)

    @torch.no_grad()
    def plain() -> None:
        for _ in range(12):
            metric(model(tokens))

    runs = {"plain": plain, "sweep": lambda: effects(model, tokens, metric)}
    seconds = time_rounds(runs, 1)
    return seconds["sweep"], 12 * seconds["plain"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--peak", type=int, default=0, help="measure peak memory at this length, too")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}")
    for length in options.lengths:
        runs = build_runs(length)
        if length <= 8192:
            runs["eager"] = build_eager(length)
        seconds = time_rounds(runs, options.rounds)
        for name, value in seconds.items():
            eager = f", {value / seconds['eager']:.3f} of eager" if "eager" in seconds else ""
            print(
                f"{length:6} {name:6} {value:7.2f} s, {value / seconds['bare']:.3f} × bare{eager}", flush=True
            )
    if options.peak:
        for name in ("bare", "keys"):
            print(
                f"{options.peak:6} {name:6} peak {measure_peak(name, options.peak) / 1e6:,.0f} MB", flush=True
            )
        print(f"{options.peak:6} one n² matrix of 8 heads {4 * 8 * options.peak**2 / 1e6:,.0f} MB")
    if options.sweep:
        for length, width, vocabulary in ((16, 768, 50_257), (64, 384, 5_000), (256, 384, 5_000)):
            sweep, plain = time_sweep(length, width, vocabulary)
            print(
                f"sweep of 144 heads, {length} tokens, width {width}: {sweep:.1f} s, {sweep / plain:.3f} of 144 passes"
            )


if __name__ == "__main__":
    main()
