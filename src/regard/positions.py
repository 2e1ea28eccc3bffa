"""Positions: attention does not see order, so order is put into the vectors.

Angles, sines and cosines are computed in float64; what comes back has the dtype that came. `rope` turns tensors as well
as NumPy arrays, and its gradient is that of the product it is.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.types import Array
from regard.validation import as_array, check_count

__all__ = ["frequencies", "rope", "sinusoidal"]

Pairing = Literal["halves", "neighbours"]


def sinusoidal(length: int, dim: int, *, base: float = 10_000.0) -> Array:
    """Sinusoidal position vectors, shape (length, dim): sines at even places, cosines at odd ones.

    Entry 2i of position p is sin(p / base^(2i/dim)), entry 2i + 1 its cosine (Vaswani et al., 1706.03762).

    >>> sinusoidal(2, 4).round(3)
    array([[0.   , 1.   , 0.   , 1.   ],
           [0.841, 0.54 , 0.01 , 1.   ]])
    """
    check_count(length, 0, 2**31, "sinusoidal", "length", "", "It counts tokens.")
    _even(dim, "sinusoidal")
    angles = np.arange(length)[:, None] * frequencies(dim, base)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, dim)


def rope(
    x: Any,
    positions: Any = None,
    *,
    pairing: Pairing,
    base: float = 10_000.0,
) -> Array:
    """Queries or keys turned by their position, shape (…, length, head_dim) as they came; arrays or tensors.

    Pair i is turned by the angle position · base^(−2i/head_dim) (Su et al., 2104.09864). Which entries make a
    pair differs between models and must be said: `"halves"` pairs entry i with i + head_dim/2 (Llama, GPT-NeoX
    and most of transformers), `"neighbours"` pairs 2i with 2i + 1 (the paper, GPT-J, Llama's own checkpoints).
    `positions` has shape (length,) or one that broadcasts to (…, length); left out, it counts from 0.

    >>> import numpy as np
    >>> rope(np.array([[1.0, 0.0], [1.0, 0.0]]), pairing="halves").round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    tensor = hasattr(x, "new_tensor")
    x = x if tensor else as_array(x, "rope", "x")
    numbers = x.is_floating_point() if tensor else x.dtype.kind in "iuf" or x.dtype.name == "bfloat16"
    if x.ndim < 2 or not numbers:
        raise ArgumentError(
            "rope",
            received=describe_argument(x),
            expected="numbers of shape (…, length, head_dim)",
            hint="A single token is a length of one: x[None, :]. Tensors of integers become x.float().",
        )
    check_pairing(pairing, "rope")
    length, dim = x.shape[-2:]
    _even(dim, "rope")
    if positions is None:
        positions = np.arange(length)
    elif hasattr(positions, "new_tensor"):
        positions = positions.cpu()
    positions = np.asarray(positions)
    lead = tuple(x.shape[:-1])
    if positions.ndim == 0 or not _broadcasts(positions.shape, lead):
        raise ArgumentError(
            "rope",
            received=f"positions of shape {positions.shape}",
            expected=f"one position for each of {length} tokens, or what broadcasts to {lead}",
            hint="Left out, positions count from 0; with a cache pass arange(start, start + length).",
        )
    cos, sin = tables(positions, frequencies(dim, base), pairing)
    if tensor:
        wide = x if x.dtype.itemsize > 2 else x.float()
        return turn(wide, wide.new_tensor(cos), wide.new_tensor(sin), pairing).to(x.dtype)
    return turn(x, cos, sin, pairing).astype(x.dtype if x.dtype.kind not in "iu" else np.float64)


def frequencies(dim: int, base: float = 10_000.0) -> Array:
    """The angle by which each pair is turned from one position to the next, shape (dim / 2,): base^(−2i/dim).

    >>> frequencies(4)
    array([1.  , 0.01])
    """
    return base ** (-np.arange(0, dim, 2) / dim)


def tables(positions: Array, frequencies: Array, pairing: Pairing) -> tuple[Array, Array]:
    """Cosines, and sines with their signs, for `turn`: (…, dim) each for positions (…)."""
    angles = positions[..., None] * frequencies  # (…, dim / 2)
    cos, sin = np.cos(angles), np.sin(angles)
    if pairing == "halves":
        return np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)
    return np.repeat(cos, 2, -1), np.stack([-sin, sin], -1).reshape(*angles.shape[:-1], -1)


def turn(x: Array, cos: Array, sin: Array, pairing: Pairing) -> Array:
    """x turned by the angles of `tables`: x · cos + (each entry's partner) · sin."""
    if pairing == "halves":
        half = x.shape[-1] // 2
        partner = np.roll(x, half, -1) if isinstance(x, np.ndarray) else x.roll(half, -1)
    else:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        partner = pairs[..., [1, 0]].reshape(x.shape)
    return x * cos + partner * sin


def check_pairing(pairing: object, operation: str) -> None:
    """Refuse a pairing that is none."""
    if pairing not in ("halves", "neighbours"):
        raise ArgumentError(
            operation,
            received=f"pairing={pairing!r}",
            expected='"halves" or "neighbours"',
            hint='Models of transformers that call rotate_half are "halves"; GPT-J is "neighbours".',
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _even(dim: int, operation: str) -> None:
    if not isinstance(dim, int | np.integer) or dim % 2 or dim < 0:
        raise ArgumentError(
            operation, received=f"dim {dim}", expected="an even number", hint="Entries are turned in pairs."
        )
