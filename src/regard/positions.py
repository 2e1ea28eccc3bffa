"""Positions: attention does not see order, so order is put into the vectors.

Both functions are plain NumPy, compute in float64 and return the dtype they were given.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from regard._errors import ArgumentError, kind_of
from regard._types import Array, as_array, check_count

__all__ = ["rope", "sinusoidal"]


def sinusoidal(length: int, dim: int, *, base: float = 10_000.0) -> Array:
    """Sinusoidal position vectors, shape (length, dim): sines at even places, cosines at odd ones.

    Entry 2i of position p is sin(p / base^(2i/dim)), entry 2i + 1 its cosine (Vaswani et al., 1706.03762).

    >>> sinusoidal(2, 4).round(3)
    array([[0.   , 1.   , 0.   , 1.   ],
           [0.841, 0.54 , 0.01 , 1.   ]])
    """
    check_count(length, 0, 2**31, "sinusoidal", "length", "", "It counts tokens.")
    _even(dim, "sinusoidal")
    angles = np.arange(length)[:, None] * _frequencies(dim, base)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, dim)


def rope(
    x: Any,
    positions: Any = None,
    *,
    pairing: Literal["halves", "neighbours"],
    base: float = 10_000.0,
) -> Array:
    """Queries or keys turned by their position, shape (…, length, head_dim) as they came.

    Pair i is turned by the angle position · base^(−2i/head_dim) (Su et al., 2104.09864). Which entries make a
    pair differs between models and must be said: `"halves"` pairs entry i with i + head_dim/2 (Llama, GPT-NeoX
    and most of transformers), `"neighbours"` pairs 2i with 2i + 1 (the paper, GPT-J, Llama's own checkpoints).
    `positions` has shape (length,) or one that broadcasts to (…, length); left out, it counts from 0.

    >>> rope(np.array([[1.0, 0.0], [1.0, 0.0]]), pairing="halves").round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    x = as_array(x, "rope", "x")
    if x.ndim < 2 or (x.dtype.kind not in "iuf" and x.dtype.name != "bfloat16"):
        raise ArgumentError(
            "rope",
            received=kind_of(x),
            expected="numbers of shape (…, length, head_dim)",
            cure="A single token is a length of one: x[None, :].",
        )
    if pairing not in ("halves", "neighbours"):
        raise ArgumentError(
            "rope",
            received=f"pairing={pairing!r}",
            expected='"halves" or "neighbours"',
            cure='Models of transformers that call rotate_half are "halves"; GPT-J is "neighbours".',
        )
    length, dim = x.shape[-2:]
    _even(dim, "rope")
    positions = np.arange(length) if positions is None else np.asarray(positions)
    lead = x.shape[:-1]
    if positions.ndim == 0 or not _broadcasts(positions.shape, lead):
        raise ArgumentError(
            "rope",
            received=f"positions of shape {positions.shape}",
            expected=f"one position for each of {length} tokens, or what broadcasts to {lead}",
            cure="Left out, positions count from 0; with a cache pass arange(start, start + length).",
        )
    angles = positions[..., None] * _frequencies(dim, base)  # (…, length, dim / 2)
    cos, sin = np.cos(angles), np.sin(angles)
    if pairing == "halves":
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        turned = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return turned.astype(x.dtype if x.dtype.kind not in "iu" else np.float64)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _frequencies(dim: int, base: float) -> Array:
    return base ** (-np.arange(0, dim, 2) / dim)


def _even(dim: int, operation: str) -> None:
    if not isinstance(dim, int | np.integer) or dim % 2 or dim < 0:
        raise ArgumentError(
            operation, received=f"dim {dim}", expected="an even number", cure="Entries are turned in pairs."
        )
