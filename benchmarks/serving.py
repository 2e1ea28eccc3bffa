"""What measuring costs a vLLM server: processor seconds per request of a fixed load, beside the bare engine.

    python benchmarks/serving.py MODEL [--rounds 9]

It needs the environment of requirements/vllm.txt. One engine runs the load (64 requests of 100 tokens, 8 at a time, 16
tokens each) in turn with the plugin's functions taken off, at rate 0, at 0.01 and at 1. The numbers are processor
seconds of the process, which is worker and scheduler in one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import tempfile
import time
import tracemalloc
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

RATES = (None, 0.0, 0.01, 1.0)  # None: without the plugin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    llm = LLM(
        model=arguments.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,
        additional_config={"regard": {"folder": folder}},
    )
    core = llm.llm_engine.engine_core.engine_core
    wrapper, scheduler = core.model_executor.driver_worker, core.scheduler
    measurements: Any = wrapper.regard_records.__self__
    hooks = {
        owner: {name: vars(owner)[name] for name in names}
        for owner, names in ((wrapper, ["execute_model"]), (scheduler, ["schedule", "_free_request"]))
    }
    draw = random.Random(0)
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)

    def run_load(rate: float | None) -> tuple[float, float]:
        for owner, functions in hooks.items():
            for name, function in functions.items():
                vars(owner).pop(name, None)
                if rate is not None:
                    setattr(owner, name, function)
        measurements.settings = dataclasses.replace(measurements.settings, rate=rate or 0.0)
        prompts = [{"prompt_token_ids": [draw.randint(3, 999) for _ in range(100)]} for _ in range(64)]
        wall, processor = time.perf_counter(), time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        if rate is not None:  # the last requests end in the next step
            llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1, extra_args={"regard": False}),
                         use_tqdm=False)  # fmt: skip
        return (time.process_time() - processor) / 64, (time.perf_counter() - wall) / 64

    for rate in (1.0, *RATES):
        run_load(rate)
    results = {rate: [] for rate in RATES}
    for _ in range(arguments.rounds):
        for rate in RATES:
            results[rate].append(run_load(rate))
    for rate in RATES:
        ratios = [own[0] / bare[0] for own, bare in zip(results[rate], results[None], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        name = "bare" if rate is None else f"rate {rate:g}"
        seconds = statistics.median(own[0] for own in results[rate])
        per_second = 1 / statistics.median(own[1] for own in results[rate])
        print(
            f"{name:<10} {1e3 * seconds:6.1f} ms of processor time per request, {per_second:5.1f} requests/s, "
            f"ratio {middle:.3f} ({low:.3f} … {high:.3f})"
        )
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    run_load(1.0)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    print(f"{peak / 8 / 1e6:.2f} MB of Python and NumPy objects per request that is measured at a time")
    print(measurements.counts | measurements.delivery.counts)


if __name__ == "__main__":
    main()
