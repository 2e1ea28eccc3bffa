"""Models whose ranks hold parts of the sequence, written as users write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import regard
from regard import causal, distributed
from regard.distributed.layouts import build_layout, split_evenly

WIDTH, HEADS = 16, 2


def split_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class GatheringAttention(nn.Module):
    """Collects the keys and values of all ranks, one rank after the other, and masks its own rows."""

    def __init__(self, group: Any, layout: str, as_dtensor: bool = False) -> None:
        super().__init__()
        self.qkv, self.group, self.layout, self.as_dtensor = (
            nn.Linear(WIDTH, 3 * WIDTH),
            group,
            layout,
            as_dtensor,
        )

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        if self.as_dtensor:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor import DTensor, Shard

            mesh = DeviceMesh.from_group(self.group, "cpu")
            return DTensor.from_local(x.contiguous(), mesh, [Shard(2)]).full_tensor()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = map(split_heads, self.qkv(x).chunk(3, -1))
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        tokens = build_layout(self.layout, [x.shape[1]] * size)
        columns = torch.cat([torch.as_tensor(tokens.positions(owner)) for owner in range(size)])
        mask = torch.as_tensor(tokens.positions(rank))[:, None] >= columns[None, :]
        return F.scaled_dot_product_attention(query, self.collect(key), self.collect(value), attn_mask=mask)


class RingAttention(nn.Module):
    """Computes its rows with `regard.distributed.attention`."""

    def __init__(self, group: Any, layout: str) -> None:
        super().__init__()
        self.qkv, self.group, self.layout = nn.Linear(WIDTH, 3 * WIDTH), group, layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = map(split_heads, self.qkv(x).chunk(3, -1))
        A = distributed.attention(query, key, group=self.group, mask=causal(), layout=self.layout)
        return A @ value


def watch_layer(group: Any, kind: str, layout: str, length: int) -> dict[str, Any]:
    """Watch a layer on all ranks; return its rows of the recorded matrix, and whether outputs are bit-identical."""
    torch.manual_seed(0)
    layers = {
        "plain": lambda: GatheringAttention(group, layout),
        "DTensor": lambda: GatheringAttention(group, layout, as_dtensor=True),
        "ring": lambda: RingAttention(group, layout),
    }
    model = nn.ModuleDict({"attention": layers[kind]()}).eval()
    whole = torch.randn(1, length, WIDTH)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    positions = build_layout(layout, split_evenly(length, size)).positions(rank)
    own = whole[:, positions]
    with torch.no_grad():
        before = model["attention"](own)
        with regard.watch(model, group=group, layout=layout) as recording:
            after = model["attention"](own)
        A = recording["attention"]
        found = A.measure(regard.Entropy(), regard.Received(), regard.Distance())
        query, key, _ = map(split_heads, model["attention"].qkv(whole).chunk(3, -1))
        one = regard.attention(query, key, mask=causal())
        expected = one.measure(regard.Entropy(), regard.Received(), regard.Distance())
        dense = one.to_dense()
        torch.testing.assert_close(A.to_dense(), dense[..., positions, :], rtol=1e-5, atol=1e-6)
        for result, right in zip(found, expected, strict=True):
            torch.testing.assert_close(result.double(), right[..., positions].double(), rtol=1e-5, atol=1e-6)
    assert "attention" in recording and "other" not in recording
    own_bytes = 4 * len(positions) * WIDTH  # of a query, or of a key, in float32
    assert own_bytes < recording.nbytes <= (1 + size) * own_bytes
    assert "attention" in recording._repr_html_() and "empty" not in recording._repr_html_()
    return {"identical": torch.equal(before, after), "names": list(recording), "shape": tuple(A.shape)}
