"""Patch names of other modules while a model is watched, restore them afterwards, and find where functions are held.

A name is patched once, however many watches use it, and restored when the last of them exits, in any order.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from operator import is_
from typing import Any, NamedTuple

from torch import nn

Function = Callable[..., Any]
PatchKey = tuple[int, str]
# Namespace, name, and what makes a wrapper of the function there: the arguments of `patch`.
Target = tuple[MutableMapping[str, Any], str, Callable[[Function], Function]]
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
    """The methods of a class as a namespace for `patch`; restoring one leaves the class exactly as it was."""

    def __init__(self, owner: type) -> None:
        self._owner = owner
        # By name: the function, and the entry of the class or None.
        self._saved: dict[str, tuple[Function, Any]] = {}

    def __getitem__(self, name: str) -> Function:
        entry = self._find(name)
        function: Function = entry.__func__ if isinstance(entry, classmethod | staticmethod) else entry
        return function

    def __setitem__(self, name: str, function: Function) -> None:
        original, entry = self._saved.get(name, (None, None))
        if function is original:
            del self[name]
            if entry is not None:
                setattr(self._owner, name, entry)
            return
        present = self._find(name)
        self._saved.setdefault(name, (self[name], vars(self._owner).get(name)))
        kind = type(present)
        setattr(self._owner, name, kind(function) if kind in (classmethod, staticmethod) else function)

    def _find(self, name: str) -> Any:
        """Return the entry of the class that is nearest in the order of its bases."""
        for base in self._owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
        return inspect.getattr_static(self._owner, name)  # of its metaclass, or an error

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


class _Excluding(NamedTuple):
    """Functions that call another function, which is their first argument, where torch.compile does not trace it."""

    get_callback: Function | None
    always: Function
    while_compiling: Function


@cache
def _get_excluding() -> _Excluding:
    """Return the functions that exclude others. There is one of each, since `torch.compiler.disable` takes its time."""
    torch = sys.modules["torch"]
    reason = "regard.watch records attention in Python; compile or export with fullgraph outside its block"

    def run(function: Function, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    always: Function = torch.compiler.disable(run, reason=reason)
    get_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if get_callback is None:
        return _Excluding(None, always, always)

    def dispatch(function: Function, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if get_callback() is None else always(function, *args, **kwargs)

    return _Excluding(get_callback, always, torch.compiler.disable(dispatch, recursive=False, reason=reason))


def exclude_from_compile(function: Function) -> Function:
    """Return a function that torch.compile does not trace into, for callers that compile while a model is watched."""
    if "torch._dynamo" not in sys.modules or hasattr(function, "_regard_is_traced"):
        return function
    get_callback, always, while_compiling = _get_excluding()
    if get_callback is None:

        @wraps(function)
        def call_excluded(*args: Any, **kwargs: Any) -> Any:
            return always(function, *args, **kwargs)

        return call_excluded

    # torch.export rejects a function that is excluded this way, and runs it in Python anyway. The flag is read because
    # the compiler of torch 2.9 takes is_exporting() for True.
    compiler = sys.modules["torch"].compiler
    is_compiling = compiler.is_compiling

    @wraps(function)
    def call_or_export(*args: Any, **kwargs: Any) -> Any:
        # `disable` costs time at every call, and a token of generate() has a dozen calls: skip it if nothing compiles.
        # While it traces, the compiler takes is_compiling() for True, and reads no further.
        if not is_compiling() and get_callback() is None:
            return function(*args, **kwargs)
        is_exporting = getattr(compiler, "_is_exporting_flag", False)
        return function(*args, **kwargs) if is_exporting else while_compiling(function, *args, **kwargs)

    return call_or_export


# Wrappers of functions that exist as long as the process, by what makes them, and what is wrapped; see `_wrap`.
_wrappers: dict[tuple[Any, ...], tuple[Function, Function]] = {}


def _wrap(original: Function, make_wrapper: Callable[[Function], Function]) -> Function:
    """Return the wrapper of a function, the one of the last time if there is any."""
    key: tuple[Any, ...] | None = None
    if type(make_wrapper) is types.FunctionType and make_wrapper.__closure__ is None:
        owner = getattr(original, "__self__", None)
        is_builtin = type(original) is types.BuiltinFunctionType and isinstance(
            owner, type | types.ModuleType | None
        )
        if is_builtin or type(original) is types.MethodDescriptorType:
            key = make_wrapper, id(original)
        elif type(original) is types.FunctionType and is_installed(original.__globals__):
            # A wrapper keeps what it wraps alive, so it is kept for names of files only: a reloaded one replaces it.
            file, name = original.__globals__, original.__qualname__
            if unwrap_original(file.get(name)) is original:
                key = make_wrapper, id(file), name
    key = key and (*key, "torch._dynamo" in sys.modules)
    known, wrapper = _wrappers.get(key, (None, original)) if key else (None, original)
    if known is original:
        return wrapper
    wrapper = exclude_from_compile(make_wrapper(original))
    wrapper._regard_original = original  # type: ignore[attr-defined]
    if key:
        _wrappers[key] = original, wrapper
    return wrapper


def is_installed(namespace: Mapping[str, Any]) -> bool:
    """Return whether globals are those of an installed file, which rarely binds a name anew after its import."""
    return "-packages" in str(namespace.get("__file__"))


def patch(
    namespace: MutableMapping[str, Any], name: str, make_wrapper: Callable[[Function], Function]
) -> PatchKey:
    """Replace `namespace[name]` by its wrapper, unless it is already patched; return what `unpatch` needs."""
    with _lock:
        key = (id(namespace), name)
        if key not in _patches:
            original = namespace[name]
            wrapper = _wrap(original, make_wrapper)
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
    """Return the function that a patch replaced, or the value itself; attributes of other objects are not read."""
    return (
        vars(function).get("_regard_original", function) if type(function) is types.FunctionType else function
    )


def list_patches() -> list[tuple[MutableMapping[str, Any], str]]:
    """List the names that are patched now, each with its namespace."""
    with _lock:
        return [(held.namespace, held.name) for held in _patches.values()]


# Modules of torch and regard call functions by attribute, or must keep the originals. The standard library imports
# nothing from torch.
_SKIPPED = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "regard"}
# It compiles the function at its first call, and would keep a compiled wrapper. Its caller is wrapped.
_SKIPPED_MODULE = "transformers.integrations.flex_attention"

# Installed files in which nothing was found, by name: id of their globals, number of names, and what was sought.
# Reading all takes milliseconds, so a file is read again only if it has another number of names.
_Clean = dict[str, tuple[int, int, frozenset[int]]]
_clean_names: _Clean = {}
_clean_functions: _Clean = {}


class _Search(NamedTuple):
    """What a search of all modules has found. It holds as long as each value is what it was.

    Args:
        function_ids: What was sought.
        modules: All modules.
        clean: The globals of the installed files in which nothing was found.
        lengths: The number of names of each.
        others: The globals of the modules to search each time.
    """

    function_ids: frozenset[int]
    modules: list[Any]
    clean: Sequence[MutableMapping[str, Any]]
    lengths: list[int]
    others: Sequence[MutableMapping[str, Any]]


_last_search = _Search(frozenset(), [], [], [], [])


def find_imported(function_ids: frozenset[int], compiled: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield the globals of the modules that imported a function by name: `from torch.nn.functional import softmax`.

    Functions are given by their `id`. Their wrappers, and what `torch.compile` made of `compiled`, count as well.
    """
    global _last_search
    with _lock:
        in_place = {id(held.wrapper) for held in _patches.values() if id(held.original) in function_ids}
    sought = function_ids | in_place
    modules, last = list(sys.modules.values()), _last_search
    # A loop in Python over all modules would take most of the time of entering a watch.
    is_known = function_ids == last.function_ids and modules == last.modules
    if is_known and list(map(len, last.clean)) == last.lengths:
        yield from (file for file in last.others if _holds(file, sought, compiled))
        return
    loaded = sys.modules.copy()  # another thread may import a module meanwhile
    clean, lengths, others = [], [], []
    for name, module in loaded.items():
        is_skipped = name.partition(".")[0] in _SKIPPED or name == _SKIPPED_MODULE
        if is_skipped or not isinstance(module, types.ModuleType):
            continue
        namespace = vars(module)
        state = id(namespace), len(namespace), function_ids
        if _clean_names.get(name) == state:
            clean.append(namespace)
            lengths.append(state[1])
        elif _holds(namespace, sought, compiled):
            others.append(namespace)
            yield namespace
        elif is_installed(namespace):
            _clean_names[name] = state
            clean.append(namespace)
            lengths.append(state[1])
        else:
            others.append(namespace)
    _last_search = _Search(function_ids, list(loaded.values()), clean, lengths, others)


def _holds(namespace: MutableMapping[str, Any], sought: frozenset[int], compiled: Any) -> bool:
    """Return whether a value is one of some functions, by `id`, or what `torch.compile` made of one."""
    values = tuple(namespace.values())
    return not sought.isdisjoint(map(id, values)) or holds_compiled(values, compiled)


class KnownNames:
    """What was found in the namespaces of installed files and their classes, until a name is bound anew."""

    def __init__(self) -> None:
        # By the id of a namespace's owner: owner, what was sought, names, values, and what was found.
        self._known: dict[int, tuple[Any, Any, tuple[str, ...], tuple[Any, ...], Any]] = {}

    def find(self, owner: Any, namespace: Mapping[str, Any], sought: Any, search: Callable[[], Any]) -> Any:
        """Return what `search` finds in the namespace of an owner, without a call if nothing has changed."""
        names, values = tuple(namespace), tuple(namespace.values())
        known = self._known.get(id(owner))
        if known is not None and known[:3] == (owner, sought, names) and all(map(is_, known[3], values)):
            return known[4]
        found = search()
        if not _patches:  # the values are those of the files
            self._known[id(owner)] = owner, sought, names, values, found
        return found


def holds_compiled(values: Iterable[Any], function: Any) -> bool:
    """Return whether a value is what `torch.compile` made of a function."""
    compiled = [
        vars(value)["_torchdynamo_orig_callable"]
        for value in values
        if type(value) is types.FunctionType and "_torchdynamo_orig_callable" in vars(value)
    ]
    return any(unwrap_original(original) is function for original in compiled)


# Attributes that every module has.
_FIELDS = frozenset(vars(nn.Module()))

# Types of values that neither are functions nor hold any.
_PLAIN = frozenset({bool, int, float, str, tuple, list, type(None)})

# How many functions deep a held function is looked for.
MAX_DEPTH = 3


class HeldFunctions(MutableMapping[str, Any]):
    """The functions that a function or `functools.partial` holds, as a namespace for `patch`."""

    def __init__(self, owner: Any) -> None:
        self._get_owner: Any = weakref.ref(owner)

    def __getitem__(self, name: str) -> Any:
        return _list_held(self._get_owner())[name]

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
        return iter(_list_held(self._get_owner()))

    def __len__(self) -> int:
        return len(_list_held(self._get_owner()))


# One namespace for each owner: a name is patched once, however many watches use it.
_namespaces: weakref.WeakKeyDictionary[Any, HeldFunctions] = weakref.WeakKeyDictionary()


def list_attributes(parts: Iterable[nn.Module]) -> list[tuple[MutableMapping[str, Any], str, Any]]:
    """List namespace, name and value of the attributes of modules that not every module has, without plain values."""
    return [
        (vars(part), name, value)
        for part in parts
        for name, value in vars(part).items()
        if name not in _FIELDS and type(value) not in _PLAIN
    ]


def find_held_functions(
    attributes: Iterable[Any],
    classes: Iterable[type],
    files: Iterable[MutableMapping[str, Any]],
    function_ids: frozenset[int],
) -> Iterator[tuple[MutableMapping[str, Any], str, Any]]:
    """Yield namespace, name and original of functions that closures, defaults, partials and dictionaries hold.

    The attributes of a model's modules, the methods of its classes, and the globals of their files are searched.
    """
    for file in files:
        name = str(file.get("__name__"))
        state = id(file), len(file), function_ids
        if _clean_functions.get(name) == state or name.startswith("regard."):
            continue
        methods = [item for base in classes if base.__module__ == name for item in vars(base).values()]
        found = list(_search([*file.values(), *methods], function_ids))
        yield from found
        if not found and is_installed(file):
            _clean_functions[name] = state
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
        # The wrappers of torch and regard hold the originals.
        file = owner.__globals__.get("__name__") if isinstance(owner, types.FunctionType) else ""
        if str(file).startswith(("torch.", "regard.")):
            continue
        namespace = owner if isinstance(owner, dict) else _namespaces.setdefault(owner, HeldFunctions(owner))
        held = owner if isinstance(owner, dict) else _list_held(owner)
        for name, value in tuple(dict.items(held)):  # a lazy mapping of transformers would import every model
            original = unwrap_original(value)
            if id(original) in function_ids:
                yield namespace, name, original
            elif depth < MAX_DEPTH and callable(value):
                pending.append((value, depth + 1))


def _list_held(owner: Any) -> dict[str, Any]:
    """Return the callables that a function or partial holds, by their place."""
    if isinstance(owner, partial):
        held = {"func": owner.func}
    else:
        held = {f"default {i}": value for i, value in enumerate(owner.__defaults__ or ())}
        held |= {f"keyword {name}": value for name, value in (owner.__kwdefaults__ or {}).items()}
        for i, cell in enumerate(owner.__closure__ or ()):
            try:
                held[f"closure {i}"] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    return {place: value for place, value in held.items() if callable(value)}
