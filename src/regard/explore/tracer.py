"""Trace a function call: every line as it runs, with the values it produces.

First the tracer, then the source of the functions it follows, then the records of values it takes.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import io
import json
import linecache
import numbers
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from types import CodeType, FrameType
from typing import Any

import numpy as np

from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, describe_argument
from regard.render.text import escape_unprintable

MAX_STEPS = 2000
MAX_TRACE_CHARACTERS = 1_500_000  # of distinct values


@dataclass(frozen=True)
class TraceStep:
    """A line that ran, or an event at it.

    Attributes:
        kind: "enter", "line", "call", "return", "yield" or "raise".
        source: Index of the function in `Trace.sources`.
        line: Line number.
        frame: Number of the call, which separates the values of recursive calls.
        depth: Number of open calls.
        changed: Index in `Trace.values` of each name that changed; None for a name that was deleted.
        produced: Names that were assigned, even if the new value equals the old one.
        iterations: For each loop around the line, the index in `Trace.loops` and the iteration.
        result: Index of the value that was returned or yielded.
        exception: Text of the exception that was raised.
    """

    kind: str
    source: int
    line: int
    frame: int
    depth: int
    changed: dict[str, int | None]
    produced: list[str]
    iterations: tuple[tuple[int, int], ...]
    result: int | None = None
    exception: str | None = None


@dataclass
class Trace:
    """The steps of a call.

    Attributes:
        name: Qualified name of the function.
        sources: Functions that were traced.
        steps: Steps in order.
        values: Snapshots of the distinct values.
        loops: Target names and number of iterations of each loop that ran.
        truncated: Why the steps end before the call did, or None.
    """

    name: str
    sources: list[FunctionSource] = field(default_factory=list)
    steps: list[TraceStep] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    loops: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    truncated: str | None = None


@dataclass
class _OpenCall:
    """The state of a call that has not returned."""

    number: int
    source: int
    line: int | None = None
    exception: BaseException | None = None
    values: dict[str, int] = field(default_factory=dict)
    loops: list[tuple[LoopLines, int]] = field(
        default_factory=list
    )  # the loops around the line, outermost first


class LineTracer:
    """Trace function for `sys.settrace` that follows one function and the functions of its module it calls.

    The interpreter reports a line before it runs, so a line is recorded at the next event.
    """

    def __init__(self, root: CodeType, module: dict[str, Any]) -> None:
        self.trace, self._root, self._module = Trace(root.co_qualname), root, module
        self._source_indices: dict[CodeType, int | None] = {}
        self._calls: dict[FrameType, _OpenCall] = {}
        self._stack: list[FrameType] = []
        self._value_indices: dict[str, int] = {}
        self._characters = 0
        self._propagating: BaseException | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle a trace event: the start of any function, or an event of a function that is followed."""
        if self.trace.truncated:
            frame.f_trace = None  # run at full speed
            return None
        if event == "call":
            return self._enter(frame)
        call = self._calls[frame]
        if event == "line":
            self._start_line(frame, call)
        elif event == "exception":
            call.exception = arg[1]
        elif event == "return":
            self._leave(frame, call, arg)
        if len(self.trace.steps) >= MAX_STEPS or self._characters >= MAX_TRACE_CHARACTERS:
            self.trace.truncated = (
                f"The trace ends here, after {len(self.trace.steps)} steps; the call continued."
            )
            sys.settrace(None)
        return self

    # -- Events --

    def _enter(self, frame: FrameType) -> Any:
        if frame.f_globals is not self._module or (index := self._source_index(frame.f_code)) is None:
            return None
        if self._stack:
            caller = self._stack[-1]
            self._record("call", caller, self._calls[caller])
        is_resumed = frame in self._calls  # a generator
        call = self._calls.setdefault(frame, _OpenCall(len(self._calls), index))
        self._stack.append(frame)
        if not is_resumed:
            call.line = self.trace.sources[index].line
            self._record("enter", frame, call)
            call.line = None
        return self

    def _start_line(self, frame: FrameType, call: _OpenCall) -> None:
        source = self.trace.sources[call.source]
        line = source.starts.get(frame.f_lineno, frame.f_lineno)
        exception, call.exception = call.exception, None
        if exception is not None and not isinstance(exception, StopIteration):
            self._record("raise", frame, call, exception=_format_exception(exception))  # and caught here
        elif call.line is not None and (line == call.line or call.line in source.withs.get(line, ())):
            return  # the statement continues, or a `with` block ends: not a line of its own
        elif call.line is not None:
            self._count_iteration(call, line)
            self._record("line", frame, call)
        while call.loops and not call.loops[-1][0].line <= line <= call.loops[-1][0].end:
            call.loops.pop()
        call.line = line

    def _leave(self, frame: FrameType, call: _OpenCall, result: Any) -> None:
        self._stack.remove(frame)
        last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if call.exception is not None and not last.startswith("RETURN"):
            if self._propagating is not call.exception:  # recorded where it was raised, not in every caller
                self._record("raise", frame, call, exception=_format_exception(call.exception))
            self._propagating = call.exception
            return
        kind = "yield" if last == "YIELD_VALUE" else "return"
        self._count_iteration(call, -1)
        self._record(kind, frame, call, result=self._value_index(result))
        if kind == "yield" and not self._assigned_names(call):
            call.line = None  # the statement is complete when the generator resumes

    # -- Recording --

    def _record(
        self,
        kind: str,
        frame: FrameType,
        call: _OpenCall,
        result: int | None = None,
        exception: str | None = None,
    ) -> None:
        if call.line is None:
            call.line = frame.f_lineno
        values = {
            escape_unprintable(name): self._value_index(value)
            for name, value in frame.f_locals.items()
            if not name.startswith((".", "@")) and name != "__class__"  # a cell that super() needs
        }
        changed: dict[str, int | None] = {
            name: index for name, index in values.items() if call.values.get(name) != index
        }
        changed.update({name: None for name in call.values if name not in values})
        call.values = values
        assigned = self._assigned_names(call) if kind in ("line", "return") else []
        self.trace.steps.append(
            TraceStep(
                kind=kind,
                source=call.source,
                line=call.line,
                frame=call.number,
                depth=len(self._stack) - 1 if frame in self._stack else len(self._stack),
                changed=changed,
                produced=[name for name in values if name in changed or name in assigned],
                iterations=tuple((index, self.trace.loops[index][1]) for _, index in call.loops),
                result=result,
                exception=exception,
            )
        )

    def _assigned_names(self, call: _OpenCall) -> list[str]:
        """Return the names that the last line assigned; the head of a finished loop assigns none."""
        source = self.trace.sources[call.source]
        is_head = any(loop.line == call.line for loop in source.loops)
        if call.line is None or (is_head and not (call.loops and call.loops[-1][0].line == call.line)):
            return []
        return source.assigns.get(call.line, [])

    def _count_iteration(self, call: _OpenCall, line: int) -> None:
        """If the last line is the head of a loop, count an iteration when `line` is in its body, else end the loop."""
        loops = self.trace.sources[call.source].loops
        loop = next((loop for loop in loops if loop.line == call.line), None)
        if loop is None:
            return
        enters_body = loop.body <= line <= loop.end
        is_open = bool(call.loops) and call.loops[-1][0] is loop
        if enters_body and not is_open:
            call.loops.append((loop, len(self.trace.loops)))
            self.trace.loops.append((loop.names, 0))
        if enters_body:
            index = call.loops[-1][1]
            self.trace.loops[index] = (loop.names, self.trace.loops[index][1] + 1)
        elif is_open:
            call.loops.pop()

    def _value_index(self, value: Any) -> int:
        """Return the index of a value's snapshot; equal snapshots share one."""
        snapshot = take_snapshot(value)
        text = json.dumps(snapshot)
        if text not in self._value_indices:
            self._value_indices[text] = len(self.trace.values)
            self._characters += len(text)
            self.trace.values.append(snapshot)
        return self._value_indices[text]

    def _source_index(self, code: CodeType) -> int | None:
        """Return the index of the source of a code object; None for comprehensions, class bodies and other modules."""
        if code not in self._source_indices:
            is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
            source = read_source(code, self._module) if is_function or code is self._root else None
            self._source_indices[code] = None if source is None else len(self.trace.sources)
            if source is not None:
                self.trace.sources.append(source)
        return self._source_indices[code]


def _format_exception(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # the `__str__` of a user's exception can run any code
        message = ""
    name = type(error).__name__
    return escape_unprintable(f"{name}: {message[:500]}" if message else name)


def trace_call(operation: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
    """Call a function and trace it; a generator is run to its end."""
    root, module = _find_code(operation, function)
    tracer = LineTracer(root, module)
    try:
        with _tracing(tracer):
            result = function(*args, **kwargs)
            if inspect.isgenerator(result):
                for _ in result:
                    if tracer.trace.truncated:
                        break
    except Exception as error:
        trace = tracer.trace
        if not trace.steps:  # the function was not entered, so the error is not its own
            raise
        if trace.steps[-1].kind != "raise" and not trace.truncated:  # recursion too deep to trace
            trace.truncated = f"The trace ends here: {_format_exception(error)}"
    if not tracer.trace.steps:
        raise ArgumentError(
            operation,
            received=f"the function {root.co_name}, whose body did not run",
            expected="a call that runs the function body",
            hint="If a cache returned the result, pass the function without its decorator.",
        )
    return tracer.trace


@contextlib.contextmanager
def _tracing(tracer: LineTracer) -> Iterator[None]:
    """Install the tracer, and restore the previous trace function of a debugger or coverage tool afterwards."""
    previous = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(previous)


def _find_code(operation: str, function: Any) -> tuple[CodeType, dict[str, Any]]:
    """Return the code that a call of the function runs, and the globals of its module."""
    inner = function
    while hasattr(inner, "func") and not hasattr(inner, "__code__"):  # functools.partial
        inner = inner.func
    inner = inspect.unwrap(inner) if callable(inner) else inner
    if isinstance(inner, type):
        inner = inner.__init__  # type: ignore[misc]
    elif not hasattr(inner, "__code__") and not inspect.ismethod(inner):
        inner = inspect.getattr_static(type(inner), "__call__", inner)
    inner = getattr(inner, "__func__", inner)
    code, module = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    if not isinstance(code, CodeType) or code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise ArgumentError(
            operation,
            received=describe_argument(function),
            expected="a synchronous function written in Python",
            hint="Write a function that calls it, and pass that function.",
        )
    if read_source(code, module) is None:
        raise ArgumentError(
            operation,
            received=f"the function {code.co_name}, whose source is not available",
            expected="a function from a file or a notebook",
            hint="Put the function in a file and import it.",
        )
    return code, module


TOOL_COMMENTS = ("noqa", "type:", "pragma", "fmt:", "mypy:", "ruff:")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class LoopLines:
    """A `for` or `while` loop: the line of its head, the first and last line of its body, and its target names."""

    line: int
    body: int
    end: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FunctionSource:
    """The source of a function by the line numbers of its file, without the docstring.

    Attributes:
        file: Path of the file.
        name: Qualified name of the function.
        line: Line of the `def`.
        lines: Text by line number.
        starts: First line of the statement that each line belongs to.
        ends: Last line of the statement that starts at a line.
        assigns: Names that the statement starting at a line assigns.
        withs: Lines of the body of the `with` that starts at a line.
        loops: Loops, outer before inner.
        notes: Comments by line, and the docstring's first paragraph at the line of the `def`.
    """

    file: str
    name: str
    line: int
    lines: dict[int, str]
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    assigns: dict[int, list[str]] = field(default_factory=dict)
    withs: dict[int, range] = field(default_factory=dict)
    loops: tuple[LoopLines, ...] = ()
    notes: dict[int, str] = field(default_factory=dict)


def read_source(code: CodeType, module: dict[str, Any]) -> FunctionSource | None:
    """Return the source of a code object, or None if it is not available."""
    file_lines = tuple(linecache.getlines(code.co_filename, module))
    first = code.co_firstlineno
    if first > len(file_lines):
        return None
    node = _find_node(file_lines, code)
    if node is None:
        block = file_lines[first - 1 : max(line or first for *_, line in code.co_lines())]
        lines = dict(enumerate(map(str.rstrip, block), first))
        return FunctionSource(code.co_filename, code.co_qualname, first, lines)
    last = node.end_lineno or first
    lines = {i: file_lines[i - 1].rstrip() for i in range(first, last + 1)}
    docstring = _find_docstring(node)
    if docstring is not None:
        for i in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
            lines.pop(i, None)
    loops = tuple(_find_loops(node))
    source = FunctionSource(code.co_filename, code.co_qualname, node.lineno, lines, loops=loops)
    comments = _find_comments(file_lines)
    statements = [statement for statement in ast.walk(node) if isinstance(statement, ast.stmt)]
    for statement in sorted(statements, key=lambda it: (it.lineno, -(it.end_lineno or 0))):
        line, end = statement.lineno, _head_end(statement)
        last_line = statement.end_lineno or end
        source.ends[line] = end
        source.starts.update(dict.fromkeys(range(line, end + 1), line))
        source.assigns[line] = [
            name.id
            for head in _head_nodes(statement)
            for name in ast.walk(head)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        ]
        if isinstance(statement, ast.With | ast.AsyncWith):
            source.withs[line] = range(end + 1, last_line + 1)
        comment = _comment_of(line, end, comments, file_lines)
        if comment and statement is not node:  # the comment of a loop also applies to the lines in it
            source.notes.update(dict.fromkeys(range(line, last_line + 1), comment))
    text = ast.get_docstring(node) if docstring is not None and not isinstance(node, ast.Lambda) else None
    source.notes.pop(node.lineno, None)
    if text:
        source.notes[node.lineno] = " ".join(text.split("\n\n")[0].split())
    return source


@lru_cache(maxsize=4)
def _parse(file_lines: tuple[str, ...]) -> ast.Module:
    try:
        return ast.parse("".join(file_lines))
    except (SyntaxError, ValueError):  # a notebook cell with a magic command
        return ast.Module([], [])


def _find_node(file_lines: tuple[str, ...], code: CodeType) -> FunctionNode | None:
    """Return the node of the function that a code object was compiled from."""
    for node in ast.walk(_parse(file_lines)):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            return node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _find_docstring(node: ast.AST) -> ast.stmt | None:
    body = getattr(node, "body", None)
    if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
        return body[0] if isinstance(getattr(body[0].value, "value", None), str) else None
    return None


def _head_nodes(node: ast.stmt) -> list[ast.AST]:
    """Return the parts of a statement without the statements in it."""
    inner = ast.stmt | ast.excepthandler | ast.match_case
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]


def _head_end(node: ast.stmt) -> int:
    """Return the last line of a simple statement, or of the head of a compound one."""
    if not hasattr(node, "body"):
        return node.end_lineno or node.lineno
    parts = (part for head in _head_nodes(node) for part in ast.walk(head))
    return max([node.lineno, *(getattr(part, "end_lineno", 0) for part in parts)])


def _find_loops(node: ast.AST) -> Iterator[LoopLines]:
    """Yield the loops of a function, outer before inner, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For | ast.AsyncFor | ast.While):
            body, end = child.body[0].lineno, child.body[-1].end_lineno
            target = () if isinstance(child, ast.While) else ast.walk(child.target)
            names = tuple(name.id for name in target if isinstance(name, ast.Name))
            if body > child.lineno:  # a loop on one line is one step
                yield LoopLines(child.lineno, body, end or body, names)
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _find_loops(child)


@lru_cache(maxsize=4)
def _find_comments(file_lines: tuple[str, ...]) -> dict[int, str]:
    comments = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(file_lines)).readline):
            text = token.string.lstrip("#").strip()
            if token.type == tokenize.COMMENT and text and not text.startswith(TOOL_COMMENTS):
                comments[token.start[0]] = text
    except (tokenize.TokenError, SyntaxError):
        pass
    return comments


def _comment_of(line: int, end: int, comments: dict[int, str], file_lines: tuple[str, ...]) -> str | None:
    """Return the comment beside a statement, or else the comment lines directly above it."""
    beside = [comments[i] for i in range(line, end + 1) if i in comments]
    above: list[str] = []
    while not beside and (line := line - 1) in comments and file_lines[line - 1].lstrip().startswith("#"):
        above.insert(0, comments[line])
    return " ".join(beside or above) or None


MAX_ROWS, MAX_COLUMNS = 8, 8  # entries shown of an array; with more, an ellipsis replaces one
MAX_PARTS = 16
MAX_LIST_ENTRIES = 4096  # longer lists are not checked for being numeric
MAX_CHARACTERS = 120
MAX_DEPTH = 2  # a tuple of objects of arrays


def take_snapshot(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return a record of a value: `type`, and its `text`, its `cells` (rows of entries, with a `shape`) or `parts`.

    If the value cannot be inspected, only its type is recorded.

    >>> take_snapshot(0.5)
    {'type': 'float', 'text': 0.5}
    >>> take_snapshot(np.eye(2))
    {'type': 'float64', 'shape': [2, 2], 'cells': [[1.0, 0.0], [0.0, 1.0]]}
    >>> take_snapshot(("a", [1, 2]))["parts"]
    [['0', {'type': 'str', 'text': "'a'"}], ['1', {'type': 'list', 'shape': [2], 'cells': [[1, 2]]}]]
    """
    try:
        return _snapshot_value(value, depth)
    except Exception:  # inspecting an object can run any code
        return {"type": _type_name(type(value)), "text": "cannot be shown"}


def _snapshot_value(value: Any, depth: int) -> dict[str, Any]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return {"type": _type_name(kind), "text": _format_scalar(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _snapshot_array(np.asarray(value), str(value.dtype))
    if kind.__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
        tensor = value.detach().cpu()
        tensor = tensor.double() if tensor.is_floating_point() else tensor  # NumPy has no bfloat16
        return _snapshot_array(tensor.numpy(), str(value.dtype))
    if kind in (list, tuple) and (array := _as_numeric_array(value)) is not None:
        return _snapshot_array(array, _type_name(kind))
    if kind is AttentionMatrix:
        return {"type": _type_name(kind), "text": _truncate(repr(value).split("\n")[0])}
    contents = _contents(value)
    if contents is None or depth >= MAX_DEPTH:
        return {"type": _type_name(kind), "text": _format_briefly(value)}
    size, items = contents
    parts = [[name, take_snapshot(part, depth + 1)] for name, part in islice(items, MAX_PARTS)]
    return {"type": _type_name(kind), "parts": parts, "left_out": max(0, size - MAX_PARTS)}


def _snapshot_array(array: np.ndarray, kind: str) -> dict[str, Any]:
    """Record the first matrix of an array, without the middle of its rows and columns if there are many."""
    if array.ndim == 0:
        return {"type": kind, "text": _format_scalar(array.item())}
    if array.size == 0:
        return {"type": kind, "shape": list(array.shape), "cells": []}
    matrix = array
    while matrix.ndim > 2:
        matrix = matrix[0]
    matrix = np.atleast_2d(matrix)
    rows, columns = _kept_indices(matrix.shape[0], MAX_ROWS), _kept_indices(matrix.shape[1], MAX_COLUMNS)
    scalar = bool | int | float | complex | str | bytes
    cells = [
        [_format_scalar(entry) if isinstance(entry, scalar) else _type_name(type(entry)) for entry in row]
        for row in matrix[np.ix_(rows, columns)].tolist()
    ]
    if len(columns) < matrix.shape[1]:
        cells = [[*row[:-1], "…", row[-1]] for row in cells]
    if len(rows) < matrix.shape[0]:
        cells.insert(-1, ["…"] * len(cells[0]))
    return {"type": kind, "shape": list(array.shape), "cells": cells}


def _kept_indices(size: int, limit: int) -> list[int]:
    """Return all indices, or the first ones and the last, with space for an ellipsis between."""
    return list(range(size)) if size <= limit else [*range(limit - 2), size - 1]


def _format_scalar(value: Any) -> Any:
    """Return a number that the page formats unchanged, and anything else as text."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**6):
        return value
    if (
        isinstance(value, int) and value.bit_length() > 4 * MAX_CHARACTERS
    ):  # Python limits int to str conversion
        return f"an int of {value.bit_length()} bits"
    return _truncate(repr(value[:MAX_CHARACTERS] if isinstance(value, str | bytes) else value))


def _as_numeric_array(value: Any) -> np.ndarray | None:
    """Return a list of numbers, or of equally long lists of numbers, as an array."""
    rows = value if value and all(type(row) in (list, tuple) for row in value) else [value]
    if sum(map(len, rows)) > MAX_LIST_ENTRIES:
        return None
    is_numeric = all(isinstance(entry, numbers.Real) for row in rows for entry in row)
    if not is_numeric or not rows[0] or len({len(row) for row in rows}) > 1:
        return None
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    array[:] = rows
    return array if rows is value else array[0]


def _contents(value: Any) -> tuple[int, Iterable[tuple[str, Any]]] | None:
    """Return the size and the named parts of a container or an object, or None if it has none to show.

    Attributes that start with an underscore are not shown.
    """
    if isinstance(value, type) or hasattr(value, "__code__"):
        return None
    if isinstance(value, dict):
        return len(value), ((_format_briefly(name), part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return len(value), zip(getattr(value, "_fields", map(str, count())), value, strict=False)
    if isinstance(value, set | frozenset):
        return len(value), (("", part) for part in value)
    if type(value).__module__ == "builtins" or type(value).__name__ == "module":
        return None
    fields = {name: part for name, part in getattr(value, "__dict__", {}).items() if name[:1] != "_"}
    return (len(fields), ((_truncate(name), part) for name, part in fields.items())) if fields else None


def _format_briefly(value: Any) -> str:
    """Format a value in a word or two, without calling its methods."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return str(_format_scalar(value))
    if kind in (range, slice):
        return _truncate(repr(value))
    name = getattr(value, "__name__", None)
    return _truncate(name) if isinstance(name, str) else "…"


def _type_name(kind: type) -> str:
    return _truncate(kind.__name__)


def _truncate(text: str) -> str:
    text = escape_unprintable(text[: MAX_CHARACTERS + 1])
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
