"""Every multiplication of a small attention, one at a time, and what becomes of their number as the length grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.explore.inputs import check_size, given
from regard.learn.cost import cost_table
from regard.learn.examples import three_by_three
from regard.learn.loops import Counts, attention_by_loops
from regard.learn.multiply_adds import multiplications
from regard.learn.validation import Bools, Floats
from regard.masks import Mask
from regard.pages.html import Page, page
from regard.render.table import format_bytes

MOST_MULTIPLICATIONS = 1000  # keeps the page below 300 kB, and the reader awake
DOUBLINGS = 10
COUNTED = (
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
    """A page that computes attention one multiplication at a time while counters run, then doubles the length.

    The reader plays, steps and steps back, or goes on to the next cell. The steps are those of
    `learn.multiplications` and the counters those of `learn.attention_by_loops`, which pass over what a mask hides.
    Below it a slider doubles the length up to 1024 times over: the board of n × n cells, and what `learn.cost_table`
    says of each length in float64, as in the loops.

    `query` is (q_len, head_dim), `key` (kv_len, head_dim), `value` (kv_len, value_dim), one head of at most 1000
    multiplications; without any, three tokens of three numbers. Tokens name the keys, and the queries too where there
    are as many.

    >>> cost()
    <page "What attention costs", ... kB: save(path) writes it>
    """
    if query is None and key is None and value is None:
        query, key, value = three_by_three.Q, three_by_three.K, three_by_three.V
        tokens = three_by_three.tokens if tokens is None else tokens
    it = given("explore.cost", query, key, value, tokens, mask)
    if value is None:
        raise ArgumentError(
            "explore.cost",
            received="a query and a key without a value",
            expected="query, key and value, or none of them for the example",
            hint="Half of the work is done on the values: pass value too.",
        )
    (q_len, kv_len), value_dim = it.matrix.shape, np.shape(value)[1]
    check_size(
        "explore.cost",
        q_len * kv_len * (it.head_dim + value_dim),
        MOST_MULTIPLICATIONS,
        "multiplications to go through",
        "Take a few tokens and a few entries: query[:4, :4], key[:4, :4], value[:4, :4].",
    )
    steps = it.explained()
    Q = np.array([each.query for each in steps], dtype=float)
    K, V = (np.array(each, dtype=float) for each in (steps[0].key, steps[0].value))
    seen = np.array([each.scores for each in steps]) != -np.inf
    counted = attention_by_loops(Q, K, V, seen)
    return page(
        "What attention costs",
        "cost.js",
        {
            "tokens": it.tokens,
            "queries": it.queries,
            "shape": it.shape,
            "query": Q,
            "key": K,
            "value": V,
            "weights": counted.weights,
            "hidden": ~seen,
            "moments": moments(Q, K, V, seen),
            "lengths": _lengths(kv_len, it.head_dim, value_dim),
        },
    )


def moments(Q: Floats, K: Floats, V: Floats, seen: Bools) -> list[list[Any]]:
    """What happens, in order: [table, row, column, term, total] of a multiplication, then the counters after it.

    Between the scores and the output each row of weights is one moment, without column, term and total. The counters
    are those of `COUNTED`.
    """
    # The loops take row by row; the work of a row's softmax is what they count for it besides its multiplications.
    rows = [attention_by_loops(Q[i : i + 1], K, V, seen[i : i + 1]).counts for i in range(len(Q))]
    steps = list(multiplications(Q, K, V, seen))
    done = Counts()
    happened: list[list[Any]] = []

    def add(table: str, *place: float | None) -> None:
        happened.append([table, *place, *(getattr(done, name) for name in COUNTED)])

    for step in (each for each in steps if each.table == "scores"):
        done.score_multiply_adds += 1
        add(step.table, step.row, step.column, step.term, step.total)
    for row, counts in enumerate(rows):
        for name in COUNTED[2:]:
            setattr(done, name, getattr(done, name) + getattr(counts, name))
        add("weights", row, None, None, None)
    for step in (each for each in steps if each.table == "output"):
        done.value_multiply_adds += 1
        add(step.table, step.row, step.column, step.term, step.total)
    return happened


def _lengths(shortest: int, head_dim: int, value_dim: int) -> list[list[str]]:
    """The rows of the cost table as they are shown: length, entries, growth, memory, multiply-adds."""
    doubled = [shortest * 2**power for power in range(DOUBLINGS + 1)]
    table = cost_table(doubled, d_k=head_dim, d_v=value_dim, dtype=np.float64)
    before = [None, *(row.entries for row in table.rows[:-1])]
    return [
        [
            f"{row.q_len:,}",
            f"{row.entries:,}",
            f"× {row.entries / last:g}" if last else "",
            format_bytes(row.bytes),
            f"{row.multiply_adds:,}",
        ]
        for row, last in zip(table.rows, before, strict=True)
    ]
