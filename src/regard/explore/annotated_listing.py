"""Read, run and trace the listings that `explore.code()` shows: attention in NumPy, in PyTorch, and as a built-in call.

The files in `listings/` are Python with notes: lines that start with `#:` explain the line after them, and are not part
of the listing.
"""

from __future__ import annotations

import importlib.util
import linecache
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from regard.explore.tracer import Trace, trace_call

ENTRY_POINT = "attend"  # the function of a listing that is called
NOTE = "#:"


@dataclass(frozen=True)
class AnnotatedListing:
    """Source code with an explanation of its lines.

    Attributes:
        name: Name of the file in `listings/`, without its suffix.
        code: The code without the notes.
        notes: The explanation of each line that has one, by line number from 1.
    """

    name: str
    code: str
    notes: dict[int, str]

    @property
    def lines(self) -> list[str]:
        """The lines of the code."""
        return self.code.splitlines()


@cache
def read_listing(name: str) -> AnnotatedListing:
    """Read a listing and its notes.

    >>> listing = read_listing("numpy")
    >>> listing.lines[0], listing.notes[1]
    ('import math', "Python's own mathematics. The only thing needed from it is the square root.")

    Args:
        name: "numpy", "torch" or "builtin".

    Returns:
        The listing.
    """
    file = resources.files("regard.explore").joinpath("listings", f"{name}.txt")
    lines: list[str] = []
    notes: dict[int, str] = {}
    pending: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith(NOTE):
            pending.append(line.strip().removeprefix(NOTE).strip())
            continue
        lines.append(line)
        if pending:
            notes[len(lines)] = " ".join(pending)
            pending = []
    return AnnotatedListing(name, "\n".join(lines) + "\n", notes)


def load_listing(listing: AnnotatedListing) -> Any:
    """Compile and run the code of a listing.

    Args:
        listing: The listing.

    Returns:
        Its function `attend(Q, K, V, mask=None)`, which returns output and weights.

    Raises:
        ImportError: If a library that the listing imports is not installed.
    """
    filename = f"<{listing.name} listing>"
    lines = listing.code.splitlines(keepends=True)
    linecache.cache[filename] = (
        len(listing.code),
        None,
        lines,
        filename,
    )  # where the tracer reads the source
    module: dict[str, Any] = {"__name__": f"{listing.name}_listing"}
    exec(compile(listing.code, filename, "exec"), module)
    return module[ENTRY_POINT]


def trace_listing(listing: AnnotatedListing, *args: Any) -> tuple[Trace, Any]:
    """Call `attend` of a listing twice: once to trace it, once for its result.

    Args:
        listing: The listing.
        *args: Q, K, V and, if there is one, the mask.

    Returns:
        The trace and the result, output and weights.
    """
    attend = load_listing(listing)
    return trace_call("explore.code", attend, args, {}), attend(*args)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported.

    >>> is_installed("numpy")
    True

    Args:
        package: Name of the package.
    """
    return importlib.util.find_spec(package) is not None
