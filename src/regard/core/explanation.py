"""The four steps of one query as data: compare, scale, normalise, aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard.core.block_loop import init_online_softmax, make_finite, update_online_softmax
from regard.engines.compensated import resolve_sums
from regard.errors import ArgumentError
from regard.problem import Problem, num_pairs
from regard.render.table import PrintedStep, format_steps
from regard.render.text import TERMS_SHOWN, escape_unprintable, format_factor, format_number, format_vector
from regard.types import Array

__all__ = ["Explanation", "explain_row"]

KEYS_SHOWN = 12


@dataclass(frozen=True, eq=False)
class Explanation:
    """The four steps of attention for one query, with every number; `print` shows them.

    Attributes:
        title: Heading, such as "How query 2 attends".
        key_tokens: Labels of the keys: kv_len strings.
        query: (head_dim,).
        key: (kv_len, head_dim).
        scale: Factor of the raw scores.
        score_mods: Score modifications, in the order in which they are applied.
        masks: Masks.
        raw_scores: query · key, before the scale: (kv_len,).
        scaled_scores: Raw scores times the scale: (kv_len,).
        scores: Scores after score modifications and mask, −inf where masked: (kv_len,).
        shift: Largest score, subtracted before the exponential.
        exponentials: exp(score − shift): (kv_len,).
        sink_exponential: Exponential of the sink; None if there is no sink.
        total: Sum of the exponentials, including the exponential of the sink.
        weights: Exponentials divided by the total: (kv_len,).
        value: (kv_len, value_dim); None if no value was given; then there is no fourth step.

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
        """The products of step 1, query entry times key entry: (kv_len, head_dim)."""
        with np.errstate(invalid="ignore", over="ignore"):  # a masked key may hold any number
            return self.query * self.key

    @cached_property
    def contributions(self) -> Array | None:
        """Weight times value for each key, zero where masked: (kv_len, value_dim); None without a value."""
        if self.value is None:
            return None
        with np.errstate(invalid="ignore"):  # a masked value may hold any number
            products = self.weights[:, None] * self.value
        return np.where((self.scores == -np.inf)[:, None], 0.0, products)

    @property
    def output(self) -> Array | None:
        """The sum of the contributions: (value_dim,); None without a value."""
        contributions = self.contributions
        with np.errstate(invalid="ignore", over="ignore"):  # of live values that are not finite
            return None if contributions is None else contributions.sum(0)

    @property
    def _heading(self) -> str:
        return f"{self.title}: {len(self.weights)} keys, head_dim {len(self.query)}"

    def __str__(self) -> str:
        return format_steps(self._heading, _list_steps(self))

    def __repr__(self) -> str:
        return f"<{self.title}: {len(self.weights)} keys, print() shows the four steps>"

    def _repr_html_(self) -> str:
        from regard.render import notebook

        return notebook.render_steps(self._heading, _list_steps(self))


def explain_row(
    problem: Problem, row: int, value: Any = None, tokens: Sequence[str] | None = None
) -> Explanation:
    """Compute the explanation of one row, counted from the first, of a matrix with one (batch, head) pair."""
    engine, xp = problem.engine, problem.engine.xp
    kv_len = problem.frame.kv_len
    if value is not None:
        value = engine.as_float(value, "explain", "value")
        if value.shape[-2:-1] != (kv_len,) or num_pairs(value) != 1:
            raise ArgumentError(
                "explain",
                received=f"value of shape {tuple(value.shape)}",
                expected=f"(kv_len {kv_len}, value_dim)",
                hint="Pass the value of the same head.",
            )
        value = engine.cast(value.reshape(value.shape[-2:]), problem.dtype)
    if tokens is not None and len(tokens) != kv_len:
        raise ArgumentError(
            "explain",
            received=f"{len(tokens)} tokens",
            expected=f"{kv_len}, one for each key",
            hint="Tokens label the keys, and the queries if they are the same sequence.",
        )
    q_idx = int(problem.positions[row])
    label = f"query {q_idx}"
    if tokens is not None and problem.frame.q_len == kv_len:
        label += f' "{escape_unprintable(str(tokens[q_idx]))}"'
    all_keys, rows = np.arange(kv_len), np.array([row])
    query = engine.take(problem.query, problem.query_index, rows, problem.dtype)[0, 0]
    key = engine.take(problem.key, problem.key_index, all_keys, problem.dtype)[0]
    with engine.suppress_warnings(), engine.no_grad():
        raw = key @ query
        scaled = raw * problem.scale
        scores = problem.scores(rows, all_keys)
        stats = init_online_softmax(problem, 1)
        sink = None if problem.sink is None else stats.max[0, 0]
        if kv_len:
            stats = update_online_softmax(stats, scores, engine)
        assert stats.sum is not None
        shift = make_finite(stats.max, xp)[0, 0]
        exponentials = xp.exp(scores[0, 0] - shift)
        total = float(resolve_sums(stats.sum)[0, 0])
        weights = exponentials / total if total != 0 else exponentials
        weights = xp.where(scores[0, 0] == -xp.inf, 0.0, weights)
        given = problem.take_given_weights(rows, all_keys)
        if given is not None:  # their lse is 0: a row may sum to less than 1
            weights, total = given[0, 0], float(xp.exp(-shift))
        query, key, raw, scaled, exponentials, weights = map(
            engine.to_numpy, (query, key, raw, scaled, exponentials, weights)
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
            scaled_scores=scaled,
            scores=row_scores,
            shift=float(shift),
            exponentials=exponentials,
            sink_exponential=None if sink is None else float(xp.exp(sink - shift)),
            total=total,
            weights=weights,
            value=value,
        )


# The steps as text


def _list_steps(explanation: Explanation) -> list[PrintedStep]:
    """Return the steps as rows of text: three, and a fourth with a value.

    Of a row of more than 12 keys, the 12 with the largest weights are listed; one line sums the other keys.
    """
    weights = np.asarray(explanation.weights)
    keys = np.arange(len(weights))
    rest = keys[:0]
    if len(keys) > KEYS_SHOWN:
        order = np.argsort(-np.nan_to_num(weights, nan=np.inf), kind="stable")
        keys, rest = np.sort(order[:KEYS_SHOWN]), order[KEYS_SHOWN:]
    names = [escape_unprintable(explanation.key_tokens[int(j)]) for j in keys]
    steps = [
        _compare(explanation, keys, names),
        _scale(explanation, keys, names),
        _normalise(explanation, keys, names, rest),
    ]
    if explanation.output is not None:
        steps.append(_aggregate(explanation, keys, names, rest))
    return steps


def _compare(explanation: Explanation, keys: Array, names: list[str]) -> PrintedStep:
    rows = [[name, _sum_of_products(explanation, int(j))] for name, j in zip(names, keys, strict=True)]
    title = f"1. Compare: query {format_vector(explanation.query)} · key"
    return PrintedStep(title, ("key", "score"), rows, [])


def _sum_of_products(explanation: Explanation, j: int) -> str:
    pairs = zip(explanation.query, explanation.key[j], strict=True)
    terms = [f"{format_factor(q)}·{format_factor(k)}" for q, k in pairs]
    if len(terms) > TERMS_SHOWN:
        terms = [*terms[:3], "…", terms[-1]]
    return f"{' + '.join(terms) or '0'} = {format_number(explanation.raw_scores[j])}"


def _scale(explanation: Explanation, keys: Array, names: list[str]) -> PrintedStep:
    scale = format_number(explanation.scale)
    rows = []
    for name, j in zip(names, keys, strict=True):
        raw, scaled, score = (
            float(numbers[j])
            for numbers in (explanation.raw_scores, explanation.scaled_scores, explanation.scores)
        )
        cell = f"{format_factor(raw)} × {scale} = {format_number(scaled)}"
        if score == -np.inf:
            cell += "  masked"
        elif explanation.score_mods:
            cell += f" → {format_number(score)}"
        rows.append([name, cell])
    changes = "".join(f", then {change}" for change in (*explanation.score_mods, *explanation.masks))
    return PrintedStep(f"2. Scale: × {scale}{changes}", ("key", "scaled score"), rows, [])


def _normalise(explanation: Explanation, keys: Array, names: list[str], rest: Array) -> PrintedStep:
    exponentials, weights = explanation.exponentials, explanation.weights
    entries = [(name, exponentials[j], float(weights[j])) for name, j in zip(names, keys, strict=True)]
    sink = explanation.sink_exponential
    if sink is not None:
        entries.append(("(sink)", sink, sink / (explanation.total or 1.0)))
    if len(rest):
        entries.append((_others(rest), float(exponentials[rest].sum()), float(weights[rest].sum())))
    shift, total = format_number(explanation.shift), format_number(explanation.total)
    all_masked = (np.asarray(explanation.scores) == -np.inf).all()
    return PrintedStep(
        f"3. Normalise: exp(score − shift {shift}), divided by their sum {total}",
        ("key", "exponential", "weight"),
        [[name, format_number(exponential), format_number(weight)] for name, exponential, weight in entries],
        [weight for *_, weight in entries],
        "Every key is masked for this query: its weights are zeros." if all_masked else "",
    )


def _aggregate(explanation: Explanation, keys: Array, names: list[str], rest: Array) -> PrintedStep:
    value, contributions, output = explanation.value, explanation.contributions, explanation.output
    assert value is not None
    assert contributions is not None
    assert output is not None
    rows = [
        [
            name,
            f"{format_number(explanation.weights[j])} · {format_vector(value[j])}",
            f"= {format_vector(contributions[j])}",
        ]
        for name, j in zip(names, keys, strict=True)
    ]
    if len(rest):
        rows.append([_others(rest), "", f"= {format_vector(contributions[rest].sum(0))}"])
    return PrintedStep(
        "4. Aggregate: the sum of weight · value",
        ("key", "weight · value", "contribution"),
        rows,
        [],
        f"output = {format_vector(output)}",
    )


def _others(rest: Array) -> str:
    return f"({len(rest)} other keys)"
