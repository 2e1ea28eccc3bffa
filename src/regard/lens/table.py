"""Rows of plain values that print as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHOWN = 20


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict with the same keys: `pandas.DataFrame(table)` and `polars.DataFrame(table)` take it.

    It prints its first rows; `column` gives one column, `where` and `by` choose and order rows.

    >>> table = Table([{"head": 0, "weight": 0.25}, {"head": 1, "weight": 0.5}])
    >>> print(table.by("weight"))
    head  weight
       1   0.500
       0   0.250
    >>> table.column("head")
    [0, 1]
    """

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self[0]) if self else []

    def column(self, name: str) -> list[Any]:
        """One column."""
        return [row[name] for row in self]

    def by(self, name: str, *, largest: bool = True) -> Table:
        """The rows in order of one column, the largest first; NaN comes last, equals stay as they were."""
        numbers = [(row[name] != row[name], -row[name] if largest else row[name]) for row in self]
        order = sorted(range(len(self)), key=lambda i: (numbers[i][0], 0 if numbers[i][0] else numbers[i][1]))
        return Table(self[i] for i in order)

    def where(self, test: Callable[[dict[str, Any]], bool]) -> Table:
        """The rows for which `test(row)` is true."""
        return Table(filter(test, self))

    def __repr__(self) -> str:
        if not self:
            return "(no rows)"
        shown = self[:SHOWN]
        lines = [self.columns, *([_text(value) for value in row.values()] for row in shown)]
        left = [isinstance(value, str) for value in self[0].values()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if is_text else cell.rjust(width)
                for cell, width, is_text in zip(line, widths, left, strict=True)
            ).rstrip()
            for line in lines
        ]
        more = len(self) - len(shown)
        return "\n".join([*text, *([f"… and {more:,} more rows"] if more else [])])

    def _repr_html_(self) -> str:
        from regard.render import notebook

        if not self:
            return notebook.listing("(no rows)", [], [], [])
        rows = ([_text(value) for value in row.values()] for row in self[: notebook.SHOWN])
        left = [isinstance(value, str) for value in self[0].values()]
        more = len(self) - notebook.SHOWN
        closing = f"… and {more:,} more rows" if more > 0 else ""
        return notebook.listing("", self.columns, rows, left, closing)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if value != value:
        return "–"
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"
