"""Explorer of attention as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.core.explanation import Explanation
from regard.explore.inputs import causal_hides_more, check_size, prepare_inputs
from regard.masks import Mask
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable

MAX_NUMBERS = 10_000  # keeps the page below 300 kB


def pipeline(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """Build a page with Q, Kᵀ, scores, weights, V and output on one screen, where every number can be changed.

    The page plays the computation one product at a time, or shows the product of the cell that the reader clicks. The
    reader changes numbers in the cells, switches off the scaling and switches on a causal mask. If the tokens are both
    queries and keys, the reader can also type a sentence. Without a value the page ends at the weights.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: the example of the book.
        key: Keys, `(kv_len, head_dim)`.
        value: Values, `(kv_len, value_dim)`.
        tokens: Names of the keys, and of the queries too if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays do not fit together or have more numbers than a page can show.

    >>> from regard.explore import pipeline
    >>> pipeline()
    <page "Attention as matrices", ... kB: save(path) writes it>
    >>> pipeline([[1, 0]], [[1, 0], [1, 1]], tokens=["north", "south"]).html.count("north")
    1
    """
    inputs = prepare_inputs("explore.pipeline", query, key, value, tokens, mask)
    q_len, kv_len = inputs.matrix.shape
    head_dim = inputs.head_dim
    value_dim = 0 if inputs.value is None else np.shape(inputs.value)[1]
    check_size(
        "explore.pipeline",
        q_len * (kv_len * 6 + head_dim + value_dim) + kv_len * (head_dim + value_dim),
        MAX_NUMBERS,
        "numbers to show",
        "Take a few queries and keys: query[:8], key[:8], value[:8].",
    )
    rows = inputs.explain_rows()
    first = rows[0]
    return build_page(
        "Attention as matrices",
        "pipeline",
        {
            "tokens": inputs.key_names,
            "queries": inputs.query_names,
            "shape": inputs.shape,
            "scale": first.scale,
            "masks": [escape_unprintable(mask) for mask in first.masks],
            "key": first.key,
            "value": first.value,
            "causal": causal_hides_more(rows),
            "words": inputs.has_tokens and q_len == kv_len and mask is None,
            "rows": [_row_payload(row) for row in rows],
        },
    )


def _row_payload(row: Explanation) -> dict[str, Any]:
    """Return the numbers of one query, as the library computed them."""
    names = ("query", "raw_scores", "scaled_scores", "scores", "shift", "exponentials", "total", "weights")
    return {name: getattr(row, name) for name in (*names, "output")}
