"""Print tables, byte counts, durations and the steps of a computation in plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from regard.render.text import escape_unprintable, format_bar

Alignment = Literal["left", "right"]

BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def format_table(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str] | None = None,
    *,
    align: Alignment | Sequence[Alignment] = "right",
    indent: str = "",
    rule: bool = False,
) -> str:
    """Return rows of cells as lines of text, each column as wide as its widest cell.

    Columns are two spaces apart, and no line ends in a space.

    >>> print(format_table([[8, 64], [16, 256]], ["n", "entries"]))
     n  entries
     8       64
    16      256
    >>> print(format_table([["mask", 0.25]], ["name", "weight"], align=["left", "right"], rule=True))
    name  weight
    ----  ------
    mask   0.250

    Args:
        rows: The cells, the same number in each row. Texts are printed as they are, other values by `format_cell`.
        headers: Names of the columns, printed above the rows. Default: no header.
        align: Alignment of every column, or one alignment per column. Default: "right".
        indent: Text before each line.
        rule: Draw a line of hyphens under the headers.
    """
    lines = [[cell if isinstance(cell, str) else format_cell(cell) for cell in row] for row in rows]
    if headers is not None:
        lines.insert(0, list(headers))
    if not lines:
        return ""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if headers is not None and rule:
        lines.insert(1, ["-" * width for width in widths])
    sides = [align] * len(widths) if isinstance(align, str) else align
    return "\n".join(
        (indent + "  ".join(_pad(*cell) for cell in zip(line, widths, sides, strict=True))).rstrip()
        for line in lines
    )


def _pad(cell: str, width: int, side: Alignment) -> str:
    return cell.ljust(width) if side == "left" else cell.rjust(width)


def format_cell(value: object) -> str:
    r"""Return a value as a table shows it.

    >>> format_cell(0.25), format_cell(math.nan), format_cell(123456), format_cell("a\n")
    ('0.250', '–', '123,456', 'a\\n')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escape_unprintable(str(value))


def format_bytes(count: float) -> str:
    """Return a number of bytes in decimal units, to three digits.

    >>> format_bytes(12), format_bytes(1500), format_bytes(67_108_864), format_bytes(999_600)
    ('12 B', '1.5 kB', '67.1 MB', '1 MB')
    """
    power = 0
    while count >= 999.5 and power < len(BYTE_UNITS) - 1:  # 999.5 is printed as 1000
        count /= 1000
        power += 1
    return f"{count:.3g} {BYTE_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """Return a duration to three digits in seconds, milliseconds or microseconds.

    >>> format_seconds(0.00025), format_seconds(0.0125), format_seconds(2.5)
    ('250 µs', '12.5 ms', '2.5 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * size:  # which rounds up to one
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


# Steps of a computation


class PrintedStep(NamedTuple):
    """One step as it is printed.

    `rows` hold a name and its cells under `columns`, and `shares` the weights to draw as bars next to them.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    shares: list[float]
    closing: str = ""


def format_steps(heading: str, steps: Sequence[PrintedStep]) -> str:
    """Return a heading and the steps below it as lines of text."""
    lines = [heading, ""]
    for step in steps:
        rows = step.rows
        if step.shares:
            rows = [[*row, format_bar(share)] for row, share in zip(rows, step.shares, strict=True)]
        lines += [step.title, *([format_table(rows, align="left", indent="   ")] if rows else [])]
        lines += [f"   {step.closing}"] if step.closing else []
    return "\n".join(lines)
