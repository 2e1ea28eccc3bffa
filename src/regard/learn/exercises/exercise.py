"""An exercise as data, the types of answers, and the checker, which finds the mistake behind a wrong part."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from regard.errors import describe_argument
from regard.render.text import format_number


class InvalidAnswerError(Exception):
    """An answer of the wrong type or format; the message is for the learner."""


class AnswerType(Protocol):
    """A type of answers: how one is parsed and compared, and what to say about one that is wrong."""

    @property
    def format(self) -> str:
        """The accepted format, in words."""

    def parse(self, value: Any) -> Any:
        """Convert an answer to a canonical form; raise InvalidAnswerError if that is not possible."""
        return parse_array(value)

    def matches(self, answer: Any, expected: Any) -> bool:
        """Return whether a parsed answer is the expected one."""
        return bool(np.array_equal(answer, expected))

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        """Yield mistakes that are common with this type: a hint, and the answer the mistake leads to."""
        yield from ()

    def describe_difference(self, answer: Any, expected: Any) -> str:
        """Describe a wrong answer that no known mistake explains."""


def parse_array(value: Any) -> Any:
    """Convert lists, arrays or tensors of numbers or booleans to a NumPy array."""
    if callable(value):
        raise InvalidAnswerError("Expected values, got a function: pass what it returns.")
    try:
        if hasattr(value, "detach"):  # a tensor that may require grad or be on another device
            value = value.detach().cpu()
        array = np.asarray(value)
    except ValueError:
        raise InvalidAnswerError("Its rows have different lengths.") from None
    except Exception:  # a foreign array type may raise anything
        raise InvalidAnswerError(f"Expected numbers, got {describe_argument(value)}.") from None
    if array.dtype.kind not in "biuf":
        raise InvalidAnswerError(f"Expected numbers, got {describe_argument(value)}.")
    return array


def _count_wrong(wrong: Any, size: int) -> str:
    """Describe the wrong entries of an array: how many of its `size` they are, and the index of the first."""
    count = "One entry is" if len(wrong) == 1 else f"{len(wrong)} of {size} entries are"
    return f"{count} wrong, the first at [{', '.join(map(str, wrong[0]))}]"


@dataclass(frozen=True)
class NumericAnswer(AnswerType):
    """A number or an array of numbers, correct to about three digits; axes of length one are ignored."""

    shape: str = ""
    atol: float = 6e-4
    rtol: float = 6e-4

    @property
    def format(self) -> str:
        return f"numbers of shape {self.shape}" if self.shape else "a number"

    def parse(self, value: Any) -> Any:
        array = parse_array(value)
        if array.dtype == bool:
            raise InvalidAnswerError("Expected numbers, got True or False.")
        return array.astype(np.float64)

    def matches(self, answer: Any, expected: Any) -> bool:
        answer, expected = np.squeeze(answer), np.squeeze(np.asarray(expected, dtype=np.float64))
        if answer.shape != expected.shape:
            return False
        return bool(np.allclose(answer, expected, atol=self.atol, rtol=self.rtol, equal_nan=True))

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        expected = np.asarray(expected, dtype=np.float64)
        for rounded in (expected.round(digits) for digits in (2, 1, 0)):
            if rounded.any():  # all zeros would match many other mistakes
                yield "That is right, but rounded too coarsely: keep three digits or more.", rounded
        yield "These are percentages: give shares of 1, so divide by 100.", 100 * expected
        yield "The sign is wrong.", -expected
        if expected.ndim >= 2:
            yield "That is transposed: rows and columns are swapped.", expected.swapaxes(-1, -2)
        elif expected.ndim == 1:
            yield "The numbers are right, but in reverse order.", expected[::-1]
        if not (expected == 0).any():
            yield "That is the reciprocal: one divided by the right answer.", 1 / expected

    def describe_difference(self, answer: Any, expected: Any) -> str:
        expected = np.asarray(expected, dtype=np.float64)
        if np.squeeze(answer).shape != np.squeeze(expected).shape:
            return f"Expected shape {expected.shape}, got {answer.shape}."
        if expected.size == 1:
            return f"{format_number(answer.item())} is too {'large' if answer.item() > expected.item() else 'small'}."
        answer = answer.reshape(expected.shape)
        wrong = np.argwhere(~np.isclose(answer, expected, atol=self.atol, rtol=self.rtol))
        first = format_number(answer[tuple(wrong[0])])
        return f"{_count_wrong(wrong, expected.size)}, where you have {first}."


@dataclass(frozen=True)
class MaskAnswer(AnswerType):
    """A boolean mask, True = attend, of exactly this shape: its axes of length one show what it broadcasts over."""

    shape: str

    @property
    def format(self) -> str:
        return f"a boolean mask of shape {self.shape}"

    def matches(self, answer: Any, expected: Any) -> bool:
        expected = np.asarray(expected)
        return bool(answer.dtype.kind == expected.dtype.kind and np.array_equal(answer, expected))

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        yield "The polarity is inverted: here True means attend, False means masked.", ~expected
        for numbers in (expected.astype(int), expected.astype(float)):
            yield "The ones are in the right places; make it boolean with .astype(bool).", numbers
        for low in (-np.inf, -1e9):
            additive = np.where(expected, 0.0, low)
            yield "That is the mask to add to the scores; give the boolean one, True = attend.", additive
        yield (
            "Inverted, and not boolean: write the condition under which a query attends to a key.",
            1 - expected,
        )
        yield "That is transposed: rows are queries, columns are keys.", expected.swapaxes(-1, -2)

    def describe_difference(self, answer: Any, expected: Any) -> str:
        faults = []
        if answer.dtype != bool:
            faults.append(
                "Expected a boolean mask, True = attend. Build it from a comparison, such as kv_idx <= q_idx."
            )
        if answer.shape != expected.shape:
            faults.append(f"Expected shape {expected.shape}, got {answer.shape}.")
        elif (wrong := np.argwhere(answer.astype(bool) != expected)).size:
            faults.append(f"{_count_wrong(wrong, expected.size)}: may this query attend to that key?")
        return " ".join(faults)


@dataclass(frozen=True)
class ChoiceAnswer(AnswerType):
    """One of a few words; True and False stand for yes and no."""

    choices: tuple[str, ...]

    @property
    def format(self) -> str:
        words = " or ".join(f'"{choice}"' for choice in self.choices)
        return words + (", or True or False" if "yes" in self.choices else "")

    def parse(self, value: Any) -> Any:
        if isinstance(value, bool | np.bool_):
            value = "yes" if value else "no"
        choice = value.strip().lower() if isinstance(value, str) else None
        if choice not in self.choices:
            raise InvalidAnswerError(f"Got {describe_argument(value)}.")
        return choice

    def describe_difference(self, answer: Any, expected: Any) -> str:
        return f'It is not "{answer}".'


@dataclass(frozen=True)
class TokenAnswer(AnswerType):
    """A token for each row, by name or by index from 0."""

    tokens: tuple[str, ...]

    @property
    def format(self) -> str:
        return f"{len(self.tokens)} tokens, by name or by index from 0"

    def parse(self, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = [self.tokens.index(x) if x in self.tokens else x for x in value]
        array = parse_array(value)
        if array.dtype.kind == "b" or not np.isfinite(array).all() or (array != np.round(array)).any():
            raise InvalidAnswerError("Expected names of tokens or whole numbers.")
        return array.astype(int)

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        yield "You count from 1; the first token is 0.", np.asarray(expected) + 1

    def describe_difference(self, answer: Any, expected: Any) -> str:
        if answer.shape != np.shape(expected):
            return f"Expected one token for each of the {len(expected)} rows, got {answer.size}."
        row = int(np.argmax(answer != expected))
        return f'Look at row "{self.tokens[row]}" again: which of its weights is the largest?'


@dataclass(frozen=True)
class AttentionFunctionAnswer(AnswerType):
    """An attention function, tested by the conformance kit."""

    layout: str
    heads: bool

    @property
    def format(self) -> str:
        return "a function (query, key, value, " + ("num_heads, " if self.heads else "") + "mask=None)"

    def parse(self, value: Any) -> Any:
        from regard.testing import check_conformance

        if not callable(value):
            raise InvalidAnswerError(
                f"Got {describe_argument(value)}: pass the function itself, without calling it."
            )
        try:
            names = list(inspect.signature(value).parameters)
        except (TypeError, ValueError):  # some built-ins have no signature
            names = []
        if self.heads != ("num_heads" in names) or "mask" not in names:
            raise InvalidAnswerError(f"Its arguments are ({', '.join(names)}).")
        if _returns_nothing(value, self.heads):
            raise InvalidAnswerError("It returns nothing yet: end the function with return.")
        # Loops naturally return lists. Sizes of zero and half precision are not part of the exercise.
        return check_conformance(
            _convert_lists(value), layout=self.layout, mask_argument="mask", dtypes=("float64",),
            heads_argument="num_heads" if self.heads else None, unsupported=("empty inputs",),
        )  # fmt: skip

    def matches(self, answer: Any, expected: Any) -> bool:
        return bool(answer.ok)

    def describe_difference(self, answer: Any, expected: Any) -> str:
        first, *others = answer.findings
        known = [finding.message for finding in others if finding.kind != "unknown"]
        more = f"\nAlso: {' '.join(known)}" if known else ""
        # A learner has no convention to describe to the kit.
        evidence = {name: value for name, value in first.evidence.items() if name != "if intended"}
        return f"{replace(first, evidence=evidence)}{more}"


def _returns_nothing(fn: Callable[..., Any], heads: bool) -> bool:
    one = np.ones((1, 1))
    try:
        returned = fn(one, one, one, **({"num_heads": 1} if heads else {}))
    except Exception:  # the kit reports it with more detail
        return False
    return returned is None or returned is ...


def _convert_lists(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that nested lists it returns become arrays."""

    @functools.wraps(fn)
    def attention(*args: Any, **options: Any) -> Any:
        returned = fn(*args, **options)
        if isinstance(returned, tuple):
            return tuple(np.array(x) if isinstance(x, list) else x for x in returned)
        return np.array(returned) if isinstance(returned, list) else returned

    return attention


Answer = Mapping[str, Any]
WIDTH = 88
MAX_ERROR = 300  # characters of the message of an exception
MAX_HINT = 2000  # characters of a hint, which may quote the answer


def describe_exception(error: BaseException) -> str:
    """Describe an exception of a learner's code on one line."""
    try:
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    except Exception:  # of a class of the learner's
        text = ""
    text = text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + "…"
    return f"{type(error).__name__}: {text}".rstrip(": ")


@dataclass(frozen=True)
class ExercisePart:
    """One part of an answer: its name, the question, the type of the answer, and the calls if it may be a function.

    A function is tested with every call. Any other value is compared with the result of the first call.
    """

    name: str
    question: str
    answer_type: AnswerType
    arguments: str = ""
    calls: tuple[tuple[Any, ...], ...] = ()

    def parse(self, value: Any) -> list[Any]:
        """Parse an answer: one value for each call; raise InvalidAnswerError if it has the wrong format."""
        if not self.calls or not callable(value):
            return [self.answer_type.parse(value)]
        parsed = []
        for args in self.calls:
            call = f"{self.name}({format_arguments(args)})"
            try:
                returned = value(*deepcopy(args))  # the function may modify its arguments
            except (Exception, SystemExit) as error:  # a learner's function may raise anything
                raise InvalidAnswerError(f"{call} raised {describe_exception(error)}") from None
            if returned is None or returned is ...:
                raise InvalidAnswerError(f"{call} returned nothing yet: end the function with return.")
            try:
                parsed.append(self.answer_type.parse(returned))
            except InvalidAnswerError as error:
                raise InvalidAnswerError(f"Wrong type returned by {call}. {error}") from None
        return parsed

    def evaluate(self, value: Any) -> list[Any]:
        """Evaluate an answer of the exercise's author, correct or mistaken, at each call."""
        return [value(*args) for args in self.calls] if self.calls and callable(value) else [value]

    def matches(self, parsed: Sequence[Any], value: Any) -> bool:
        """Return whether a parsed answer agrees with an answer of the author at every call that both have."""
        return all(map(self.answer_type.matches, parsed, self.evaluate(value)))

    @property
    def format(self) -> str:
        """The accepted format, in words."""
        form = self.answer_type.format
        return f"{form}, or a function ({self.arguments})" if self.calls else form


@dataclass(frozen=True)
class Mistake:
    """A known mistake: the answers it leads to, by part, and the hint to give."""

    hint: str
    answer: Answer


def make_mistakes(in_one_part: Mapping[str, Mapping[str, Any]]) -> list[Mistake]:
    """Make the mistakes that change one part only, from the wrong answer of each hint, by part."""
    return [
        Mistake(hint, {part: answer}) for part, wrong in in_one_part.items() for hint, answer in wrong.items()
    ]


@dataclass(frozen=True)
class Exercise:
    """Everything about one exercise; the checker needs nothing else.

    The source of `solve` is the worked solution; it needs `imports`, and `helpers` are printed with it. The mistakes
    are listed with the more likely ones first.
    """

    title: str
    chapter: int
    task: str
    given: Mapping[str, Any]
    parts: tuple[ExercisePart, ...]
    solve: Callable[[], dict[str, Any]]
    list_mistakes: Callable[[], Iterable[Mistake]]
    explain: Callable[[], str]
    imports: str = "import numpy as np"
    helpers: tuple[Callable[..., Any], ...] = ()

    @property
    def code(self) -> str:
        """The solution as code that runs; its last line sets `answer`."""
        functions = [_format_source(function) for function in (*self.helpers, self.solve)]
        return "\n\n\n".join([self.imports, *functions, f"answer = {self.solve.__name__}()"])


@dataclass(frozen=True, repr=False)
class ExerciseTask:
    """The task of an exercise; `given` holds the input arrays, `parts` the name, question and format of each part.

    >>> from regard.learn import exercises
    >>> exercises.show(4).given["query"]
    array([0., 2., 0., 0.])
    """

    title: str
    text: str
    given: Mapping[str, Any]
    parts: tuple[tuple[str, str, str], ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [self.title, "", *wrap(self.text)]
        if self.given:
            lines += ["", "Given", *(line for item in self.given.items() for line in _format_input(*item))]
        lines += ["", "Answer with a dict:"]
        for name, question, form in self.parts:
            lines += wrap(f'"{name}"  {question}  [{form}]', "    ", "  ")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        given = "\n".join(line for item in self.given.items() for line in _format_input(*item, indent=""))
        parts = "\n".join(f"- `{name}`: {question} *({form})*" for name, question, form in self.parts)
        block = f"\n\n```text\n{given}\n```" if given else ""
        number = self.title.partition(". ")[0]  # bold text, not a heading: the page decides about headings
        text = self.text.replace("\n", "  \n")  # keep the line breaks
        return f"**{number}.** {text}{block}\n\nAnswer with a dict:\n\n{parts}\n"


@dataclass(frozen=True, repr=False)
class Solution:
    """A worked solution: `text` to read, and `code` that runs and leaves the answer in `answer`.

    >>> from regard.learn import exercises
    >>> exercises.solution(2).title
    'Exercise 2. Without scaling'
    """

    title: str
    text: str
    code: str

    def __str__(self) -> str:
        return f"{self.title}\n\n{self.text}\n\n{textwrap.indent(self.code, '    ')}"

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return f"**{self.title}**\n\n```text\n{self.text}\n```\n\n```python\n{self.code}\n```\n"


@dataclass(frozen=True, repr=False)
class CheckResult:
    """The result of `check`: whether the answer is `correct`, a hint for each fault, and the whole `message`.

    `right_parts` are the names of the parts that are right.

    >>> from regard.learn import exercises
    >>> exercises.check(3, {"itself": True}).correct
    False
    """

    correct: bool
    hints: tuple[str, ...]
    message: str
    right_parts: tuple[str, ...] = ()

    @property
    def hint(self) -> str:
        """The hints as one text, each on a line of its own; empty if the answer is right."""
        return "\n".join(self.hints)

    def __str__(self) -> str:
        return self.message

    __repr__ = __str__


def _format_source(function: Callable[..., Any]) -> str:
    """Format a function as a learner would write it, without types."""
    text = inspect.getsource(function).replace(": Any = ", "=").replace(": Any", "")
    return re.sub(r" -> .+(?=:\n)", "", text).rstrip()


def wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Wrap text to lines of at most WIDTH characters, and keep its own line breaks; `first` indents paragraphs."""
    return [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent,
            break_on_hyphens=False,
        ) or [""]
    ]  # fmt: skip


def format_arguments(args: Sequence[Any]) -> str:
    """Format the arguments of a call, with large arrays described by their shape."""
    return ", ".join(
        describe_argument(arg) if np.size(arg) > 8 else str(np.asarray(arg).tolist()) for arg in args
    )


def _format_input(name: str, value: Any, indent: str = "  ") -> list[str]:
    """Format an input as lines: small arrays row by row, large ones by their shape, other values as they are."""
    if not isinstance(value, np.ndarray):
        return [f"{indent}{name} = {value}"]
    if value.size > 40:
        return [f"{indent}{name}: {describe_argument(value)}"]
    rows = ["[" + ", ".join(map(format_number, row)) + "]" for row in np.atleast_2d(value).tolist()]
    if value.ndim == 1:
        return [f"{indent}{name} = {rows[0]}"]
    pad = " " * len(f"{name} = [")
    body = (",\n" + indent + pad).join(rows)
    return f"{indent}{name} = [{body}]".split("\n")


ParsedAnswer = dict[str, list[Any]]  # by part: one value for each call


_recorded: list[tuple[Exercise, list[Any]]] = []  # the exercises whose answers are recorded, and where


@contextmanager
def record_answers(exercise: Exercise, answers: list[Any]) -> Iterator[None]:
    """Append each answer to an exercise that is checked while the block runs."""
    _recorded.append((exercise, answers))
    try:
        yield
    finally:
        _recorded.pop()


def check_answer(exercise: Exercise, answer: Any) -> CheckResult:
    """Check an answer, and choose a hint for each fault; a part that is wrong as a consequence of one has none."""
    for recorded, answers in _recorded:
        answers += [answer] if recorded is exercise else []
    expected = exercise.solve()
    try:
        parsed, problems = _parse_answer(exercise, answer, expected)
    except InvalidAnswerError as error:
        return report_problems(exercise, [str(error)])
    correct: list[ExercisePart] = []
    found: list[Mistake] = []
    for part in exercise.parts:
        if part.name not in parsed:
            continue
        if part.matches(parsed[part.name], expected[part.name]):
            correct.append(part)
        elif any(_explains(mistake, part, parsed) for mistake in found):
            continue
        elif mistake := _find_mistake(exercise, part, parsed, expected):
            found.append(mistake)
            problems[part.name] = mistake.hint
        else:
            problems[part.name] = _describe_difference(part, parsed[part.name], expected[part.name])
    if problems:
        names = [name for name in (*(part.name for part in exercise.parts), "answer") if name in problems]
        return report_problems(exercise, [f"{name}: {problems[name]}" for name in names], correct)
    missing = [part for part in exercise.parts if part.name not in parsed]
    if missing:
        part, *others = missing
        hint = f"Still missing is {part.name}: {part.question} [{part.format}]"
        hint += f" Then: {', '.join(other.name for other in others)}." if others else ""
        return report_problems(exercise, [hint], correct)
    number = exercise.title.partition(".")[0].split()[-1]
    solution = f"exercises.solution({number}), or regard exercise {number} --solution"
    message = f"{exercise.title}: right. One way to solve it: {solution}"
    return CheckResult(True, (), message, tuple(part.name for part in exercise.parts))


def _parse_answer(
    exercise: Exercise, answer: Any, expected: Mapping[str, Any]
) -> tuple[ParsedAnswer, dict[str, str]]:
    """Parse the parts of an answer; return them, and what is wrong with the format of the others, by name.

    A dict names its parts, a tuple has all parts in order, and any other value is one part. A part that is `...` is
    skipped.
    """
    parts = {part.name: part for part in exercise.parts}
    if isinstance(answer, tuple) and len(answer) == len(parts) > 1:
        answer = dict(zip(parts, answer, strict=True))
    if not isinstance(answer, Mapping):
        return _parse_unnamed_value(exercise, answer, expected), {}
    names = ", ".join(parts)
    if not answer:
        raise InvalidAnswerError(f"The dict is empty. The parts are {names}.")
    parsed: ParsedAnswer = {}
    problems: dict[str, str] = {}
    for name, part in parts.items():
        if answer.get(name, ...) is not ...:
            try:
                parsed[name] = part.parse(answer[name])
            except InvalidAnswerError as error:
                problems[name] = f"{error} [{part.format}]"
    unknown = [f"{str(name)[:40]!r}" for name in answer if name not in parts]
    if unknown:
        problems["answer"] = f"There is no part {', '.join(unknown)}. The parts are {names}."
    return parsed, problems


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
        part for part in parts if _find_mistake(exercise, part, {part.name: parsed[part.name]}, expected)
    ]
    name = (candidates or parts)[0].name
    return {name: parsed[name]}


def _find_mistake(
    exercise: Exercise, wrong: ExercisePart, parsed: ParsedAnswer, expected: Mapping[str, Any]
) -> Mistake | None:
    """Find the mistake that explains a wrong part, and most of the other parts; None if none does."""

    def score(mistake: Mistake) -> int:
        """Count the parts that the mistake explains, minus those it predicts wrongly."""
        parts = [part for part in exercise.parts if part.name in parsed and part.name in mistake.answer]
        return sum(1 if _explains(mistake, part, parsed) else -1 for part in parts)

    candidates = [m for m in exercise.list_mistakes() if _explains(m, wrong, parsed)]
    if not candidates:
        common = _iter_common_mistakes(wrong, parsed, expected)
        candidates = [m for m in common if _explains(m, wrong, parsed)]
    # max returns the first of equals, so an exercise lists its more likely mistakes first.
    return max(candidates, key=score, default=None)


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


def report_problems(
    exercise: Exercise, hints: Sequence[str], correct: Sequence[ExercisePart] = ()
) -> CheckResult:
    """Build the result for an answer that is not right."""
    hints = [hint if len(hint) <= MAX_HINT else f"{hint[:MAX_HINT]}…" for hint in hints]
    hints = [hint.encode(errors="replace").decode() for hint in hints]  # a lone surrogate cannot be printed
    names = tuple(part.name for part in correct)
    so_far = [f"Right so far: {', '.join(names)}."] if names else []
    lines = [f"{exercise.title}: not yet.", *so_far, *(line for hint in hints for line in wrap(hint))]
    return CheckResult(False, tuple(hints), "\n".join(lines), names)
