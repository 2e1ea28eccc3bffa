"""Check an answer that is a file: run it in a process of its own, with a time limit, and check what it leaves.

A file is a Python script or a notebook. It leaves its answer in `answer`, as the starter files and the notebooks of the
book do, or in variables with the names of the parts. The process has a time limit, a memory limit, and only the
environment variables that Python needs. That stops accidents such as an endless loop. It is no sandbox: check files of
strangers in a container.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from regard.errors import ArgumentError
from regard.learn.exercises.catalog import get_exercise
from regard.learn.exercises.exercise import Exercise

TIME_LIMIT = 120.0  # seconds; the notebook of exercise 8 checks itself five times
# What Python needs to start and to find installed packages; nothing else of the caller's environment is passed on.
ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "SYSTEMROOT",
    "TEMP",
    "TMP",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "HOME",
)
SUFFIXES = (".py", ".ipynb")


@dataclass(frozen=True)
class SubmissionResult:
    """The result of checking a file.

    Attributes:
        status: "right", "not yet", "error" if the file raised, or "time" if it ran into the time limit.
        hint: The hint of the checker, or the error; empty if the answer is right.
        message: The whole message.
        right_parts: The parts that are right.
        num_parts: The number of parts of the exercise.
        seconds: The time that running and checking took.

    >>> SubmissionResult("not yet", "scale: …", "…", ("variance",), 3, 0.5).summary
    '1/3'
    """

    status: str
    hint: str
    message: str
    right_parts: tuple[str, ...]
    num_parts: int
    seconds: float

    @property
    def correct(self) -> bool:
        """Whether the whole answer is right."""
        return self.status == "right"

    @property
    def summary(self) -> str:
        """The result in a word: right, the number of parts that are right, error or time."""
        return f"{len(self.right_parts)}/{self.num_parts}" if self.status == "not yet" else self.status


def check_file(
    n: int, path: str | os.PathLike[str], *, timeout: float = TIME_LIMIT, show_output: bool = False
) -> SubmissionResult:
    """Run a file in a process of its own, and check the answer that it leaves.

    Args:
        n: The number of the exercise, from 1 to 8.
        path: A Python script or a notebook.
        timeout: Time limit for running and checking, in seconds.
        show_output: Whether the output of the file goes to this process's streams; otherwise it is discarded.

    Returns:
        The result. A file that raises, or runs too long, is a result too.

    Raises:
        ArgumentError: If there is no such exercise, or the file is neither a script nor a notebook.
        FileNotFoundError: If there is no such file.

    >>> import tempfile
    >>> from regard.learn import exercises
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "exercise-3.py"
    ...     _ = file.write_text("answer = {'itself': True}")
    ...     print(exercises.check_file(3, file).hint)
    itself: Look at row t2: with itself it scores 8, with t1 10. A longer key can win.
    """
    exercise = get_exercise("check_file", n)
    file = Path(path).resolve(strict=True)
    if file.suffix not in SUFFIXES:
        raise ArgumentError(
            "exercises.check_file",
            received=f"{file.name!r}",
            expected=f"a script or a notebook, a name that ends in {' or '.join(SUFFIXES)}",
            hint="Rename it, or save it as one of the two.",
        )
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "agg"}
    stream = None if show_output else subprocess.DEVNULL
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        # -P: a file of the learner's called random.py must not replace the module of that name.
        command = [
            sys.executable,
            "-P",
            "-m",
            "regard.learn.exercises.submission_process",
            str(n),
            str(file),
            str(out),
        ]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            hint = f"Stopped after {timeout:g} seconds. Is there a loop that does not end?"
            return _make_result(exercise, "time", hint, time.perf_counter() - begin)
        finally:
            _stop(process)
        seconds = time.perf_counter() - begin
        if not out.exists():
            hint = f"Python ended with code {process.returncode} before the answer could be checked."
            return _make_result(exercise, "error", hint, seconds)
        found = json.loads(out.read_text("utf-8"))
    return SubmissionResult(
        **found | {"right_parts": tuple(found["right_parts"])}, num_parts=len(exercise.parts), seconds=seconds
    )


def _make_result(exercise: Exercise, status: str, hint: str, seconds: float) -> SubmissionResult:
    return SubmissionResult(status, hint, f"{exercise.title}: {hint}", (), len(exercise.parts), seconds)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, if it still runs."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):  # it has ended, and started nothing that still runs
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()
