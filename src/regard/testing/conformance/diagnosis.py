"""From outcomes to causes: the fewest faults that reproduce what a function answers, and the smallest input of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from regard.testing.conformance.attention_call import Call
from regard.testing.conformance.attention_steps import DEFINITION, Answer, Steps
from regard.testing.conformance.compare import Impossible, Outcome, agrees, ask, disturbs, expected
from regard.testing.conformance.convention import Convention
from regard.testing.conformance.known_faults import FAULTS, Fault
from regard.testing.conformance.questions import Question

SCREENED = 14  # wrong answers that a fault is first tried on
PROMISING = 6  # faults then tried on every question


@dataclass(frozen=True, eq=False)
class Finding:
    """One cause in words, what to change, where it shows, and the smallest input that shows it.

    `meant` is what to tell the kit, rather, if the function is so on purpose.

    >>> import regard
    >>> from regard.testing import conformance
    >>> report = conformance(lambda q, k, v: regard.attention(q, k, scale=1.0) @ v, mask=None)
    >>> report.findings[0].name
    'scale missing'
    """

    name: str
    words: str
    hint: str
    capabilities: tuple[str, ...]
    count: int
    call: Call
    came: Answer | str
    expected: Answer
    meant: str = ""

    def __str__(self) -> str:
        from regard.testing.conformance.report import told

        return "\n".join(told(self))


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Faults, each as the variant that was found, and the steps they amount to together."""

    faults: tuple[tuple[Fault, int], ...]
    steps: Steps

    def without(self, position: int) -> Diagnosis:
        """The same without one fault."""
        kept = self.faults[:position] + self.faults[position + 1 :]
        return _together(kept)


def _together(faults: Sequence[tuple[Fault, int]]) -> Diagnosis:
    steps = DEFINITION
    for fault, variant in faults:
        steps = replace(steps, **fault.variants[variant])
    return Diagnosis(tuple(faults), steps)


def diagnose(outcomes: Sequence[Outcome]) -> Diagnosis:
    """The fewest faults under which the outcomes are what was to be expected, found one by one.

    Each is the one that makes most outcomes agree, those that were right included: a fault that would have shown
    elsewhere, and did not, is not the cause.
    """
    found = Diagnosis((), DEFINITION)
    right = _count(outcomes, DEFINITION)
    while right < len(outcomes):
        # A fault that makes some calls impossible explains why they raise, but only if an answer speaks for it too.
        screen = _screen(outcomes, found.steps)
        tried = []
        for fault in FAULTS:
            for variant in range(len(fault.variants)):
                steps = fault.applied_to(found.steps, variant)
                hits = _count(screen, steps) if steps is not None else 0
                if hits:
                    tried.append((hits, (fault, variant)))
        tried.sort(key=lambda pair: -pair[0])  # stable: the commonest first
        best, better = None, right
        for _, choice in tried[:PROMISING]:
            candidate = _together((*found.faults, choice))
            count = _count(outcomes, candidate.steps)
            if count > better:
                best, better = candidate, count
            if better == len(outcomes):
                break
        if best is None:
            break
        found, right = best, better
    return _pruned(found, outcomes)


def _pruned(found: Diagnosis, outcomes: Sequence[Outcome]) -> Diagnosis:
    """Without the faults that a later one made needless."""
    right = _count(outcomes, found.steps)
    for position in reversed(range(len(found.faults))):
        fewer = found.without(position)
        if _count(outcomes, fewer.steps) >= right:
            found = fewer
    return found


def _count(outcomes: Sequence[Outcome], steps: Steps) -> int:
    return sum(agrees(outcome, steps) for outcome in outcomes)


def _screen(outcomes: Sequence[Outcome], steps: Steps) -> list[Outcome]:
    """A few wrong answers, as many capabilities among them as there are."""
    wrong = [o for o in outcomes if o.answer is not None and not agrees(o, steps)]
    first = {o.question.capability: o for o in reversed(wrong)}.values()
    return [*reversed(first), *(o for o in wrong if all(o is not x for x in first))][:SCREENED]


# -- findings -----------------------------------------------------------------------------------------------


def findings(fn: Callable[..., Any], convention: Convention, outcomes: Sequence[Outcome]) -> list[Finding]:
    """Every finding, the one that explains most first; each failing outcome belongs to at least one."""
    chance = _chance(fn, convention, outcomes)
    if chance is not None:
        return [chance]
    found: list[Finding] = []
    changed = [o for o in outcomes if o.answer is not None and o.answer.changed]
    if changed:
        words, hint = "the arguments are changed in place", "Work on a copy: the caller still needs them."
        found.append(_finding("arguments changed", words, hint, changed, fn, convention, _is_changed))
        # Entries that share their memory cannot be written to: what comes of that is the same fault.
        outcomes = [o for o in outcomes if o.question.call.memory != "expanded"]
    diagnosis = diagnose(outcomes)
    for position, choice in enumerate(diagnosis.faults):
        shows = _shows(diagnosis.steps, diagnosis.without(position).steps)
        alone = _shows(_together([choice]).steps, DEFINITION)  # the clearest: no other fault has a part in it
        shown = [o for o in outcomes if shows(o)]
        clear = alone if any(map(alone, shown)) else shows
        fault, _ = choice
        found.append(_finding(fault.name, fault.words, fault.hint, shown, fn, convention, clear, fault.meant))
    failing = [o for o in outcomes if not agrees(o, diagnosis.steps) and not agrees(o, DEFINITION)]
    left = [o for o in failing if not disturbs(o, diagnosis.steps)]
    found += _refusals([o for o in left if o.raised], len(outcomes), fn, convention)
    found += _unexplained([o for o in left if not o.raised], outcomes, diagnosis.steps, fn, convention)
    return found


def _shows(steps: Steps, fewer: Steps) -> Callable[[Outcome], bool]:
    return lambda outcome: agrees(outcome, steps) and not agrees(outcome, fewer)


def _is_changed(outcome: Outcome) -> bool:
    return outcome.answer is not None and outcome.answer.changed


def _chance(fn: Callable[..., Any], convention: Convention, outcomes: Sequence[Outcome]) -> Finding | None:
    """A function that answers the same call differently each time has nothing else that could be said of it."""

    def varies(outcome: Outcome) -> bool:
        again = ask(fn, convention, outcome.question).answer
        if outcome.answer is None or again is None or again.output.shape != outcome.answer.output.shape:
            return (outcome.answer is None) != (again is None)
        return not np.allclose(again.output, outcome.answer.output, rtol=1e-3, atol=1e-3, equal_nan=True)

    asked = [o for o in outcomes if o.question.capability in ("plain", "heads and batch", "q_len ≠ kv_len")]
    if not (varying := [outcome for outcome in asked if varies(outcome)]):
        return None
    return _finding(
        "chance", "the same call gives another result each time: dropout, or another source of chance, is active",
        "Switch dropout off unless training.", varying, fn, convention, varies,
    )  # fmt: skip


def _refusals(
    refused: list[Outcome], asked: int, fn: Callable[..., Any], convention: Convention
) -> Iterator[Finding]:
    """One finding for each message, sizes left out of it."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in refused:
        groups.setdefault(re.sub(r"\d+", "…", outcome.raised), []).append(outcome)
    for group in groups.values():
        kind = group[0].raised.split(":")[0]
        names = _capabilities(group)
        some = "; ".join(names[:4]) + ("; …" if len(names) > 4 else "")
        where = some if len(group) < asked else "every call"

        def shows(outcome: Outcome, kind: str = kind) -> bool:
            return outcome.raised.split(":")[0] == kind

        yield _finding(
            "refused", f"for {where}: {group[0].raised}", "Call it with the smallest input below.",
            group, fn, convention, shows,
            f"If that is meant, say so: without={names!r}."
            if len(names) <= 4
            else "Check the description of the function: its layout, library, and the names of its arguments.",
        )  # fmt: skip


def _unexplained(
    left: list[Outcome],
    outcomes: Sequence[Outcome],
    steps: Steps,
    fn: Callable[..., Any],
    convention: Convention,
) -> Iterator[Finding]:
    """What no known fault explains, one finding for what the failing calls have in common and the others have not."""

    def shows(outcome: Outcome) -> bool:
        return not (outcome.raised or agrees(outcome, steps) or agrees(outcome, DEFINITION))

    # A right answer that is empty, or NaN, could not have been wrong.
    telling = [o for o in outcomes if agrees(o, steps) or agrees(o, DEFINITION)]
    telling = [o for o in telling if o.answer is not None and np.isfinite(o.answer.output).all()]
    passing = [o.question.uses for o in telling if o.answer is not None and o.answer.output.size]
    while left:
        uses = sorted({use for o in left for use in o.question.uses})  # the same words in every process
        common = {use: [o for o in left if use in o.question.uses] for use in uses}
        clean = {use: group for use, group in common.items() if not any(use in uses for uses in passing)}
        choice = clean or {left[0].question.capability: common[left[0].question.capability]}
        what, group = max(choice.items(), key=lambda item: (len(item[1]), item[0] == "every call"))
        errors = [o.error for o in group if np.isfinite(o.error)]
        by = f", by up to {max(errors):.2g}" if errors else ""
        where = "in every call" if what == "every call" else f"for {what}"
        yield _finding(
            "unknown", f"differs from the definition {where}{by}, in a way the kit has no name for",
            "The smallest input below shows what came and what was expected.", group, fn, convention, shows,
        )  # fmt: skip
        left = [o for o in left if not any(o is explained for explained in group)]


def _capabilities(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o.question.capability for o in outcomes))


def _finding(
    name: str, words: str, hint: str, outcomes: list[Outcome], fn: Callable[..., Any], convention: Convention,
    shows: Callable[[Outcome], bool], meant: str = "",
) -> Finding:  # fmt: skip
    smallest = min(filter(shows, outcomes), key=_simplicity)
    question = shrink(smallest.question, lambda q: shows(ask(fn, convention, q)))
    outcome = ask(fn, convention, question)
    asked = convention.causal or "lower_right"
    other = "upper_left" if asked == "lower_right" else "lower_right"
    corner = {"asked": asked.replace("_", " "), "other": other.replace("_", " "), "other_name": other}
    if name == "causal corner":
        words, meant = words.format(**corner), meant.format(**corner)
    return Finding(
        name, words, hint, _capabilities(outcomes), len(outcomes), question.call,
        outcome.raised if outcome.answer is None else outcome.answer, expected(question, DEFINITION).exact, meant,
    )  # fmt: skip


def _simplicity(outcome: Outcome) -> tuple[bool, int]:
    """Small, and not of size zero where something else shows it too."""
    call = outcome.question.call
    return 0 in call.sizes.values(), call.query.size + call.key.size


# -- the smallest input -------------------------------------------------------------------------------------


def shrink(question: Question, shows: Callable[[Question], bool]) -> Question:
    """The question with every axis cut, and every number rounded, as far as it still shows the finding."""

    def still(candidate: Question) -> bool:
        try:
            return shows(candidate)
        except Impossible:
            return False

    smaller = True
    while smaller:
        smaller = False
        for simpler in _SIMPLER:
            found = next(filter(still, simpler(question)), None)
            if found is not None:
                question, smaller = found, True
    return question


def _cut(axis: str, question: Question) -> Iterator[Question]:
    """The first or the last entries of an axis, the fewest first."""
    call = question.call
    length = call.sizes[axis]
    if axis == "heads" and length != call.sizes["kv_heads"]:
        return
    for count in range(1, length):
        yield replace(question, call=call.take(axis, slice(0, count)))
        yield replace(question, call=call.take(axis, slice(length - count, None)))


def _plainer(question: Question) -> Iterator[Question]:
    """Without what the finding may not need."""
    call = question.call
    if call.mask is not None:
        yield replace(question, call=replace(call, mask=None))
        if call.mask.ndim == 4 and call.mask.shape[:2] == (1, 1):
            yield replace(question, call=replace(call, mask=call.mask[0, 0]))
    if call.memory != "contiguous":
        yield replace(question, call=replace(call, memory="contiguous"))


def _whole(question: Question) -> Iterator[Question]:
    """With whole numbers."""
    call = question.call
    arrays = {name: getattr(call, name) for name in ("query", "key", "value")}
    whole = {name: np.sign(array) * np.ceil(np.abs(array)) for name, array in arrays.items()}
    if any(not np.array_equal(whole[name], arrays[name], equal_nan=True) for name in arrays):
        yield replace(question, call=replace(call, **whole))


_SIMPLER: tuple[Callable[[Question], Iterator[Question]], ...] = (
    *(partial(_cut, axis) for axis in ("batch", "heads", "q_len", "kv_len", "head_dim", "value_dim")),
    _plainer,
    _whole,
)
