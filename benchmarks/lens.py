"""A model watched beside the same model unwatched: sides alternated, medians, spread.

python benchmarks/lens.py [--rounds 5] [--only words] [--eager]

A Llama of four layers, hidden 512, 8 heads over 2, random weights, 8,192 tokens. `--eager` adds
`output_attentions=True`, which takes about 11 GB there. Memory is the peak above what was held before, for one call.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from run import HEADINGS, Duel, alternate, told  # beside this file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import regard

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536}


def made(kind: type, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind._from_config(LlamaConfig(**SIZES, **HEADS), attn_implementation=implementation).eval()


def watched(
    model: torch.nn.Module, tokens: torch.Tensor, ask: Callable[[regard.lens.Recording], object]
) -> object:
    with torch.no_grad(), regard.watch(model) as recording:
        model(tokens)
    return ask(recording)


def ways(tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is run, by name, on a model of its own."""
    model = made(LlamaModel, "sdpa")

    @torch.no_grad()
    def bare() -> object:
        return model(tokens)

    @torch.no_grad()
    def eager() -> object:
        return made(LlamaModel, "eager")(tokens, output_attentions=True).attentions[0].shape

    return {
        "bare": bare,
        "watched": lambda: watched(model, tokens, len),
        "heads": lambda: watched(model, tokens, lambda recording: recording.heads()),
        "heads with tokens": lambda: watched(model, tokens, lambda recording: recording.heads(tokens)),
        "eager": eager,
    }


def peak(name: str, length: int) -> int:
    """Bytes that one call adds to the most that a fresh process has held."""
    code = f"import lens; lens.weigh({name!r}, {length})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=sys.path[0]
    )
    return int(done.stdout)


def weigh(name: str, length: int) -> None:
    """Print it, from within that process."""
    run = ways(torch.randint(1000, (1, length)))[name]
    before = held()
    run()
    print(held() - before)


def held() -> int:
    """The most bytes this process has held; `ru_maxrss` would be at least its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def generating() -> Duel:
    model, prompt = made(LlamaForCausalLM, "sdpa"), torch.randint(1000, (1, 32))
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "pad_token_id": 0}

    def ours() -> object:
        with regard.watch(model):
            return model.generate(prompt, **options)

    return Duel("generate 256 tokens", lambda: model.generate(prompt, **options), ours, "1.1×")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only the rows whose name has these words")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    tokens = torch.randint(1000, (1, options.length))
    ran = ways(tokens)
    duels = [
        Duel("watched", ran["bare"], ran["watched"], "1.05×"),
        Duel("watched, every head measured", ran["bare"], ran["heads"], "2×"),
        Duel("watched, measured with tokens", ran["bare"], ran["heads with tokens"], "2×"),
        generating(),
    ]
    print(f"{HEADINGS}  asked for")
    for duel in duels:
        if options.only in duel.name:
            row = alternate(duel, options.rounds)
            print(f"{told(row)}  {row['limit']}", flush=True)
    if options.eager:
        start = time.perf_counter()
        ran["heads with tokens"]()
        middle = time.perf_counter()
        ran["eager"]()
        end = time.perf_counter()
        print(
            f"against output_attentions=True: {(end - middle) / (middle - start):.1f} times as fast, asked 4"
        )
        bare, ours, eager = (peak(name, options.length) for name in ("bare", "heads with tokens", "eager"))
        share = (ours - bare) / (eager - bare)
        print(
            f"memory above the bare call: {ours - bare:,} of {eager - bare:,} bytes, {share:.1%}, asked 15%"
        )


if __name__ == "__main__":
    main()
