"""Compression of the text without attention, in bits per byte: zlib, xz, and an n-gram model."""

from __future__ import annotations

import lzma
import math
import zlib
from collections import Counter, defaultdict

from examples.induction.data import TextSplit


def measure_zlib(text: TextSplit) -> float:
    """Measure zlib at its best level on the held-out text alone; its window of 32 kB could not use the rest.

    Args:
        text: The training text and the held-out text.

    Returns:
        Bits per byte of the held-out text.
    """
    return 8 * len(zlib.compress(text.held_out, 9)) / len(text.held_out)


def measure_xz(text: TextSplit) -> float:
    """Measure xz at its best level: how much the held-out text adds to the compressed training text.

    Args:
        text: The training text and the held-out text.

    Returns:
        Bits per byte of the held-out text.
    """
    both, before = (len(lzma.compress(part, preset=9)) for part in (text.train + text.held_out, text.train))
    return 8 * (both - before) / len(text.held_out)


def measure_ngrams(text: TextSplit, order: int = 5) -> float:
    """Predict the next byte by how often it followed the last `order` bytes, smoothed with shorter contexts.

    The smoothing is that of Witten and Bell.

    Args:
        text: The training text and the held-out text.
        order: Length of the longest context.

    Returns:
        Bits per byte of the held-out text.

    >>> [round(measure_ngrams(TextSplit(b"ab" * 200, b"abababab"), order=k), 2) for k in (0, 1)]
    [1.01, 0.0]
    """
    counts: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(order + 1)]
    train, held_out = text
    for end in range(order, len(train)):
        for k in range(order + 1):
            counts[k][train[end - k : end]][train[end]] += 1
    bits = 0.0
    for end in range(order, len(held_out)):
        probability = 1 / 256
        for k in range(order + 1):
            followers = counts[k].get(held_out[end - k : end])
            if followers is None:
                break
            distinct, total = len(followers), followers.total()
            probability = (followers[held_out[end]] + distinct * probability) / (total + distinct)
        bits -= math.log2(probability)
    return bits / (len(held_out) - order)
