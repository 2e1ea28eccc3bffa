"""`MeasuredLayer`: what an attention layer of vLLM computes, and where its keys are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regard.vllm.paged_cache import PagedCache, UnreadableCacheError

__all__ = ["MeasuredLayer", "UnsupportedEngineError", "find_layers"]

# Kinds of caches that hold every key of the rows that are measured.
CACHE_KINDS = ("FullAttentionSpec", "SlidingWindowSpec")


class UnsupportedEngineError(Exception):
    """No layer of an engine can be measured; the message names the reasons."""


@dataclass(frozen=True, eq=False)
class MeasuredLayer:
    """One attention layer of this worker.

    Args:
        name: Name of the layer in vLLM.
        implementation: The layer's `AttentionImpl`, whose `forward` receives the queries.
        cache: Reader of its keys.
        group: Number of its group of caches, which counts the blocks of a request.
        block_size: Tokens of a block of the group.
        heads: Query heads on this rank.
        kv_heads: Key heads on this rank.
        head_dim: Width of a query.
        window: Number of keys that a query attends to, with its own; None for all.
    """

    name: str
    implementation: Any
    cache: PagedCache
    group: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    @property
    def scale(self) -> float:
        """Factor of the products of query and key."""
        return float(self.implementation.scale)

    @property
    def softcap(self) -> float:
        """Cap of the scores; 0 for none."""
        return float(getattr(self.implementation, "logits_soft_cap", None) or 0.0)

    @property
    def slopes(self) -> torch.Tensor | None:
        """ALiBi slopes of the heads, (heads,)."""
        return self._as_tensor("alibi_slopes")

    @property
    def sinks(self) -> torch.Tensor | None:
        """Scores of the sinks, (heads,)."""
        return self._as_tensor("sinks")

    def _as_tensor(self, name: str) -> torch.Tensor | None:
        values = getattr(self.implementation, name, None)
        return None if values is None else torch.as_tensor(values, dtype=torch.float32)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What layers must share to be measured in one call."""
        parts = (self.group, self.heads, self.kv_heads, self.head_dim, self.window, self.scale, self.softcap)
        return (*parts, self.slopes is None, self.sinks is None)


def find_layers(
    modules: Mapping[str, Any], kv_cache_config: Any
) -> tuple[list[MeasuredLayer], dict[str, str]]:
    """Find the attention layers of a worker, and verify that their caches can be read.

    Args:
        modules: The worker's layers by name, `static_forward_context`.
        kv_cache_config: The worker's `KVCacheConfig`.

    Returns:
        The layers in the order of the model, and why each other layer is not measured.
    """
    layers, refused = [], {}
    specs = {
        name: (group, getattr(entry.kv_cache_spec, "kv_cache_specs", {}).get(name, entry.kv_cache_spec))
        for group, entry in enumerate(kv_cache_config.kv_cache_groups)
        for name in entry.layer_names
    }
    for name, module in modules.items():
        if not hasattr(module, "impl"):
            continue
        owner = getattr(module, "kv_sharing_target_layer_name", None) or name  # of the cache
        group, spec = specs.get(owner, (0, None))
        reason = _find_reason(module, spec)
        if not reason:
            try:
                cache = _read_cache(module, modules[owner], spec, kv_cache_config.num_blocks)
            except UnreadableCacheError as error:
                reason = f"its cache cannot be read: {error}"
        if reason:
            refused[name] = reason
            continue
        window = getattr(module, "sliding_window", None)
        layers.append(
            MeasuredLayer(
                name,
                module.impl,
                cache,
                group,
                spec.block_size,
                module.num_heads,
                module.num_kv_heads,
                module.head_size,
                None if window is None or window <= 0 else int(window),
            )
        )
    return layers, refused


def _find_reason(module: Any, spec: Any) -> str:
    """Return why a layer cannot be measured; empty if it can."""
    implementation = type(module.impl).__name__
    if "MLA" in implementation or "MLA" in type(spec).__name__:
        return "multi-head latent attention stores no keys"
    kind = getattr(module, "attn_type", "decoder")
    if kind != "decoder":
        return f"{kind} attention is not supported"
    if type(spec).__name__ not in CACHE_KINDS:
        return f"a cache of kind {type(spec).__name__} is not supported"
    if getattr(spec, "attention_chunk_size", None):
        return "attention in chunks is not supported"
    if getattr(module, "use_alibi_sqrt", False):
        return "ALiBi with square roots is not supported"
    if getattr(module, "use_mm_prefix", False):
        return "bidirectional attention over images is not supported"
    if getattr(module, "calculate_kv_scales", False) or not _is_plain(module.kv_cache):
        return f"a quantised cache ({getattr(module, 'kv_cache_dtype', 'unknown dtype')}) is not supported"
    if not hasattr(module.impl, "do_kv_cache_update"):
        return f"{implementation} has no function that writes its cache"
    return ""


def _is_plain(cache: Any) -> bool:
    return isinstance(cache, torch.Tensor) and cache.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _read_cache(module: Any, owner: Any, spec: Any, num_blocks: int) -> PagedCache:
    """Build the reader of a layer's cache, which the layer `owner` writes."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        owner.impl.do_kv_cache_update(owner, keys, values, owner.kv_cache, slots)

    return PagedCache(
        module.kv_cache,
        write,
        num_blocks=num_blocks,
        block_size=spec.block_size,
        kv_heads=module.num_kv_heads,
        head_dim=module.head_size,
        value_dim=getattr(module, "head_size_v", None) or module.head_size,
    )
