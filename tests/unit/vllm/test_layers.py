"""Which layers and engines are measured, and that others are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.vllm.layers import UnsupportedEngineError, find_layers
from regard.vllm.settings import Settings
from regard.vllm.worker import check_engine
from tests.helpers.served_stand_in import BLOCK, DIM, KV_HEADS, FullAttentionSpec, StandIn


def build_modules() -> tuple[dict[str, Any], SimpleNamespace]:
    """Build two layers, and the description of their caches."""
    modules = StandIn(Settings(), [{}, {}]).modules
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=FullAttentionSpec(block_size=BLOCK))
        for name in modules
    ]
    return modules, SimpleNamespace(num_blocks=40, kv_cache_groups=groups)


def test_a_layer_that_shares_a_cache_is_measured_with_the_blocks_of_its_owner() -> None:
    modules, caches = build_modules()
    owner = modules["layers.1.attn"]
    # vLLM adds the layer to the groups of the runner only.
    modules["layers.2.attn"] = SimpleNamespace(
        **vars(owner) | {"layer_name": "layers.2.attn", "kv_sharing_target_layer_name": "layers.1.attn"}
    )
    layers, refused = find_layers(modules, caches)
    assert not refused and [layer.group for layer in layers] == [0, 1, 1]
    keys = torch.randn(3, KV_HEADS, DIM)
    owner.impl.do_kv_cache_update(owner, keys, keys, owner.kv_cache, torch.arange(BLOCK, BLOCK + 3))
    assert torch.equal(layers[2].cache.read([1], 0, 3), keys.transpose(0, 1))


class TritonMLAImpl:
    """vLLM's class of this name."""


class MambaSpec(SimpleNamespace):
    """vLLM's class of this name."""


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"impl": TritonMLAImpl()}, "multi-head latent attention"),
        ({"kv_cache": torch.zeros(40, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.uint8)}, "quantised cache"),
        ({"calculate_kv_scales": True}, "quantised cache"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
        ({"use_alibi_sqrt": True}, "square roots"),
        ({"use_mm_prefix": True}, "bidirectional attention"),
        ({"spec": MambaSpec(block_size=BLOCK)}, "MambaSpec"),
        ({"spec": FullAttentionSpec(block_size=BLOCK, attention_chunk_size=4)}, "chunks"),
        ({"kv_cache": torch.zeros(7)}, "cannot be read"),
    ],
)
def test_a_layer_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    modules, caches = build_modules()
    if "spec" in changes:
        caches.kv_cache_groups[1].kv_cache_spec = changes.pop("spec")
    vars(modules["layers.1.attn"]).update(changes)
    layers, refused = find_layers(modules, caches)
    assert [layer.name for layer in layers] == ["layers.0.attn"]
    assert list(refused) == ["layers.1.attn"] and reason in refused["layers.1.attn"]


@pytest.mark.parametrize(
    "part,changes,reason",
    [
        (None, {"speculative_config": object()}, "speculative decoding"),
        ("model_config", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("model_config", {"runner_type": "pooling"}, "pooling"),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ("parallel_config", {"use_ubatching": True}, "micro-batches"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
        ("device_config", {"device_type": "cuda"}, "PIECEWISE"),
    ],
)
def test_an_engine_that_is_not_supported_is_refused_by_name(
    part: str | None, changes: dict[str, Any], reason: str
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(is_encoder_decoder=False, runner_type="generate"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        speculative_config=None,
    )
    check_engine(config)
    vars(config if part is None else getattr(config, part)).update(changes)
    with pytest.raises(UnsupportedEngineError, match=reason):
        check_engine(config)
