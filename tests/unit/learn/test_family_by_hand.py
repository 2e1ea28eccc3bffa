"""The rows worked by hand: every printed equation holds, and the last ones give the numbers of the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import regard
from regard.learn import cat, family
from regard.render.text import format_factor, format_number, format_vector
from regard.score_mods import softcap

every_mechanism = pytest.mark.parametrize("mechanism", family.MECHANISMS, ids=lambda m: m.name)

NAMED = {mechanism.name: mechanism for mechanism in family.MECHANISMS}


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def close(actual: Any, expected: Any) -> None:
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@dataclass
class Interval:
    """The interval in which a printed number lies, given that it was rounded, with interval arithmetic."""

    low: Any
    high: Any

    @classmethod
    def of(cls, *ends: Any) -> Interval:
        return cls(np.minimum.reduce(ends), np.maximum.reduce(ends))

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        return Interval.of(*(a * b for a in (self.low, self.high) for b in (other.low, other.high)))

    def __truediv__(self, other: Interval) -> Interval:
        return self * Interval(1 / other.high, 1 / other.low)

    def meets(self, other: Interval) -> bool:
        assert np.shape(self.low) == np.shape(other.low)
        return bool(np.all((self.low <= other.high) & (other.low <= self.high)))


def parse_number(text: str) -> Interval:
    if text == "inf":
        return Interval(np.inf, np.inf)
    half = 0.5e-3 * 10.0 ** int(text.partition("e")[2]) if "e" in text else 0.5e-4
    return Interval(float(text) - half, float(text) + half)


def map_monotone(function: Callable[[Any], Any]) -> Callable[[Interval], Interval]:
    return lambda x: Interval(function(x.low), function(x.high))


def map_wave(function: Callable[[Any], Any]) -> Callable[[Interval], Interval]:
    """Map an interval by sine or cosine, which change by no more than their argument."""
    return lambda x: Interval(*(function((x.low + x.high) / 2) + s * (x.high - x.low) / 2 for s in (-1, 1)))


FUNCTIONS: dict[str, Any] = {
    "number": parse_number,
    "vec": lambda *parts: Interval(np.array([p.low for p in parts]), np.array([p.high for p in parts])),
    "sqrt": map_monotone(np.sqrt),
    "exp": map_monotone(np.exp),
    "log": map_monotone(np.log),
    "tanh": map_monotone(np.tanh),
    "cos": map_wave(np.cos),
    "sin": map_wave(np.sin),
    "φ": map_monotone(lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))),
}


def evaluate(text: str) -> Interval:
    text = re.sub(r"√(\d+)", r"sqrt(\1)", text.replace("·", "*").replace("−", "-"))
    text = re.sub(r"inf|(?<![\w.])\d+(\.\d+)?(e[+-]\d+)?", r'number("\g<0>")', text)
    found = eval(text.replace("[", "vec(").replace("]", ")"), {"__builtins__": {}}, FUNCTIONS)
    assert isinstance(found, Interval)
    return found


def find_equations(text: str) -> Iterator[tuple[str, str, str]]:
    """Find every `name  left = right` in the text; lines that only name a result are skipped."""
    for line in re.sub(r"\n {5}(?=[+=] )", " ", text).split("\n"):
        left, sign, right = line.strip().rpartition(" = ")
        name, _, left = left.rpartition("  ")
        if sign and left != "scores":
            yield name.strip(), left, right


def holds(left: str, right: str) -> bool:
    return evaluate(left).meets(evaluate(right))


@every_mechanism
def test_every_equation_by_hand_holds(mechanism):
    for row in range(len(mechanism.query_tokens)):
        text = str(mechanism.explain(row))
        found = list(find_equations(text))
        assert len(found) >= 5
        for name, left, right in found:
            assert holds(left, right), f"{name}: {left} = {right}"


@every_mechanism
def test_steps_by_hand_end_in_the_numbers_of_the_run(mechanism):
    output, weights = mechanism.run()
    for row in range(len(mechanism.query_tokens)):
        steps = mechanism.explain(row)
        close(steps.weights, weights[..., row, :])
        close(steps.output, output[row])
        found = list(find_equations(str(steps)))
        shown = [right for name, _, right in found if name == "output"]
        if weights.ndim == 3:  # each head has its own columns, concatenated at the end
            parts = np.split(output[row], len(weights))
            assert shown == [format_vector(part) for part in parts]
            assert str(steps).endswith(f"→ {format_vector(output[row])}")
        else:
            assert set(shown) == {format_vector(output[row])}
        heads = weights[:, row] if weights.ndim == 3 else [weights[row]]
        held = row + 1 if mechanism.name == "kv_cache" else None  # later keys are not cached yet
        assert [r for n, _, r in found if n == "weights"] == [format_vector(head[:held]) for head in heads]


@every_mechanism
def test_steps_by_hand_start_from_the_inputs_and_use_earlier_results(mechanism):
    text = str(mechanism.explain(0))
    if mechanism.name not in ("rotary", "linear"):  # these transform the inputs first
        split = getattr(mechanism.build(), "split_inputs", lambda *qkv: [x[None] for x in qkv])
        Q, K, _ = split(mechanism.example.Q, mechanism.example.K, mechanism.example.V)
        for q, k in zip(Q[:, 0], K, strict=True):
            terms = " + ".join(f"{format_number(a)}·{format_factor(b)}" for a, b in zip(q, k[0], strict=True))
            assert f"{terms} = {format_number(q @ k[0])}" in text
    found: set[str] = set()
    for name, left, right in find_equations(text):
        if name in ("weights", "output") and " / " in left:
            assert set(re.findall(r"[^][, /]+", left)) <= found, left
        found |= set(re.findall(r"[^][, ]+", right))


@pytest.mark.parametrize(
    "line",
    ["1·2 + 3·4 = 15", "exp([0, 1] − 1) = [0.3679, 1.1]", "[1, 2] / √4 = [0.5, 0.9]", "tanh(0.5) = 0.5"],
)
def test_a_wrong_equation_is_found(line):
    ((_, left, right),) = find_equations(line)
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


def test_a_fully_masked_query_is_explained():
    steps = family.Causal(d_k=1).explain(draw(3, 1), draw(2, 1), draw(2, 1), ["a", "b"], 0)
    assert "visible keys: none" in str(steps)
    assert "Every key is masked for this query: its weights are zeros." in str(steps)
    assert not steps.weights.any()
    assert not steps.output.any()
    assert "visible keys: none" in str(
        family.Cached(d_k=1).explain(draw(3, 1), draw(2, 1), draw(2, 1), "ab", 0)
    )
