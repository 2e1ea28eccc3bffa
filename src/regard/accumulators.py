"""The closed vocabulary of what a compiled pass can accumulate over the weights.

A built-in measure describes itself by one of these values, and an engine may compute any set of them in one read of
each tile. A measure of your own has no such description, and its Python `step` runs in the block loop.

In the shapes, `pairs` counts the (batch, head) pairs, `rows` the queries and `kv_len` the keys of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.types import IntArray


@dataclass(frozen=True)
class RowSum:
    """The sum of weight · factor over the keys of each row: (pairs, rows), float64.

    Attributes:
        factor: "one"; "surprisal", −ln weight; "distance", |q_idx + offset − kv_idx|; or "position", kv_idx.
        offset: Added to q_idx in "distance", to get the position of a query among the keys.
        intervals: With "one", first key of each interval that counts and the key after its last; None for all keys.
    """

    factor: Literal["one", "surprisal", "distance", "position"]
    offset: int = 0
    intervals: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class RowMoments:
    """The weight of each row, its mean distance and its squared deviations from it: (pairs, rows, 3), float64.

    With d = kv_idx − q_idx − offset, the numbers are Σ w, m = Σ w · d / Σ w, and Σ w · (d − m)².

    Attributes:
        offset: Added to q_idx, to get the position of a query among the keys.
    """

    offset: int = 0


@dataclass(frozen=True, eq=False)
class DistanceSum:
    """The sum of the weights of each row at some distances: (pairs, rows), float64.

    A key counts if `least` ≤ kv_idx − q_idx ≤ `most` and, with labels, if it has the label of the row.

    Attributes:
        least: Smallest distance.
        most: Largest distance.
        query_labels: Label of each row, (pairs, rows) or (1, rows); None for no labels.
        key_labels: Label of each key, (pairs, kv_len) or (1, kv_len); None for no labels.
    """

    least: float
    most: float
    query_labels: IntArray | None = None
    key_labels: IntArray | None = None


@dataclass(frozen=True)
class DiagonalSum:
    """The sum of each diagonal: (pairs, rows + kv_len − 1), float64; row i and key j are on rows − 1 + j − i."""


@dataclass(frozen=True)
class ColumnSum:
    """The sum of each column: (pairs, kv_len), float64."""


@dataclass(frozen=True)
class CellReduction:
    """The sum or the maximum of each cell of a grid: (pairs, *cells), float64.

    Entry (i, j) is in cell (i · cells[0] // rows, j · cells[1] // kv_len).

    Attributes:
        cells: Number of cells along the rows and along the columns.
        reduce: "sum" or "max".
    """

    cells: tuple[int, int]
    reduce: Literal["sum", "max"]


@dataclass(frozen=True)
class RowTopK:
    """The k largest weights of each row above 0 and their keys, largest first: two arrays (pairs, rows, k).

    Values are float64 and indices int64; both are 0 where a row has fewer than k weights above 0. NaN ranks highest,
    and ties go to the lowest index.

    Attributes:
        k: Number of weights.
    """

    k: int


@dataclass(frozen=True)
class RowMaxScore:
    """The largest score of each row, without the sink: (pairs, rows), float64; −inf for a row without live keys."""


Accumulator = (
    RowSum | RowMoments | DistanceSum | ColumnSum | DiagonalSum | CellReduction | RowTopK | RowMaxScore
)
