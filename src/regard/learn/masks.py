"""Causal and padding masks as boolean arrays, True = attend, and batches of padded sequences."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from regard.learn.validation import Bools, Floats, as_count, as_floats, require


def create_causal_mask(seq_len: int) -> Bools:
    """Create a mask in which each position attends to itself and to earlier positions: kv_idx ≤ q_idx.

    Args:
        seq_len: Number of tokens.

    Returns:
        A boolean mask (seq_len, seq_len), True = attend.

    >>> create_causal_mask(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    positions = np.arange(as_count("create_causal_mask", "seq_len", seq_len, minimum=0))
    return positions[None, :] <= positions[:, None]


def create_padding_mask(lengths: ArrayLike, max_length: int) -> Bools:
    """Create a mask of the real tokens in a padded batch: kv_idx < length.

    The two axes of length one broadcast over heads and queries, so the mask fits scores of shape
    (batch, heads, q_len, max_length). Combine it with a causal mask by `&`.

    Args:
        lengths: Number of real tokens of each sequence (batch,).
        max_length: Length of the padded sequences.

    Returns:
        A boolean mask (batch, 1, 1, max_length), True = attend.

    Raises:
        ArgumentError: If the lengths are not whole numbers in one axis, or one is negative or above `max_length`.

    >>> create_padding_mask([2, 3], max_length=4)[:, 0, 0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0]])
    """
    max_length = as_count("create_padding_mask", "max_length", max_length, minimum=0)
    lengths = np.asarray(lengths)
    require(
        lengths.ndim == 1
        and (lengths.dtype.kind in "iu" or lengths.size == 0)
        and bool(((lengths >= 0) & (lengths <= max_length)).all()),
        "create_padding_mask",
        received=f"lengths {lengths.tolist()} with max_length {max_length}",
        expected="whole numbers between 0 and max_length, one for each sequence: shape (batch,)",
        hint="Pass the number of real tokens of each sequence. Truncate sequences that are too long, or raise "
        "max_length.",
    )
    real: Bools = np.arange(max_length)[None, :] < lengths[:, None]  # (batch, max_length)
    return real[:, None, None, :]


def pad_batch(sequences: Iterable[ArrayLike], *, fill: float = 0.0) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Pad sequences at the end to the length of the longest, and return their lengths.

    Pass the lengths to `create_padding_mask`, which masks the padding.

    Args:
        sequences: Arrays (n, d), where n may differ.
        fill: Value of the padding.

    Returns:
        The batch (batch, max_length, d) and the lengths (batch,).

    Raises:
        ArgumentError: If there is no sequence, or the sequences differ in d.

    >>> padded, lengths = pad_batch([[[1, 2]], [[3, 4], [5, 6]]])
    >>> padded
    array([[[1., 2.],
            [0., 0.]],
    <BLANKLINE>
           [[3., 4.],
            [5., 6.]]])
    >>> lengths
    array([1, 2])
    """
    arrays = [as_floats("pad_batch", f"sequences[{i}]", x, "n", "d") for i, x in enumerate(sequences)]
    shapes = [array.shape for array in arrays]
    require(
        bool(arrays) and all(len(shape) == 2 and shape[1] == shapes[0][1] for shape in shapes),
        "pad_batch",
        received=f"sequences of shapes {shapes}",
        expected="at least one sequence, each of shape (n, d) with the same d",
        hint="Use the same d for every token of every sequence.",
    )
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    padded = np.full((len(arrays), lengths.max(), shapes[0][1]), fill, dtype=np.float64)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded, lengths
