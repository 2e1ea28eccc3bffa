"""Compare arguments between ranks by a hash of what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np


def describe_argument_content(argument: object) -> str:
    """Describe an argument by its repr and a hash of everything that it holds, arrays included.

    Args:
        argument: A mask, a score modification, a measure, or None.

    >>> from regard import causal
    >>> describe_argument_content(causal()) == describe_argument_content(causal("upper_left"))
    False
    """
    if argument is None:
        return "none"
    digest = hashlib.sha256()
    for part in _list_parts(argument, set()):
        digest.update(part)
    return f"{argument!r} #{digest.hexdigest()[:12]}"


def _list_parts(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield the bytes that identify a value: type, and numbers, text, arrays and attributes in it."""
    yield f"<{type(value).__module__}.{type(value).__qualname__}>".encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | slice | range):
        yield repr(value).encode()
        return
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() and value.itemsize < 4 else value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Any = sorted(value.items(), key=lambda item: str(item[0]))
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, type) or not hasattr(value, "__dict__"):
        yield str(getattr(value, "__qualname__", value)).encode()
        return
    else:
        # Attributes with an underscore are caches.
        items = sorted((name, held) for name, held in vars(value).items() if not name.startswith("_"))
    for name, held in items:
        yield str(name).encode()
        yield from _list_parts(held, seen)
