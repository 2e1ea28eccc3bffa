"""Find functions that other functions hold: in closures, defaults, `functools.partial` and dictionaries."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any

# How many functions deep a held function is looked for.
MAX_DEPTH = 3


class HeldFunctions(MutableMapping[str, Any]):
    """The functions that a function or partial holds, as a namespace for `patch`.

    Args:
        owner: The function or `functools.partial`.
    """

    def __init__(self, owner: Any) -> None:
        self._get_owner: Any = weakref.ref(owner)

    def __getitem__(self, name: str) -> Any:
        return dict(_list_held(self._get_owner()))[name]

    def __setitem__(self, name: str, value: Any) -> None:
        owner = self._get_owner()
        kind, _, place = name.partition(" ")
        if kind == "func":
            owner.__setstate__((value, owner.args, owner.keywords, owner.__dict__))
        elif kind == "closure":
            owner.__closure__[int(place)].cell_contents = value
        elif kind == "keyword":
            owner.__kwdefaults__[place] = value
        else:
            defaults = list(owner.__defaults__)
            defaults[int(place)] = value
            owner.__defaults__ = tuple(defaults)

    def __delitem__(self, name: str) -> None:
        raise TypeError("held functions can only be replaced")

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in _list_held(self._get_owner()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


# One namespace for each owner: a name is patched once, however many watches use it.
_namespaces: weakref.WeakKeyDictionary[Any, HeldFunctions] = weakref.WeakKeyDictionary()


def find_held_functions(roots: Iterable[Any]) -> Iterator[tuple[MutableMapping[str, Any], str, Any]]:
    """Yield namespace, name and value of everything that some functions hold, directly or not.

    Args:
        roots: Functions, methods, partials and dictionaries; anything else is skipped.
    """
    pending = [(root, 0) for root in roots]
    seen: set[int] = set()
    while pending:
        owner, depth = pending.pop()
        owner = getattr(owner, "__func__", owner)  # of a bound method
        if id(owner) in seen or not isinstance(owner, types.FunctionType | partial | dict):
            continue
        if isinstance(owner, types.FunctionType) and _is_library_function(owner):
            continue
        seen.add(id(owner))
        if isinstance(owner, dict):
            held = [(name, value) for name, value in owner.items() if callable(value)]
        else:
            held = list(_list_held(owner))
        if held:
            namespace = owner if isinstance(owner, dict) else _get_namespace(owner)
            for name, value in held:
                yield namespace, name, value
                if depth < MAX_DEPTH:
                    pending.append((value, depth + 1))


def _is_library_function(function: types.FunctionType) -> bool:
    """Return whether a function is of torch or regard, whose wrappers hold the originals."""
    return str(function.__globals__.get("__name__")).startswith(("torch.", "regard."))


def _get_namespace(owner: Any) -> HeldFunctions:
    if owner not in _namespaces:
        _namespaces[owner] = HeldFunctions(owner)
    return _namespaces[owner]


def _list_held(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield place and value of the callables that a function or partial holds."""
    if isinstance(owner, partial):
        held = [("func", owner.func)]
    else:
        held = [(f"default {i}", value) for i, value in enumerate(owner.__defaults__ or ())]
        held += [(f"keyword {name}", value) for name, value in (owner.__kwdefaults__ or {}).items()]
        for i, cell in enumerate(owner.__closure__ or ()):
            try:
                held.append((f"closure {i}", cell.cell_contents))
            except ValueError:  # not assigned yet
                continue
    return ((place, value) for place, value in held if callable(value))
