"""The command line: `regard look`, `doctor`, `heads`, `effects`, `compare`, `survey`, `report`, `policy`, `explain`,
`explore`, `exercise`, `profile` and `selfcheck`.

`main` is the entry point. The package is the top layer and may import every other one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: The arguments; by default the process's arguments (`sys.argv`).

    Returns:
        0 for success, 1 if `doctor` or `selfcheck` found an error, `compare` a difference or `exercise` a wrong answer,
        2 for a usage error, 3 if an optional package is missing, 4 for any other failure, 130 after an interrupt.

    >>> main(["--version"])
    regard ...
    0
    """
    from regard.cli.app import run

    if arguments is not None:
        return run(list(arguments))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal without · or █ shows a ?. In a file or a pipe, numbers must keep their minus signs.
            keeps_encoding = stream.isatty() or "PYTHONIOENCODING" in os.environ
            stream.reconfigure(encoding=None if keeps_encoding else "utf-8", errors="replace")
    return run(sys.argv[1:])
