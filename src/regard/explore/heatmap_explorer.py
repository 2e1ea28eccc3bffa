"""The weights as a picture, each with the computation behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.explore.inputs import check_size, given
from regard.masks import Mask
from regard.pages.html import Page, packed, page

MOST_WEIGHTS = 512 * 512  # about five million characters of page


def heatmap(
    query: Any = None, key: Any = None, *, tokens: Sequence[str] | None = None, mask: Mask | None = None
) -> Page:
    """A page with the weights as a picture, queries down and keys across; pointing at one tells how it came about.

    The arrow keys move the cell too; up to 24 × 24 the page also has the weights as a table. `query` is
    (q_len, head_dim) and `key` (kv_len, head_dim), one head of at most 512 × 512 weights; without any, the book's
    example. Tokens name the keys, and the queries too where there are as many. Numbers travel as float32.

    >>> heatmap()
    <page "Who attends to whom", ... kB: save(path) writes it>
    """
    it = given("explore.heatmap", query, key, None, tokens, mask)
    check_size(
        "explore.heatmap",
        it.matrix.shape[0] * it.matrix.shape[1],
        MOST_WEIGHTS,
        "weights",
        "Take some queries and keys, query[:512] and key[:512].",
    )
    steps = it.explained()

    def every(name: str) -> Any:
        return np.array([getattr(each, name) for each in steps])

    return page(
        "Who attends to whom",
        "heatmap.js",
        {
            "tokens": it.tokens,
            "queries": it.queries,
            "named": it.named,
            "shape": it.shape,
            "size": it.matrix.shape,
            "head_dim": it.head_dim,
            "scale": steps[0].scale,
            "shift": every("shift"),
            "total": every("total"),
            "query": packed(every("query")),
            "key": packed(steps[0].key),
            "raw_scores": packed(every("raw_scores")),
            "scores": packed(every("scores")),
            "weights": packed(every("weights")),
        },
    )
