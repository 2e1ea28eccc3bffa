"""The cost of a run under a cache policy, applied as masks, relative to the plain forward pass.

    python benchmarks/policy.py [--tokens 2048] [--rounds 7]

A Llama of 4 layers with random weights runs with and without the policy in turn. Two policies: every head has a window
of 256 keys and 4 sinks, and half of the heads have one.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.policy import FULL, CachePolicy
from regard.policy.masking import build_edits
from regard.render.table import format_seconds, format_table

LAYERS, HEADS, KV_HEADS, WIDTH, HIDDEN, VOCABULARY = 4, 8, 4, 512, 1536, 8192


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 17,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def build_policies(window: int, sinks: int) -> dict[str, CachePolicy]:
    names = tuple(f"model.layers.{layer}.self_attn" for layer in range(LAYERS))
    every = np.full((LAYERS, KV_HEADS), window)
    half = np.where(np.arange(KV_HEADS) % 2, window, FULL) * np.ones((LAYERS, 1), int)
    about = {"num_heads": HEADS}
    return {
        name: CachePolicy(windows, np.full(windows.shape, sinks), names, about)
        for name, windows in (("every head", every), ("every second head", half))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = build_model()
    ids = torch.randint(VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    policies = build_policies(options.window, options.sinks)
    times: dict[str, list[float]] = {"plain": [], **{name: [] for name in policies}}
    with torch.no_grad():
        for round_number in range(options.rounds + 1):
            for name, own in times.items():
                edits = build_edits(policies[name]) if name in policies else []
                start = time.process_time()
                if edits:
                    with regard.intervene(model, edits):
                        model(ids, use_cache=False)
                else:
                    model(ids, use_cache=False)
                if round_number:  # the first round warms up
                    own.append(time.process_time() - start)
    medians = {name: statistics.median(own) for name, own in times.items()}
    rows = [
        [
            name,
            format_seconds(median),
            f"{median / medians['plain']:.2f}",
            f"{min(times[name]) / min(times['plain']):.2f}",
        ]
        for name, median in medians.items()
    ]
    print(
        format_table(
            rows, ["policy", "median", "ratio", "ratio of the fastest"], align=["left"] + ["right"] * 3
        )
    )


if __name__ == "__main__":
    main()
