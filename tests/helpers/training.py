"""A small decoder and its training loop, for the tests of `regard.monitor`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 13


class Block(nn.Module):
    """One layer: causal attention with grouped heads, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, head_dim = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * kv_heads * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(x).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(output.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder of a few layers.

    Args:
        checkpointing: None, or `use_reentrant` of activation checkpointing.
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        n: int = 23,
        checkpointing: bool | None = None,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(n, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, mask, use_reentrant=self.checkpointing)
        return self.head(self.norm(x))


def draw_batch(step: int, batch: int = 3, n: int = 23, vocabulary: int = VOCABULARY) -> Tensor:
    """Draw tokens that repeat after half the length, from a seed of the step."""
    half = torch.randint(vocabulary, (batch, n // 2 + 1), generator=torch.Generator().manual_seed(step))
    return torch.cat([half, half], 1)[:, :n]


def compute_loss(model: nn.Module, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of the next token."""
    logits = model(tokens) if mask is None else model(tokens, mask)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accumulate: int = 1,
    autocast: bool = False,
    run: Callable[..., Any] | None = None,
    after_step: Callable[[], object] | None = None,
    first_step: int = 0,
) -> list[float]:
    """Train, and return the loss of every step.

    Args:
        model: The model.
        optimizer: Its optimiser.
        steps: Number of optimiser steps.
        accumulate: Batches for each step.
        autocast: Run in bfloat16.
        run: What is called instead of the model.
        after_step: Called after each step.
        first_step: Number of the first step, which seeds its batch.
    """
    losses = []
    for step in range(first_step, first_step + steps):
        total = 0.0
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = compute_loss(run or model, draw_batch(step * accumulate + part))
            (loss / accumulate).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step()
        losses.append(total / accumulate)
    return losses
