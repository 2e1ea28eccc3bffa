"""Types of answers: how each is parsed and compared, and what to say about one that is wrong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from regard.errors import describe_argument
from regard.render.text import format_number


class InvalidAnswerError(Exception):
    """An answer of the wrong type or format; the message is for the learner."""


class AnswerType(Protocol):
    """The interface that the checker uses."""

    @property
    def format(self) -> str:
        """The accepted format, in words."""

    def parse(self, value: Any) -> Any:
        """Convert an answer to a canonical form; raise InvalidAnswerError if that is not possible."""

    def matches(self, answer: Any, expected: Any) -> bool:
        """Return whether a parsed answer is the expected one."""

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        """Yield mistakes that are common with this type: a hint, and the answer the mistake leads to."""

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


@dataclass(frozen=True)
class NumericAnswer:
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
        position = tuple(int(i) for i in wrong[0])
        index = ", ".join(map(str, position))
        count = "One entry is" if len(wrong) == 1 else f"{len(wrong)} of {expected.size} entries are"
        return f"{count} wrong, the first at [{index}], where you have {format_number(answer[position])}."


@dataclass(frozen=True)
class MaskAnswer:
    """A boolean mask, True = attend, of exactly this shape: its axes of length one show what it broadcasts over."""

    shape: str

    @property
    def format(self) -> str:
        return f"a boolean mask of shape {self.shape}"

    def parse(self, value: Any) -> Any:
        return parse_array(value)

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
        if answer.shape != expected.shape:
            return f"Expected shape {expected.shape}, got {answer.shape}."
        if answer.dtype != bool:
            return (
                "Expected a boolean mask, True = attend. Build it from a comparison, such as kv_idx <= q_idx."
            )
        position = tuple(int(i) for i in np.argwhere(answer != expected)[0])
        index = ", ".join(map(str, position))
        return f"The first wrong entry is [{index}]: may this query attend to that key?"


@dataclass(frozen=True)
class ChoiceAnswer:
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

    def matches(self, answer: Any, expected: Any) -> bool:
        return bool(answer == expected)

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        yield from ()

    def describe_difference(self, answer: Any, expected: Any) -> str:
        return f'It is not "{answer}".'


@dataclass(frozen=True)
class TokenAnswer:
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

    def matches(self, answer: Any, expected: Any) -> bool:
        return np.array_equal(answer, expected)

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        yield "You count from 1; the first token is 0.", np.asarray(expected) + 1

    def describe_difference(self, answer: Any, expected: Any) -> str:
        if answer.shape != np.shape(expected):
            return f"Expected one token for each of the {len(expected)} rows, got {answer.size}."
        row = int(np.argmax(answer != expected))
        return f'Look at row "{self.tokens[row]}" again: which of its weights is the largest?'


@dataclass(frozen=True)
class AttentionFunctionAnswer:
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
            heads_argument="num_heads" if self.heads else None, unsupported=("no query, key or batch",),
        )  # fmt: skip

    def matches(self, answer: Any, expected: Any) -> bool:
        return bool(answer.ok)

    def iter_common_mistakes(self, expected: Any) -> Iterator[tuple[str, Any]]:
        yield from ()

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
