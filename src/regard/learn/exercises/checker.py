"""One checker for every exercise: read the answer, find the first part that is off, and the mistake behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regard.errors import describe_argument
from regard.learn.exercises.answer_types import Unreadable
from regard.learn.exercises.exercise import Exercise, Mistake, Part, Result, called_with, wrapped

Read = dict[str, list[Any]]


def judge(exercise: Exercise, answer: Any) -> Result:
    """What is to be said of an answer."""
    right = exercise.solve()
    try:
        read = _read(exercise, answer, right)
    except Unreadable as refusal:
        return _told(exercise, str(refusal), [])
    parts = [part for part in exercise.parts if part.name in read]
    fine = [part for part in parts if part.same(read[part.name], right[part.name])]
    wrong = [part for part in parts if part not in fine]
    if wrong:
        first = wrong[0]
        known = _likeliest(exercise, first, read, right)
        hint = known if known else _unforeseen(first, read[first.name], right[first.name])
        return _told(exercise, f"{first.name}: {hint}", fine)
    missing = [part for part in exercise.parts if part.name not in read]
    if missing:
        part = missing[0]
        return _told(exercise, f"Still to come is {part.name}: {part.asks} [{part.form}]", fine)
    return Result(True, "", f"{exercise.title}: right. exercises.solution shows one way to it.")


def _read(exercise: Exercise, answer: Any, right: Mapping[str, Any]) -> Read:
    """The parts that were given, read; a tuple has all of them in order, anything else is one of them.

    A part that is ... is still to come.
    """
    parts = {part.name: part for part in exercise.parts}
    if isinstance(answer, tuple) and len(answer) == len(parts) > 1:
        answer = dict(zip(parts, answer, strict=True))
    if not isinstance(answer, Mapping):
        return _one(exercise, answer, right)
    unknown = [name for name in answer if name not in parts]
    if unknown or not answer:
        came = f"there is no {unknown[0]!r}" if unknown else "the dict is empty"
        raise Unreadable(f"{came}; the parts are {', '.join(parts)}.")
    read: Read = {}
    for name, part in parts.items():
        if answer.get(name, ...) is not ...:
            try:
                read[name] = part.read(answer[name])
            except Unreadable as refusal:
                raise Unreadable(f"{name}: {refusal} [{part.form}]") from None
    return read


def _one(exercise: Exercise, value: Any, right: Mapping[str, Any]) -> Read:
    """A value without a name as the part it is right for, else as one that a mistake leads to, else the first."""
    readable: Read = {}
    refusals: list[str] = []
    for part in exercise.parts:
        try:
            readable[part.name] = part.read(value)
        except Unreadable as refusal:
            refusals.append(f"As {part.name}: {refusal} [{part.form}]")
    if not readable:
        names = ", ".join(part.name for part in exercise.parts)
        raise Unreadable(f"{describe_argument(value)} came; asked is a dict with {names}. {refusals[0]}")
    parts = [part for part in exercise.parts if part.name in readable]
    fits = [part for part in parts if part.same(readable[part.name], right[part.name])]
    fits += [part for part in parts if _likeliest(exercise, part, {part.name: readable[part.name]}, right)]
    name = (fits or parts)[0].name
    return {name: readable[name]}


def _likeliest(exercise: Exercise, first: Part, read: Read, right: Mapping[str, Any]) -> str:
    """The hint of the mistake that makes the first wrong part what it is, and speaks best for all that came."""

    def speaks(mistake: Mistake) -> int:
        """How many parts came as the mistake has them, less those that came otherwise."""
        told = [part for part in exercise.parts if part.name in read and part.name in mistake.answer]
        return sum(1 if _makes(mistake, part, read) else -1 for part in told)

    made = [m for m in exercise.mistakes() if _makes(m, first, read)]
    made = made or [m for m in _slips(first, read, right) if _makes(m, first, read)]
    # max takes the first of equals, so mistakes stand in the order in which they are to be believed.
    best = max(made, key=speaks, default=None)
    return best.hint if best else ""


def _makes(mistake: Mistake, part: Part, read: Read) -> bool:
    return part.name in mistake.answer and part.same(read[part.name], mistake.answer[part.name])


def _slips(part: Part, read: Read, right: Mapping[str, Any]) -> Iterator[Mistake]:
    """The mistakes of its kind at the first call; none where that one is right."""
    wanted = part.wanted(right[part.name])[0]
    if not part.kind.same(read[part.name][0], wanted):
        for hint, value in part.kind.slips(wanted):
            yield Mistake(hint, {part.name: value})


def _unforeseen(part: Part, read: list[Any], right: Any) -> str:
    """What can be said without a name for the mistake."""
    wanted = part.wanted(right)
    off = [
        n
        for n, (given, want) in enumerate(zip(read, wanted, strict=False))
        if not part.kind.same(given, want)
    ]
    words = part.kind.off(read[off[0]], wanted[off[0]])
    if off[0] == 0:
        return words
    first, other = (called_with(part.calls[n]) for n in (0, off[0]))
    return f"Right for ({first}), not for ({other}): is a size written into the function? {words}"


def _told(exercise: Exercise, hint: str, fine: list[Part]) -> Result:
    so_far = f"Right so far: {', '.join(part.name for part in fine)}." if fine else ""
    lines = [f"{exercise.title}: not yet.", so_far, *wrapped(hint)]
    return Result(False, hint, "\n".join(line for line in lines if line))
