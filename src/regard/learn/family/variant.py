"""What the members of the family have in common: one ancestor, one notion of distance, one way to take a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.validation import Bools, Floats, as_floats, as_mask, check_leading_axes

if TYPE_CHECKING:
    from regard.learn.family.by_hand import ByHand


class Variant(ScaledDotProductAttention):
    """The first chapter's class, except that `explain` follows the steps that a subclass changes.

    >>> print(Variant(d_k=1).explain([[1]], [[2]], [[3]], tokens=["a"], query_idx=0).steps[0])
    1. Compare the query [1] with each key
       a  1·2 = 2
    """

    def __call__(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        return self.forward(Q, K, V, mask)  # the subclass's own

    def explain(  # type: ignore[override]  # the steps differ from member to member, so the record is a freer one
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, tokens: Sequence[str], query_idx: int
    ) -> ByHand:
        """One query by hand: every number on the way to its `weights` and its `output`; `print` it to read it."""
        from regard.learn.family.by_hand import explain

        return explain(self, Q, K, V, tokens, query_idx)


def ahead(q_len: int, kv_len: int) -> npt.NDArray[np.int64]:
    """How far each key lies ahead of each query, (q_len, kv_len); the last query stands at the last key.

    >>> ahead(2, 3)
    array([[-1,  0,  1],
           [-2, -1,  0]])
    """
    return np.arange(kv_len)[None, :] - np.arange(kv_len - q_len, kv_len)[:, None]


def mask_for(Q: npt.ArrayLike, K: npt.ArrayLike, mask: npt.ArrayLike | None) -> Bools:
    """The mask in the shape of the scores of Q and K, all True where there is none.

    >>> mask_for([[1], [2]], [[3], [4]], mask=[True, False])
    array([[ True, False],
           [ True, False]])
    """
    Q, K = as_floats("mask", "Q", Q, "q_len", "d_k"), as_floats("mask", "K", K, "kv_len", "d_k")
    check_leading_axes("mask", "Q", Q, "K", K)
    shape = (*np.broadcast_shapes(Q.shape[:-2], K.shape[:-2]), Q.shape[-2], K.shape[-2])
    return np.ones(shape, dtype=bool) if mask is None else as_mask("mask", mask, shape)
