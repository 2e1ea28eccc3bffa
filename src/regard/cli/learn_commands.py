"""The commands for learners and teachers: explain, explore and exercise. They need NumPy only."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from regard.cli.files import read_matrices, select_head
from regard.cli.options import CausalOption, HeadOption, JsonOption, MatrixFile, OpenOption
from regard.cli.output import NUMBER_STYLE, Printer, check_output, save_page, style_text
from regard.core.attention import attention
from regard.errors import ArgumentError
from regard.learn import exercises
from regard.learn.examples import cat
from regard.learn.exercises.catalog import EXERCISES
from regard.learn.exercises.submission import PROGRESS_FILE, ExerciseProgress, load_progress
from regard.masks import causal as causal_mask
from regard.render.text import escape_unprintable, join_lines

# Tokens that an error lists.
MAX_TOKENS = 8
# The attributes of an explanation that --json prints.
FIELDS = (
    *("query", "key", "value", "scale", "score_mods", "masks", "raw_scores", "scaled_scores", "scores", "shift"),
    *("exponentials", "sink_exponential", "total", "weights", "contributions", "output"),
)  # fmt: skip


PAGES_HELP = (
    "pipeline: the four steps, with every number editable; weights: the weights as an image; "
    "scaling: why scores are divided by √d; geometry: queries and keys as arrows; "
    "cost: count the multiplications; memory: count the bytes moved; code: the program line by line; "
    "model: a small GPT that reads what you type."
)


def explain(
    file: MatrixFile = None,
    query: Annotated[
        str,
        typer.Option(
            "--query", "-q", metavar="QUERY", help="Query to explain: its position, from 0, or its token."
        ),
    ] = "0",
    head: HeadOption = None,
    causal: CausalOption = False,
    as_json: JsonOption = False,
) -> int:
    """Explain how one query attends to the keys, in four steps and with every number."""
    printer = Printer(as_json)
    inputs = _load_inputs(file, head, causal, "explain")
    A = attention(inputs["query"], inputs["key"], mask=inputs["mask"], scale=inputs["scale"])
    tokens = inputs["tokens"]
    explanation = A.explain(_find_query(query, tokens, A.shape), inputs["value"], tokens)
    printer.record(
        {"title": explanation.title, "tokens": list(explanation.key_tokens)}
        | {name: getattr(explanation, name) for name in FIELDS}
    )
    for line in str(explanation).split("\n"):
        printer.print(_style_line(line))
    return 0


def explore(
    name: Annotated[
        Literal["pipeline", "weights", "scaling", "geometry", "cost", "memory", "code", "model"],
        typer.Argument(metavar="NAME", show_default=False, help=PAGES_HELP),
    ],
    file: MatrixFile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE", help="Page to write. Default: NAME.html."),
    ] = None,
    head: HeadOption = None,
    causal: CausalOption = False,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write an interactive page about attention. The page is one file and needs no server or network."""
    printer = Printer(as_json)
    output = output or Path(f"{name}.html")
    check_output(output, "explore")
    from regard import explore

    explorer = getattr(explore, name)
    inputs: dict[str, Any] = {}
    if file is not None or head is not None:
        loaded = _load_inputs(file, head, causal, "explore")
        inputs = {key: value for key, value in loaded.items() if value is not None}
    elif causal:  # over the page's own example; in that of geometry, the query follows the keys
        inputs = {"mask": causal_mask(align="lower_right" if name == "geometry" else None)}
    parameters = inspect.signature(explorer).parameters
    unsupported = [key for key in inputs if key not in parameters and key != "value"]
    if unsupported or (inputs and "query" not in parameters):
        accepted = ", ".join(parameters) if "query" in parameters else "only the built-in example"
        raise ArgumentError(
            "explore",
            received=f"{', '.join(unsupported)} for {name}",
            expected=f"input that this page shows: {accepted}",
            hint="Use regard.explore.code in Python." if name == "code" else "Omit it.",
        )
    page = explorer(**{key: value for key, value in inputs.items() if key in parameters})
    save_page(printer, page, output, show, {"explorer": name})
    return 0


def _load_inputs(file: Path | None, head: str | None, causal: bool, operation: str) -> dict[str, Any]:
    inputs: dict[str, Any]
    if file is None:
        inputs = {"query": cat.Q, "key": cat.K, "value": cat.V, "tokens": list(cat.tokens)}
        inputs |= {"mask": None, "scale": None}
    else:
        inputs = read_matrices(file, operation)
    inputs = select_head(inputs, head, operation)
    if causal:
        inputs["mask"] = causal_mask() if inputs["mask"] is None else inputs["mask"] & causal_mask()
    return inputs


def _find_query(query: str, tokens: list[str] | None, shape: tuple[int, ...]) -> int:
    """Return the position of a query, given as a position or as a token."""
    try:
        return int(query)
    except ValueError:
        positions = [i for i, token in enumerate(tokens or []) if token == query]
    if shape[0] != shape[1] or len(positions) != 1:
        problem = (
            f"which occurs at {', '.join(map(str, positions))}" if positions else "which is not a token here"
        )
        raise ArgumentError(
            "explain",
            received=f"--query {query}, {problem}",
            expected="the position of a query, or a token that occurs once",
            hint=f"Use a position (0–{shape[0] - 1}){_list_tokens(tokens)}.",
        )
    return positions[0]


def _list_tokens(tokens: list[str] | None) -> str:
    """List the first tokens, for the hint of an error."""
    if not tokens:
        return ""
    shown = [*tokens[:MAX_TOKENS], *(["…"] if len(tokens) > MAX_TOKENS else [])]
    return f" or one of: {', '.join(map(escape_unprintable, shown))}"


def _style_line(line: str) -> Text:
    """Style a line of the explanation: step titles bold, bars in colour, masked keys dim."""
    text = style_text(line)
    if line[:1].isdigit() or line.startswith("How "):
        text.stylize("bold")
    text.highlight_regex("█+", NUMBER_STYLE)
    text.highlight_regex(" masked$", "dim")
    return text


# Hints that the table of a class lists, and files that are not checked.
MAX_HINTS = 8
MAX_SKIPPED = 20


def exercise(
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="N",
            min=1,
            max=8,
            show_default=False,
            help="Exercise to open or check. Default: list all.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", show_default=False, help="Script or notebook to check. Default: exercise-N.py."
        ),
    ] = None,
    solution: Annotated[bool, typer.Option("--solution", help="Print the worked solution.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--class", metavar="DIR", help="Check the files of a class, in a folder or ZIP file."),
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option("--roster", metavar="FILE", help="CSV file with the students of the class."),
    ] = None,
    points: Annotated[
        str,
        typer.Option(
            "--points",
            metavar="N",
            help="Points for an exercise: 10, or 1=5,8=20. Default: one for each part.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE", help="Page with the results of a class."),
    ] = None,
    progress: Annotated[
        Path | None,
        typer.Option("--progress", metavar="FILE", help="Progress file. Default: regard-progress.json."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time limit for one file.")
    ] = 120.0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the results of a class as CSV.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Do the exercises of the book: list them, open one, check a file, or check the files of a class.

    The first call of "regard exercise 3" writes exercise-3.py with the task. Later calls check that file, and
    the exit code is 1 until it is correct. A file runs in its own process with a time limit. This is not a sandbox.
    """
    printer = Printer(as_json, as_csv)
    if folder is not None:
        return _check_class(printer, folder, number, roster, _parse_points(points), output, timeout)
    given = {"--csv": printer.as_csv, "--roster": roster, "--points": points, "--output": output}
    for option in (option for option, value in given.items() if value):
        raise ArgumentError(
            "exercise",
            received=f"{option} without --class",
            expected=f"{option} with the files of a class",
            hint=f"Add --class DIR, or omit {option}.",
        )
    progress_file = progress or Path(PROGRESS_FILE)
    if number is None and solution:
        raise ArgumentError(
            "exercise",
            received="--solution without a number",
            expected="the number of an exercise",
            hint="For example: regard exercise 3 --solution.",
        )
    if number is None:
        return _list_exercises(printer, progress_file)
    if solution:
        worked = exercises.solution(number)
        printer.record({"exercise": number, "text": worked.text, "code": worked.code})
        printer.print(str(worked))
        return 0
    file = file or _find_file(number)
    if file is None:
        return _open_exercise(printer, number)
    return _check_file(printer, number, file, progress_file, timeout)


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
    names = [Path(f"exercise-{n}.py"), Path(f"exercise-{n}.ipynb"), *sorted(Path().glob(f"0{n}-*.ipynb"))]
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
        | {"hint": result.hint, "attempts": entry.attempts, "solved": entry.solved}
    )
    first, *rest = result.message.split("\n")
    printer.print(style_text((first, "bold green" if result.correct else "bold")))
    for line in rest:
        printer.print(line)
    return 0 if result.correct else 1


def _parse_points(text: str) -> dict[int, float]:
    """Read points such as `10`, for every exercise, or `1=5,8=20`."""
    numbers = range(1, len(EXERCISES) + 1)
    try:
        if text and "=" not in text:
            points = dict.fromkeys(numbers, float(text))
        else:
            pairs = [pair.split("=") for pair in text.split(",")] if text else []
            points = {int(number): float(value) for number, value in pairs}
        if set(points) <= set(numbers) and all(0 <= value < math.inf for value in points.values()):
            return points
    except ValueError:
        pass
    raise ArgumentError(
        "exercise",
        received=f"--points {text}",
        expected="a number for every exercise, or numbers of exercises with their points",
        hint="For example --points 10, or --points 1=5,8=20.",
    )


def _check_class(
    printer: Printer,
    folder: Path,
    number: int | None,
    roster_file: Path | None,
    points: dict[int, float],
    output: Path | None,
    timeout: float,
) -> int:
    """Check the submissions of a class, print a table of students and exercises, and write a page if requested."""
    if output is not None:
        check_output(output, "exercise")
    roster = exercises.read_roster(roster_file) if roster_file is not None else ()
    with exercises.open_submissions(folder) as opened:
        submissions, skipped = exercises.find_submissions(opened, number, roster)
        for file in skipped[:MAX_SKIPPED]:
            printer.warn(f"not checked: {file.path} ({file.reason})")
        if len(skipped) > MAX_SKIPPED:
            printer.warn(f"not checked: {len(skipped) - MAX_SKIPPED} other files")
        with printer.progress(f"Checking {len(submissions)} files", len(submissions)) as advance:
            report = exercises.check_class(
                submissions, roster=roster, skipped=skipped, points=points, timeout=timeout, advance=advance
            )
    hints = [
        {"students": count, "exercise": n, "hint": join_lines(hint)}
        for count, n, hint in report.count_hints()
    ]
    ids = {student.name: student.id for student in roster}
    students = [_to_grades(report, student, ids) for student in report.students]
    _print_class(printer, report)
    if hints:
        printer.print()
        printer.print("The most common hints")
        rows = [list(hint.values()) for hint in hints[:MAX_HINTS]]
        printer.table(["students", "exercise", "hint"], rows)
    if printer.as_csv:
        printer.csv(list(students[0]), students)
    record = {
        "students": students,
        "submissions": [_to_record(row) for row in report.rows],
        "hints": hints,
        "absent": report.absent,
        "not_in_roster": report.strangers,
        "not_checked": [
            {"student": it.student, "file": it.path.as_posix(), "reason": it.reason} for it in skipped
        ],
    }
    if output is None:
        printer.record(record)
    else:
        save_page(printer, report.page(), output, False, record)
    return 0


def _to_record(row: exercises.CheckedSubmission) -> dict[str, Any]:
    submission, result = row.submission, row.result
    return {
        "student": submission.student,
        "exercise": submission.n,
        "file": submission.path.name,
        "late": submission.late,
        "status": result.status,
        "right": len(result.right_parts),
        "parts": result.num_parts,
        "hint": result.hint,
        "seconds": round(result.seconds, 2),
    }


def _to_grades(report: exercises.ClassReport, student: str, ids: dict[str, str]) -> dict[str, Any]:
    """Return the row of a student for a spreadsheet or a gradebook; no file leaves the points of an exercise empty."""
    rows = {n: report.best[student, n] for n in report.numbers if (student, n) in report.best}
    feedback = [f"Exercise {n}: {row.result.summary}. {row.result.hint}" for n, row in rows.items()]
    feedback += [f"Not checked: {it.path} ({it.reason})." for it in report.skipped if it.student == student]
    points = {f"exercise {n}": report.count_points(student, n) if n in rows else None for n in report.numbers}
    grades = {
        "student": student,
        "id": ids.get(student, ""),
        **points,
        "points": report.count_points(student),
        "of": report.count_maximum(),
        "late": " ".join(str(n) for n, row in rows.items() if row.submission.late),
        "feedback": join_lines(" ".join(feedback or ["No file."])),
    }
    return {name: _to_cell(value) for name, value in grades.items()}


def _to_cell(value: Any) -> Any:
    """Return a value for a spreadsheet, which would compute a text that begins like a formula."""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
    return int(value) if value is not None and value == int(value) else value


def _print_class(printer: Printer, report: exercises.ClassReport) -> None:
    """Print a row for each student and a column for each exercise, and the students without a file."""
    students, numbers = report.students, report.numbers
    rows: list[list[object]] = []
    for student in students:
        found = [report.best.get((student, n)) for n in numbers]
        cells = [row.result.summary + " late" * row.submission.late if row else "–" for row in found]
        rows.append([student, *cells, f"{report.count_points(student):g}"])
    right = [
        sum(row.result.correct for (_, n), row in report.best.items() if n == number) for number in numbers
    ]
    of = f"of {report.count_maximum():g}"
    rows.append(["right", *(f"{count} of {len(students)}" for count in right), of])
    printer.table(["student", *(f"exercise {n}" for n in numbers), "points"], rows, right=("points",))
    for title, names in (("No file", report.absent), ("Not in the roster", report.strangers)):
        if names:
            printer.print()
            printer.print(f"{title} ({len(names)}): {'; '.join(map(escape_unprintable, names))}")
