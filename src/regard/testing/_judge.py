"""Judging: one answer against the definition, or against the definition with some steps replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from regard import reference
from regard.testing._call import Call, Question
from regard.testing._convention import Convention
from regard.testing._rule import assert_matches, epsilon
from regard.testing._steps import DEFINITION, HALVES, Answer, Steps, attend, round_to


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a question: an answer, or why there is none."""

    question: Question
    answer: Answer | None = None
    raised: str = ""  # the error's kind and first line
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
    except Exception as error:  # whatever the function raises is its answer
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return Outcome(question, raised=f"{type(error).__name__}: {first}" if first else type(error).__name__)


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
    """What a function of some steps returns, how far naive arithmetic is off, and the floors of the error rule."""

    exact: Answer
    naive: Answer
    magnitude: Any
    drift: Any
    question: Question
    slopes: bool  # the gradients are to be compared too

    def refuse(self, answer: Answer) -> str:
        """What the error rule has against the answer; nothing where it is one of these steps."""
        dtype, exact, naive = self.question.call.dtype, self.exact, self.naive
        common: dict[str, Any] = {"dtype": dtype}
        try:
            assert_matches(
                answer.output, exact.output, naive.output, magnitude=self.magnitude, score_error=self.drift,
                ordinary=self.question.ordinary, **common,
            )  # fmt: skip
            if answer.weights is not None:
                assert exact.weights is not None, "weights: returned, where none were expected"
                assert_matches(
                    answer.weights, exact.weights, naive.weights, score_error=self.drift, what="weights", **common
                )
            if self.slopes:
                for name, *found in zip(
                    ("query", "key", "value"), answer.gradients, exact.gradients, naive.gradients, strict=True
                ):
                    size = np.max(np.abs(found[1]), initial=1, where=np.isfinite(found[1]))
                    assert_matches(*found, magnitude=size, factor=3.0, what=f"gradient of {name}", **common)
        except AssertionError as error:
            return str(error)
        return ""


@lru_cache(maxsize=4096)
def expected(question: Question, steps: Steps) -> Expected:
    """What a function of these steps is expected to answer; Impossible where it would raise."""
    call, slope = question.call, gradient_of(question)
    # Where a fault overflows, it must overflow as the function does: no wider than its own dtype, or float64.
    wide = np.longdouble if call.dtype == "float64" and steps is DEFINITION else np.float64
    working = np.float64 if call.dtype == "float64" else np.float32
    try:
        exact, naive = attend(call, steps, wide, slope), attend(call, steps, working, slope)
        if steps.rounded and call.dtype in HALVES:
            exact, naive = naive, attend(call, DEFINITION, wide)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise Impossible(str(error)) from error
    if steps is DEFINITION:
        exact = _by_reference(call, wide)._replace(gradients=exact.gradients)
    naive = naive._replace(output=round_to(naive.output, call.dtype))
    with np.errstate(all="ignore"):
        sizes = np.abs(np.where(np.isfinite(call.key), call.key, 0)).max(initial=0, axis=(0, 1, 2))
        query = np.abs(np.where(np.isfinite(call.query), call.query, 0))
        rows = (query * sizes).sum(-1) * abs(steps.scale(call))  # no |score| of the row is above this
        magnitude = np.abs(np.where(np.isfinite(call.value), call.value, 0)).max(initial=0)
    drift = 4 * epsilon(working) * (1 + rows.max(initial=0))
    same = steps is DEFINITION or _same(exact.output, expected(question, DEFINITION).exact.output)
    return Expected(exact, naive, magnitude, drift, question, question.gradients and same)


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
    if outcome.answer is None or not _near(outcome.answer.output, prediction.exact.output, steps):
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


def _near(answer: Any, exact: Any, steps: Steps) -> bool:
    """A cheap first look that no answer within the error rule fails."""
    if answer.shape != exact.shape:
        return False
    if steps.rounded:
        return True
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(answer)):
        return False
    with np.errstate(all="ignore"):
        return bool((np.abs(answer - exact)[finite] <= 0.1 * (1 + np.abs(exact[finite]))).all())
