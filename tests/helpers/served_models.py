"""Tiny models that vLLM serves, with sharpened weights, and what transformers computes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=64),  # a window in every layer
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, **MIXED, query_pre_attn_scalar=32),
    "gemma2": lambda: hf.Gemma2Config(
        **SIZES, **MIXED, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=None
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **SIZES,
        layer_types=["full_attention"] * 2,
        num_kv_shared_layers=1,  # the second layer reads the cache of the first
        global_head_dim=32,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=1000,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**SIZES, **MIXED, num_local_experts=4, num_experts_per_tok=2),
    "opt": lambda: hf.OPTConfig(
        hidden_size=256,
        ffn_dim=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=1000,
        max_position_embeddings=1024,
        word_embed_proj_dim=256,
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=1000, hidden_size=256, n_layer=2, n_head=8),  # ALiBi
}


def save_model(name: str, folder: Path) -> Path:
    """Save a model of random weights, unless the folder has it."""
    path = folder / name
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]())
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Sharper weights: uniform ones would hide many faults. The GELU of vLLM's BLOOM differs from that of
                # transformers, which sharper weights in the next layer amplify.
                if parameter.dim() == 2 and any(
                    part in parameter_name for part in ("q_proj", "k_proj", "query_key_value")
                ):
                    parameter.mul_(2 if name == "bloom" else 4)
                if "sinks" in parameter_name:
                    parameter.copy_(torch.randn_like(parameter))
        model.float().save_pretrained(path)
        _save_tokenizer(path)
    return path


def _save_tokenizer(path: Path) -> None:
    """Save a tokenizer whose tokens are the words w3 … w999."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 1000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(path)


def compute_weights(path: Path, tokens: list[int], dtype: str = "float32") -> list[torch.Tensor]:
    """Return the eager weights of transformers for each layer, (heads, tokens, tokens).

    Args:
        path: Folder of the model.
        tokens: Tokens of the sequence.
        dtype: "float32", "bfloat16", or "exact" for float64 with the weights of the bfloat16 model.
    """
    half = torch.float32 if dtype == "float32" else torch.bfloat16
    options = {"experts_implementation": "eager"} if dtype == "exact" and "gpt_oss" in path.name else {}
    model = hf.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=half, **options
    ).eval()
    model = model.double() if dtype == "exact" else model
    with torch.no_grad():
        outputs = model(torch.tensor([tokens]), output_attentions=True)
    return [weights[0].double() for weights in outputs.attentions]
