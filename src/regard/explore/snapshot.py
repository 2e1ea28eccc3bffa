"""Copy values into small plain records, so that later changes do not affect them."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from itertools import count, islice
from typing import Any

import numpy as np

from regard.core.matrix import AttentionMatrix
from regard.render.text import escape_unprintable

MAX_ROWS, MAX_COLUMNS = 8, 8  # entries shown of an array; with more, an ellipsis replaces one
MAX_PARTS = 16
MAX_LIST_ENTRIES = 4096  # longer lists are not checked for being numeric
MAX_CHARACTERS = 120
MAX_DEPTH = 2  # a tuple of objects of arrays


def take_snapshot(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return a record of a value: `type`, and its `text`, its `cells` (rows of entries, with a `shape`) or `parts`.

    If the value cannot be inspected, only its type is recorded.

    >>> take_snapshot(0.5)
    {'type': 'float', 'text': 0.5}
    >>> take_snapshot(np.eye(2))
    {'type': 'float64', 'shape': [2, 2], 'cells': [[1.0, 0.0], [0.0, 1.0]]}
    >>> take_snapshot(("a", [1, 2]))["parts"]
    [['0', {'type': 'str', 'text': "'a'"}], ['1', {'type': 'list', 'shape': [2], 'cells': [[1, 2]]}]]
    """
    try:
        return _snapshot_value(value, depth)
    except Exception:  # inspecting an object can run any code
        return {"type": _type_name(type(value)), "text": "cannot be shown"}


def _snapshot_value(value: Any, depth: int) -> dict[str, Any]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return {"type": _type_name(kind), "text": _format_scalar(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _snapshot_array(np.asarray(value), str(value.dtype))
    if kind.__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
        tensor = value.detach().cpu()
        tensor = tensor.double() if tensor.is_floating_point() else tensor  # NumPy has no bfloat16
        return _snapshot_array(tensor.numpy(), str(value.dtype))
    if kind in (list, tuple) and (array := _as_numeric_array(value)) is not None:
        return _snapshot_array(array, _type_name(kind))
    if kind is AttentionMatrix:
        return {"type": _type_name(kind), "text": _truncate(repr(value).split("\n")[0])}
    contents = _contents(value)
    if contents is None or depth >= MAX_DEPTH:
        return {"type": _type_name(kind), "text": _format_briefly(value)}
    size, items = contents
    parts = [[name, take_snapshot(part, depth + 1)] for name, part in islice(items, MAX_PARTS)]
    return {"type": _type_name(kind), "parts": parts, "left_out": max(0, size - MAX_PARTS)}


def _snapshot_array(array: np.ndarray, kind: str) -> dict[str, Any]:
    """Record the first matrix of an array, without the middle of its rows and columns if there are many."""
    if array.ndim == 0:
        return {"type": kind, "text": _format_scalar(array.item())}
    if array.size == 0:
        return {"type": kind, "shape": list(array.shape), "cells": []}
    matrix = array
    while matrix.ndim > 2:
        matrix = matrix[0]
    matrix = np.atleast_2d(matrix)
    rows, columns = _kept_indices(matrix.shape[0], MAX_ROWS), _kept_indices(matrix.shape[1], MAX_COLUMNS)
    cells = [[_format_entry(entry) for entry in row] for row in matrix[np.ix_(rows, columns)].tolist()]
    if len(columns) < matrix.shape[1]:
        cells = [[*row[:-1], "…", row[-1]] for row in cells]
    if len(rows) < matrix.shape[0]:
        cells.insert(-1, ["…"] * len(cells[0]))
    return {"type": kind, "shape": list(array.shape), "cells": cells}


def _format_entry(entry: Any) -> Any:
    is_scalar = isinstance(entry, bool | int | float | complex | str | bytes)
    return _format_scalar(entry) if is_scalar else _type_name(type(entry))


def _kept_indices(size: int, limit: int) -> list[int]:
    """Return all indices, or the first ones and the last, with space for an ellipsis between."""
    return list(range(size)) if size <= limit else [*range(limit - 2), size - 1]


def _format_scalar(value: Any) -> Any:
    """Return a number that the page formats unchanged, and anything else as text."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**6):
        return value
    if (
        isinstance(value, int) and value.bit_length() > 4 * MAX_CHARACTERS
    ):  # Python limits int to str conversion
        return f"an int of {value.bit_length()} bits"
    return _truncate(repr(value[:MAX_CHARACTERS] if isinstance(value, str | bytes) else value))


def _as_numeric_array(value: Any) -> np.ndarray | None:
    """Return a list of numbers, or of equally long lists of numbers, as an array."""
    rows = value if value and all(type(row) in (list, tuple) for row in value) else [value]
    if sum(map(len, rows)) > MAX_LIST_ENTRIES:
        return None
    is_numeric = all(isinstance(entry, numbers.Real) for row in rows for entry in row)
    if not is_numeric or not rows[0] or len({len(row) for row in rows}) > 1:
        return None
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    array[:] = rows
    return array if rows is value else array[0]


def _contents(value: Any) -> tuple[int, Iterable[tuple[str, Any]]] | None:
    """Return the size and the named parts of a container or an object, or None if it has none to show.

    Attributes that start with an underscore are not shown.
    """
    if isinstance(value, type) or hasattr(value, "__code__"):
        return None
    if isinstance(value, dict):
        return len(value), ((_format_briefly(name), part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return len(value), zip(getattr(value, "_fields", map(str, count())), value, strict=False)
    if isinstance(value, set | frozenset):
        return len(value), (("", part) for part in value)
    if type(value).__module__ == "builtins" or type(value).__name__ == "module":
        return None
    fields = {name: part for name, part in getattr(value, "__dict__", {}).items() if name[:1] != "_"}
    return (len(fields), ((_truncate(name), part) for name, part in fields.items())) if fields else None


def _format_briefly(value: Any) -> str:
    """Format a value in a word or two, without calling its methods."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return str(_format_scalar(value))
    if kind in (range, slice):
        return _truncate(repr(value))
    name = getattr(value, "__name__", None)
    return _truncate(name) if isinstance(name, str) else "…"


def _type_name(kind: type) -> str:
    return _truncate(kind.__name__)


def _truncate(text: str) -> str:
    text = escape_unprintable(text[: MAX_CHARACTERS + 1])
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
