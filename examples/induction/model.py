"""A causal model of `regard.nn` layers, small enough to read: its logits, and every attention matrix behind them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard import causal
from regard.nn import KVCache, MultiheadAttention

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Config:
    """The sizes of a model; `hidden` is the width inside the MLP of each layer, 0 for attention alone."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    hidden: int = 0


class Layer(nn.Module):
    """Attention, then an MLP if there is one, each added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.norm = nn.RMSNorm(width)
        self.attention = MultiheadAttention(width, config.heads, bias=False, rope="half")
        self.mlp = None
        if hidden:
            parts = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
            self.mlp = nn.Sequential(nn.RMSNorm(width), *parts)

    def forward(self, x: Tensor, cache: KVCache | None) -> tuple[Tensor, Any]:
        """x (batch, n, width) after this layer, and the matrix (batch, heads, n, kv_len) it attended by."""
        attended, A = self.attention(self.norm(x), mask=causal(), cache=cache, need_matrix=True)
        x = x + attended
        return (x if self.mlp is None else x + self.mlp(x)), A


class Model(nn.Module):
    """Tokens in, a score for each next token out: embedding, layers with residuals, unembedding.

    >>> model = Model(Config(vocabulary=5, width=8, heads=2, layers=2))
    >>> logits, matrices = model(torch.tensor([[0, 1, 2]]), need_matrices=True)
    >>> logits.shape, [A.shape for A in matrices]
    (torch.Size([1, 3, 5]), [(1, 2, 3, 3), (1, 2, 3, 3)])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.about = config, {}
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.unembedding.weight, std=0.02)  # so that the first loss is ln(vocabulary)

    def forward(
        self, tokens: Tensor, *, caches: Sequence[KVCache] | None = None, need_matrices: bool = False
    ) -> Any:
        """Logits (batch, n, vocabulary) for the token after each of `tokens` (batch, n).

        With `need_matrices=True` also a list with the `AttentionMatrix` of each layer, (batch, heads, n, n). With
        `caches`, one for each layer, the tokens come after those that went before: see `caches`.
        """
        x, matrices = self.embedding(tokens), []
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, A = layer(x, cache)
            matrices.append(A)
        logits = self.unembedding(self.norm(x))
        return (logits, matrices) if need_matrices else logits

    def caches(self) -> list[KVCache]:
        """An empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    @torch.no_grad()
    def extend(self, tokens: Tensor, more: int) -> Tensor:
        """`tokens` (batch, n) with the `more` likeliest ones after them, one at a time, through the caches."""
        caches, new = self.caches(), tokens
        for _ in range(more):
            new = self(new, caches=caches)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, new], 1)
        return tokens


def save(model: Model, path: str | Path, about: dict[str, Any] | None = None) -> None:
    """Write the weights in float16, with the sizes and whatever is to be told `about` them in the file's header."""
    from safetensors.torch import save_file

    halves = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"config": json.dumps(asdict(model.config)), "about": json.dumps(about or {})}
    save_file(halves, path, metadata=metadata)


def load(name: str | Path = "induction") -> Model:
    """A trained model, ready to be asked: `load()` repeats what it has seen, `load("text")` writes English bytes.

    Its weights are float32 and want no gradients; `model.config` has the sizes, `model.about` what was measured when it
    was trained. A path loads a checkpoint that `save` wrote.
    """
    from safetensors import safe_open

    path = HERE / f"{name}.safetensors" if Path(name).suffix == "" else Path(name)
    with safe_open(path, "pt") as file:
        header = file.metadata()
        weights = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 - not a dict
    model = Model(Config(**json.loads(header["config"])))
    model.load_state_dict(weights, strict=True)
    model.about = json.loads(header["about"])
    return model.eval().requires_grad_(False)
