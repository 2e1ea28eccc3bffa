"""Numbers set out in columns, for the results that print themselves."""

from __future__ import annotations

from collections.abc import Sequence


def set_out(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows under their headings, every column as wide as its widest cell and flush right.

    >>> print(set_out(["n", "entries"], [["8", "64"], ["16", "256"]]))
     n  entries
     8       64
    16      256
    """
    table = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(line.rstrip() for line in lines)


def in_bytes(count: float) -> str:
    """A number of bytes in the unit that leaves at most four digits before the point.

    >>> in_bytes(1024), in_bytes(67_108_864), in_bytes(12)
    ('1 KiB', '64 MiB', '12 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.4g} {units[0]}"


def in_seconds(seconds: float) -> str:
    """A duration to three digits, in the unit that suits it.

    >>> in_seconds(0.00025), in_seconds(0.0125), in_seconds(2.5)
    ('250 µs', '12.5 ms', '2.5 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
