"""Models as they lie on disk: config.json, model.safetensors, the tokenizer's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf


def llama(**options: Any) -> Any:
    """A small decoder with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | options))


def byte_level() -> Any:
    """A tokenizer of transformers that knows bytes and nothing else."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


def save_llama(path: Path, **options: Any) -> Path:
    """A decoder and its tokenizer, written to a folder."""
    llama(**options).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path
