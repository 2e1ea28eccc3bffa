"""Values as they were at a moment: small plain records, copied, so that nothing done later changes them."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from itertools import count, islice
from typing import Any

import numpy as np

from regard.render.text import escape_unprintable

ROWS, COLUMNS = 8, 8  # the entries shown of an array; of more, the last gives way to an ellipsis
PARTS = 16
LISTED = 4096  # entries of a list that are gone through to see whether all are numbers
LETTERS = 120
DEPTH = 2  # a tuple of objects of arrays, and no further


def kept(value: Any, depth: int = 0) -> dict[str, Any]:
    """A record of a value: `type`, and its `text`, its `cells` (rows of entries, with their `shape`) or its `parts`.

    Whatever a value does when looked at, this returns: a value that cannot be shown is told by its type.

    >>> kept(0.5)
    {'type': 'float', 'text': 0.5}
    >>> kept(np.eye(2))
    {'type': 'float64', 'shape': [2, 2], 'cells': [[1.0, 0.0], [0.0, 1.0]]}
    >>> kept(("a", [1, 2]))["parts"]
    [['0', {'type': 'str', 'text': "'a'"}], ['1', {'type': 'list', 'shape': [2], 'cells': [[1, 2]]}]]
    """
    try:
        return _kept(value, depth)
    except Exception:  # a value of the reader's own may do anything
        return {"type": _name(type(value)), "text": "cannot be shown"}


def _kept(value: Any, depth: int) -> dict[str, Any]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return {"type": _name(kind), "text": _scalar(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _array(np.asarray(value), str(value.dtype))
    if kind.__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
        wide = value.detach().cpu()
        wide = wide.double() if wide.is_floating_point() else wide  # NumPy has no bfloat16
        return _array(wide.numpy(), str(value.dtype))
    if kind in (list, tuple) and (array := _numeric(value)) is not None:
        return _array(array, _name(kind))
    held = _parts(value)
    if held is None or depth >= DEPTH:
        return {"type": _name(kind), "text": _told(value)}
    size, named = held
    parts = [[name, kept(part, depth + 1)] for name, part in islice(named, PARTS)]
    return {"type": _name(kind), "parts": parts, "left_out": max(0, size - PARTS)}


def _array(array: np.ndarray, kind: str) -> dict[str, Any]:
    """The first matrix of an array, without the middle of its rows and columns where they are many."""
    if array.ndim == 0:
        return {"type": kind, "text": _scalar(array.item())}
    if array.size == 0:
        return {"type": kind, "shape": list(array.shape), "cells": []}
    first = array
    while first.ndim > 2:
        first = first[0]
    rows = np.atleast_2d(first)
    down, across = _ends(rows.shape[0], ROWS), _ends(rows.shape[1], COLUMNS)
    cells = [[_entry(x) for x in row] for row in rows[np.ix_(down, across)].tolist()]
    if len(across) < rows.shape[1]:
        cells = [[*row[:-1], "…", row[-1]] for row in cells]
    if len(down) < rows.shape[0]:
        cells.insert(-1, ["…"] * len(cells[0]))
    return {"type": kind, "shape": list(array.shape), "cells": cells}


def _entry(x: Any) -> Any:
    return _scalar(x) if isinstance(x, bool | int | float | complex | str | bytes) else _name(type(x))


def _ends(size: int, most: int) -> list[int]:
    """The places shown of so many: all, or the first and the last, with room for the ellipsis between."""
    return list(range(size)) if size <= most else [*range(most - 2), size - 1]


def _scalar(value: Any) -> Any:
    """A number that is shown as one, as it is; anything else as text."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**6):
        return value
    if isinstance(value, int) and value.bit_length() > 4 * LETTERS:  # Python refuses to write the longest
        return f"an int of {value.bit_length()} bits"
    return _short(repr(value[:LETTERS] if isinstance(value, str | bytes) else value))


def _numeric(value: Any) -> np.ndarray | None:
    """A list of numbers, or of equally long lists of numbers, as an array."""
    rows = value if value and all(type(row) in (list, tuple) for row in value) else [value]
    if sum(map(len, rows)) > LISTED:
        return None
    plain = all(isinstance(x, numbers.Real) for row in rows for x in row)
    if not plain or not rows[0] or len({len(row) for row in rows}) > 1:
        return None
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    array[:] = rows
    return array if rows is value else array[0]


def _parts(value: Any) -> tuple[int, Iterable[tuple[str, Any]]] | None:
    """How much a container or an object holds, and what, by name; None for what holds nothing to show."""
    if isinstance(value, type) or hasattr(value, "__code__"):
        return None
    if isinstance(value, dict):
        return len(value), ((_told(name), part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return len(value), zip(getattr(value, "_fields", map(str, count())), value, strict=False)
    if isinstance(value, set | frozenset):
        return len(value), (("", part) for part in value)
    if type(value).__module__ == "builtins" or type(value).__name__ == "module":
        return None
    fields = getattr(value, "__dict__", {})
    return (len(fields), ((_short(name), part) for name, part in fields.items())) if fields else None


def _told(value: Any) -> str:
    """A value in a word or two, without running code of its own."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return str(_scalar(value))
    if kind in (range, slice):
        return _short(repr(value))
    name = getattr(value, "__name__", None)
    return _short(name) if isinstance(name, str) else "…"


def _name(kind: type) -> str:
    return _short(kind.__name__)


def _short(text: str) -> str:
    text = escape_unprintable(text[: LETTERS + 1])
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"
