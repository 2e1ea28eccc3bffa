"""Peak memory of a tool at some length, as one line: python -m tests.tools.long_context TOOL IMPLEMENTATION LENGTH.

A process for each: the peak of a process is never lower than before. It is read as VmHWM, because `ru_maxrss` of a
new process starts with the memory of the one that started it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import regard.transformers  # noqa: F401 - registers the implementation
from tests.tools.models import build, draw_tokens

GENERATED = 8  # tokens whose attention inseq attributes
# Eager attention of 8,192 tokens stores 256 MiB for each head, several times.
LONG_SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def build_for(implementation: str, length: int) -> Any:
    """Build a model that can read so many tokens."""
    sizes = LONG_SIZES if length > 1000 else {}
    return build("llama", implementation, max_position_embeddings=16384, **sizes)


class Words:
    """Words that are numbers, as a tokenizer of transformers reads them."""

    @staticmethod
    def build(size: int = 200) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, size)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
        return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def write_text(length: int) -> str:
    """Write a text of words of `Words`."""
    return " ".join(f"w{token}" for token in draw_tokens(1, length, 1)[0].tolist())


def press(implementation: str, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Compress a cache with the observed attention of kvpress; return the scores and the kept keys of each layer."""
    from kvpress import ObservedAttentionPress

    scores: list[torch.Tensor] = []

    class RecordedPress(ObservedAttentionPress):  # type: ignore[misc]
        def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            scores.append(super().score(*args, **kwargs))
            return scores[-1]

    model = build_for(implementation, length)
    cache = hf.DynamicCache()
    with torch.no_grad(), RecordedPress(compression_ratio=0.5)(model):
        model.model(draw_tokens(1, length, 1), past_key_values=cache)
    return scores, [layer.keys for layer in cache.layers]


def attribute(implementation: str, length: int) -> torch.Tensor:
    """Attribute generated tokens to the prompt by attention with inseq: (tokens, generated, layers, heads)."""
    import inseq

    model = build_for(implementation, length)
    model.config.name_or_path = "random"
    loaded = inseq.load_model(model, "attention", tokenizer=Words.build(), device="cpu")
    prompt = write_text(length - GENERATED)
    target = f"{prompt} {' '.join(['w7'] * GENERATED)}"
    found = loaded.attribute(prompt, target, show_progress=False)
    attributions: torch.Tensor = found.sequence_attributions[0].target_attributions
    return attributions


def read_peak() -> int:
    """Return the peak memory of this process in MiB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024


if __name__ == "__main__":
    tool, implementation, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = {"kvpress": press, "inseq": attribute}[tool]
    run(implementation, 64)  # imports and buffers
    before = read_peak()
    run(implementation, length)
    after = read_peak()
    above = after - before
    print(f"{tool}, {length:,} tokens: {implementation} peak {after} MiB, {above} MiB above a short run")
