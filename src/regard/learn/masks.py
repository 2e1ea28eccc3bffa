"""The two masks every lesson needs, as boolean arrays: True = attend."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.learn.validation import Bools, as_count


def create_causal_mask(seq_len: int) -> Bools:
    """A (seq_len, seq_len) mask that lets each position see itself and what came before: kv_idx ≤ q_idx.

    >>> create_causal_mask(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    positions = np.arange(as_count("create_causal_mask", "seq_len", seq_len, minimum=0))
    return positions[None, :] <= positions[:, None]


def create_padding_mask(lengths: npt.ArrayLike, max_length: int) -> Bools:
    """A (batch, 1, 1, max_length) mask that lets the real tokens through: kv_idx < length.

    The two axes of one stand for every head and every query, so it goes with scores of shape
    (batch, heads, q_len, max_length), and `&` joins it to a causal mask.

    >>> create_padding_mask([2, 3], max_length=4)[:, 0, 0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0]])
    """
    max_length = as_count("create_padding_mask", "max_length", max_length, minimum=0)
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size > 0):
        raise ArgumentTypeError(
            "create_padding_mask",
            received=f"lengths, {describe_argument(given)}",
            expected="lengths as whole numbers, one for each sequence: shape (batch,)",
            hint="Count the real tokens of each sequence; from a table of them, table.sum(axis=1).",
        )
    if (given < 0).any() or (given > max_length).any():
        raise ArgumentError(
            "create_padding_mask",
            received=f"lengths from {given.min()} to {given.max()} with max_length {max_length}",
            expected="lengths between 0 and max_length",
            hint=f"Raise max_length to {max(given.max(), 0)}, or cut the sequences first.",
        )
    real: Bools = np.arange(max_length)[None, :] < given[:, None]  # (batch, max_length)
    return real[:, None, None, :]
