"""Measure what `regard.monitor` costs in training steps of a 4-layer Llama, in logging, and in memory.

python benchmarks/monitor.py [--tokens 1024 8192] [--rounds 7] [--compile both]
python benchmarks/monitor.py --logging

The first form alternates, in one process, a step without a monitor ("plain"), a step between monitored steps
("attached"), and a monitored step, and prints medians and quartiles of the ratios to the plain step, in processor time
of all threads and in elapsed time. The second form measures the monitor's own work for 80 layers × 64 heads: processor
time of a monitored step without the model's, and the memory after 10,000 monitored steps. Both print JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regard.monitor import Monitor

LAYERS, HEADS = 80, 64


def measure_steps(tokens: int, rounds: int, is_compiled: bool) -> dict[str, Any]:
    """Measure the steps of one length."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(tokens, 2048),
    )
    model = LlamaForCausalLM(config)
    if is_compiled:
        model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batch = torch.randint(4096, (1, tokens))

    def run_step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def measure(monitor: Monitor | None = None) -> tuple[float, float]:
        processor, elapsed = time.process_time(), time.perf_counter()
        if monitor is not None:
            monitor.attach()
        run_step()
        return time.process_time() - processor, time.perf_counter() - elapsed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "attached": [], "monitored": []}
        for number in range(rounds + 1):
            monitor = Monitor(model, every=10**9, alarms=())
            plain, monitored, attached = measure(), measure(monitor), measure(monitor)
            assert monitor.num_steps == 2 and len(monitor.history) == 4 * 8
            monitor.detach()
            if number:  # the first round compiles and warms up
                for name, value in (("plain", plain), ("monitored", monitored), ("attached", attached)):
                    seconds[name].append(value)
    result: dict[str, Any] = {"tokens": tokens, "compiled": is_compiled, "threads": torch.get_num_threads()}
    for i, clock in enumerate(("processor", "elapsed")):
        columns = {name: [value[i] for value in values] for name, values in seconds.items()}
        result[f"{clock} seconds"] = {
            name: round(statistics.median(values), 3) for name, values in columns.items()
        }
        for name in ("monitored", "attached"):
            ratios = [value / plain for value, plain in zip(columns[name], columns["plain"], strict=True)]
            result[f"{name} / plain, {clock}"] = [
                round(float(x), 3) for x in np.quantile(ratios, (0.25, 0.5, 0.75))
            ]
    return result


def measure_logging(steps: int) -> dict[str, Any]:
    """Measure the work of a monitor beside the model's, for many heads."""
    from torch.utils.tensorboard import SummaryWriter

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
    x = torch.randn(1, HEADS, 4, 2)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        monitor = Monitor(model, every=1, to=[writer], optimizer=None).attach()
        seconds, threads = [], []
        for number in range(6):
            model(x)
            start, own = time.process_time(), time.thread_time()
            monitor.step()
            monitor.state_dict()  # waits for the loggers
            if number:
                seconds.append(time.process_time() - start)
                threads.append(time.thread_time() - own)
        monitor.detach()
    monitor = Monitor(model, every=1, optimizer=None).attach()
    model(x)
    table = monitor._table
    monitor.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    for _ in range(steps):
        monitor._table = table  # the numbers of the first step; the model does not run
        monitor.step()
    return {
        "layers": LAYERS,
        "heads": HEADS,
        "seconds of a step's logging, all threads": round(statistics.median(seconds), 4),
        "seconds of a step's logging, training thread": round(statistics.median(threads), 4),
        "monitored steps": steps,
        "seconds per step without loggers": round((time.process_time() - start) / steps, 5),
        "MB added": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
        "steps in the history": len(monitor.history.steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--logging", action="store_true")
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    if options.logging:
        print(json.dumps(measure_logging(options.steps)))
        return
    for is_compiled in {"yes": [True], "no": [False], "both": [False, True]}[options.compile]:
        for tokens in options.tokens:
            print(json.dumps(measure_steps(tokens, options.rounds, is_compiled)), flush=True)


if __name__ == "__main__":
    main()
