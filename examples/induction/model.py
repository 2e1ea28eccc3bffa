"""A small causal model built from `regard.nn` layers, which returns its logits and all attention matrices."""

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


class SquaredReLU(nn.Module):
    """Square the positive numbers and set the others to 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to each number."""
        return x.relu().square()


ACTIVATIONS = {"gelu": nn.GELU, "relu2": SquaredReLU}


class Layer(nn.Module):
    """Attention and, if the config has one, an MLP, each with a residual connection."""

    def __init__(self, config: Config) -> None:
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


class Model(nn.Module):
    """A language model: embedding, attention layers, unembedding; it returns logits for the next token.

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
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, A = layer(x, cache)
            matrices.append(A)
        logits = self.unembedding(self.norm(x))
        return (logits, matrices) if need_matrices else logits

    def build_caches(self) -> list[KVCache]:
        """Build an empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    @torch.no_grad()
    def generate(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """Generate the most likely tokens one at a time, with caches.

        Args:
            tokens: The prompt (batch, n).
            max_new_tokens: Number of tokens to generate.

        Returns:
            The prompt and the new tokens (batch, n + max_new_tokens).
        """
        caches, new = self.build_caches(), tokens
        for _ in range(max_new_tokens):
            new = self(new, caches=caches)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, new], 1)
        return tokens


def save(model: Model, path: str | Path, about: dict[str, Any] | None = None) -> None:
    """Save the weights in float16, with the config and `about` in the header of the file.

    Args:
        model: The model.
        path: The safetensors file to write.
        about: How the model was trained and what was measured, as JSON data.
    """
    from safetensors.torch import save_file

    halves = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"config": json.dumps(asdict(model.config)), "about": json.dumps(about or {})}
    save_file(halves, path, metadata=metadata)


def load(name: str | Path = "induction") -> Model:
    """Load a trained model in float32, in eval mode and without gradients.

    `model.config` has the sizes, `model.about` how it was trained and what was measured.

    Args:
        name: "induction" repeats sequences, "text" generates English bytes; or the path of a file that `save` wrote.

    Returns:
        The model.
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
