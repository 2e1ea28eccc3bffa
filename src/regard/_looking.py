"""What a matrix shows of itself: one query's four steps, and its faces in a terminal and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard._errors import ArgumentError, KindError, kind_of, named_shape
from regard._explain import Explanation, explain
from regard._index import pick
from regard._shapes import pairs_of
from regard.view import text


class Looking:
    """What can be seen of a matrix that has `shape`, `mask`, `to_dense` and its problem."""

    shape: Any
    ndim: Any
    dtype: Any
    mask: Any
    to_dense: Any
    _problem: Any

    def explain(self, q_idx: int, value: Any = None, tokens: Sequence[str] | None = None) -> Explanation:
        """The four steps of one query as data; `print` it to read them. `value` is (kv_len, value_dim).

        Of a matrix with several heads explain one: `A.lazy[0, 3].explain(7)`.

        >>> import regard
        >>> print(regard.attention([[1, 0]], [[1, 0], [0, 1]], scale=1.0).explain(0, tokens=["a", "b"]))
        How query 0 attends: 2 keys, head_dim 2
        <BLANKLINE>
        1. Compare: query [1, 0] · key
           a  1·1 + 0·0 = 1
           b  1·0 + 0·1 = 0
        2. Scale: × 1
           a  1 × 1 = 1
           b  0 × 1 = 0
        3. Normalise: exp(score − shift 1), divided by their sum 1.3679
           a  1       0.7311  █████████████████████████████
           b  0.3679  0.2689  ██████████
        """
        if self._problem.shape[0] != 1:
            raise ArgumentError(
                "explain",
                received=f"a matrix of {named_shape(self.shape, 'q_len', 'kv_len')}",
                expected="one head",
                cure=f"Choose one: A.lazy[{', '.join('0' * len(self.shape[:-2]))}].explain({q_idx}).",
            )
        if not hasattr(q_idx, "__index__") or np.ndim(q_idx):
            raise KindError(
                "explain",
                received=kind_of(q_idx),
                expected="the index of one query",
                cure="Explain several in turn: [A.explain(i) for i in rows].",
            )
        row = int(pick((..., q_idx, slice(None)), self.shape, "explain").positions[-2][0])
        if value is not None:
            value = self._problem.engine.floats(value, "explain", "value")
            if value.shape[-2:-1] != (self.shape[-1],) or pairs_of(value) != 1:
                raise ArgumentError(
                    "explain",
                    received=f"value of shape {value.shape}",
                    expected=f"(kv_len {self.shape[-1]}, value_dim)",
                    cure="Give the value of the same head.",
                )
            value = self._problem.engine.cast(value.reshape(value.shape[-2:]), self._problem.dtype)
        return explain(self._problem, row, value, tokens)

    def __repr__(self) -> str:
        name = f"AttentionMatrix{named_shape(self.shape, 'q_len', 'kv_len')} {self.dtype}"
        parts = [name, *self._problem.words]
        parts += [f"mask {self.mask}"] if self.mask is not None else []
        parts += ["sink"] if self._problem.sink is not None else []
        first = ", ".join(parts)
        small = self.ndim == 2 and 0 < math.prod(self.shape) and max(self.shape) <= 8
        return f"{first}\n{text.table(self.to_dense())}" if small else first
