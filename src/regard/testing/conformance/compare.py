"""Comparison of a function's result with the definition, or with the definition after some steps are replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from regard import reference
from regard.testing.conformance.attention_call import AttentionCall
from regard.testing.conformance.attention_steps import (
    DEFINITION,
    HALF_DTYPES,
    AttentionResult,
    Steps,
    repeat_kv_heads,
    return_both,
    round_to,
    run_steps,
)
from regard.testing.conformance.convention import CallingConvention, OutputError
from regard.testing.conformance.probe_calls import ProbeCall
from regard.testing.tolerance import assert_matches, epsilon


@dataclass(frozen=True, eq=False)
class ProbeOutcome:
    """The outcome of a probe: a result, a failure, or the reason why it was skipped."""

    probe: ProbeCall
    result: AttentionResult | None = None
    failure: str = ""  # the type and first line of the error, or the wrong shape
    skip_reason: str = ""

    @property
    def max_error(self) -> float:
        """The largest error of the output where both sides are finite; NaN if there is nothing to compare."""
        exact = compute_expected(self.probe, DEFINITION).exact.output
        return float("nan") if self.result is None else _find_largest_error(self.result.output, exact)

    @property
    def has_other_nan(self) -> bool:
        """Whether NaN or inf are in other places of the output than in the definition."""
        exact = compute_expected(self.probe, DEFINITION).exact.output
        return self.result is None or not np.array_equal(np.isfinite(self.result.output), np.isfinite(exact))

    def list_errors(self) -> list[float]:
        """Return the largest error of the output, of the weights and of the gradients, as far as there are any."""
        exact = compute_expected(self.probe, DEFINITION).exact
        if self.result is None:
            return []
        pairs = [(self.result.output, exact.output)]
        if self.result.weights is not None:
            pairs.append((self.result.weights, exact.weights))
        pairs += zip(self.result.gradients or (), exact.gradients or (), strict=True)
        return [_find_largest_error(*pair) for pair in pairs]


def run_probe(fn: Callable[..., Any], convention: CallingConvention, probe: ProbeCall) -> ProbeOutcome:
    """Call a function with a probe, unless its convention does not allow the call.

    Args:
        fn: The attention function.
        convention: How to call the function.
        probe: The call.

    Returns:
        The outcome: the result of the call, its failure, or the reason why it was skipped.
    """
    obstacle = convention.find_obstacle(probe.call, probe.gradients)
    if obstacle:
        return ProbeOutcome(probe, skip_reason=obstacle)
    try:
        with np.errstate(all="ignore"):
            return ProbeOutcome(probe, convention.invoke(fn, probe.call, build_output_gradient(probe)))
    except OutputError as error:
        return ProbeOutcome(probe, failure=f"returns {error}")
    except Exception as error:  # an error of the function is an outcome like any other
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return ProbeOutcome(probe, failure=f"raises {type(error).__name__}{': ' if first else ''}{first}")


def build_output_gradient(probe: ProbeCall) -> Any:
    """Return the output gradient of a probe of gradients, (batch, heads, q_len, value_dim); otherwise None."""
    if not probe.gradients:
        return None
    shape = (*probe.call.query.shape[:-1], probe.call.value.shape[-1])
    return np.random.default_rng(0).integers(-4, 5, size=shape) / 4


class StepsNotComputableError(Exception):
    """The steps cannot be computed for a call: a function with these steps would raise an error."""


@dataclass(frozen=True, eq=False)
class ExpectedResult:
    """The result of a function with some steps. The error of naive arithmetic is computed on demand."""

    probe: ProbeCall
    steps: Steps
    exact: AttentionResult

    @cached_property
    def naive(self) -> AttentionResult:
        """The result computed at the dtype of the call, half precision in float32."""
        call = self.probe.call
        if (
            self.rounds_to_half
        ):  # a result may differ from the rounded steps as much as they do from the definition
            return compute_expected(self.probe, DEFINITION).exact
        naive = run_steps(call, self.steps, _working_dtype(call), build_output_gradient(self.probe))
        return naive._replace(output=round_to(naive.output, call.dtype))

    @property
    def rounds_to_half(self) -> bool:
        """Whether every intermediate result is rounded to half precision."""
        return self.steps.half_precision and self.probe.call.dtype in HALF_DTYPES

    @cached_property
    def score_error(self) -> Any:
        """The relative error of a row's weights from rounding its scores, by the largest sum of absolute terms."""
        call = self.probe.call
        query, key = (np.abs(np.where(np.isfinite(x), x, 0)) for x in (call.query, call.key))
        terms = query @ repeat_kv_heads(key, query.shape[1]).swapaxes(-1, -2) * abs(self.steps.scale(call))
        largest = np.where(call.build_mask(), terms, 0).max(-1, keepdims=True, initial=0)
        error = 4 * epsilon(_working_dtype(call)) * (1 + largest)
        # Other return values may have rows that are no longer queries.
        return error if self.steps.return_value is return_both else error.max(initial=0)

    @cached_property
    def magnitude(self) -> AttentionResult:
        """The sums of absolute terms: Σ weight · |value| for an output, the weight itself for a weight."""
        call = self.probe.call
        unsigned = replace(call, value=np.abs(np.where(np.isfinite(call.value), call.value, 0)))
        return run_steps(unsigned, self.steps)

    @cached_property
    def compares_gradients(self) -> bool:
        """Whether gradients are compared: not if a fault has already changed the output."""
        right = compute_expected(self.probe, DEFINITION).exact.output
        return self.probe.gradients and (self.steps is DEFINITION or _is_same(self.exact.output, right))

    def find_mismatch(self, result: AttentionResult) -> str:
        """Return how a result breaks the error rule; empty if it matches.

        Args:
            result: The result of the function.
        """
        exact, naive, size = self.exact, self.naive, self.magnitude
        common: dict[str, Any] = {"dtype": self.probe.call.dtype}
        try:
            assert_matches(
                result.output, exact.output, naive.output, magnitude=size.output, score_error=self.score_error,
                ordinary=self.probe.ordinary and not self.rounds_to_half, **common,
            )  # fmt: skip
            if result.weights is not None:
                assert exact.weights is not None, "weights: returned, but none expected"
                assert_matches(
                    result.weights, exact.weights, naive.weights, magnitude=size.weights,
                    score_error=self.score_error, what="weights", **common,
                )  # fmt: skip
            if self.compares_gradients:
                for name, *gradients in zip(
                    ("query", "key", "value"), result.gradients, exact.gradients, naive.gradients, strict=True
                ):
                    largest = np.max(np.abs(gradients[1]), initial=1, where=np.isfinite(gradients[1]))
                    assert_matches(
                        *gradients, magnitude=largest, factor=3.0, what=f"gradient of {name}", **common
                    )
        except AssertionError as error:
            return str(error)
        return ""


def _working_dtype(call: AttentionCall) -> Any:
    return np.float64 if call.dtype == "float64" else np.float32


@lru_cache(maxsize=4096)
def compute_expected(probe: ProbeCall, steps: Steps) -> ExpectedResult:
    """Compute the result of a function with some steps for a probe.

    Args:
        probe: The call.
        steps: The steps.

    Raises:
        StepsNotComputableError: If a function with these steps would raise an error.
    """
    call = probe.call
    # The definition is wider than the dtype it checks. A fault must overflow as the function does, in float64 at most.
    wide = np.longdouble if call.dtype == "float64" and steps is DEFINITION else np.float64
    rounds = steps.half_precision and call.dtype in HALF_DTYPES
    try:
        exact = run_steps(call, steps, np.float32 if rounds else wide, build_output_gradient(probe))
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise StepsNotComputableError(str(error)) from error
    if steps is DEFINITION:
        exact = _run_reference(call, wide)._replace(gradients=exact.gradients)
    return ExpectedResult(probe, steps, exact)


def _run_reference(call: AttentionCall, dtype: Any) -> AttentionResult:
    definition = reference.attention(
        call.query, call.key, call.value, mask=call.build_mask(), scale=call.scale, dtype=dtype
    )
    return AttentionResult(definition.output, definition.weights)


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two float64 results differ by rounding at most."""
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-10, atol=1e-10, equal_nan=True))


def matches(outcome: ProbeOutcome, steps: Steps) -> bool:
    """Return whether a function with these steps produces this outcome.

    An error of the function matches steps that cannot be computed.

    Args:
        outcome: The outcome of a probe.
        steps: The steps.
    """
    try:
        expected = compute_expected(outcome.probe, steps)
    except StepsNotComputableError:
        return outcome.result is None
    if outcome.result is None or not _roughly_matches(outcome.result.output, expected):
        return False
    return not expected.find_mismatch(outcome.result)


def _find_largest_error(actual: Any, exact: Any) -> float:
    """Return the largest error where both sides are finite; NaN if there is nothing to compare."""
    if actual.shape != exact.shape:
        return float("nan")
    with np.errstate(all="ignore"):
        errors = np.abs(actual.astype(np.float64) - exact.astype(np.float64))
    finite = errors[np.isfinite(errors)]
    return float(finite.max()) if finite.size else float("nan")


def changes(outcome: ProbeOutcome, steps: Steps, others: Steps) -> bool:
    """Return whether two functions have different results for a probe; no if one of them raises an error.

    Args:
        outcome: The outcome of a probe.
        steps: The steps of one function.
        others: The steps of the other.
    """
    try:
        expected, other = (compute_expected(outcome.probe, which) for which in (steps, others))
    except StepsNotComputableError:
        return False
    return bool(other.find_mismatch(expected.exact))


def _roughly_matches(output: Any, expected: ExpectedResult) -> bool:
    """Run a cheap check first, which every result within the error rule passes."""
    exact = expected.exact.output
    if output.shape != exact.shape:
        return False
    if expected.rounds_to_half:
        return True
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(output)):
        return False
    with np.errstate(all="ignore"):
        return bool((np.abs(output - exact)[finite] <= 0.1 * (1 + np.abs(exact[finite]))).all())
