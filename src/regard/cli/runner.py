"""Run a command line, and turn every error into one line on standard error and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import typer

from regard.cli.app import app
from regard.cli.output import print_error
from regard.errors import RegardError

SUCCESS, USAGE_ERROR, MISSING_EXTRA, FAILURE, INTERRUPTED = 0, 2, 3, 4, 130


def run(arguments: list[str]) -> int:
    """Run a command line.

    Args:
        arguments: The arguments without the name of the program; none prints the help.

    Returns:
        The exit code.
    """
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    known = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    command = f"regard {name}" if name in known else "regard"
    options = {"traceback": False}
    try:
        code = typer.main.get_command(app).main(
            arguments or ["--help"], prog_name="regard", standalone_mode=False, obj=options
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else SUCCESS
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except typer.Abort:
        print_error(command, "interrupted.")
        return INTERRUPTED
    except Exception as error:
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


def format_error(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and its exit code."""
    if isinstance(error, RegardError):
        # A survey that cannot continue is a RuntimeError, and no usage error.
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
