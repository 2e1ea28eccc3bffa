"""What the number of entries does to the weights, with the factor 1/√d_k and without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.explore.inputs import check_size, given
from regard.learn.softmax_alternatives import softmax, softmax_jacobian
from regard.learn.validation import Floats
from regard.learn.variance import Sharpness, VarianceRow, sharpness, variance_row
from regard.pages.html import Page, packed, page
from regard.render.text import escape_unprintable
from regard.types import Array

MOST_SCORES = 40_000  # keeps the page below 300 kB
DRAWN_DIM, DRAWN_QUERIES, DRAWN_KEYS, OPENS_AT = 1024, 64, 8, 64
SIGMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
TEMPERATURES = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


def scaling(
    query: Any = None, key: Any = None, *, tokens: Sequence[str] | None = None, seed: int = 0
) -> Page:
    """A page with a slider for d_k and a switch for the scaling, to watch the weights collapse without it.

    Without a query and a key it is an experiment: 64 queries against 8 keys each, 1024 entries drawn from a standard
    normal distribution with the `seed`, and d_k is how many of them count. The page tells the standard deviation of
    the scores as measured and as predicted, and how sharp the weights are. Two more sliders change the standard
    deviation σ of the entries and the temperature. Tokens name the keys, and there are as many keys.

    With `query` (q_len, head_dim) and `key` (kv_len, head_dim), one head, the slider does the same to them: d_k is
    how many of their first entries count, and σ multiplies them all. The page opens with all of them, scaled, which
    is `regard.attention(query, key)`; here the prediction takes the entries for independent with mean 0, which those
    of a trained model are not. Numbers travel as float32.

    >>> scaling()
    <page "Why scores are divided by √d_k", ... kB: save(path) writes it>
    """
    if query is None and key is None:
        names = [f"key {j}" for j in range(DRAWN_KEYS)] if tokens is None else _names(tokens)
        queries = [f"query {i}" for i in range(DRAWN_QUERIES)]
        _check_scores(len(queries) * len(names) * len(sizes(DRAWN_DIM)))
        rng = np.random.default_rng(seed)
        left = rng.normal(size=(DRAWN_QUERIES, 1, DRAWN_DIM))
        right = rng.normal(size=(DRAWN_QUERIES, len(names), DRAWN_DIM))  # each query has its own
        opens, shape, named = OPENS_AT, None, False
    else:
        it = given("explore.scaling", query, key, None, tokens, None)
        names, queries, opens, shape = it.tokens, it.queries, it.head_dim, it.shape
        named = queries is names
        _check_scores(len(queries) * len(names) * len(sizes(it.head_dim)))
        steps = it.explained()
        left = np.array([each.query for each in steps], dtype=float)[:, None, :]
        right = np.array(steps[0].key, dtype=float)[None, :, :]

    places, drawn = sizes(left.shape[-1]), query is None
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is shown as it is
        parts = [(left[..., :size], right[..., :size]) for size in places]
        dots = [_dots(*part) for part in parts]
        predicted = places if drawn else [_predicted(*part) for part in parts]
        rows = [variance_row(*each) for each in zip(dots, places, predicted, strict=True)]
        start = places.index(opens)
        opening = _opening(dots[start], rows, start)
    return page(
        "Why scores are divided by √d_k",
        "scaling.js",
        {
            "drawn": drawn,
            "shape": shape,
            "tokens": names,
            "queries": queries,
            "named": named,
            "sizes": places,
            "sigmas": SIGMAS,
            "temperatures": TEMPERATURES,
            "start": start,
            "dots": packed(np.array(dots)),
            "predicted": [math.sqrt(row.predicted) for row in rows],
            "opening": opening,
        },
    )


def sizes(head_dim: int) -> list[int]:
    """Where the slider stops: the powers of two and the halves between them, and all entries at the end.

    >>> sizes(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    ladder = {size for power in range(head_dim.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    return sorted({size for size in ladder if size < head_dim} | {head_dim})


def row_of(scores: Floats) -> dict[str, Any]:
    """One query's scores (kv_len,), their weights, and how sharp these are."""
    weights = softmax(scores)
    jacobian = softmax_jacobian(weights)
    return {
        "scores": scores,
        "weights": weights,
        **_sharp(sharpness(weights)),
        "slope": float(np.abs(jacobian).max()),
    }


def _opening(dots: Floats, rows: Sequence[VarianceRow], start: int) -> dict[str, Any]:
    """What the page shows at first: the first query scaled, and both curves over all d_k."""
    return {
        "row": row_of(dots[0] / math.sqrt(rows[start].d_k)),
        "deviation": math.sqrt(rows[start].scaled_variance),
        "scaled": [_sharp(row.scaled) for row in rows],
        "unscaled": [_sharp(row.unscaled) for row in rows],
    }


def _sharp(means: Sharpness) -> dict[str, float]:
    return {"largest": means.largest_weight, "entropy": means.entropy, "gradient": means.gradient}


def _dots(left: Array, right: Array) -> Floats:
    """Each query with its keys: (queries, 1, d_k) with (queries or 1, keys, d_k).

    Rounded to float32, as they travel, so that the page computes with the very numbers of the library.
    """
    dots: Floats = (left * right).sum(axis=-1).astype(np.float32).astype(np.float64)
    return dots


def _predicted(left: Array, right: Array) -> float:
    """The variance of a sum of d_k products, were the entries independent with mean 0."""
    return float(left.shape[-1] * np.mean(left**2) * np.mean(right**2))


def _names(tokens: Sequence[str]) -> list[str]:
    if not len(tokens):
        raise ArgumentError(
            "explore.scaling",
            received="no tokens",
            expected="at least one, or None for eight keys",
            hint="Each token names a key, and a query needs one to attend to.",
        )
    return [escape_unprintable(str(token)) for token in tokens]


def _check_scores(count: int) -> None:
    hint = "Take some queries and keys: query[:32], key[:32]."
    check_size("explore.scaling", count, MOST_SCORES, "scores to show", hint)
