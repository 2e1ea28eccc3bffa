"""The explanation of one query: the four steps as data and as printed text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import regard
from regard import causal, padding, reference, softcap
from regard.learn import cat
from regard.masks import first

N = len(cat.tokens)
close = np.testing.assert_allclose
equal = np.testing.assert_array_equal

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal()},
    "softcap": {"score_mod": softcap(0.75)},
    "sink": {"sink": 0.5},
    "scale": {"scale": -2.0},
    "all at once": {"mask": causal() & ~first(1), "score_mod": softcap(0.75), "sink": -0.5, "scale": 1.5},
}


def defined(arguments: dict[str, Any]) -> reference.Definition:
    mask = arguments["mask"].to_dense(N, N) if "mask" in arguments else True
    cap = 0.75 if "score_mod" in arguments else None
    more = {name: arguments[name] for name in ("sink", "scale") if name in arguments}
    return reference.attention(cat.Q, cat.K, cat.V, mask=mask, cap=cap, **more)


@pytest.mark.parametrize("row", range(N))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_fields_are_the_definition(name: str, row: int) -> None:
    arguments, exact = ARGUMENTS[name], defined(ARGUMENTS[name])
    A = regard.attention(cat.Q, cat.K, **arguments)
    steps = A.explain(row, value=cat.V, tokens=cat.tokens)
    scores = exact.scores[row]
    assert list(steps.key_tokens) == list(cat.tokens) and steps.scale == arguments.get("scale", 0.5)
    # 1. Compare.
    equal(steps.query, cat.Q[row])
    equal(steps.key, cat.K)
    equal(steps.products, [[q * k for q, k in zip(cat.Q[row], key, strict=True)] for key in cat.K])
    close(steps.raw_scores, steps.products.sum(-1))
    # 2. Scale, modify, mask.
    close(steps.scaled_scores, steps.raw_scores * steps.scale)
    close(steps.scores, scores)
    assert steps.score_mods == (("softcap(0.75)",) if "score_mod" in arguments else ())
    assert steps.masks == ((repr(arguments["mask"]),) if "mask" in arguments else ())
    # 3. Normalise.
    shift = max([*scores, arguments.get("sink", -np.inf)])
    if shift == -np.inf:
        shift = 0.0
    assert steps.shift == pytest.approx(shift)
    close(steps.exponentials, np.exp(scores - shift))
    sink = np.exp(arguments["sink"] - shift) if "sink" in arguments else None
    assert steps.sink_exponential == (None if sink is None else pytest.approx(sink))
    assert steps.total == pytest.approx(steps.exponentials.sum() + (sink or 0.0))
    close(steps.weights, exact.weights[row])
    # 4. Aggregate.
    equal(steps.value, cat.V)
    close(steps.contributions, exact.weights[row][:, None] * cat.V)
    close(steps.output, exact.output[row])
    close(steps.output, (A @ cat.V)[row])
    assert f"query {row}" in steps.title and cat.tokens[row] in steps.title


def test_without_a_value_there_are_three_steps() -> None:
    steps = regard.attention(cat.Q, cat.K).explain(1)
    assert steps.value is None and steps.contributions is None and steps.output is None
    assert "3. Normalise" in str(steps) and "4. Aggregate" not in str(steps)
    assert list(steps.key_tokens) == [f"key {j}" for j in range(N)]
    assert repr(steps) == "<How query 1 attends: 5 keys, print() shows the four steps>"


def test_the_printed_steps_of_the_cat_example() -> None:
    A = regard.attention(cat.Q, cat.K, mask=causal())
    assert str(A.explain(2, value=cat.V, tokens=cat.tokens)).splitlines() == [
        'How query 2 "sat" attends: 5 keys, head_dim 4',
        "",
        "1. Compare: query [1, 1, 1, 0] · key",
        "   The  1·0 + 1·1 + 1·0 + 0·1 = 1",
        "   cat  1·1 + 1·0 + 1·1 + 0·0 = 2",
        "   sat  1·1 + 1·1 + 1·0 + 0·0 = 2",
        "   on   1·0 + 1·0 + 1·1 + 0·1 = 1",
        "   mat  1·1 + 1·0 + 1·0.5 + 0·0.5 = 1.5",
        "2. Scale: × 0.5, then causal()",
        "   The  1 × 0.5 = 0.5",
        "   cat  2 × 0.5 = 1",
        "   sat  2 × 0.5 = 1",
        "   on   1 × 0.5 = 0.5  masked",
        "   mat  1.5 × 0.5 = 0.75  masked",
        "3. Normalise: exp(score − shift 1), divided by their sum 2.6065",
        "   The  0.6065  0.2327  █████████",
        "   cat  1       0.3837  ███████████████",
        "   sat  1       0.3837  ███████████████",
        "   on   0       0",
        "   mat  0       0",
        "4. Aggregate: the sum of weight · value",
        "   The  0.2327 · [1, 0, 0, 0]     = [0.2327, 0, 0, 0]",
        "   cat  0.3837 · [0, 1, 0, 0]     = [0, 0.3837, 0, 0]",
        "   sat  0.3837 · [0, 0, 1, 0]     = [0, 0, 0.3837, 0]",
        "   on   0 · [0, 0, 0, 1]          = [0, 0, 0, 0]",
        "   mat  0 · [0.5, 0.5, 0.5, 0.5]  = [0, 0, 0, 0]",
        "   output = [0.2327, 0.3837, 0.3837, 0]",
    ]


# The printed text, parsed

NUMBER = r"-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]\d+)?)"


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(NUMBER, text)]


def as_printed(found: Any, expected: Any) -> None:
    """Round to four decimals, or to four significant digits for very small and very large numbers."""
    close(found, expected, rtol=5.1e-4, atol=0.5001e-4)


def sections(steps: regard.Explanation) -> dict[str, list[str]]:
    """Return the lines of each step; the first is its heading."""
    found: dict[str, list[str]] = {"0": []}
    for line in str(steps).splitlines():
        if match := re.match(r"(\d)\. ", line):
            found[match[1]] = [line[3:]]
        else:
            found[max(found)].append(line)
    return found


def check_lines(steps: regard.Explanation, keys: list[int], name_width: int) -> None:
    """Check that the printed numbers of these keys equal the fields."""
    lines = sections(steps)
    as_printed(numbers(lines["1"][0]), steps.query)
    assert numbers(lines["2"][0])[0] == pytest.approx(steps.scale, abs=1e-4)
    as_printed(numbers(lines["3"][0].replace("exp(score − shift", "")), [steps.shift, steps.total])
    for at, j in enumerate(keys, start=1):
        compare, scale, normalise = (lines[step][at][3 + name_width :] for step in "123")
        pairs = np.stack([steps.query, steps.key[j]], axis=-1).ravel()
        as_printed(numbers(compare), [*pairs, steps.raw_scores[j]])
        masked = steps.scores[j] == -np.inf
        assert scale.endswith("masked") == masked
        last = [steps.scores[j]] if steps.score_mods and not masked else []
        as_printed(numbers(scale), [steps.raw_scores[j], steps.scale, steps.scaled_scores[j], *last])
        as_printed(numbers(normalise), [steps.exponentials[j], steps.weights[j]])
        assert normalise.count("█") == int(40 * steps.weights[j])
        if steps.value is not None:
            aggregate = lines["4"][at][3 + name_width :]
            as_printed(numbers(aggregate), [steps.weights[j], *steps.value[j], *steps.contributions[j]])
    if steps.output is not None:
        as_printed(numbers(lines["4"][-1].removeprefix("   output = ")), steps.output)


@pytest.mark.parametrize("row", range(N))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_printed_numbers_are_the_fields(name: str, row: int) -> None:
    A = regard.attention(cat.Q * 1.375, cat.K, **ARGUMENTS[name])
    steps = A.explain(row, value=cat.V, tokens=cat.tokens)
    check_lines(steps, list(range(N)), name_width=3)
    if steps.sink_exponential is not None:
        (line,) = (line for line in sections(steps)["3"] if "(sink)" in line)
        as_printed(numbers(line), [steps.sink_exponential, steps.sink_exponential / steps.total])
        assert line.count("█") == int(40 * steps.sink_exponential / steps.total)


@pytest.mark.parametrize("weight", [0.0, 0.024, 0.026, 0.1095, 0.5, 0.975, 0.999, 1.0])
def test_bars_are_forty_times_the_weight_rounded_down(weight: float) -> None:
    # A second key takes the rest, so that the first has this weight.
    with np.errstate(divide="ignore"):
        bias = regard.score_mods.bias(np.log([[weight, 1 - weight]]))
    steps = regard.attention([[0.0]], [[0.0], [0.0]], score_mod=bias).explain(0)
    close(steps.weights, [weight, 1 - weight])
    bars = [line.count("█") for line in sections(steps)["3"][1:3]]
    assert bars == [int(40 * w) for w in steps.weights]


# Long rows

LONG, WIDTH = 70_001, 3


@pytest.fixture(scope="module")
def long_row() -> regard.Explanation:
    rng = np.random.default_rng(5)
    query, key = rng.normal(size=(1, 2)) * 4, rng.normal(size=(LONG, 2))
    sink = regard.attention(query, key, mask=~first(1000)).lse[0]  # the sink takes half of the weight
    A = regard.attention(query, key, mask=~first(1000), sink=sink)
    return A.explain(0, value=rng.normal(size=(LONG, WIDTH)))


def test_a_long_row_shows_its_top_keys(long_row: regard.Explanation) -> None:
    text = str(long_row)
    shown = [
        int(j) for j in re.findall(r"^   key (\d+) .*█|^   key (\d+) +\S+ +\S+$", text, re.M) for j in j if j
    ]
    top = np.sort(np.argsort(-long_row.weights, kind="stable")[:12])
    assert shown == sorted(shown) == top.tolist()
    assert len(text.splitlines()) < 80 and max(map(len, text.splitlines())) < 200
    check_lines(long_row, top.tolist(), name_width=max(len(f"key {j}") for j in top))


def test_a_long_row_prints_the_sum_of_the_other_keys(long_row: regard.Explanation) -> None:
    top = np.argsort(-long_row.weights, kind="stable")[:12]
    rest = np.setdiff1d(np.arange(LONG), top)
    weights, sums = (
        next(line for line in sections(long_row)[step] if "other keys" in line) for step in ("3", "4")
    )
    count, exponentials, weight = numbers(weights)
    assert count == len(rest) == LONG - 12
    as_printed([exponentials, weight], [long_row.exponentials[rest].sum(), long_row.weights[rest].sum()])
    assert weights.count("█") == int(40 * long_row.weights[rest].sum()) > 0
    as_printed(numbers(sums)[1:], long_row.contributions[rest].sum(0))
    # The shown keys, the rest and the sink add up to the whole row.
    printed = [numbers(line)[-1] for line in sections(long_row)["3"][1:]]
    assert sum(printed) == pytest.approx(1, abs=14 * 0.5e-4)
    close(long_row.output, long_row.weights @ long_row.value)


@pytest.mark.parametrize("n", [0, 1, 11, 12, 13, 14, 1009])
@pytest.mark.parametrize("head_dim", [1, 7, 8, 9, 131])
def test_the_text_is_short_for_any_length(n: int, head_dim: int) -> None:
    rng = np.random.default_rng(n)
    query, key = rng.normal(size=(1, head_dim)), rng.normal(size=(n, head_dim))
    steps = regard.attention(query, key).explain(0, value=rng.normal(size=(n, 17)))
    lines = str(steps).splitlines()
    assert len(lines) < 80 and max(map(len, lines)) < 240
    assert str(steps).count("other keys") == (2 if n > 12 else 0)
    assert len(sections(steps)["1"]) == 1 + min(n, 12)
    assert steps.output.shape == (17,)


# Empty rows, and NaN


@pytest.mark.parametrize(
    "arguments", [{}, {"sink": 1.0}, {"sink": -np.inf}], ids=["plain", "sink", "no sink at all"]
)
def test_an_empty_row(arguments: Any) -> None:
    A = regard.attention(cat.Q, cat.K, mask=first(0), **arguments)
    steps = A.explain(3, value=cat.V, tokens=cat.tokens)
    for zeros in (steps.exponentials, steps.weights, steps.contributions, steps.output):
        equal(zeros, np.zeros_like(zeros))
    assert (steps.scores == -np.inf).all()
    assert steps.total == (1.0 if arguments.get("sink") == 1.0 else 0.0)
    text = str(steps)
    assert (
        "Every key is masked for this query: its weights are zeros." in text and text.count("  masked") == N
    )
    assert "nan" not in text.lower() and sections(steps)["4"][-1] == "   output = [0, 0, 0, 0]"


def test_masked_input_does_not_reach_the_output() -> None:
    key, value = cat.K.copy(), cat.V.copy()
    key[4], value[4] = np.nan, np.inf
    steps = regard.attention(cat.Q, key, mask=padding(4)).explain(1, value=value)
    same = regard.attention(cat.Q, cat.K[:4]).explain(1, value=cat.V[:4])
    equal(steps.weights[:4], same.weights)
    equal(steps.output, same.output)
    assert steps.weights[4] == 0 and not steps.contributions[4].any() and str(steps).count("masked") == 1


# Tokens

HOSTILE = [
    "new\nline",
    "nul\0",
    "\u2028sep\u2029",
    "\u202eRTL\u200f",
    "\r\x1b[31m",
    "tab\t\x85",
    "\ud800",
    "",
    "  ",
]


def test_hostile_tokens_stay_on_their_line() -> None:
    n = len(HOSTILE)
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(n, 3)), rng.normal(size=(n, 3))
    for row in range(n):
        steps = regard.attention(query, key).explain(row, value=key, tokens=HOSTILE)
        text = str(steps)
        plain = str(regard.attention(query, key).explain(row, value=key))
        assert len(text.splitlines()) == len(text.split("\n")) == len(plain.splitlines())
        assert all(char.isprintable() for char in text.replace("\n", "")) and "\n" not in repr(steps)
        text.encode("utf-8")
        assert (
            r"new\nline" in text
            and r"nul\x00" in text
            and r"\u2028sep\u2029" in text
            and r"\u202eRTL" in text
        )
        assert list(steps.key_tokens) == HOSTILE, "the data holds the tokens unescaped"


# Choosing a row and a head


def test_explain_one_head_of_a_larger_matrix() -> None:
    rng = np.random.default_rng(3)
    query, key, value = (
        rng.normal(size=(2, 6, 7, 5)),
        rng.normal(size=(2, 3, 7, 5)),
        rng.normal(size=(2, 3, 7, 4)),
    )
    A = regard.attention(query, key, mask=causal() & padding([7, 5]), sink=np.arange(6.0), enable_gqa=True)
    with pytest.raises(regard.ArgumentError, match=r"A\[0, 0\]\.explain\(3\)"):
        A.explain(3)
    steps = A.lazy[1, 4].explain(-1, value=value[1, 2])
    close(steps.weights, A[1, 4, 6])
    close(steps.output, (A @ value)[1, 4, 6])
    assert steps.title == "How query 6 attends"
    # In a part of the matrix rows are counted within the part; the title names the query's position.
    some = A.lazy[1, 4, [5, 2]].explain(1, value=value[1:2, 2:3], tokens="abcdefg")
    close(some.weights, A[1, 4, 2])
    assert some.title == 'How query 2 "c" attends'


def test_half_precision_is_explained_in_float32() -> None:
    steps = regard.attention(cat.Q.astype(np.float16), cat.K.astype(np.float16)).explain(0, value=cat.V)
    assert {x.dtype for x in (steps.query, steps.products, steps.scores, steps.weights)} == {
        np.dtype(np.float32)
    }
    close(steps.weights, defined({}).weights[0], rtol=1e-6)


def test_a_query_of_another_sequence_has_no_token() -> None:
    steps = regard.attention(cat.Q[:2], cat.K).explain(1, tokens=cat.tokens)
    assert steps.title == "How query 1 attends" and list(steps.key_tokens) == list(cat.tokens)


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": ["a"]}, {"value": np.ones((4, 3))}, {"value": np.ones(5)}, {"value": np.ones((2, 5, 3))}],
)
def test_wrong_arguments_are_refused(wrong: Any) -> None:
    with pytest.raises(regard.ArgumentError, match="explain"):
        regard.attention(cat.Q, cat.K).explain(0, **wrong)


@pytest.mark.parametrize("row", [5, -6])
def test_a_row_past_the_end_is_an_index_error(row: int) -> None:
    with pytest.raises(regard.IndexOutOfRangeError, match="explain"):
        regard.attention(cat.Q, cat.K).explain(row)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_numbers_that_are_not_finite_raise_no_warning(library: str, scale: float) -> None:
    query, key = np.array([[np.inf, 1.0], [1e308, 2.0]]), np.array([[1.0, 2.0], [-1.0, 1e300]])
    value = np.array([[np.inf, np.nan], [-np.inf, 1e308]])
    if library == "torch":
        torch = pytest.importorskip("torch")
        query, key, value = map(torch.from_numpy, (query, key, value))
    with np.errstate(all="raise"):
        steps = regard.attention(query, key, scale=scale).explain(0, value=value)
        assert "How query 0 attends" in str(steps) and steps._repr_html_()
    equal(steps.raw_scores, [np.inf, -np.inf])
    equal(steps.scaled_scores, [np.nan, np.nan] if scale == 0 else [np.inf, -np.inf])
