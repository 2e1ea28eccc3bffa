"""Rescale heads of models of transformers, split between processes, and of the whole model in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

from regard.monitor import Monitor, qk_clip

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "GPT-2": ("GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Llama": ("Llama", {"num_key_value_heads": 2}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2,
        },
    ),
}  # fmt: skip
SPLIT = {"Llama": ("q_proj", "k_proj", "v_proj"), "DeepSeek-V3": ("q_b_proj", "kv_b_proj")}


def build(name: str) -> nn.Module:
    family, changes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, f"{family}Model")(getattr(hf, f"{family}Config")(**SIZES | changes)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, dtype=weight.dtype)
    return model.train()


def clip_in_one_process(name: str) -> tuple[list[Any], dict[str, Tensor], float]:
    """Clip all but two heads of the whole model, after one step on the whole batch."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, every=1, alarms=()) as monitor:
        model(draw_tokens()).last_hidden_state.square().mean().backward()
        optimizer.step()
        scores = sorted(monitor.last_rows.column("max_score"))
        tau = (scores[1] + scores[2]) / 2
        clipped = qk_clip(model, monitor, tau)
    return clipped, model.state_dict(), tau


def draw_tokens() -> Tensor:
    return torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))


def clip_part(world: Any, name: str, way: str, tau: float) -> dict[str, Any] | None:
    """Clip this process's part of the model; way is "heads", "data" or "both"."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data, heads = {"heads": (1, 2), "data": (2, 1), "both": (2, 2), "transformers": (1, 2)}[way]
    mesh = DeviceMesh("cpu", torch.arange(data * heads).view(data, heads), mesh_dim_names=("data", "heads"))
    group = dist.new_group(list(range(data * heads)))
    if dist.get_rank() >= data * heads:
        return None
    model = build(name)
    layers = model.h if name == "GPT-2" else model.layers
    if way == "transformers":
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh["heads"])
    elif heads > 1:
        plan = {f"self_attn.{part}": ColwiseParallel() for part in SPLIT[name]}
        for layer in layers:
            parallelize_module(layer, mesh["heads"], plan | {"self_attn.o_proj": RowwiseParallel()})
    if data > 1:
        for layer in layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Monitor(model, every=1, alarms=(), process_group=group) as monitor:
        tokens = draw_tokens().chunk(data)[mesh["data"].get_local_rank()]
        model(tokens).last_hidden_state.square().mean().backward()
        optimizer.step()
        clipped = qk_clip(model, monitor, tau)
    state = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }
    return {"clipped": clipped, "state": state}
