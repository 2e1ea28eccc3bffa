"""Run the conformance kit on an attention function, as a report or as single tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.findings import CheckRun, Finding, Findings
from regard.testing.conformance.attention_steps import DEFINITION
from regard.testing.conformance.compare import ProbeOutcome, matches, run_probe
from regard.testing.conformance.convention import CallingConvention
from regard.testing.conformance.diagnosis import find_causes, function_name
from regard.testing.conformance.presets import adapt_function, resolve_convention
from regard.testing.conformance.probe_calls import ProbeCall, generate_probes
from regard.testing.conformance.report import Capability, ConformanceReport

SIZES = ("quick", "full")


def check_conformance(
    fn: Callable[..., Any],
    convention: CallingConvention | str | None = None,
    *,
    size: str = "quick",
    **fields: Any,
) -> ConformanceReport:
    """Check what an attention function does with masks, dtypes, lengths and NaN, and name what is wrong.

    Args:
        fn: The function, called as `fn(query, key, value, …)`.
        convention: How it is called: a `CallingConvention`, or the name of a preset such as "torch". Default: known
            functions have a preset, others are described by their signature.
        size: "quick", or "full" to add larger lengths and random cases.
        **fields: Fields of `CallingConvention` that replace those of `convention`: `layout="b n h d", mask="drop"`.

    Returns:
        The report. `report.ok` is True if there are no findings.

    Raises:
        ArgumentError: If the size, the name of the convention or a field is unknown.
        ArgumentTypeError: If `fn` is not callable.

    >>> import numpy as np
    >>> from regard.testing import check_conformance
    >>> def attention(Q, K, V, mask=None):
    ...     scores = Q @ K.swapaxes(-1, -2)
    ...     if mask is not None:
    ...         scores = np.where(mask, scores, -np.inf)
    ...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ V
    >>> for finding in check_conformance(attention, unsupported=["no query, key or batch"]).findings:
    ...     print(finding.message)
    The scale is missing.
    Empty rows are NaN.
    A masked NaN leaks from the value: it is multiplied by a weight of 0.
    """
    if size not in SIZES:
        raise ArgumentError(
            "check_conformance",
            received=f"size {size!r}",
            expected='"quick" or "full"',
            hint="The default is quick.",
        )
    fn, convention = _resolve(fn, convention, fields)
    outcomes = [_run_supported(fn, convention, probe) for probe in _generate_probes(convention, size)]
    relevant = [o for o in outcomes if not o.skip_reason and o.probe.capability not in convention.unsupported]
    causes = find_causes(fn, convention, relevant)
    rows = tuple(
        _build_row(group, causes, convention.unsupported) for group in _group_by_capability(outcomes)
    )
    checks = [CheckRun(row.name, row.reason if row.verdict == "skipped" else "") for row in rows]
    findings = Findings(causes, f"{sum(row.num_calls for row in rows)} calls", checks)
    return ConformanceReport(function_name(fn), convention, size, rows, findings)


@dataclass(frozen=True, eq=False)
class ConformanceTest:
    """One probe as a test: `test.check(fn)` passes, or raises an error that names the fault.

    Args:
        probe: The call.
        convention: How the function is called.

    >>> import regard
    >>> from regard.testing import generate_tests
    >>> test = generate_tests(mask=None)[0]
    >>> print(test)
    plain: two keys
    >>> test.check(lambda q, k, v: regard.attention(q, k) @ v)
    """

    probe: ProbeCall
    convention: CallingConvention

    def __str__(self) -> str:
        return str(self.probe)

    def check(self, fn: Callable[..., Any]) -> None:
        """Compare the result of a function with the definition.

        One call does not reveal the cause, so the first failure runs the whole kit on the function, once.

        Args:
            fn: The attention function.

        Raises:
            AssertionError: If the result differs. The message lists the findings, with the smallest input of each.
        """
        if matches(run_probe(adapt_function(fn), self.convention, self.probe), DEFINITION):
            return
        report = _cached_report(fn, self.convention)
        relevant = [f for f in report.findings if self.probe.capability in f.evidence["capabilities"]]
        raise AssertionError(
            "\n".join([f"{report.function}, {self}", *(str(f) for f in relevant or report.findings)])
        )


@lru_cache(maxsize=4)
def _cached_report(fn: Callable[..., Any], convention: CallingConvention) -> ConformanceReport:
    return check_conformance(fn, convention)


def generate_tests(
    convention: CallingConvention | str | None = None, *, size: str = "quick", **fields: Any
) -> list[ConformanceTest]:
    """Generate one test for each probe that a function of this convention can be called with.

    Args:
        convention: A `CallingConvention`, or the name of a preset. Default: the default `CallingConvention`.
        size: "quick", or "full" to add larger lengths and random cases.
        **fields: Fields of `CallingConvention` that replace those of `convention`.

    >>> import pytest
    >>> from regard.testing import generate_tests
    >>> @pytest.mark.parametrize("test", generate_tests(layout="n d"), ids=str)
    ... def test_my_attention(test):
    ...     test.check(my_attention)
    """
    _, convention = _resolve(None, convention, fields)
    return [
        ConformanceTest(probe, convention)
        for probe in _generate_probes(convention, size)
        if not convention.find_obstacle(probe.call, probe.gradients)
        and not {probe.capability, *probe.required} & set(convention.unsupported)
    ]


def _run_supported(fn: Callable[..., Any], convention: CallingConvention, probe: ProbeCall) -> ProbeOutcome:
    """Run a probe, unless it needs another capability that is declared unsupported."""
    declared = [name for name in convention.unsupported if name in probe.required]
    if declared:
        return ProbeOutcome(probe, skip_reason=f"{declared[0]} is declared unsupported")
    return run_probe(fn, convention, probe)


def _generate_probes(convention: CallingConvention, size: str) -> Sequence[ProbeCall]:
    dtypes = convention.dtypes or convention.array_library.dtypes
    default = convention.array_library.dtype
    return list(generate_probes(default if default in dtypes else dtypes[0], convention.causal, size))


def _resolve(
    fn: Any, convention: CallingConvention | str | None, fields: dict[str, Any]
) -> tuple[Any, CallingConvention]:
    """Return the function as the kit calls it, and its convention."""
    if fn is not None and not callable(fn):
        raise ArgumentTypeError(
            "check_conformance", received=describe_argument(fn),
            expected="an attention function fn(query, key, value, …)",
            hint="Pass the function itself, not its result.",
        )  # fmt: skip
    known_fields = CallingConvention.__dataclass_fields__
    unknown = sorted(fields.keys() - known_fields.keys())
    if unknown:
        raise ArgumentError(
            "check_conformance", received=f"{unknown[0]}=", expected=f"one of {', '.join(known_fields)}",
            hint="They are the fields of regard.testing.CallingConvention.",
        )  # fmt: skip
    if isinstance(convention, CallingConvention):
        return adapt_function(fn), replace(convention, **fields)
    return resolve_convention(fn, convention, fields)


def _group_by_capability(outcomes: Sequence[ProbeOutcome]) -> list[list[ProbeOutcome]]:
    groups: dict[str, list[ProbeOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.probe.capability, []).append(outcome)
    return list(groups.values())


def _build_row(
    group: list[ProbeOutcome], findings: Sequence[Finding], unsupported: Sequence[str]
) -> Capability:
    name = group[0].probe.capability
    run = [outcome for outcome in group if not outcome.skip_reason]
    if not run:
        return Capability(name, "skipped", 0, float("nan"), group[0].skip_reason)
    errors = [outcome.max_error for outcome in run]
    max_error = max((error for error in errors if np.isfinite(error)), default=float("nan"))
    wrong = [outcome for outcome in run if not matches(outcome, DEFINITION)]
    if not wrong:
        return Capability(name, "yes", len(run), max_error, "")
    numbers = [str(n) for n, finding in enumerate(findings, 1) if name in finding.evidence["capabilities"]]
    if numbers:
        reason = f"finding {', '.join(numbers)}"
    else:
        reason = "declared unsupported" if name in unsupported else "a consequence of the findings"
    verdict = "raises" if all(outcome.failure for outcome in wrong) else "no"
    return Capability(name, verdict, len(run), max_error, reason)
