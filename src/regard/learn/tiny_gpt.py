"""A whole language model: a table of vectors, blocks of attention and MLP, and a guess for the next byte.

    x = embedding[bytes]
    x = x + attention(norm(x))    then    x = x + MLP(norm(x))    four times
    guess = softmax(unembedding(norm(x)))

The sum x is called the residual stream: every part reads it and adds to it. `regard.explore.model` runs this model in a
page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.learn.attention import scaled_dot_product_attention
from regard.learn.block import relu
from regard.learn.masks import create_causal_mask
from regard.learn.softmax_alternatives import softmax
from regard.learn.validation import Floats
from regard.positions import rope

STORED_MODEL = "stories.safetensors"  # written by examples/stories/train.py, beside this module
EPSILON = 2.0**-23  # of torch's RMSNorm, with which the model was trained
CONFIG_NAMES = {"vocabulary", "width", "heads", "layers", "hidden", "activation"}
ABOUT_NAMES = {"seen", "context", "bits", "text", "steps", "batch"}


@dataclass(frozen=True, eq=False)
class TinyGPTRun:
    """What a model computed for a text of n bytes.

    Attributes:
        tokens: The bytes of the text, (n,).
        stream: The residual stream after the embedding and after each attention and MLP, (2 · layers + 1, n, width).
        weights: The attention weights, (layers, heads, n, n).
        guesses: The probabilities of the next byte, read from each entry of `stream`, (2 · layers + 1, n, 256).
            Those of the model are `guesses[-1]`; `guesses[-1, -1]` are those after the whole text.
    """

    tokens: Any
    stream: Floats
    weights: Floats
    guesses: Floats

    def __repr__(self) -> str:
        byte = self.guesses[-1, -1].argmax()
        return f"<{len(self.tokens)} bytes, next {chr(byte)!r} with {self.guesses[-1, -1, byte]:.3f}>"


class TinyGPT:
    """A language model of bytes in NumPy, trained on children's stories (`examples/stories`).

    Args:
        path: File of another model that `examples/stories/train.py` wrote. Default: the model of the package.

    Attributes:
        config: The sizes `vocabulary`, `width`, `heads`, `layers` and `hidden`.
        parameters: The arrays by their names in PyTorch, in float64; they are stored as float16.
        about: How the model was trained, and its bits per byte of text that it has not seen.

    Raises:
        ArgumentError: If the file is not such a model.

    >>> model = TinyGPT()
    >>> model.config["layers"], model.config["heads"]
    (4, 4)
    >>> model("Once upon a tim")
    <15 bytes, next 'e' with ...>
    >>> model.generate("Once upon a ", 5)
    'Once upon a time,'
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        stored = resources.files("regard.learn").joinpath(STORED_MODEL)
        try:
            content = stored.read_bytes() if path is None else Path(path).read_bytes()
            self.config, self.about, self.parameters = _read_safetensors(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                "TinyGPT",
                received=f"{path}, which cannot be read ({error})",
                expected="a byte-level model that examples/stories/train.py wrote",
                hint="Omit the path for the model of children's stories.",
            ) from error

    def __call__(self, text: str | bytes, *, off: Iterable[tuple[int, int]] = ()) -> TinyGPTRun:
        """Read a text.

        Args:
            text: The text; at least one byte, and as a rule at most `about["context"]`, as in training.
            off: Heads (layer, head) that are switched off: their output is 0.

        Returns:
            Everything that was computed.

        Raises:
            ArgumentError: If the text is empty, or there is no such head.
        """
        tokens = np.frombuffer(_as_bytes(text), np.uint8)
        P, visible, silent = self.parameters, create_causal_mask(len(tokens)), self._find_heads(off)
        x = P["embedding.weight"][tokens]  # (n, width)
        stream, maps = [x], []
        for layer in range(self.config["layers"]):
            attention, mlp = f"layers.{layer}.attention", f"layers.{layer}.mlp"
            h = _rms_norm(x, P[f"layers.{layer}.norm.weight"])
            Q, K, V = (self._split_heads(h @ P[f"{attention}.{name}_proj.weight"].T) for name in "qkv")
            Q, K = rope(Q, layout="half"), rope(K, layout="half")
            output, weights = scaled_dot_product_attention(
                Q, K, V, visible
            )  # (heads, n, head_dim), (heads, n, n)
            output[silent[layer]] = 0
            x = x + output.swapaxes(0, 1).reshape(x.shape) @ P[f"{attention}.out_proj.weight"].T
            stream.append(x)
            h = _rms_norm(x, P[f"{mlp}.0.weight"])
            hidden = relu(h @ P[f"{mlp}.1.weight"].T + P[f"{mlp}.1.bias"]) ** 2
            x = x + hidden @ P[f"{mlp}.3.weight"].T + P[f"{mlp}.3.bias"]
            stream.append(x)
            maps.append(weights)
        logits = _rms_norm(np.stack(stream), P["norm.weight"]) @ P["unembedding.weight"].T
        return TinyGPTRun(tokens, np.stack(stream), np.stack(maps), softmax(logits))

    def generate(self, text: str, length: int, *, temperature: float = 0.0, seed: int = 0) -> str:
        """Write on, byte by byte. The whole text is read again for each, up to the context of the training.

        Args:
            text: The beginning.
            length: Number of bytes to write.
            temperature: 0 takes the most likely byte each time; 1 draws from the guess of the model.
            seed: Seed of the drawing.

        Returns:
            The beginning and what was written; bytes that are no text become U+FFFD.

        Raises:
            ArgumentError: If the text is empty.
        """
        written, rng = _as_bytes(text), np.random.default_rng(seed)
        for _ in range(length):
            guess = self(written[-self.about["context"] :]).guesses[-1, -1]
            if temperature > 0:
                shaped = softmax(np.log(guess), temperature=temperature)
                written += bytes([rng.choice(len(guess), p=shaped)])
            else:
                written += bytes([guess.argmax()])
        return written.decode("utf-8", "replace")

    def __repr__(self) -> str:
        count = sum(array.size for array in self.parameters.values())
        return (
            f"<TinyGPT, {self.config['layers']} layers of {self.config['heads']} heads, {count:,} parameters>"
        )

    def _split_heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), self.config["heads"], -1).swapaxes(0, 1)  # (heads, n, head_dim)

    def _find_heads(self, off: Iterable[tuple[int, int]]) -> Any:
        layers, heads = self.config["layers"], self.config["heads"]
        silent = np.zeros((layers, heads), bool)
        for layer, head in off:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise ArgumentError(
                    "TinyGPT",
                    received=f"the head ({layer}, {head})",
                    expected=f"a layer from 0 to {layers - 1} and a head from 0 to {heads - 1}",
                    hint="Switch a head off as (layer, head): off=[(1, 2)].",
                )
            silent[layer, head] = True
        return silent


def _as_bytes(text: str | bytes) -> bytes:
    if not isinstance(text, str | bytes) or not text:
        raise ArgumentError(
            "TinyGPT",
            received=f"text as {describe_argument(text)}",
            expected="a text of at least one character",
            hint='Pass the beginning of a story: model("Once upon a time").',
        )
    return text.encode("utf-8", "replace") if isinstance(text, str) else text


def _rms_norm(x: Floats, weight: Floats) -> Floats:
    """Divide each vector by the root of its mean square, and multiply it by the weights of the norm."""
    size: Floats = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    return x / size * weight


def _read_safetensors(content: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Floats]]:
    """Read config, about and arrays: eight bytes of length, a JSON header, then the numbers."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    config, about = (json.loads(metadata[name]) for name in ("config", "about"))
    if not (CONFIG_NAMES <= config.keys() and ABOUT_NAMES <= about.keys()):
        raise ValueError("another kind of model")
    if config["vocabulary"] != 256 or config["activation"] != "relu2":
        raise ValueError("not a model of bytes with the activation relu2")
    if {entry["dtype"] for entry in header.values()} != {"F16"}:
        raise ValueError("not all arrays are float16")
    arrays = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f2")
        .reshape(entry["shape"])
        .astype(np.float64)
        for name, entry in header.items()
    }
    return config, about, arrays
