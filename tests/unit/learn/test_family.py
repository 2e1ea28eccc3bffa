"""The family on one example: every mechanism against the library, by hand, in any order of work, and as it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import learn
from regard.errors import ArgumentError, ArgumentTypeError
from regard.learn import ScaledDotProductAttention, cat, family
from regard.positions import rope
from regard.render.text import format_factor, format_number, format_vector
from regard.score_mods import alibi_slopes, relative_bias, relative_buckets, softcap

CAT = json.loads((Path(__file__).parents[2] / "data/worked_examples.json").read_text("utf-8"))["cat"]
every_mechanism = pytest.mark.parametrize("mechanism", family.MECHANISMS, ids=lambda m: m.name)
NAMED = {mechanism.name: mechanism for mechanism in family.MECHANISMS}


# A loaded machine is no fault of the code: no deadline.
drawn = settings(deadline=None, max_examples=60)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def close(actual: Any, expected: Any) -> None:
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_these_are_the_fifteen():
    assert list(NAMED) == [
        "scaled_dot_product", "multi_head", "causal", "cross", "multi_query", "grouped_query", "relative_bias",
        "rotary", "alibi", "linear", "sliding_window", "block_sparse", "flash", "kv_cache", "sink_softcap",
    ]  # fmt: skip


# -- Against the library -----------------------------------------------------------------------------------

Arrays = tuple[Any, Any, Any]


def product(A: Any, V: Any) -> tuple[Any, Any]:
    return A @ V, A.to_dense()


def by_heads(Q: Any, K: Any, V: Any, heads: int, kv_heads: int) -> tuple[Any, Any]:
    def split(x: Any, parts: int) -> Any:
        return np.stack(np.split(x, parts, axis=-1))

    A = regard.attention(split(Q, heads), split(K, kv_heads), enable_gqa=True)
    output, weights = product(A, split(V, kv_heads))
    return np.concatenate(list(output), axis=-1), weights


def one_head(Q: Any, K: Any, V: Any, **options: Any) -> tuple[Any, Any]:
    output, weights = product(regard.attention(Q[None], K[None], **options), V[None])
    return output[0], weights[0]


def turned(Q: Any, K: Any, V: Any) -> tuple[Any, Any]:
    first = len(K) - len(Q)
    options: dict[str, Any] = {"layout": "half", "base": 100.0}
    Q, K = rope(Q, np.arange(first, len(K)), **options), rope(K, **options)
    return product(regard.attention(Q, K), V)


def blocks(Q: Any, K: Any, V: Any) -> tuple[Any, Any]:
    place = np.arange(len(K))
    ids, everywhere = place // 2, place == 4
    first = len(K) - len(Q)
    mask = regard.document(ids, ids[first:])
    mask = mask | regard.dense(everywhere[None, :] | everywhere[first:, None])
    return product(regard.attention(Q, K, mask=mask), V)


LOWER: dict[str, Any] = {"align": "lower_right"}
TABLE = NAMED["relative_bias"].options["table"]
LIBRARY: dict[str, Callable[..., tuple[Any, Any]]] = {
    "scaled_dot_product": one_head,
    "multi_head": lambda *qkv: by_heads(*qkv, 2, 2),
    "causal": lambda *qkv: one_head(*qkv, mask=regard.causal(**LOWER)),
    "cross": one_head,
    "multi_query": lambda *qkv: by_heads(*qkv, 2, 1),
    "grouped_query": lambda *qkv: by_heads(*qkv, 4, 2),
    "relative_bias": lambda *qkv: one_head(
        *qkv,
        score_mod=relative_bias(np.array(TABLE)[:, None], bidirectional=True, max_distance=6, **LOWER),
    ),
    "rotary": turned,
    "alibi": lambda *qkv: one_head(*qkv, score_mod=regard.alibi([0.5], **LOWER)),
    "linear": lambda Q, K, V: product(regard.linear_attention(Q, K), V),
    "sliding_window": lambda *qkv: one_head(*qkv, mask=regard.sliding_window(3, **LOWER)),
    "block_sparse": blocks,
    "flash": one_head,
    "kv_cache": lambda *qkv: one_head(*qkv, mask=regard.causal(**LOWER)),
    "sink_softcap": lambda *qkv: one_head(*qkv, score_mod=softcap(2.0), sink=0.0),
}


@every_mechanism
def test_a_mechanism_is_the_librarys_on_the_example(mechanism):
    (output, weights), given = mechanism.run(), mechanism.example
    expected = LIBRARY[mechanism.name](given.Q, given.K, given.V)
    close(output, expected[0])
    close(weights, expected[1])


@every_mechanism
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 7), (1, 11)])
def test_a_mechanism_is_the_librarys_on_other_numbers(mechanism, q_len, kv_len):
    # The last query stands at the last key, as regard has it with align="lower_right".
    columns = mechanism.example.K.shape[-1]
    Q, K, V = draw(q_len, 4), draw(kv_len, columns, seed=1), draw(kv_len, columns, seed=2)
    output, weights = mechanism.build()(Q, K, V)
    expected = LIBRARY[mechanism.name](Q, K, V)
    close(output, expected[0])
    close(weights, expected[1])


@every_mechanism
def test_a_mechanism_takes_a_batch_and_a_mask(mechanism):
    columns = mechanism.example.K.shape[-1]
    Q, K, V = draw(2, 3, 5, 4), draw(2, 3, 5, columns, seed=1), draw(2, 3, 5, columns, seed=2)
    mask = np.random.default_rng(3).random((5, 5)) < 0.6
    output, weights = mechanism.build()(Q, K, V, mask=mask)
    assert not weights[..., ~mask].any()
    for b, h in np.ndindex(2, 3):
        alone = mechanism.build()(Q[b, h], K[b, h], V[b, h], mask)
        close(output[b, h], alone[0])
        close(weights[b, h], alone[1])


MASKING = ["causal", "sliding_window", "block_sparse", "kv_cache"]


@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_is_hidden_cannot_matter(name, poison):
    clean = NAMED[name].build()(cat.Q, cat.K, cat.V)
    V, K = cat.V.copy(), cat.K.copy()
    V[3], K[3] = poison, poison
    output, weights = NAMED[name].build()(cat.Q, K, V)
    blind = clean[1][:, 3] == 0
    assert blind.any()
    close(output[blind], clean[0][blind])
    close(weights[blind], clean[1][blind])


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("scaled_dot_product", "{}"),
        ("flash", "{}"),
        ("causal", "causal_{}"),
        ("kv_cache", "causal_{}"),
    ],
)
def test_the_published_numbers(name, fact):
    output, weights = NAMED[name].run()
    assert np.abs(weights - CAT[fact.format("weights")]).max() <= 0.5e-4
    assert np.abs(output - CAT[fact.format("output")]).max() <= 0.5e-4


def test_multi_head_is_as_the_book_splits_it():
    assert NAMED["multi_head"].options == {"num_heads": CAT["heads"], "d_k": CAT["d_k_per_head"]}
    heads = learn.MultiHeadAttention(embed_dim=4, num_heads=2)
    heads.W_Q = heads.W_K = heads.W_V = heads.W_O = np.eye(4)
    split = [family.MultiHead(d_k=2, num_heads=2).split("x", x, 2) for x in (cat.Q, cat.K, cat.V)]
    close(split[1], heads.split_heads(cat.K))
    output, weights = NAMED["multi_head"].run()
    for h, columns in enumerate((slice(0, 2), slice(2, 4))):
        alone = ScaledDotProductAttention(d_k=2)(cat.Q[:, columns], cat.K[:, columns], cat.V[:, columns])
        close(output[:, columns], alone[0])
        close(weights[h], alone[1])


# -- Any order of work -------------------------------------------------------------------------------------


@drawn
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 12), st.integers(0, 99), st.booleans())
def test_any_tile_gives_the_plain_numbers(q_len, kv_len, tile, seed, masked):
    Q, K, V = 4 * draw(q_len, 3, seed=seed), draw(kv_len, 3, seed=seed + 1), draw(kv_len, 2, seed=seed + 2)
    mask = np.random.default_rng(seed).random((q_len, kv_len)) < 0.4 if masked else None
    plain = ScaledDotProductAttention(d_k=3)(Q, K, V, mask)
    tiled = family.Flash(d_k=3, tile_size=tile)(Q, K, V, mask)
    close(tiled[0], plain[0])
    close(tiled[1], plain[1])


@pytest.mark.parametrize("tile", [1, 2, 5])
def test_tiles_of_large_scores_neither_overflow_nor_leak(tile):
    K = 1e3 * cat.K
    V = np.where(np.arange(5)[:, None] == 1, np.nan, cat.V)
    mask = np.arange(5) != 1  # the largest score of row 0, and a value that is none
    plain = ScaledDotProductAttention(d_k=4)(cat.Q, K, V, mask)
    tiled = family.Flash(d_k=4, tile_size=tile)(cat.Q, K, V, mask)
    close(tiled[0], plain[0])
    close(tiled[1], plain[1])


@drawn
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 99))
def test_any_chunking_gives_the_causal_numbers(chunks, seed):
    n = sum(chunks)
    Q, K, V = (draw(2, n, 3, seed=seed + i) for i in range(3))
    output, weights = family.Causal(d_k=3)(Q, K, V)
    decode, start = family.Cached(d_k=3), 0
    for size in chunks:
        new = slice(start, start + size)
        mixed, row = decode(Q[:, new], K[:, new], V[:, new])
        start += size
        close(row, weights[:, new, :start])
        close(mixed, output[:, new])
    decode.clear()
    close(decode(Q, K, V)[0], output)


def test_a_call_that_is_refused_leaves_the_cache_as_it_was():
    decode = family.Cached(d_k=4)
    decode(cat.Q[:2], cat.K[:2], cat.V[:2])
    with pytest.raises(ArgumentError):
        decode(cat.Q[2:3], cat.K[2:3], cat.V[2:4])
    close(decode(cat.Q[2:], cat.K[2:], cat.V[2:])[0], NAMED["causal"].run()[0][2:])


def test_linear_attention_needs_no_table():
    attention = family.Linear(d_k=3)
    Q, K, V = draw(2, 7, 3), draw(2, 11, 3, seed=1), draw(2, 11, 5, seed=2)
    close(attention.compute_output_from_state(Q, attention.compute_state(K, V)), attention(Q, K, V)[0])
    # States add up: the keys may come in parts.
    parts = [attention.compute_state(K[:, part], V[:, part]) for part in (slice(4), slice(4, None))]
    whole = (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
    close(attention.compute_output_from_state(Q, whole), attention(Q, K, V)[0])


# -- What the words say ------------------------------------------------------------------------------------


@drawn
@given(st.integers(2, 9).map(lambda n: 4 * n), st.integers(10, 200))
def test_buckets_are_the_librarys(size, max_distance):
    away = np.arange(-300, 301)
    ours = family.RelativeBias(d_k=1, table=np.zeros(size), max_distance=max_distance).compute_buckets(away)
    theirs = relative_buckets(away, buckets=size, max_distance=max_distance, bidirectional=True)
    assert (ours == theirs).all()


def test_two_and_three_steps_share_a_bucket():
    buckets = NAMED["relative_bias"].build().compute_buckets(np.arange(-4, 5))
    assert buckets.tolist() == [3, 2, 2, 1, 0, 5, 6, 6, 7]


def test_rotary_scores_know_the_distance_only():
    rotary = NAMED["rotary"].build()
    Q, K = np.tile(cat.Q[1], (5, 1)), np.tile(cat.K[4], (5, 1))
    scores = rotary.compute_scores(Q, K)
    for offset in range(-4, 5):
        along = np.diagonal(scores, offset)
        close(along, np.full_like(along, along[0]))
    assert len(np.unique(scores.round(9))) > 1
    close(np.linalg.norm(rotary.rotate(cat.K), axis=-1), np.linalg.norm(cat.K, axis=-1))


def test_the_settings_are_told_truly():
    plain = NAMED["scaled_dot_product"].run()[1]
    assert (NAMED["sink_softcap"].run()[1].sum(axis=-1) < 0.99).all()
    assert (np.ptp(NAMED["linear"].run()[1], axis=-1) < np.ptp(plain, axis=-1)).all()
    assert (NAMED["block_sparse"].run()[1][4] > 0).all()
    assert (NAMED["block_sparse"].run()[1][:, 4] > 0).all()
    largest = plain.argmax(axis=-1) // NAMED["flash"].options["tile_size"]
    assert (largest[0], largest[3]) == (0, 1)
    assert alibi_slopes(8).max() == NAMED["alibi"].options["slope"]
    # Where row 0 sees itself alone another row is worked out too.
    for mechanism in family.MECHANISMS:
        alone = np.count_nonzero(np.atleast_3d(mechanism.run()[1])[0]) == 1
        assert mechanism.worked_rows[0] == 0
        assert len(mechanism.worked_rows) == 2 or not alone


def test_pooled_heads_are_means_of_groups():
    Q, K, V = draw(5, 6), draw(5, 6, seed=1), draw(5, 6, seed=2)
    close(family.mean_pool_heads(K, 3, 3), K)
    close(family.mean_pool_heads(K, 3, 1), (K[:, :2] + K[:, 2:4] + K[:, 4:]) / 3)
    same = np.tile(K[:, :2], 3)
    many = family.MultiHead(d_k=2, num_heads=3)(Q, same, np.tile(V[:, :2], 3))
    one = family.MultiQuery(d_k=2, num_heads=3)(Q, family.mean_pool_heads(same, 3, 1), V[:, :2])
    close(one[0], many[0])
    close(one[1], many[1])


@every_mechanism
def test_the_words_are_there_and_the_sources_dated(mechanism):
    for words in (mechanism.problem, mechanism.setting):
        assert words.endswith(".")
        assert len(words) > 40
    assert mechanism.formula
    assert mechanism.latex.count("{") == mechanism.latex.count("}")
    assert mechanism.uses
    for use in mechanism.uses:
        assert re.search(r"\b20(1[7-9]|2\d)\b", use.source)
        assert "arXiv" not in use.source or re.search(r"arXiv \d{4}\.\d{5}$", use.source)


# -- By hand -----------------------------------------------------------------------------------------------


@dataclass
class Span:
    """Where a printed number may lie, given that it was rounded: arithmetic on it keeps what is certain."""

    low: Any
    high: Any

    @classmethod
    def of(cls, *ends: Any) -> Span:
        return cls(np.minimum.reduce(ends), np.maximum.reduce(ends))

    def __neg__(self) -> Span:
        return Span(-self.high, -self.low)

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Span) -> Span:
        return self + -other

    def __mul__(self, other: Span) -> Span:
        return Span.of(*(a * b for a in (self.low, self.high) for b in (other.low, other.high)))

    def __truediv__(self, other: Span) -> Span:
        return self * Span(1 / other.high, 1 / other.low)

    def meets(self, other: Span) -> bool:
        assert np.shape(self.low) == np.shape(other.low)
        return bool(np.all((self.low <= other.high) & (other.low <= self.high)))


def printed(text: str) -> Span:
    if text == "inf":
        return Span(np.inf, np.inf)
    half = 0.5e-3 * 10.0 ** int(text.partition("e")[2]) if "e" in text else 0.5e-4
    return Span(float(text) - half, float(text) + half)


def rising(function: Callable[[Any], Any]) -> Callable[[Span], Span]:
    return lambda x: Span(function(x.low), function(x.high))


def wave(function: Callable[[Any], Any]) -> Callable[[Span], Span]:
    """Sine and cosine change by no more than their argument does."""
    return lambda x: Span(*(function((x.low + x.high) / 2) + s * (x.high - x.low) / 2 for s in (-1, 1)))


MEANING: dict[str, Any] = {
    "number": printed,
    "vec": lambda *parts: Span(np.array([p.low for p in parts]), np.array([p.high for p in parts])),
    "sqrt": rising(np.sqrt),
    "exp": rising(np.exp),
    "log": rising(np.log),
    "tanh": rising(np.tanh),
    "cos": wave(np.cos),
    "sin": wave(np.sin),
    "φ": rising(lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))),
}


def meaning(text: str) -> Span:
    text = re.sub(r"√(\d+)", r"sqrt(\1)", text.replace("·", "*").replace("−", "-"))
    text = re.sub(r"inf|(?<![\w.])\d+(\.\d+)?(e[+-]\d+)?", r'number("\g<0>")', text)
    found = eval(text.replace("[", "vec(").replace("]", ")"), {"__builtins__": {}}, MEANING)
    assert isinstance(found, Span)
    return found


def equations(text: str) -> Iterator[tuple[str, str, str]]:
    """Every `name  left = right` of the text; what merely names a result has no sign of work on its left."""
    for line in re.sub(r"\n {5}(?=[+=] )", " ", text).split("\n"):
        left, sign, right = line.strip().rpartition(" = ")
        name, _, left = left.rpartition("  ")
        if sign and left != "scores":
            yield name.strip(), left, right


def holds(left: str, right: str) -> bool:
    return meaning(left).meets(meaning(right))


@every_mechanism
def test_every_line_by_hand_can_be_worked_out_again(mechanism):
    for row in range(len(mechanism.query_tokens)):
        text = str(mechanism.explain(row))
        found = list(equations(text))
        assert len(found) >= 5
        for name, left, right in found:
            assert holds(left, right), f"{name}: {left} = {right}"


@every_mechanism
def test_by_hand_ends_in_the_numbers_of_the_run(mechanism):
    output, weights = mechanism.run()
    for row in range(len(mechanism.query_tokens)):
        steps = mechanism.explain(row)
        close(steps.weights, weights[..., row, :])
        close(steps.output, output[row])
        found = list(equations(str(steps)))
        shown = [right for name, _, right in found if name == "output"]
        if weights.ndim == 3:  # a head has its own columns, and they are joined at the end
            parts = np.split(output[row], len(weights))
            assert shown == [format_vector(part) for part in parts]
            assert str(steps).endswith(f"→ {format_vector(output[row])}")
        else:
            assert set(shown) == {format_vector(output[row])}
        heads = weights[:, row] if weights.ndim == 3 else [weights[row]]
        held = row + 1 if mechanism.name == "kv_cache" else None  # a cache has no key that is yet to come
        assert [r for n, _, r in found if n == "weights"] == [format_vector(head[:held]) for head in heads]


@every_mechanism
def test_by_hand_begins_with_the_inputs_and_goes_on_with_what_it_found(mechanism):
    text = str(mechanism.explain(0))
    if mechanism.name not in ("rotary", "linear"):  # these turn and map before they compare
        split = getattr(mechanism.build(), "split_inputs", lambda *qkv: [x[None] for x in qkv])
        Q, K, _ = split(mechanism.example.Q, mechanism.example.K, mechanism.example.V)
        for q, k in zip(Q[:, 0], K, strict=True):
            terms = " + ".join(f"{format_number(a)}·{format_factor(b)}" for a, b in zip(q, k[0], strict=True))
            assert f"{terms} = {format_number(q @ k[0])}" in text
    found: set[str] = set()
    for name, left, right in equations(text):
        if name in ("weights", "output") and " / " in left:
            assert set(re.findall(r"[^][, /]+", left)) <= found, left
        found |= set(re.findall(r"[^][, ]+", right))


@pytest.mark.parametrize(
    "line",
    ["1·2 + 3·4 = 15", "exp([0, 1] − 1) = [0.3679, 1.1]", "[1, 2] / √4 = [0.5, 0.9]", "tanh(0.5) = 0.5"],
)
def test_a_wrong_line_is_seen(line):
    ((_, left, right),) = equations(line)
    assert not holds(left, right)


@pytest.mark.parametrize("name", ["causal", "sliding_window", "alibi", "sink_softcap"])
def test_explain_agrees_with_the_matrix(name):
    options: dict[str, Any] = {
        "causal": {"mask": regard.causal()},
        "sliding_window": {"mask": regard.sliding_window(3)},
        "alibi": {"score_mod": regard.alibi([0.5])},
        "sink_softcap": {"score_mod": softcap(2.0), "sink": 0.0},
    }[name]
    A = regard.attention(cat.Q[None], cat.K[None], **options)
    for row in range(5):
        ours = NAMED[name].build().explain(cat.Q, cat.K, cat.V, cat.tokens, row)
        theirs = A.lazy[0].explain(row, value=cat.V, tokens=cat.tokens)
        close(ours.weights, theirs.weights)
        close(ours.output, theirs.output)


def test_a_query_that_sees_nothing_says_so():
    steps = family.Causal(d_k=1).explain(draw(3, 1), draw(2, 1), draw(2, 1), ["a", "b"], 0)
    assert "visible keys: none" in str(steps)
    assert "Every key is masked for this query: its weights are zeros." in str(steps)
    assert not steps.weights.any()
    assert not steps.output.any()
    assert "visible keys: none" in str(
        family.Cached(d_k=1).explain(draw(3, 1), draw(2, 1), draw(2, 1), "ab", 0)
    )


# -- As it prints ------------------------------------------------------------------------------------------


@every_mechanism
def test_a_page_has_everything(mechanism):
    page = family.show(mechanism.name)
    text, markdown = str(page), page._repr_markdown_()
    assert repr(page) == text
    assert text.startswith(f"{family.MECHANISMS.index(mechanism) + 1}. {mechanism.title}\n")
    words = " ".join(text.split())
    for part in (mechanism.problem, mechanism.setting, mechanism.call, *map(str, mechanism.uses)):
        assert " ".join(part.split()) in words
    for line in mechanism.formula.split("\n"):
        assert f"    {line}" in text
    for steps in page.worked_rows:
        assert str(steps) in text
        assert str(steps) in markdown
    assert f"$$\n{mechanism.latex}\n$$" in markdown
    assert f"```python\n{mechanism.code}\n```" in markdown
    numbers = [f"{x:.4f}" for x in np.ravel(page.weights)]
    for listing in (text, markdown):
        assert all(x in listing for x in numbers)
        # No heading: where it stands in a chapter is the chapter's to say.
        assert not re.search(r"^#+ ", re.sub(r"```.*?```", "", listing, flags=re.DOTALL), re.MULTILINE)
    assert max(map(len, text.split("\n"))) <= 125


def test_a_row_can_be_asked_for():
    (steps,) = family.show("causal", row=2).worked_rows
    assert steps.title == 'Query 2 "sat" by hand'
    assert steps._repr_markdown_() == f"```text\n{steps}\n```\n"
    assert repr(steps) == str(steps)


def test_the_table_has_all_fifteen():
    table = family.table()
    lines = str(table).split("\n")
    assert repr(table) == str(table)
    assert len(lines) == 16
    for line, mechanism in zip(lines[1:], family.MECHANISMS, strict=True):
        output, weights = mechanism.run()
        assert mechanism.title in line
        assert line.endswith(format_vector(output[0]))
        assert "×".join(map(str, weights.shape)) in line
    rows = table._repr_markdown_().strip().split("\n")
    assert len(rows) == 17
    assert {row.count("|") for row in rows} == {6}


@every_mechanism
def test_the_code_that_is_shown_gives_the_numbers(mechanism):
    assert len(mechanism.code.split("\n")) <= 75
    for unwanted in ("ArrayLike", "Floats", "raise", ">>>"):
        assert unwanted not in mechanism.code or mechanism.name == "scaled_dot_product"
    names = dict(vars(__import__(mechanism.attention_class.__module__, fromlist=["_"])))
    exec(mechanism.code, names)
    shown_class = names[mechanism.attention_class.__name__]
    assert shown_class is not mechanism.attention_class
    output, weights = mechanism.run_example(shown_class(**mechanism.options), mechanism.example)
    close(output, mechanism.run()[0])
    close(weights, mechanism.run()[1])


@every_mechanism
def test_the_formula_can_be_set(mechanism):
    # The site makes MathML of it with docutils, which knows fewer commands than TeX does.
    latex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml")
    assert "<math" in latex2mathml.tex2mathml(mechanism.latex, as_block=True)


@every_mechanism
def test_a_class_has_the_shape_of_the_first(mechanism):
    assert issubclass(mechanism.attention_class, ScaledDotProductAttention)
    for step in ("compute_scores", "scale_scores", "compute_weights", "compute_output", "forward", "explain"):
        assert callable(getattr(mechanism.attention_class, step))
    attention, given = mechanism.build(), mechanism.example
    steps = attention.explain(given.Q, given.K, given.V, given.tokens, 0)
    close(steps.output, mechanism.run()[0][0])


def test_all_is_sorted_and_true():
    assert family.__all__ == sorted(family.__all__)
    assert all(hasattr(family, name) for name in family.__all__)


# -- Refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: family.show("rotational"), "name='rotational'"),
        (lambda: family.show("cross", row=2), "row from 0 to 1"),
        (lambda: family.MultiHead(d_k=2, num_heads=3)(cat.Q, cat.K, cat.V), "divide into 3 equal parts"),
        (lambda: family.MultiHead(d_k=1, num_heads=2)(cat.Q, cat.K, cat.V), "since d_k is 1"),
        (
            lambda: family.GroupedQuery(d_k=1, num_heads=4, num_kv_heads=3),
            "Choose num_kv_heads from [1, 2, 4].",
        ),
        (lambda: family.SlidingWindow(d_k=1, size=0), "size as a whole number of at least 1"),
        (lambda: family.BlockSparse(d_k=1, block_size=2, global_tokens=[-1]), "global_tokens"),
        (lambda: family.Rotary(d_k=3), "an even d_k"),
        (lambda: family.RelativeBias(d_k=1, table=np.zeros(6), max_distance=9), "4, 8, 12, … buckets"),
        (lambda: family.RelativeBias(d_k=1, table=np.zeros(8), max_distance=2), "above a fourth of them"),
        (lambda: family.ALiBi(d_k=1, slope=-1.0), "slope as a number of at least 0"),
        (lambda: family.Softcap(d_k=1, cap=0.0), "cap as a number above 0"),
        (lambda: family.Flash(d_k=1, tile_size=0), "tile_size as a whole number of at least 1"),
        (lambda: family.Causal(d_k=4)(cat.Q, cat.K, cat.V, mask=np.ones((5, 4), bool)), "broadcasts"),
        (lambda: family.Causal(d_k=4).explain(cat.Q, cat.K, cat.V, "ab", 0), "a token for each key"),
        (lambda: family.Causal(d_k=4).explain(cat.Q, cat.K, cat.V, cat.tokens, 5), "query_idx from 0 to 4"),
    ],
)
def test_a_refusal_says_what_to_do(call, says):
    with pytest.raises(ArgumentError, match=re.escape(says)):
        call()


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(ArgumentTypeError, match="a boolean mask, True = attend"):
        family.Causal(d_k=4)(cat.Q, cat.K, cat.V, mask=np.ones((5, 5)))


def test_the_chapter_has_a_section_for_each():
    chapter = (Path(__file__).parents[3] / "docs/book/11-family.md").read_text("utf-8")
    headings = re.findall(r"^## \d+\. (.+)$", chapter, re.MULTILINE)
    assert headings == [mechanism.title for mechanism in family.MECHANISMS]
    assert re.findall(r'^family\.show\("(\w+)"\)$', chapter, re.MULTILINE) == list(NAMED)
