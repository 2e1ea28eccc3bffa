"""Collect the public names of regard from `__all__`, for the reference pages and the tests of their docstrings."""

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
# The order of the pages, from the matrix outwards. Modules that are not listed follow by name.
PAGE_ORDER = [
    "regard",
    "masks",
    "score_mods",
    "positions",
    "measures",
    "feature_maps",
    "nn",
    "distributed",
    "lens",
    "interventions",
    "monitor",
    "transformers",
    "vllm",
    "models",
    "plot",
    "explore",
    "survey",
    "policy",
    "learn",
    "testing",
    "engines",
]
KIND_ORDER = ["function", "class", "exception", "data"]


@dataclass(frozen=True)
class PublicName:
    """A public object: its full name, kind, docstring and signature, and the members of a class."""

    name: str  # as callers write it: regard.causal, regard.lens.Recording, regard.lens.Recording.find
    kind: str  # function, class, exception, data; method, staticmethod, classmethod, property
    value: Any
    doc: str
    signature: str = ""
    parameters: tuple[str, ...] = ()
    members: tuple[PublicName, ...] = ()
    bases: tuple[str, ...] = ()
    documented_elsewhere: bool = False  # a member whose docstring belongs to a public base or another library

    @property
    def module(self) -> str:
        """The name up to the last dot."""
        return self.name.rpartition(".")[0]

    @property
    def undocumented_parameters(self) -> list[str]:
        """The parameters that the sections `Args:` and `Attributes:` of the docstring do not list."""
        sections = re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n)+)", self.doc + "\n", re.MULTILINE)
        entries = re.findall(r"^    ([\w*, ]+)(?: \(.*\))?:", "\n".join(sections), re.MULTILINE)
        documented = {name.strip(" *") for entry in entries for name in entry.split(",")}
        return [name for name in self.parameters if name not in documented]


@dataclass
class PublicModule:
    """A module with an `__all__`, and the names that its page shows."""

    module: ModuleType
    names: list[PublicName] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.module.__name__

    @property
    def page(self) -> str:
        """The file name of the page: matrix for regard itself, learn-family for regard.learn.family."""
        return "-".join(self.name.split(".")[1:]) or "matrix"

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.module) or ""


def find_modules() -> Iterator[ModuleType]:
    """Yield regard, each of its modules with an `__all__`, and the modules listed there."""
    yield regard
    for module in pkgutil.iter_modules(regard.__path__):
        if not module.name.startswith("_"):
            yield from _walk_module(f"regard.{module.name}")


def list_exports(module: ModuleType) -> list[str]:
    """Return the public names of a module: its `__all__`; for regard, those imported on first access as well."""
    return [name for name in dir(module) if name[0] != "_"] if module is regard else list(module.__all__)


def _walk_module(name: str) -> Iterator[ModuleType]:
    """Yield a module and the modules in its `__all__`. A module without `__all__` is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or "\n__all__" not in Path(spec.origin).read_text():
        return
    module = importlib.import_module(name)
    yield module
    for inner in module.__all__:
        if isinstance(getattr(module, inner), ModuleType):
            yield from _walk_module(f"{name}.{inner}")


@functools.cache
def public_modules() -> tuple[PublicModule, ...]:
    """Return every public module with its names.

    A name that `regard` and one of its modules export is shown on the page of that module, as `regard.name`.
    """
    modules = sorted((PublicModule(module) for module in find_modules()), key=lambda it: _page_rank(it.name))
    homes: dict[int, PublicModule] = {}
    full_names: dict[int, str] = {}
    for public_module in reversed(modules):  # outer modules come last and win, except regard itself
        for name in list_exports(public_module.module):
            value = getattr(public_module.module, name)
            if isinstance(value, ModuleType):
                continue
            if public_module.name != "regard" or id(value) not in homes:
                homes[id(value)] = public_module
            full_names[id(value)] = f"{public_module.name}.{name}"
    for public_module in modules:
        for name in sorted(set(list_exports(public_module.module))):
            value = getattr(public_module.module, name)
            if homes.get(id(value)) is public_module:
                public_module.names.append(describe(full_names[id(value)], value, full_names))
        public_module.names.sort(key=lambda it: (KIND_ORDER.index(it.kind), it.name))
    return tuple(modules)


def _page_rank(name: str) -> tuple[int, str]:
    top = name.split(".")[1] if "." in name else name
    return (PAGE_ORDER.index(top) if top in PAGE_ORDER else len(PAGE_ORDER)), name


def describe(name: str, value: Any, full_names: dict[int, str]) -> PublicName:
    """Describe a function, a class with its members, or a value."""
    formatter = SignatureFormatter(full_names)
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        bases = tuple(full_names[id(base)] for base in value.__mro__[1:] if id(base) in full_names)
        members = tuple(find_members(name, value, formatter))
        signature, parameters = formatter.constructor(value)
        return PublicName(name, kind, value, own_doc(value), signature, parameters, members, bases)
    if inspect.isroutine(value):
        signature, parameters = formatter.signature(value)
        return PublicName(name, "function", value, inspect.getdoc(value) or "", signature, parameters)
    return PublicName(name, "data", value, comment_above(name.rpartition(".")[2], value))


def find_members(name: str, owner: type, formatter: SignatureFormatter) -> Iterator[PublicName]:
    """Yield the methods and properties of a class and of its bases in regard that have no page of their own."""
    found: set[str] = set()
    for base in owner.__mro__:
        if base is not owner and _has_own_docs(base, formatter.full_names):
            continue
        for key, raw in vars(base).items():
            is_field = key in getattr(base, "__dataclass_fields__", {})  # its default can be a function
            if key in found or is_field or not _is_public_member(key, raw):
                continue
            found.add(key)
            doc, elsewhere = inherited_doc(owner, key, formatter.full_names)
            if isinstance(raw, property | functools.cached_property):
                getter = raw.fget if isinstance(raw, property) else raw.func
                kind, signature, parameters = "property", formatter.return_annotation(getter), ()
            else:
                kinds = {staticmethod: "staticmethod", classmethod: "classmethod"}
                kind = kinds.get(type(raw), "method")
                function = getattr(raw, "__func__", raw)
                signature, parameters = formatter.signature(function, skip_first=kind != "staticmethod")
            yield PublicName(
                f"{name}.{key}", kind, raw, doc, signature, parameters, documented_elsewhere=elsewhere
            )


def _has_own_docs(base: type, full_names: dict[int, str]) -> bool:
    return id(base) in full_names or not base.__module__.startswith("regard")


def _is_public_member(key: str, raw: Any) -> bool:
    routine = inspect.isfunction(raw) or isinstance(
        raw, property | functools.cached_property | staticmethod | classmethod
    )
    if key.startswith("__") and key.endswith("__"):  # operators with a docstring
        ours = inspect.isfunction(raw) and (raw.__module__ or "").startswith("regard")
        return ours and bool(raw.__doc__) and key not in ("__init__", "__reduce__")
    return routine and not key.startswith("_")


def own_doc(value: type) -> str:
    """Return the docstring written for a class, and "" for one generated by `dataclass` or `NamedTuple`."""
    doc = inspect.cleandoc(vars(value).get("__doc__") or "")
    return "" if doc.startswith(f"{value.__name__}(") else doc


def inherited_doc(owner: type, key: str, full_names: dict[int, str]) -> tuple[str, bool]:
    """Return the docstring of a member or of the one it overrides, and whether another page shows it."""
    for base in (*owner.__mro__, *matching_protocols(owner)):
        raw = vars(base).get(key)
        raw = getattr(raw, "__func__", raw)
        if raw is not None and raw.__doc__:
            return inspect.cleandoc(raw.__doc__), base is not owner and _has_own_docs(base, full_names)
    return "", False


def matching_protocols(owner: type) -> list[type]:
    """Return the protocols in the package of a class that it implements without subclassing them."""
    module = importlib.import_module(owner.__module__)
    package = (
        module if hasattr(module, "__path__") else importlib.import_module(module.__package__ or "regard")
    )
    protocols = [
        value
        for value in vars(package).values()
        if inspect.isclass(value) and getattr(value, "_is_protocol", False)
    ]
    return [it for it in protocols if all(hasattr(owner, key) for key in vars(it) if not key.startswith("_"))]


def comment_above(name: str, value: Any) -> str:
    """Return the comment lines above the assignment of a module-level value, in whichever file it is."""
    for path, text in _source_files().items():
        if f"\n{name}" not in text:
            continue
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith((f"{name} = ", f"{name}: ")) and _defines(path, name, value):
                first = number
                while first and lines[first - 1].startswith("#"):
                    first -= 1
                if first < number:  # another module may have an equal value of the same name
                    return "\n".join(text.removeprefix("#").strip() for text in lines[first:number])
    return ""


@functools.cache
def _source_files() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def _defines(path: Path, name: str, value: Any) -> bool:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    dotted = ".".join(part for part in parts if part != "__init__")
    return getattr(importlib.import_module(dotted), name, None) is value


# -- Signatures -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignatureFormatter:
    """Format signatures with the annotations of the source, and public classes of regard by their full name."""

    full_names: dict[int, str]

    def signature(self, function: Any, skip_first: bool = False) -> tuple[str, tuple[str, ...]]:
        """Return the formatted signature of a function, and the names of its parameters."""
        function = inspect.unwrap(function)
        parameters = list(inspect.signature(function).parameters.values())[int(skip_first) :]
        returned = self.return_annotation(function)
        arrow = f" -> {returned}" if returned else ""
        formatted = f"({self.format_parameters(parameters, annotation_namespace(function))}){arrow}"
        return formatted, tuple(parameter.name for parameter in parameters)

    def return_annotation(self, function: Any) -> str:
        return self.annotation(
            inspect.signature(function).return_annotation, annotation_namespace(inspect.unwrap(function))
        )

    def constructor(self, value: type) -> tuple[str, tuple[str, ...]]:
        """Return the formatted parameters of the constructor and their names; nothing if callers do not call it."""
        constructor = next(
            vars(base)[key] for base in value.__mro__ for key in ("__init__", "__new__") if key in vars(base)
        )
        ours = (getattr(constructor, "__module__", None) or value.__module__).startswith("regard")
        abstract = inspect.isabstract(value) or getattr(value, "_is_protocol", False)
        if not inspect.isfunction(constructor) or not ours or abstract:
            return "", ()
        namespace = annotation_namespace(constructor)
        bound = _fields_set_by_bind(value)
        parameters = [
            it for it in list(inspect.signature(constructor).parameters.values())[1:] if it.name not in bound
        ]
        required = [it for it in parameters if it.default is inspect.Parameter.empty]
        if any(self.is_private(it.annotation, namespace) for it in required):
            return "", ()
        formatted = f"({self.format_parameters(parameters, namespace)})"
        return formatted, tuple(parameter.name for parameter in parameters)

    def annotation(self, annotation: Any, namespace: dict[str, Any]) -> str:
        """Format an annotation, "" if there is none."""
        if annotation is inspect.Signature.empty:
            return ""
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

        def full_name(match: re.Match[str]) -> str:
            value = namespace.get(match[0])
            return self.full_names.get(id(value), match[0]) if inspect.isclass(value) else match[0]

        return re.sub(r"(?<![.\w'])[A-Z]\w*", full_name, text)

    def is_private(self, annotation: Any, namespace: dict[str, Any]) -> bool:
        """Tell whether an annotation names a class of regard that is not public."""
        words = re.findall(r"\w+", str(annotation))
        classes = [value for word in words if inspect.isclass(value := namespace.get(word))]
        return any(it.__module__.startswith("regard") and id(it) not in self.full_names for it in classes)

    def format_parameters(self, parameters: list[inspect.Parameter], namespace: dict[str, Any]) -> str:
        """Format parameters, with `*` and `/` where they belong."""
        parts: list[str] = []
        kinds = inspect.Parameter
        previous = None
        for parameter in parameters:
            if parameter.kind is kinds.KEYWORD_ONLY and previous not in (
                kinds.KEYWORD_ONLY,
                kinds.VAR_POSITIONAL,
            ):
                parts.append("*")
            if previous is kinds.POSITIONAL_ONLY and parameter.kind is not kinds.POSITIONAL_ONLY:
                parts.append("/")
            parts.append(self.format_parameter(parameter, namespace))
            previous = parameter.kind
        if previous is kinds.POSITIONAL_ONLY:
            parts.append("/")
        return ", ".join(parts)

    def format_parameter(self, parameter: inspect.Parameter, namespace: dict[str, Any]) -> str:
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        annotation = self.annotation(parameter.annotation, namespace)
        if annotation:
            text += f": {annotation}"
        if parameter.default is not inspect.Parameter.empty:
            text += (" = " if annotation else "=") + _format_default(parameter.default)
        return text


def annotation_namespace(function: Any) -> dict[str, Any]:
    """Return the names that the annotations of a function can use, imports under TYPE_CHECKING included."""
    namespace: dict[str, Any] = function.__globals__
    path = namespace.get("__file__", "")
    return namespace | _type_checking_imports(path) if str(path).startswith(str(PACKAGE)) else namespace


@functools.cache
def _type_checking_imports(path: str) -> dict[str, Any]:
    imported: dict[str, Any] = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for line in node.body:
                if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("regard"):
                    module = importlib.import_module(str(line.module))
                    imported |= {it.asname or it.name: getattr(module, it.name) for it in line.names}
    return imported


def _format_default(value: Any) -> str:
    text = repr(value)
    if text.startswith("<") or len(text) > 40:  # a function or a large table
        return str(getattr(value, "__name__", "..."))
    return text


def _fields_set_by_bind(value: type) -> set[str]:
    """Return the fields of a measure that its `bind` sets, which callers do not pass."""
    if not inspect.isfunction(bind := getattr(value, "bind", None)):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(bind)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {word.arg or "" for call in calls if ast.unparse(call.func) == "replace" for word in call.keywords}
