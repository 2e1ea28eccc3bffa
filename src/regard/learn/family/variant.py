"""The base class of the variants, and two helpers they share: relative positions and a broadcast mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.family.worked_row import WorkedRow, explain
from regard.learn.script_output import print_in_script
from regard.learn.validation import Bools, Floats, TrueMeans, as_floats, as_mask, check_leading_axes


class AttentionVariant(ScaledDotProductAttention):
    """Scaled dot-product attention whose `explain` also shows the steps that a subclass changes.

    Args:
        d_k: Number of entries in each query and key.

    >>> steps = AttentionVariant(d_k=1).explain([[1]], [[2]], [[3]], tokens=["a"])
    Query 0 "a" by hand
    ...
    >>> print(steps.steps[0])
    1. Compare the query [1] with each key
       a  1·2 = 2
    """

    def __call__(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        return self.forward(Q, K, V, mask, true_means)  # the subclass's forward

    def explain(  # type: ignore[override]  # steps differ between variants, so the record is a different one
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        tokens: Sequence[str] | None = None,
        query_idx: int = 0,
    ) -> WorkedRow:
        """Work out one query by hand, with every number on the way to its output and its weights.

        The steps are printed, unless a notebook or a Python prompt shows the returned object by itself.

        Args:
            Q: Queries (q_len, d_k).
            K: Keys (kv_len, d_k).
            V: Values (kv_len, d_v).
            tokens: A name for each key. Default: "key 0", "key 1" and so on.
            query_idx: The row of Q to work out, counted from 0.

        Returns:
            The steps, the output and the weights of that row.
        """
        tokens = [f"key {j}" for j in range(np.shape(K)[-2])] if tokens is None else tokens
        return print_in_script(explain(self, Q, K, V, tokens, query_idx))


def relative_positions(q_len: int, kv_len: int) -> npt.NDArray[np.int64]:
    """Compute the position of each key minus that of each query; the last query is aligned with the last key.

    Args:
        q_len: Number of queries.
        kv_len: Number of keys.

    Returns:
        Differences (q_len, kv_len), negative where the key comes before the query.

    >>> relative_positions(2, 3)
    array([[-1,  0,  1],
           [-2, -1,  0]])
    """
    return np.arange(kv_len)[None, :] - np.arange(kv_len - q_len, kv_len)[:, None]


def broadcast_mask(Q: npt.ArrayLike, K: npt.ArrayLike, mask: npt.ArrayLike | None) -> Bools:
    """Broadcast a mask to the shape of the scores; without a mask, every key is visible.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).
        mask: Boolean, True = attend, or None.

    Returns:
        A boolean array (…, q_len, kv_len).

    >>> broadcast_mask([[1], [2]], [[3], [4]], mask=[True, False])
    array([[ True, False],
           [ True, False]])
    """
    Q, K = as_floats("mask", "Q", Q, "q_len", "d_k"), as_floats("mask", "K", K, "kv_len", "d_k")
    check_leading_axes("mask", "Q", Q, "K", K)
    shape = (*np.broadcast_shapes(Q.shape[:-2], K.shape[:-2]), Q.shape[-2], K.shape[-2])
    return np.ones(shape, dtype=bool) if mask is None else as_mask("mask", mask, shape)
