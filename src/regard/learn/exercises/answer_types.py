"""Kinds of answers: how each is read, when two are the same, and what can be said of one that nobody foresaw."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from regard.errors import describe_argument
from regard.render.text import format_number


class Unreadable(Exception):
    """An answer of another kind or form than was asked; its text is for the learner."""


class Kind(Protocol):
    """What the checker asks of a kind."""

    @property
    def form(self) -> str:
        """What is taken, in words."""

    def read(self, value: Any) -> Any:
        """The answer in one form, however it was given; raises Unreadable."""

    def same(self, given: Any, wanted: Any) -> bool:
        """Whether an answer that was read is the wanted one."""

    def slips(self, wanted: Any) -> Iterator[tuple[str, Any]]:
        """Mistakes that people make with any answer of this kind: a hint, and what would have come."""

    def off(self, given: Any, wanted: Any) -> str:
        """What to say of a wrong answer that no known mistake explains."""


def as_table(value: Any) -> Any:
    """A NumPy array of numbers or booleans, from lists, arrays or tensors."""
    if callable(value):
        raise Unreadable("a function came where values are asked: give what it returns.")
    try:
        if hasattr(value, "detach"):  # a tensor; NumPy reads it once it is off its graph and its device
            value = value.detach().cpu()
        table = np.asarray(value)
    except ValueError:
        raise Unreadable("its rows have different lengths.") from None
    except Exception:  # a foreign array type may raise anything
        raise Unreadable(f"{describe_argument(value)} cannot be read as numbers.") from None
    if table.dtype.kind not in "biuf":
        raise Unreadable(f"numbers are asked, and {describe_argument(value)} came.")
    return table


@dataclass(frozen=True)
class Numbers:
    """An array or a number, to about three digits; axes of one are no matter where they hold nothing apart."""

    shape: str = ""
    atol: float = 6e-4
    rtol: float = 6e-4

    @property
    def form(self) -> str:
        return f"numbers of shape {self.shape}" if self.shape else "a number"

    def read(self, value: Any) -> Any:
        table = as_table(value)
        if table.dtype == bool:
            raise Unreadable("numbers are asked, and True or False came.")
        return table.astype(np.float64)

    def same(self, given: Any, wanted: Any) -> bool:
        wanted = np.asarray(wanted, dtype=np.float64)
        if np.squeeze(given).shape != np.squeeze(wanted).shape:
            return False
        given, wanted = np.squeeze(given), np.squeeze(wanted)
        return bool(np.allclose(given, wanted, atol=self.atol, rtol=self.rtol, equal_nan=True))

    def slips(self, wanted: Any) -> Iterator[tuple[str, Any]]:
        wanted = np.asarray(wanted, dtype=np.float64)
        for rounded in (wanted.round(digits) for digits in (2, 1, 0)):
            if rounded.any():  # what is rounded away altogether was hardly rounded
                yield "That is right, but rounded too coarsely: keep three digits or more.", rounded
        yield "These are percentages: give shares of 1, so divide by 100.", 100 * wanted
        yield "The sign is turned round.", -wanted
        if wanted.ndim >= 2:
            yield "That is transposed: rows and columns are exchanged.", wanted.swapaxes(-1, -2)
        elif wanted.ndim == 1:
            yield "The numbers are right, their order is turned round.", wanted[::-1]
        if not (wanted == 0).any():
            yield "That is one divided by what is asked.", 1 / wanted

    def off(self, given: Any, wanted: Any) -> str:
        wanted = np.asarray(wanted, dtype=np.float64)
        if np.squeeze(given).shape != np.squeeze(wanted).shape:
            return f"Its shape is {given.shape}, and {wanted.shape} is asked."
        if wanted.size == 1:
            return f"{format_number(given.item())} is too {'large' if given.item() > wanted.item() else 'small'}."
        given, wanted = given.reshape(wanted.shape), wanted
        wrong = np.argwhere(~np.isclose(given, wanted, atol=self.atol, rtol=self.rtol))
        place = tuple(int(i) for i in wrong[0])
        where = ", ".join(map(str, place))
        count = "one entry is" if len(wrong) == 1 else f"{len(wrong)} of {wanted.size} entries are"
        return f"{count} off, the first at [{where}], where {format_number(given[place])} came."


@dataclass(frozen=True)
class Table:
    """A boolean mask, True = attend, of exactly this shape: its axes of one say what it is repeated over."""

    shape: str

    @property
    def form(self) -> str:
        return f"a boolean mask of shape {self.shape}"

    def read(self, value: Any) -> Any:
        return as_table(value)

    def same(self, given: Any, wanted: Any) -> bool:
        wanted = np.asarray(wanted)
        return bool(given.dtype.kind == wanted.dtype.kind and np.array_equal(given, wanted))

    def slips(self, wanted: Any) -> Iterator[tuple[str, Any]]:
        yield "The polarity is inverted: here True means attend, False means hidden.", ~wanted
        for whole in (wanted.astype(int), wanted.astype(float)):
            yield "The ones are in the right places; make it boolean with .astype(bool).", whole
        for low in (-np.inf, -1e9):
            added = np.where(wanted, 0.0, low)
            yield "That is the mask to add to the scores; asked is the boolean one, True = attend.", added
        yield "Inverted, and not boolean: write the condition under which a key is seen.", 1 - wanted
        yield "That is transposed: rows are queries, columns are keys.", wanted.swapaxes(-1, -2)

    def off(self, given: Any, wanted: Any) -> str:
        if given.shape != wanted.shape:
            return f"Its shape is {given.shape}, and {wanted.shape} is asked."
        if given.dtype != bool:
            return "A boolean mask is asked, True = attend; make it of a comparison, such as kv_idx <= q_idx."
        place = tuple(int(i) for i in np.argwhere(given != wanted)[0])
        where = ", ".join(map(str, place))
        return f"The first entry that is off is [{where}]: should this query see that key?"


@dataclass(frozen=True)
class Word:
    """One of a few words; True and False stand for yes and no."""

    words: tuple[str, ...]

    @property
    def form(self) -> str:
        return " or ".join(f'"{word}"' for word in self.words) + (
            ", or True or False" if "yes" in self.words else ""
        )

    def read(self, value: Any) -> Any:
        if isinstance(value, bool | np.bool_):
            value = "yes" if value else "no"
        word = value.strip().lower() if isinstance(value, str) else None
        if word not in self.words:
            raise Unreadable(f"{describe_argument(value)} came.")
        return word

    def same(self, given: Any, wanted: Any) -> bool:
        return bool(given == wanted)

    def slips(self, wanted: Any) -> Iterator[tuple[str, Any]]:
        yield from ()

    def off(self, given: Any, wanted: Any) -> str:
        return f'It is not "{given}".'


@dataclass(frozen=True)
class Tokens:
    """A token for each row, by name or by index from 0."""

    names: tuple[str, ...]

    @property
    def form(self) -> str:
        return f"{len(self.names)} tokens, by name or by index from 0"

    def read(self, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = [self.names.index(x) if x in self.names else x for x in value]
        table = as_table(value)
        if table.dtype.kind == "b" or not np.isfinite(table).all() or (table != np.round(table)).any():
            raise Unreadable("only names or whole numbers name a token.")
        return table.astype(int)

    def same(self, given: Any, wanted: Any) -> bool:
        return np.array_equal(given, wanted)

    def slips(self, wanted: Any) -> Iterator[tuple[str, Any]]:
        yield "You count from 1; the first token is 0.", np.asarray(wanted) + 1

    def off(self, given: Any, wanted: Any) -> str:
        if given.shape != np.shape(wanted):
            return f"One token for each of the {len(wanted)} rows is asked; {given.size} came."
        row = int(np.argmax(given != wanted))
        return f'Look at row "{self.names[row]}" again: which of its weights is the largest?'


@dataclass(frozen=True)
class Conforms:
    """An attention function, read by what the conformance kit finds in it."""

    layout: str
    heads: bool

    @property
    def form(self) -> str:
        return "a function (query, key, value, " + ("num_heads, " if self.heads else "") + "mask=None)"

    def read(self, value: Any) -> Any:
        from regard.testing import conformance

        if not callable(value):
            raise Unreadable(
                f"{describe_argument(value)} came: pass the function itself, without calling it."
            )
        try:
            names = list(inspect.signature(value).parameters)
        except (TypeError, ValueError):  # built-ins have none
            names = []
        if self.heads != ("num_heads" in names) or "mask" not in names:
            raise Unreadable(f"it takes ({', '.join(names)}).")
        if _returns_nothing(value, self.heads):
            raise Unreadable("it returns nothing yet: end the function with return.")
        # Lists are what loops naturally return. Sizes of zero and half precision are another lesson.
        return conformance(
            _from_lists(value), layout=self.layout, mask_argument="mask", dtypes=("float64",),
            heads_argument="num_heads" if self.heads else None, without=("no query, key or batch",),
        )  # fmt: skip

    def same(self, given: Any, wanted: Any) -> bool:
        return bool(given.ok)

    def slips(self, wanted: Any) -> Iterator[tuple[str, Any]]:
        yield from ()

    def off(self, given: Any, wanted: Any) -> str:
        first, *others = given.findings
        named = [f.words for f in others if f.name != "unknown"]
        more = "\nAlso: " + "; ".join(named) + "." if named else ""
        return f"{replace(first, meant='')}{more}"  # a learner has nothing to describe to the kit


def _returns_nothing(fn: Callable[..., Any], heads: bool) -> bool:
    one = np.ones((1, 1))
    try:
        returned = fn(one, one, one, **({"num_heads": 1} if heads else {}))
    except Exception:  # the kit has more to say about that
        return False
    return returned is None or returned is ...


def _from_lists(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with nested lists among what it returns made arrays."""

    @functools.wraps(fn)
    def attention(*args: Any, **options: Any) -> Any:
        returned = fn(*args, **options)
        if isinstance(returned, tuple):
            return tuple(np.array(x) if isinstance(x, list) else x for x in returned)
        return np.array(returned) if isinstance(returned, list) else returned

    return attention
