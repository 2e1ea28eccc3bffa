"""Layouts: which positions of a sequence each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from regard.errors import ArgumentError
from regard.types import IntArray

LayoutName = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Layout:
    """The positions of a sequence that each rank holds.

    Attributes:
        chunks: For each rank, the chunks of the sequence that it holds, in the order in which it holds them; none is
            empty.
    """

    chunks: tuple[tuple[range, ...], ...]

    @cached_property
    def length(self) -> int:
        """Number of positions of the whole sequence."""
        return sum(self.lengths)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(sum(map(len, chunks)) for chunks in self.chunks)

    def positions(self, rank: int) -> IntArray:
        """Return the positions that a rank holds, in the order in which it holds them."""
        parts = [np.arange(chunk.start, chunk.stop) for chunk in self.chunks[rank]]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def build_layout(name: str, lengths: Sequence[int], operation: str = "attention") -> Layout:
    """Build the layout of a sequence.

    >>> build_layout("zigzag", [4, 4]).chunks
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    >>> build_layout("contiguous", [3, 5]).chunks
    ((range(0, 3),), (range(3, 8),))
    """
    if name == "contiguous":
        chunk_lengths = list(lengths)
    elif name == "zigzag":
        chunk_lengths = [-(-length // 2) for length in lengths] + [length // 2 for length in lengths[::-1]]
    else:
        raise ArgumentError(
            operation,
            received=f"layout={name!r}",
            expected='"contiguous" or "zigzag"',
            hint='"zigzag" balances the work of a causal mask.',
        )
    stops = list(accumulate(chunk_lengths))
    chunks = [range(stop - length, stop) for stop, length in zip(stops, chunk_lengths, strict=True)]
    size = len(lengths)
    held = [
        (chunks[rank], *((chunks[2 * size - 1 - rank],) if name == "zigzag" else ())) for rank in range(size)
    ]
    return Layout(tuple(tuple(chunk for chunk in own if len(chunk)) for own in held))


def split_evenly(length: int, size: int) -> list[int]:
    """Return the lengths of `size` parts of a sequence that differ by one at most, the longer ones first.

    >>> split_evenly(8, 3)
    [3, 3, 2]
    """
    return [length // size + (rank < length % size) for rank in range(size)]
