"""`GPT`: a small causal language model in PyTorch, built from `regard.nn`; `load_stories` loads the stored one.

`TinyGPT` runs the same weights in NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.learn.tiny_gpt import TinyGPT
from regard.masks import causal
from regard.nn import KVCache, MultiheadAttention

Tensor = Any  # mypy does not follow torch's types


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model.

    `hidden` is the width of the MLP in each layer, 0 for attention only. `activation` is the function inside the MLP:
    "gelu", or "relu2", the square of the positive part.
    """

    vocabulary: int
    width: int
    heads: int
    layers: int
    hidden: int = 0
    activation: str = "gelu"


class SquaredReLU(nn.Module):  # type: ignore[misc]
    """Square the positive numbers and set the others to 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to each number."""
        return x.relu().square()


ACTIVATIONS = {"gelu": nn.GELU, "relu2": SquaredReLU}


class GPTLayer(nn.Module):  # type: ignore[misc]
    """Attention and, if the config has one, an MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.norm = nn.RMSNorm(width)
        self.attention = MultiheadAttention(width, config.heads, bias=False, rope="half")
        self.mlp = None
        if hidden:
            parts = nn.Linear(width, hidden), ACTIVATIONS[config.activation](), nn.Linear(hidden, width)
            self.mlp = nn.Sequential(nn.RMSNorm(width), *parts)

    def forward(self, x: Tensor, cache: KVCache | None) -> tuple[Tensor, Any]:
        """Run the layer.

        Args:
            x: Activations (batch, n, width).
            cache: Keys and values of earlier tokens, or None.

        Returns:
            Activations (batch, n, width) and the attention matrix (batch, heads, n, kv_len).
        """
        attended, A = self.attention(self.norm(x), mask=causal(), cache=cache, need_matrix=True)
        x = x + attended
        return (x if self.mlp is None else x + self.mlp(x)), A


class GPT(nn.Module):  # type: ignore[misc]
    """A language model: embedding, attention layers, unembedding; it returns logits for the next token.

    >>> model = GPT(GPTConfig(vocabulary=5, width=8, heads=2, layers=2))
    >>> logits, matrices = model(torch.tensor([[0, 1, 2]]), need_matrices=True)
    >>> logits.shape, [A.shape for A in matrices]
    (torch.Size([1, 3, 5]), [(1, 2, 3, 3), (1, 2, 3, 3)])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.about: dict[str, Any] = {}
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(GPTLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.unembedding.weight, std=0.02)  # so that the first loss is ln(vocabulary)

    def forward(
        self, tokens: Tensor, *, caches: Sequence[KVCache] | None = None, need_matrices: bool = False
    ) -> Any:
        """Compute the logits of the next token at every position.

        Args:
            tokens: Tokens (batch, n).
            caches: One cache for each layer, from `build_caches`; the tokens then follow those of earlier calls.
            need_matrices: Also return the attention matrices.

        Returns:
            Logits (batch, n, vocabulary); with `need_matrices`, also a list with the `AttentionMatrix` of each layer,
            (batch, heads, n, kv_len).
        """
        x, matrices = self.embedding(tokens), []
        for number, layer in enumerate(self.layers):
            x, A = layer(x, None if caches is None else caches[number])
            matrices.append(A)
        logits = self.unembedding(self.norm(x))
        return (logits, matrices) if need_matrices else logits

    def build_caches(self) -> list[KVCache]:
        """Build an empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    def generate(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """Generate the most likely tokens one at a time, with caches.

        Args:
            tokens: The prompt (batch, n).
            max_new_tokens: Number of tokens to generate.

        Returns:
            The prompt and the new tokens (batch, n + max_new_tokens).
        """
        caches, new = self.build_caches(), tokens
        with torch.no_grad():
            for _ in range(max_new_tokens):
                new = self(new, caches=caches)[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, new], 1)
        return tokens


class PieceTokenizer:
    """The tokenizer of a stored model. A decoded token keeps the space before its word, by which pages join words.

    Args:
        stored: The model in NumPy, with its word pieces.
    """

    def __init__(self, stored: TinyGPT) -> None:
        self.encode, self._pieces = stored.encode, stored.pieces

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, with the newline that begins every text."""
        return "".join(self._pieces[token] for token in tokens)


def load_stories(path: str | os.PathLike[str] | None = None) -> tuple[GPT, PieceTokenizer]:
    """Load a model of children's stories and its tokenizer; `regard.models.load("stories")` calls it.

    Args:
        path: File that `examples/stories/train.py` wrote. Default: the model of the package.

    Returns:
        The model and its tokenizer. The model is in eval mode and without gradients, in float32, which holds the stored
        numbers exactly; `model.config` has its sizes, `model.about` how it was trained and what was measured.

    >>> load_stories()[0].config
    GPTConfig(vocabulary=2560, width=256, heads=8, layers=4, hidden=768, activation='relu2')
    """
    stored = TinyGPT(path)
    model = GPT(GPTConfig(**stored.config))
    model.load_state_dict({name: torch.tensor(array).float() for name, array in stored.parameters.items()})
    model.about = dict(stored.about)
    return model.eval().requires_grad_(False), PieceTokenizer(stored)
