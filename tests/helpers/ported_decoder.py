"""A decoder as an engineer ports one: QK norm, rotary positions of its own, a mask of its own and a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.helpers.planted_models import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, WIDTH, Cache, rotate

LOWEST = torch.finfo(torch.float32).min


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys in the half layout, as Llama of transformers does."""
    return rotate(x, positions, half=True)


class HeadNorm(nn.Module):
    """RMS norm of each head's vector, with weights that are not 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(HEAD_DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HEAD_DIM,), self.weight, eps=1e-6)


class PortedAttention(nn.Module):
    """Grouped self-attention with QK norm, rotary positions and a cache."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.q_norm, self.k_norm = HeadNorm(), HeadNorm()

    def place(self, query: Any, key: Any, value: Any, positions: torch.Tensor) -> tuple[Any, Any, Any]:
        """Normalize and rotate new queries and keys."""
        match self.fault:
            case "QK norm forgotten":
                return turn(query, positions), turn(key, positions), value
            case "norm of the key forgotten":
                return turn(self.q_norm(query), positions), turn(key, positions), value
            case "QK norm after the rotation":
                return self.q_norm(turn(query, positions)), self.k_norm(turn(key, positions)), value
        query, key = self.q_norm(query), self.k_norm(key)
        match self.fault:
            case "half of the head rotated":
                half = HEAD_DIM // 2
                query, key = (
                    torch.cat([turn(x[..., :half], positions), x[..., half:]], -1) for x in (query, key)
                )
                return query, key, value
            case "values rotated":
                value = turn(value, positions)
            case "cached keys rotated by the positions of the step":
                return turn(query, positions), key, value  # the key is rotated after the cache
        return turn(query, positions), turn(key, positions), value

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = self.place(query, key, value, positions)
        if cache is not None:
            if cache:
                key, value = torch.cat([cache["key"], key], 2), torch.cat([cache["value"], value], 2)
            cache["key"], cache["value"] = key, value
        if self.fault == "cached keys rotated by the positions of the step":
            key = turn(key, positions[:, :1] + torch.arange(key.shape[2]))
        if self.fault == "one key head for all":
            key, value = (x[:, :1].expand(-1, KV_HEADS, -1, -1) for x in (key, value))
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        scales = {
            "scale of 1 / head_dim": 1 / HEAD_DIM,
            "scale of the key width": (KV_HEADS * HEAD_DIM) ** -0.5,
        }
        scale = scales.get(self.fault, HEAD_DIM**-0.5)
        if self.fault == "scores in float8":
            scores = ((query * scale) @ key.mT + mask).clamp(min=torch.finfo(torch.float8_e5m2).min)
            output = scores.to(torch.float8_e5m2).float().softmax(-1) @ value
        else:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        if self.fault == "heads merged channel by channel":
            return self.o_proj(output.permute(0, 2, 3, 1).flatten(2))
        return self.o_proj(output.transpose(1, 2).flatten(2))


class PortedBlock(nn.Module):
    """Norm, attention, norm and feed-forward."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = PortedAttention(fault)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), *args)
        return x + self.mlp(self.norm2(x))


class PortedDecoder(nn.Module):
    """A decoder without a configuration, called like one of transformers; clean unless it is built with a fault.

    Args:
        fault: Name of the fault, "" for none.
        only: The layers that have it; all by default.
    """

    def __init__(self, fault: str = "", *, only: Sequence[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.embed = nn.Embedding(VOCAB, WIDTH)
        faults = [fault if only is None or layer in only else "" for layer in range(LAYERS)]
        self.blocks = nn.ModuleList(PortedBlock(layer_fault) for layer_fault in faults)
        self.head = nn.Linear(WIDTH, VOCAB)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.2)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: list[Cache] | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutputWithPast:
        batch, q_len = input_ids.shape
        cache = past_key_values
        if cache is None and use_cache:
            cache = [{} for _ in self.blocks]
        past = cache[0]["key"].shape[2] if cache and cache[0] else 0
        if attention_mask is None:
            attention_mask = torch.ones(batch, past + q_len, dtype=torch.long)
        if position_ids is None:
            position_ids = self.count_positions(attention_mask)[:, -q_len:]
        x, mask = self.embed(input_ids), self.build_mask(attention_mask.bool(), q_len)
        # On processors with AVX2, torch 2.13 reads a float32 mask wrongly beside float64 queries.
        mask = mask.to(torch.promote_types(mask.dtype, x.dtype))
        if self.fault == "embeddings centred over time":
            x = x - x.mean(1, keepdim=True)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, position_ids, None if cache is None else cache[layer])
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=cache)

    def count_positions(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the position of each token among those that are not padding, (batch, n)."""
        if self.fault == "positions written for padding on the right":
            attention_mask = attention_mask.flip(-1)
        return (attention_mask.cumsum(-1) - 1).clamp(min=0)

    def build_mask(self, is_token: torch.Tensor, q_len: int) -> torch.Tensor:
        """Build the mask that is added to the scores, (batch, 1, q_len, kv_len)."""
        batch, kv_len = is_token.shape
        rows, columns = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
        match self.fault:
            case "causal mask of one token more":
                visible = columns <= rows + 1
            case "causal mask of bfloat16 positions":
                visible = columns.bfloat16() <= rows.bfloat16()
            case _:
                visible = columns <= rows
        attended = visible & is_token[:, None, None]
        match self.fault:
            case "padding mask of heads, not of entries" if batch == HEADS:
                attended = (visible & is_token[:, None])[None]
            case "padding masked in the prefill only" if q_len < kv_len:
                attended = visible.expand(batch, 1, -1, -1)
            case "causal mask dropped in padded batches" if not bool(is_token.all()):
                attended = is_token[:, None, None].expand(-1, 1, q_len, -1)
            case "masks added without a bound":
                return sum(
                    torch.zeros(part.shape).masked_fill(~part, LOWEST)
                    for part in (visible, is_token[:, None, None])
                )  # type: ignore[return-value]
        return torch.zeros(attended.shape).masked_fill(~attended, LOWEST)

    def decode(
        self, input_ids: torch.Tensor, sizes: Sequence[int], attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a sequence in pieces of these sizes, with a cache: the logits of every token."""
        cache, outputs, stop = None, [], 0
        for piece in input_ids.split(list(sizes), 1):
            stop += piece.shape[1]
            mask = None if attention_mask is None else attention_mask[:, :stop]
            output = self(piece, mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            outputs.append(output.logits)
        return torch.cat(outputs, 1)


class SwappedCrossAttention(nn.Module):
    """A small encoder-decoder; with the fault, its cross-attention takes queries from the encoder."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.swapped = swapped
        self.embed, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        source, x = (
            self.embed(ids) + self.wpe(torch.arange(ids.shape[1])) for ids in (input_ids, decoder_input_ids)
        )
        source, later = self.encoder(source), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.self_attn(x, x, x, attn_mask=later, need_weights=False)[0]
        queries, states = (source, x) if self.swapped else (x, source)
        return self.head(x + self.cross_attn(queries, states, states, need_weights=False)[0])
