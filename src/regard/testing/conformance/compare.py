"""Judging: one answer against the definition, or against the definition with some steps replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from regard import reference
from regard.testing.conformance.attention_call import Call
from regard.testing.conformance.attention_steps import (
    DEFINITION,
    HALVES,
    Answer,
    Steps,
    attend,
    both,
    interleave,
    round_to,
)
from regard.testing.conformance.convention import Convention, WrongShape
from regard.testing.conformance.questions import Question
from regard.testing.tolerance import assert_matches, epsilon


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a question: an answer, or why there is none."""

    question: Question
    answer: Answer | None = None
    raised: str = ""  # the error's kind and first line, or what came back in a wrong shape
    not_asked: str = ""

    @property
    def error(self) -> float:
        """The largest error of the output where both are finite; NaN where there is none to compare."""
        exact = expected(self.question, DEFINITION).exact.output
        if self.answer is None or self.answer.output.shape != exact.shape:
            return float("nan")
        with np.errstate(all="ignore"):
            errors = np.abs(self.answer.output.astype(np.float64) - exact.astype(np.float64))
        finite = errors[np.isfinite(errors)]
        return float(finite.max()) if finite.size else float("nan")


def ask(fn: Callable[..., Any], convention: Convention, question: Question) -> Outcome:
    """Ask one question, if the function can be asked it."""
    reason = convention.cannot(question.call, question.gradients)
    if reason:
        return Outcome(question, not_asked=reason)
    try:
        with np.errstate(all="ignore"):
            return Outcome(question, convention.ask(fn, question.call, gradient_of(question)))
    except WrongShape as error:
        return Outcome(question, raised=f"returns {error}")
    except Exception as error:  # whatever the function raises is its answer
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return Outcome(question, raised=f"raises {type(error).__name__}{': ' if first else ''}{first}")


def gradient_of(question: Question) -> Any:
    """The gradient of the output that a question about gradients starts from; else None."""
    if not question.gradients:
        return None
    shape = (*question.call.query.shape[:-1], question.call.value.shape[-1])
    return np.random.default_rng(0).integers(-4, 5, size=shape) / 4


class Impossible(Exception):
    """The steps cannot be computed for a call: a function of these steps would raise."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What a function of some steps returns; how far naive arithmetic is off is worked out when it is asked for."""

    question: Question
    steps: Steps
    exact: Answer

    @cached_property
    def naive(self) -> Answer:
        """The same at the dtype of the call, halves in float32."""
        call, slope = self.question.call, gradient_of(self.question)
        if self.rounded:  # the answer may be as far from the rounded steps as those are from the definition
            return expected(self.question, DEFINITION).exact
        naive = attend(call, self.steps, _working(call), slope)
        return naive._replace(output=round_to(naive.output, call.dtype))

    @property
    def rounded(self) -> bool:
        """Whether every intermediate result is rounded to half precision."""
        return self.steps.rounded and self.question.call.dtype in HALVES

    @cached_property
    def drift(self) -> Any:
        """What a rounded score does to the weights of its row, relative; by the largest seen, terms without signs."""
        call = self.question.call
        query, key = (np.abs(np.where(np.isfinite(x), x, 0)) for x in (call.query, call.key))
        terms = query @ interleave(key, query.shape[1]).swapaxes(-1, -2) * abs(self.steps.scale(call))
        largest = np.where(call.allowed(), terms, 0).max(-1, keepdims=True, initial=0)
        drift = 4 * epsilon(_working(call)) * (1 + largest)
        return drift if self.steps.returned is both else drift.max(initial=0)  # rows may no longer be queries

    @cached_property
    def magnitude(self) -> Answer:
        """What was summed up, without signs: Σ weight · |value| for an output, a weight itself for a weight."""
        call = self.question.call
        unsigned = replace(call, value=np.abs(np.where(np.isfinite(call.value), call.value, 0)))
        return attend(unsigned, self.steps)

    @cached_property
    def slopes(self) -> bool:
        """Whether gradients are to be compared: not where a fault has already changed the output."""
        right = expected(self.question, DEFINITION).exact.output
        return self.question.gradients and (self.steps is DEFINITION or _same(self.exact.output, right))

    def refuse(self, answer: Answer) -> str:
        """What the error rule has against the answer; nothing where it is one of these steps."""
        exact, naive, size = self.exact, self.naive, self.magnitude
        common: dict[str, Any] = {"dtype": self.question.call.dtype}
        try:
            assert_matches(
                answer.output, exact.output, naive.output, magnitude=size.output, score_error=self.drift,
                ordinary=self.question.ordinary and not self.rounded, **common,
            )  # fmt: skip
            if answer.weights is not None:
                assert exact.weights is not None, "weights: returned, where none were expected"
                assert_matches(
                    answer.weights, exact.weights, naive.weights, magnitude=size.weights, score_error=self.drift,
                    what="weights", **common,
                )  # fmt: skip
            if self.slopes:
                for name, *found in zip(
                    ("query", "key", "value"), answer.gradients, exact.gradients, naive.gradients, strict=True
                ):
                    largest = np.max(np.abs(found[1]), initial=1, where=np.isfinite(found[1]))
                    assert_matches(
                        *found, magnitude=largest, factor=3.0, what=f"gradient of {name}", **common
                    )
        except AssertionError as error:
            return str(error)
        return ""


def _working(call: Call) -> Any:
    return np.float64 if call.dtype == "float64" else np.float32


@lru_cache(maxsize=4096)
def expected(question: Question, steps: Steps) -> Expected:
    """What a function of these steps is expected to answer; Impossible where it would raise."""
    call = question.call
    # The definition is wider than what it judges. A fault must overflow as the function does: no wider than float64.
    wide = np.longdouble if call.dtype == "float64" and steps is DEFINITION else np.float64
    halved = steps.rounded and call.dtype in HALVES
    try:
        exact = attend(call, steps, np.float32 if halved else wide, gradient_of(question))
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise Impossible(str(error)) from error
    if steps is DEFINITION:
        exact = _by_reference(call, wide)._replace(gradients=exact.gradients)
    return Expected(question, steps, exact)


def _by_reference(call: Call, dtype: Any) -> Answer:
    found = reference.attention(
        call.query, call.key, call.value, mask=call.allowed(), scale=call.scale, dtype=dtype
    )
    return Answer(found.output, found.weights)


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=True))


def agrees(outcome: Outcome, steps: Steps) -> bool:
    """Whether the outcome is that of a function of these steps; one that raises agrees with steps that cannot be."""
    try:
        prediction = expected(outcome.question, steps)
    except Impossible:
        return outcome.answer is None
    if outcome.answer is None or not _near(outcome.answer.output, prediction):
        return False
    return not prediction.refuse(outcome.answer)


def disturbs(outcome: Outcome, steps: Steps) -> bool:
    """Whether these steps show in a call of NaN, inf or large numbers, where what they do depends on their details."""
    try:
        prediction = expected(outcome.question, steps)
    except Impossible:
        return False
    right = expected(outcome.question, DEFINITION)
    return not outcome.question.ordinary and bool(right.refuse(prediction.exact))


def _near(answer: Any, prediction: Expected) -> bool:
    """A cheap first look that no answer within the error rule fails."""
    exact = prediction.exact.output
    if answer.shape != exact.shape:
        return False
    if prediction.rounded:
        return True
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(answer)):
        return False
    with np.errstate(all="ignore"):
        return bool((np.abs(answer - exact)[finite] <= 0.1 * (1 + np.abs(exact[finite]))).all())
