"""Explorer of one query among its keys, as arrows in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.explanation import Explanation
from regard.errors import ArgumentError
from regard.explore.inputs import check_size, prepare_inputs
from regard.learn.examples import pronoun
from regard.masks import Mask
from regard.pages.html import Page, build_page
from regard.types import Array

MAX_ARROWS = 40  # more overlap
MAX_ENTRY = 1e100  # its square is still finite


def geometry(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """Build a page with query and keys as arrows in one plane, and the values and the output in another.

    The area of a dot is the weight. The reader moves the query and the keys with the pointer or the arrow keys,
    switches off the scaling, and normalises queries and keys to see the effect of their length. Vectors have two
    entries: the projection of a longer vector has other lengths and angles, so it would not explain the scores.

    Args:
        query: Queries of one head, `(q_len, 2)`. Default: the pronoun of the book.
        key: Keys, `(kv_len, 2)`.
        value: Values, `(kv_len, 2)`. Without them the page has only the first plane.
        tokens: Names of the keys, and of the queries too if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays do not fit together, are not finite, do not have two entries, or are more than 40.

    >>> from regard.explore import geometry
    >>> geometry()
    <page "Attention in the plane", ... kB: save(path) writes it>
    """
    is_example = query is None and key is None and value is None
    if is_example:
        query, key, value = pronoun.Q, pronoun.K, pronoun.V
        tokens = pronoun.tokens if tokens is None else tokens
    inputs = prepare_inputs("explore.geometry", query, key, value, tokens, mask)
    if is_example:
        inputs = replace(inputs, query_names=["it"])
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array is not None:
            _check_entries(name, array)
    check_size(
        "explore.geometry",
        max(inputs.matrix.shape),
        MAX_ARROWS,
        "queries or keys",
        "Take some of them: query[:8], key[:8], value[:8].",
    )
    rows = inputs.explain_rows()
    key, value = rows[0].key, rows[0].value
    for name, array in (("query", [row.query for row in rows]), ("key", key), ("value", value)):
        if array is not None:
            _check_finite(name, np.array(array))
    return build_page(
        "Attention in the plane",
        "geometry",
        {
            "tokens": inputs.key_names,
            "queries": inputs.query_names,
            "shape": inputs.shape,
            "scale": rows[0].scale,
            "key": key,
            "lengths": _lengths(key),
            "value": value,
            "rows": [_row_payload(row) for row in rows],
        },
    )


def _row_payload(row: Explanation) -> dict[str, Any]:
    """Return the numbers of one query, as the library computed them; the cosine of a zero vector is 0."""
    length = float(_lengths(row.query))
    products = length * _lengths(row.key)
    cosines = row.raw_scores / np.where(products == 0, 1.0, products)
    names = ("query", "scores", "weights", "contributions", "output")
    return {"length": length, "cosines": cosines, **{name: getattr(row, name) for name in names}}


def _lengths(vectors: Array) -> Any:
    return np.hypot(vectors[..., 0], vectors[..., 1])


def _check_entries(name: str, array: Any) -> None:
    entries = np.shape(array)[1]
    if entries != 2:
        raise ArgumentError(
            "explore.geometry",
            received=f"{name} with {entries} {'entry' if entries == 1 else 'entries'} each",
            expected=f"{name} with 2 entries each, the coordinates in a plane",
            hint="explore.pipeline shows vectors of any size, number by number.",
        )


def _check_finite(name: str, array: Array) -> None:
    if not (np.abs(array) <= MAX_ENTRY).all():
        raise ArgumentError(
            "explore.geometry",
            received=f"{name} with entries that are not finite, or too large",
            expected=f"numbers up to {MAX_ENTRY:g}",
            hint="A plane cannot show inf and NaN; use explore.pipeline instead.",
        )
