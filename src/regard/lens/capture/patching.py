"""Names of other people's modules, wrapped while somebody watches and put back afterwards.

A name is wrapped once however many watch, and put back when the last one leaves, in whatever order they do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

Function = Callable[..., Any]


@dataclass
class _Wrapped:
    names: MutableMapping[str, Any]
    name: str
    original: Any
    wrapper: Any
    users: int = 0


_lock = threading.RLock()
_wrapped: dict[tuple[int, str], _Wrapped] = {}


def opaque(function: Function) -> Function:
    """The function, which torch.compile leaves as it is: whoever compiles meanwhile does not trace into the lens."""
    if "torch._dynamo" not in sys.modules:
        return function
    torch = sys.modules["torch"]
    hidden: Function = torch.compiler.disable(function)
    compiling = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if compiling is None:
        return hidden

    # Where nobody compiles, what `disable` does at every call is left out: a token of generate() has a dozen of them.
    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if compiling() is None else hidden(*args, **kwargs)

    outside: Function = torch.compiler.disable(either, recursive=False)
    return outside


def wrap(names: MutableMapping[str, Any], name: str, make: Callable[[Function], Function]) -> tuple[int, str]:
    """Put `make(function)` where `names[name]` is; what is returned undoes it, through `unwrap`."""
    with _lock:
        place = (id(names), name)
        if place not in _wrapped:
            original = names[name]
            wrapper = opaque(make(original))
            wrapper._regard_original = original  # type: ignore[attr-defined]
            _wrapped[place] = _Wrapped(names, name, original, wrapper)
            names[name] = wrapper
        _wrapped[place].users += 1
        return place


def unwrap(place: tuple[int, str]) -> None:
    """Leave a place; the last one to leave puts the name back."""
    with _lock:
        held = _wrapped[place]
        held.users -= 1
        if not held.users:
            del _wrapped[place]
            if (
                held.names.get(held.name) is held.wrapper
            ):  # else somebody wrapped it after us, and will put ours back
                held.names[held.name] = held.original


def wrapped_names() -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Every name that is wrapped now."""
    with _lock:
        yield from [(held.names, held.name) for held in _wrapped.values()]
