"""Small models of GPT-2's and of Llama's shape, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

FAMILIES = ["gpt2", "llama"]
SIZES = {
    "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def build(family: str, implementation: str = "sdpa", **sizes: Any) -> Any:
    """Build a model; equal arguments have equal weights."""
    torch.manual_seed(0)
    sizes = {**SIZES, **sizes}
    if family == "gpt2":
        model = hf.GPT2LMHeadModel._from_config(hf.GPT2Config(**sizes), attn_implementation=implementation)
    else:
        config = hf.LlamaConfig(**{"num_key_value_heads": 2, **sizes})
        model = hf.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if (
                "ln_" in name or "norm" in name or "bias" in name
            ):  # gains of 1 and biases of 0 would hide mistakes
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.2)
    return model.eval()


def draw_tokens(seed: int, length: int = 30, batch: int = 2) -> torch.Tensor:
    """Draw token ids, (batch, length)."""
    return torch.randint(3, 200, (batch, length), generator=torch.Generator().manual_seed(seed))
