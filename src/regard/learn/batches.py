"""Pad sequences of different lengths into one array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.learn.validation import Floats, as_floats


def pad_batch(
    sequences: Iterable[npt.ArrayLike], *, fill: float = 0.0
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Pad sequences at the end to the length of the longest, and return their lengths.

    Pass the lengths to `create_padding_mask`, which masks the padding.

    Args:
        sequences: Arrays (n, d), where n may differ.
        fill: Value of the padding.

    Returns:
        The batch (batch, max_length, d) and the lengths (batch,).

    Raises:
        ArgumentTypeError: If `sequences` is not iterable.
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
    if not isinstance(sequences, Iterable):
        raise ArgumentTypeError(
            "pad_batch",
            received=f"sequences, {describe_argument(sequences)}",
            expected="a list of sequences of shape (n, d)",
            hint="A single sequence is a batch of one: pad_batch([x]).",
        )
    arrays = [as_floats("pad_batch", f"sequences[{i}]", x, "n", "d") for i, x in enumerate(sequences)]
    shapes = [array.shape for array in arrays]
    if not arrays or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ArgumentError(
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
