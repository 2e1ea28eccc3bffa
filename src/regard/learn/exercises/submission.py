"""Check answers that are files, of one learner or of a class, and keep the progress of a learner.

A file is a Python script or a notebook. It leaves its answer in `answer`, as the starter files and the notebooks of the
book do, or in variables with the names of the parts. The process has a time limit, a memory limit, and only the
environment variables that Python needs. That stops accidents such as an endless loop. It is no sandbox: check files of
strangers in a container.
"""

from __future__ import annotations

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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.learn.exercises.catalog import EXERCISES, get_exercise
from regard.learn.exercises.exercise import CheckResult, Exercise, check_answer

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
# "exercise-3", "Exercise 03", "ex3", or the name of a notebook of the book, such as "03-keys-equal-queries". A name
# such as alex2 ends in "ex" as well: a short form begins a word.
NUMBER = re.compile(
    r"(?:exercise|(?<![^\W\d_])ex|(?<=[a-z])(?-i:Ex))[-_ ]?0?([1-8])(?!\d)|(?<!\d)0([1-8])-[a-z-]+",
    re.IGNORECASE,
)
SEPARATORS = " -_.,()"
FORMAT = 1  # of the progress file
PROGRESS_FILE = "regard-progress.json"


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
    # The process runs in another folder, where a relative path would lead elsewhere.
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    stream = None if show_output else subprocess.DEVNULL
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
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


def read_cells(path: Path) -> list[tuple[str, str]]:
    """Read the code of a script or notebook: the name and the text of each cell.

    Commands of the notebook itself, such as `%pip install`, become empty lines.
    """
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return [(path.name, text)]
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [
        (f"cell {number}", _clear_commands("".join(cell["source"])))
        for number, cell in enumerate(cells, start=1)
    ]


def _clear_commands(code: str) -> str:
    """Empty the lines that are commands of the notebook; a line that continues a statement is none."""
    lines: list[str] = []
    for line in code.split("\n"):
        is_command = line.lstrip().startswith(("%", "!", "?")) and not _is_incomplete("\n".join(lines))
        lines.append("" if is_command else line)
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
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{where}{type(error).__name__}: {text}".rstrip(": ")


def check_here(exercise: Exercise, path: Path) -> dict[str, Any]:
    """Run a file in this process and check its answer; return the fields of a result.

    The answer is what the file leaves in `answer`, or in variables with the names of the parts.
    """
    titles: set[str] = set()
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    try:
        cells = read_cells(path)
        titles = {title for title, _ in cells}
        for title, text in cells:
            exec(compile(text, title, "exec"), names)
        parts = [part.name for part in exercise.parts]
        answer = names.get("answer", {name: names[name] for name in parts if name in names})
    except (Exception, SystemExit) as error:  # a learner's file may raise anything
        status, hint = "error", describe_error(error, titles)
        result = CheckResult(False, hint, f"{exercise.title}: {hint}")
    else:
        if isinstance(answer, Mapping) and not answer:
            hint = f"The file leaves no answer. Assign a dict to answer, with {', '.join(parts)}."
            result = CheckResult(False, hint, f"{exercise.title}: {hint}")
        else:
            result = check_answer(exercise, answer)
        status = "right" if result.correct else "not yet"
    return {"status": status} | {name: getattr(result, name) for name in ("hint", "message", "right_parts")}


def main(n: str, path: str, out: str) -> None:
    """Check a file and write the result as JSON; `check_file` calls it in a process of its own."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        pass  # Windows has no such limit, macOS may refuse it
    found = check_here(EXERCISES[int(n) - 1], Path(path))
    Path(out).write_text(json.dumps(found), "utf-8")


@dataclass(frozen=True)
class Submission:
    """A file that a student handed in.

    Attributes:
        student: The name of the folder it is in, or the rest of its own name.
        n: The number of the exercise.
        path: The file.

    >>> Submission("ana", 3, Path("ana/exercise-3.py")).student
    'ana'
    """

    student: str
    n: int
    path: Path


@dataclass(frozen=True)
class CheckedSubmission:
    """A submission with its result.

    >>> from regard.learn.exercises import SubmissionResult
    >>> result = SubmissionResult("right", "", "", ("split", "merge"), 2, 0.5)
    >>> CheckedSubmission(Submission("ana", 7, Path("ana/exercise-7.py")), result).result.summary
    'right'
    """

    submission: Submission
    result: SubmissionResult


@dataclass(frozen=True)
class ClassReport:
    """The results of a class; `rows` are sorted by student and exercise.

    >>> ClassReport(()).students
    ()
    """

    rows: tuple[CheckedSubmission, ...]

    @property
    def students(self) -> tuple[str, ...]:
        """The names of the students, sorted."""
        return tuple(sorted({row.submission.student for row in self.rows}, key=str.casefold))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The exercises that were handed in, sorted."""
        return tuple(sorted({row.submission.n for row in self.rows}))

    def count_hints(self) -> list[tuple[int, int, str]]:
        """Count how many students got each hint.

        Returns:
            The number of students, the exercise and the hint, the most common first.
        """
        hints = Counter((row.submission.n, row.result.hint) for row in self.rows if not row.result.correct)
        return [(count, n, hint) for (n, hint), count in hints.most_common()]


def find_submissions(
    folder: str | os.PathLike[str], n: int | None = None
) -> tuple[list[Submission], list[Path]]:
    """Find the submissions in a folder.

    A file in a subfolder belongs to the student with the subfolder's name. In the folder itself, the student is the
    rest of the file's name: `ana-exercise-3.py`, `exercise 3 (Ana).ipynb`.

    Args:
        folder: The folder.
        n: The exercise to check; files whose names have no number belong to it. None takes all exercises, and needs a
            number in each name.

    Returns:
        The submissions, and the files that could not be assigned to an exercise.

    Raises:
        ArgumentError: If there are no submissions, or a student has two for one exercise.
    """
    root = Path(folder)
    found: dict[tuple[str, int], Submission] = {}
    skipped: list[Path] = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.suffix not in SUFFIXES or any(part.startswith((".", "__")) for part in inside.parts):
            continue
        match = NUMBER.search(path.stem)
        number = int(match[1] or match[2]) if match else n
        if number is None or (n is not None and number != n):
            skipped += [inside] * (number is None)
            continue
        rest = path.stem[: match.start()] + path.stem[match.end() :] if match else path.stem
        student = inside.parts[0] if len(inside.parts) > 1 else rest.strip(SEPARATORS) or path.stem
        submission = Submission(student, number, path)
        if (student, number) in found:
            raise ArgumentError(
                "exercise",
                received=f"two files for exercise {number} of {student!r}: "
                f"{found[student, number].path.name!r} and {path.name!r}",
                expected="one file for each student and exercise",
                hint="Move one of them away.",
            )
        found[student, number] = submission
    if not found:
        raise ArgumentError(
            "exercise",
            received=f"{str(root)!r}, with {len(skipped)} scripts and notebooks but no exercise in their names",
            expected="files such as ana-exercise-3.py, or ana/exercise-3.ipynb",
            hint="Name the exercise if all files belong to one: regard exercise 3 --class FOLDER.",
        )
    order = sorted(found.values(), key=lambda it: (it.student.casefold(), it.n))
    return order, skipped


def check_class(
    submissions: Iterable[Submission],
    *,
    timeout: float = TIME_LIMIT,
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ClassReport:
    """Check the submissions of a class, each in a process of its own.

    Args:
        submissions: The submissions.
        timeout: Time limit of each, in seconds.
        workers: Number of processes at a time; by default one for each core, at most 8.
        advance: Called after each submission.

    Returns:
        The results.
    """

    def check(submission: Submission) -> CheckedSubmission:
        result = check_file(submission.n, submission.path, timeout=timeout)
        advance()
        return CheckedSubmission(submission, result)

    with ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 8)) as pool:
        return ClassReport(tuple(pool.map(check, submissions)))


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
            hint="Move it away to begin again, or name another one with --progress.",
        ) from None


def _read_entry(entry: Any) -> ExerciseProgress:
    """Read what a learner has done on one exercise; a value of another type raises a ValueError."""
    found = ExerciseProgress(**entry | {"right_parts": tuple(entry["right_parts"])})
    texts = (*found.right_parts, found.solved, found.hint)
    if type(found.attempts) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry of another type")
    return found
