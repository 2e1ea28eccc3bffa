"""The conformance kit: anyone's attention function, asked every question, and what was found said in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.testing.conformance.attention_steps import DEFINITION
from regard.testing.conformance.compare import Outcome, agrees, ask
from regard.testing.conformance.convention import Convention
from regard.testing.conformance.diagnosis import Finding, findings
from regard.testing.conformance.presets import as_called, describe
from regard.testing.conformance.questions import Question, questions
from regard.testing.conformance.report import Capability, Report

SIZES = ("quick", "full")


def conformance(
    fn: Callable[..., Any],
    convention: Convention | str | None = None,
    *,
    size: str = "quick",
    **described: Any,
) -> Report:
    """What an attention function does with masks, dtypes, lengths and NaN, and what is wrong with it, in words.

    `fn(query, key, value, …)` is described by a `Convention`, by the name of a ready one, or by its fields
    (`layout="b n h d", mask="drop"`); what is not said is read off the function and its signature.

    >>> def attention(Q, K, V, mask=None):
    ...     scores = Q @ K.swapaxes(-1, -2)
    ...     if mask is not None:
    ...         scores = np.where(mask, scores, -np.inf)
    ...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ V
    >>> for finding in conformance(attention, without=["no query, key or batch"]).findings:
    ...     print(finding.words)
    the scale is missing
    empty rows are NaN
    a masked NaN leaks, from the value: it is multiplied by a weight of 0
    """
    if size not in SIZES:
        raise ArgumentError(
            "conformance",
            received=f"size {size!r}",
            expected='"quick" or "full"',
            hint="quick is the default.",
        )
    fn, convention = _described(fn, convention, described)
    outcomes = [ask(fn, convention, question) for question in _asked(convention, size)]
    claimed = [o for o in outcomes if not o.not_asked and o.question.capability not in convention.without]
    found = findings(fn, convention, claimed)
    rows = tuple(_row(group, found) for group in _grouped(outcomes))
    return Report(_name(fn), convention, size, rows, tuple(found))


@dataclass(frozen=True, eq=False)
class Trial:
    """One question as a test: `trial.check(fn)` passes or says what is wrong, with the smallest input.

    >>> import regard
    >>> from regard.testing import trials
    >>> trial = trials(mask=None)[0]
    >>> print(trial)
    plain: two keys
    >>> trial.check(lambda q, k, v: regard.attention(q, k) @ v)
    """

    question: Question
    convention: Convention

    def __str__(self) -> str:
        return str(self.question)

    def check(self, fn: Callable[..., Any]) -> None:
        """Pass where the function answers as the definition does; else an AssertionError with the words.

        One call does not tell a cause: the first that fails has the function asked every question, once.
        """
        if agrees(ask(as_called(fn), self.convention, self.question), DEFINITION):
            return
        report = _examined(fn, self.convention)
        here = [f for f in report.findings if self.question.capability in f.capabilities]
        raise AssertionError(
            "\n".join([f"{report.function}, {self}", *(str(f) for f in here or report.findings)])
        )


@lru_cache(maxsize=4)
def _examined(fn: Callable[..., Any], convention: Convention) -> Report:
    return conformance(fn, convention)


def trials(
    convention: Convention | str | None = None, *, size: str = "quick", **described: Any
) -> list[Trial]:
    """Every question that a function of this convention can be asked, one to a test.

    >>> import pytest
    >>> @pytest.mark.parametrize("trial", trials(layout="n d"), ids=str)
    ... def test_my_attention(trial):
    ...     trial.check(my_attention)
    """
    _, convention = _described(None, convention, described)
    return [
        Trial(question, convention)
        for question in _asked(convention, size)
        if not convention.cannot(question.call, question.gradients)
        and question.capability not in convention.without
    ]


def _asked(convention: Convention, size: str) -> Sequence[Question]:
    dtypes = convention.dtypes or convention.arrays.dtypes
    usual = convention.arrays.dtype
    return list(questions(usual if usual in dtypes else dtypes[0], convention.causal, size))


def _described(
    fn: Any, convention: Convention | str | None, described: dict[str, Any]
) -> tuple[Any, Convention]:
    """The function as it is called, and its convention: what was said, then what is known of the function."""
    if fn is not None and not callable(fn):
        raise ArgumentTypeError(
            "conformance", received=describe_argument(fn), expected="an attention function fn(query, key, value, …)",
            hint="Pass the function itself, not what it returns.",
        )  # fmt: skip
    unknown = sorted(described.keys() - Convention.__dataclass_fields__.keys())
    if unknown:
        raise ArgumentError(
            "conformance", received=f"{unknown[0]}=", expected=f"one of {', '.join(Convention.__dataclass_fields__)}",
            hint="They are the fields of regard.testing.Convention.",
        )  # fmt: skip
    if isinstance(convention, Convention):
        return as_called(fn), replace(convention, **described)
    return describe(fn, convention, described)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _grouped(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.question.capability, []).append(outcome)
    return list(groups.values())


def _row(group: list[Outcome], found: Sequence[Finding]) -> Capability:
    name = group[0].question.capability
    asked = [outcome for outcome in group if not outcome.not_asked]
    if not asked:
        return Capability(name, "not asked", 0, float("nan"), group[0].not_asked)
    errors = [outcome.error for outcome in asked]
    error = max((e for e in errors if np.isfinite(e)), default=float("nan"))
    if all(agrees(outcome, DEFINITION) for outcome in asked):
        return Capability(name, "yes", len(asked), error, "")
    numbers = [str(at) for at, finding in enumerate(found, 1) if name in finding.capabilities]
    why = f"finding {', '.join(numbers)}" if numbers else "not claimed"
    refused = all(outcome.raised for outcome in asked if not agrees(outcome, DEFINITION))
    return Capability(name, "refused" if refused else "no", len(asked), error, why)
