"""The commands for learners and teachers, with their arguments and help: explain, explore and exercise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import (
    CausalOption,
    ExplorerName,
    HeadOption,
    JsonOption,
    MatrixFile,
    OpenOption,
)
from regard.cli.output import Printer


def explain(
    file: MatrixFile = None,
    query: Annotated[
        str, typer.Option("--query", "-q", metavar="QUERY", help="Query to explain: a position or a token.")
    ] = "0",
    head: HeadOption = None,
    causal: CausalOption = False,
    as_json: JsonOption = False,
) -> int:
    """Explain the attention of one query in four steps, with every number."""
    from regard.cli.explain_commands import explain

    return explain(Printer(as_json), file, query, head, causal)


def explore(
    name: Annotated[ExplorerName, typer.Argument(metavar="NAME", show_default=False, help="Page to write.")],
    file: MatrixFile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE", help="File to write. Default: NAME.html."),
    ] = None,
    head: HeadOption = None,
    causal: CausalOption = False,
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write an interactive page about attention. The page is one file and needs no server."""
    from regard.cli.explain_commands import explore

    return explore(
        Printer(as_json), name.value, file, output or Path(f"{name.value}.html"), head, causal, show
    )


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
        typer.Option("--class", metavar="DIR", help="Check the submissions of a class and print a table."),
    ] = None,
    progress: Annotated[
        Path | None,
        typer.Option("--progress", metavar="FILE", help="Progress file. Default: regard-progress.json."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time limit for a file.")
    ] = 120.0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the results of a class as CSV.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Do the exercises of the book: list them, open one, check a file, or check the files of a class.

    The first regard exercise 3 writes exercise-3.py with the task. The next ones check it, and exit with 1 until it is
    right. Files run in a process of their own with a time limit, which is no sandbox.
    """
    from regard.cli.exercise_command import ExerciseOptions, check_class, exercise

    printer = Printer(as_json, as_csv)
    if folder is not None:
        return check_class(printer, folder, number, timeout)
    return exercise(printer, ExerciseOptions(number, file, solution, progress, timeout))
