"""What an explorer was given: one head's matrices and a name for each token, or the example's."""

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
from regard.masks import Mask
from regard.render.text import escape_unprintable, format_number


@dataclass(frozen=True, eq=False)
class Given:
    """A matrix of one head, its value if there is one, and the names of its keys and queries, fit to be shown."""

    matrix: AttentionMatrix
    head_dim: int
    value: Any
    tokens: list[str]
    queries: list[str]
    named: bool

    @property
    def shape(self) -> str:
        """The sizes in a few words."""
        q_len, kv_len = self.matrix.shape
        queries, keys = "query" if q_len == 1 else "queries", "key" if kv_len == 1 else "keys"
        return f"{q_len} {queries}, {kv_len} {keys}, {self.head_dim} entries each"

    def explained(self) -> list[Explanation]:
        """The four steps of every query."""
        return [self.matrix.explain(i, self.value, self.tokens) for i in range(len(self.queries))]


def given(
    operation: str, query: Any, key: Any, value: Any, tokens: Sequence[str] | None, mask: Mask | None
) -> Given:
    """The matrices as given, or those of the example where there are none."""
    if query is None and key is None and value is None:
        query, key, value = cat.Q, cat.K, cat.V
        tokens = cat.tokens if tokens is None else tokens
    if query is None or key is None:
        raise ArgumentError(
            operation,
            received="a query without a key" if key is None else "a key without a query",
            expected="query and key, or neither for the example",
            hint="Pass both: the scores compare the one with the other.",
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
            hint="Tokens name the keys; queries share them where there are as many.",
        )
    names = (
        [f"key {j}" for j in range(kv_len)]
        if tokens is None
        else [escape_unprintable(str(t)) for t in tokens]
    )
    same = tokens is not None and q_len == kv_len
    queries = names if same else [f"query {i}" for i in range(q_len)]
    return Given(matrix, np.shape(query)[1], value, names, queries, tokens is not None)


def check_size(operation: str, size: int, most: int, unit: str, hint: str) -> None:
    """Refuse what would make a page nobody can load or read."""
    if size > most:
        raise ArgumentError(
            operation,
            received=f"{format_number(size)} {unit}",
            expected=f"at most {format_number(most)}",
            hint=hint,
        )
