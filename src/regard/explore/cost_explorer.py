"""Explorer of the multiplications of a small attention, and of their number as the length grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.explore.inputs import check_size, prepare_inputs
from regard.learn.cost import cost_table
from regard.learn.examples import three_by_three
from regard.learn.loops import OperationCounts, attention_by_loops
from regard.learn.multiply_adds import iter_multiplications
from regard.learn.validation import Bools, Floats
from regard.masks import Mask
from regard.pages.html import Page, build_page
from regard.render.table import format_bytes

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

    The reader plays, steps forwards and backwards, or skips to the next cell. The steps are those of
    `learn.iter_multiplications` and the counters those of `learn.attention_by_loops`, which skip masked entries. A
    slider doubles the length up to 1024 times: it shows the n × n cells and the row of `learn.cost_table` for each
    length, in float64 as in the loops.

    Args:
        query: Queries of one head, `(q_len, head_dim)`. Default: three tokens with three entries each.
        key: Keys, `(kv_len, head_dim)`.
        value: Values, `(kv_len, value_dim)`. At most 1000 multiplications in all.
        tokens: Names of the keys, and of the queries too if there are as many.
        mask: Mask of the matrix.

    Returns:
        The page.

    Raises:
        ArgumentError: If the value is missing, the arrays do not fit together, or there are too many multiplications.

    >>> from regard.explore import cost
    >>> cost()
    <page "The cost of attention", ... kB: save(path) writes it>
    """
    if query is None and key is None and value is None:
        query, key, value = three_by_three.Q, three_by_three.K, three_by_three.V
        tokens = three_by_three.tokens if tokens is None else tokens
    inputs = prepare_inputs("explore.cost", query, key, value, tokens, mask)
    if value is None:
        raise ArgumentError(
            "explore.cost",
            received="a query and a key without a value",
            expected="query, key and value, or none of them for the example",
            hint="Pass the value too: half of the work multiplies weights and values.",
        )
    (q_len, kv_len), value_dim = inputs.matrix.shape, np.shape(value)[1]
    check_size(
        "explore.cost",
        q_len * kv_len * (inputs.head_dim + value_dim),
        MAX_MULTIPLICATIONS,
        "multiplications to go through",
        "Take a few tokens and a few entries: query[:4, :4], key[:4, :4], value[:4, :4].",
    )
    rows = inputs.explain_rows()
    Q = np.array([row.query for row in rows], dtype=float)
    K, V = np.array(rows[0].key, dtype=float), np.array(rows[0].value, dtype=float)
    visible = np.array([row.scores for row in rows]) != -np.inf
    result = attention_by_loops(Q, K, V, visible)
    return build_page(
        "The cost of attention",
        "cost",
        {
            "tokens": inputs.key_names,
            "queries": inputs.query_names,
            "shape": inputs.shape,
            "query": Q,
            "key": K,
            "value": V,
            "weights": result.weights,
            "masked": ~visible,
            "moments": list_events(Q, K, V, visible),
            "lengths": _format_lengths(kv_len, inputs.head_dim, value_dim),
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


def _format_lengths(shortest: int, head_dim: int, value_dim: int) -> list[list[str]]:
    """Format the rows of the cost table: length, entries, growth, memory, multiply-adds."""
    lengths = [shortest * 2**power for power in range(DOUBLINGS + 1)]
    table = cost_table(lengths, d_k=head_dim, d_v=value_dim, dtype=np.float64)
    previous = [None, *(row.entries for row in table.rows[:-1])]
    return [
        [
            f"{row.q_len:,}",
            f"{row.entries:,}",
            f"× {row.entries / before:g}" if before else "",
            format_bytes(row.bytes),
            f"{row.multiply_adds:,}",
        ]
        for row, before in zip(table.rows, previous, strict=True)
    ]
