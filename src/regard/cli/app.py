"""The command line: its commands with help and examples, and errors as one line on standard error and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.corpus_commands import make, report, survey, tighten, verify
from regard.cli.learn_commands import exercise, explain, explore
from regard.cli.look_command import look
from regard.cli.machine_commands import profile, selfcheck
from regard.cli.model_commands import compare, doctor, effects, heads
from regard.cli.options import take_options
from regard.cli.output import INTERRUPTED, print_error
from regard.errors import RegardError

SUCCESS, USAGE_ERROR, MISSING_EXTRA, FAILURE = 0, 2, 3, 4
EXIT_CODES = (
    "Exit codes: 0 success, 1 error or difference found, 2 usage error, "
    "3 an optional package is missing, 4 other failure."
)

app = typer.Typer(
    name="regard",
    help="See what every attention head of a model does.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # plain help: shorter, and the same in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
policy_app = typer.Typer(
    help="Choose how many keys each head keeps in its cache.",
    rich_markup_mode=None,
)

# Each command with its short help and an example, in the order of a newcomer's questions.
COMMANDS: dict[Callable[..., int], tuple[str, str]] = {
    look: (
        "See every head of a model, as a page.",
        'regard look ./model --text "The cat sat" -o page.html',
    ),
    doctor: ("Find faults in the attention of a model.", "regard doctor ./model --file text.txt"),
    heads: (
        "Print measures of each head of a model.",
        "regard heads ./model --file text.txt --by induction --top 5",
    ),
    effects: (
        "Measure how much an answer depends on each head.",
        'regard effects stories --text "The cat sat on the" --answer " mat"',
    ),
    compare: (
        "Find the first layer where two models diverge.",
        'regard compare ./model ./port --text "The cat sat"',
    ),
    survey: (
        "Measure the heads of a model over a corpus.",
        "regard survey ./model 'texts/*.txt' -o results",
    ),
    report: ("Write a page about a survey.", "regard report results -o report.html"),
    explain: (
        "Explain the attention of one query step by step.",
        "regard explain --query sat --causal",
    ),
    explore: ("Write an interactive page about attention.", "regard explore model --open"),
    exercise: ("Do the exercises of the book.", "regard exercise 3"),
    profile: ("Time attention on this machine.", "regard profile -n 4096 --mask window:256"),
    selfcheck: ("Check the installed versions.", "regard selfcheck --json >selfcheck.json"),
}
POLICY_COMMANDS: dict[Callable[..., int], tuple[str, str]] = {
    make: ("Choose the number of keys per head from a survey.", "regard policy make results -o policy.json"),
    verify: (
        "Measure how a policy changes the predictions.",
        "regard policy verify ./model policy.json 'other/*.txt'",
    ),
    tighten: (
        "Keep more keys where a policy changes predictions too much.",
        "regard policy tighten ./model policy.json 'new/*.txt' -o new.json",
    ),
}
for group, commands in ((app, COMMANDS), (policy_app, POLICY_COMMANDS)):
    for command, (short_help, example) in commands.items():
        register = group.command(command.__name__, short_help=short_help, epilog=f"Example: {example}")
        register(take_options(command))

app.add_typer(policy_app, name="policy")

# What `regard` alone prints: five things to do, with a command for each.
OVERVIEW = """\
See what every attention head of a model does.

  See every head         regard look
  Find a fault           regard doctor MODEL --text "The cat sat on the mat"
  Measure the heads      regard heads MODEL --text "The cat sat on the mat"
  Measure over a corpus  regard survey MODEL 'texts/*.txt' -o results
  Learn attention        regard explore model --open

MODEL is a folder, a name on the Hugging Face Hub, module:function (a function
that returns a model), or stories, a small model that comes with regard.

All commands: regard --help
One command:  regard look --help
"""


def _print_version(requested: bool) -> None:
    if requested:
        print(f"regard {metadata.version('regard')}")
        raise typer.Exit


def _set_global_options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar="REGARD_TRACEBACK", help="Print the traceback of an error."),
    ] = False,
) -> None:
    context.obj["traceback"] = show_traceback
    if context.invoked_subcommand is None:
        print(OVERVIEW, end="")


app.callback(invoke_without_command=True)(_set_global_options)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code; without arguments, print what one can do."""
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    known = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    command = f"regard {name}" if name in known else "regard"
    options = {"traceback": False}
    try:
        code = typer.main.get_command(app).main(
            arguments, prog_name="regard", standalone_mode=False, obj=options
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else SUCCESS
    except typer.Abort:
        print_error(command, "interrupted.")
        return INTERRUPTED
    except Exception as error:
        if _is_closed_pipe(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return SUCCESS
        # Usage errors are exceptions of typer, of click, or of the click inside typer, depending on the release.
        if hasattr(error, "format_message"):
            message = error.format_message().replace("Value error, ", "").rstrip(".")
            end = "" if message.endswith("?") else "."
            print_error(command, f"{message}{end} Try '{command} --help'.")
            return USAGE_ERROR
        if options["traceback"]:
            traceback.print_exc()
        message, code = format_error(error)
        print_error(command, message)
        return code


def _is_closed_pipe(error: Exception) -> bool:
    """Whether the reader of a pipe has closed it, for which Windows has no error number of its own."""
    if isinstance(error, BrokenPipeError) or not isinstance(error, OSError):
        return isinstance(error, BrokenPipeError)
    return os.name == "nt" and error.errno == errno.EINVAL and error.filename is None


def format_error(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and its exit code."""
    if isinstance(error, RegardError):
        # A run that cannot continue is a RuntimeError, not a usage error.
        code = FAILURE if isinstance(error, RuntimeError) else USAGE_ERROR
        return f"received {error.received}; expected {error.expected}. {error.hint}", code
    if isinstance(error, ImportError) and "is not installed. pip install" in str(error):
        return str(error).partition(": ")[2], MISSING_EXTRA
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot open {str(error.filename)!r}: {error.strerror}.", USAGE_ERROR
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = ""
    if place is not None:
        where = f" in {Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno}"
    message = f"unexpected {type(error).__name__}{where}: {error}."
    return f"{message} Run 'regard --traceback …' for the traceback.", FAILURE
