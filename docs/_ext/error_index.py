"""Build the error page from the source: every error that regard raises, by operation, with its hint.

The package is parsed, not imported. If the operation is a parameter, the callers are searched for its values and for
the other arguments. Values known only at run time are shown as `‹name›`, or as `…` if they have no short name.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import regard
from regard.errors import format_anchor
from regard.measures.base import Measure, get_result_name

PACKAGE = Path(regard.__file__).parent

Bindings = dict[str, str]  # parameter name → template of its value

HEAD = """\
# Errors

An error names the operation, the value it received, the values it accepts, and a hint. The message begins with the
operation, which is the heading to look for on this page; `error.page` is the address.

```python
>>> import numpy as np, regard
>>> try:
...     regard.attention(np.ones((5, 4)), np.ones((5, 3)))
... except regard.RegardError as error:
...     print(error.received, "|", error.page)
query (q_len 5, head_dim 4), key (kv_len 5, head_dim 3) | reference/errors.html#attention

```

Values known only at run time are written ‹so›, or … if they have no short name. The list is read from the source when
the site is built.

## The classes
"""


@dataclass(frozen=True)
class ErrorEntry:
    """An error in the source: the parts of its message as templates, and the module that raises it."""

    operation: str
    error_class: str
    received: str
    expected: str
    hint: str
    module: str


@dataclass
class Function:
    """A function of the source: its parameters, defaults and assignments, and its module and class."""

    name: str
    node: ast.FunctionDef
    module: str
    owner: str
    scope: dict[str, list[ast.expr]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        args = self.node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        return names[1:] if self.owner and names[:1] in (["self"], ["cls"]) else names

    @property
    def defaults(self) -> dict[str, ast.expr]:
        args = self.node.args
        positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        defaults = dict(zip(reversed(positional), reversed(args.defaults), strict=False))
        keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        return defaults | {arg.arg: value for arg, value in keywords if value is not None}


class Source:
    """The functions of the package, their calls, and the constants of its modules."""

    def __init__(self, files: dict[str, str]) -> None:
        self.functions: list[Function] = []
        self.calls: dict[str, list[tuple[ast.Call, Function]]] = {}
        self.constants: dict[str, dict[str, list[ast.expr]]] = {}
        self.bases: dict[str, list[str]] = {}
        self.imports: dict[str, set[tuple[str, str]]] = {}
        self._bindings: dict[tuple[int, tuple[str, ...]], list[Bindings]] = {}
        module_body = ast.parse("def _(): pass").body[0]
        for module, text in files.items():
            tree = ast.parse(text)
            from_imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            self.imports[module] = {
                (alias.name, node.module or "") for node in from_imports for alias in node.names
            }
            self.constants[module] = _assignments(tree.body)
            self._visit(tree, module, "", Function("", module_body, module, ""))  # type: ignore[arg-type]
        self.methods = {(function.owner, function.node.name): function for function in self.functions}

    def _visit(self, node: ast.AST, module: str, owner: str, inside: Function) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self.bases[child.name] = [ast.unparse(base) for base in child.bases]
                self._visit(child, module, child.name, inside)
            elif isinstance(child, ast.FunctionDef):
                name = owner if child.name == "__init__" else child.name
                function = Function(name, child, module, owner, _assignments(child.body))
                self.functions.append(function)
                self._visit(child, module, owner, function)
            else:
                if isinstance(child, ast.Call):
                    callee = child.func
                    name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
                    self.calls.setdefault(name, []).append((child, inside))
                self._visit(child, module, owner, inside)

    def find_errors(self) -> Iterator[ErrorEntry]:
        """Yield every error, once for each operation that it can name."""
        error_classes = {name for name in self.bases if "RegardError" in self.ancestors(name)}
        for error_class in sorted({"RegardError", *error_classes}):
            for call, function in self.calls.get(error_class, []):
                if call.args:
                    # Errors may have more arguments, such as the ranks that failed; these are not part of the message.
                    message = ("received", "expected", "hint")
                    parts = {word.arg: word.value for word in call.keywords if word.arg in message}
                    for bindings in self.find_bindings(call.args[0], function):
                        texts = {
                            name: self.template(part, function, bindings) for name, part in parts.items()
                        }
                        for name in self.operations(call.args[0], function, bindings):
                            operation = name.split(",")[0]  # the argument follows the comma
                            yield ErrorEntry(operation, error_class, **texts, module=function.module)  # type: ignore[arg-type]

    def find_bindings(self, operation: ast.expr, function: Function) -> list[Bindings]:
        """Return what the callers pass for the parameters in `operation`; `[{}]` if it has none."""
        words = [node.id for node in ast.walk(operation) if isinstance(node, ast.Name)]
        needed = tuple(word for word in words if word in function.parameters)
        cache_key = id(function), needed
        if cache_key not in self._bindings:
            self._bindings[cache_key] = [{}]  # ends the recursion of a function that calls itself
            found = (
                {tuple(sorted(it.items())) for it in self._caller_bindings(function, needed)}
                if needed
                else ()
            )
            self._bindings[cache_key] = [dict(items) for items in sorted(found)] or [{}]
        return self._bindings[cache_key]

    def _caller_bindings(self, function: Function, needed: tuple[str, ...]) -> Iterator[Bindings]:
        for call, caller in self.calls.get(function.name, []):
            arguments = self.bind_arguments(call, function)
            if not self.is_call_of(call, caller, function) or any(word not in arguments for word in needed):
                continue
            for bindings in self.find_bindings(arguments[needed[0]], caller):
                texts = {name: self.template(value, caller, bindings) for name, value in arguments.items()}
                sentences = {name: text for name, text in texts.items() if " " in text}
                operations = (self.operations(arguments[word], caller, bindings) for word in needed)
                for names in itertools.product(*operations):
                    yield sentences | dict(zip(needed, names, strict=True))

    def is_call_of(self, call: ast.Call, caller: Function, function: Function) -> bool:
        """Tell whether a call with the function's name calls it: a method, or a name of its module."""
        if isinstance(call.func, ast.Attribute):
            return bool(function.owner)
        same_module = caller.module == function.module
        return same_module or (function.name, function.module) in self.imports[caller.module]

    def bind_arguments(self, call: ast.Call, function: Function) -> dict[str, ast.expr]:
        """Return the arguments of a call by parameter name, defaults included."""
        positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
        keywords = {word.arg: word.value for word in call.keywords if word.arg}
        return function.defaults | dict(zip(function.parameters, positional, strict=False)) | keywords

    def operations(self, node: ast.expr, function: Function, bindings: Bindings) -> list[str]:
        """Return the operations that an expression can name, for each subclass or returned value."""
        subclasses = sorted(name for name in self.bases if function.owner in self.ancestors(name))
        if (text := ast.unparse(node)) == "type(self).__name__":
            return subclasses
        if text == "get_result_name(self)":
            return [get_result_name(type(name, (Measure,), {})()) for name in subclasses]
        if isinstance(node, ast.IfExp):
            branches = (node.body, node.orelse)
            return [name for branch in branches for name in self.operations(branch, function, bindings)]
        if text.startswith("self.") and (method := self.methods.get((function.owner, text[5:]))):
            returned = [it.value for it in ast.walk(method.node) if isinstance(it, ast.Return) and it.value]
            return [name for value in returned for name in self.operations(value, method, {})]
        return [self.template(node, function, bindings)]

    def ancestors(self, name: str) -> list[str]:
        """Return a class and its base classes."""
        return [name, *(far for base in self.bases.get(name, []) for far in self.ancestors(base))]

    def template(self, node: ast.expr, function: Function, bindings: Bindings) -> str:
        """Return an expression as text, with ‹names› in place of values known only at run time."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.template(part, function, bindings) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.template(node.value, function, bindings)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.template(node.left, function, bindings) + self.template(
                node.right, function, bindings
            )
        if isinstance(node, ast.Name):
            if node.id in bindings:
                return bindings[node.id]
            assigned = function.scope.get(node.id) or self.constants[function.module].get(node.id) or []
            if assigned and all(_is_text(it) for it in assigned) and node.id not in function.parameters:
                inner = bindings | {node.id: f"‹{node.id}›"}
                return _join_alternatives([self.template(it, function, inner) for it in assigned])
            return f"‹{node.id}›"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"‹{node.attr}›" if node.value.id == "self" else f"‹{ast.unparse(node)}›"
        if isinstance(node, ast.IfExp):
            branches = (node.body, node.orelse)
            return _join_alternatives([self.template(branch, function, bindings) for branch in branches])
        return "…"


def _join_alternatives(texts: list[str]) -> str:
    """Join the texts that an expression can have with "or"; sentences stay sentences."""
    alternatives = list(dict.fromkeys(text for text in texts if text))
    sentences = bool(alternatives) and alternatives[0].endswith(".")
    return (" Or: " if sentences else " or ").join(alternatives)


def _is_text(node: ast.expr) -> bool:
    """Tell whether an expression is a string literal, an f-string, or a sum or choice of them."""
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and _is_text(node.left)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _assignments(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Return the expressions assigned to plain names in a body, nested blocks included."""
    found: dict[str, list[ast.expr]] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node.value)
    return found


def read_source() -> Source:
    """Parse the installed package."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return Source(files)


def errors_by_anchor() -> dict[str, list[ErrorEntry]]:
    """Return the errors by the anchor of their operation, sorted, each once."""
    found: dict[str, set[ErrorEntry]] = {}
    for entry in read_source().find_errors():
        if entry.operation and not entry.operation.startswith("‹"):  # named only at run time
            found.setdefault(format_anchor(entry.operation), set()).add(entry)
    return {
        at: sorted(entries, key=lambda it: (it.module, it.operation, it.received))
        for at, entries in sorted(found.items())
    }


def errors_page(classes: list[str], find: Callable[[str], str | None]) -> str:
    """Return the page: the classes, then each operation with its errors.

    Args:
        classes: The error classes as Markdown.
        find: Resolves an operation to the full name of a public object.
    """
    parts = [HEAD, *classes, "## By operation"]
    for at, entries in errors_by_anchor().items():
        title = min((_shorten(it.operation) for it in entries), key=lambda text: (len(text), text))
        name = find(title)
        link = f"Raised by {{py:obj}}`{title} <{name}>`.\n\n" if name else ""
        parts.append(f"({at})=\n### `{title}`\n\n{link}" + "\n".join(_list_item(it) for it in entries))
    return "\n\n".join(parts) + "\n"


def _shorten(operation: str) -> str:
    return re.sub(r"\[‹\w+›\]", "[name]", operation)


def _list_item(entry: ErrorEntry) -> str:
    expected = _escape(entry.expected).rstrip("…") + ("…" if entry.expected.endswith("…") else ".")
    package = ".".join(entry.module.split(".")[:2])
    return (
        f"- Received {_escape(entry.received)}; expected {expected} **{_escape(entry.hint).strip()}** "
        f"*({entry.error_class}, {package})*"
    )


def _escape(text: str) -> str:
    """Escape Markdown outside code spans."""

    def escape_piece(match: re.Match[str]) -> str:
        is_code = match[0].startswith("`") and len(match[0]) > 1
        return match[0] if is_code else re.sub(r"[<$*_\[\]|~`#\\]", r"\\\g<0>", match[0])

    return re.sub(r"`[^`]+`|[^`]+|`", escape_piece, text)
