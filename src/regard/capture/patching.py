"""Patch names of other modules while a model is watched, and restore them afterwards.

A name is patched once, however many watches use it, and restored when the last of them exits, in any order.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

Function = Callable[..., Any]
PatchKey = tuple[int, str]
# Makes a hook that runs only where it should, from a hook and its number of arguments.
Guard = Callable[[Function, int], Function]


@dataclass
class _Patch:
    namespace: MutableMapping[str, Any]
    name: str
    original: Any
    wrapper: Any
    users: int = 0


_lock = threading.RLock()
_patches: dict[PatchKey, _Patch] = {}


class ClassNamespace(MutableMapping[str, Any]):
    """The methods of a class as a namespace for `patch`; restoring one leaves the class exactly as it was.

    Args:
        owner: The class.
    """

    def __init__(self, owner: type) -> None:
        self._owner = owner
        self._saved: dict[
            str, tuple[Function, Any]
        ] = {}  # by name: the function, and the entry of the class or None

    def __getitem__(self, name: str) -> Function:
        entry = inspect.getattr_static(self._owner, name)
        function: Function = entry.__func__ if isinstance(entry, classmethod | staticmethod) else entry
        return function

    def __setitem__(self, name: str, function: Function) -> None:
        original, entry = self._saved.get(name, (None, None))
        if function is original:
            del self[name]
            if entry is not None:
                setattr(self._owner, name, entry)
            return
        present = inspect.getattr_static(self._owner, name)
        self._saved.setdefault(name, (self[name], vars(self._owner).get(name)))
        kind = type(present)
        setattr(self._owner, name, kind(function) if kind in (classmethod, staticmethod) else function)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)
        self._saved.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._owner))

    def __len__(self) -> int:
        return len(vars(self._owner))


@cache
def class_namespace(owner: type) -> ClassNamespace:
    """Return the namespace of a class, one for each class."""
    return ClassNamespace(owner)


def exclude_from_compile(function: Function) -> Function:
    """Return a function that torch.compile does not trace into, for callers that compile while a model is watched."""
    if "torch._dynamo" not in sys.modules:
        return function
    torch = sys.modules["torch"]
    reason = "regard.watch records attention in Python; compile or export with fullgraph outside its block"
    excluded: Function = torch.compiler.disable(function, reason=reason)
    get_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if get_callback is None:
        return excluded

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if get_callback() is None else excluded(*args, **kwargs)

    dispatched: Function = torch.compiler.disable(call, recursive=False, reason=reason)

    # torch.export rejects a function that is excluded this way, and runs it in Python anyway. The flag is read because
    # the compiler of torch 2.9 takes is_exporting() for True.
    compiler, is_compiling = torch.compiler, torch.compiler.is_compiling

    @wraps(function)
    def call_or_export(*args: Any, **kwargs: Any) -> Any:
        # `disable` costs time at every call, and a token of generate() has a dozen calls: skip it if nothing compiles.
        # While it traces, the compiler takes is_compiling() for True, and reads no further.
        if not is_compiling() and get_callback() is None:
            return function(*args, **kwargs)
        is_exporting = getattr(compiler, "_is_exporting_flag", False)
        return function(*args, **kwargs) if is_exporting else dispatched(*args, **kwargs)

    return call_or_export


def patch(
    namespace: MutableMapping[str, Any], name: str, make_wrapper: Callable[[Function], Function]
) -> PatchKey:
    """Replace `namespace[name]` by `make_wrapper(namespace[name])`, unless it is already patched.

    Args:
        namespace: The `vars()` of a module, or a registry.
        name: The key to replace.
        make_wrapper: Called with the original function.

    Returns:
        What `unpatch` needs to undo it.
    """
    with _lock:
        key = (id(namespace), name)
        if key not in _patches:
            original = namespace[name]
            wrapper = exclude_from_compile(make_wrapper(original))
            wrapper._regard_original = original  # type: ignore[attr-defined]
            _patches[key] = _Patch(namespace, name, original, wrapper)
            namespace[name] = wrapper
        _patches[key].users += 1
        return key


def unpatch(key: PatchKey) -> None:
    """Release a patch; the last user to release it restores the original."""
    with _lock:
        held = _patches[key]
        held.users -= 1
        if held.users:
            return
        del _patches[key]
        # If another library wrapped the name in the meantime, leave its wrapper in place.
        if held.namespace.get(held.name) is held.wrapper:
            held.namespace[held.name] = held.original


def unwrap_original(function: Any) -> Any:
    """Return the function that a patch replaced, or the function itself if it is not a wrapper."""
    return getattr(function, "_regard_original", function) if callable(function) else function


def list_wrappers() -> list[tuple[Function, Function]]:
    """List the wrappers that are in place now, each with the function that it replaced."""
    with _lock:
        return [(held.wrapper, held.original) for held in _patches.values()]


def list_patches() -> list[tuple[MutableMapping[str, Any], str]]:
    """List the names that are patched now, each with its namespace."""
    with _lock:
        return [(held.namespace, held.name) for held in _patches.values()]
