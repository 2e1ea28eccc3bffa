"""What a text costs without a model of attention, in bits for each byte: by zlib, by xz, by counting."""

from __future__ import annotations

import lzma
import math
import zlib
from collections import Counter, defaultdict

from examples.induction.data import Text


def by_zlib(text: Text) -> float:
    """zlib at its best, on the held-out text alone: its window of 32 kB would have forgotten the rest."""
    return 8 * len(zlib.compress(text.held_out, 9)) / len(text.held_out)


def by_xz(text: Text) -> float:
    """xz at its best: what the held-out text adds to the training text's size, so it may point into all of it."""
    both, before = (len(lzma.compress(part, preset=9)) for part in (text.train + text.held_out, text.train))
    return 8 * (both - before) / len(text.held_out)


def by_counting(text: Text, order: int = 5) -> float:
    """The next byte by how often it followed the last `order`, mixed with shorter contexts by Witten and Bell's rule.

    >>> [round(by_counting(Text(b"ab" * 200, b"abababab"), order=k), 2) for k in (0, 1)]
    [1.01, 0.0]
    """
    counts: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(order + 1)]
    train, held_out = text
    for end in range(order, len(train)):
        for k in range(order + 1):
            counts[k][train[end - k : end]][train[end]] += 1
    bits = 0.0
    for end in range(order, len(held_out)):
        chance = 1 / 256
        for k in range(order + 1):
            followed = counts[k].get(held_out[end - k : end])
            if followed is None:
                break
            kinds, total = len(followed), followed.total()
            chance = (followed[held_out[end]] + kinds * chance) / (total + kinds)
        bits -= math.log2(chance)
    return bits / (len(held_out) - order)
