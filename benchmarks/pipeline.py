"""Time `attn_implementation="regard"`: the cost of a selection beside plain sdpa, and scripts at 32,768 tokens.

python benchmarks/pipeline.py [--rounds 5] [--only words] [--write]
python benchmarks/pipeline.py --scripts [--length 32768]

A Llama of four layers, hidden 512, 8 heads over 2, random weights. The table alternates both sides in one process.
`--scripts` runs the scripts of tests/helpers/attention_scripts.py, each in a new process, and prints its time, the peak
memory that it adds, and what the weights of eager attention would take.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lens import build_model, peak_memory  # beside this file
from run import HEADINGS, Comparison, format_row, make_record, time_alternating, write_table
from transformers import LlamaForCausalLM, LlamaModel

from regard.transformers import choose_layers

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers import attention_scripts as scripts

NEW_TOKENS = 16


def select_tokens(outputs: Any, length: int) -> object:
    """Select half of the image tokens after two layers: three quarters of the tokens are an image's."""
    count = 3 * length // 4
    return scripts.select_image_tokens(outputs, layer=2, first=32, count=count, keep=count // 2)


def list_comparisons(length: int) -> list[Comparison]:
    tokens = torch.randint(1000, (1, length))
    sdpa, regard, one_layer = (build_model(LlamaModel, name) for name in ("sdpa", "regard", "regard"))
    choose_layers(one_layer, 1)

    def select(model: torch.nn.Module) -> Callable[[], object]:
        return torch.no_grad()(lambda: select_tokens(model(tokens, output_attentions=True), length))

    bare = torch.no_grad()(lambda: sdpa(tokens))
    return [
        Comparison("regard, nothing requested", bare, torch.no_grad()(lambda: regard(tokens)), "1.05×"),
        Comparison("select image tokens", bare, select(regard), "1.05×"),
        Comparison("select, one layer chosen", bare, select(one_layer), "1.05×"),
        build_generation(),
    ]


def build_generation() -> Comparison:
    sdpa, regard = (build_model(LlamaForCausalLM, name) for name in ("sdpa", "regard"))
    prompt = torch.randint(1000, (1, 32))
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False, "pad_token_id": 0}
    recorded = {**options, "output_attentions": True, "return_dict_in_generate": True}
    return Comparison(
        "generate 256 tokens, recorded",
        lambda: sdpa.generate(prompt, **options),
        lambda: regard.generate(prompt, **recorded),
        "1.15×",
    )


SCRIPTS: dict[str, Callable[[Any, int], object]] = {
    "forward alone": lambda outputs, length: None,
    "mean over heads of the last row": lambda outputs, length: scripts.last_row_of_the_head_mean(outputs),
    "FastV's image tokens at layer 2": select_tokens,
    "attention to the first token": lambda outputs, length: scripts.attention_to_first_token(outputs),
    "attention that each token receives": lambda outputs, length: scripts.received_by_each_token(outputs),
    "generation of 16 tokens alone": lambda outputs, length: None,
    "lookback ratio of 16 new tokens": scripts.lookback_ratios,
}


def run_script(name: str, length: int, implementation: str) -> tuple[float, float, int]:
    """Run a model and a script; return the seconds of each, and the bytes that they add to the peak memory."""
    tokens = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    generates, records = "16" in name, implementation != "sdpa"
    model = build_model(LlamaForCausalLM if generates else LlamaModel, implementation)
    before, start = peak_memory(), time.perf_counter()
    with torch.no_grad():
        if generates:
            options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
            outputs = model.generate(
                tokens, **options, pad_token_id=0, output_attentions=records, return_dict_in_generate=True
            )
        else:
            outputs = model(tokens, output_attentions=records)
        middle = time.perf_counter()
        SCRIPTS[name](outputs, length)
    return middle - start, time.perf_counter() - middle, peak_memory() - before


def print_script(name: str, length: int) -> None:
    """Print the figures of one script, measured in this process."""
    implementation = "sdpa" if name.endswith("alone") else "regard"
    model, script, peak = run_script(name, length, implementation)
    print(f"{name:<36} {model:>8.1f} s {script:>8.1f} s {peak / 1e9:>8.2f} GB", flush=True)


def main() -> None:
    """Run the benchmarks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the rows whose name contains these words")
    parser.add_argument("--length", type=int, help="tokens; default: 8,192, and 32,768 with --scripts")
    parser.add_argument("--scripts", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the table into docs/speed.md")
    options = parser.parse_args()
    if options.scripts:
        length = options.length or 32_768
        print(
            f"{length:,} tokens; eager attention would store {4 * 8 * 4 * length**2 / 1e9:,.0f} GB of weights"
        )
        print(f"{'':<36} {'model':>10} {'script':>10} {'peak':>11}")
        for name in SCRIPTS:
            if options.only in name:
                code = f"import pipeline; pipeline.print_script({name!r}, {length})"
                subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
        return
    print(f"{HEADINGS}  limit")
    rows = []
    for comparison in list_comparisons(options.length or 8192):
        if options.only in comparison.name:
            rows.append(time_alternating(comparison, options.rounds))
            print(f"{format_row(rows[-1])}  {rows[-1]['limit']}", flush=True)
    if options.write:
        write_table(make_record(rows), "pipeline")


if __name__ == "__main__":
    main()
