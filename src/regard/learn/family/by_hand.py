"""One query by hand: the numbers of a run, written so that every line can be worked out again.

Each member has the four steps of the first chapter, and says only where it departs from them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.family.heads import MultiHead
from regard.learn.family.masking import Causal, Masked
from regard.learn.family.scores import ALiBi, Biased, RelativeBias, Rotary, Sink, Softcap
from regard.learn.family.streaming import Cached, Flash, Linear
from regard.learn.validation import Floats, as_floats
from regard.render.table import format_table
from regard.render.text import escape_unprintable, format_factor, format_number, format_vector
from regard.validation import check_count

WIDTH = 88  # what a page of the site shows without scrolling


@dataclass(frozen=True)
class Step:
    """One step: what is done, and the lines in which it is done, most of them equations.

    >>> from regard.learn import family
    >>> print(family.show("causal").by_hand[0].steps[0])
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
class ByHand:
    """One query by hand: the `steps` to read, the `weights` (…, kv_len) and the `output` (d_v,) they come to.

    >>> from regard.learn import family
    >>> row = family.show("causal").by_hand[0]
    >>> len(row.steps), row.weights.round(4)
    (4, array([1., 0., 0., 0., 0.]))
    """

    title: str
    steps: tuple[Step, ...]
    weights: Floats
    output: Floats

    def __str__(self) -> str:
        return "\n".join([self.title, *map(str, self.steps)])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return f"```text\n{self}\n```\n"


@dataclass(frozen=True, eq=False)
class Row:
    """The inputs of one head and the `row` of Q that is worked out."""

    Q: Floats
    K: Floats
    V: Floats
    tokens: Sequence[str]
    row: int

    @property
    def position(self) -> int:
        """Where the query stands among the keys: the last query stands at the last key."""
        return self.row + len(self.K) - len(self.Q)


def explain(
    attention: ScaledDotProductAttention,
    Q: npt.ArrayLike,
    K: npt.ArrayLike,
    V: npt.ArrayLike,
    tokens: Sequence[str],
    query_idx: int,
) -> ByHand:
    """The row `query_idx` of Q by hand, as `attention` computes it; tokens name the keys."""
    Q, K = as_floats("explain", "Q", Q, "q_len", "d_k"), as_floats("explain", "K", K, "kv_len", "d_k")
    V = as_floats("explain", "V", V, "kv_len", "d_v")
    if {Q.ndim, K.ndim, V.ndim} != {2} or not len(tokens) == len(K) == len(V) > 0:
        raise ArgumentError(
            "explain",
            received=f"Q of shape {Q.shape}, K {K.shape}, V {V.shape} and {len(tokens)} tokens",
            expected="one sequence: Q (q_len, d_k), K (kv_len, d_k), V (kv_len, d_v), a token for each key",
            hint="Take one sequence of the batch, with a key at least; tokens name the keys.",
        )
    hint = "It counts the queries from 0."
    query_idx = check_count(query_idx, 0, len(Q) - 1, "explain", "query_idx", "", hint)
    names = [escape_unprintable(str(token)) for token in tokens]
    named = f' "{names[query_idx]}"' if len(Q) == len(K) else ""
    steps, weights, output = work_out(attention, Row(Q, K, V, names, query_idx))
    return ByHand(f"Query {query_idx}{named} by hand", tuple(steps), weights, output)


Worked = tuple[list[Step], Floats, Floats]


# -- The four steps ----------------------------------------------------------------------------------------


@singledispatch
def work_out(attention: ScaledDotProductAttention, of: Row) -> Worked:
    """The steps of one row, its weights and its output."""
    output, weights = attention.forward(of.Q, of.K, of.V)
    query, key = of.Q[of.row], of.K
    raw = attention.compute_scores(of.Q, of.K)
    steps: list[Step] = []
    if isinstance(attention, Rotary):
        turn, query, key = turned(attention, of)
        steps.append(turn)
    steps.append(compare(1, query, key, raw[of.row], of.tokens))
    scale, scores = scaled(attention, raw, of)
    steps.append(scale)
    sink = attention.sink if isinstance(attention, Sink) else None
    steps.append(normalise(scores, weights[of.row], sink))
    steps.append(aggregate(4, weights[of.row], of.V, output[of.row]))
    return steps, weights[of.row], output[of.row]


def _table_lines(rows: list[list[str]]) -> tuple[str, ...]:
    return tuple(format_table(rows, align="left", indent="   ").split("\n"))


def compare(n: int, query: Floats, key: Floats, scores: Floats, tokens: Sequence[str]) -> Step:
    """The dot product of the query with each key."""
    sums = [
        sum_of(f"{format_number(q)}·{format_factor(k)}" for q, k in zip(query, row, strict=True))
        for row in key
    ]
    lines = [
        [token, f"{terms} = {format_number(s)}"] for token, terms, s in zip(tokens, sums, scores, strict=True)
    ]
    return Step(f"{n}. Compare the query {format_vector(query)} with each key", _table_lines(lines))


def scaled(attention: ScaledDotProductAttention, raw: Floats, of: Row) -> tuple[Step, Floats]:
    """The row's scores divided by √d_k, and whatever else a member does to them before the softmax."""
    row, width = raw[of.row], attention.d_k
    title = f"2. Scale by √{width}"
    now = ScaledDotProductAttention.scale_scores(attention, raw)[of.row]
    lines = equation(f"{format_vector(row)} / √{width}", format_vector(now))
    if isinstance(attention, Biased):
        title += ", add the bias"
        before, now, bias = now, attention.scale_scores(raw)[of.row], attention.bias(*raw.shape)[of.row]
        lines += bias_lines(attention, bias, of)
        lines += equation(f"{format_vector(before)} + {format_vector(bias)}", format_vector(now))
    if isinstance(attention, Softcap):
        title += f", hold below {format_number(attention.cap)}"
        before, now = now, attention.scale_scores(raw)[of.row]
        cap = format_number(attention.cap)
        lines += equation(f"{cap}·tanh({format_vector(before)} / {cap})", format_vector(now))
    if isinstance(attention, Masked):
        title += ", hide what may not be seen"
        sees = attention.sees(*raw.shape)[of.row]
        now = np.where(sees, now, -np.inf)
        lines += [f"   sees {', '.join(t for t, s in zip(of.tokens, sees, strict=True) if s) or 'nothing'}"]
        lines += [f"   scores = {format_vector(now)}"]
    return Step(title, tuple(lines)), now


def bias_lines(attention: Biased, bias: Floats, of: Row) -> list[str]:
    """Where the bias of this row comes from."""
    away = np.arange(len(of.K)) - of.position
    if isinstance(attention, ALiBi):
        return equation(f"-{format_number(attention.slope)}·{format_vector(abs(away))}", format_vector(bias))
    if isinstance(attention, RelativeBias):
        buckets = attention.buckets(away)
        return [
            f"   keys ahead by {format_vector(away)} → buckets {format_vector(buckets)} → bias {format_vector(bias)}"
        ]
    return []


def normalise(scores: Floats, weights: Floats, sink: float | None = None) -> Step:
    """The softmax of the scores, with the row's largest subtracted first."""
    title = "3. Normalise: exponentials, divided by their sum"
    everyone = scores if sink is None else np.append(scores, sink)
    shift = everyone.max(initial=-np.inf)
    if shift == -np.inf:
        return Step(title, ("   Every key is masked for this query: its weights are zeros.",))
    parts = np.exp(scores - shift)
    lines = equation(f"exp({format_vector(scores)} − {format_number(shift)})", format_vector(parts))
    terms = [format_number(part) for part in parts if part > 0]
    total = parts.sum()
    if sink is not None:
        title = "3. Normalise: exponentials, divided by their sum, in which the sink has its part"
        own = np.exp(sink - shift)
        lines += equation(
            f"exp({format_number(sink)} − {format_number(shift)})", format_number(own), "sink  "
        )
        terms, total = [*terms, format_number(own)], total + own
    lines += equation(sum_of(terms), format_number(total), "sum  ")
    lines += equation(f"{format_vector(parts)} / {format_number(total)}", format_vector(weights), "weights  ")
    return Step(title, tuple(lines))


def aggregate(n: int, weights: Floats, value: Floats, output: Floats) -> Step:
    """The values, each as often as its weight says; a weight of 0 is left out."""
    terms = [f"{format_number(w)}·{format_vector(v)}" for w, v in zip(weights, value, strict=True) if w != 0]
    return Step(
        f"{n}. Aggregate: the sum of weight · value",
        tuple(
            equation(
                sum_of(terms) if terms else f"0·{format_vector(output)}", format_vector(output), "output  "
            )
        ),
    )


# -- Where a member departs from them ----------------------------------------------------------------------


def turned(attention: Rotary, of: Row) -> tuple[Step, Floats, Floats]:
    """The pairs of the query and of each key turned by their angles."""
    half = attention.d_k // 2
    query = attention.turn(of.Q, of.position - of.row)[of.row]
    key = attention.turn(of.K)
    lines: list[str] = []
    named = [("query", of.position, of.Q[of.row], query)]
    named += [(t, j, of.K[j], key[j]) for j, t in enumerate(of.tokens)]
    for name, position, x, y in named:
        angles = format_vector(attention.angles(np.array([position]))[0])
        a, b = format_vector(x[:half]), format_vector(x[half:])
        lines += [f"   {name}, position {position}: angles {angles}"]
        lines += equation(f"{a}·cos({angles}) − {b}·sin({angles})", format_vector(y[:half]), "  ")
        lines += equation(f"{a}·sin({angles}) + {b}·cos({angles})", format_vector(y[half:]), "  ")
    pairs = " and ".join(f"({i}, {i + half})" for i in range(half))
    return Step(f"0. Turn the pairs {pairs} by position · frequency", tuple(lines)), query, key


@work_out.register
def _heads(attention: MultiHead, of: Row) -> Worked:
    Q, K, V = attention.heads(of.Q, of.K, of.V)
    output, weights = attention.forward(of.Q, of.K, of.V)
    steps, each = [], []
    for h in range(attention.num_heads):
        plain = ScaledDotProductAttention(attention.d_k)
        four, _, mixed = work_out(plain, Row(Q[h], K[h], V[h], of.tokens, of.row))
        steps += [Step(f"Head {h}", ()), *four]
        each.append(format_vector(mixed))
    join = Step("5. Join the heads", (f"   {', '.join(each)} → {format_vector(output[of.row])}",))
    return [*steps, join], weights[:, of.row], output[of.row]


@work_out.register
def _linear(attention: Linear, of: Row) -> Worked:
    output, weights = attention.forward(of.Q, of.K, of.V)
    scores = attention.compute_scores(of.Q, of.K)[of.row]
    query, key = attention.feature_map(of.Q[of.row]), attention.feature_map(of.K)
    mapped = [["query", f"φ({format_vector(of.Q[of.row])}) = {format_vector(query)}"]]
    mapped += [
        [t, f"φ({format_vector(x)}) = {format_vector(y)}"]
        for t, x, y in zip(of.tokens, of.K, key, strict=True)
    ]
    parts = equation(sum_of(map(format_number, scores)), format_number(scores.sum()), "sum  ")
    parts += equation(
        f"{format_vector(scores)} / {format_number(scores.sum())}",
        format_vector(weights[of.row]),
        "weights  ",
    )
    steps = [
        Step("0. Map: φ(x) is x + 1 above 0, exp(x) below", _table_lines(mapped)),
        compare(1, query, key, scores, of.tokens),
        Step("2. No scaling: there is no exponential to come", ()),
        Step("3. Normalise: divide by the sum", tuple(parts)),
        aggregate(4, weights[of.row], of.V, output[of.row]),
    ]

    # The same output in the other order: sums over the keys first, which every query can share.
    mixed, total = attention.state(of.K, of.V)
    lines = []
    for c, column in enumerate(mixed):
        terms = [f"{format_number(k[c])}·{format_vector(v)}" for k, v in zip(key, of.V, strict=True)]
        lines += equation(sum_of(terms), format_vector(column), f"S[{c}]  ")
    lines += equation(sum_of(map(format_vector, key)), format_vector(total), "z  ")
    above, below = query @ mixed, float(query @ total)
    terms = [f"{format_number(q)}·{format_vector(column)}" for q, column in zip(query, mixed, strict=True)]
    lines += equation(sum_of(terms), format_vector(above), "φ(query)·S  ")
    terms = [f"{format_number(q)}·{format_number(z)}" for q, z in zip(query, total, strict=True)]
    lines += equation(sum_of(terms), format_number(below), "φ(query)·z  ")
    read = attention.read(of.Q, (mixed, total))[of.row]
    lines += equation(f"{format_vector(above)} / {format_number(below)}", format_vector(read), "output  ")
    steps.append(Step("Or the sums over the keys first, once for all queries", tuple(lines)))
    return steps, weights[of.row], output[of.row]


@work_out.register
def _flash(attention: Flash, of: Row) -> Worked:
    output, weights = attention.forward(of.Q, of.K, of.V)
    raw = attention.compute_scores(of.Q, of.K)
    scale, _ = scaled(attention, raw, of)
    steps = [compare(1, of.Q[of.row], of.K, raw[of.row], of.tokens), scale]
    before = None
    for tile in attention.tiles(of.Q, of.K, of.V):
        scores, parts = tile.scores[of.row], tile.exponentials[of.row]
        shift, kept = tile.shift[of.row, 0], tile.kept[of.row, 0]
        total, mixed = tile.total[of.row, 0], tile.mixed[of.row]
        value = of.V[tile.start : tile.stop]
        lines = [f"   largest score so far: {format_number(shift)}"]
        lines += equation(f"exp({format_vector(scores)} − {format_number(shift)})", format_vector(parts))
        sums = [format_number(part) for part in parts]
        mixes = [f"{format_number(part)}·{format_vector(v)}" for part, v in zip(parts, value, strict=True)]
        if before is not None:
            was = format_number(before.shift[of.row, 0])
            lines += equation(f"exp({was} − {format_number(shift)})", format_number(kept), "kept  ")
            sums = [f"{format_number(before.total[of.row, 0])}·{format_number(kept)}", *sums]
            mixes = [f"{format_vector(before.mixed[of.row])}·{format_number(kept)}", *mixes]
        lines += equation(sum_of(sums), format_number(total), "sum  ")
        lines += equation(sum_of(mixes), format_vector(mixed), "mixed  ")
        names = ", ".join(of.tokens[tile.start : tile.stop])
        steps.append(Step(f"3. Tile of {names}", tuple(lines)))
        before = tile
    assert before is not None
    largest, whole = float(before.shift[of.row, 0]), float(before.total[of.row, 0])
    lse = largest + math.log(whole)
    end = equation(
        f"{format_vector(before.mixed[of.row])} / {format_number(whole)}",
        format_vector(output[of.row]),
        "output  ",
    )
    steps.append(Step("4. Divide once, at the end", tuple(end)))
    lines = equation(f"{format_number(largest)} + log({format_number(whole)})", format_number(lse), "lse  ")
    scores = attention.scale_scores(raw)[of.row]
    lines += equation(
        f"exp({format_vector(scores)} − {format_number(lse)})", format_vector(weights[of.row]), "weights  "
    )
    steps.append(Step("Any weight that is wanted comes back from the lse", tuple(lines)))
    return steps, weights[of.row], output[of.row]


@work_out.register
def _cached(attention: Cached, of: Row) -> Worked:
    held = of.position + 1  # the keys that are there when this query comes
    if held < 1:
        return work_out(Causal(attention.d_k), of)
    kept = Row(of.Q[: of.row + 1], of.K[:held], of.V[:held], of.tokens[:held], of.row)
    steps, weights, output = work_out(ScaledDotProductAttention(attention.d_k), kept)
    names = f"kept from before: {', '.join(of.tokens[: held - 1]) or 'nothing'}"
    append = Step(f"0. Append key and value of {of.tokens[held - 1]}", (f"   {names}",))
    return [append, *steps], np.append(weights, np.zeros(len(of.K) - held)), output


# -- Lines -------------------------------------------------------------------------------------------------


def sum_of(terms: Iterable[str]) -> str:
    """The terms with a plus between them."""
    return " + ".join(terms) or "0"


def equation(left: str, right: str, name: str = "") -> list[str]:
    """`name  left = right`, with an indent, over several lines where it is long."""
    text = f"{name}{left} = {right}"
    # Only at a sign that stands by itself may a line end: vectors stay whole.
    glued = text.replace(" + ", "\x00+ ").replace(" = ", "\x00= ").replace(" ", "\x01").replace("\x00", " ")
    lines = textwrap.wrap(
        glued, WIDTH, initial_indent="   ", subsequent_indent="     ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\x01", " ") for line in lines]
