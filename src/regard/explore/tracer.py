"""Trace a function call: every line as it runs, with the values it produces."""

from __future__ import annotations

import contextlib
import dis
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from regard.errors import ArgumentError, describe_argument
from regard.explore.snapshot import take_snapshot
from regard.explore.source import FunctionSource, LoopLines, read_source
from regard.render.text import escape_unprintable

MAX_STEPS = 2000
MAX_CHARACTERS = 1_500_000  # of distinct values


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
        if len(self.trace.steps) >= MAX_STEPS or self._characters >= MAX_CHARACTERS:
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
    """Call a function and trace it; a generator is run to its end.

    Raises:
        ArgumentError: If the function has no Python source, or no line of it ran.
    """
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
            received=f"the function {root.co_name}, of which no line was run",
            expected="a call that runs its lines",
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
