"""One query worked out by hand: every number of a run, written so that a reader can check each line.

`work_out` has the four steps of `ScaledDotProductAttention`. If a variant changes a step, `family.worked_variants`
registers a function for its class.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from numpy.typing import ArrayLike

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.validation import Floats, require
from regard.render.table import format_table
from regard.render.text import escape_unprintable, format_factor, format_number, format_vector
from regard.validation import check_count

WIDTH = 88  # what a page of the site shows without scrolling


@dataclass(frozen=True)
class WorkedStep:
    """One step of a computation by hand: a title and its lines, most of them equations.

    >>> from regard.learn import family
    >>> print(family.show("causal").worked_rows[0].steps[0])
    1. Compare the query [1, 0, 1, 0] with each key
       The  1·0 + 0·1 + 1·0 + 0·1 = 0
       cat  1·1 + 0·0 + 1·1 + 0·0 = 2
       sat  1·1 + 0·1 + 1·0 + 0·0 = 1
       on   1·0 + 0·0 + 1·1 + 0·1 = 1
       mat  1·1 + 0·0 + 1·0.5 + 0·0.5 = 1.5
    """

    title: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *self.lines])


@dataclass(frozen=True, eq=False, repr=False)
class WorkedRow:
    """One query worked out by hand: the `steps` to read, and the `output` (d_v,) and `weights` (…, kv_len) they end in.

    >>> from regard.learn import family
    >>> row = family.show("causal").worked_rows[0]
    >>> len(row.steps), row.weights.round(4)
    (4, array([1., 0., 0., 0., 0.]))
    """

    title: str
    steps: tuple[WorkedStep, ...]
    output: Floats
    weights: Floats

    def __str__(self) -> str:
        return "\n".join([self.title, *map(str, self.steps)])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return f"```text\n{self}\n```\n"


@dataclass(frozen=True, eq=False)
class RowInputs:
    """The inputs of one head, a token for each key, and the `row` of Q to work out."""

    Q: Floats
    K: Floats
    V: Floats
    tokens: Sequence[str]
    row: int

    @property
    def position(self) -> int:
        """The position of the query among the keys; the last query is aligned with the last key."""
        return self.row + len(self.K) - len(self.Q)


def explain(
    attention: ScaledDotProductAttention,
    Q: Floats,
    K: Floats,
    V: Floats,
    tokens: Sequence[str],
    query_idx: int,
) -> WorkedRow:
    """Work out one row of an attention class by hand, from Q, K and V of one sequence and a name for each key."""
    require(
        {Q.ndim, K.ndim, V.ndim} == {2} and len(tokens) == len(K) == len(V) > 0,
        "explain",
        received=f"Q of shape {Q.shape}, K {K.shape}, V {V.shape} and {len(tokens)} tokens",
        expected="one sequence: Q (q_len, d_k), K (kv_len, d_k), V (kv_len, d_v), a token for each key",
        hint="Select one sequence of the batch, with at least one key. Each token names a key.",
    )
    hint = "It counts the queries from 0."
    query_idx = check_count(query_idx, 0, len(Q) - 1, "explain", "query_idx", "", hint)
    names = [escape_unprintable(str(token)) for token in tokens]
    name = f' "{names[query_idx]}"' if len(Q) == len(K) else ""
    steps, output, weights = work_out(attention, RowInputs(Q, K, V, names, query_idx))
    return WorkedRow(f"Query {query_idx}{name} by hand", tuple(steps), output, weights)


StepsOutputWeights = tuple[list[WorkedStep], Floats, Floats]


@singledispatch
def work_out(attention: ScaledDotProductAttention, inputs: RowInputs) -> StepsOutputWeights:
    """Work out one row by the four steps: the steps, the output (d_v,) and the weights (…, kv_len)."""
    row = inputs.row
    output, weights = attention.forward(inputs.Q, inputs.K, inputs.V)
    raw = attention.compute_scores(inputs.Q, inputs.K)
    steps, query, key = explain_preparation(attention, inputs)
    scaling, scores = explain_scaling(attention, raw, inputs)
    steps += [
        explain_comparison(query, key, raw[row], inputs.tokens),
        scaling,
        explain_normalisation(attention, scores, weights[row]),
        explain_aggregation(weights[row], inputs.V, output[row]),
    ]
    return steps, output[row], weights[row]


@singledispatch
def explain_preparation(
    attention: ScaledDotProductAttention, inputs: RowInputs
) -> tuple[list[WorkedStep], Floats, Floats]:
    """Explain the steps before the comparison, none by default: the steps, the query (d_k,), the keys (kv_len, d_k)."""
    return [], inputs.Q[inputs.row], inputs.K


def explain_comparison(query: Floats, key: Floats, scores: Floats, tokens: Sequence[str]) -> WorkedStep:
    """Explain step 1: the dot product of the query with each key."""
    sums = [
        join_terms(f"{format_factor(q)}·{format_factor(k)}" for q, k in zip(query, row, strict=True))
        for row in key
    ]
    lines = [[token, f"{terms} = {as_text(s)}"] for token, terms, s in zip(tokens, sums, scores, strict=True)]
    return WorkedStep(f"1. Compare the query {as_text(query)} with each key", format_lines(lines))


@singledispatch
def explain_scaling(
    attention: ScaledDotProductAttention, raw: Floats, inputs: RowInputs
) -> tuple[WorkedStep, Floats]:
    """Explain step 2: what happens to the row's scores before the softmax, and the scores (kv_len,) after it."""
    scores = ScaledDotProductAttention.scale_scores(attention, raw)[inputs.row]
    lines = format_equation(f"{as_text(raw[inputs.row])} / √{attention.d_k}", scores)
    return WorkedStep(f"2. Scale by √{attention.d_k}", tuple(lines)), scores


def explain_normalisation(
    attention: ScaledDotProductAttention, scores: Floats, weights: Floats
) -> WorkedStep:
    """Explain step 3: the softmax of the scores, and of the sink if there is one, minus the largest of them."""
    title, sink = "3. Normalise: exponentials, divided by their sum", getattr(attention, "sink", None)
    shift = max(scores.max(initial=-np.inf), -np.inf if sink is None else sink)
    if shift == -np.inf:
        return WorkedStep(title, ("   Every key is masked for this query: its weights are zeros.",))
    exponentials = np.exp(scores - shift)
    lines = format_equation(f"exp({as_text(scores)} − {as_text(shift)})", exponentials)
    terms, total = [as_text(x) for x in exponentials if x > 0], exponentials.sum()
    if sink is not None:
        title += " with the sink included"
        share = np.exp(sink - shift)
        lines += format_equation(f"exp({as_text(sink)} − {as_text(shift)})", share, "sink  ")
        terms, total = [*terms, as_text(share)], total + share
    lines += format_equation(join_terms(terms), total, "sum  ")
    lines += format_equation(f"{as_text(exponentials)} / {as_text(total)}", weights, "weights  ")
    return WorkedStep(title, tuple(lines))


def explain_aggregation(weights: Floats, value: Floats, output: Floats) -> WorkedStep:
    """Explain step 4: the sum of the values times their weights, without the weights that are 0."""
    terms = [f"{as_text(w)}·{as_text(v)}" for w, v in zip(weights, value, strict=True) if w != 0]
    left = join_terms(terms) if terms else f"0·{as_text(output)}"
    lines = format_equation(left, output, "output  ")
    return WorkedStep("4. Aggregate: the sum of weight · value", tuple(lines))


def format_lines(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Format rows of cells as indented lines, with the columns aligned to the left."""
    return tuple(format_table(rows, align="left", indent="   ").split("\n"))


def join_terms(terms: Iterable[str]) -> str:
    """Join the terms of a sum with plus signs; an empty sum is 0."""
    return " + ".join(terms) or "0"


def as_text(x: ArrayLike) -> str:
    """Format a number or a vector."""
    return format_vector(np.asarray(x)) if np.ndim(x) else format_number(float(x))  # type: ignore[arg-type]


def format_equation(left: str, right: ArrayLike, name: str = "") -> list[str]:
    """Format `name  left = right` as indented lines; a long equation is broken before a plus or an equals sign."""
    text = f"{name}{left} = {as_text(right)}"
    # Protect every space but those before + and =, so that vectors stay on one line.
    glued = text.replace(" + ", "\x00+ ").replace(" = ", "\x00= ").replace(" ", "\x01").replace("\x00", " ")
    lines = textwrap.wrap(
        glued, WIDTH, initial_indent="   ", subsequent_indent="     ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\x01", " ") for line in lines]
