"""A small GPT, an encoder and hand-written layers that can be built with a fault, for doctor and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 48, 4, 2, 12, 61, 3
ROPE_BASE, WINDOW = 10_000.0, 5

Cache = dict[str, torch.Tensor]


def rotate(
    x: torch.Tensor, positions: torch.Tensor, base: float = ROPE_BASE, half: bool = False
) -> torch.Tensor:
    """Rotate x, (batch, heads, n, head_dim), by its positions, (batch, n): pairs (2i, 2i+1), or (i, i+d/2)."""
    dim = x.shape[-1]
    frequencies = base ** (-torch.arange(0, dim, 2) / dim)
    angles = (
        positions[..., None] * frequencies.to(positions.dtype if positions.is_floating_point() else x.dtype)
    )[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = (x[..., : dim // 2], x[..., dim // 2 :]) if half else (x[..., ::2], x[..., 1::2])
    turned = first * cos - second * sin, first * sin + second * cos
    return torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)


def alibi_bias(q_len: int, kv_len: int) -> torch.Tensor:
    """Return the bias of ALiBi for HEADS heads, (heads, q_len, kv_len)."""
    slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
    distance = torch.arange(kv_len) - torch.arange(kv_len - q_len, kv_len)[:, None]
    return slopes[:, None, None] * distance.clamp(max=0)


class GPTAttention(nn.Module):
    """Self-attention with grouped heads, rotary positions or ALiBi, and a cache."""

    def __init__(self, fault: str, positions: str) -> None:
        super().__init__()
        self.fault, self.positions = fault, positions
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, KV_HEADS * HEAD_DIM),
            nn.Linear(WIDTH, KV_HEADS * HEAD_DIM),
        )

    def split_heads(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        if self.fault == "heads split by view":
            return x.view(x.shape[0], heads, x.shape[1], HEAD_DIM)
        return x.view(*x.shape[:2], heads, HEAD_DIM).transpose(1, 2)

    def turn(self, query: Any, key: Any, positions: torch.Tensor) -> tuple[Any, Any]:
        match self.fault:
            case "rope on the axis of the heads":
                numbers = [torch.arange(x.shape[1])[None] for x in (query, key)]
                pairs = zip((query, key), numbers, strict=True)
                query, key = (rotate(x.transpose(1, 2), number).transpose(1, 2) for x, number in pairs)
                return query, key
            case "rope on the query only":
                return rotate(query, positions), key
            case "rope twice":
                query, key = rotate(query, positions), rotate(key, positions)
            case "rope backwards on the key":
                return rotate(query, positions), rotate(key, -positions)
            case "rope base of another model":
                return rotate(query, positions, 500.0), rotate(key, positions, 500.0)
            case "rope pairs of query and key differ":
                return rotate(query, positions), rotate(key, positions, half=True)
            case "rope pairs of another layout":
                return rotate(query, positions, half=True), rotate(key, positions, half=True)
            case "rope positions in bfloat16":
                positions = positions.bfloat16()
            case "rope missing in one layer":
                return query, key
        return rotate(query, positions), rotate(key, positions)

    def update(
        self, cache: Cache, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to the cache, and return all keys and values."""
        if "key" in cache:
            old_key, old_value = cache["key"], cache["value"]
            match self.fault:
                case "cache overwrites its last key":
                    old_key, old_value = old_key[:, :, : -key.shape[2]], old_value[:, :, : -key.shape[2]]
                case "cache loses a key at every step":
                    old_key, old_value = old_key[:, :, 1:], old_value[:, :, 1:]
                case "cache appends the last value again":
                    value = old_value[:, :, -value.shape[2] :]
            key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
        cache["key"], cache["value"] = key, value
        return key, value

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        cache: Cache | None,
    ) -> torch.Tensor:
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.fault == "values projected like keys":
            value = self.k_proj(x)
        query, key = self.split_heads(query, HEADS), self.split_heads(key, KV_HEADS)
        value = self.split_heads(value, KV_HEADS)
        if self.positions == "rope":
            query, key = self.turn(query, key, positions)
        if cache is not None:
            key, value = self.update(cache, key, value)
        match self.fault:
            case "key heads tiled":
                key, value = (x.repeat(1, HEADS // KV_HEADS, 1, 1) for x in (key, value))
            case "value heads in another order than key heads":
                key, value = (
                    key.repeat_interleave(HEADS // KV_HEADS, 1),
                    value.repeat(1, HEADS // KV_HEADS, 1, 1),
                )
            case _:
                key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        if mask is not None and mask.shape[-1] != key.shape[2]:  # of a broken cache
            shape = query.shape[2], key.shape[2]
            mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal}
        if self.positions == "alibi":
            bias = alibi_bias(query.shape[2], key.shape[2])
            bias = -bias if self.fault == "alibi with the wrong sign" else bias
            later = ~torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).tril()[-query.shape[2] :]
            bias = bias.masked_fill(later if mask is None else ~mask, -math.inf)
            options = {"attn_mask": bias}
        match self.fault:
            case "causal mask missing":
                options = {"attn_mask": None}
            case "scale missing":
                options["scale"] = 1.0
            case "scale twice":
                query = query / math.sqrt(HEAD_DIM)
            case "scale of the model width":
                options["scale"] = WIDTH**-0.5
            case "dropout in eval":
                options["dropout_p"] = 0.1
            case "heads and tokens not transposed":
                query, key, value = (x.transpose(1, 2) for x in (query, key, value))
                options = {}
        output = F.scaled_dot_product_attention(query, key, value, **options)
        if self.fault == "output heads merged by view":
            return self.o_proj(output.reshape(x.shape[0], x.shape[1], -1))
        if self.fault == "heads and tokens not transposed":
            return self.o_proj(output.flatten(2))
        return self.o_proj(output.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Norm, attention, norm and feed-forward."""

    def __init__(self, fault: str, positions: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = GPTAttention(fault, positions)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), *args)
        return x + self.mlp(self.norm2(x))


class PlantedGPT(nn.Module):
    """A small GPT as an engineer might write it, clean unless it is built with a fault.

    Args:
        fault: Name of the fault, "" for none.
        only: The layers that have it; all by default.
        positions: "rope", "alibi" or "learned".
        causal: False builds an encoder.
        window: Number of keys that each token attends to, itself included; None for all.
        std: Deviation of the weights of queries and keys.
    """

    def __init__(
        self,
        fault: str = "",
        *,
        only: Sequence[int] | None = None,
        positions: str = "rope",
        causal: bool = True,
        window: int | None = None,
        std: float = 0.25,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.is_decoder, self.window = fault, causal, window
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(64, WIDTH) if positions == "learned" else None
        faults = [fault if only is None or layer in only else "" for layer in range(LAYERS)]
        self.blocks = nn.ModuleList(GPTBlock(layer_fault, positions) for layer_fault in faults)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.kept: list[Cache] = [{} for _ in range(LAYERS)]
        for name, weight in self.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                nn.init.normal_(weight, std=std)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: list[Cache] | None = None,
    ) -> torch.Tensor:
        batch, q_len = input_ids.shape
        if self.fault == "cache kept between calls" and cache is None:
            cache = self.kept
        past = cache[0]["key"].shape[2] if cache is not None and "key" in cache[0] else 0
        if position_ids is None:
            position_ids = torch.arange(q_len).expand(batch, -1)
            if self.fault != "positions restart in every chunk":
                position_ids = position_ids + past
        mask, causal = self.build_mask(q_len, past + q_len, attention_mask)
        restarts = position_ids.diff(dim=-1) < 0
        if bool(restarts.any()) and past == 0 and self.fault != "packed documents without a mask":
            documents = F.pad(restarts.cumsum(-1), (1, 0))
            visible = torch.ones(q_len, q_len, dtype=torch.bool).tril()
            mask, causal = (visible & (documents[:, :, None] == documents[:, None]))[:, None], False
        x = self.embed(input_ids)
        if self.wpe is not None:
            x = x + self.wpe(position_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, position_ids, mask, causal, None if cache is None else cache[layer])
        return self.head(x)

    def build_mask(
        self, q_len: int, kv_len: int, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, bool]:
        """Build the mask, (batch or 1, 1, q_len, kv_len), True = attend; and is_causal, if that is all."""
        is_token = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        if self.fault == "causal aligned to the first key":
            return None, True
        inputs = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
        visible = inputs[1] <= inputs[0] if self.is_decoder else torch.ones(q_len, kv_len, dtype=torch.bool)
        window = self.window
        if window is not None:
            if self.fault == "window one shorter in cached steps" and q_len < kv_len:
                window -= 1
            visible = visible & (inputs[1] > inputs[0] - window)
        match self.fault:
            case "causal mask inverted":
                visible = ~visible
            case "own key masked":
                visible = inputs[1] < inputs[0]
            case "causal mask of 0 and 1 added":
                return visible.float()[None, None], False
        needs_mask = window is not None or (self.is_decoder and 1 < q_len < kv_len)
        if is_token is None and not self.fault.startswith(("causal mask", "own key")) and not needs_mask:
            return None, self.is_decoder and q_len > 1
        mask = visible[None, None]
        if is_token is None:
            return mask, False
        match self.fault:
            case "padding ignored":
                return mask if self.is_decoder else None, False
            case "padding mask inverted":
                return mask & ~is_token[:, None, None], False
            case "padding mask of another batch entry":
                return mask & is_token.flip(0)[:, None, None], False
            case "padding mask of 0 and 1 added":
                return is_token.float()[:, None, None], False
            case "padding mask too weak":
                return (1 - is_token.float()[:, None, None]) * -4, False
        return mask & (is_token[:, None, None] | torch.eye(kv_len, dtype=torch.bool)[-q_len:]), False

    def decode(self, input_ids: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Run a sequence in pieces of these sizes, with a cache: the logits of every token."""
        cache: list[Cache] = [{} for _ in self.blocks]
        if self.fault == "one cache for all layers":
            cache = [{}] * len(self.blocks)
        outputs, start = [], 0
        for size in sizes:
            piece = input_ids[:, start : start + size]
            positions = torch.arange(start, start + size).expand(len(input_ids), -1)
            match self.fault if start else "":
                case "position one too low in cached steps":
                    positions = positions - 1
                case "position 0 in every cached step":
                    positions = positions * 0
                case "positions restart in every chunk":
                    positions = None  # type: ignore[assignment]
            outputs.append(self(piece, position_ids=positions, cache=cache))
            start += size
        return torch.cat(outputs, 1)


class SequenceFirstEncoder(nn.Module):
    """An encoder of `nn.MultiheadAttention`, with the faults that its conventions invite."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.embed, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        batch_first = fault != "batch_first forgotten"
        self.attn = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first) for _ in range(2)
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        ignored = None
        if attention_mask is not None and self.fault != "batch_first forgotten":
            ignored = attention_mask == 0
            if self.fault == "key_padding_mask inverted" and bool(ignored.any()):
                ignored = ~ignored
        for attn in self.attn:
            x = x + attn(x, x, x, key_padding_mask=ignored, need_weights=False)[0]
        return x


class HandWrittenAttention(nn.Module):
    """Attention by two products and a softmax."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (query @ key.mT * HEAD_DIM**-0.5).softmax(self.axis)
        return (weights @ value).transpose(1, 2).flatten(2)


class HandWrittenEncoder(nn.Module):
    """An encoder whose layers compute their own softmax, over the keys or, by mistake, over the queries."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(HandWrittenAttention(axis) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return x
