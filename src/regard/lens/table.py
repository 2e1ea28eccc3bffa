"""`Table`: a list of rows that prints as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, overload

from regard.errors import ArgumentError
from regard.render.table import Alignment, format_cell, format_table

if TYPE_CHECKING:
    import pandas
    import polars

PRINTED_ROWS = 20


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict with the same keys; None where a number is missing.

    Printing shows the first 20 rows. `sort`, `filter` and slices return new tables of the same class.
    `pandas.DataFrame(table)` and `polars.DataFrame(table)` accept a table directly. If an entry of a column is missing,
    pandas then converts its integers to floats; `table.to_pandas()` keeps integers.

    >>> from regard.lens import Table
    >>> table = Table([{"head": 0, "weight": 0.25}, {"head": 1, "weight": 0.5}])
    >>> print(table.sort("weight"))
    head  weight
       1   0.500
       0   0.250
    >>> table.column("head")
    [0, 1]
    """

    @property
    def columns(self) -> list[str]:
        """The names of the columns; empty if the table has no rows."""
        return list(self[0]) if self else []

    def column(self, name: str) -> list[Any]:
        """Return one column.

        Args:
            name: Name of the column.

        Returns:
            The values of the column, one for each row.
        """
        self._check_columns("table.column", [name])
        return [row[name] for row in self]

    def sort(self, column: str, *, largest_first: bool = True) -> Self:  # type: ignore[override]
        """Return the rows sorted by one column.

        Unlike `list.sort`, this method does not change the table. The sort is stable, and NaN and None come last.

        Args:
            column: Name of a column of numbers or of text.
            largest_first: Sort in descending order.

        Returns:
            A new table.

        >>> from regard.lens import Table
        >>> table = Table([{"head": 0, "weight": 0.5}, {"head": 1, "weight": 0.25}])
        >>> table.sort("weight", largest_first=False).column("head")
        [1, 0]
        """
        self._check_columns("table.sort", [column])
        missing = [row for row in self if row[column] is None or row[column] != row[column]]
        present = [row for row in self if row[column] is not None and row[column] == row[column]]
        return self._with_rows([*sorted(present, key=itemgetter(column), reverse=largest_first), *missing])

    def filter(self, predicate: Callable[[dict[str, Any]], bool] | None = None, /, **values: Any) -> Self:
        """Return the rows that satisfy a condition.

        Args:
            predicate: Called with each row; rows for which it returns True are kept.
            **values: Values that the columns of these names must equal.

        Returns:
            A new table.

        >>> from regard.lens import Table
        >>> table = Table([{"layer": 0, "weight": 0.5}, {"layer": 1, "weight": 0.25}])
        >>> table.filter(layer=1) == table.filter(lambda row: row["weight"] < 0.3)
        True
        """
        self._check_columns("table.filter", values)
        return self._with_rows(
            row
            for row in self
            if (predicate is None or predicate(row))
            and all(row[name] == value for name, value in values.items())
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table as a pandas DataFrame; integer columns with missing entries have the dtype Int64."""
        import pandas

        frame = pandas.DataFrame(self)
        for name in self.columns:
            kinds = {type(value) for value in self.column(name)}
            if kinds == {int, type(None)}:
                frame[name] = pandas.array(self.column(name), dtype="Int64")
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return the table as a polars DataFrame, in which missing entries are null."""
        import polars

        return polars.DataFrame(self, infer_schema_length=None)

    def _with_rows(self, rows: Iterable[dict[str, Any]]) -> Self:
        """Return a table of the same class and with the same attributes."""
        table = type(self)(rows)
        vars(table).update(vars(self))
        return table

    def _check_columns(self, operation: str, names: Iterable[str]) -> None:
        """Raise an `ArgumentError` for a name that no column has; a table without rows has any column."""
        for name in names:
            if self and name not in self[0]:
                raise ArgumentError(
                    operation,
                    received=f"the column {name!r}",
                    expected=f"one of {', '.join(self.columns)}",
                    hint="`table.columns` lists them.",
                )

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> dict[str, Any] | Self:
        """Return one row, or a table for a slice."""
        if isinstance(index, slice):
            return self._with_rows(super().__getitem__(index))
        return super().__getitem__(index)

    def __repr__(self) -> str:
        if not self:
            return "(no rows)"
        shown = self[:PRINTED_ROWS]
        align: list[Alignment] = ["left" if isinstance(value, str) else "right" for value in self[0].values()]
        text = format_table(
            [list(map(format_cell, row.values())) for row in shown], self.columns, align=align
        )
        more = len(self) - len(shown)
        return f"{text}\n… and {more:,} more rows" if more else text

    def _repr_html_(self) -> str:
        from regard.render import notebook

        if not self:
            return notebook.render_table("(no rows)", [], [], [])
        rows = ([format_cell(value) for value in row.values()] for row in self[: notebook.MAX_ROWS])
        is_text = [isinstance(value, str) for value in self[0].values()]
        more = len(self) - notebook.MAX_ROWS
        closing = f"… and {more:,} more rows" if more > 0 else ""
        return notebook.render_table("", self.columns, rows, is_text, closing)
