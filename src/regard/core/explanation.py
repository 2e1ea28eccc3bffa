"""One query's four steps, as data: compare, scale, normalise, aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from regard.core.block_loop import init_online_softmax, make_finite, update_online_softmax
from regard.core.problem import Problem
from regard.errors import ArgumentError
from regard.render.explanation import format_explanation
from regard.render.text import escape_unprintable
from regard.types import Array

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """The four steps of one query with every number; `print` it to read them.

    Shapes: `query` (head_dim,), `key` (kv_len, head_dim), `products` (kv_len, head_dim); `raw_scores`,
    `scaled_scores`, `scores` (after score modifications and mask, −inf where hidden), `exponentials` and `weights`
    (kv_len,); `shift` and `total` are numbers. With a value (kv_len, value_dim): `contributions` of that shape
    and `output` (value_dim,); without, both are None.

    >>> import regard
    >>> from regard.learn import cat
    >>> sat = regard.attention(cat.Q, cat.K).explain(2, value=cat.V, tokens=cat.tokens)
    >>> sat.scaled_scores
    array([0.5 , 1.  , 1.  , 0.5 , 0.75])
    >>> sat.output.round(4)
    array([0.2495, 0.3481, 0.3481, 0.2495])
    """

    title: str
    key_tokens: Sequence[str]
    query: Array
    key: Array
    scale: float
    score_mods: tuple[str, ...]
    masks: tuple[str, ...]
    raw_scores: Array
    scaled_scores: Array
    scores: Array
    shift: float
    exponentials: Array
    sink_exponential: float | None
    total: float
    weights: Array
    value: Array | None

    @property
    def products(self) -> Array:
        """Every product of step 1, query entry times key entry: (kv_len, head_dim)."""
        with np.errstate(invalid="ignore", over="ignore"):  # a hidden key may be anything
            return self.query * self.key

    @cached_property
    def contributions(self) -> Array | None:
        """Weight times value for each key, zero where hidden: (kv_len, value_dim)."""
        if self.value is None:
            return None
        with np.errstate(invalid="ignore"):  # a hidden value may be anything
            products = self.weights[:, None] * self.value
        return np.where((self.scores == -np.inf)[:, None], 0.0, products)

    @property
    def output(self) -> Array | None:
        """The sum of the contributions: (value_dim,)."""
        contributions = self.contributions
        return None if contributions is None else contributions.sum(0)

    def __str__(self) -> str:
        return format_explanation(self)

    def __repr__(self) -> str:
        return f"<{self.title}: {len(self.weights)} keys, print() shows the four steps>"

    def _repr_html_(self) -> str:
        from regard.render import notebook

        return notebook.render_explanation(self)


def explain(problem: Problem, row: int, value: Array | None, tokens: Sequence[str] | None) -> Explanation:
    """The explanation of one row of a matrix with one (batch, head) pair."""
    engine, xp = problem.engine, problem.engine.xp
    kv_len = problem.frame.kv_len
    if tokens is not None and len(tokens) != kv_len:
        raise ArgumentError(
            "explain",
            received=f"{len(tokens)} tokens",
            expected=f"{kv_len}, one for each key",
            hint="Tokens name the keys; a query has one of them where it is the same sequence.",
        )
    q_idx = int(problem.positions[row])
    label = f"query {q_idx}"
    if tokens is not None and problem.frame.q_len == kv_len:
        label += f' "{escape_unprintable(str(tokens[q_idx]))}"'
    every, only = np.arange(kv_len), np.array([row])
    query = engine.take(problem.query, problem.query_index, only, problem.dtype)[0, 0]
    key = engine.take(problem.key, problem.key_index, every, problem.dtype)[0]
    with engine.suppress_warnings(), engine.no_grad():
        raw = key @ query
        scores = problem.scores(only, every)
        stats = init_online_softmax(problem, 1)
        sink = None if problem.sink is None else stats.max[0, 0]
        if kv_len:
            stats = update_online_softmax(stats, scores, engine)
        assert stats.sum is not None
        shift = make_finite(stats.max, xp)[0, 0]
        exponentials = xp.exp(scores[0, 0] - shift)
        total = float(stats.sum[0, 0])
        weights = exponentials / total if total != 0 else exponentials
        weights = xp.where(scores[0, 0] == -xp.inf, 0.0, weights)
        query, key, raw, exponentials, weights = map(
            engine.to_numpy, (query, key, raw, exponentials, weights)
        )
        row_scores, value = engine.to_numpy(scores[0, 0]), None if value is None else engine.to_numpy(value)
        return Explanation(
            title=f"How {label} attends{problem.title_suffix}",
            key_tokens=[str(t) for t in tokens]
            if tokens is not None
            else [f"key {j}" for j in range(kv_len)],
            query=query,
            key=key,
            scale=problem.scale,
            score_mods=tuple(map(repr, problem.score_mods)),
            masks=() if problem.mask is None else (repr(problem.mask),),
            raw_scores=raw,
            scaled_scores=raw * problem.scale,
            scores=row_scores,
            shift=float(shift),
            exponentials=exponentials,
            sink_exponential=None if sink is None else float(xp.exp(sink - shift)),
            total=total,
            weights=weights,
            value=value,
        )
