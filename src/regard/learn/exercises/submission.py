"""Check an answer that is a file, and keep the progress of a learner.

A file is a Python script or a notebook. It leaves its answer in `answer`, passes it to `exercises.check`, or has
variables and functions with the names of the parts. The process has a time limit, a memory limit, and only the
environment variables that Python needs. That stops accidents such as an endless loop. It is no sandbox: check files of
strangers in a container.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.learn.exercises.catalog import EXERCISES, get_exercise
from regard.learn.exercises.exercise import (
    Exercise,
    check_answer,
    describe_exception,
    record_answers,
    report_problems,
)

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
MEMORY_LIMIT = 4 << 30  # bytes of address space
# Cell magics of a notebook whose cell is Python; the cell of any other, such as %%bash, is not.
PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")
ASSIGNED_COMMAND = re.compile(r"(\s*[\w, ]+=\s*)[!%]\s*[\w$]")
HELP = re.compile(r"\s*\?|\s*[\w.]+\?{1,2}\s*$")
FORMAT = 1  # of the progress file
PROGRESS_FILE = "regard-progress.json"


@dataclass(frozen=True)
class SubmissionResult:
    """The result of checking a file.

    Attributes:
        status: "right", "not yet", "error" if the file raised, or "time" if it ran into the time limit.
        hints: The hints of the checker, or the errors; none if the answer is right.
        message: The whole message.
        right_parts: The parts that are right.
        num_parts: The number of parts of the exercise.
        seconds: The time that running and checking took.

    >>> SubmissionResult("not yet", ("scale: …",), "…", ("variance",), 3, 0.5).summary
    '1/3'
    """

    status: str
    hints: tuple[str, ...]
    message: str
    right_parts: tuple[str, ...]
    num_parts: int
    seconds: float

    @property
    def hint(self) -> str:
        """The hints as one text, each on a line of its own."""
        return "\n".join(self.hints)

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
    if file.suffix.lower() not in SUFFIXES:
        raise ArgumentError(
            "exercises.check_file",
            received=f"{file.name!r}",
            expected=f"a script or a notebook whose name ends in {' or '.join(SUFFIXES)}",
            hint="Rename the file, or save it in one of these formats.",
        )
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "agg"}
    # The process runs in another folder, where a relative path would lead elsewhere.
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    stream = None if show_output else subprocess.DEVNULL
    begin = time.perf_counter()
    # On Windows, the folder of a process that still runs cannot be removed.
    running = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with running as folder, tempfile.TemporaryDirectory() as own:
        out = Path(own) / "result.json"  # a file may write or remove anything in the folder where it runs
        # -P: a file of the learner's called random.py must not replace the module of that name.
        code = "import sys; from regard.learn.exercises import submission; submission.main(*sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(n), str(file), str(out)],
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
        try:
            found = json.loads(out.read_text("utf-8"))
        except (OSError, ValueError):
            hint = f"Python ended with code {process.returncode} before the answer could be checked."
            return _make_result(exercise, "error", hint, seconds)
    return SubmissionResult(
        found["status"],
        tuple(found["hints"]),
        found["message"],
        tuple(found["right_parts"]),
        len(exercise.parts),
        seconds,
    )


def _make_result(exercise: Exercise, status: str, hint: str, seconds: float) -> SubmissionResult:
    return SubmissionResult(status, (hint,), f"{exercise.title}: {hint}", (), len(exercise.parts), seconds)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, if it still runs."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):  # it has ended, and started nothing that still runs
            os.killpg(process.pid, signal.SIGKILL)
    else:
        tree = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(tree, capture_output=True, check=False)  # fails if it has ended
        process.kill()
    process.wait()


def decode_text(data: bytes) -> str:
    """Decode the text of a file: UTF-8, UTF-16 with a byte order mark, what a script declares, or else Latin-1."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        encoding = "utf-16" if is_wide else tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        text = data.decode(encoding)
    except (SyntaxError, ValueError, LookupError):
        text = data.decode("utf-16" if is_wide else "latin-1", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_cells(path: Path) -> list[tuple[str, str]]:
    """Read the code of a script or notebook: the name and the text of each cell.

    Commands of the notebook itself, such as `%pip install`, are left out.
    """
    text = decode_text(path.read_bytes())
    if path.suffix.lower() == ".py":
        return [(path.name, text)]
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path.name} is not a notebook that can be read. Save it again as .ipynb."
        ) from error
    return [(f"cell {number}", _clear_commands(source)) for number, source in enumerate(sources, start=1)]


def _clear_commands(code: str) -> str:
    """Empty the lines that are commands of the notebook; a line that continues a statement is none."""
    first = code.strip().split(maxsplit=1)
    if first and first[0].startswith("%%") and first[0] not in PYTHON_MAGICS:
        return ""
    lines: list[str] = []
    complete = 0  # lines before the first that may belong to an incomplete statement
    for line in code.split("\n"):
        is_command = line.lstrip().startswith(("%", "!")) or HELP.match(line)
        assigned = ASSIGNED_COMMAND.match(line)
        if not (is_command or assigned) or _is_incomplete("\n".join(lines[complete:])):
            lines.append(line)
            continue
        complete = len(lines) + 1
        if assigned:
            lines.append(f"{assigned[1]}None")
        elif line.lstrip().startswith("%time "):
            lines.append(line.replace("%time ", "", 1))
        else:  # a block needs a statement
            before = next((above for above in reversed(lines) if above.strip()), "")
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}pass" if before.rstrip().endswith(":") else "")
    return "\n".join(lines)


def _is_incomplete(code: str) -> bool:
    """Return whether a bracket, a string or a line of code goes on after its end."""
    try:
        list(tokenize.generate_tokens(io.StringIO(code).readline))
    except tokenize.TokenError:
        return True
    except SyntaxError:
        return False
    return code.endswith("\\")


def describe_error(error: BaseException, titles: set[str]) -> str:
    """Describe an error with the place in the learner's own code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in titles]
    line, title = (frames[-1].lineno, frames[-1].filename) if frames else (None, "")
    if isinstance(error, SyntaxError):
        line, title = error.lineno, error.filename or ""
    where = f"{title}, line {line}: " if line is not None else ""
    return where + describe_exception(error)


def is_answer(name: str, value: Any) -> bool:
    """Return whether a variable holds an answer: `answer`, or a dict `answer_3` if a file answers several exercises."""
    return name == "answer" or (name.lower().startswith("answer") and isinstance(value, Mapping))


def _split_after_answers(code: str) -> list[str]:
    """Split code after each statement that assigns an answer; every piece keeps its line numbers."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [code]  # it raises when it runs
    lines, ends = code.split("\n"), [0]
    for statement, following in pairwise(statements):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "answer" for target in targets):
            ends += [statement.end_lineno or 0] if following.lineno > (statement.end_lineno or 0) else []
    return ["\n" * i + "\n".join(lines[i:j]) for i, j in pairwise([*ends, len(lines)])]


class _Shell:
    """Stands for the shell of a notebook, whose commands do nothing here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def _run_cells(path: Path, exercise: Exercise) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Run a file; return its variables, its answers in order, and its errors. After an error, the next cell runs."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    if path.suffix.lower() == ".ipynb":
        names |= {"display": print, "get_ipython": _Shell}
    answers: list[Any] = []
    errors: list[str] = []
    try:
        cells = read_cells(path)
    except (OSError, ValueError) as error:
        return names, answers, [str(error)]
    titles = {title for title, _ in cells}
    with record_answers(exercise, answers):  # those that the file itself passes to `exercises.check`
        for title, text in cells:
            for piece in _split_after_answers(text):
                raised = _run_piece(piece, title, names)
                for name, value in list(names.items()):
                    is_new = is_answer(name, value) and not any(value is seen for seen in answers)
                    answers += [value] if is_new else []
                if raised is not None:
                    errors.append(describe_error(raised, titles))
                    break
    return names, answers, errors


def _run_piece(piece: str, title: str, names: dict[str, Any]) -> BaseException | None:
    """Run a piece of a file; return what it raised."""
    try:
        exec(compile(piece, title, "exec", dont_inherit=True), names)
    except BaseException as error:  # a learner's file may raise anything
        return error
    return None


def _fits(answer: Any, exercise: Exercise) -> bool:
    """Return whether an answer has parts of an exercise, and of no other exercise more: several have weights."""
    if not isinstance(answer, Mapping):
        return True
    own, *others = (sum(part.name in answer for part in other.parts) for other in (exercise, *EXERCISES))
    return own > 0 and own >= max(others)


def check_here(exercise: Exercise, path: Path) -> dict[str, Any]:
    """Run a file in this process and check its answer; return the fields of a result.

    The answer is the last one that the file leaves in `answer` or passes to `exercises.check`. Parts that it lacks are
    taken from functions of the same names, and without an answer all parts are taken from variables.
    """
    names, answers, errors = _run_cells(path, exercise)
    parts = [part.name for part in exercise.parts]
    fitting = [it for it in answers if _fits(it, exercise)]
    answer: Any = (fitting or answers or [{}])[-1]
    if isinstance(answer, Mapping):
        own = {name: names[name] for name in parts if name in names and (callable(names[name]) or not answer)}
        answer = own | {name: value for name, value in answer.items() if value is not ... or name not in own}
    if isinstance(answer, Mapping) and not answer:
        needed = f"The file leaves no answer. Assign a dict to answer, with {', '.join(parts)}."
        result = report_problems(exercise, errors or [needed])
    else:
        result = check_answer(exercise, answer)
        if errors and not result.correct:
            right = [part for part in exercise.parts if part.name in result.right_parts]
            result = report_problems(exercise, [*errors, *result.hints], right)
    status = "right" if result.correct else "error" if errors and not result.right_parts else "not yet"
    return {"status": status} | {name: getattr(result, name) for name in ("hints", "message", "right_parts")}


def main(n: str, path: str, out: str) -> None:
    """Check a file and write the result as JSON; `check_file` calls it in a process of its own."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        pass  # Windows has no such limit, macOS may refuse it
    sys.argv = [path]  # what the file itself would see
    sys.path.append(str(Path(path).parent))  # modules beside the file, after all others
    found = check_here(EXERCISES[int(n) - 1], Path(path))
    Path(out).write_text(json.dumps(found), "utf-8")
    with contextlib.suppress(OSError, ValueError):  # the file may have closed its streams
        sys.stdout.flush()
    os._exit(0)  # without waiting for threads of the file


@dataclass(frozen=True)
class ExerciseProgress:
    """What a learner has done on one exercise.

    Attributes:
        attempts: The number of checks so far.
        right_parts: The parts that were right in the last check.
        solved: The time of the first check in which all were right, in UTC; empty before.
        hint: The hint of the last check.

    >>> ExerciseProgress(attempts=2, right_parts=("scores",)).attempts
    2
    """

    attempts: int = 0
    right_parts: tuple[str, ...] = ()
    solved: str = ""
    hint: str = ""


@dataclass(frozen=True)
class CourseProgress:
    """The progress of a learner, by the number of the exercise; `record` returns it with one more check.

    >>> CourseProgress().exercises
    {}
    """

    exercises: Mapping[int, ExerciseProgress] = field(default_factory=dict)

    def record(self, n: int, result: SubmissionResult) -> CourseProgress:
        """Return the progress after one more check."""
        before = self.exercises.get(n, ExerciseProgress())
        now = datetime.now(UTC).isoformat(timespec="seconds")
        after = replace(
            before,
            attempts=before.attempts + 1,
            right_parts=result.right_parts,
            solved=before.solved or (now if result.correct else ""),
            hint=result.hint,
        )
        return CourseProgress({**self.exercises, n: after})

    def save(self, path: Path) -> None:
        """Write the file; it is replaced as a whole, so an interrupted write loses nothing."""
        entries = {str(n): asdict(entry) for n, entry in sorted(self.exercises.items())}
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"format": FORMAT, "exercises": entries}, indent=1) + "\n", "utf-8")
        temporary.replace(path)


def load_progress(path: Path) -> CourseProgress:
    """Read the file that `CourseProgress.save` wrote; if there is none, nothing has been done."""
    if not path.exists():
        return CourseProgress()
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError(f"format {stored['format']}")
        return CourseProgress({int(n): _read_entry(entry) for n, entry in stored["exercises"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            "exercise",
            received=f"{str(path)!r} ({type(error).__name__}: {error})",
            expected=f"a progress file of format {FORMAT}",
            hint="Move the file to start again, or choose another file with --progress.",
        ) from None


def _read_entry(entry: Any) -> ExerciseProgress:
    """Read what a learner has done on one exercise; a value of another type raises a ValueError."""
    found = ExerciseProgress(**entry | {"right_parts": tuple(entry["right_parts"])})
    texts = (*found.right_parts, found.solved, found.hint)
    if type(found.attempts) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry of another type")
    return found
