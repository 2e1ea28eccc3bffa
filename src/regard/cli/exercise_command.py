"""`regard exercise`: the list, the task of an exercise, the check of a file, and the table of a class."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.cli.output import Printer, style_text
from regard.errors import ArgumentError
from regard.learn import exercises
from regard.learn.exercises.catalog import EXERCISES
from regard.learn.exercises.submission import PROGRESS_FILE, ExerciseProgress, load_progress

# Hints that the table of a class lists.
MAX_HINTS = 8


@dataclass(frozen=True)
class ExerciseOptions:
    """The arguments of the command.

    Args:
        number: The exercise; None lists all.
        file: The file to check; None for `exercise-N.py`, or the notebook of the exercise.
        solution: Print the worked solution.
        progress: The progress file; None for the one in this folder.
        timeout: Time limit for the file, in seconds.
    """

    number: int | None
    file: Path | None
    solution: bool
    progress: Path | None
    timeout: float


def exercise(printer: Printer, options: ExerciseOptions) -> int:
    """List the exercises, open one, or check a file.

    Args:
        printer: Prints the result.
        options: The arguments of the command.

    Returns:
        The exit code: 1 if a file was checked and is not right yet.
    """
    if printer.as_csv:
        raise ArgumentError(
            "exercise",
            received="--csv without --class",
            expected="--csv with the results of a class",
            hint="Use --json, or add --class DIR.",
        )
    progress_file = options.progress or Path(PROGRESS_FILE)
    if options.number is None and options.solution:
        raise ArgumentError(
            "exercise",
            received="--solution without a number",
            expected="the number of an exercise",
            hint="For example: regard exercise 3 --solution.",
        )
    if options.number is None:
        return _list_exercises(printer, progress_file)
    if options.solution:
        solution = exercises.solution(options.number)
        printer.record({"exercise": options.number, "text": solution.text, "code": solution.code})
        printer.print(str(solution))
        return 0
    file = options.file or _find_file(options.number)
    if file is None:
        return _open_exercise(printer, options.number)
    return _check_file(printer, options.number, file, progress_file, options.timeout)


def _list_exercises(printer: Printer, progress_file: Path) -> int:
    """Print the exercises with the learner's progress."""
    done = load_progress(progress_file).exercises
    rows: list[list[object]] = []
    records: list[dict[str, Any]] = []
    for n, item in enumerate(EXERCISES, start=1):
        entry = done.get(n, ExerciseProgress())
        title = item.title.partition(". ")[2]
        names = [part.name for part in item.parts]
        rows.append([n, title, item.chapter, _format_status(entry, len(names))])
        records.append(
            {"exercise": n, "title": title, "chapter": item.chapter, "parts": names} | asdict(entry)
        )
    printer.record({"exercises": records, "progress": str(progress_file)})
    printer.table(["", "exercise", "chapter", "progress"], rows)
    open_numbers = [n for n in range(1, len(EXERCISES) + 1) if n not in done or not done[n].solved]
    printer.print()
    solved = f"{len(EXERCISES) - len(open_numbers)} of {len(EXERCISES)} solved."
    printer.print(f"{solved} Next: regard exercise {open_numbers[0]}" if open_numbers else solved)
    return 0


def _format_status(entry: ExerciseProgress, num_parts: int) -> str:
    tries = f"{entry.attempts} {'try' if entry.attempts == 1 else 'tries'}"
    if entry.solved:
        return f"solved on {entry.solved[:10]}, {tries}"
    return f"{len(entry.right_parts)} of {num_parts} parts, {tries}" if entry.attempts else "–"


def _find_file(n: int) -> Path | None:
    """Find the learner's file in this folder: the script, or the notebook as the book names it."""
    names = [Path(f"exercise-{n}.py"), *sorted(Path().glob(f"0{n}-*.ipynb"))]
    found = [path for path in names if path.is_file()]
    if len(found) > 1:
        raise ArgumentError(
            "exercise",
            received=f"{found[0].name!r} and {found[1].name!r} in this folder",
            expected="one file for the exercise",
            hint=f"Name the one to check: regard exercise {n} {found[0].name}.",
        )
    return found[0] if found else None


def _open_exercise(printer: Printer, n: int) -> int:
    """Print the task, and write the starter file."""
    task, path = exercises.show(n), Path(f"exercise-{n}.py")
    path.write_text(exercises.starter(n), "utf-8")
    printer.record({"exercise": n, "task": task.text, "written": str(path)})
    printer.print(str(task))
    printer.print()
    printer.print(f"Wrote {path}. Replace the dots, then run: regard exercise {n}")
    return 0


def _check_file(printer: Printer, n: int, file: Path, progress_file: Path, timeout: float) -> int:
    """Check a file and record the result."""
    progress = load_progress(progress_file)  # first, so that a bad progress file stops before the check
    result = exercises.check_file(n, file, timeout=timeout, show_output=printer.as_text)
    progress = progress.record(n, result)
    progress.save(progress_file)
    entry = progress.exercises[n]
    printer.record(
        {"exercise": n, "file": str(file), "correct": result.correct}
        | asdict(result)
        | {"attempts": entry.attempts, "solved": entry.solved}
    )
    first, *rest = result.message.split("\n")
    printer.print(style_text((first, "bold green" if result.correct else "bold")))
    for line in rest:
        printer.print(line)
    return 0 if result.correct else 1


def check_class(printer: Printer, folder: Path, number: int | None, timeout: float) -> int:
    """Check the submissions of a class, and print a table of students and exercises.

    Args:
        printer: Prints the result.
        folder: The folder of submissions.
        number: The exercise to check; None for all.
        timeout: Time limit for each file, in seconds.

    Returns:
        The exit code.
    """
    if not folder.is_dir():
        raise ArgumentError(
            "exercise",
            received=f"--class {str(folder)!r}, which is no folder",
            expected="a folder with the files of the class",
            hint="Put files such as ana-exercise-3.py into it.",
        )
    submissions, skipped = exercises.find_submissions(folder, number)
    for path in skipped:
        printer.warn(f"skipped {path}: no exercise in its name")
    with printer.progress(f"Checking {len(submissions)} files", len(submissions)) as advance:
        report = exercises.check_class(submissions, timeout=timeout, advance=advance)
    records = [_to_record(row) for row in report.rows]
    hints = [{"students": count, "exercise": n, "hint": hint} for count, n, hint in report.count_hints()]
    printer.record({"submissions": records, "hints": hints})
    if printer.as_csv:
        lines = io.StringIO()
        writer = csv.DictWriter(lines, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        printer.write(lines.getvalue())
    _print_class(printer, report)
    if hints:
        printer.print()
        printer.print("The most common hints")
        rows = [list(hint.values()) for hint in hints[:MAX_HINTS]]
        printer.table(["students", "exercise", "hint"], rows)
    return 0


def _to_record(row: exercises.CheckedSubmission) -> dict[str, Any]:
    submission, result = row.submission, row.result
    return {
        "student": submission.student,
        "exercise": submission.n,
        "file": submission.path.name,
        "status": result.status,
        "right": len(result.right_parts),
        "parts": result.num_parts,
        "hint": result.hint,
        "seconds": round(result.seconds, 2),
    }


def _print_class(printer: Printer, report: exercises.ClassReport) -> None:
    """Print a row for each student and a column for each exercise."""
    summaries = {(row.submission.student, row.submission.n): row.result.summary for row in report.rows}
    students, numbers = report.students, report.numbers
    rows = [[student, *(summaries.get((student, n), "–") for n in numbers)] for student in students]
    right = [sum(summaries.get((student, n)) == "right" for student in students) for n in numbers]
    rows.append(["right", *(f"{count} of {len(students)}" for count in right)])
    printer.table(["student", *(f"exercise {n}" for n in numbers)], rows)
