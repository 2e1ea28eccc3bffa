"""Policies for tiny models, and runs of a model with a policy as masks and with its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import regard
import regard.transformers  # registers the implementation
from regard.policy import FULL, CachePolicy
from tests.helpers.tiny_models import TINY

WINDOWS, SINKS = (FULL, 1, 2, 3, 5, 8), (0, 1, 2, 4)


def build_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Build a tiny model that computes every softmax in its own dtype."""
    return TINY[name].build("regard", dtype)


def make_policy(model: Any, windows: Any = None, sinks: Any = 0, seed: int = 0) -> CachePolicy:
    """Make a policy for a model; windows and sinks are random by default, or broadcast to its heads."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = [
        name for name, module in model.named_modules() if hasattr(module, "layer_idx") and "attn" in name
    ]
    layers = [name for name in layers if not any(other.startswith(f"{name}.") for other in layers)]
    shape = (len(layers), kv_heads)
    random = np.random.default_rng(seed)
    if windows is None:
        windows, sinks = random.choice(WINDOWS, shape), random.choice(SINKS, shape)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    about = {"num_heads": heads, "head_dim": head_dim, "bytes_per_number": model.dtype.itemsize}
    return CachePolicy(np.broadcast_to(windows, shape), np.broadcast_to(sinks, shape), layers, about)


def run_masked(model: Any, policy: CachePolicy, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a run without a cache, with the policy as masks."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("regard")
    with torch.no_grad(), regard.intervene(model, policy.edits()):
        logits = model(tokens, use_cache=False).logits
    model.set_attn_implementation(implementation)
    return logits


def run_cached(
    model: Any, cache: Any, tokens: torch.Tensor, chunks: Sequence[int], **options: Any
) -> torch.Tensor:
    """Return the logits of a run in chunks of some sizes."""
    logits, end = [], cache.get_seq_length()
    begin = end
    with torch.no_grad():
        for size in chunks:
            part = slice(end - begin, end - begin + size)
            end += size
            given = {name: value[:, :end] for name, value in options.items() if name == "attention_mask"}
            given |= {name: value[:, part] for name, value in options.items() if name != "attention_mask"}
            logits.append(model(tokens[:, part], past_key_values=cache, **given).logits)
    return torch.cat(logits, 1)


def draw_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Draw random tokens."""
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))
