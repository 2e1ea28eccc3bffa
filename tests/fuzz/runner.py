"""Run a target on many seeded inputs, with bounds of memory and time, and collect what it must not do.

An input fails if it raises anything but an error of regard with a hint, if it takes too long or too much memory, or if
a file outside the folder of the target is written. Every input has its own seed, so one can be run again alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from regard.errors import RegardError

MEMORY = 1 << 30  # address space that a target may take beyond what the process has
SECONDS = 20.0  # of processor time, for one input
WAITING = 300.0  # seconds until an input that waits counts as one that hangs; other work may delay it
TIMERS = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAITING)}
MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # faster than a disk
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGING = {
    "os.remove": 1,
    "os.rename": 2,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.link": 2,
    "os.symlink": 2,
}

# Draws an input and runs it.
RunInput = Callable[[Random], object]


class Target(NamedTuple):
    """A parser with bad input for it.

    Args:
        name: how the command line calls it.
        share: inputs of a thousand.
        build: prepares files in a folder, and returns the function that draws and runs an input.
    """

    name: str
    share: int
    build: Callable[[Path], RunInput]


class UnexpectedResult(Exception):
    """A result that is wrong although nothing was raised."""


@dataclass
class Report:
    """What the inputs of a target led to.

    Attributes:
        inputs: number of inputs.
        refused: number of inputs that were refused with a hint.
        failures: number of failures by kind and place.
        first: the first input of each, for running it again.
        seconds: time of all inputs.
    """

    inputs: int = 0
    refused: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class WriteGuard:
    """An audit hook that notices files which are changed outside a folder. Hooks cannot be removed, so there is one."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = arguments
            paths = [path] if flags & WRITING else []
        else:
            paths = list(arguments[: CHANGING.get(event, 0)])
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                name = os.path.realpath(os.fsdecode(path))
                if not name.startswith((self.folder, "/dev/")):
                    self.outside.append(name)


_guards: list[WriteGuard] = []


def _get_guard() -> WriteGuard:
    if not _guards:
        _guards.append(WriteGuard())
    return _guards[0]


def _stop(number: int, _: object) -> None:
    _set_timers(running=False)  # the other timer may be due as well: one error per input
    kind = "of processor time" if number == signal.SIGPROF else "in all"
    raise UnexpectedResult(f"more than {TIMERS[signal.Signals(number)][1]:g} seconds {kind}")


def _set_timers(running: bool) -> None:
    for number, (timer, seconds) in TIMERS.items():
        signal.signal(number, _stop if running else signal.SIG_IGN)
        signal.setitimer(timer, seconds if running else 0)


@contextlib.contextmanager
def _bound_resources(limit_memory: bool) -> Iterator[None]:
    """Limit the address space of this process, and catch the signal of an input that takes too long."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handlers = {number: signal.getsignal(number) for number in TIMERS}
    if limit_memory:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        _set_timers(running=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def describe_failure(error: BaseException) -> str:
    """Name an error by its type and the last place in regard that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/regard/" in frame.filename] or frames
    place = f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"
    text = f": {error}" if isinstance(error, UnexpectedResult) else ""
    return f"{type(error).__name__} at {place}{text}"[:300]


def run_inputs(
    target: Target, numbers: range, seed: int = 0, *, raise_first: bool = False, limit_memory: bool = True
) -> Report:
    """Run inputs of a target.

    Args:
        target: the target.
        numbers: numbers of the inputs.
        seed: seed of the run; an input depends on the target's name, the seed and its number only.
        raise_first: raise the first failure instead of counting it.
        limit_memory: limit the address space of the process.

    Returns:
        The counts and failures.
    """
    report, guard = Report(), _get_guard()
    before, sys.dont_write_bytecode = (
        sys.dont_write_bytecode,
        True,
    )  # compiled modules are no output of an input
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY_DISK) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_input = target.build(Path(folder))
        for number in range(5):  # import what is imported late, before memory is limited
            with contextlib.suppress(Exception):
                run_input(Random(f"{target.name}/{seed}/warm-up {number}"))
        began = time.perf_counter()
        with _bound_resources(limit_memory):
            guard.folder = os.path.realpath(folder)
            try:
                for number in numbers:
                    _run_input(run_input, target.name, seed, number, report, guard, raise_first)
            finally:
                guard.folder, sys.dont_write_bytecode = None, before
        report.seconds = time.perf_counter() - began
    return report


def _run_input(
    run_input: RunInput,
    name: str,
    seed: int,
    number: int,
    report: Report,
    guard: WriteGuard,
    raise_first: bool,
) -> None:
    report.inputs += 1
    _set_timers(running=True)
    try:
        run_input(Random(f"{name}/{seed}/{number}"))
        if guard.outside:
            raise UnexpectedResult(f"wrote {guard.outside.pop()}")
    except RegardError as error:
        report.refused += 1
        if not error.hint.strip():
            report.failures["no hint"] += 1
    except Exception as error:
        if raise_first:
            raise
        kind = describe_failure(error)
        report.failures[kind] += 1
        report.first.setdefault(kind, number)
