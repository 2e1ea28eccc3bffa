"""The worker process that holds the model, and its client: one text at a time goes in, and its rows come back.

The model runs in a separate process, so that a document that hangs or crashes it does not stop the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from regard.errors import ArgumentError, RegardError
from regard.jobs.model_runner import ModelInfo, ModelSpec, NotFiniteError


class SurveyError(RegardError, RuntimeError):
    """Error that stops a run over a corpus. Committed shards are kept, and the same call resumes the run."""


def main(channel: int, parent: int) -> None:
    """Answer the requests on a connection until it closes or the parent process exits.

    The first two messages are a `ModelSpec` and whether to describe the model. Every later one is a tuple: a text, and
    its prompt if it has one. `channel` is the file descriptor of the connection, `parent` a process id.
    """
    _exit_with_parent(parent)
    _prefer_for_oom_kill()
    connection = Connection(channel)
    spec: ModelSpec = connection.recv()
    try:
        measurer = spec.load()
        connection.send(("ready", measurer.describe() if connection.recv() else None))
    except Exception as error:  # any failure to load the model is reported to the parent
        is_refused = isinstance(error, ArgumentError) and error.operation == spec.operation
        connection.send(("refused", error) if is_refused else ("failed", format_error(error)))
        return
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = ("rows", measurer.measure(*request))
        except Exception as error:  # a document may raise anything; it is reported, and the next one is read
            answer = ("not finite" if isinstance(error, NotFiniteError) else "error", format_error(error))
        connection.send(answer)


def format_error(error: Exception) -> str:
    """Format an error on one line of at most 500 characters."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, RegardError | NotFiniteError) else f"{type(error).__name__}: {text}"


def _exit_with_parent(parent: int) -> None:
    """Exit with the parent process, even if the parent is killed while the model runs."""

    def poll_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=poll_parent, daemon=True).start()


def _prefer_for_oom_kill() -> None:
    """Let the system kill this process before its parent when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return


class Rejected(NamedTuple):
    """A document that could not be measured: the kind of problem, and the reason."""

    kind: str
    reason: str


class WorkerClient:
    """A model in a separate process, started by the first request.

    If a text takes longer than the timeout of the options, its process is killed. If a text crashes its process, it is
    retried once in a new one.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stopped = False

    def describe(self) -> ModelInfo:
        """Start the process and return the properties of the model."""
        info: ModelInfo = self._start(describe=True)
        return info

    def measure(self, text: str, prompt: str | None = None) -> dict[str, Any] | Rejected:
        """Return the rows of a text, and of its prompt if it has one, as columns, or the reason of its rejection."""
        request = (text,) if prompt is None else (text, prompt)
        for retry in (False, True):
            if self._connection is None:
                self._start()
            assert self._connection is not None
            try:
                self._connection.send(request)
                if not self._connection.poll(self.spec.options.timeout):
                    self.close()
                    return Rejected("timeout", f"no result within {self.spec.options.timeout:g} s")
                kind, answer = self._connection.recv()
            except (EOFError, OSError):
                cause = self._reap()
                if retry:
                    return Rejected("crash", f"the worker process ended twice, the second time by {cause}")
            else:
                return answer if kind == "rows" else Rejected(kind, answer)
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Kill the process for good, from any thread; a pending request raises an error."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process; the next request starts another."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self, describe: bool = False, retry: bool = True) -> Any:
        """Start a new process and return what it reports: the model's properties if `describe`, else None.

        A process that is killed before it is ready is started once more.
        """
        self.close()
        self._check_not_stopped()
        self._connection, remote = Pipe()
        # The worker searches the same paths as this process, and does not import the caller's main module.
        env = {**os.environ, "PYTHONPATH": format_python_path()}
        code = f"from regard.jobs.worker import main; main({remote.fileno()}, {os.getpid()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        remote.close()
        self._check_not_stopped()
        try:
            self._connection.send(self.spec)
            self._connection.send(describe)
            kind, answer = self._connection.recv()
        except (EOFError, OSError):
            cause = self._reap()
            if retry and cause == "SIGKILL":
                return self._start(describe, retry=False)
            kind, answer = "failed", f"the worker process ended by {cause} before it was ready"
        if kind != "ready":
            self.close()
            if kind == "refused":
                raise answer
            name = getattr(self.spec.model, "name", self.spec.model)
            raise SurveyError(
                self.spec.operation,
                received=f"the model {name!r}, which failed to run",
                expected="a model that can be loaded and run under regard.watch",
                hint=f"The worker reported: {answer}",
            )
        return answer

    def _check_not_stopped(self) -> None:
        if self._stopped:
            self.close()
            raise SurveyError(
                self.spec.operation,
                received="a request to a stopped worker",
                expected="one that runs",
                hint="Run the same command again to resume.",
            )

    def _reap(self) -> str:
        """Wait for the process to end, and return the signal or exit status."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def format_python_path() -> str:
    """Format this process's `sys.path` as a PYTHONPATH for another process."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
