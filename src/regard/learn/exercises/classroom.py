"""Find the files that a class handed in, check them, and report the results by student.

Names of Moodle's and Canvas' downloads are read, archives are unpacked, and a roster lists the students without a file.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import os
import re
import shutil
import tempfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.learn.exercises.catalog import EXERCISES
from regard.learn.exercises.submission import (
    SUFFIXES,
    TIME_LIMIT,
    SubmissionResult,
    check_file,
    decode_text,
    read_cells,
)
from regard.pages.html import Page, build_page, shorten

# "exercise-3", "Exercise 03", "ex3", or the name of a notebook of the book, such as "03-keys-equal-queries". A name
# such as alex2 ends in "ex" as well: a short form begins a word.
NUMBER = re.compile(
    r"(?:exercise|(?<![^\W\d_])ex|(?<=[a-z])(?-i:Ex))[-_ ]?0?([1-8])(?!\d)|(?<!\d)0([1-8])-[a-z-]+",
    re.IGNORECASE,
)
SEPARATORS = " -_.,()"
# Moodle: "Ana García_12345_assignsubmission_file_" is a folder, or begins the name of a file; without the last "_"
# since version 4. A group may have no number.
MOODLE = re.compile(r"(?P<student>.+?)(?:_(?P<id>\d+))?_assignsubmission_[a-z]+(?:_(?P<file>.*))?")
# Canvas: "garciaana_LATE_12345_67890_exercise-3.py" has the student and the attachment; if graded anonymously, it is
# "anon_x7Yz2_67890_exercise-3.py".
CANVAS = re.compile(
    r"(?:(?P<student>[^\W\dA-Z][^\WA-Z]*?)_)?(?:(?P<late>LATE|late)_)?"
    r"(?P<id>(?(student)\d+|anon_[^\W_]+))_\d+_(?P<file>.+)"
)
PARTS = {n: frozenset(part.name for part in exercise.parts) for n, exercise in enumerate(EXERCISES, start=1)}
NUMBERED = re.compile(r"answers?_?([1-8])", re.IGNORECASE)  # the name of an answer, such as answer_3
MENTION = re.compile(r"\bExercise ([1-8])\.|\bexercises\.(?:show|check)\(\s*([1-8])\b")
DEFINED = re.compile(
    r"^(?:def|class)\s+(\w+)|^(\w+)\s*(?::[^=\n]+)?=(?!=)|[\"'](\w+)[\"']\s*[:\]]", re.MULTILINE
)
# Words of a file name that name no student.
NOISE = re.compile(
    r"(?:hw|homework|assignment|exercises?|ex|task|solutions?|answers?|submission|final|draft|copy|new|v|version)?\d*"
)
NAME_COLUMNS = (
    ("name", "full name", "fullname", "student", "student name"),
    ("first name", "firstname", "given name", "forename"),
    ("last name", "lastname", "surname", "family name"),
    ("identifier",),  # of Moodle, if marking is blind
)
KEY_COLUMN = re.compile(r"\b(?:id|identifier|username|user|login|e-?mail|number)\b", re.IGNORECASE)
IGNORED = (".", "__")  # beginnings of names
PACKAGES = ("site-packages", "node_modules", "venv")  # folders of code that is not the student's
NO_STUDENTS = ("", "points possible", "student, test")  # rows of a Canvas gradebook
MAX_FILE = 50 << 20  # bytes of a script or notebook
MAX_ARCHIVE = 1 << 30  # bytes of an archive when unpacked


@dataclass(frozen=True)
class Student:
    """A student of the roster.

    Attributes:
        name: The name, unique in the roster.
        id: The first of the keys, "" without any.
        keys: Other texts that files of the student may bear: numbers, logins, e-mail addresses.

    >>> Student("Ana García", "12345").name
    'Ana García'
    """

    name: str
    id: str = ""
    keys: frozenset[str] = frozenset()


def read_roster(path: str | os.PathLike[str]) -> tuple[Student, ...]:
    r"""Read a list of students from CSV.

    The first row names the columns: `name`, or `first name` and `last name`; optionally others such as `id`, `username`
    or `email`. Exports of Moodle and Canvas have such columns. A file with one column needs no header.

    Args:
        path: The file: UTF-8, UTF-16 or Latin-1, with commas, semicolons or tabs.

    Returns:
        The students, in the order of the file.

    Raises:
        ArgumentError: If there is no column with names, no student, or a name occurs twice without an id.
        OSError: If the file cannot be read.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "roster.csv"
    ...     _ = file.write_text("first name,last name,id\nAna,Li,101\n")
    ...     read_roster(file)[0].name
    'Ana Li'
    """
    text = decode_text(Path(path).read_bytes())
    separator = max(",;\t", key=text.partition("\n")[0].count)
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if any(map(str.strip, row))]
        if "\0" in text:
            raise csv.Error("a binary file, such as a spreadsheet")
    except csv.Error:
        rows = []
    header = [cell.strip().casefold() for cell in rows[0]] if rows else []
    columns = [[i for i, title in enumerate(header) if title in names][:1] for names in NAME_COLUMNS]
    whole, first, last, identifier = columns
    name_columns = whole or first + last or identifier
    if not name_columns and all(len(row) == 1 for row in rows):
        rows, header, name_columns = [[], *rows], ["name"], [0]
    students: list[Student] = []
    for row in rows[1:]:
        cells = [cell.strip() for cell in row] + [""] * len(header)
        name = " ".join(cells[i] for i in name_columns).strip()
        if name.casefold() in NO_STUDENTS:
            continue
        keys = [cells[i] for i, title in enumerate(header) if KEY_COLUMN.search(title) and cells[i]]
        keys = [key.removeprefix("Participant ") for key in keys]  # as Moodle's grading worksheet has it
        aliases = {key.casefold() for key in keys} | {key.casefold().partition("@")[0] for key in keys}
        students.append(Student(name, keys[0] if keys else "", frozenset(aliases)))
    counts = Counter(student.name for student in students)
    students = [
        replace(it, name=f"{it.name} ({it.id})") if counts[it.name] > 1 and it.id else it for it in students
    ]
    counts = Counter(student.name for student in students)
    repeated = [name for name, count in counts.items() if count > 1]
    if not name_columns or not students or repeated:
        problem = f"{repeated[0]!r} twice" if repeated else f"columns {shorten(', '.join(header)) or 'none'}"
        raise ArgumentError(
            "exercise",
            received=f"the roster {str(path)!r} with {problem}",
            expected="a CSV file with a column name, or first name and last name, and a row for each student",
            hint="Add a column id if two students have the same name."
            if repeated
            else "Save it as CSV, and name the columns in the first row: name,id.",
        )
    return tuple(students)


def _list_words(text: str) -> list[str]:
    """List the words of a name in lower case, without accents."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return re.findall(r"[^\W_]+", "".join(char for char in plain if not unicodedata.combining(char)))


def match_student(label: str, key: str, roster: Sequence[Student]) -> Student | None:
    """Find the student that a file belongs to.

    Args:
        label: The name in the file's name, in any order and with other words.
        key: A number in the file's name, or "".
        roster: The students.

    Returns:
        The only student with this key, else with this name, else with all words of the label; None if there is none.
    """
    words = _list_words(label)
    known = {word for word in words if not NOISE.fullmatch(word)}

    def has_key(student: Student) -> bool:
        numbers = {word for word in words if len(word) >= 4 and not word.isalpha()}
        return (
            bool(numbers & student.keys or (known and known <= student.keys))
            or label.casefold() in student.keys
        )

    def has_name(student: Student) -> bool:
        own = _list_words(student.name)
        return "".join(words) in {"".join(own[i:] + own[:i]) for i in range(len(own))}

    def has_words(student: Student) -> bool:
        own = set(_list_words(student.name))
        return bool(known and own) and (known <= own or own <= known)

    tests: list[Callable[[Student], bool]] = [
        lambda student: bool(key) and key.casefold() in student.keys,
        has_key,
        has_name,
        has_words,
    ]
    for test in tests:
        found = [student for student in roster if test(student)]
        if len(found) == 1:
            return found[0]
    return None


@dataclass(frozen=True)
class Submission:
    """A file that a student handed in, and an exercise that it answers.

    Attributes:
        student: The name in the roster, or the name that the file or its folder bears.
        n: The number of the exercise.
        path: The file.
        late: Whether its name says that it is late.

    >>> Submission("ana", 3, Path("ana/exercise-3.py")).student
    'ana'
    """

    student: str
    n: int
    path: Path
    late: bool = False


@dataclass(frozen=True)
class SkippedFile:
    """A file that was not checked, with the reason.

    >>> SkippedFile("ana", Path("ana/notes.docx"), "neither a script nor a notebook").reason
    'neither a script nor a notebook'
    """

    student: str
    path: Path
    reason: str


@dataclass(frozen=True)
class CheckedSubmission:
    """A submission with its result.

    >>> from regard.learn.exercises import SubmissionResult
    >>> result = SubmissionResult("right", (), "", ("split", "merge"), 2, 0.5)
    >>> CheckedSubmission(Submission("ana", 7, Path("ana/exercise-7.py")), result).result.summary
    'right'
    """

    submission: Submission
    result: SubmissionResult


@dataclass(frozen=True)
class ClassReport:
    """The results of a class.

    Attributes:
        rows: The checked files, sorted by student and exercise.
        roster: The students of the class; empty if it is not known.
        skipped: The files that were not checked.
        points: Points for each exercise that is right, by number. By default a point for each part.

    >>> ClassReport((), (Student("Ana"),)).absent
    ('Ana',)
    """

    rows: tuple[CheckedSubmission, ...]
    roster: tuple[Student, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()
    points: Mapping[int, float] = field(default_factory=dict)

    @property
    def students(self) -> tuple[str, ...]:
        """The names of all students, sorted: those with a file, and those of the roster."""
        names = {row.submission.student for row in self.rows} | {student.name for student in self.roster}
        return tuple(sorted(names, key=str.casefold))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The exercises that were handed in, sorted."""
        return tuple(sorted({row.submission.n for row in self.rows}))

    @property
    def absent(self) -> tuple[str, ...]:
        """The students of the roster without a file."""
        present = {row.submission.student for row in self.rows} | {it.student for it in self.skipped}
        return tuple(name for name in self.students if name not in present)

    @property
    def strangers(self) -> tuple[str, ...]:
        """The students with a file who are not in the roster; none without a roster."""
        known = {student.name for student in self.roster}
        return tuple(name for name in self.students if self.roster and name not in known)

    @cached_property
    def best(self) -> dict[tuple[str, int], CheckedSubmission]:
        """The file that counts, by student and exercise: the one with the most right parts."""
        best: dict[tuple[str, int], CheckedSubmission] = {}
        for row in self.rows:
            place = row.submission.student, row.submission.n
            if place not in best or len(row.result.right_parts) > len(best[place].result.right_parts):
                best[place] = row
        return best

    def get_maximum(self, n: int) -> float:
        """Return the points for an exercise that is right.

        Args:
            n: The number of the exercise.
        """
        return round(self.points.get(n, float(len(PARTS[n]))), 2)

    def count_maximum(self) -> float:
        """Count the points of a student for whom all exercises that were handed in are right."""
        return round(sum(map(self.get_maximum, self.numbers)), 2)

    def count_points(self, student: str, n: int | None = None) -> float:
        """Count the points of a student: those of one exercise, or all of them.

        Args:
            student: The name.
            n: The number of the exercise. None counts all.

        Returns:
            The points. Each right part is an equal share of those of its exercise.
        """
        if n is None:
            return round(sum(self.count_points(student, number) for number in self.numbers), 2)
        row = self.best.get((student, n))
        return round(self.get_maximum(n) * len(row.result.right_parts) / len(PARTS[n]), 2) if row else 0.0

    def count_hints(self) -> list[tuple[int, int, str]]:
        """Count how many students got each hint.

        Returns:
            The number of students, the exercise and the hint, the most common first.
        """
        hints = Counter((n, hint) for (_, n), row in self.best.items() for hint in row.result.hints)
        return [(count, n, hint) for (n, hint), count in hints.most_common()]

    def page(self, title: str = "Results of the class") -> Page:
        """Return a page with the table, each student's hints, and what was not checked.

        Args:
            title: Title of the page.
        """
        number_of_files = Counter((row.submission.student, row.submission.n) for row in self.rows)
        cells = [
            {
                "student": student,
                "exercise": n,
                "file": row.submission.path.name,
                "files": number_of_files[student, n],
                "late": row.submission.late,
                "status": row.result.status,
                "summary": row.result.summary,
                "points": self.count_points(student, n),
                "hints": row.result.hints,
            }
            for (student, n), row in self.best.items()
        ]
        record = {
            "title": title,
            "exercises": [
                {"n": n, "title": EXERCISES[n - 1].title, "points": self.get_maximum(n)} for n in self.numbers
            ],
            "students": [{"name": name, "points": self.count_points(name)} for name in self.students],
            "cells": cells,
            "hints": self.count_hints(),
            "absent": self.absent,
            "strangers": self.strangers,
            "skipped": [[it.student, it.path.as_posix(), it.reason] for it in self.skipped],
        }
        return build_page(title, "classPage", record)


@contextlib.contextmanager
def open_submissions(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Open a folder or an archive with the files of a class, for as long as the block runs.

    Archives inside are unpacked as well, in a copy.

    Args:
        path: A folder, or a ZIP file as Moodle and Canvas have it for a class.

    Yields:
        A folder for `find_submissions`.

    Raises:
        ArgumentError: If the path is neither, or the archive cannot be unpacked.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with zipfile.ZipFile(Path(folder) / "class.zip", "w") as archive:
    ...         archive.writestr("liana_LATE_101_9001_work.py", "answer = {'split': ..., 'merge': ...}")
    ...     with open_submissions(Path(folder) / "class.zip") as opened:
    ...         ((submission,), _) = find_submissions(opened)
    >>> submission.student, submission.n, submission.late
    ('liana', 7, True)
    """
    source = Path(path)
    if source.is_dir() and not any(source.rglob("*.[zZ][iI][pP]")):
        yield source
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        try:
            if source.is_dir():
                hidden = shutil.ignore_patterns(".*", "__*")
                shutil.copytree(
                    source, root, dirs_exist_ok=True, ignore=hidden, ignore_dangling_symlinks=True
                )
            else:
                _unpack(source, root)
        except Exception as error:  # a damaged archive may raise anything
            raise ArgumentError(
                "exercise",
                received=f"--class {str(source)!r} ({type(error).__name__}: {error})",
                expected="a folder or a ZIP file with the submissions of the class",
                hint="Put files such as ana-exercise-3.py into a folder.",
            ) from error
        for archive in sorted(root.rglob("*.[zZ][iI][pP]")):
            with contextlib.suppress(
                Exception
            ):  # what cannot be unpacked is listed as a file that was not checked
                folder = archive.with_suffix("")
                _unpack(
                    archive, folder / archive.name.lower().replace(".", "-") if folder.is_dir() else folder
                )
                archive.unlink()
        inside = _list_visible(root)
        while source.is_file() and len(inside) == 1 and _is_packed_folder(inside[0]):
            root, inside = inside[0], _list_visible(inside[0])
        yield root


def _open_archive(archive: Path) -> zipfile.ZipFile:
    """Open an archive; macOS writes names in UTF-8 without saying so."""
    try:
        return zipfile.ZipFile(archive, metadata_encoding="utf-8")
    except UnicodeDecodeError:
        return zipfile.ZipFile(archive)


def _unpack(archive: Path, folder: Path) -> None:
    with _open_archive(archive) as packed:
        size = sum(member.file_size for member in packed.infolist())
        if size > MAX_ARCHIVE:
            raise ValueError(f"{size:,} bytes when unpacked, of at most {MAX_ARCHIVE:,}")
        for member in packed.infolist():
            member.filename = member.filename.replace("\\", "/")  # as some programs of Windows write it
            try:
                packed.extract(member, folder)
            except OSError:  # such as a name that is too long, with what a platform puts before it
                name = Path(member.filename)
                stem = name.stem if len(name.stem) <= 80 else name.stem[:40] + name.stem[-40:]
                (folder / f"{stem}{name.suffix[:9]}").write_bytes(packed.read(member))


def _list_visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(IGNORED)]


def _is_packed_folder(path: Path) -> bool:
    """Return whether a folder is the one that was packed, and not a student's: that has files such as exercise-3.py."""
    if not path.is_dir() or _match_name(path.name):
        return False
    return not any(NUMBER.fullmatch(it.stem) for it in _list_visible(path) if it.is_file())


def _match_name(name: str) -> re.Match[str] | None:
    """Match the name of a file or folder that Moodle or Canvas gave it."""
    return MOODLE.fullmatch(name) or CANVAS.fullmatch(name)


@dataclass(frozen=True)
class _Place:
    """What the path of a file says: the student's label and key, the exercise, and whether it is late.

    `is_students` is False for a file that may be the teacher's.
    """

    label: str
    key: str
    n: int | None
    late: bool
    is_students: bool


def _read_place(inside: Path) -> _Place:
    """Read the path of a file inside the folder of a class; a folder `exercise-3` tells the exercise."""
    match = next(filter(None, map(_match_name, inside.parts)), None)
    stem = Path((match and match.string == inside.name and match["file"]) or inside.name).stem
    named = NUMBER.search(stem)
    rest = stem[: named.start()] + stem[named.end() :] if named else stem
    folders = [part for part in inside.parts[:-1] if not NUMBER.fullmatch(part)]
    named = named or next(filter(None, map(NUMBER.fullmatch, inside.parts[:-1])), None)
    label = folders[0] if folders else rest.strip(SEPARATORS) or stem
    if match:
        label = match["student"] or match["id"]
    return _Place(
        " ".join(label.encode(errors="replace").decode().split()),
        (match and match["id"]) or "",
        int(named[1] or named[2]) if named else None,
        bool(match and match.groupdict().get("late")),
        bool(match or folders),
    )


def _name_students(places: Sequence[_Place], roster: Sequence[Student]) -> dict[tuple[str, str], str]:
    """Name the student of each label and key: as in the roster, else the label, with the key if several have it."""
    keys: dict[str, set[str]] = {}
    for place in places:
        keys.setdefault(place.label, set()).add(place.key)
    names = {}
    for label, own in keys.items():
        for key in own:
            student = match_student(label, key, roster)
            names[label, key] = (
                student.name if student else f"{label} {key}" if key and len(own) > 1 else label
            )
    return names


def find_submissions(
    folder: str | os.PathLike[str], n: int | None = None, roster: Sequence[Student] = ()
) -> tuple[list[Submission], list[SkippedFile]]:
    """Find the submissions in a folder.

    Moodle's and Canvas' names tell the student. Otherwise a file in a subfolder belongs to the student with the
    subfolder's name, and in the folder itself the student is the rest of the file's name: `ana-exercise-3.py`,
    `exercise 3 (Ana).ipynb`. The exercises are found in the answers of a file, in its name, or in the names that it
    defines.

    Args:
        folder: The folder.
        n: The exercise to check; files that do not tell their exercise belong to it. None takes all exercises.
        roster: The students of the class. The names of files are matched with it.

    Returns:
        The submissions, and the files that could not be assigned to an exercise.

    Raises:
        ArgumentError: If there are no submissions.
    """
    root = Path(folder)
    files: list[tuple[_Place, Path]] = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and not any(part.startswith(IGNORED) or part in PACKAGES for part in inside.parts):
            files.append((_read_place(inside), path))
    names = _name_students([place for place, _ in files], roster)
    found: list[Submission] = []
    unclear: list[Submission] = []
    skipped: list[SkippedFile] = []
    for place, path in files:
        name = names[place.label, place.key]
        is_code = path.suffix.lower() in SUFFIXES
        if not is_code or path.stat().st_size > MAX_FILE:
            reason = f"larger than {MAX_FILE >> 20} MB" if is_code else "neither a script nor a notebook"
            skipped += [SkippedFile(name, path.relative_to(root), reason)] if place.is_students else []
            continue
        numbers = find_exercises(path, place.n)
        found += [Submission(name, number, path, place.late) for number in numbers if n in (None, number)]
        unclear += [] if numbers else [Submission(name, n or 0, path, place.late)]
    # Helpers and notes beside an answer are no answers.
    present = {it.student for it in found}
    found += [it for it in unclear if n is not None and it.student not in present]
    checked = {it.path for it in found}
    reason = "answers no exercise of the book"
    skipped += [
        SkippedFile(it.student, it.path.relative_to(root), reason) for it in unclear if it.path not in checked
    ]
    if not found:
        raise ArgumentError(
            "exercise",
            received=f"{len(files)} files without an answer to "
            + ("an exercise" if n is None else f"exercise {n}"),
            expected="files such as ana-exercise-3.py, or ana/exercise-3.ipynb",
            hint="If all files belong to one exercise, name it: regard exercise 3 --class FOLDER.",
        )
    return sorted(found, key=lambda it: (it.student.casefold(), it.n, it.path.name)), sorted(
        skipped, key=lambda it: it.path
    )


def find_exercises(path: Path, named: int | None = None) -> set[int]:
    """Find the exercises that a file answers.

    Args:
        path: A script or a notebook.
        named: The exercise that the name of the file says, if any.

    Returns:
        The exercises whose parts are in the answers of the file. If these are not clear, the exercise of the name, else
        the only one that the text mentions, else the one with the most parts among the names that the file defines.
    """
    try:
        code = "\n".join(text for _, text in read_cells(path))
    except (OSError, ValueError):
        code = ""
    try:
        answered = set(_list_answered(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        answered = set()
    if answered:
        return answered
    if named is not None:
        return {named}
    mentioned = {int(match[1] or match[2]) for match in MENTION.finditer(code)}
    if len(mentioned) == 1:
        return mentioned
    return _choose_exercise({name for names in DEFINED.findall(code) for name in names}, at_least=1)


def _list_answered(tree: ast.AST) -> Iterator[int]:
    """List the exercises of the answers in a file: dicts named `answer`, and those passed to `exercises.check`.

    A function that returns the dict, as in the solutions, stands for it.
    """
    nodes = list(ast.walk(tree))
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        values: list[ast.expr | None] = []
        names: list[str] = []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            values = [node.value] if any(name.lower().startswith("answer") for name in names) else []
        elif isinstance(node, ast.Call) and len(node.args) == 2 and ast.unparse(node.func).endswith("check"):
            values = [node.args[1]]
            if isinstance(number := node.args[0], ast.Constant) and isinstance(number.value, int):
                yield from {number.value} & set(PARTS)
        for value in values:
            if isinstance(value, ast.Call) and (made := functions.pop(ast.unparse(value.func), None)):
                values += [inner.value for inner in ast.walk(made) if isinstance(inner, ast.Return)]
            if isinstance(value, ast.Dict):
                keys = {key.value for key in value.keys if isinstance(key, ast.Constant)}
                said = {int(match[1]) for match in map(NUMBERED.fullmatch, names) if match}
                yield from _choose_exercise(keys, at_least=2) or {n for n in said if PARTS[n] & keys}


def _choose_exercise(names: set[Any], at_least: int) -> set[int]:
    """Return the only exercise with the most of these names among its parts, if there is one."""
    counts = {n: len(parts & names) for n, parts in PARTS.items()}
    most = max(counts.values())
    best = {n for n, count in counts.items() if count == most}
    return best if len(best) == 1 and most >= at_least else set()


def check_class(
    submissions: Iterable[Submission],
    *,
    roster: Sequence[Student] = (),
    skipped: Sequence[SkippedFile] = (),
    points: Mapping[int, float] | None = None,
    timeout: float = TIME_LIMIT,
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ClassReport:
    """Check the submissions of a class, each in a process of its own.

    Args:
        submissions: The submissions.
        roster: The students of the class, for the report.
        skipped: The files that are not checked, for the report.
        points: Points for each exercise that is right, by number. By default a point for each part.
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
        try:
            rows = tuple(pool.map(check, submissions))
        except BaseException:  # such as Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return ClassReport(rows, tuple(roster), tuple(skipped), points or {})
