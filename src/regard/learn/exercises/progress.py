"""The progress of a learner: a JSON file with the attempts at each exercise."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.learn.exercises.submission import SubmissionResult

FORMAT = 1
PROGRESS_FILE = "regard-progress.json"


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

    exercises: Mapping[int, ExerciseProgress]

    def __init__(self, exercises: Mapping[int, ExerciseProgress] | None = None) -> None:
        object.__setattr__(self, "exercises", dict(exercises or {}))

    def record(self, n: int, result: SubmissionResult) -> CourseProgress:
        """Return the progress after one more check.

        Args:
            n: The number of the exercise.
            result: The result of the check.
        """
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
    """Read the progress of a learner.

    Args:
        path: The file that `CourseProgress.save` wrote; if there is none, nothing has been done.

    Returns:
        The progress.

    Raises:
        ArgumentError: If the file is not such a file.
    """
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
