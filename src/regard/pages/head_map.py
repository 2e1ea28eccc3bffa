"""Build the page of one head: a map of its weights, from the whole matrix to single cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard.errors import ArgumentError
from regard.pages.html import Page, build_page
from regard.pages.payload import build_payload
from regard.render.text import escape_unprintable

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix

MAX_CELLS = 1024  # cells of the overview along an edge


def build_head_map(
    matrix: AttentionMatrix, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None, title: str
) -> Page:
    """Build the page of `AttentionMatrix.page`.

    Args:
        matrix: A matrix with one head.
        tokens: Names of the keys, and of the queries if both are the same sequence. Default: positions.
        query_tokens: Names of the queries. Default: those of `tokens`, or positions.
        title: Title of the page.

    Returns:
        The page.

    Raises:
        ArgumentError: If the matrix is empty, or the number of tokens is wrong.
    """
    problem = matrix.problem
    _, rows, keys = problem.shape
    if not rows or not keys:
        raise ArgumentError(
            "page",
            received=f"{rows} queries and {keys} keys",
            expected="at least one of each",
            hint="An empty matrix has nothing to show.",
        )
    key_names = _token_names(tokens, keys, "tokens", "key")
    query_names = _token_names(query_tokens, rows, "query_tokens", "query")
    if query_names is None and key_names is not None and problem.frame.q_len == keys:
        query_names = [key_names[i] for i in problem.positions]
    if query_names is None and (problem.positions != np.arange(rows)).any():
        query_names = [f"query {i}" for i in problem.positions]  # row numbers would not be positions
    shared = query_names is not None and query_names == key_names
    payload = build_payload(matrix, "page")
    (overview,) = payload.overviews(MAX_CELLS)
    details = [*problem.describe(), *([f"mask {problem.mask}"] if problem.mask is not None else [])]
    details += ["sink"] if problem.sink is not None else []
    record = {
        "title": escape_unprintable(title),
        "tokens": key_names,
        "query_tokens": None if shared else query_names,
        "shared_tokens": shared,
        "description": (
            f"{rows:,} × {keys:,} weights of one attention head, head_dim {problem.query.shape[-1]}; "
            f"{', '.join(details)}. Made by regard."
        ),
        "overview": overview,
        "matrix": payload.record,
    }
    return build_page(escape_unprintable(title), "headMap", record)


def _token_names(tokens: Sequence[str] | None, count: int, argument: str, token_of: str) -> list[str] | None:
    """Check the number of tokens, and escape them."""
    if tokens is None:
        return None
    if len(tokens) != count:
        raise ArgumentError(
            "page",
            received=f"{len(tokens)} {argument}",
            expected=f"{count}, one for each {token_of}",
            hint="tokens name the keys, and the queries too if both are the same sequence.",
        )
    return [escape_unprintable(str(token)) for token in tokens]
