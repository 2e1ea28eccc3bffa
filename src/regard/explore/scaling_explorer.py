"""Explorer of the effect of d_k on the weights, with the factor 1/√d_k and without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.explore.inputs import check_size, prepare_inputs
from regard.learn.softmax_alternatives import softmax, softmax_jacobian
from regard.learn.validation import Floats
from regard.learn.variance import Sharpness, VarianceRow, sharpness, variance_row
from regard.pages.html import Page, build_page, encode_float32
from regard.render.text import escape_unprintable
from regard.types import Array

MAX_SCORES = 40_000  # keeps the page below 300 kB
RANDOM_DIM, RANDOM_QUERIES, RANDOM_KEYS, INITIAL_DIM = 1024, 64, 8, 64
SIGMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
TEMPERATURES = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


def scaling(
    query: Any = None, key: Any = None, *, tokens: Sequence[str] | None = None, seed: int = 0
) -> Page:
    """Build a page with a slider for d_k and a switch for the scaling, to watch the weights collapse without it.

    Without arrays the page is an experiment: 64 queries with 8 keys each, 1024 entries from a standard normal
    distribution, of which the first d_k count. It shows the measured and the predicted standard deviation of the
    scores, and how sharp the weights are. Two more sliders change the standard deviation σ of the entries and the
    temperature.

    With arrays, d_k is the number of their first entries that count, and σ multiplies all of them. The page opens with
    all entries, scaled, which is `regard.attention(query, key)`. The prediction assumes independent entries with mean
    0, which the entries of a trained model are not. Numbers are embedded as float32.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: random entries.
        key: Keys, `(kv_len, head_dim)`.
        tokens: Names of the keys. Without arrays, one random key for each token.
        seed: Seed of the random entries.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays do not fit together, there are too many scores, or `tokens` is empty.

    >>> from regard.explore import scaling
    >>> scaling()
    <page "Why scores are divided by √d_k", ... kB: save(path) writes it>
    """
    if query is None and key is None:
        names = [f"key {j}" for j in range(RANDOM_KEYS)] if tokens is None else _key_names(tokens)
        queries = [f"query {i}" for i in range(RANDOM_QUERIES)]
        _check_scores(len(queries) * len(names) * len(slider_stops(RANDOM_DIM)))
        rng = np.random.default_rng(seed)
        left = rng.normal(size=(RANDOM_QUERIES, 1, RANDOM_DIM))
        right = rng.normal(size=(RANDOM_QUERIES, len(names), RANDOM_DIM))  # each query has its own keys
        initial_dim, shape, share_names = INITIAL_DIM, None, False
    else:
        inputs = prepare_inputs("explore.scaling", query, key, None, tokens, None)
        names, queries, initial_dim, shape = (
            inputs.key_names,
            inputs.query_names,
            inputs.head_dim,
            inputs.shape,
        )
        share_names = queries is names
        _check_scores(len(queries) * len(names) * len(slider_stops(inputs.head_dim)))
        rows = inputs.explain_rows()
        left = np.array([row.query for row in rows], dtype=float)[:, None, :]
        right = np.array(rows[0].key, dtype=float)[None, :, :]

    stops, is_random = slider_stops(left.shape[-1]), query is None
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are shown as they are
        parts = [(left[..., :size], right[..., :size]) for size in stops]
        dots = [_dot_products(*part) for part in parts]
        predicted = stops if is_random else [_predict_variance(*part) for part in parts]
        variances = [variance_row(*row) for row in zip(dots, stops, predicted, strict=True)]
        start = stops.index(initial_dim)
        opening = _opening_payload(dots[start], variances, start)
    return build_page(
        "Why scores are divided by √d_k",
        "scaling",
        {
            "drawn": is_random,
            "shape": shape,
            "tokens": names,
            "queries": queries,
            "named": share_names,
            "sizes": stops,
            "sigmas": SIGMAS,
            "temperatures": TEMPERATURES,
            "start": start,
            "dots": encode_float32(np.array(dots)),
            "predicted": [math.sqrt(row.predicted) for row in variances],
            "opening": opening,
        },
    )


def slider_stops(head_dim: int) -> list[int]:
    """Return the values of d_k: the powers of two, the midpoints between them, and `head_dim` at the end.

    >>> slider_stops(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    ladder = {size for power in range(head_dim.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    return sorted({size for size in ladder if size < head_dim} | {head_dim})


def row_payload(scores: Floats) -> dict[str, Any]:
    """Return the scores of one query, `(kv_len,)`, their weights, and the sharpness of the weights."""
    weights = softmax(scores)
    jacobian = softmax_jacobian(weights)
    return {
        "scores": scores,
        "weights": weights,
        **_sharpness_payload(sharpness(weights)),
        "slope": float(np.abs(jacobian).max()),
    }


def _opening_payload(dots: Floats, variances: Sequence[VarianceRow], start: int) -> dict[str, Any]:
    """Return what the page shows first: the first query scaled, and both curves over all d_k."""
    return {
        "row": row_payload(dots[0] / math.sqrt(variances[start].d_k)),
        "deviation": math.sqrt(variances[start].scaled_variance),
        "scaled": [_sharpness_payload(row.scaled) for row in variances],
        "unscaled": [_sharpness_payload(row.unscaled) for row in variances],
    }


def _sharpness_payload(means: Sharpness) -> dict[str, float]:
    return {"largest": means.largest_weight, "entropy": means.entropy, "gradient": means.gradient}


def _dot_products(left: Array, right: Array) -> Floats:
    """Multiply each query with its keys: `(queries, 1, d_k)` with `(queries or 1, keys, d_k)`.

    The products are rounded to float32, as they are embedded, so that the page uses exactly the numbers of the library.
    """
    dots: Floats = (left * right).sum(axis=-1).astype(np.float32).astype(np.float64)
    return dots


def _predict_variance(left: Array, right: Array) -> float:
    """Return the variance of a sum of d_k products of independent entries with mean 0."""
    return float(left.shape[-1] * np.mean(left**2) * np.mean(right**2))


def _key_names(tokens: Sequence[str]) -> list[str]:
    if not len(tokens):
        raise ArgumentError(
            "explore.scaling",
            received="no tokens",
            expected="at least one token, or None for eight keys",
            hint="Each token names a key, and a query needs at least one key.",
        )
    return [escape_unprintable(str(token)) for token in tokens]


def _check_scores(count: int) -> None:
    hint = "Take some queries and keys: query[:32], key[:32]."
    check_size("explore.scaling", count, MAX_SCORES, "scores to show", hint)
