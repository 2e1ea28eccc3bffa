"""An exercise as data: the task, its parts, the correct answer, and the mistakes that learners make."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.errors import describe_argument
from regard.learn.exercises.answer_types import AnswerType, InvalidAnswerError
from regard.render.text import format_number

Answer = Mapping[str, Any]
WIDTH = 88


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
            except Exception as error:  # a learner's function may raise anything
                raise InvalidAnswerError(f"{call} raised {type(error).__name__}: {error}") from None
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


@dataclass(frozen=True)
class Exercise:
    """Everything about one exercise; the checker needs nothing else.

    Attributes:
        title: Its number and name.
        chapter: The chapter of the book that it belongs to.
        task: The text of the task.
        given: The inputs, by name.
        parts: The parts of the answer, in order.
        solve: A function that returns the correct answer, and whose source is the worked solution.
        list_mistakes: A function that returns the known mistakes, the more likely ones first.
        explain: A function that returns the explanation, with every number computed.
        imports: The imports that `solve` needs.
        helpers: Functions that `solve` calls; they are printed with it.
    """

    title: str
    chapter: int
    task: str
    given: Mapping[str, Any]
    parts: tuple[ExercisePart, ...]
    solve: Callable[[], dict[str, Any]]
    list_mistakes: Callable[[], Sequence[Mistake]]
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
    """The result of `check`: whether the answer is `correct`, the `hint` that fits, and the whole `message`.

    `right_parts` are the names of the parts that are right.

    >>> from regard.learn import exercises
    >>> exercises.check(3, {"itself": True}).correct
    False
    """

    correct: bool
    hint: str
    message: str
    right_parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message

    __repr__ = __str__


def _format_source(function: Callable[..., Any]) -> str:
    """Format a function as a learner would write it, without types."""
    text = inspect.getsource(function).replace(": Any = ", "=").replace(": Any", "")
    return re.sub(r" -> .+(?=:\n)", "", text).rstrip()


def wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Wrap text to lines of at most WIDTH characters, and keep its own line breaks.

    Args:
        text: The text.
        indent: Indent of the lines.
        first: Indent of the first line of each paragraph; `indent` by default.

    Returns:
        The lines.
    """
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
