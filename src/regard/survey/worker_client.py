"""The other side of the process that has the model: it is started, asked, timed, and started again when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.survey.worker_process import Task


class SurveyError(RegardError, RuntimeError):
    """A survey that cannot go on; what is committed stays, and the same call resumes it."""


class Refused(NamedTuple):
    """A document that goes to quarantine: what it did, and the reason."""

    kind: str
    reason: str


class Measurer:
    """A model in a process of its own. `measure(text)` gives its rows, or why there are none.

    A text that takes longer than `timeout` seconds has its process killed; one that kills its process is tried once
    more in a fresh one. Nothing is started before the first question.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self.task, self.timeout = task, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._stopped = False

    def about(self) -> dict[str, Any]:
        """What the model is, with its fingerprints; starts the process."""
        return self._start(about=True)

    def measure(self, text: str) -> dict[str, Any] | Refused:
        for again in (False, True):
            if self._process is None:
                self._start()
            try:
                self._connection.send(text)
                if not self._connection.poll(self.timeout):
                    self.close()
                    return Refused("hangs", f"no answer within {self.timeout:g} s")
                kind, answer = self._connection.recv()
            except (EOFError, OSError):
                how = self._ended()
                if again:
                    return Refused("kills", f"its process ended twice, the second time by {how}")
            else:
                return answer if kind == "rows" else Refused(kind, answer)
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End the process for good, from any thread: whoever waits for an answer gets an error."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next question would start another."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self, about: bool = False) -> dict[str, Any]:
        """Start the process anew, and what the model says of itself."""
        self.close()
        self._check()
        self._connection, theirs = Pipe()
        # As it is found here, and without what a caller's main module would do when it is imported again.
        env = {**os.environ, "PYTHONPATH": python_path()}
        code = f"from regard.survey.worker_process import main; main({theirs.fileno()}, {os.getpid()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._check()
        try:
            self._connection.send(self.task)
            self._connection.send(about)
            kind, answer = self._connection.recv()
        except (EOFError, OSError):
            kind, answer = "refused", f"its process ended by {self._ended()} before it was ready"
        if kind == "refused":
            self.close()
            name = getattr(self.task.model, "name", self.task.model)
            raise SurveyError(
                "survey",
                received=f"the model {name!r}, which does not run: {answer}",
                expected="a model that can be opened, and watched on a sentence",
                hint="Try it alone: regard.watch(model) around one call says the same.",
            )
        return dict(answer)

    def _check(self) -> None:
        if self._stopped:
            self.close()
            raise SurveyError(
                "survey",
                received="a question to a model that was stopped",
                expected="a run that goes on",
                hint="Run the same again: what is committed stays.",
            )

    def _ended(self) -> str:
        """What ended the process, which is then gone."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def python_path() -> str:
    """Where this process finds modules, for another one."""
    return os.pathsep.join(each or os.getcwd() for each in sys.path)
