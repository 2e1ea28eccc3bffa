"""Measure the cache of a policy: bytes against the prediction, and times against a plain cache, as ratios.

python benchmarks/policy_cache.py [--length 8192] [--chunk 1024] [--steps 16] [--rounds 3]

A Llama of four layers, hidden 512, 8 heads over 8 kv heads, random weights. Half of the kv heads keep every token, the
others 4 sinks and a window of 128 to 1,024. "full" keeps every token in every head. Times are those of the process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np
import torch
import transformers as hf

from regard.policy import FULL, CachePolicy

SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "vocab_size": 1000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 65_536}


def build_model() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM._from_config(
        hf.LlamaConfig(**SIZES, **HEADS), attn_implementation="sdpa"
    ).eval()


def make_policy(model: Any) -> CachePolicy:
    windows = np.random.default_rng(0).choice([128, 256, 512, 1024], (4, 8))
    windows[:, ::2] = FULL
    layers = [f"model.layers.{layer}.self_attn" for layer in range(4)]
    about = {"num_heads": 8, "head_dim": 64, "bytes_per_number": model.dtype.itemsize}
    return CachePolicy(windows, np.where(windows == FULL, 0, 4), layers, about)


def count_live_bytes() -> int:
    """Count the bytes of all tensors that are alive, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


@torch.no_grad()
def run(model: Any, cache: Any, tokens: torch.Tensor, chunk: int, steps: int) -> tuple[float, float]:
    """Return the seconds of the prompt, in chunks, and of one step after it."""
    length = tokens.shape[1] - steps
    begin = time.process_time()
    for start in range(0, length, chunk):
        model(tokens[:, start : min(start + chunk, length)], past_key_values=cache, logits_to_keep=1)
    prompt = time.process_time() - begin
    times = []
    for step in range(length, tokens.shape[1]):
        begin = time.process_time()
        model(tokens[:, step : step + 1], past_key_values=cache)
        times.append(time.process_time() - begin)
    return prompt, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = build_model()
    policy, full = (
        make_policy(model),
        CachePolicy(np.full((4, 8), FULL), np.zeros((4, 8), int), ["a", "b", "c", "d"]),
    )
    tokens = torch.randint(1000, (1, arguments.length))
    prompts: dict[str, list[float]] = {"plain": [], "policy": [], "full": []}
    steps: dict[str, list[float]] = {name: [] for name in prompts}
    bytes_of: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for name in prompts:
            model.set_attn_implementation("sdpa")
            before = count_live_bytes()
            if name == "plain":
                cache: Any = hf.DynamicCache(config=model.config)
            else:
                cache = (policy if name == "policy" else full).cache(model)
            prompt, step = run(model, cache, tokens, arguments.chunk, arguments.steps)
            bytes_of[name] = count_live_bytes() - before
            prompts[name].append(prompt)
            steps[name].append(step)
            del cache
    predicted = policy.num_bytes(arguments.length)
    print(policy.summary(arguments.length))
    for name, found in bytes_of.items():
        against = f", {found / predicted:.4f} of the prediction" if name == "policy" else ""
        prompt_ratio = statistics.median(prompts[name]) / statistics.median(prompts["plain"])
        step_ratio = statistics.median(steps[name]) / statistics.median(steps["plain"])
        print(
            f"{name:6}  {found:>12,} bytes{against}; prompt {statistics.median(prompts[name]):.2f} s, "
            f"{prompt_ratio:.2f} of plain; step {1000 * statistics.median(steps[name]):.1f} ms, "
            f"{step_ratio:.2f} of plain"
        )


if __name__ == "__main__":
    main()
