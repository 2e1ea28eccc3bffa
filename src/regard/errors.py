"""Errors of the library: operation, received value, expected value and hint, in one form.

Every error is also the built-in exception that Python code would expect:

    Exception
    └── RegardError
        ├── ArgumentError         (ValueError)   value or shape that the operation does not accept
        ├── ArgumentTypeError     (TypeError)    object of a type that the operation does not accept
        ├── IndexOutOfRangeError  (IndexError)   index past the end of an axis
        ├── TooLargeError         (MemoryError)  result too large to store without an explicit call
        ├── NotCapturedError      (KeyError)     layer that a recording does not hold
        ├── distributed.RankError (RuntimeError) rank that died, hangs, or called with other arguments
        ├── monitor.AlarmError    (RuntimeError) alarm of a training run that stops it
        └── survey.SurveyError    (RuntimeError) survey that cannot continue
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any


class RegardError(Exception):
    """Base class of the library's errors; the parts of the message are attributes.

    Args:
        operation: The function or method that raised the error, as the caller wrote it.
        received: The value that was received.
        expected: The values that are accepted.
        hint: How to fix the call.

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
        """Path of the documentation of this operation's errors: `reference/errors.html#recording-find`."""
        return f"reference/errors.html#{format_anchor(self.operation)}"

    def __reduce__(self) -> Any:
        """Pickle the parts, so that the error keeps them across processes."""
        parts = {"received": self.received, "expected": self.expected, "hint": self.hint}
        return partial(type(self), **parts), (self.operation,)


class ArgumentError(RegardError, ValueError):
    """A value or a shape that the operation does not accept.

    >>> import regard
    >>> regard.attention([[1.0, 2.0]], [[1.0]])
    Traceback (most recent call last):
        ...
    regard.ArgumentError: attention: received query (q_len 1, head_dim 2), key (kv_len 1, head_dim 1); ...
    """


class ArgumentTypeError(RegardError, TypeError):
    """An object of a type that the operation does not accept.

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
    regard.IndexOutOfRangeError: A[index]: received index 7 for axis 0; expected -1 to 0. The axis has size 1.
    """


class TooLargeError(RegardError, MemoryError):
    """A result that is too large to store without an explicit call such as `A.to_dense()`.

    >>> import numpy as np, regard
    >>> np.asarray(regard.attention(np.zeros((99_999, 1)), np.zeros((99_999, 1))))
    Traceback (most recent call last):
        ...
    regard.TooLargeError: numpy.asarray(A): received a matrix of shape (99999, 99999) that would take ...
    """


class NotCapturedError(RegardError, KeyError):
    """A layer that a recording does not hold.

    >>> import regard, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     output = layer(torch.ones(1, 3, 8))
    >>> recording["attention"]
    Traceback (most recent call last):
        ...
    regard.NotCapturedError: recording['attention']: received a name that no attention layer has; ...
    """

    __str__ = Exception.__str__  # KeyError would print the message in quotes


def format_anchor(operation: str) -> str:
    """Format an operation, without its arguments, as an anchor of the page of errors.

    >>> format_anchor("recording.find"), format_anchor("recording['layers.0']")
    ('recording-find', 'recording')
    """
    return re.sub(r"[^a-z0-9]+", "-", re.split(r"[\[(,]", operation)[0].lower()).strip("-")


def format_shape(**axes: int | str) -> str:
    """Format a shape with named axes.

    >>> format_shape(q_len=5, head_dim=4)
    '(q_len 5, head_dim 4)'
    """
    return "(" + ", ".join(f"{name} {size}" for name, size in axes.items()) + ")"


def format_named_shape(shape: tuple[int, ...], *last: str) -> str:
    """Format the shape of an array; `last` names the last axes, those before them are `batch` and `heads`.

    >>> format_named_shape((2, 8, 5, 4), "q_len", "head_dim")
    '(batch 2, heads 8, q_len 5, head_dim 4)'
    """
    leading = len(shape) - len(last)
    names = ["batch"] * (leading - 1) + ["heads"] * min(leading, 1) + list(last)[max(0, -leading) :]
    return "(" + ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True)) + ")"


def describe_argument(argument: object) -> str:
    """Describe an argument in a few words, for an error message.

    >>> describe_argument(3), describe_argument([1]), describe_argument(len), describe_argument(dict)
    ('int 3', 'a list', 'the function len', 'the class dict')
    """
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    dtype, shape = getattr(argument, "dtype", None), getattr(argument, "shape", None)
    if dtype is not None and shape is not None:
        return f"an array of {str(dtype).removeprefix('torch.')} with shape {tuple(shape)}"
    if callable(argument) and hasattr(argument, "__name__"):
        return f"the function {argument.__name__}"
    if isinstance(argument, int | float | str):
        return f"{type(argument).__name__} {argument!r}"
    return f"a {type(argument).__name__}"
