"""A matrix as a page to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._errors import ArgumentError, named_shape
from regard.view.text import printable

if TYPE_CHECKING:
    from regard.view.html import Page

# Cells of the overview along an edge.
EDGE = 1024


class Looking:
    """Pages of a matrix that has `shape`, `_spec` and `_problem`."""

    def page(
        self: Any,
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
        # Imported here: what only pages need is not loaded with the library.
        from regard._carried import carried
        from regard.view.html import page

        problem = self._problem
        if problem.shape[0] != 1:
            raise ArgumentError(
                "page",
                received=f"a matrix of {named_shape(self.shape, 'q_len', 'kv_len')}",
                expected="one head",
                cure=f"Choose one: A.lazy[{', '.join('0' * len(self._spec.lead))}].page(tokens).",
            )
        _, rows, keys = problem.shape
        if not rows or not keys:
            raise ArgumentError(
                "page",
                received=f"{rows} queries and {keys} keys",
                expected="at least one of each",
                cure="An empty matrix has nothing to show.",
            )
        names = _names(tokens, keys, "tokens", "key")
        queries = _names(query_tokens, rows, "query_tokens", "query")
        if query_tokens is None and names is not None and problem.frame.q_len == keys:
            queries = [names[i] for i in problem.positions]
        if queries is None and (problem.positions != np.arange(rows)).any():
            queries = [f"query {i}" for i in problem.positions]  # the rows of a part do not tell it
        made = carried(self, "page")
        (overview,) = made.overviews(EDGE)
        words = f"{rows:,} × {keys:,} weights of one attention head; query and key of {problem.query.shape[-1]} entries"
        more = [*problem.words, *([f"mask {problem.mask}"] if problem.mask is not None else [])]
        more += ["sink"] if problem.sink is not None else []
        record = {
            "title": printable(title),
            "tokens": names,
            "queries": None if queries == names else queries,
            "same": queries == names,
            "words": f"{words}; {', '.join(more)}. Made by regard.",
            "overview": overview,
            "matrix": made.record,
        }
        return page(printable(title), "deep.js", record)


def _names(tokens: Sequence[str] | None, count: int, name: str, one: str) -> list[str] | None:
    """Tokens fit to be shown, one for each of so many."""
    if tokens is None:
        return None
    if len(tokens) != count:
        raise ArgumentError(
            "page",
            received=f"{len(tokens)} {name}",
            expected=f"{count}, one for each {one}",
            cure="Tokens name the keys; queries share them where they are the same sequence.",
        )
    return [printable(str(token)) for token in tokens]
