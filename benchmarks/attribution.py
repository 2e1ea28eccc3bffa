"""Peak memory and CPU time of `interventions.attribution`, beside a bare backward pass and eager autograd.

    python benchmarks/attribution.py [tokens …]     by default 4096 32768

Each way runs in a process of its own. Eager autograd stores the weights, and is left out above 8,192 tokens.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

MAX_EAGER = 8192


def measure(way: str, tokens: int) -> None:
    """Run one way and print its row.

    Args:
        way: "attribution", "backward" or "eager".
        tokens: Length of the sequence.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from regard.interventions import attribution, logit_difference
    from regard.interventions.gradient_attribution import require_input_gradients

    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    implementation = "eager" if way == "eager" else "sdpa"
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
    metric, ids = logit_difference(3, 5), torch.randint(256, (1, tokens))

    def run(ids: torch.Tensor) -> None:
        if way == "attribution":
            attribution(model, ids, metric)
            return
        with require_input_gradients(model):
            output = model(ids, use_cache=False, logits_to_keep=1, output_attentions=way == "eager")
            wanted = output.attentions if way == "eager" else [model.model.embed_tokens.weight]
            torch.autograd.grad(metric(output).mean(), wanted)

    def peak() -> float:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

    run(ids[:, :128])
    before, start = peak(), time.process_time()
    run(ids)
    print(f"{way:12}{tokens:9,}{peak() - before:14,.0f}{time.process_time() - start:10.1f}", flush=True)


def main() -> None:
    """Measure the lengths of the command line, each way in its own process."""
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2], int(sys.argv[3]))
        return
    print("way            tokens   peak, MiB    CPU s")
    for tokens in map(int, sys.argv[1:] or ("4096", "32768")):
        for way in ("attribution", "backward", *(("eager",) if tokens <= MAX_EAGER else ())):
            subprocess.run([sys.executable, __file__, "--one", way, str(tokens)], check=True)


if __name__ == "__main__":
    main()
