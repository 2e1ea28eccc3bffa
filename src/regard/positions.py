"""Positional encodings: attention does not depend on the order of tokens, so the order is added to the vectors.

Angles, sines and cosines are computed in float64, and results have the dtype of the input. `rope` takes NumPy arrays
and torch tensors, and is differentiable for tensors.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.types import Array, IntArray
from regard.validation import as_array, check_count

__all__ = ["RopeLayout", "rope", "rope_frequencies", "sinusoidal"]

# Order of the rotated pairs: "half" pairs entry i with i + d/2, "interleaved" pairs 2i with 2i + 1.
RopeLayout = Literal["half", "interleaved"]


def sinusoidal(length: int, dim: int, *, base: float = 10_000.0) -> Array:
    """Compute sinusoidal position vectors (Vaswani et al., 1706.03762).

    Entry 2i of position p is sin(p / base^(2i/dim)), and entry 2i + 1 is the cosine of the same angle.

    Args:
        length: Number of positions.
        dim: Number of entries of each vector, even.
        base: Base of the geometric series of wavelengths.

    Returns:
        A float64 array of shape (length, dim).

    Raises:
        ArgumentError: If `length` is negative, or `dim` is not an even number.

    >>> from regard.positions import sinusoidal
    >>> sinusoidal(2, 4).round(3)
    array([[0.   , 1.   , 0.   , 1.   ],
           [0.841, 0.54 , 0.01 , 1.   ]])
    """
    check_count(length, 0, 2**31, "sinusoidal", "length", "", "It counts tokens.")
    _check_even(dim, "sinusoidal")
    angles = np.arange(length)[:, None] * rope_frequencies(dim, base)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, dim)


def rope(
    x: Array,
    positions: Array | None = None,
    *,
    layout: RopeLayout,
    base: float = 10_000.0,
) -> Array:
    """Rotate queries or keys by their positions (rotary embedding, Su et al., 2104.09864).

    Pair i is rotated by the angle position · base^(−2i/head_dim).

    Args:
        x: Array or tensor of shape (…, length, head_dim), head_dim even.
        positions: Positions of the tokens, of shape (length,) or one that broadcasts to (…, length). The default
            counts from 0.
        layout: Which entries form a pair. It differs between models, so there is no default. "half" pairs entry i
            with i + head_dim/2 (Llama, GPT-NeoX and most of transformers). "interleaved" pairs 2i with 2i + 1 (the
            paper, GPT-J, Llama's own checkpoints).
        base: Base of the geometric series of frequencies.

    Returns:
        The rotated vectors, with the shape and dtype of `x`. Integers become float64.

    Raises:
        ArgumentError: If `x` does not hold real numbers, has fewer than two axes or an odd head_dim, if `layout` is
            unknown, or if `positions` does not broadcast to (…, length).

    >>> import numpy as np, regard
    >>> regard.rope(np.array([[1.0, 0.0], [1.0, 0.0]]), layout="half").round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    is_tensor = hasattr(x, "new_tensor")
    x = x if is_tensor else as_array(x, "rope", "x")
    is_real = x.is_floating_point() if is_tensor else x.dtype.kind in "iuf" or x.dtype.name == "bfloat16"
    if x.ndim < 2 or not is_real:
        raise ArgumentError(
            "rope",
            received=describe_argument(x),
            expected="numbers of shape (…, length, head_dim)",
            hint="A single token is a sequence of length one: x[None, :]. Convert integer tensors with x.float().",
        )
    check_rope_layout(layout, "rope")
    length, dim = x.shape[-2:]
    _check_even(dim, "rope")
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
            expected=f"one position for each of {length} tokens, or a shape that broadcasts to {lead}",
            hint="The default counts from 0; with a cache pass arange(start, start + length).",
        )
    cos, sin = rope_tables(positions, rope_frequencies(dim, base), layout)
    if is_tensor:
        wide = x if x.dtype.itemsize > 2 else x.float()
        return rotate(wide, wide.new_tensor(cos), wide.new_tensor(sin), layout).to(x.dtype)
    return rotate(x, cos, sin, layout).astype(x.dtype if x.dtype.kind not in "iu" else np.float64)


def rope_frequencies(dim: int, base: float = 10_000.0) -> Array:
    """Return the angle that each pair of entries is rotated by per position: base^(−2i/dim).

    Args:
        dim: Number of rotated entries, even.
        base: Base of the geometric series.

    Returns:
        A float64 array of shape (dim / 2,).

    >>> rope_frequencies(4)
    array([1.  , 0.01])
    """
    return base ** (-np.arange(0, dim, 2) / dim)


def rope_tables(positions: IntArray, frequencies: Array, layout: RopeLayout) -> tuple[Array, Array]:
    """Compute the cosines and the signed sines that `rotate` multiplies with, (…, dim) each for positions (…)."""
    angles = positions[..., None] * frequencies  # (…, dim / 2)
    cos, sin = np.cos(angles), np.sin(angles)
    if layout == "half":
        return np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)
    return np.repeat(cos, 2, -1), np.stack([-sin, sin], -1).reshape(*angles.shape[:-1], -1)


def rotate(x: Array, cos: Array, sin: Array, layout: RopeLayout) -> Array:
    """Rotate x by the tables of `rope_tables`: x · cos + (the other entry of each pair) · sin."""
    if layout == "half":
        half = x.shape[-1] // 2
        partner = np.roll(x, half, -1) if isinstance(x, np.ndarray) else x.roll(half, -1)
    else:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        partner = pairs[..., [1, 0]].reshape(x.shape)
    return x * cos + partner * sin


def check_rope_layout(layout: object, operation: str) -> None:
    """Raise an `ArgumentError` unless `layout` is a `RopeLayout`."""
    if layout not in ("half", "interleaved"):
        raise ArgumentError(
            operation,
            received=f"layout={layout!r}",
            expected='"half" or "interleaved"',
            hint='transformers models that call rotate_half are "half"; GPT-J is "interleaved".',
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _check_even(dim: int, operation: str) -> None:
    if not isinstance(dim, int | np.integer) or dim % 2 or dim < 0:
        raise ArgumentError(
            operation, received=f"dim {dim}", expected="an even number", hint="Entries are rotated in pairs."
        )
