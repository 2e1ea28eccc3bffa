"""A run written down: each line as it was done, with the values it left behind."""

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
from regard.explore.snapshot import kept
from regard.explore.source import Listing, Loop, listing
from regard.render.text import escape_unprintable

MOST_STEPS = 2000
MOST_CHARACTERS = 1_500_000  # of values, told apart


@dataclass(frozen=True)
class Step:
    """One line done, or what happens at it: `kind` is enter, line, call, return, yield or raise.

    `frame` counts the calls, so that a function that calls itself has its values apart; `depth` is how many calls
    are open. `changed` leads from a name to the number of its value among `Run.values`, or None where it is gone;
    `produced` are the names that have a new value, be it equal to the old.
    `rounds` has for each loop around the line which time through that loop it is: (number of the loop's run, round).
    `result` is the number of the value that is returned or yielded; `says` tells an exception.
    """

    kind: str
    listing: int
    line: int
    frame: int
    depth: int
    changed: dict[str, int | None]
    produced: list[str]
    rounds: tuple[tuple[int, int], ...]
    result: int | None = None
    says: str | None = None


@dataclass
class Run:
    """All steps of a run. `loops` has for each run of a loop the names it gives values to and how often it went round.

    `cut` says in words why the steps end before the run did, if they do.
    """

    name: str
    listings: list[Listing] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    loops: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    cut: str | None = None


@dataclass
class _Frame:
    """What is known of an open call."""

    number: int
    listing: int
    line: int | None = None
    raised: BaseException | None = None
    seen: dict[str, int] = field(default_factory=dict)
    rounds: list[tuple[Loop, int]] = field(default_factory=list)  # the loops it is in, each with its run


class Recorder:
    """Follows one function and what it calls of its own module, by the interpreter's trace events.

    An event comes before a line is done, so a line is written down at the event after it.
    """

    def __init__(self, root: CodeType, module: dict[str, Any]) -> None:
        self.run, self._root, self._module = Run(root.co_qualname), root, module
        self._listings: dict[CodeType, int | None] = {}
        self._frames: dict[FrameType, _Frame] = {}
        self._open: list[FrameType] = []
        self._numbers: dict[str, int] = {}
        self._characters = 0
        self._passing: BaseException | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """What the interpreter calls: at the start of every function, then at each event of those followed."""
        if self.run.cut:
            frame.f_trace = None  # at full speed from here
            return None
        if event == "call":
            return self._enter(frame)
        state = self._frames[frame]
        if event == "line":
            self._line(frame, state)
        elif event == "exception":
            state.raised = arg[1]
        elif event == "return":
            self._leave(frame, state, arg)
        if len(self.run.steps) >= MOST_STEPS or self._characters >= MOST_CHARACTERS:
            self.run.cut = f"The walk ends here, after {len(self.run.steps)} steps; the run went on."
            sys.settrace(None)
        return self

    # -- Events --

    def _enter(self, frame: FrameType) -> Any:
        if frame.f_globals is not self._module or (index := self._listing_of(frame.f_code)) is None:
            return None
        if self._open:
            caller = self._open[-1]
            self._write("call", caller, self._frames[caller])
        resumed = frame in self._frames  # a generator goes on
        state = self._frames.setdefault(frame, _Frame(len(self._frames), index))
        self._open.append(frame)
        if not resumed:
            state.line = self.run.listings[index].line
            self._write("enter", frame, state)
            state.line = None
        return self

    def _line(self, frame: FrameType, state: _Frame) -> None:
        layout = self.run.listings[state.listing]
        line = layout.starts.get(frame.f_lineno, frame.f_lineno)
        raised, state.raised = state.raised, None
        if raised is not None and not isinstance(raised, StopIteration):
            self._write("raise", frame, state, says=_told(raised))  # and caught here
        elif state.line is not None and (line == state.line or state.line in layout.withs.get(line, ())):
            return  # the same statement goes on, or a `with` is left: no line of its own
        elif state.line is not None:
            self._turn(state, line)
            self._write("line", frame, state)
        while state.rounds and not state.rounds[-1][0].line <= line <= state.rounds[-1][0].end:
            state.rounds.pop()
        state.line = line

    def _leave(self, frame: FrameType, state: _Frame, result: Any) -> None:
        self._open.remove(frame)
        last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if state.raised is not None and not last.startswith("RETURN"):
            if self._passing is not state.raised:  # told where it came up, not by each caller it passes
                self._write("raise", frame, state, says=_told(state.raised))
            self._passing = state.raised
            return
        kind = "yield" if last == "YIELD_VALUE" else "return"
        self._turn(state, -1)
        self._write(kind, frame, state, result=self._number(result))
        if kind == "yield" and not self._assigned(state):
            state.line = None  # going on, there is nothing left of it to do

    # -- What is written down --

    def _write(
        self, kind: str, frame: FrameType, state: _Frame, result: int | None = None, says: str | None = None
    ) -> None:
        if state.line is None:
            state.line = frame.f_lineno
        now = {
            escape_unprintable(name): self._number(value)
            for name, value in frame.f_locals.items()
            if not name.startswith((".", "@"))
        }
        changed: dict[str, int | None] = {n: v for n, v in now.items() if state.seen.get(n) != v}
        changed.update({name: None for name in state.seen if name not in now})
        state.seen = now
        given = self._assigned(state) if kind in ("line", "return") else []
        produced = [name for name in now if name in changed or name in given]
        depth = len(self._open) - 1 if frame in self._open else len(self._open)
        rounds = tuple((number, self.run.loops[number][1]) for _, number in state.rounds)
        self.run.steps.append(
            Step(
                kind, state.listing, state.line, state.number, depth, changed, produced, rounds, result, says
            )
        )

    def _assigned(self, state: _Frame) -> list[str]:
        """The names that the line just done gave values to; the head of a loop that is over gave none."""
        layout = self.run.listings[state.listing]
        is_head = any(loop.line == state.line for loop in layout.loops)
        if state.line is None or (is_head and not (state.rounds and state.rounds[-1][0].line == state.line)):
            return []
        return layout.assigns.get(state.line, [])

    def _turn(self, state: _Frame, line: int) -> None:
        """Keep count: where the line just done is the head of a loop, `line` tells if it goes round once more."""
        loop = next(
            (loop for loop in self.run.listings[state.listing].loops if loop.line == state.line), None
        )
        if loop is None:
            return
        goes_round, is_open = (
            loop.body <= line <= loop.end,
            bool(state.rounds) and state.rounds[-1][0] is loop,
        )
        if goes_round and not is_open:
            state.rounds.append((loop, len(self.run.loops)))
            self.run.loops.append((loop.names, 0))
        if goes_round:
            number = state.rounds[-1][1]
            self.run.loops[number] = (loop.names, self.run.loops[number][1] + 1)
        elif is_open:
            state.rounds.pop()

    def _number(self, value: Any) -> int:
        """The number of a value: equal records share one."""
        record = kept(value)
        text = json.dumps(record)
        if text not in self._numbers:
            self._numbers[text] = len(self.run.values)
            self._characters += len(text)
            self.run.values.append(record)
        return self._numbers[text]

    def _listing_of(self, code: CodeType) -> int | None:
        """Which listing shows the code; None for what is not followed: other modules, comprehensions, class bodies."""
        if code not in self._listings:
            plain = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
            found = listing(code, self._module) if plain or code is self._root else None
            self._listings[code] = None if found is None else len(self.run.listings)
            if found is not None:
                self.run.listings.append(found)
        return self._listings[code]


def _told(error: BaseException) -> str:
    try:
        words = str(error)
    except Exception:  # an error of the reader's own may do anything
        words = ""
    name = type(error).__name__
    return escape_unprintable(f"{name}: {words[:500]}" if words else name)


def record(operation: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Run:
    """Call a function and write down how it went; a generator is gone through to its end."""
    root, module = _source_of(operation, function)
    recorder = Recorder(root, module)
    try:
        with _tracing(recorder):
            result = function(*args, **kwargs)
            if inspect.isgenerator(result):
                for _ in result:
                    if recorder.run.cut:
                        break
    except Exception as error:
        run = recorder.run
        if not run.steps:  # not the function's own: it was never entered
            raise
        if run.steps[-1].kind != "raise" and not run.cut:  # calls so deep that none could be followed
            run.cut = f"The walk ends here: {_told(error)}"
    if not recorder.run.steps:
        raise ArgumentError(
            operation,
            received=f"the function {root.co_name}, of which no line was run",
            expected="a call that runs its lines",
            hint="A cache may have answered for it: pass the function without its decorator.",
        )
    return recorder.run


@contextlib.contextmanager
def _tracing(recorder: Recorder) -> Iterator[None]:
    """Trace with the recorder, then with whatever there was: a debugger, a measure of coverage."""
    before = sys.gettrace()
    sys.settrace(recorder)
    try:
        yield
    finally:
        sys.settrace(before)


def _source_of(operation: str, function: Any) -> tuple[CodeType, dict[str, Any]]:
    """The code that a call of the function runs, and the module it belongs to."""
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
            expected="a function written in Python that runs when it is called",
            hint="Write a function that calls it, and pass that.",
        )
    if listing(code, module) is None:
        raise ArgumentError(
            operation,
            received=f"the function {code.co_name}, whose source is not to be found",
            expected="a function from a file or a notebook",
            hint="Put it in a file and import it.",
        )
    return code, module
