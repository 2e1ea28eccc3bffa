"""One head of a matrix as a page: the deep map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.pages.html import Page, page
from regard.pages.payload import carried
from regard.render.text import escape_unprintable

# Cells of the overview along an edge.
EDGE = 1024


def deep_map(
    matrix: Any, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None, title: str
) -> Page:
    """The page of `AttentionMatrix.page`, of a matrix with one head."""
    problem = matrix._problem
    _, rows, keys = problem.shape
    if not rows or not keys:
        raise ArgumentError(
            "page",
            received=f"{rows} queries and {keys} keys",
            expected="at least one of each",
            hint="An empty matrix has nothing to show.",
        )
    names = _names(tokens, keys, "tokens", "key")
    queries = _names(query_tokens, rows, "query_tokens", "query")
    if queries is None and names is not None and problem.frame.q_len == keys:
        queries = [names[i] for i in problem.positions]
    if queries is None and (problem.positions != np.arange(rows)).any():
        queries = [f"query {i}" for i in problem.positions]  # the rows of a part do not tell it
    made = carried(matrix, "page")
    (overview,) = made.overviews(EDGE)
    words = f"{rows:,} × {keys:,} weights of one attention head; query and key of {problem.query.shape[-1]} entries"
    more = [*problem.describe(), *([f"mask {problem.mask}"] if problem.mask is not None else [])]
    more += ["sink"] if problem.sink is not None else []
    record = {
        "title": escape_unprintable(title),
        "tokens": names,
        "queries": queries,
        "words": f"{words}; {', '.join(more)}. Made by regard.",
        "overview": overview,
        "matrix": made.record,
    }
    return page(escape_unprintable(title), "deep.js", record)


def _names(tokens: Sequence[str] | None, count: int, name: str, one: str) -> list[str] | None:
    """Tokens fit to be shown, one for each of so many."""
    if tokens is None:
        return None
    if len(tokens) != count:
        raise ArgumentError(
            "page",
            received=f"{len(tokens)} {name}",
            expected=f"{count}, one for each {one}",
            hint="Tokens name the keys; queries share them where they are the same sequence.",
        )
    return [escape_unprintable(str(token)) for token in tokens]
