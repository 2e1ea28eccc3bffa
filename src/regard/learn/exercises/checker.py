"""The checker of all exercises: parse the answer, find the first wrong part, and the mistake that explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regard.errors import describe_argument
from regard.learn.exercises.answer_types import InvalidAnswerError
from regard.learn.exercises.exercise import (
    CheckResult,
    Exercise,
    ExercisePart,
    Mistake,
    format_arguments,
    wrap,
)

ParsedAnswer = dict[str, list[Any]]  # by part: one value for each call


def check_answer(exercise: Exercise, answer: Any) -> CheckResult:
    """Check an answer, and choose the hint that fits the first wrong part."""
    expected = exercise.solve()
    try:
        parsed = _parse_answer(exercise, answer, expected)
    except InvalidAnswerError as error:
        return _report_problem(exercise, str(error), [])
    parts = [part for part in exercise.parts if part.name in parsed]
    correct = [part for part in parts if part.matches(parsed[part.name], expected[part.name])]
    wrong = [part for part in parts if part not in correct]
    if wrong:
        first = wrong[0]
        hint = _find_hint(exercise, first, parsed, expected)
        hint = hint or _describe_difference(first, parsed[first.name], expected[first.name])
        return _report_problem(exercise, f"{first.name}: {hint}", correct)
    missing = [part for part in exercise.parts if part.name not in parsed]
    if missing:
        part = missing[0]
        hint = f"Still missing is {part.name}: {part.question} [{part.format}]"
        return _report_problem(exercise, hint, correct)
    number = exercise.title.partition(".")[0].split()[-1]
    solution = f"exercises.solution({number}), or regard exercise {number} --solution"
    message = f"{exercise.title}: right. One way to solve it: {solution}"
    return CheckResult(True, "", message, tuple(part.name for part in exercise.parts))


def _parse_answer(exercise: Exercise, answer: Any, expected: Mapping[str, Any]) -> ParsedAnswer:
    """Parse the parts of an answer.

    A dict names its parts, a tuple has all parts in order, and any other value is one part. A part that is `...` is
    skipped.
    """
    parts = {part.name: part for part in exercise.parts}
    if isinstance(answer, tuple) and len(answer) == len(parts) > 1:
        answer = dict(zip(parts, answer, strict=True))
    if not isinstance(answer, Mapping):
        return _parse_unnamed_value(exercise, answer, expected)
    unknown = [name for name in answer if name not in parts]
    if unknown or not answer:
        problem = f"There is no part {unknown[0]!r}" if unknown else "The dict is empty"
        raise InvalidAnswerError(f"{problem}. The parts are {', '.join(parts)}.")
    parsed: ParsedAnswer = {}
    for name, part in parts.items():
        if answer.get(name, ...) is not ...:
            try:
                parsed[name] = part.parse(answer[name])
            except InvalidAnswerError as error:
                raise InvalidAnswerError(f"{name}: {error} [{part.format}]") from None
    return parsed


def _parse_unnamed_value(exercise: Exercise, value: Any, expected: Mapping[str, Any]) -> ParsedAnswer:
    """Parse a value as the part it is correct for, else as a part with a mistake that explains it, else the first."""
    parsed: ParsedAnswer = {}
    problems: list[str] = []
    for part in exercise.parts:
        try:
            parsed[part.name] = part.parse(value)
        except InvalidAnswerError as error:
            problems.append(f"As {part.name}: {error} [{part.format}]")
    if not parsed:
        names = ", ".join(part.name for part in exercise.parts)
        raise InvalidAnswerError(
            f"Expected a dict with {names}, got {describe_argument(value)}. {problems[0]}"
        )
    parts = [part for part in exercise.parts if part.name in parsed]
    candidates = [part for part in parts if part.matches(parsed[part.name], expected[part.name])]
    candidates += [
        part for part in parts if _find_hint(exercise, part, {part.name: parsed[part.name]}, expected)
    ]
    name = (candidates or parts)[0].name
    return {name: parsed[name]}


def _find_hint(
    exercise: Exercise, first_wrong: ExercisePart, parsed: ParsedAnswer, expected: Mapping[str, Any]
) -> str:
    """Find the hint of the mistake that explains the first wrong part, and most of the other parts; "" if none does."""

    def score(mistake: Mistake) -> int:
        """Count the parts that the mistake explains, minus those it predicts wrongly."""
        parts = [part for part in exercise.parts if part.name in parsed and part.name in mistake.answer]
        return sum(1 if _explains(mistake, part, parsed) else -1 for part in parts)

    candidates = [m for m in exercise.list_mistakes() if _explains(m, first_wrong, parsed)]
    if not candidates:
        common = _iter_common_mistakes(first_wrong, parsed, expected)
        candidates = [m for m in common if _explains(m, first_wrong, parsed)]
    # max returns the first of equals, so an exercise lists its more likely mistakes first.
    best = max(candidates, key=score, default=None)
    return best.hint if best else ""


def _explains(mistake: Mistake, part: ExercisePart, parsed: ParsedAnswer) -> bool:
    return part.name in mistake.answer and part.matches(parsed[part.name], mistake.answer[part.name])


def _iter_common_mistakes(
    part: ExercisePart, parsed: ParsedAnswer, expected: Mapping[str, Any]
) -> Iterator[Mistake]:
    """Yield the common mistakes of the answer type at the first call, or none if the first call is correct."""
    first_expected = part.evaluate(expected[part.name])[0]
    if not part.answer_type.matches(parsed[part.name][0], first_expected):
        for hint, value in part.answer_type.iter_common_mistakes(first_expected):
            yield Mistake(hint, {part.name: value})


def _describe_difference(part: ExercisePart, parsed: list[Any], expected: Any) -> str:
    """Describe a wrong answer that no known mistake explains."""
    expected_values = part.evaluate(expected)
    wrong = next(
        i
        for i, pair in enumerate(zip(parsed, expected_values, strict=False))
        if not part.answer_type.matches(*pair)
    )
    difference = part.answer_type.describe_difference(parsed[wrong], expected_values[wrong])
    if wrong == 0:
        return difference
    first, other = (format_arguments(part.calls[i]) for i in (0, wrong))
    return f"Right for ({first}), not for ({other}): is a size hard-coded in the function? {difference}"


def _report_problem(exercise: Exercise, hint: str, correct: list[ExercisePart]) -> CheckResult:
    so_far = f"Right so far: {', '.join(part.name for part in correct)}." if correct else ""
    lines = [f"{exercise.title}: not yet.", so_far, *wrap(hint)]
    message = "\n".join(line for line in lines if line)
    return CheckResult(False, hint, message, tuple(part.name for part in correct))
