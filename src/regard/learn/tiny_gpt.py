"""A whole language model: a table of vectors, blocks of attention and MLP, and a guess for the next token.

    x = embedding[tokens]
    x = x + attention(norm(x))    then    x = x + MLP(norm(x))    four times
    guess = softmax(unembedding(norm(x)))

The sum x is called the residual stream: every part reads it and adds to it. Tokens are words and pieces of words.
`regard.explore.model` runs this model in a page.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.learn.block import relu
from regard.learn.checked import scaled_dot_product_attention
from regard.learn.masks import create_causal_mask
from regard.learn.softmax_alternatives import softmax
from regard.learn.validation import Floats, require
from regard.positions import rope

STORED_MODEL = "stories.safetensors"  # written by examples/stories/train.py, beside this module
FACTOR, DTYPES = ".factor", {"F16": "<f2", "I8": "i1"}  # the factor of each row of an int8 matrix
EPSILON = 2.0**-23  # of torch's RMSNorm, with which the model was trained
CONFIG_NAMES = {"vocabulary", "width", "heads", "layers", "hidden", "activation"}
ABOUT_NAMES = {"context", "bits", "text", "steps", "batch"}


@dataclass(frozen=True, eq=False)
class TinyGPTRun:
    """What a model computed for a text of n tokens.

    Attributes:
        tokens: The numbers of the tokens, (n,); the first is the newline that begins every text.
        pieces: The text of each token.
        stream: The residual stream after the embedding and after each attention and MLP, (2 · layers + 1, n, width).
        query, key, value: What each head compares and mixes, (layers, heads, n, head_dim).
        weights: The attention weights, (layers, heads, n, n).
    """

    tokens: Any
    pieces: Sequence[str]
    stream: Floats
    query: Floats
    key: Floats
    value: Floats
    weights: Floats
    _gpt: TinyGPT = field(repr=False)

    @cached_property
    def guesses(self) -> Floats:
        """The probabilities of the next token, read from each entry of `stream`, (2 · layers + 1, n, vocabulary).

        Those of the model are `guesses[-1]`; `guesses[-1, -1]` are those after the whole text.
        """
        return self._gpt.read_stream(self.stream)

    @cached_property
    def next(self) -> Floats:
        """The probabilities of the token after the text, (vocabulary,)."""
        return self._gpt.read_stream(self.stream[-1, -1])

    def best(self, count: int = 5) -> list[tuple[str, float]]:
        """Return the most likely next tokens.

        Args:
            count: Number of tokens.

        Returns:
            The text of each and its probability, the most likely first.
        """
        order = np.argsort(-self.next, kind="stable")[: max(count, 0)]
        return [(self._gpt.pieces[token], float(self.next[token])) for token in order]

    def __repr__(self) -> str:
        (piece, share), *_ = self.best(1)
        return f"<{len(self.tokens)} tokens, next {piece!r} with {share:.3f}>"


class TinyGPT:
    """A language model of word pieces in NumPy, trained on children's stories (`examples/stories`).

    Args:
        path: File of another model that `examples/stories/train.py` wrote. Default: the model of the package.

    Attributes:
        config: The sizes `vocabulary`, `width`, `heads`, `layers` and `hidden`.
        pieces: The text of each token: words with the space before them, pieces of words, and signs.
        stored: The arrays by their names in PyTorch, as the file has them: matrices in int8, vectors in float16, and
            the factor of each row of a matrix, as "name.factor", in float16.
        parameters: The arrays that the model computes with, in float64.
        about: How the model was trained, and its bits per byte of text that it has not seen.

    Raises:
        ArgumentError: If the file is not such a model.

    >>> model = TinyGPT()
    >>> model.config["layers"], model.config["heads"]
    (4, 8)
    >>> model("The cat sat on the")
    <6 tokens, next ' mat' with ...>
    >>> model.generate("Once upon a", 2)
    'Once upon a time,'
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        stored = resources.files("regard.learn").joinpath(STORED_MODEL)
        try:
            content = stored.read_bytes() if path is None else Path(path).read_bytes()
            self.config, self.about, self.pieces, self.stored = _read_safetensors(content)
            if missing := self._list_names() - self.stored.keys():
                raise ValueError(f"without {min(missing)}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                "TinyGPT",
                received=f"{path}, which cannot be read ({error})",
                expected="a model of word pieces that examples/stories/train.py wrote",
                hint="Omit the path for the model of children's stories.",
            ) from error
        self.parameters: Mapping[str, Floats] = {
            name: array * self.stored.get(name + FACTOR, np.ones(1)).astype(np.float64)[:, None]
            if array.ndim == 2
            else array.astype(np.float64)
            for name, array in self.stored.items()
            if not name.endswith(FACTOR)
        }
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        r"""Split a text into tokens: a newline first, then the longest piece that fits, from left to right.

        Args:
            text: The text. Each line gets a space before it, so that its first word is the token that it is elsewhere;
                characters other than printable ASCII become "?".

        Returns:
            The numbers of the tokens.

        >>> gpt = TinyGPT()
        >>> [gpt.pieces[token] for token in gpt.encode("Zobi has a hat.")]
        ['\n', ' Z', 'ob', 'i', ' has', ' a', ' hat', '.']
        """
        return encode(text, self._numbers)

    def decode(self, tokens: Iterable[int]) -> str:
        r"""Return the text of tokens, without the newline and the space that `encode` adds.

        Args:
            tokens: The numbers of the tokens.

        Returns:
            The text.

        >>> gpt = TinyGPT()
        >>> gpt.decode(gpt.encode("Hello.\n  Hello."))
        'Hello.\n  Hello.'
        """
        text = "".join(self.pieces[token] for token in tokens)
        return re.sub(r"^ ", "", text.removeprefix("\n"), flags=re.MULTILINE)

    def __call__(self, text: str | Sequence[int], *, off: Iterable[tuple[int, int]] = ()) -> TinyGPTRun:
        """Read a text.

        Args:
            text: The text, or its tokens; as a rule at most `about["context"]` of them, as in training.
            off: Heads (layer, head) that are switched off: their output is 0.

        Returns:
            Everything that was computed.

        Raises:
            ArgumentError: If the text is empty, or there is no such head.
        """
        tokens = self._as_tokens(text)
        P, visible, silent = self.parameters, create_causal_mask(len(tokens)), self._find_heads(off)
        x = P["embedding.weight"][tokens]  # (n, width)
        stream, heads = [x], []
        for layer in range(self.config["layers"]):
            attention, mlp = f"layers.{layer}.attention", f"layers.{layer}.mlp"
            h = _rms_norm(x, P[f"layers.{layer}.norm.weight"])
            Q, K, V = (self._split_heads(h @ P[f"{attention}.{name}_proj.weight"].T) for name in "qkv")
            Q, K = rope(Q, layout="half"), rope(K, layout="half")
            output, weights = scaled_dot_product_attention(Q, K, V, visible)  # (heads, n, head_dim or n)
            output[silent[layer]] = 0
            x = x + output.swapaxes(0, 1).reshape(x.shape) @ P[f"{attention}.out_proj.weight"].T
            stream.append(x)
            h = _rms_norm(x, P[f"{mlp}.0.weight"])
            hidden = relu(h @ P[f"{mlp}.1.weight"].T + P[f"{mlp}.1.bias"]) ** 2
            x = x + hidden @ P[f"{mlp}.3.weight"].T + P[f"{mlp}.3.bias"]
            stream.append(x)
            heads.append((Q, K, V, weights))
        pieces = [self.pieces[token] for token in tokens]
        query, key, value, maps = (np.stack(parts) for parts in zip(*heads, strict=True))
        return TinyGPTRun(tokens, pieces, np.stack(stream), query, key, value, maps, self)

    def read_stream(self, x: Floats) -> Floats:
        """Return the probabilities of the next token that vectors of the residual stream stand for.

        Args:
            x: Vectors (…, width).

        Returns:
            Probabilities (…, vocabulary).
        """
        P = self.parameters
        return softmax(_rms_norm(x, P["norm.weight"]) @ P["unembedding.weight"].T)

    def generate(self, text: str, length: int, *, temperature: float = 0.0, seed: int = 0) -> str:
        """Write on, token by token. The whole text is read again for each, up to the context of the training.

        Args:
            text: The beginning.
            length: Number of tokens to write.
            temperature: 0 takes the most likely token each time; 1 draws from the guess of the model.
            seed: Seed of the drawing.

        Returns:
            The beginning and what was written.

        Raises:
            ArgumentError: If the text is empty, or the temperature negative.
        """
        require(
            temperature >= 0,
            "TinyGPT",
            received=f"temperature {temperature}",
            expected="a temperature of at least 0",
            hint="0 always selects the most likely token, 1 samples from the distribution of the model.",
        )
        tokens, rng = list(self._as_tokens(text)), np.random.default_rng(seed)
        for _ in range(length):
            guess = self(tokens[-self.about["context"] :]).next
            if temperature > 0:
                guess = softmax(np.log(guess), temperature=temperature)
            tokens.append(int(rng.choice(len(guess), p=guess) if temperature > 0 else guess.argmax()))
        return self.decode(tokens)

    def __repr__(self) -> str:
        count = sum(array.size for array in self.parameters.values())
        return (
            f"<TinyGPT, {self.config['layers']} layers of {self.config['heads']} heads, {count:,} parameters>"
        )

    def _list_names(self) -> set[str]:
        """List arrays that a complete file has: one of each layer, and those outside of the layers."""
        layers = {f"layers.{layer}.attention.q_proj.weight" for layer in range(self.config["layers"])}
        return layers | {"embedding.weight", "norm.weight", "unembedding.weight"}

    def _as_tokens(self, text: str | Sequence[int]) -> Any:
        tokens = _as_numbers(self.encode(text) if isinstance(text, str) and text != "" else text)
        if tokens.ndim != 1 or not tokens.size or not ((0 <= tokens) & (tokens < len(self.pieces))).all():
            raise ArgumentError(
                "TinyGPT",
                received=f"text as {describe_argument(text)}",
                expected=f"a text of at least one character, or its tokens, from 0 to {len(self.pieces) - 1}",
                hint='Pass the beginning of a story: model("Once upon a time").',
            )
        return tokens

    def _split_heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), self.config["heads"], -1).swapaxes(0, 1)  # (heads, n, head_dim)

    def _find_heads(self, off: Iterable[tuple[int, int]]) -> Any:
        layers, heads = self.config["layers"], self.config["heads"]
        silent = np.zeros((layers, heads), bool)
        for pair in off:
            if not (np.shape(pair) == (2,) and pair[0] in range(layers) and pair[1] in range(heads)):
                raise ArgumentError(
                    "TinyGPT",
                    received=f"the head {pair}",
                    expected=f"a layer from 0 to {layers - 1} and a head from 0 to {heads - 1}",
                    hint="Pass each head to switch off as (layer, head): off=[(1, 2)].",
                )
            silent[int(pair[0]), int(pair[1])] = True
        return silent


def _as_numbers(tokens: Any) -> Any:
    """Return tokens as an array of whole numbers, an empty one if they are none."""
    try:
        array = np.array([operator.index(token) for token in tokens])
    except TypeError:
        return np.array([])
    return np.array([]) if isinstance(tokens, bytes) else array


def encode(text: str, numbers: Mapping[str, int]) -> list[int]:
    """Split a text into the longest pieces from left to right, as `TinyGPT.encode` does.

    Args:
        text: The text.
        numbers: Number of each piece; every printable ASCII character is one, and the newline.

    Returns:
        The numbers of the pieces; a newline comes first.
    """
    text = "\n" + mark_lines(re.sub(r"[^\n -~]", "?", text))
    longest, at, tokens = max(map(len, numbers)), 0, []
    while at < len(text):
        length = next(n for n in range(min(longest, len(text) - at), 0, -1) if text[at : at + n] in numbers)
        tokens.append(numbers[text[at : at + length]])
        at += length
    return tokens


def mark_lines(text: str) -> str:
    """Put a space at the beginning of each line that is not empty."""
    return re.sub(r"^(?=[^\n])", " ", text, flags=re.MULTILINE)


def _rms_norm(x: Floats, weight: Floats) -> Floats:
    """Divide each vector by the root of its mean square, and multiply it by the weights of the norm."""
    size: Floats = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    return x / size * weight


def _read_safetensors(
    content: bytes,
) -> tuple[Mapping[str, Any], Mapping[str, Any], Sequence[str], Mapping[str, Any]]:
    """Read config, about, pieces and arrays: eight bytes of length, a JSON header, then the numbers."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    if "pieces" not in metadata:
        raise ValueError("another kind of model")
    config, about, pieces = (json.loads(metadata[name]) for name in ("config", "about", "pieces"))
    if not (CONFIG_NAMES <= config.keys() and ABOUT_NAMES <= about.keys()):
        raise ValueError("another kind of model")
    if config["vocabulary"] != len(pieces) or config["activation"] != "relu2":
        raise ValueError("not a model of word pieces with the activation relu2")
    return (
        config,
        about,
        pieces,
        {
            name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(
                entry["shape"]
            )
            for name, entry in header.items()
        },
    )
