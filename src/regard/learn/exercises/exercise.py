"""An exercise as data: the task, what is asked in parts, the right answer, and the mistakes that people make."""

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
from regard.learn.exercises.answer_types import Kind, Unreadable
from regard.render.text import format_number

Answer = Mapping[str, Any]
WIDTH = 88


@dataclass(frozen=True)
class Part:
    """One thing that is asked: its name, what it is, of which kind; and, where a function will do, its calls.

    A function is asked every call. Anything else is taken for what the first call should return.
    """

    name: str
    asks: str
    kind: Kind
    arguments: str = ""
    calls: tuple[tuple[Any, ...], ...] = ()

    def read(self, value: Any) -> list[Any]:
        """What was answered to each call, as its kind reads it; Unreadable says what is the matter."""
        if not self.calls or not callable(value):
            return [self.kind.read(value)]
        read = []
        for args in self.calls:
            call = f"{self.name}({called_with(args)})"
            try:
                returned = value(*deepcopy(args))  # a function may write into what it gets
            except Exception as error:  # a learner's function may raise anything; it is news, not a crash
                raise Unreadable(f"{call} raised {type(error).__name__}: {error}") from None
            if returned is None or returned is ...:
                raise Unreadable(f"{call} returned nothing yet: end the function with return.")
            try:
                read.append(self.kind.read(returned))
            except Unreadable as refusal:
                raise Unreadable(f"{call} returned something else: {refusal}") from None
        return read

    def wanted(self, value: Any) -> list[Any]:
        """What one of our own answers, right or wrong, comes to at each call."""
        return [value(*args) for args in self.calls] if self.calls and callable(value) else [value]

    def same(self, read: Sequence[Any], value: Any) -> bool:
        """Whether what was read agrees with one of our own answers, at every call they share."""
        return all(map(self.kind.same, read, self.wanted(value)))

    @property
    def form(self) -> str:
        """What is taken, in words."""
        return f"{self.kind.form}, or a function ({self.arguments})" if self.calls else self.kind.form


@dataclass(frozen=True)
class Mistake:
    """A hypothesis: what the parts would be if this had gone wrong, and the hint for whom it did."""

    hint: str
    answer: Answer


@dataclass(frozen=True)
class Exercise:
    """Everything about one exercise; `check` needs no more than this."""

    title: str
    task: str
    given: Mapping[str, Any]
    parts: tuple[Part, ...]
    solve: Callable[[], dict[str, Any]]
    mistakes: Callable[[], Sequence[Mistake]]
    explain: Callable[[], str]
    imports: str = "import numpy as np"
    helpers: tuple[Callable[..., Any], ...] = ()  # functions that `solve` calls, shown with it

    @property
    def code(self) -> str:
        """The solution as it runs: its last line sets `answer`."""
        functions = [_source(function) for function in (*self.helpers, self.solve)]
        return "\n\n\n".join([self.imports, *functions, f"answer = {self.solve.__name__}()"])


@dataclass(frozen=True, repr=False)
class Task:
    """The task of an exercise; `given` are the arrays themselves, to work with.

    >>> from regard.learn import exercises
    >>> exercises.show(4).given["query"]
    array([0., 2., 0., 0.])
    """

    title: str
    text: str
    given: Mapping[str, Any]
    asked: tuple[tuple[str, str, str], ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [self.title, "", *wrapped(self.text)]
        if self.given:
            lines += ["", "Given", *(line for item in self.given.items() for line in _shown(*item))]
        lines += ["", "Answer with a dict:"]
        for name, asks, form in self.asked:
            lines += wrapped(f'"{name}"  {asks}  [{form}]', "    ", "  ")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        given = "\n".join(line for item in self.given.items() for line in _shown(*item, indent=""))
        asked = "\n".join(f"- `{name}`: {asks} *({form})*" for name, asks, form in self.asked)
        block = f"\n\n```text\n{given}\n```" if given else ""
        number = self.title.partition(". ")[0]  # no heading: it may stand under any
        text = self.text.replace("\n", "  \n")  # line ends stay
        return f"**{number}.** {text}{block}\n\nAnswer with a dict:\n\n{asked}\n"


@dataclass(frozen=True, repr=False)
class Solution:
    """A solution to read, and its `code`, which runs and leaves the answer in `answer`.

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
class Result:
    """What `check` has to say: whether the answer is `right`, the `hint` that fits, and the whole `message`.

    >>> from regard.learn import exercises
    >>> exercises.check(3, {"itself": True}).right
    False
    """

    right: bool
    hint: str
    message: str

    def __str__(self) -> str:
        return self.message

    __repr__ = __str__


def _source(function: Callable[..., Any]) -> str:
    """The text of a function as a learner would write it, without types."""
    text = inspect.getsource(function).replace(": Any = ", "=").replace(": Any", "")
    return re.sub(r" -> .+(?=:\n)", "", text).rstrip()


def wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """The text in lines; line ends that are there already stay."""
    return [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent,
            break_on_hyphens=False,
        ) or [""]
    ]  # fmt: skip


def called_with(args: Sequence[Any]) -> str:
    """Arguments in a few words, large arrays by their shape."""
    return ", ".join(
        describe_argument(arg) if np.size(arg) > 8 else str(np.asarray(arg).tolist()) for arg in args
    )


def _shown(name: str, value: Any, indent: str = "  ") -> list[str]:
    """A given thing as lines: numbers and words as they are, tables row by row, large ones by their shape."""
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
