"""Run the conformance kit on an attention function: from outcomes to causes, as a report or as single tests."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.findings import LINE_WIDTH, CheckRun, Finding, Findings
from regard.render.table import format_table
from regard.testing.conformance.attention_steps import (
    DEFINITION,
    Align,
    AttentionCall,
    AttentionResult,
    Steps,
)
from regard.testing.conformance.convention import CallingConvention
from regard.testing.conformance.known_faults import FAULTS, Fault
from regard.testing.conformance.presets import adapt_function, resolve_convention
from regard.testing.conformance.probes import (
    LARGE,
    NOT_FINITE,
    ProbeCall,
    ProbeOutcome,
    StepsNotComputableError,
    changes,
    compute_expected,
    generate_probes,
    matches,
    run_probe,
)


@dataclass(frozen=True)
class Capability:
    """One row of the report: whether a function handles one kind of call.

    Args:
        name: The name of the row.
        verdict: "yes", "no", "raises" if the failures are errors or wrong shapes, or "skipped".
        num_calls: The number of calls.
        max_error: The largest error of the output, where it is finite on both sides.
        reason: The numbers of its findings, or why it was skipped.

    >>> import regard
    >>> from regard.testing import check_conformance
    >>> report = check_conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> [row.verdict for row in report.capabilities][:3]
    ['no', 'no', 'no']
    """

    name: str
    verdict: str
    num_calls: int
    max_error: float
    reason: str


@dataclass(frozen=True)
class ConformanceReport:
    """The result of `check_conformance`.

    Args:
        function: The name of the function.
        convention: How it was called.
        size: "quick" or "full".
        capabilities: The rows of the table.
        findings: What is wrong, the finding that explains most first. Their evidence has the smallest input.

    >>> import regard
    >>> from regard.testing import check_conformance
    >>> report = check_conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> report.ok
    False
    """

    function: str
    convention: CallingConvention
    size: str
    capabilities: tuple[Capability, ...]
    findings: Findings

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def check(self) -> None:
        """Raise an AssertionError with the report, if there are findings."""
        if not self.ok:
            raise AssertionError(str(self))

    def __getitem__(self, capability: str) -> Capability:
        rows = {row.name: row for row in self.capabilities}
        if capability not in rows:
            raise ArgumentError(
                "ConformanceReport", received=f"the capability {capability!r}", expected=f"one of {'; '.join(rows)}",
                hint="The names are the rows of print(report).",
            )  # fmt: skip
        return rows[capability]

    def __str__(self) -> str:
        num_calls = sum(row.num_calls for row in self.capabilities)
        head = [
            f"{self.function}: {num_calls} calls, size {self.size}",
            *textwrap.wrap(str(self.convention), LINE_WIDTH, initial_indent="  ", subsequent_indent="  "),
            "",
        ]
        rows = [("capability", "", "calls", "max error", "")]
        rows += [
            (
                row.name, row.verdict, str(row.num_calls) if row.num_calls else "",
                f"{row.max_error:.1e}" if np.isfinite(row.max_error) else "", row.reason,
            )
            for row in self.capabilities
        ]  # fmt: skip
        head.append(format_table(rows, align="left", indent="  "))
        findings = [f"{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        return "\n\n".join(["\n".join(head), self.findings.summary, *findings])

    def to_json(self) -> str:
        """Return the report as JSON, for scripts."""
        record = {
            "function": self.function,
            "convention": {
                name: getattr(self.convention, name) for name in self.convention.__dataclass_fields__
            },
            "size": self.size,
            "ok": self.ok,
            "capabilities": [
                {**vars(row), "max_error": row.max_error if np.isfinite(row.max_error) else None}
                for row in self.capabilities
            ],
            "findings": [_to_record(finding) for finding in self.findings],
        }
        return json.dumps(record, indent=2, ensure_ascii=False)


def _to_record(finding: Finding) -> dict[str, Any]:
    evidence = {name: _to_plain(value) for name, value in finding.evidence.items()}
    arguments = {name: evidence[name] for name in ("query", "key", "value", "mask") if name in evidence}
    sizes = {"batch": 1, "heads": 1, **evidence["smallest input"]}
    return {
        "name": finding.kind, "severity": finding.severity, "message": finding.message, "hint": finding.hint,
        "if_intended": evidence.get("if intended", ""), "capabilities": evidence["capabilities"],
        "num_calls": evidence["calls"], "input": {**arguments, "kv_heads": sizes["heads"], **sizes},
        **{name.replace(" ", "_"): evidence[name] for name in evidence if name.startswith(("actual", "expected"))},
    }  # fmt: skip


def _to_plain(value: Any) -> Any:
    """Return a value with NaN and inf, which JSON does not have, as text."""
    if isinstance(value, list):
        return [_to_plain(x) for x in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def format_markdown(names: Sequence[str], reports: Sequence[ConformanceReport]) -> str:
    """Format reports side by side as a Markdown table, one row for each capability."""
    rows = dict.fromkeys(row.name for report in reports for row in report.capabilities)
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for name in rows:
        cells = [_format_cell(report[name]) for report in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_cell(row: Capability) -> str:
    if row.verdict == "skipped":
        return "·"
    error = f" {row.max_error:.0e}" if row.verdict == "yes" and np.isfinite(row.max_error) else ""
    reason = f" ({row.reason})" if row.verdict != "yes" and row.reason else ""
    return f"{row.verdict}{error}{reason}"


SCREENING_SIZE = 14  # wrong outcomes that each fault is first tried on
SHORTLIST_SIZE = 6  # faults that are then tried on every outcome
SMALL_ERROR = 1e-2  # below this, an error is rounding or an epsilon rather than another function


@dataclass(frozen=True, eq=False)
class FaultSet:
    """Faults, each with the index of its variant, and the steps that result from all of them."""

    faults: tuple[tuple[Fault, int], ...]
    steps: Steps

    def without(self, position: int) -> FaultSet:
        """Return the set without one fault."""
        return _combine_faults(self.faults[:position] + self.faults[position + 1 :])


def _combine_faults(faults: Sequence[tuple[Fault, int]]) -> FaultSet:
    steps = DEFINITION
    for fault, variant in faults:
        steps = replace(steps, **fault.variants[variant])
    return FaultSet(tuple(faults), steps)


def find_faults(outcomes: Sequence[ProbeOutcome]) -> FaultSet:
    """Find the fewest faults that explain the outcomes.

    A fault that explains a few results by coincidence is not the cause: if most of the ordinary results that it would
    change remain unexplained, the search is repeated without it.
    """
    ordinary = [o.result.output for o in outcomes if o.result is not None and o.probe.ordinary]
    if 2 * sum(bool(np.isnan(output).any()) for output in ordinary) > len(ordinary):
        return FaultSet((), DEFINITION)  # NaN matches too many faults
    excluded: set[tuple[Fault, int]] = set()
    while True:
        found = _search(outcomes, excluded)
        doubtful = [
            choice
            for position, choice in enumerate(found.faults)
            if not _is_likely(found.steps, found.without(position).steps, outcomes)
        ]
        if not doubtful:
            return found
        excluded.update(doubtful)


def _is_likely(steps: Steps, fewer: Steps, outcomes: Sequence[ProbeOutcome]) -> bool:
    """Return whether most of the ordinary results that `steps` change, compared with `fewer`, match them.

    A fault of NaN, inf and large numbers changes no ordinary results. Most ordinary results of the same kind of call
    must then match.
    """
    results = [o for o in outcomes if o.result is not None]
    ordinary = [o for o in results if o.probe.ordinary]
    compared = [o for o in ordinary if changes(o, steps, fewer)]
    explained = [set(o.probe.features) for o in filter(_explained_by(steps, fewer), results)]
    if explained and not compared:
        kind = set.intersection(*explained) - {NOT_FINITE, LARGE}
        compared = [o for o in ordinary if kind <= set(o.probe.features)]
    return not compared or 2 * _count_matches(compared, steps) > len(compared)


def _search(outcomes: Sequence[ProbeOutcome], excluded: Set[tuple[Fault, int]]) -> FaultSet:
    """Find the fewest faults that explain the outcomes, one by one, without those excluded.

    Each fault is the one with which most outcomes match, correct ones included: a fault that would have shown
    elsewhere, and did not, is not the cause.
    """
    found = FaultSet((), DEFINITION)
    num_matches = _count_matches(outcomes, DEFINITION)
    while num_matches < len(outcomes):
        # Faults are screened on results only: a fault that makes calls fail needs a result as evidence too.
        screening = _select_for_screening(outcomes, found.steps)
        candidates = []
        for fault in FAULTS:
            for variant in range(len(fault.variants)):
                is_excluded = (fault, variant) in excluded
                steps = None if is_excluded else fault.apply_to(found.steps, variant)
                hits = _count_matches(screening, steps) if steps is not None else 0
                if hits:
                    candidates.append((hits, (fault, variant)))
        candidates.sort(key=lambda pair: -pair[0])  # stable: the most common first
        best, best_matches = None, num_matches
        for _, choice in candidates[:SHORTLIST_SIZE]:
            candidate = _combine_faults((*found.faults, choice))
            count = _count_matches(outcomes, candidate.steps)
            if count > best_matches:
                best, best_matches = candidate, count
            if best_matches == len(outcomes):
                break
        if best is None:
            break
        found, num_matches = best, best_matches
    return _prune(found, outcomes)


def _prune(found: FaultSet, outcomes: Sequence[ProbeOutcome]) -> FaultSet:
    """Remove faults that a later one has made unnecessary."""
    num_matches = _count_matches(outcomes, found.steps)
    for position in reversed(range(len(found.faults))):
        fewer = found.without(position)
        if _count_matches(outcomes, fewer.steps) >= num_matches:
            found = fewer
    return found


def _count_matches(outcomes: Sequence[ProbeOutcome], steps: Steps) -> int:
    return sum(matches(outcome, steps) for outcome in outcomes)


def _select_for_screening(outcomes: Sequence[ProbeOutcome], steps: Steps) -> list[ProbeOutcome]:
    """Select a few wrong results, from as many capabilities as possible."""
    wrong = [o for o in outcomes if o.result is not None and not matches(o, steps)]
    first = {o.probe.capability: o for o in reversed(wrong)}.values()
    return [*reversed(first), *(o for o in wrong if all(o is not x for x in first))][:SCREENING_SIZE]


# -- Findings -------------------------------------------------------------------------------------------------


Run = Callable[[ProbeCall], ProbeOutcome]


def find_causes(run: Run, causal: Align | None, outcomes: Sequence[ProbeOutcome]) -> list[Finding]:
    """Return the findings, the one that explains most first; they cover every failed outcome.

    `run` calls the function, whose causal corner is `causal`.
    """
    nondeterminism = _detect_nondeterminism(run, outcomes)
    if nondeterminism is not None:
        return [nondeterminism]
    findings: list[Finding] = []
    changed = [o for o in outcomes if _has_changed_inputs(o)]
    if changed:
        message, hint = (
            "The arguments are changed in place.",
            "Work on a copy, because the caller still needs them.",
        )
        findings.append(_build_finding("arguments changed", message, hint, changed, run, _has_changed_inputs))
        # Expanded arrays cannot be written to, so their failures have the same cause.
        outcomes = [o for o in outcomes if o.probe.call.memory != "expanded"]
    found = find_faults(outcomes)
    other = "lower_right" if causal == "upper_left" else "upper_left"
    words = {"other": other.replace("_", " "), "other_name": other}
    words["expected"] = (causal or "lower_right").replace("_", " ")
    for position, (fault, variant) in enumerate(found.faults):
        is_evidence = _explained_by(found.steps, found.without(position).steps)
        # The clearest evidence involves no other fault.
        is_clear_evidence = _explained_by(_combine_faults([(fault, variant)]).steps, DEFINITION)
        evidence = [o for o in outcomes if is_evidence(o)]
        shows = is_clear_evidence if any(map(is_clear_evidence, evidence)) else is_evidence
        message, if_intended = (text.format(**words) for text in (fault.message, fault.if_intended))
        findings.append(_build_finding(fault.name, message, fault.hint, evidence, run, shows, if_intended))
    failed = [o for o in outcomes if not matches(o, found.steps) and not matches(o, DEFINITION)]
    # For NaN, inf and large numbers the result of a fault depends on details that the kit does not model.
    remaining = [o for o in failed if o.probe.ordinary or not changes(o, found.steps, DEFINITION)]
    findings += _describe_failures([o for o in remaining if o.failure], len(outcomes), run)
    unexplained = [o for o in remaining if not o.failure]
    findings += _describe_unexplained(unexplained, outcomes, found.steps, run)
    return findings


def _explained_by(steps: Steps, fewer: Steps) -> Callable[[ProbeOutcome], bool]:
    """Return a test for outcomes that match `steps` but not `fewer`."""
    return lambda outcome: matches(outcome, steps) and not matches(outcome, fewer)


def _has_changed_inputs(outcome: ProbeOutcome) -> bool:
    return outcome.result is not None and outcome.result.inputs_changed


def _detect_nondeterminism(run: Run, outcomes: Sequence[ProbeOutcome]) -> Finding | None:
    """Return a finding if repeated calls differ; nothing else can then be said about the function."""

    def varies(outcome: ProbeOutcome) -> bool:
        repeated = run(outcome.probe).result
        if outcome.result is None or repeated is None or repeated.output.shape != outcome.result.output.shape:
            return (outcome.result is None) != (repeated is None)
        return not np.allclose(repeated.output, outcome.result.output, rtol=1e-3, atol=1e-3, equal_nan=True)

    basic = ("plain", "heads and batch", "q_len ≠ kv_len")
    varying = [o for o in outcomes if o.probe.capability in basic and varies(o)]
    if not varying:
        return None
    return _build_finding(
        "nondeterministic", "Repeated calls return different results: dropout or another random step is active.",
        "Disable dropout outside training.", varying, run, varies,
    )  # fmt: skip


def _describe_failures(failed: list[ProbeOutcome], num_calls: int, run: Run) -> Iterator[Finding]:
    """Yield one finding for each error message, numbers in it ignored."""
    groups: dict[str, list[ProbeOutcome]] = {}
    for outcome in failed:
        groups.setdefault(re.sub(r"\d+", "…", outcome.failure), []).append(outcome)
    for group in groups.values():
        kind = group[0].failure.split(":")[0]
        names = _list_capabilities(group)
        shortened = "; ".join(names[:4]) + ("; …" if len(names) > 4 else "")
        where = shortened if len(group) < num_calls else "every call"

        def shows(outcome: ProbeOutcome, kind: str = kind) -> bool:
            return outcome.failure.split(":")[0] == kind

        yield _build_finding(
            "failed", f"For {where}: {group[0].failure}", "Call it with the smallest input below.",
            group, run, shows,
            f"If the function does not support it, declare it: unsupported={names!r}."
            if len(names) <= 4
            else "Check how the function is described: layout, library, and names of arguments.",
        )  # fmt: skip


def _describe_unexplained(
    unexplained: list[ProbeOutcome], outcomes: Sequence[ProbeOutcome], steps: Steps, run: Run
) -> Iterator[Finding]:
    """Yield findings without a known fault, one for what the smallest failing call has and no passing call has."""

    def shows(outcome: ProbeOutcome) -> bool:
        return not (outcome.failure or matches(outcome, steps) or matches(outcome, DEFINITION))

    # A correct result that is empty or NaN is no evidence: it could not have been wrong.
    correct = [o for o in outcomes if matches(o, steps) or matches(o, DEFINITION)]
    correct = [o for o in correct if o.result is not None and np.isfinite(o.result.output).all()]
    passing = [set(o.probe.features) for o in correct if o.result is not None and o.result.output.size]
    while unexplained:
        simplest = min(unexplained, key=_simplicity)
        smallest = shrink(simplest.probe, lambda candidate: shows(run(candidate)))
        features = _find_cause(simplest.probe, smallest, passing)
        group = [o for o in unexplained if features.keys() <= set(o.probe.features)]
        num_passing = sum(features.keys() <= other for other in passing)
        if num_passing:
            where = f"in {len(group)} of {len(group) + num_passing} calls"
            where += f" with {' and '.join(features)}" if features else ""
        else:
            where = f"for {' and '.join(features)}" if features else "in every call"
        typical = [o for o in group if o.probe.ordinary] or group
        error = max(filter(np.isfinite, (x for o in typical for x in o.list_errors())), default=np.nan)
        by = f", by up to {error:.2g}" if np.isfinite(error) else ""
        hint = "Compare the actual and expected results of the smallest input below."
        if error < SMALL_ERROR and any(o.has_other_nan for o in typical):
            by = ", with NaN or inf in different places"
        elif error < SMALL_ERROR:
            hint += " The error is small: compute in the dtype of the arguments, and add no epsilon to the denominator."
        message = (
            f"The result differs from the definition {where}{by}. This fault is not among the known ones."
        )
        yield _build_finding("unknown", message, hint, group, run, shows)
        unexplained = [o for o in unexplained if not any(o is explained for explained in group)]


def _find_cause(probe: ProbeCall, smallest: ProbeCall, passing: Sequence[Set[str]]) -> dict[str, None]:
    """Return the fewest features of a failing call that no passing call has together, in order.

    Only features that are left in its smallest input count. If passing calls have all of them, the one that the fewest
    passing calls have is returned, but not the dtype, which is never shrunk.
    """
    features = dict.fromkeys(feature for feature in probe.features if feature in smallest.features)
    if any(features.keys() <= other for other in passing):
        candidates = [feature for feature in features if feature != probe.call.dtype]
        return dict.fromkeys(sorted(candidates, key=lambda x: sum(x in other for other in passing))[:1])
    for feature in tuple(features):
        if not any(features.keys() - {feature} <= other for other in passing):
            del features[feature]
    return features


def _list_capabilities(outcomes: Sequence[ProbeOutcome]) -> list[str]:
    return list(dict.fromkeys(o.probe.capability for o in outcomes))


def _build_finding(
    name: str,
    message: str,
    hint: str,
    outcomes: list[ProbeOutcome],
    run: Run,
    shows: Callable[[ProbeOutcome], bool],
    if_intended: str = "",
) -> Finding:
    """Build a finding about some outcomes, with the smallest input that shows it as evidence."""
    # A function that is rarely wrong may be right now.
    simplest = min([o for o in outcomes if shows(o)] or outcomes, key=_simplicity)
    probe = shrink(simplest.probe, lambda candidate: shows(run(candidate)))
    outcome = run(probe)
    evidence = {
        **({"if intended": if_intended} if if_intended else {}),
        "calls": len(outcomes),
        "capabilities": _list_capabilities(outcomes),
        **_describe_call(probe.call),
        **_describe_result(outcome, compute_expected(probe, DEFINITION).exact),
    }
    return Finding(name, "error", message, evidence=evidence, hint=hint)


def _describe_call(call: AttentionCall) -> dict[str, Any]:
    """Return the arguments of a call as evidence, without options that are not set."""
    defaults = {"batch": 1, "heads": 1, "kv_heads": call.sizes["heads"]}
    sizes = {name: size for name, size in call.sizes.items() if defaults.get(name) != size}
    options = {"dtype": call.dtype, "causal": call.causal, "scale": call.scale, "memory": call.memory}
    given = {name: value for name, value in options.items() if value not in (None, "contiguous")}
    arrays = {name: getattr(call, name) for name in ("query", "key", "value", "mask")}
    lists = {name: _to_list(array) for name, array in arrays.items() if array is not None}
    return {"smallest input": sizes | given, **lists}


def _describe_result(outcome: ProbeOutcome, expected: AttentionResult) -> dict[str, Any]:
    """Return a result as evidence, with weights and gradients if the outputs do not show the difference."""
    result = outcome.result
    if result is None:
        return {"actual": outcome.failure, "expected": _to_list(expected.output)}
    pairs = [("", result.output, expected.output)]
    outputs_agree = result.output.shape == expected.output.shape and np.allclose(
        result.output.astype(float), expected.output.astype(float), rtol=1e-3, atol=1e-3, equal_nan=True
    )
    if outputs_agree and result.gradients is not None:
        names = ("gradient of query", "gradient of key", "gradient of value")
        pairs += zip(names, result.gradients, expected.gradients, strict=True)
    elif outputs_agree and result.weights is not None:
        pairs.append(("weights", result.weights, expected.weights))
    return {
        f"{side} {what}".strip(): _to_list(array)
        for what, *both in pairs
        for side, array in zip(("actual", "expected"), both, strict=True)
    }


def _to_list(array: Any) -> Any:
    """Convert an array to nested lists of Python numbers."""
    return array.astype(bool if array.dtype == bool else float).tolist()


def _simplicity(outcome: ProbeOutcome) -> tuple[bool, bool, int]:
    """Return a sort key: non-empty and ordinary inputs first, then small ones."""
    call = outcome.probe.call
    return 0 in call.sizes.values(), not outcome.probe.ordinary, call.query.size + call.key.size


# -- The smallest input ---------------------------------------------------------------------------------------


def shrink(probe: ProbeCall, shows: Callable[[ProbeCall], bool]) -> ProbeCall:
    """Shorten every axis and round every number of a probe as far as it still shows the finding."""

    def still_shows(candidate: ProbeCall) -> bool:
        try:
            return shows(candidate)
        except StepsNotComputableError:
            return False

    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simplify in _SIMPLIFICATIONS:
            simpler = next(filter(still_shows, simplify(probe)), None)
            if simpler is not None:
                probe, is_smaller = simpler, True
    return probe


def _shorten_axis(axis: str, probe: ProbeCall) -> Iterator[ProbeCall]:
    """Keep the first or the last entries of an axis, the fewest first."""
    call = probe.call
    length = call.sizes[axis]
    if axis == "heads" and length != call.sizes["kv_heads"]:
        return
    for count in range(1, length):
        yield replace(probe, call=call.slice_axis(axis, slice(0, count)))
        yield replace(probe, call=call.slice_axis(axis, slice(length - count, None)))


def _drop_options(probe: ProbeCall) -> Iterator[ProbeCall]:
    """Drop options that the finding may not need."""
    call = probe.call
    if call.mask is not None:
        yield replace(probe, call=replace(call, mask=None))
        if call.mask.ndim == 4 and call.mask.shape[:2] == (1, 1):
            yield replace(probe, call=replace(call, mask=call.mask[0, 0]))
    defaults: dict[str, Any] = {"causal": None, "scale": None, "memory": "contiguous"}
    for name, default in defaults.items():
        if getattr(call, name) != default:
            yield replace(probe, call=replace(call, **{name: default}))
    if probe.gradients:
        yield replace(probe, gradients=False)


def _round_to_integers(probe: ProbeCall) -> Iterator[ProbeCall]:
    """Replace the numbers by integers, away from zero."""
    call = probe.call
    arrays = {name: getattr(call, name) for name in ("query", "key", "value")}
    rounded = {name: np.sign(array) * np.ceil(np.abs(array)) for name, array in arrays.items()}
    if any(not np.array_equal(rounded[name], arrays[name], equal_nan=True) for name in arrays):
        yield replace(probe, call=replace(call, **rounded))


_SIMPLIFICATIONS: tuple[Callable[[ProbeCall], Iterator[ProbeCall]], ...] = (
    *(
        partial(_shorten_axis, axis)
        for axis in ("batch", "heads", "q_len", "kv_len", "head_dim", "value_dim")
    ),
    _drop_options,
    _round_to_integers,
)


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
    >>> for finding in check_conformance(attention, unsupported=["empty inputs"]).findings:
    ...     print(finding.message)
    The scale is missing.
    Empty rows are NaN.
    A masked NaN leaks from the value: 0 · NaN is NaN.
    """
    fn, convention = _resolve(fn, convention, fields)
    outcomes = [_run_supported(fn, convention, probe) for probe in _generate_probes(convention, size)]
    relevant = [o for o in outcomes if not o.skip_reason and o.probe.capability not in convention.unsupported]
    name = str(getattr(fn, "__name__", type(fn).__name__))
    causes = find_causes(partial(run_probe, fn, convention), convention.causal, relevant)
    causes = [replace(cause, module=name) for cause in causes]
    rows = tuple(
        _build_row(group, causes, convention.unsupported) for group in _group_by_capability(outcomes)
    )
    checks = [CheckRun(row.name, row.reason if row.verdict == "skipped" else "") for row in rows]
    findings = Findings(causes, f"{sum(row.num_calls for row in rows)} calls", checks)
    return ConformanceReport(name, convention, size, rows, findings)


@dataclass(frozen=True, eq=False)
class ConformanceTest:
    """One probe as a test: `test.check(fn)` passes, or raises an error that names the fault.

    Args:
        probe: The call.
        convention: How the function is called.
        size: "quick" or "full": the kit that a failure runs.

    >>> import regard
    >>> from regard.testing import generate_tests
    >>> test = generate_tests(mask=None)[0]
    >>> print(test)
    plain: two keys
    >>> test.check(lambda q, k, v: regard.attention(q, k) @ v)
    """

    probe: ProbeCall
    convention: CallingConvention
    size: str = "quick"

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
        report = _cached_report(fn, self.convention, self.size)
        relevant = [f for f in report.findings if self.probe.capability in f.evidence["capabilities"]]
        raise AssertionError(
            "\n".join([f"{report.function}, {self}", *(str(f) for f in relevant or report.findings)])
        )


@lru_cache(maxsize=4)
def _cached_report(fn: Callable[..., Any], convention: CallingConvention, size: str) -> ConformanceReport:
    return check_conformance(fn, convention, size=size)


def generate_tests(
    convention: CallingConvention | str | None = None, *, size: str = "quick", **fields: Any
) -> list[ConformanceTest]:
    """Generate one test for each probe that a function of this convention can be called with.

    Args:
        convention: A `CallingConvention`, or the name of a preset. Default: the default `CallingConvention`.
        size: "quick", or "full" to add larger lengths and random cases.
        **fields: Fields of `CallingConvention` that replace those of `convention`.

    Raises:
        ArgumentError: If the size, the name of the convention or a field is unknown.

    >>> import pytest
    >>> from regard.testing import generate_tests
    >>> @pytest.mark.parametrize("test", generate_tests(layout="n d"), ids=str)
    ... def test_my_attention(test):
    ...     test.check(my_attention)
    """
    _, convention = _resolve(None, convention, fields)
    return [
        ConformanceTest(probe, convention, size)
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
    if size not in SIZES:
        raise ArgumentError(
            "check_conformance",
            received=f"size {size!r}",
            expected='"quick" or "full"',
            hint="The default is quick.",
        )
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
