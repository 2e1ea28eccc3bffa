"""Measure what `regard.monitor` costs: a plain and a monitored training step of a 4-layer Llama, alternated.

python benchmarks/monitor.py [--tokens 1024] [--repeats 7]

A monitored step includes entering and leaving the watch. Prints JSON: medians, their ratio, and the computed share at
every=50.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regard.monitor import Monitor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(4096, (options.batch, options.tokens))

    def run_step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    run_step()
    times: dict[str, list[float]] = {"plain": [], "monitored": []}
    for repeat in range(options.repeats + 1):
        for name in times:
            start = time.perf_counter()
            if name == "monitored":
                monitor = Monitor(model, every=10**9, alarms=())
                with monitor:
                    run_step()
                assert len(monitor.history) == 4 * 8
            else:
                run_step()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(m / p for p, m in zip(times["plain"], times["monitored"], strict=True))
    print(
        json.dumps(
            {
                "tokens": options.tokens,
                "threads": torch.get_num_threads(),
                "seconds": {name: round(value, 4) for name, value in medians.items()},
                "ratio": round(ratio, 3),
                "share_at_every_50": round((ratio - 1) / 50, 5),
            }
        )
    )


if __name__ == "__main__":
    main()
