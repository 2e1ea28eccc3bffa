"""Check the arrays and tokens passed to an explorer, and fill in the example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.attention import attention
from regard.core.explanation import Explanation
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError
from regard.learn.examples import cat
from regard.masks import Mask, causal
from regard.render.text import escape_unprintable, format_number


@dataclass(frozen=True, eq=False)
class ExplorerInputs:
    """The matrix of one head, its value if there is one, and printable names of its keys and queries."""

    matrix: AttentionMatrix
    head_dim: int
    value: Any
    key_names: list[str]
    query_names: list[str]
    has_tokens: bool

    @property
    def shape(self) -> str:
        """The sizes as text, such as "5 queries, 5 keys, 4 entries each"."""
        q_len, kv_len = self.matrix.shape
        queries, keys = "query" if q_len == 1 else "queries", "key" if kv_len == 1 else "keys"
        return f"{q_len} {queries}, {kv_len} {keys}, {self.head_dim} entries each"

    def explain_rows(self) -> list[Explanation]:
        """Compute the four steps of every query."""
        return [self.matrix.explain(i, self.value, self.key_names) for i in range(len(self.query_names))]


def prepare_inputs(
    operation: str, query: Any, key: Any, value: Any, tokens: Sequence[str] | None, mask: Mask | None
) -> ExplorerInputs:
    """Return the caller's arrays and names, or those of the example if no array is passed.

    Raises:
        ArgumentError: If query or key is missing, an array is not 2-D or empty, or the number of tokens is wrong.
    """
    if query is None and key is None and value is None:
        query, key, value = cat.Q, cat.K, cat.V
        tokens = cat.tokens if tokens is None else tokens
    if query is None or key is None:
        raise ArgumentError(
            operation,
            received="a query without a key" if key is None else "a key without a query",
            expected="query and key, or neither for the example",
            hint="Pass both: a score compares a query with a key.",
        )
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array is not None and np.ndim(array) != 2:
            raise ArgumentError(
                operation,
                received=f"{name} with {np.ndim(array)} axes",
                expected=f"{name} of one head, with 2 axes",
                hint=f"Choose one head: {name}[0, 3] of an array (batch, heads, n, d).",
            )
    matrix = attention(query, key, mask=mask)
    q_len, kv_len = matrix.shape
    if not q_len or not kv_len:
        raise ArgumentError(
            operation,
            received=f"{q_len} queries and {kv_len} keys",
            expected="at least one of each",
            hint="An empty matrix has nothing to show.",
        )
    if tokens is not None and len(tokens) != kv_len:
        raise ArgumentError(
            operation,
            received=f"{len(tokens)} tokens",
            expected=f"{kv_len}, one for each key",
            hint="Tokens name the keys, and the queries too if there are as many.",
        )
    if tokens is None:
        key_names = [f"key {j}" for j in range(kv_len)]
    else:
        key_names = [escape_unprintable(str(token)) for token in tokens]
    share_names = tokens is not None and q_len == kv_len
    query_names = key_names if share_names else [f"query {i}" for i in range(q_len)]
    return ExplorerInputs(matrix, np.shape(query)[1], value, key_names, query_names, tokens is not None)


def check_size(operation: str, size: int, limit: int, unit: str, hint: str) -> None:
    """Raise `ArgumentError` if the page would be too large to load or to read."""
    if size > limit:
        raise ArgumentError(
            operation,
            received=f"{format_number(size)} {unit}",
            expected=f"at most {format_number(limit)}",
            hint=hint,
        )


def causal_hides_more(rows: Sequence[Explanation]) -> bool:
    """Return whether a causal mask would hide keys that the mask of the matrix does not; False if it is not square."""
    visible = np.array([row.scores for row in rows]) != -np.inf
    q_len, kv_len = visible.shape
    return q_len == kv_len and bool((visible & ~causal().to_dense(q_len, kv_len)).any())
