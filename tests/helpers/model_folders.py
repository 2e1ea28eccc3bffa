"""Small models and tokenizers saved to disk: config.json, model.safetensors, the tokenizer's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf


def build_llama(**options: Any) -> Any:
    """Build a small decoder with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | options))


def build_byte_tokenizer() -> Any:
    """Build a byte-level tokenizer of transformers without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend)


def save_llama(path: Path, **options: Any) -> Path:
    """Save a decoder and its tokenizer to a folder, and return the folder."""
    build_llama(**options).save_pretrained(path)
    build_byte_tokenizer().save_pretrained(path)
    return path
