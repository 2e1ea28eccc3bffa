"""One form for every error: the operation, what came, what was expected, and the cure."""

from __future__ import annotations

from functools import partial
from typing import Any


class RegardError(Exception):
    """Base of every error regard raises; its four parts are attributes, for tools that show them apart."""

    def __init__(self, operation: str, *, received: str, expected: str, cure: str) -> None:
        self.operation, self.received, self.expected, self.cure = operation, received, expected, cure
        super().__init__(f"{operation}: received {received}; expected {expected}. {cure}")

    def __reduce__(self) -> Any:
        """Its parts, so that it comes whole out of another process."""
        parts = {"received": self.received, "expected": self.expected, "cure": self.cure}
        return partial(type(self), **parts), (self.operation,)


class ArgumentError(RegardError, ValueError):
    """A value or a shape that the operation cannot take."""


class KindError(RegardError, TypeError):
    """An object of a kind that the operation cannot take."""


class OutOfRange(RegardError, IndexError):
    """An index past the end of an axis."""


class TooLarge(RegardError, MemoryError):
    """A conversion that would store the whole matrix without having been asked to."""


def shape_of(**axes: int | str) -> str:
    """A shape with its axes named.

    >>> shape_of(q_len=5, head_dim=4)
    '(q_len 5, head_dim 4)'
    """
    return "(" + ", ".join(f"{name} {size}" for name, size in axes.items()) + ")"


def named_shape(shape: tuple[int, ...], *last: str) -> str:
    """The shape of an array, its last axes named, those before them `batch` and `heads`.

    >>> named_shape((2, 8, 5, 4), "q_len", "head_dim")
    '(batch 2, heads 8, q_len 5, head_dim 4)'
    """
    lead = len(shape) - len(last)
    names = ["batch"] * (lead - 1) + ["heads"] * min(lead, 1) + list(last)[max(0, -lead) :]
    return "(" + ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True)) + ")"


def kind_of(thing: Any) -> str:
    """What a thing is, in a few words, for an error message."""
    dtype, shape = getattr(thing, "dtype", None), getattr(thing, "shape", None)
    if dtype is not None and shape is not None:
        return f"an array of {str(dtype).removeprefix('torch.')} with shape {tuple(shape)}"
    if callable(thing) and hasattr(thing, "__name__"):
        return f"the function {thing.__name__}"
    return (
        f"{type(thing).__name__} {thing!r}"
        if isinstance(thing, int | float | str)
        else f"a {type(thing).__name__}"
    )
