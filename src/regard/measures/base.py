"""What every measure has, and what they share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regard.types import Array, IntArray

if TYPE_CHECKING:
    from regard.core.problem import Problem


class Measure:
    """Base of measures: give it `init` and `step`, and `merge` and `finish` where the ones here do not fit.

    (batch, head) pairs are on one axis: a tile of weights is `(pairs, rows, columns)`, and the arrays that
    `finish` returns begin with the axis of pairs. Weights are final when `step` sees them, so nothing is ever
    rescaled; tiles that the mask leaves empty are not shown.

    >>> import regard
    >>> from regard.learn import cat
    >>> class Above(Measure):  # how many keys of each row have a weight above 0.2
    ...     def init(self, shape, xp):
    ...         return xp.zeros(shape[:2])
    ...
    ...     def step(self, state, weights, scores, q_idx, kv_idx, xp):
    ...         state[:, q_idx] += (weights > 0.2).sum(-1)
    ...         return state
    >>> regard.attention(cat.Q, cat.K).measure(Above()).above
    array([2., 2., 2., 1., 1.])
    """

    # Whether `step` looks at the scores. Where no measure does, it may get None for them, and weights whose memory
    # is used again for the next tile: what is to be kept must be copied.
    reads_scores: ClassVar[bool] = True

    def bind(self, problem: Problem) -> Measure:
        """The measure for one matrix, before the first tile; for those that need more than the tile."""
        return self

    def columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        """Columns (own pairs, kv_len, width) whose product with the matrix gives the measure, if there are any.

        With them, which of their own pairs serves each pair. Such a measure can ride on a fused product.
        """
        return None

    def from_columns(self, product: Array, lse: Array, problem: Problem) -> Any:
        """The result from that product, (pairs, rows, width)."""
        return product[..., 0]

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        """The state before any tile, for a matrix of shape (pairs, q_len, kv_len)."""
        raise TypeError(f"{type(self).__name__} must define init(shape, xp)")

    def step(self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        """The state after one more tile; `q_idx` and `kv_idx` are the rows and columns it covers."""
        raise TypeError(f"{type(self).__name__} must define step(state, weights, scores, q_idx, kv_idx, xp)")

    def merge(self, a: Any, b: Any) -> Any:
        """The state of two sets of tiles together: of tiles, ranks or documents alike. Associative up to rounding."""
        return a + b

    def finish(self, state: Any) -> Any:
        """The result from the last state."""
        return state


def span(indices: Array) -> slice:
    """The indices of a tile's rows or columns, which follow each other, as a slice.

    >>> import numpy as np
    >>> span(np.arange(8, 12))
    slice(8, 12, None)
    """
    first = int(indices[0])
    return slice(first, first + len(indices))


def for_all(column: Array, problem: Problem) -> tuple[Array, IntArray]:
    """One column that serves all pairs."""
    array = problem.engine.xp.asarray(column, dtype=problem.dtype)[None, :, None]
    return array, np.zeros(problem.shape[0], np.int64)


def name_of(measure: Any) -> str:
    """The field of `A.measure(…)` that holds a measure's result: its class name in small letters.

    >>> import regard
    >>> name_of(regard.TopK(8))
    'top_k'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(measure).__name__.lstrip("_")).lower()
