"""The public names of regard, room by room, read from `__all__`: what the site shows and a test holds."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import regard

PACKAGE = Path(regard.__file__).parent
# The order of the pages, from the matrix outwards; what is not named here comes after, by name.
ORDER = [
    "regard",
    "masks",
    "scores",
    "positions",
    "measures",
    "features",
    "nn",
    "lens",
    "plot",
    "explore",
    "survey",
    "learn",
    "testing",
    "engines",
]


@dataclass(frozen=True)
class Name:
    """One public thing: the name to call it by, what it is, its docstring, and for a class its members."""

    name: str  # as a caller writes it: regard.causal, regard.lens.Recording, regard.lens.Recording.find
    kind: str  # function, class, exception, data; method, staticmethod, classmethod, property
    value: Any
    doc: str
    signature: str = ""
    members: tuple[Name, ...] = ()
    bases: tuple[str, ...] = ()
    told: bool = False  # a member that a public base, or another library, tells of

    @property
    def module(self) -> str:
        """The module part of the name of a function, class or value."""
        return self.name.rpartition(".")[0]


@dataclass
class Room:
    """A module with an `__all__`, and those of its names that are shown on its page."""

    module: ModuleType
    names: list[Name] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.module.__name__

    @property
    def title(self) -> str:
        """The name as callers know it: regard.survey, whose room is private."""
        return self.name.replace("._", ".")

    @property
    def page(self) -> str:
        """The name of the page: matrix for regard itself, learn-family for regard.learn.family."""
        return "-".join(self.name.split(".")[1:]).removeprefix("_") or "matrix"

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.module) or ""


def lazy_names() -> list[str]:
    """What `regard.__getattr__` opens when asked: the strings that it compares the name with."""
    tree = ast.parse(inspect.getsource(regard.__getattr__))
    strings = [
        part.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return sorted({name for name in strings if not name.startswith("_")})


def modules() -> Iterator[ModuleType]:
    """regard, each module in it that names what is public, and the modules that these name."""
    yield regard
    for found in pkgutil.iter_modules(regard.__path__):
        if not found.name.startswith("_"):
            yield from _with_inner(f"regard.{found.name}")
    for name in lazy_names():  # a private room with a public face, such as that of regard.survey
        home = ".".join((getattr(getattr(regard, name), "__module__", None) or "").split(".")[:2])
        if home == f"regard._{name}":
            yield from _with_inner(home)


def _with_inner(name: str) -> Iterator[ModuleType]:
    """The module and those within it that it names; none if it names nothing, and then it is not imported either."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or "\n__all__" not in Path(spec.origin).read_text():
        return
    module = importlib.import_module(name)
    yield module
    for inner in module.__all__:
        if isinstance(getattr(module, inner), ModuleType):
            yield from _with_inner(f"{name}.{inner}")


@functools.cache
def rooms() -> tuple[Room, ...]:
    """Every room with its names. What regard itself exports is shown where it lives, under the shorter name."""
    found = sorted((Room(module) for module in modules()), key=lambda room: _place(room.name))
    short = {id(getattr(regard, name)): f"regard.{name}" for name in [*regard.__all__, *lazy_names()]}
    homes: dict[int, Room] = {}
    called: dict[int, str] = {}
    for room in reversed(found):  # the outermost room that names a thing comes last, and has it
        for name in room.module.__all__:
            value = getattr(room.module, name)
            if room.name != "regard" or id(value) not in homes:
                homes[id(value)] = room
            called[id(value)] = f"{room.name}.{name}"
    lost = {name for name in lazy_names() if id(getattr(regard, name)) not in homes}
    for name in sorted(lost):  # a lazy function whose module is private, such as regard.survey
        if not isinstance(value := getattr(regard, name), ModuleType):
            homes[id(value)] = found[0]
    public = {value: short.get(value, name) for value, name in called.items()}
    for room in found:
        listed = sorted({*room.module.__all__, *(lost if room.name == "regard" else ())})
        for name in listed:
            value = getattr(room.module, name)
            if homes.get(id(value)) is room and not isinstance(value, ModuleType):
                room.names.append(describe(short.get(id(value), f"{room.name}.{name}"), value, public))
        order = {"function": 0, "class": 1, "exception": 2, "data": 3}
        room.names.sort(key=lambda it: (order[it.kind], it.name))
    return tuple(found)


def _place(name: str) -> tuple[int, str]:
    top = name.split(".")[1].removeprefix("_") if "." in name else name
    return (ORDER.index(top) if top in ORDER else len(ORDER)), name


def describe(name: str, value: Any, public: dict[int, str]) -> Name:
    """A function, a class with its members, or a value."""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        bases = tuple(public[id(base)] for base in value.__mro__[1:] if id(base) in public)
        made = Written(value.__module__, public).made(value)
        return Name(name, kind, value, own_doc(value), made, tuple(members(name, value, public)), bases)
    if inspect.isroutine(value):
        written = Written(value.__module__, public).signature(value)
        return Name(name, "function", value, inspect.getdoc(value) or "", written)
    return Name(name, "data", value, comment_above(name.rpartition(".")[2], value))


def members(name: str, owner: type, public: dict[int, str]) -> Iterator[Name]:
    """Methods and properties: its own and those of bases that have no page; not what other libraries gave it."""
    seen: set[str] = set()
    for at in owner.__mro__:
        if at is not owner and (id(at) in public or not at.__module__.startswith("regard")):
            continue
        written = Written(at.__module__, public)
        for key, raw in vars(at).items():
            if key in seen or not _shown(key, raw):
                continue
            seen.add(key)
            doc, told = inherited_doc(owner, key, public)
            if isinstance(raw, property | functools.cached_property):
                got = raw.fget if isinstance(raw, property) else raw.func
                note = written.note(inspect.signature(got).return_annotation)
                yield Name(f"{name}.{key}", "property", raw, doc, note, told=told)
            else:
                kinds = {staticmethod: "staticmethod", classmethod: "classmethod"}
                function = inspect.unwrap(getattr(raw, "__func__", raw))
                skip = not isinstance(raw, staticmethod)
                kind = kinds.get(type(raw), "method")
                yield Name(f"{name}.{key}", kind, raw, doc, written.signature(function, skip), told=told)


def _shown(key: str, raw: Any) -> bool:
    routine = inspect.isfunction(raw) or isinstance(
        raw, property | functools.cached_property | staticmethod | classmethod
    )
    if key.startswith("__") and key.endswith("__"):  # operators that say something of themselves
        ours = inspect.isfunction(raw) and (raw.__module__ or "").startswith("regard")
        return ours and bool(raw.__doc__) and key != "__init__"
    return routine and not key.startswith("_")


def own_doc(value: type) -> str:
    """The docstring that a class wrote; what `dataclass` and `NamedTuple` make up is none."""
    doc = inspect.cleandoc(vars(value).get("__doc__") or "")
    return "" if doc.startswith(f"{value.__name__}(") else doc


def inherited_doc(owner: type, key: str, public: dict[int, str]) -> tuple[str, bool]:
    """The docstring of a member, or of the one that it overrides; and whether that is told elsewhere."""
    for at in (*owner.__mro__, *fulfilled(owner)):
        raw = vars(at).get(key)
        raw = getattr(raw, "__func__", raw)
        if raw is not None and raw.__doc__:
            elsewhere = at is not owner and (id(at) in public or not at.__module__.startswith("regard"))
            return inspect.cleandoc(raw.__doc__), elsewhere
    return "", False


def fulfilled(owner: type) -> list[type]:
    """The protocols beside a class that it fulfils without naming them."""
    beside = vars(importlib.import_module(owner.__module__.rpartition(".")[0] or "regard")).values()
    found = [it for it in beside if inspect.isclass(it) and getattr(it, "_is_protocol", False)]
    return [it for it in found if all(hasattr(owner, key) for key in vars(it) if not key.startswith("_"))]


def comment_above(name: str, value: Any) -> str:
    """The comment lines above the line that makes a value, wherever in the package that is."""
    for path, text in _files().items():
        if f"\n{name}" not in text:
            continue
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith((f"{name} = ", f"{name}: ")) and _is_there(path, name, value):
                first = number
                while first and lines[first - 1].startswith("#"):
                    first -= 1
                return "\n".join(text.removeprefix("#").strip() for text in lines[first:number])
    return ""


@functools.cache
def _files() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def _is_there(path: Path, name: str, value: Any) -> bool:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    dotted = ".".join(part for part in parts if part != "__init__")
    return getattr(importlib.import_module(dotted), name, None) is value


# -- Signatures, as they are written ----------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """Signatures of things of one module, annotations as they stand in the source, our own classes by full name."""

    module: str
    public: dict[int, str]

    def signature(self, function: Any, skip_first: bool = False) -> str:
        """The parameters and what is returned."""
        found = inspect.signature(function)
        parameters = list(found.parameters.values())[int(skip_first) :]
        arrow = f" -> {note}" if (note := self.note(found.return_annotation)) else ""
        return f"({self.joined(parameters)}){arrow}"

    def made(self, value: type) -> str:
        """How a caller makes one; nothing where the library makes it, or where there is nothing to make."""
        made = next(
            vars(at)[key] for at in value.__mro__ for key in ("__init__", "__new__") if key in vars(at)
        )
        ours = (getattr(made, "__module__", None) or value.__module__).startswith("regard")
        given = inspect.isabstract(value) or getattr(value, "_is_protocol", False)
        if not inspect.isfunction(made) or not ours or given:
            return ""
        bound = _bound(value)
        parameters = [p for p in list(inspect.signature(made).parameters.values())[1:] if p.name not in bound]
        needed = [p for p in parameters if p.default is inspect.Parameter.empty]
        return "" if any(self.is_private(p.annotation) for p in needed) else f"({self.joined(parameters)})"

    def note(self, note: Any) -> str:
        """An annotation as it is written, classes of regard by their full name; nothing where there is none."""
        if note is inspect.Signature.empty:
            return ""
        text = note if isinstance(note, str) else inspect.formatannotation(note)
        known = names_in(self.module)

        def full(match: re.Match[str]) -> str:
            value = known.get(match[0])
            return self.public.get(id(value), match[0]) if inspect.isclass(value) else match[0]

        return re.sub(r"(?<![.\w'])[A-Z]\w*", full, text)

    def is_private(self, note: Any) -> bool:
        """Whether an annotation names a class of regard that callers do not meet."""
        known = names_in(self.module)
        classes = [
            value for word in re.findall(r"\w+", str(note)) if inspect.isclass(value := known.get(word))
        ]
        return any(it.__module__.startswith("regard") and id(it) not in self.public for it in classes)

    def joined(self, parameters: list[inspect.Parameter]) -> str:
        parts: list[str] = []
        kinds = inspect.Parameter
        for at, parameter in enumerate(parameters):
            before = parameters[at - 1].kind if at else None
            if parameter.kind is kinds.KEYWORD_ONLY and before not in (
                kinds.KEYWORD_ONLY,
                kinds.VAR_POSITIONAL,
            ):
                parts.append("*")
            if before is kinds.POSITIONAL_ONLY and parameter.kind is not kinds.POSITIONAL_ONLY:
                parts.append("/")
            parts.append(self.parameter(parameter))
        if parameters and parameters[-1].kind is kinds.POSITIONAL_ONLY:
            parts.append("/")
        return ", ".join(parts)

    def parameter(self, parameter: inspect.Parameter) -> str:
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        if note := self.note(parameter.annotation):
            text += f": {note}"
        if parameter.default is not inspect.Parameter.empty:
            text += (" = " if note else "=") + _default(parameter.default)
        return text


@functools.cache
def names_in(module: str) -> dict[str, Any]:
    """What annotations of a module can name: its own names, and what it imports for the type checker alone."""
    found = importlib.import_module(module)
    known = dict(vars(found))
    for node in ast.walk(ast.parse(inspect.getsource(found))):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for line in node.body:
                if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("regard"):
                    there = importlib.import_module(str(line.module))
                    known |= {it.asname or it.name: getattr(there, it.name) for it in line.names}
    return known


def _default(value: Any) -> str:
    text = repr(value)
    if text.startswith("<") or len(text) > 40:  # a function, a field's factory, a table: its name will do
        return str(getattr(value, "__name__", "..."))
    return text


def _bound(value: type) -> set[str]:
    """The fields that a measure's `bind` sets, which are not for callers."""
    if not inspect.isfunction(bind := getattr(value, "bind", None)):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(bind)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {word.arg or "" for call in calls if ast.unparse(call.func) == "replace" for word in call.keywords}
