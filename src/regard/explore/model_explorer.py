"""Explorer of a whole language model that runs in the page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.types import Array

STORED_MODEL = "stories.safetensors"  # written by examples/stories/train.py, beside this module
DEFAULT_TEXT = "Once upon a time, there was a little girl named Lily. One day, Li"
MAX_WINDOW = 192  # bytes that the page shows the model at most
SHOWN_LETTERS = 60  # the most common bytes of the training text; embeddings of rare ones are hardly trained
CONFIG_NAMES = {"vocabulary", "width", "heads", "layers", "hidden", "activation"}


def model(text: str = DEFAULT_TEXT, *, checkpoint: str | os.PathLike[str] | None = None) -> Page:
    """Build a page with a small GPT that runs in it: it reads what the reader types and writes on.

    The model has about a million parameters, reads bytes and was trained on children's stories (`examples/stories`).
    The page shows its guess for the next byte with temperature and top-k, the guess after every layer, the map of each
    head for the reader's text, and the embeddings of the letters. Heads can be switched off. Weights are stored as
    float16; the page computes with float32 numbers, in a worker, in JavaScript.

    Args:
        text: Text that the page opens with.
        checkpoint: File of another byte-level model, written by `save` of `examples/induction` with the activation
            "relu2". Default: the model of children's stories.

    Returns:
        The page, about 2.5 MB.

    Raises:
        ArgumentError: If the text is empty, or the file is not such a model.

    >>> from regard.explore import model
    >>> model("The cat sat on the")
    <page "A tiny GPT", ... MB: save(path) writes it>
    """
    if not isinstance(text, str) or not text:
        raise ArgumentError(
            "explore.model",
            received=f"text as {describe_argument(text)}",
            expected="a text of at least one character",
            hint='Pass the beginning of a story: explore.model("Once upon a time").',
        )
    stored = read_checkpoint(checkpoint)
    names = list(stored.tensors)
    numbers = np.concatenate([stored.tensors[name].ravel() for name in names])
    letters = np.array(stored.about["seen"][:SHOWN_LETTERS])
    return build_page(
        "A tiny GPT",
        "tinyGpt",
        {
            "text": text,
            "config": {**stored.config, "context": min(stored.about["context"], MAX_WINDOW)},
            "shapes": {name: list(stored.tensors[name].shape) for name in names},
            "weights": encode_array(numbers),
            "parameters": len(numbers),
            "letters": letters,
            "plane": project_letters(stored.tensors["embedding.weight"][letters]),
            "bits": stored.about["bits"],
            "training": {name: stored.about[name] for name in ("steps", "batch", "context", "text")},
        },
    )


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is stored: sizes, float16 tensors by name, and how it was trained."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Array]
    about: Mapping[str, Any]


def read_checkpoint(path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Read a safetensors file of a byte-level model, with NumPy alone.

    Args:
        path: The file. Default: the model of children's stories.

    Returns:
        The checkpoint.

    Raises:
        ArgumentError: If the file is not such a model.
    """
    stored = resources.files("regard.explore").joinpath(STORED_MODEL)
    try:
        content = stored.read_bytes() if path is None else Path(path).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__")
        config, about = (json.loads(metadata[name]) for name in ("config", "about"))
        tensors = {name: _read_tensor(content[8 + length :], entry) for name, entry in header.items()}
        complete = CONFIG_NAMES <= config.keys() and {"seen", "context", "bits", "text"} <= about.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _wrong_checkpoint(path, f"which cannot be read ({error})") from error
    if not complete or config["vocabulary"] != 256 or config["activation"] != "relu2":
        raise _wrong_checkpoint(path, "of another model")
    return Checkpoint(config, tensors, about)


def _read_tensor(data: bytes, entry: dict[str, Any]) -> Array:
    if entry["dtype"] != "F16":
        raise ValueError(f"a tensor of dtype {entry['dtype']}")
    start, end = entry["data_offsets"]
    return np.frombuffer(data[start:end], "<f2").reshape(entry["shape"])


def _wrong_checkpoint(path: Any, problem: str) -> ArgumentError:
    return ArgumentError(
        "explore.model",
        received=f"checkpoint {path}, {problem}",
        expected="a byte-level model with the activation relu2, written by examples/stories/train.py",
        hint="Omit it for the model of children's stories.",
    )


def project_letters(vectors: Array) -> Array:
    """Project embeddings onto the plane in which they differ most (principal components).

    Args:
        vectors: Embeddings, `(letters, width)`.

    Returns:
        Coordinates between −1 and 1, `(letters, 2)`. The entry of each axis that is farthest out is positive.
    """
    centred = vectors.astype(np.float64)
    centred -= centred.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    plane = left[:, :2] * sizes[:2]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    return np.round(plane / np.abs(plane).max(), 4)
