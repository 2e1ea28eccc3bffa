"""One query's four steps, gone through by the reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.core.explanation import Explanation
from regard.explore.inputs import check_size, given
from regard.masks import Mask, causal
from regard.pages.html import Page, page
from regard.render.text import escape_unprintable

MOST_NUMBERS = 12_000  # keeps the page below 300 kB


def pipeline(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """A page that goes through the four steps of a query, compare, scale, normalise, aggregate, with every number.

    The reader picks the query, steps with buttons or arrow keys, and may switch off the scaling or switch on a
    causal mask. `query` is (q_len, head_dim), `key` (kv_len, head_dim), `value` (kv_len, value_dim), one head;
    without any, the book's example. Without a value the page ends at the weights. Tokens name the keys, and the
    queries too where there are as many.

    >>> pipeline()
    <page "How one query attends", ... kB: save(path) writes it>
    >>> pipeline([[1, 0]], [[1, 0], [1, 1]], tokens=["north", "south"]).html.count("north")
    1
    """
    it = given("explore.pipeline", query, key, value, tokens, mask)
    q_len, kv_len = it.matrix.shape
    value_dim = 0 if it.value is None else np.shape(it.value)[1]
    check_size(
        "explore.pipeline",
        q_len * (kv_len * (6 + value_dim) + it.head_dim + value_dim) + kv_len * (it.head_dim + value_dim),
        MOST_NUMBERS,
        "numbers to show",
        "Take a few queries and keys: query[:8], key[:8], value[:8].",
    )
    steps = it.explained()
    shared = steps[0]
    return page(
        "How one query attends",
        "pipeline.js",
        {
            "tokens": it.tokens,
            "queries": it.queries,
            "shape": it.shape,
            "scale": shared.scale,
            "masks": [escape_unprintable(mask) for mask in shared.masks],
            "key": shared.key,
            "value": shared.value,
            "causal": _causal(steps) if q_len == kv_len else None,
            "rows": [_row(each) for each in steps],
        },
    )


def _row(steps: Explanation) -> dict[str, Any]:
    """The numbers of one query, as the library computed them."""
    names = ("query", "raw_scores", "scaled_scores", "scores", "shift", "exponentials", "total", "weights")
    return {name: getattr(steps, name) for name in (*names, "contributions", "output")}


def _causal(steps: Sequence[Explanation]) -> list[list[bool]] | None:
    """Which keys a causal mask lets each query see; None where it would hide nothing more."""
    allowed = causal().to_dense(len(steps), len(steps))
    seen = np.array([each.scores for each in steps]) != -np.inf
    listed: list[list[bool]] = allowed.tolist()
    return listed if (seen & ~allowed).any() else None
