"""Find functions that other functions hold: in closures, defaults, `functools.partial` and dictionaries."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any

from torch import nn

from regard.capture.patching import unwrap_original

# Attributes that every module has.
_FIELDS = frozenset(vars(nn.Module()))

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

# Installed files in which nothing was found, by the id of their globals: number of names, and what was sought.
_clean: dict[int, tuple[int, frozenset[int]]] = {}


def find_held_functions(
    model: nn.Module, files: Iterable[MutableMapping[str, Any]], function_ids: frozenset[int]
) -> Iterator[tuple[MutableMapping[str, Any], str, Any]]:
    """Yield namespace, name and original of some functions, wherever functions and attributes of a model hold them.

    Args:
        model: The model: its attributes and the methods of its classes are searched.
        files: The globals of the files that define its classes.
        function_ids: The `id` of each function to find.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    for file in files:
        name = file.get("__name__")
        if _clean.get(id(file)) == (len(file), function_ids) or str(name).startswith("regard."):
            continue
        methods = [item for base in classes if base.__module__ == name for item in vars(base).values()]
        found = list(_search([*file.values(), *methods], function_ids))
        yield from found
        if not found and "-packages" in str(file.get("__file__")):
            _clean[id(file)] = (len(file), function_ids)
    attributes = [
        item for part in model.modules() for name, item in vars(part).items() if name not in _FIELDS
    ]
    yield from _search(attributes, function_ids)


def _search(
    roots: Iterable[Any], function_ids: frozenset[int]
) -> Iterator[tuple[MutableMapping[str, Any], str, Any]]:
    """Yield namespace, name and original of some functions that functions, partials and dictionaries hold."""
    pending = [(root, 0) for root in roots]
    seen: set[int] = set()
    while pending:
        owner, depth = pending.pop()
        owner = owner.__func__ if isinstance(owner, types.MethodType | staticmethod | classmethod) else owner
        if id(owner) in seen or not isinstance(owner, types.FunctionType | partial | dict):
            continue
        seen.add(id(owner))
        if isinstance(owner, types.FunctionType) and _is_library_function(owner):
            continue
        namespace = owner if isinstance(owner, dict) else _namespaces.setdefault(owner, HeldFunctions(owner))
        for name, value in tuple(owner.items()) if isinstance(owner, dict) else tuple(_list_held(owner)):
            is_wrapper = isinstance(value, types.FunctionType) and "_regard_original" in vars(value)
            original = unwrap_original(value) if is_wrapper else value
            if id(original) in function_ids:
                yield namespace, name, original
            elif depth < MAX_DEPTH and callable(value):
                pending.append((value, depth + 1))


def _is_library_function(function: types.FunctionType) -> bool:
    """Return whether a function is of torch or regard, whose wrappers hold the originals."""
    return str(function.__globals__.get("__name__")).startswith(("torch.", "regard."))


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
