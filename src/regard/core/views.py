"""Views of a matrix that compute nothing by themselves: its scores, its transpose, and a lazy indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regard.core.indexing import resolve_index
from regard.errors import ArgumentError
from regard.types import Array

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix


class ScoresView:
    """The scores of a matrix, indexed like the matrix."""

    def __init__(self, matrix: AttentionMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, q_len, kv_len)."""
        return self._matrix.shape

    def __getitem__(self, index: Any) -> Array:
        """Compute the scores at an index; see `AttentionMatrix.__getitem__`."""
        resolved = resolve_index(index, self.shape, "A.scores[index]")
        return self._matrix._entries(resolved, "A.scores[index]", weights=False)

    def __repr__(self) -> str:
        return f"<scores of {repr(self._matrix).splitlines()[0]}>"


class LazyIndexer:
    """An indexer that returns some heads and rows of a matrix as a lazy matrix.

    Integers drop a leading axis. Rows always remain an axis, even a single one.
    """

    def __init__(self, matrix: AttentionMatrix) -> None:
        self._matrix = matrix

    def __getitem__(self, index: Any) -> AttentionMatrix:
        """Return the lazy matrix of some heads and rows.

        Args:
            index: Heads and rows as integers, slices or one 1-D integer array; all columns must be kept.

        Raises:
            ArgumentError: If the index leaves out or reorders columns, or adds axes.
        """
        shape = self._matrix.shape
        resolved = resolve_index(index, shape, "A.lazy[index]")
        columns = resolved.positions[-1]
        if resolved.adds_axes or len(columns) != shape[-1] or (np.diff(columns) != 1).any():
            raise ArgumentError(
                "A.lazy[index]",
                received=f"{index!r}",
                expected="an index of heads and rows that keeps all columns",
                hint="A row's weights depend on all its keys; to select columns, compute the weights with A[index].",
            )
        return self._matrix._view(resolved)


class TransposedMatrix:
    """The transpose of a matrix; its products sum over the queries."""

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.mT = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, kv_len, q_len)."""
        *leading, q_len, kv_len = self.mT.shape
        return (*leading, kv_len, q_len)

    def __matmul__(self, x: Array) -> Array:
        """Multiply by x of shape (…, heads, q_len, width) or (q_len,): (…, heads, kv_len, width) or (…, kv_len)."""
        return self.mT._product(x, "A.mT @ x", transposed=True)

    def to_dense(self) -> Array:
        """Compute and store the whole transpose: (…, heads, kv_len, q_len)."""
        return self.mT.to_dense().swapaxes(-1, -2)

    def __repr__(self) -> str:
        return f"<transpose of {repr(self.mT).splitlines()[0]}>"
