"""What a matrix shows of itself: one query's four steps, and its faces in a terminal and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.core.broadcasting import num_pairs
from regard.core.explanation import Explanation, explain
from regard.core.indexing import resolve_index
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument, format_named_shape
from regard.render import text

if TYPE_CHECKING:
    from regard.pages.html import Page

# A notebook shows every weight up to SMALL tokens; of more, SIDE rows and runs of keys, and fewer rows where those
# would take more than so many weights or multiply-adds.
SMALL, SIDE, ENTRIES, MULTIPLY_ADDS = 16, 12, 1 << 21, 1 << 28


class Looking:
    """What can be seen of a matrix that has `shape`, `mask`, `to_dense` and its problem."""

    shape: Any
    ndim: Any
    dtype: Any
    mask: Any
    lazy: Any
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
        self._check_one_head("explain", f"A.lazy[{{}}].explain({q_idx})")
        row = self._asked_row("explain", q_idx)
        if value is not None:
            value = self._problem.engine.as_float(value, "explain", "value")
            if value.shape[-2:-1] != (self.shape[-1],) or num_pairs(value) != 1:
                raise ArgumentError(
                    "explain",
                    received=f"value of shape {value.shape}",
                    expected=f"(kv_len {self.shape[-1]}, value_dim)",
                    hint="Give the value of the same head.",
                )
            value = self._problem.engine.cast(value.reshape(value.shape[-2:]), self._problem.dtype)
        return explain(self._problem, row, value, tokens)

    def page(
        self,
        tokens: Sequence[str] | None = None,
        *,
        query_tokens: Sequence[str] | None = None,
        title: str = "A map of attention",
    ) -> Page:
        """A map of one head in a file of its own, from the whole down to each weight with both its tokens.

        The file needs no network. It carries query and key in half precision and works out every weight that it shows;
        it says how far they can be from this matrix's, and where a picture is a mean or a sample. `tokens` name the
        keys, and the queries too where they are the same sequence; else `query_tokens` do. Its address keeps the view.

        Of a matrix with several heads show one: `A.lazy[0, 3].page(tokens)`.

        >>> import numpy as np
        >>> import regard
        >>> A = regard.attention(np.eye(3), np.eye(3), mask=regard.causal())
        >>> A.page(["the", "cat", "sat"])
        <page "A map of attention", ... kB: save(path) writes it>
        """
        from regard.pages.head_map import deep_map

        self._check_one_head("page", "A.lazy[{}].page(tokens)")
        return deep_map(self, tokens, query_tokens, title)

    def _check_one_head(self, operation: str, hint: str) -> None:
        """Refuse several heads; `hint` is what to call for one, with {} where its index goes."""
        if self._problem.shape[0] != 1:
            raise ArgumentError(
                operation,
                received=f"a matrix of {format_named_shape(self.shape, 'q_len', 'kv_len')}",
                expected="one head",
                hint=f"Choose one: {hint.format(', '.join('0' * (self.ndim - 2)))}.",
            )

    def _asked_row(self, operation: str, q_idx: Any) -> int:
        """Which row an index asks for, counted from the first."""
        if not hasattr(q_idx, "__index__") or np.ndim(q_idx):
            raise ArgumentTypeError(
                operation,
                received=describe_argument(q_idx),
                expected="the index of one query",
                hint=f"Take several in turn: one {operation} for each i in rows.",
            )
        return int(resolve_index((..., q_idx, slice(None)), self.shape, operation).positions[-2][0])

    def __repr__(self) -> str:
        small = self.ndim == 2 and 0 < math.prod(self.shape) and max(self.shape) <= 8
        return f"{self._about()}\n{text.format_matrix(self.to_dense())}" if small else self._about()

    def _about(self) -> str:
        """What it is, in a line."""
        name = f"AttentionMatrix{format_named_shape(self.shape, 'q_len', 'kv_len')} {self.dtype}"
        parts = [name, *self._problem.describe()]
        parts += [f"mask {self.mask}"] if self.mask is not None else []
        parts += ["sink"] if self._problem.sink is not None else []
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        """For a notebook: the weights of a small matrix; of a large one a few whole rows, summed over runs of keys.

        The rows are so few that what is computed stays below a fixed amount, however long the matrix is.
        """
        from regard.render import notebook

        closing = ""
        if (heads := math.prod(self.shape[:-2])) > 1:
            at = ", ".join("0" * (self.ndim - 2))
            closing = f"This is [{at}], the first of {heads:,} heads; A.lazy[{at}] is it alone."
        sample = self._sample() if math.prod(self.shape) else None
        if sample is None and math.prod(self.shape):
            closing = "Its rows are too long to show here: A[row] reads one, A.coarsen(512) makes a picture."
        return notebook.render_matrix(self._about(), sample, closing)

    def _sample(self) -> Any:
        """SoftmaxStats of the first head for `view.notebook`; None where already one would be too much."""
        from regard.render.notebook import WeightSample

        q_len, kv_len = self.shape[-2:]
        head_dim = max(1, self._problem.query.shape[-1])
        small = max(q_len, kv_len) <= SMALL
        most = q_len if small else min(SIDE, q_len, ENTRIES // kv_len, MULTIPLY_ADDS // (kv_len * head_dim))
        if not most:
            return None
        rows = np.linspace(0, q_len - 1, most).round().astype(int)
        engine = self._problem.engine
        with engine.no_grad():
            part = self.lazy[(*[0] * (self.ndim - 2), rows)]
            weights, scores = (engine.to_numpy(x) for x in (part.to_dense(), part.scores[...]))
        columns = kv_len if small else min(SIDE, kv_len)
        starts = np.arange(columns) * kv_len // columns
        words = "All weights, queries down and keys across."
        if not small:
            kept = "every row" if most == q_len else f"{most} of {q_len:,} rows, the others not read"
            words = (
                f"{kept[0].upper()}{kept[1:]}. Each number is the share of its row's weight on the keys from its "
                "column's up to the next column's."
            )
        masked = np.logical_and.reduceat(scores == -np.inf, starts, axis=-1)
        words += " – marks masked keys." if masked.any() else ""
        numbers = np.add.reduceat(weights.astype(np.float64), starts, axis=-1)
        return WeightSample(part._problem.positions.tolist(), starts.tolist(), numbers, masked, words)
