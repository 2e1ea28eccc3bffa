"""Measure `regard look` on a long text in its own process: time, peak memory, and the size of the page.

python benchmarks/look.py [--tokens 32768] [--layers 2] [--window 4096]

The model is a Llama, or with --window a Mistral, with random weights and 4 heads of 64 in each layer, saved to disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data import topics

import tokenizers
import torch
import transformers as hf

from regard.render.table import format_bytes


def save_model(folder: Path, tokens: int, layers: int, window: int | None) -> None:
    """Save a decoder and a byte-level tokenizer."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"num_hidden_layers": layers, "vocab_size": 32_000, "max_position_embeddings": tokens}
    if window is None:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    else:
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=window))
    model.save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    hf.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--window", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", options.tokens, options.layers, options.window)
        (folder / "text.txt").write_text("\n".join(topics.topics.values())[: options.tokens])
        command = [sys.executable, "-m", "regard", "look", folder / "model", "--file", folder / "text.txt"]
        command += ["-o", folder / "page.html", "--max-tokens", options.tokens, "--json"]
        start = time.perf_counter()
        result = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - start
        record = json.loads(result.stdout)
    # The peak of the one child; Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(
        f"{record['tokens']:,} tokens, {record['layers']} layers: {seconds:.0f} s, of which the model "
        f"{record['seconds']:.0f} s; peak {format_bytes(peak)}; a page of {format_bytes(record['bytes'])}"
    )


if __name__ == "__main__":
    main()
