"""Explorer of a whole language model that runs in the page."""

from __future__ import annotations

import os

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.learn.tiny_gpt import TinyGPT
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.types import Array

DEFAULT_TEXT = "Once upon a time, there was a little girl named Lily. One day, Li"
MAX_WINDOW = 192  # bytes that the page shows the model at most
SHOWN_LETTERS = 60  # the most common bytes of the training text; embeddings of rare ones are hardly trained
LETTER_SIZE = 0.08  # in the plane of letters, whose sides are 2
PUSHES = 60  # rounds in which letters that overlap are moved apart


def model(text: str = DEFAULT_TEXT, *, path: str | os.PathLike[str] | None = None) -> Page:
    """Build a page with a small GPT that runs in it: it reads what the reader types and writes on.

    The model is `regard.learn.TinyGPT`. It has 0.9 million parameters, reads bytes and was trained on children's
    stories (`examples/stories`). The page shows its guess for the next byte with temperature and top-k, the guess after
    every layer, the map of each head for the reader's text, and the embeddings of the letters. Heads can be switched
    off. The page computes in float64, in a worker, in JavaScript; the weights are stored as float16.

    Args:
        text: Text that the page opens with.
        path: File of another model, as in `TinyGPT`. Default: the model of children's stories.

    Returns:
        The page, about 2 MB.

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
    gpt = TinyGPT(path)
    arrays = gpt.parameters
    numbers = np.concatenate([array.ravel() for array in arrays.values()]).astype(np.float16)
    letters = np.array(gpt.about["seen"][:SHOWN_LETTERS])
    return build_page(
        "A tiny GPT",
        "tinyGpt",
        {
            "text": text,
            "config": {**gpt.config, "context": min(gpt.about["context"], MAX_WINDOW)},
            "shapes": {name: list(array.shape) for name, array in arrays.items()},
            "weights": encode_array(numbers),
            "parameters": len(numbers),
            "letters": letters,
            "plane": project_letters(arrays["embedding.weight"][letters]),
            "bits": gpt.about["bits"],
            "training": {name: gpt.about[name] for name in ("steps", "batch", "context", "text")},
        },
    )


def project_letters(vectors: Array) -> Array:
    """Project embeddings onto the plane in which they differ most (principal components).

    Args:
        vectors: Embeddings, `(letters, width)`.

    Returns:
        Coordinates between −1 and 1, `(letters, 2)`, moved apart by about `LETTER_SIZE`, so that all can be read. The
        entry of each axis that is farthest out is positive.
    """
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    plane = left[:, :2] * sizes[:2]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    plane /= np.abs(plane).max()
    for _ in range(PUSHES):
        offsets = plane[:, None] - plane[None]  # (letters, letters, 2)
        distances = np.linalg.norm(offsets, axis=-1) + np.eye(len(plane))
        overlaps = np.maximum(0, LETTER_SIZE / distances - 1)[..., None] * offsets
        if not overlaps.any():
            break
        plane = np.clip(plane + overlaps.sum(1) / 2, -1, 1)
    return np.round(plane, 4)
