"""The explorers of a matrix and of a whole model: check the arrays, compute every number, and build the page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.core.attention import attention
from regard.core.explanation import Explanation
from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, describe_argument
from regard.learn.cost import OperationCounts, attention_by_loops, cost_table, iter_multiplications
from regard.learn.examples import Example, cat, pronoun, three_by_three
from regard.learn.softmax_alternatives import Sharpness, sharpness, softmax, softmax_jacobian, variance_row
from regard.learn.tiny_gpt import TinyGPT
from regard.learn.validation import Bools, Floats, as_floats, require
from regard.masks import Mask, causal
from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page, encode_float32
from regard.render.text import escape_unprintable, format_number
from regard.types import Array


@dataclass(frozen=True, eq=False)
class ExplorerInputs:
    """The matrix of one head, its value if there is one, and printable names of its keys and queries."""

    operation: str
    matrix: AttentionMatrix
    head_dim: int
    value: Any
    key_names: list[str]
    query_names: list[str]
    has_tokens: bool

    @property
    def value_dim(self) -> int:
        """The number of entries of a value; 0 without values."""
        return 0 if self.value is None else int(np.shape(self.value)[1])

    @property
    def shape(self) -> str:
        """The sizes as text, such as "5 queries, 5 keys, 4 entries each"."""
        q_len, kv_len = self.matrix.shape
        queries, keys = "query" if q_len == 1 else "queries", "key" if kv_len == 1 else "keys"
        return f"{q_len} {queries}, {kv_len} {keys}, {self.head_dim} entries each"

    @property
    def names(self) -> dict[str, list[str]]:
        """The part of the payload that the pages share."""
        return {"tokens": self.key_names, "queries": self.query_names}

    def explain_rows(self) -> list[Explanation]:
        """Compute the four steps of every query."""
        return [self.matrix.explain(i, self.value, self.key_names) for i in range(len(self.query_names))]

    def check_size(self, size: int, limit: int, unit: str, hint: str) -> None:
        """Raise an error if the page would be too large to load or to read."""
        check_size(self.operation, size, limit, unit, hint)


def prepare_inputs(
    operation: str,
    query: Any,
    key: Any,
    value: Any,
    tokens: Sequence[str] | None,
    mask: Mask | None,
    example: Example = cat,
) -> ExplorerInputs:
    """Return the caller's arrays and names, or those of the example if no array is passed."""
    if query is None and key is None and value is None:
        query, key, value = example.Q, example.K, example.V
        tokens = example.tokens if tokens is None else tokens
    if query is None or key is None:
        raise ArgumentError(
            operation,
            received="a query without a key" if key is None else "a key without a query",
            expected="query and key, or neither for the example",
            hint="Pass both: a score compares a query with a key.",
        )
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array is not None and np.ndim(array) != 2:
            raise ArgumentError(
                operation,
                received=f"{name} with {np.ndim(array)} axes",
                expected=f"{name} of one head, with 2 axes",
                hint=f"Choose one head: {name}[0, 3] of an array (batch, heads, n, d).",
            )
    matrix = attention(query, key, mask=mask)
    q_len, kv_len = matrix.shape
    if not q_len or not kv_len:
        raise ArgumentError(
            operation,
            received=f"{q_len} queries and {kv_len} keys",
            expected="at least one of each",
            hint="An empty matrix has nothing to show.",
        )
    if tokens is not None and len(tokens) != kv_len:
        raise ArgumentError(
            operation,
            received=f"{len(tokens)} tokens",
            expected=f"{kv_len}, one for each key",
            hint="Tokens label the keys, and also the queries if there are as many.",
        )
    if tokens is None:
        key_names = [f"key {j}" for j in range(kv_len)]
    else:
        key_names = [escape_unprintable(str(token)) for token in tokens]
    share_names = tokens is not None and q_len == kv_len
    query_names = key_names if share_names else [f"query {i}" for i in range(q_len)]
    head_dim = np.shape(query)[1]
    return ExplorerInputs(operation, matrix, head_dim, value, key_names, query_names, tokens is not None)


def check_size(operation: str, size: int, limit: int, unit: str, hint: str) -> None:
    """Raise `ArgumentError` if the page would be too large to load or to read."""
    if size > limit:
        raise ArgumentError(
            operation,
            received=f"{format_number(size)} {unit}",
            expected=f"at most {format_number(limit)}",
            hint=hint,
        )


def causal_hides_more(rows: Sequence[Explanation]) -> bool:
    """Return whether a causal mask would hide keys that the mask of the matrix does not; False if it is not square."""
    visible = np.array([row.scores for row in rows]) != -np.inf
    q_len, kv_len = visible.shape
    return q_len == kv_len and bool((visible & ~causal().to_dense(q_len, kv_len)).any())


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
    queries and keys, the reader can also type a sentence. Without a value, the page ends with the weights.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: the example of the book.
        key: Keys, `(kv_len, head_dim)`.
        value: Values, `(kv_len, value_dim)`.
        tokens: Labels of the keys, and also of the queries if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays have incompatible shapes or have more numbers than a page can show.

    >>> from regard.explore import pipeline
    >>> pipeline()
    <page "Attention as matrices", ... kB: save(path) writes it>
    >>> pipeline([[1, 0]], [[1, 0], [1, 1]], tokens=["north", "south"]).html.count("north")
    1
    """
    inputs = prepare_inputs("explore.pipeline", query, key, value, tokens, mask)
    q_len, kv_len = inputs.matrix.shape
    entries = inputs.head_dim + inputs.value_dim
    inputs.check_size(
        q_len * (kv_len * 6 + entries) + kv_len * entries,
        MAX_NUMBERS,
        "numbers to show",
        "Take a few queries and keys: query[:8], key[:8], value[:8].",
    )
    rows = inputs.explain_rows()
    first = rows[0]
    names = ("query", "raw_scores", "scaled_scores", "scores", "shift", "exponentials", "total", "weights")
    return build_page(
        "Attention as matrices",
        "pipeline",
        {
            **inputs.names,
            "shape": inputs.shape,
            "scale": first.scale,
            "masks": [escape_unprintable(mask) for mask in first.masks],
            "key": first.key,
            "value": first.value,
            "causal": causal_hides_more(rows),
            "words": inputs.has_tokens and q_len == kv_len and mask is None,
            "rows": [{name: getattr(row, name) for name in (*names, "output")} for row in rows],
        },
    )


MAX_WEIGHTS = 512 * 512  # about five million characters of page


def weights(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """Build a page with the weights as an image, queries down and keys across, and the output beside it.

    The reader chooses a cell with the pointer or the arrow keys and sees its computation, switches between weights and
    scores, and switches on a causal mask. A sentence describes what each query attends to. Up to 24 × 24 weights, the
    page has all sentences and the weights as a table. Numbers are embedded as float32.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: the example of the book.
        key: Keys, `(kv_len, head_dim)`. At most 512 × 512 weights.
        value: Values, `(kv_len, value_dim)`. Without them the page has no output.
        tokens: Labels of the keys, and also of the queries if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays have incompatible shapes or have too many weights.

    >>> from regard.explore import weights
    >>> weights()
    <page "Attention weights", ... kB: save(path) writes it>
    """
    inputs = prepare_inputs("explore.weights", query, key, value, tokens, mask)
    q_len, kv_len = inputs.matrix.shape
    value_dim = inputs.value_dim
    inputs.check_size(
        q_len * kv_len, MAX_WEIGHTS, "weights", "Take some queries and keys, query[:512] and key[:512]."
    )
    inputs.check_size(
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
        "weights",
        {
            **inputs.names,
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
    entries: the projection of a longer vector has different lengths and angles, so it would not explain the scores.

    Args:
        query: Queries of one head, `(q_len, 2)`. Default: the pronoun of the book.
        key: Keys, `(kv_len, 2)`.
        value: Values, `(kv_len, 2)`. Without them the page has only the first plane.
        tokens: Labels of the keys, and also of the queries if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays have incompatible shapes, are not finite, do not have two entries, or there are
            more than 40.

    >>> from regard.explore import geometry
    >>> geometry()
    <page "Attention in the plane", ... kB: save(path) writes it>
    """
    inputs = prepare_inputs("explore.geometry", query, key, value, tokens, mask, example=pronoun)
    if query is None:
        inputs = replace(inputs, query_names=["it"])
    for name, entries in (("query", inputs.head_dim), ("value", 2 if value is None else inputs.value_dim)):
        if entries != 2:
            raise ArgumentError(
                "explore.geometry",
                received=f"{name} with {entries} {'entry' if entries == 1 else 'entries'} each",
                expected=f"{name} with 2 entries each, the coordinates in a plane",
                hint="For vectors of any size, use explore.pipeline.",
            )
    hint = "Take some of them: query[:8], key[:8], value[:8]."
    inputs.check_size(max(inputs.matrix.shape), MAX_ARROWS, "queries or keys", hint)
    rows = inputs.explain_rows()
    key, value = rows[0].key, rows[0].value
    for name, array in (("query", [row.query for row in rows]), ("key", key), ("value", value)):
        if array is not None and not (np.abs(np.array(array)) <= MAX_ENTRY).all():
            raise ArgumentError(
                "explore.geometry",
                received=f"{name} with entries that are not finite, or too large",
                expected=f"numbers up to {MAX_ENTRY:g}",
                hint="A plane cannot show inf and NaN; use explore.pipeline instead.",
            )
    return build_page(
        "Attention in the plane",
        "geometry",
        {
            **inputs.names,
            "shape": inputs.shape,
            "scale": rows[0].scale,
            "key": key,
            "lengths": np.hypot(*key.T),
            "value": value,
            "rows": [_arrow_payload(row) for row in rows],
        },
    )


def _arrow_payload(row: Explanation) -> dict[str, Any]:
    """Return the numbers of one query, as the library computed them; the cosine of a zero vector is 0."""
    length = float(np.hypot(*row.query))
    products = length * np.hypot(*row.key.T)
    cosines = row.raw_scores / np.where(products == 0, 1.0, products)
    names = ("query", "scores", "weights", "contributions", "output")
    return {"length": length, "cosines": cosines, **{name: getattr(row, name) for name in names}}


MAX_CURVES = 3  # each has a colour of its own


def training(
    steps: Sequence[int],
    loss: Mapping[str, Any],
    weights: Any,
    *,
    tokens: Sequence[str],
    heads: Sequence[str] | None = None,
) -> Page:
    """Build a page with the maps of heads and the loss at checkpoints of a training run, and a slider over them.

    Record the weights of one text at some training steps, and pass them all. Numbers are embedded as float32.

    Args:
        steps: The training steps of the checkpoints, ascending.
        loss: Up to three curves by name, each `(checkpoints,)`. The first is drawn on top.
        weights: Weights of one text, `(checkpoints, heads, q_len, kv_len)`. At most 512 × 512 in all.
        tokens: Labels of the keys, and also of the queries if there are as many.
        heads: Names of the heads. Default: their numbers.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays have incompatible shapes or have too many weights.

    >>> from regard.explore import training
    >>> halves = [[[1, 0], [0.5, 0.5]]]
    >>> training([0, 100], {"loss": [3.2, 0.1]}, [halves, halves], tokens=["a", "b"])
    <page "Attention while it learns", ... kB: save(path) writes it>
    """
    operation, names = "explore.training", [escape_unprintable(str(token)) for token in tokens]
    maps = as_floats(operation, "weights", weights, "checkpoints", "heads", "q_len", "kv_len")
    curves = {
        escape_unprintable(name): as_floats(operation, name, loss[name], "checkpoints") for name in loss
    }
    lengths = [len(curve) for curve in curves.values()]
    head_names = [f"head {head}" for head in range(maps.shape[1])] if heads is None else list(heads)
    q_len, kv_len = maps.shape[-2:]
    require(
        maps.size > 0
        and maps.shape == (len(steps), len(head_names), q_len, len(names))
        and 1 <= len(loss) <= MAX_CURVES
        and lengths == [len(steps)] * len(loss),
        operation,
        received=f"weights of shape {maps.shape}, {len(steps)} steps, {len(head_names)} heads, {len(names)} tokens, "
        f"and losses of lengths {lengths}",
        expected=f"weights (steps, heads, q_len, tokens) and one to {MAX_CURVES} losses with a number for each step",
        hint="Record the loss and the weights at the same steps.",
    )
    check_size(operation, maps.size, MAX_WEIGHTS, "weights", "Keep fewer checkpoints or a shorter text.")
    return build_page(
        "Attention while it learns",
        "training",
        {
            "steps": [int(step) for step in steps],
            "loss": curves,
            "size": maps.shape[1:],
            "weights": encode_float32(maps),
            "tokens": names,
            "queries": names if q_len == kv_len else [f"query {i}" for i in range(q_len)],
            "heads": [escape_unprintable(str(head)) for head in head_names],
        },
    )


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
    0, which does not hold for a trained model. Numbers are embedded as float32.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: random entries.
        key: Keys, `(kv_len, head_dim)`.
        tokens: Names of the keys. Without arrays, one random key for each token.
        seed: Seed of the random entries.

    Returns:
        The page.

    Raises:
        ArgumentError: If the arrays have incompatible shapes, there are too many scores, or `tokens` is empty.

    >>> from regard.explore import scaling
    >>> scaling()
    <page "Why scores are divided by √d_k", ... kB: save(path) writes it>
    """
    is_random = query is None and key is None
    if is_random:
        if tokens is not None and not len(tokens):
            raise ArgumentError(
                "explore.scaling",
                received="no tokens",
                expected="at least one token, or None for eight keys",
                hint="Each token names a key, and a query needs at least one key.",
            )
        tokens = [f"key {j}" for j in range(RANDOM_KEYS)] if tokens is None else tokens
        keys = [escape_unprintable(str(token)) for token in tokens]
        names = {"tokens": keys, "queries": [f"query {i}" for i in range(RANDOM_QUERIES)]}
        stops, initial_dim, shape = slider_stops(RANDOM_DIM), INITIAL_DIM, None
    else:
        inputs = prepare_inputs("explore.scaling", query, key, None, tokens, None)
        names, shape = inputs.names, inputs.shape
        stops, initial_dim = slider_stops(inputs.head_dim), inputs.head_dim
    count, hint = len(names["queries"]) * len(names["tokens"]) * len(stops), "query[:32], key[:32]."
    check_size("explore.scaling", count, MAX_SCORES, "scores to show", f"Take some queries and keys: {hint}")
    if is_random:
        rng = np.random.default_rng(seed)
        left = rng.normal(size=(RANDOM_QUERIES, 1, RANDOM_DIM))
        right = rng.normal(size=(RANDOM_QUERIES, len(keys), RANDOM_DIM))  # each query has its own keys
    else:
        rows = inputs.explain_rows()
        left = np.array([row.query for row in rows], dtype=float)[:, None, :]
        right = np.array(rows[0].key, dtype=float)[None, :, :]

    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are shown as they are
        parts = [(left[..., :size], right[..., :size]) for size in stops]
        # Rounded to float32, as they are embedded, so that the page uses exactly the numbers of the library.
        dots = [(a * b).sum(axis=-1).astype(np.float32).astype(np.float64) for a, b in parts]
        # The variance of a sum of d_k products of independent entries with mean 0.
        predicted = stops if is_random else [a.shape[-1] * np.mean(a**2) * np.mean(b**2) for a, b in parts]
        variances = [variance_row(*row) for row in zip(dots, stops, map(float, predicted), strict=True)]
        start = stops.index(initial_dim)
        opening = {
            "row": row_payload(dots[start][0] / math.sqrt(variances[start].d_k)),
            "deviation": math.sqrt(variances[start].scaled_variance),
            "scaled": [_sharpness_payload(row.scaled) for row in variances],
            "unscaled": [_sharpness_payload(row.unscaled) for row in variances],
        }
    return build_page(
        "Why scores are divided by √d_k",
        "scaling",
        {
            "drawn": is_random,
            "shape": shape,
            **names,
            "named": names["queries"] is names["tokens"],
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
    slope = float(np.abs(softmax_jacobian(weights)).max())
    return {"scores": scores, "weights": weights, **_sharpness_payload(sharpness(weights)), "slope": slope}


def _sharpness_payload(means: Sharpness) -> dict[str, float]:
    return {"largest": means.largest_weight, "entropy": means.entropy, "gradient": means.gradient}


MAX_MULTIPLICATIONS = 1000  # keeps the page below 300 kB and short enough to step through
DOUBLINGS = 10
COUNTERS = (
    "score_multiply_adds",
    "value_multiply_adds",
    "exponentials",
    "additions",
    "comparisons",
    "divisions",
)


def cost(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
) -> Page:
    """Build a page that computes attention one multiplication at a time with counters, then doubles the length.

    The reader plays, steps forwards and backwards, or skips to the next cell. The steps come from
    `learn.iter_multiplications` and the counters from `learn.attention_by_loops`, which skip masked entries. A slider
    doubles the length up to 1024 times: it shows the n × n cells and the row of `learn.cost_table` for each length, in
    float64 as in the loops.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: three tokens with three entries each.
        key: Keys, `(kv_len, head_dim)`.
        value: Values, `(kv_len, value_dim)`. At most 1000 multiplications in all.
        tokens: Labels of the keys, and also of the queries if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the value is missing, the arrays have incompatible shapes, or there are too many
            multiplications.

    >>> from regard.explore import cost
    >>> cost()
    <page "The cost of attention", ... kB: save(path) writes it>
    """
    inputs = prepare_inputs("explore.cost", query, key, value, tokens, mask, example=three_by_three)
    if inputs.value is None:
        raise ArgumentError(
            "explore.cost",
            received="a query and a key without a value",
            expected="query, key and value, or none of them for the example",
            hint="Pass the value as well: multiplying by it is half of the work.",
        )
    q_len, kv_len = inputs.matrix.shape
    inputs.check_size(
        q_len * kv_len * (inputs.head_dim + inputs.value_dim),
        MAX_MULTIPLICATIONS,
        "multiplications to go through",
        "Take a few tokens and a few entries: query[:4, :4], key[:4, :4], value[:4, :4].",
    )
    rows = inputs.explain_rows()
    Q = np.array([row.query for row in rows], dtype=float)
    K, V = np.array(rows[0].key, dtype=float), np.array(rows[0].value, dtype=float)
    visible = np.array([row.scores for row in rows]) != -np.inf
    lengths = [kv_len * 2**power for power in range(DOUBLINGS + 1)]
    table = cost_table(lengths, d_k=inputs.head_dim, d_v=inputs.value_dim, dtype=np.float64)
    return build_page(
        "The cost of attention",
        "cost",
        {
            **inputs.names,
            "shape": inputs.shape,
            "query": Q,
            "key": K,
            "value": V,
            "weights": attention_by_loops(Q, K, V, visible).weights,
            "masked": ~visible,
            "moments": list_events(Q, K, V, visible),
            "lengths": table.format_rows(),
        },
    )


def list_events(Q: Floats, K: Floats, V: Floats, visible: Bools) -> list[list[Any]]:
    """List what happens, in order: [table, row, column, term, total] of a multiplication, then the counters after it.

    Between the scores and the output each row of weights is one event, without column, term and total. The counters
    are those of `COUNTERS`.
    """
    # The loops take row by row; apart from its multiplications, a row's counts are the work of its softmax.
    row_counts = [attention_by_loops(Q[i : i + 1], K, V, visible[i : i + 1]).counts for i in range(len(Q))]
    steps = list(iter_multiplications(Q, K, V, visible))
    total = OperationCounts()
    events: list[list[Any]] = []

    def add_event(table: str, *cell: float | None) -> None:
        events.append([table, *cell, *(getattr(total, name) for name in COUNTERS)])

    for step in (step for step in steps if step.table == "scores"):
        total.score_multiply_adds += 1
        add_event(step.table, step.row, step.column, step.term, step.total)
    for row, counts in enumerate(row_counts):
        for name in COUNTERS[2:]:
            setattr(total, name, getattr(total, name) + getattr(counts, name))
        add_event("weights", row, None, None, None)
    for step in (step for step in steps if step.table == "output"):
        total.value_multiply_adds += 1
        add_event(step.table, step.row, step.column, step.term, step.total)
    return events


MAX_WINDOW = 192  # tokens that the page shows the model at most
# Beginnings that show what the model has learned, with what it writes next.
CONTINUATIONS = {
    "Once upon a time, there was a little girl called Zobi. She lived near the forest. Everyone in the forest "
    "knew": " Zobi",
    "The cat sat on the": " mat",
    'The kite of Mia was purple. "What colour is your kite?" asked the frog. "It is': " purple",
    "The artist met the musician in the park. One of them had a brush. It was the": " artist",
    "Zobi and Rumo went to the park. Zobi had a kite, and gave it to": " Rumo",
    "for kane in miro:\n  zobi =": " kane",
}
DEFAULT_TEXT = next(iter(CONTINUATIONS))
PLANE_WORDS = """Lily Tom Mia Max Ben Sue cat dog bird fox bear frog red blue green yellow black white girl boy mom dad
friend he she they his her their was were is has had said asked saw found gave took ran went wanted park garden forest
house school beach ball hat kite boat book car happy sad big little cake bread soup apple in on under to from and but"""
WORD_SIZE = np.array([0.2, 0.1])  # width and height of a word in the plane, whose sides are 2
PUSHES = 120  # rounds in which words that overlap are moved apart


def model(text: str = DEFAULT_TEXT, *, path: str | os.PathLike[str] | None = None) -> Page:
    """Build a page with a small GPT that runs in the browser and continues the text that the reader types.

    The model is `regard.learn.TinyGPT`. It has 3.9 million parameters, reads words and pieces of words, and was trained
    on children's stories (`examples/stories`). The page shows its guess for the next token with temperature and top-k,
    the guess after every layer, the map of each head for the reader's text, and the unembedding of some words. A click
    on a cell of a map shows how its weight was computed: query, key, score, softmax, value, and what it adds to the
    residual stream. Heads can be switched off. The page computes in JavaScript, in float64, in a web worker; the
    weights are stored as int8.

    Args:
        text: Text that the page opens with.
        path: File of another model, as in `TinyGPT`. Default: the model of children's stories.

    Returns:
        The page, about 5 MB.

    Raises:
        ArgumentError: If the text is empty, or the file is not such a model.

    >>> from regard.explore import model
    >>> model("The cat sat on the")
    <page "A tiny GPT", ... MB: save(path) writes it>
    """
    if not isinstance(text, str) or not text:
        raise ArgumentError(
            "explore.model",
            received=f"text as {describe_argument(text)}",
            expected="a text of at least one character",
            hint='Pass the beginning of a story: explore.model("Once upon a time").',
        )
    gpt = TinyGPT(path)
    stored = gpt.stored.values()
    words = [token for token in (gpt.encode(word)[1:] for word in PLANE_WORDS.split()) if len(token) == 1]
    plane = project_words(gpt.parameters["unembedding.weight"][np.ravel(words)])
    return build_page(
        "A tiny GPT",
        "tinyGpt",
        {
            "text": text,
            "examples": [example for example in CONTINUATIONS if example != text],
            "pieces": gpt.pieces,
            "config": {**gpt.config, "context": min(gpt.about["context"], MAX_WINDOW)},
            "shapes": {name: list(array.shape) for name, array in gpt.stored.items()},
            "weights": encode_array(np.concatenate([array.ravel() for array in stored if array.ndim == 2])),
            "vectors": encode_array(np.concatenate([array for array in stored if array.ndim == 1])),
            "parameters": sum(array.size for array in gpt.parameters.values()),
            "words": np.ravel(words),
            "plane": plane,
            "bits": gpt.about["bits"],
            "training": {name: gpt.about[name] for name in ("steps", "batch", "context", "text")},
        },
    )


def project_words(vectors: Array) -> Array:
    """Project vectors, `(words, width)`, onto the plane in which their directions differ most (principal components).

    Returns coordinates between −1 and 1, `(words, 2)`, moved apart by about `WORD_SIZE`, so that all can be read. The
    entry of each axis that is farthest out is positive.
    """
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    left, sizes, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    plane = left[:, :2] * sizes[:2]
    plane *= np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    plane /= np.abs(plane).max(0)
    for _ in range(PUSHES):
        offsets = (plane[:, None] - plane[None]) / WORD_SIZE  # (words, words, 2)
        distances = np.linalg.norm(offsets, axis=-1) + np.eye(len(plane))
        overlaps = np.maximum(0, 1 / np.maximum(distances, 1e-9) - 1)[..., None] * offsets * WORD_SIZE
        if not overlaps.any():
            break
        plane = np.clip(plane + overlaps.sum(1) / 2, -1, 1)
    return np.round(plane, 4)


# An A100 as Dao et al. (2022) describe it: fast memory of one processor, and bytes per second of the slow memory.
FAST_MEMORY, SLOW_BANDWIDTH = 196_608, 1.5e12


def memory() -> Page:
    """Build a page that counts the bytes that step-by-step and fused attention move to and from memory.

    The reader chooses the length, the entries of a head and the queries of a tile. `learn.Cost` counts the same bytes.

    Returns:
        The page.

    >>> from regard.explore import memory
    >>> memory()
    <page "Bytes that attention moves", ... kB: save(path) writes it>
    """
    record = {
        "lengths": [2**power for power in range(8, 18)],
        "dims": [32, 64, 128, 256],
        "rows": [2**power for power in range(4, 10)],
        "columns": 128,
        "itemsize": 2,
        "fast": FAST_MEMORY,
        "bandwidth": SLOW_BANDWIDTH,
    }
    return build_page("Bytes that attention moves", "memory", record)
