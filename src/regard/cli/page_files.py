"""Write the pages and pictures of commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.errors import ArgumentError
from regard.pages.html import Page
from regard.render.table import format_bytes


def check_output(output: Path, operation: str) -> None:
    """Check that a page can be written to a path, before any work is done.

    Raises:
        ArgumentError: If the parent folder does not exist, or the path is a folder.
    """
    missing = not output.parent.is_dir()
    if missing or output.is_dir():
        raise ArgumentError(
            operation,
            received=f"-o {str(output)!r} ({'No such file or directory' if missing else 'Is a directory'})",
            expected="a file in an existing folder",
            hint=f"Create the folder first: mkdir -p {output.parent}."
            if missing
            else f"Add a file name: -o {output / 'page.html'}.",
        )


def save_page(printer: Printer, page: Page, output: Path, show: bool, record: dict[str, Any]) -> None:
    """Save a page, print its path and size, and open it in a browser if requested.

    Args:
        printer: Prints the result.
        page: The page.
        output: File to write.
        show: Open the page in a browser.
        record: Further results for --json.
    """
    save_file(printer, page.title, output, show, record, page.save)


def save_file(
    printer: Printer,
    title: str,
    output: Path,
    show: bool,
    record: dict[str, Any],
    write: Callable[[Path], object],
) -> None:
    """Write a file, print its path and size, and open it in a browser if requested.

    Args:
        printer: Prints the result.
        title: What the file shows.
        output: File to write.
        show: Open the file in a browser.
        record: Further results for --json.
        write: Writes the file.
    """
    write(output)
    size = output.stat().st_size
    printer.record(record | {"title": title, "page": str(output), "bytes": size})
    printer.print(style_text((title, "bold"), f": {output}, ", (format_bytes(size), NUMBER_STYLE)))
    if show:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())
