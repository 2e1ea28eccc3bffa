"""Sequences of different lengths in one array: fill up the short ones, and remember how long they were."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.learn.validation import Floats, as_floats


def pad_batch(
    sequences: Iterable[npt.ArrayLike], *, fill: float = 0.0
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The sequences, (n, d) each, in one array (batch, max_length, d), and their lengths (batch,).

    Short ones are filled up at the end. The lengths go to `create_padding_mask`, which hides the filling.

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
    tables = [as_floats("pad_batch", f"sequences[{i}]", one, "n", "d") for i, one in enumerate(sequences)]
    shapes = [table.shape for table in tables]
    if not tables or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ArgumentError(
            "pad_batch",
            received=f"sequences of shapes {shapes}",
            expected="at least one sequence, each of shape (n, d) with the same d",
            hint="Give every token of every sequence equally many numbers.",
        )
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    padded = np.full((len(tables), lengths.max(), shapes[0][1]), fill, dtype=np.float64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded, lengths
