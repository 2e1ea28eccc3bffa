"""One query among its keys, as arrows that the reader moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.explanation import Explanation
from regard.errors import ArgumentError
from regard.explore.inputs import check_size, given
from regard.learn.examples import pronoun
from regard.masks import Mask
from regard.pages.html import Page, page
from regard.types import Array

MOST_ARROWS = 40  # more cover each other
LARGEST_ENTRY = 1e100  # its square is still a number


def geometry(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """A page with query and keys as arrows in one plane, and in another the values with the output among them.

    The size of a dot is the weight. The reader moves the query and the keys, by pointer or by arrow keys, switches
    the scaling off, and makes queries and keys one long to see what their length did. `query` is (q_len, 2),
    `key` (kv_len, 2), `value` (kv_len, 2), one head; without any, the pronoun of the book. Without a value there is
    only the first plane. Two entries each, no more: the shadow of a longer vector has other lengths and angles, and
    so would not show where the scores come from. Tokens name the keys, and the queries too where there are as many.

    >>> geometry()
    <page "Attention in the plane", ... kB: save(path) writes it>
    """
    example = query is None and key is None and value is None
    if example:
        query, key, value = pronoun.Q, pronoun.K, pronoun.V
        tokens = pronoun.tokens if tokens is None else tokens
    it = given("explore.geometry", query, key, value, tokens, mask)
    if example:
        it = replace(it, queries=["it"])
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array is not None:
            _check_entries(name, array)
    check_size(
        "explore.geometry",
        max(it.matrix.shape),
        MOST_ARROWS,
        "queries or keys",
        "Take some of them: query[:8], key[:8], value[:8].",
    )
    steps = it.explained()
    key, value = steps[0].key, steps[0].value
    for name, array in (("query", [each.query for each in steps]), ("key", key), ("value", value)):
        if array is not None:
            _check_finite(name, np.array(array))
    return page(
        "Attention in the plane",
        "geometry.js",
        {
            "tokens": it.tokens,
            "queries": it.queries,
            "shape": it.shape,
            "scale": steps[0].scale,
            "key": key,
            "lengths": _lengths(key),
            "value": value,
            "rows": [_row(each) for each in steps],
        },
    )


def _row(steps: Explanation) -> dict[str, Any]:
    """The numbers of one query, as the library computed them; the cosine of a zero vector is taken as 0."""
    length = float(_lengths(steps.query))
    both = length * _lengths(steps.key)
    cosines = steps.raw_scores / np.where(both == 0, 1.0, both)
    names = ("query", "scores", "weights", "contributions", "output")
    return {"length": length, "cosines": cosines, **{name: getattr(steps, name) for name in names}}


def _lengths(vectors: Array) -> Any:
    return np.hypot(vectors[..., 0], vectors[..., 1])


def _check_entries(name: str, array: Any) -> None:
    entries = np.shape(array)[1]
    if entries != 2:
        raise ArgumentError(
            "explore.geometry",
            received=f"{name} with {entries} {'entry' if entries == 1 else 'entries'} each",
            expected=f"{name} with 2, the two directions of a plane",
            hint="explore.pipeline shows vectors of any size, number by number.",
        )


def _check_finite(name: str, array: Array) -> None:
    if not (np.abs(array) <= LARGEST_ENTRY).all():
        raise ArgumentError(
            "explore.geometry",
            received=f"{name} with entries that are not finite, or all but",
            expected=f"numbers up to {LARGEST_ENTRY:g}",
            hint="A plane has no place for inf and NaN; explore.pipeline shows them.",
        )
