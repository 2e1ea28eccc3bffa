"""Explorer of all weights of a head, with the computation of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.explore.inputs import causal_hides_more, check_size, prepare_inputs
from regard.masks import Mask
from regard.pages.html import Page, build_page, encode_float32

MAX_WEIGHTS = 512 * 512  # about five million characters of page


def heatmap(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """Build a page with the weights as an image, queries down and keys across, and the output beside it.

    The reader chooses a cell with the pointer or the arrow keys and sees its computation, switches between weights and
    scores, and switches on a causal mask. A sentence says where each query looks. Up to 24 × 24 the page has all
    sentences and the weights as a table. Numbers are embedded as float32.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: the example of the book.
        key: Keys, `(kv_len, head_dim)`. At most 512 × 512 weights.
        value: Values, `(kv_len, value_dim)`. Without them the page has no output.
        tokens: Names of the keys, and of the queries too if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays do not fit together or have too many weights.

    >>> from regard.explore import heatmap
    >>> heatmap()
    <page "Attention weights", ... kB: save(path) writes it>
    """
    inputs = prepare_inputs("explore.heatmap", query, key, value, tokens, mask)
    q_len, kv_len = inputs.matrix.shape
    value_dim = 0 if inputs.value is None else np.shape(inputs.value)[1]
    check_size(
        "explore.heatmap",
        q_len * kv_len,
        MAX_WEIGHTS,
        "weights",
        "Take some queries and keys, query[:512] and key[:512].",
    )
    check_size(
        "explore.heatmap",
        max(q_len, kv_len) * value_dim,
        MAX_WEIGHTS,
        "numbers of the output or the value",
        "Take some entries of the value: value[:, :64].",
    )
    rows = inputs.explain_rows()

    def stack(name: str) -> Any:
        return np.array([getattr(row, name) for row in rows])

    return build_page(
        "Attention weights",
        "heatmap",
        {
            "tokens": inputs.key_names,
            "queries": inputs.query_names,
            "named": inputs.has_tokens,
            "shape": inputs.shape,
            "size": inputs.matrix.shape,
            "head_dim": inputs.head_dim,
            "value_dim": value_dim,
            "causal": causal_hides_more(rows),
            "scale": rows[0].scale,
            "shift": stack("shift"),
            "total": stack("total"),
            "query": encode_float32(stack("query")),
            "key": encode_float32(rows[0].key),
            "raw_scores": encode_float32(stack("raw_scores")),
            "scores": encode_float32(stack("scores")),
            "weights": encode_float32(stack("weights")),
            "value": encode_float32(rows[0].value) if value_dim else None,
            "output": encode_float32(stack("output")) if value_dim else None,
        },
    )
