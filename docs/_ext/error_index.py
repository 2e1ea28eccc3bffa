"""The page of errors, read from the source: every error that regard raises, by operation, and what cures it.

Nothing is imported for it. An error whose operation is a parameter is followed to the calls that give it, with all that
they give; what only the moment knows is shown as `‹name›`, or as `…` where it has no short name.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import regard
from regard.errors import anchor
from regard.measures import name_of

PACKAGE = Path(regard.__file__).parent

Env = dict[str, str]

HEAD = """\
# Errors

An error says which operation refused, what came, what was expected, and the hint. Its message begins with the
operation, under which it stands on this page; `error.page` is the address.

```python
>>> import numpy as np, regard
>>> try:
...     regard.attention(np.ones((5, 4)), np.ones((5, 3)))
... except regard.RegardError as error:
...     print(error.received, "|", error.page)
query (q_len 5, head_dim 4), key (kv_len 5, head_dim 3) | reference/errors.html#attention

```

What only the moment knows is written ‹so›, and … where it has no short name. The list is read from the source when the
site is built.

## The classes
"""


@dataclass(frozen=True)
class Raised:
    """One error as it is raised: the parts of its message as templates, and the module that raises it."""

    operation: str
    kind: str
    received: str
    expected: str
    hint: str
    module: str


@dataclass
class Function:
    """A function of the source: its parameters and their defaults, what it assigns, and where it stands."""

    name: str
    node: ast.FunctionDef
    module: str
    owner: str
    scope: dict[str, list[ast.expr]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        given = self.node.args
        names = [it.arg for it in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return names[1:] if self.owner and names[:1] in (["self"], ["cls"]) else names

    @property
    def defaults(self) -> dict[str, ast.expr]:
        given = self.node.args
        plain = [it.arg for it in (*given.posonlyargs, *given.args)]
        found = dict(zip(reversed(plain), reversed(given.defaults), strict=False))
        named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        return found | {it.arg: value for it, value in named if value is not None}


class Source:
    """The functions of the package, their calls, and the constants of its modules."""

    def __init__(self, files: dict[str, str]) -> None:
        self.functions: list[Function] = []
        self.calls: dict[str, list[tuple[ast.Call, Function]]] = {}
        self.constants: dict[str, dict[str, list[ast.expr]]] = {}
        self.bases: dict[str, list[str]] = {}
        self.imported: dict[str, set[tuple[str, str]]] = {}
        self.known: dict[tuple[int, tuple[str, ...]], list[Env]] = {}
        for module, text in files.items():
            tree = ast.parse(text)
            from_files = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            self.imported[module] = {(it.name, node.module or "") for node in from_files for it in node.names}
            self.constants[module] = _assigned(tree.body)
            self._read(tree, module, "", Function("", ast.parse("def _(): pass").body[0], module, ""))  # type: ignore[arg-type]
        self.methods = {(it.owner, it.node.name): it for it in self.functions}

    def _read(self, node: ast.AST, module: str, owner: str, inside: Function) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self.bases[child.name] = [ast.unparse(base) for base in child.bases]
                self._read(child, module, child.name, inside)
            elif isinstance(child, ast.FunctionDef):
                name = owner if child.name == "__init__" else child.name
                function = Function(name, child, module, owner, _assigned(child.body))
                self.functions.append(function)
                self._read(child, module, owner, function)
            else:
                if isinstance(child, ast.Call):
                    called = child.func
                    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                    self.calls.setdefault(name, []).append((child, inside))
                self._read(child, module, owner, inside)

    def raised(self) -> Iterator[Raised]:
        """Every error, once for each operation that it can have."""
        for kind in sorted(
            {"RegardError", *(name for name in self.bases if "RegardError" in self.line(name))}
        ):
            for call, function in self.calls.get(kind, []):
                if call.args:
                    parts = {word.arg: word.value for word in call.keywords if word.arg}
                    for env in self.ways(call.args[0], function):
                        text = {name: self.text(part, function, env) for name, part in parts.items()}
                        for name in self.names(call.args[0], function, env):
                            operation = name.split(",")[0]  # what comes after it is which of its arguments
                            yield Raised(operation, kind, **text, module=function.module)  # type: ignore[arg-type]

    def ways(self, operation: ast.expr, function: Function) -> list[Env]:
        """What callers give for a function's parameters, for each way to the operation; one, if it is known already."""
        words = [node.id for node in ast.walk(operation) if isinstance(node, ast.Name)]
        needed = tuple(word for word in words if word in function.parameters)
        if (id(function), needed) not in self.known:
            self.known[id(function), needed] = [{}]  # for a function that calls itself
            found = (
                {tuple(sorted(env.items())) for env in self.callers(function, needed)} if needed else set()
            )
            self.known[id(function), needed] = [dict(env) for env in sorted(found)] or [{}]
        return self.known[id(function), needed]

    def callers(self, function: Function, needed: tuple[str, ...]) -> Iterator[Env]:
        for call, caller in self.calls.get(function.name, []):
            given = self.given(call, function)
            if not self.is_of(call, caller, function) or any(word not in given for word in needed):
                continue
            for env in self.ways(given[needed[0]], caller):
                said = {name: self.text(value, caller, env) for name, value in given.items()}
                said = {
                    name: text for name, text in said.items() if " " in text
                }  # a sentence, not a word of the moment
                for names in itertools.product(*(self.names(given[word], caller, env) for word in needed)):
                    yield said | dict(zip(needed, names, strict=True))

    def is_of(self, call: ast.Call, caller: Function, function: Function) -> bool:
        """Whether a call of this name is of this function: a method, of the same file, or imported from its file."""
        if isinstance(call.func, ast.Attribute):
            return bool(function.owner)
        here = caller.module == function.module
        return here or (function.name, function.module) in self.imported[caller.module]

    def given(self, call: ast.Call, function: Function) -> dict[str, ast.expr]:
        """The arguments of a call by the names of the function's parameters."""
        plain = [it for it in call.args if not isinstance(it, ast.Starred)]
        named = {word.arg: word.value for word in call.keywords if word.arg}
        return function.defaults | dict(zip(function.parameters, plain, strict=False)) | named

    def names(self, node: ast.expr, function: Function, env: Env) -> list[str]:
        """The operations that an expression stands for: of a class and those below it, or what a property returns."""
        below = sorted(name for name in self.bases if function.owner in self.line(name))
        if (text := ast.unparse(node)) == "type(self).__name__":
            return below
        if text == "name_of(self)":
            return [name_of(type(name, (), {})()) for name in below]
        if isinstance(node, ast.IfExp):
            return [*self.names(node.body, function, env), *self.names(node.orelse, function, env)]
        if text.startswith("self.") and (found := self.methods.get((function.owner, text[5:]))):
            returned = [it.value for it in ast.walk(found.node) if isinstance(it, ast.Return) and it.value]
            return [name for value in returned for name in self.names(value, found, {})]
        return [self.text(node, function, env)]

    def line(self, name: str) -> list[str]:
        """A class and those it comes from."""
        return [name, *(far for base in self.bases.get(name, []) for far in self.line(base))]

    def text(self, node: ast.expr, function: Function, env: Env) -> str:
        """An expression as a template: what is written in it, and ‹names› for what is not known."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, function, env) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value, function, env)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, function, env) + self.text(node.right, function, env)
        if isinstance(node, ast.Name):
            if node.id in env:
                return env[node.id]
            here = function.scope.get(node.id) or self.constants[function.module].get(node.id) or []
            if here and all(_is_text(it) for it in here) and node.id not in function.parameters:
                itself = {node.id: f"‹{node.id}›"}
                return _or([self.text(it, function, env | itself) for it in here])
            return f"‹{node.id}›"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"‹{node.attr}›" if node.value.id == "self" else f"‹{ast.unparse(node)}›"
        if isinstance(node, ast.IfExp):
            one, other = (self.text(it, function, env) for it in (node.body, node.orelse))
            return _or([one, other])
        return "…"


def _or(texts: list[str]) -> str:
    """What can be said, one or another; sentences stay sentences."""
    said = list(dict.fromkeys(text for text in texts if text))
    return (" Or: " if said and said[0].endswith(".") else " or ").join(said)


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is written out as text."""
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and _is_text(node.left)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _assigned(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """What plain names are set to in a body, blocks within it included."""
    found: dict[str, list[ast.expr]] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node.value)
    return found


def source() -> Source:
    """The package as it is installed, without the command that only runs it."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return Source(files)


def by_operation() -> dict[str, list[Raised]]:
    """All errors by the anchor of their operation, sorted, each once."""
    found: dict[str, set[Raised]] = {}
    for raised in source().raised():
        if raised.operation and not raised.operation.startswith("‹"):  # a name that only the moment knows
            found.setdefault(anchor(raised.operation), set()).add(raised)
    order = sorted(found.items(), key=lambda item: item[0])
    return {at: sorted(some, key=lambda it: (it.module, it.operation, it.received)) for at, some in order}


def errors_page(classes: list[str], find: Callable[[str], str | None]) -> str:
    """The page: the classes, then each operation with its errors."""
    parts = [HEAD, *classes, "## By operation"]
    for at, errors in by_operation().items():
        shown = sorted({_short(it.operation) for it in errors}, key=len)
        name = find(shown[0])
        where = f"Of {{py:obj}}`{shown[0]} <{name}>`.\n\n" if name else ""
        parts.append(f"({at})=\n### {_code(shown[0])}\n\n{where}" + "\n".join(_entry(it) for it in errors))
    return "\n\n".join(parts) + "\n"


def _short(operation: str) -> str:
    return re.sub(r"\[‹\w+›\]", "[name]", operation)


def _entry(it: Raised) -> str:
    expected = _escaped(it.expected).rstrip("…") + ("…" if it.expected.endswith("…") else ".")
    hint = _escaped(it.hint).strip()
    return f"- Received {_escaped(it.received)}; expected {expected} **{hint}** *({it.kind}, {_room(it.module)})*"


def _room(module: str) -> str:
    return ".".join(part for part in module.split(".") if not part.startswith("_"))


def _code(text: str) -> str:
    return f"`{text}`"


def _escaped(text: str) -> str:
    """Text as Markdown: what stands in backticks is code already."""

    def piece(match: re.Match[str]) -> str:
        code = match[0].startswith("`") and len(match[0]) > 1
        return match[0] if code else re.sub(r"[<$*_\[\]|~`#\\]", r"\\\g<0>", match[0])

    return re.sub(r"`[^`]+`|[^`]+|`", piece, text)
