"""The command line: `regard explain`, `explore`, `look`, `doctor`, `heads`, `survey`, `report`, `profile`.

It needs `regard[cli]`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own; the exit code.

    0: done. 1: `doctor` found an error. 2: the question was wrong. 3: an extra is missing. 4: something else failed.

    >>> main(["--version"])
    regard ...
    0
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"regard: {missing[0]} is not installed. pip install 'regard[cli]'", file=sys.stderr)
        return 3
    from regard.cli.app import run

    if arguments is not None:
        return run(list(arguments))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that knows no · or █ shows a ?
            stream.reconfigure(errors="replace")
    return run(sys.argv[1:])
