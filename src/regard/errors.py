"""One form for every error: the operation, what came, what was expected, and the hint."""

from __future__ import annotations

import re
from functools import partial
from typing import Any


class RegardError(Exception):
    """Base of every error regard raises; its four parts are attributes, for tools that show them apart.

    >>> import regard
    >>> try:
    ...     regard.attention([[1.0, 2.0]], [[1.0]])
    ... except regard.RegardError as error:
    ...     error.operation, error.received
    ('attention', 'query (q_len 1, head_dim 2), key (kv_len 1, head_dim 1)')
    """

    def __init__(self, operation: str, *, received: str, expected: str, hint: str) -> None:
        self.operation, self.received, self.expected, self.hint = operation, received, expected, hint
        super().__init__(f"{operation}: received {received}; expected {expected}. {hint}")

    @property
    def page(self) -> str:
        """Where the site lists the errors of this operation: `reference/errors.html#recording-find`."""
        return f"reference/errors.html#{format_anchor(self.operation)}"

    def __reduce__(self) -> Any:
        """Its parts, so that it comes whole out of another process."""
        parts = {"received": self.received, "expected": self.expected, "hint": self.hint}
        return partial(type(self), **parts), (self.operation,)


class ArgumentError(RegardError, ValueError):
    """A value or a shape that the operation cannot take.

    >>> import regard
    >>> regard.attention([[1.0, 2.0]], [[1.0]])
    Traceback (most recent call last):
        ...
    regard.ArgumentError: attention: received query (q_len 1, head_dim 2), key (kv_len 1, head_dim 1); ...
    """


class ArgumentTypeError(RegardError, TypeError):
    """An object of a kind that the operation cannot take.

    >>> import regard
    >>> regard.attention([[1.0]], [[1.0]], mask=[[True]])
    Traceback (most recent call last):
        ...
    regard.ArgumentTypeError: mask: received a list; ...
    """


class IndexOutOfRangeError(RegardError, IndexError):
    """An index past the end of an axis.

    >>> import regard
    >>> regard.attention([[1.0]], [[1.0]])[7]
    Traceback (most recent call last):
        ...
    regard.IndexOutOfRangeError: A[index]: received index 7 for axis 0; expected from -1 to 0. That axis has 1 entries.
    """


class TooLargeError(RegardError, MemoryError):
    """A conversion that would store the whole matrix without having been asked to.

    >>> import numpy as np, regard
    >>> np.asarray(regard.attention(np.zeros((99_999, 1)), np.zeros((99_999, 1))))
    Traceback (most recent call last):
        ...
    regard.TooLargeError: numpy.asarray(A): received a matrix of shape (99999, 99999) that would take ...
    """


class NotCapturedError(RegardError, KeyError):
    """A layer that gave nothing.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording["attention"]
    Traceback (most recent call last):
        ...
    regard.NotCapturedError: recording['attention']: received a name that no attention layer has; ...
    """

    __str__ = Exception.__str__  # that of KeyError would show the message in quotes


def format_anchor(operation: str) -> str:
    """An operation as a place on the page of errors, whatever it was called with.

    >>> format_anchor("recording.find"), format_anchor("recording['layers.0']")
    ('recording-find', 'recording')
    """
    return re.sub(r"[^a-z0-9]+", "-", re.split(r"[\[(,]", operation)[0].lower()).strip("-")


def format_shape(**axes: int | str) -> str:
    """A shape with its axes named.

    >>> format_shape(q_len=5, head_dim=4)
    '(q_len 5, head_dim 4)'
    """
    return "(" + ", ".join(f"{name} {size}" for name, size in axes.items()) + ")"


def format_named_shape(shape: tuple[int, ...], *last: str) -> str:
    """The shape of an array, its last axes named, those before them `batch` and `heads`.

    >>> format_named_shape((2, 8, 5, 4), "q_len", "head_dim")
    '(batch 2, heads 8, q_len 5, head_dim 4)'
    """
    lead = len(shape) - len(last)
    names = ["batch"] * (lead - 1) + ["heads"] * min(lead, 1) + list(last)[max(0, -lead) :]
    return "(" + ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True)) + ")"


def describe_argument(thing: Any) -> str:
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
