"""The submissions of a class: find them in a folder, check each in a process of its own, and count the hints."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from regard.errors import ArgumentError
from regard.learn.exercises.submission import SUFFIXES, TIME_LIMIT, SubmissionResult, check_file

# "exercise-3", "Exercise 03", "ex3", or the name of a notebook of the book, such as "03-keys-equal-queries".
NUMBER = re.compile(r"ex(?:ercise)?[-_ ]?0?([1-8])(?!\d)|(?<!\d)0([1-8])-[a-z-]+", re.IGNORECASE)
SEPARATORS = " -_.,()"


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
