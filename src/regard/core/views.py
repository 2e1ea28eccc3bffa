"""Faces of a matrix: its scores, its transpose, and some of its heads and rows, each still lazy."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

from regard.core.indexing import resolve_index
from regard.errors import ArgumentError
from regard.types import Array

# The matrix: its module is to the right of this one, so it is not named here.
Matrix = TypeVar("Matrix", bound=Any)


class Scores(Generic[Matrix]):
    """The scores of a matrix, to be indexed like it."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return tuple(self._matrix.shape)

    def __getitem__(self, index: Any) -> Array:
        return self._matrix._entries(index, "A.scores[index]", weights=False)

    def __repr__(self) -> str:
        return f"<scores of {repr(self._matrix).splitlines()[0]}>"


class Lazy(Generic[Matrix]):
    """Some heads and rows of a matrix, as a matrix: integers drop a leading axis, rows always remain an axis."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def __getitem__(self, index: Any) -> Matrix:
        matrix = self._matrix
        positions, local, kept = resolve_index(index, matrix.shape, "A.lazy[index]")
        plain = all(
            each is not None and getattr(each, "ndim", 1) == 1 for each in local if not isinstance(each, int)
        )
        if not plain or len(positions[-1]) != matrix.shape[-1] or (np.diff(positions[-1]) != 1).any():
            raise ArgumentError(
                "A.lazy[index]",
                received=f"{index!r}",
                expected="heads and rows, all columns kept",
                hint="A row's weights depend on all its keys; for some columns take A[index], which computes them.",
            )
        part: Matrix = matrix._part(positions[:-1], kept[:-1])
        return part


class Transposed(Generic[Matrix]):
    """The transpose of a matrix: what it is multiplied by is summed over the queries."""

    def __init__(self, matrix: Matrix) -> None:
        self.mT = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, kv_len, q_len)"""
        *lead, q_len, kv_len = self.mT.shape
        return (*lead, kv_len, q_len)

    def __matmul__(self, x: Any) -> Array:
        """(…, heads, kv_len, width), for x of shape (…, heads, q_len, width) or (q_len,)."""
        return self.mT._product(x, "A.mT @ x", transposed=True)

    def to_dense(self) -> Array:
        """The whole transpose, stored."""
        return self.mT.to_dense().swapaxes(-1, -2)

    def __repr__(self) -> str:
        return f"<transpose of {repr(self.mT).splitlines()[0]}>"
