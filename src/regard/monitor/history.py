"""What a monitor remembers of a run: the numbers of every head, in a bounded number of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from regard.lens.table import PRINTED_ROWS, Table
from regard.types import Array, IntArray

FloatArray = npt.NDArray[np.float64]

# Columns that count something; their numbers are integers.
COUNTS = ("nonfinite", "rows", "heads", "highest_head", "sharpest_head", "fastest_head")
# The last monitored steps, which alarms look at; they are kept whatever the size of a step.
RECENT_STEPS = 32

Place = tuple[Any, ...]


@dataclass(frozen=True)
class Snapshot:
    """The numbers of every head, or of every layer, in one monitored step.

    `snapshot["entropy"]` is a column as an array, with one number for each head.

    Args:
        step: The step.
        keys: What a place consists of, such as ("module", "layer", "head").
        places: The heads or layers, each with one entry for each key.
        columns: Names of the numbers.
        values: (places, columns).
    """

    step: int
    keys: tuple[str, ...]
    places: list[Place]
    columns: tuple[str, ...]
    values: FloatArray

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, column: str) -> FloatArray:
        """Return a column, (places,)."""
        return self.values[:, self.columns.index(column)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the numbers of each head or layer by name."""
        names = ("step", *self.keys, *self.columns)
        counts = [name for name in self.columns if name in COUNTS]
        for place, numbers in zip(self.places, self.values.tolist(), strict=True):
            row = dict(zip(names, (self.step, *place, *numbers), strict=True))
            for name in counts:
                row[name] = int(row[name])
            yield row

    def select(self, indices: Array) -> Snapshot:
        """Return some of the heads or layers.

        Args:
            indices: Their indices in `places`.
        """
        places = [self.places[index] for index in indices.tolist()]
        return Snapshot(self.step, self.keys, places, self.columns, self.values[indices])


def summarise(heads: Snapshot, keys: tuple[str, ...], before: History | None = None) -> Snapshot:
    """Summarise the heads of each layer, or all heads.

    Args:
        heads: The numbers of every head.
        keys: ("module", "layer") for each layer, () for all heads together.
        before: The earlier steps, for the head that changed fastest.

    Returns:
        For each column its smallest number, its median and its largest (`entropy.min`, `entropy.median`,
        `entropy.max`); counts are added. `highest_head` has the largest score, `sharpest_head` the lowest mean entropy,
        and `fastest_head` the largest change of its largest score since the last monitored step, `fastest_change`. NaN
        is left out; a head that is not known is -1.
    """
    places = [place[: len(keys)] for place in heads.places]
    groups = {place: number for number, place in enumerate(dict.fromkeys(places))}
    group = np.array([groups[place] for place in places], int)
    # One row of `padded` for each layer; layers may differ in their number of heads.
    start = np.searchsorted(group, np.arange(len(groups)))
    slot = np.arange(len(group)) - start[group]
    shape = len(groups), int(slot.max(initial=-1)) + 1

    def pad(values: FloatArray) -> FloatArray:
        padded = np.full((*shape, *values.shape[1:]), np.nan)
        padded[group, slot] = values
        return padded

    measured = [i for i, name in enumerate(heads.columns) if name not in COUNTS]
    counted = [i for i, name in enumerate(heads.columns) if name in COUNTS]
    ordered = np.sort(pad(heads.values[:, measured]), axis=1)  # NaN comes last
    last = np.maximum((~np.isnan(ordered)).sum(1, keepdims=True) - 1, 0)
    low, high = (np.take_along_axis(ordered, at, 1)[:, 0] for at in (last // 2, (last + 1) // 2))
    quantiles = np.stack([ordered[:, 0], (low + high) / 2, np.take_along_axis(ordered, last, 1)[:, 0]], -1)
    score, entropy = heads["max_score"], heads["entropy"]
    previous = (
        before.find_numbers(heads.places, "max_score") if before is not None else np.full(len(heads), np.nan)
    )
    change = np.abs(score - previous)
    worst = [_find_largest(pad(values)) for values in (score, -entropy, change)]
    head = np.array([place[-1] for place in heads.places], float)
    numbers = [
        np.where(np.isnan(largest), -1, np.take_along_axis(pad(head), at[:, None], 1)[:, 0])
        for at, largest in worst
    ]
    columns = (
        *(f"{heads.columns[i]}.{name}" for i in measured for name in ("min", "median", "max")),
        *(heads.columns[i] for i in counted),
        *("heads", "highest_head", "sharpest_head", "fastest_head", "fastest_change"),
    )
    values = np.column_stack(
        [
            quantiles.reshape(len(groups), -1),
            np.nansum(pad(heads.values[:, counted]), 1),
            np.bincount(group, minlength=len(groups)),
            *numbers,
            worst[-1][1],
        ]
    )
    return Snapshot(heads.step, keys, list(groups), columns, values)


def find_worst(heads: Snapshot, before: History, count: int = 8) -> IntArray:
    """Return the indices of the heads that matter: each criterion's worst, at most `count` for each.

    Args:
        heads: The numbers of every head.
        before: The earlier steps.
        count: Number of heads for each criterion: rows with NaN or inf, the largest score, the lowest entropy, and the
            largest change of its largest score.
    """
    change = np.abs(heads["max_score"] - before.find_numbers(heads.places, "max_score"))
    criteria = (
        np.where(heads["nonfinite"] > 0, heads["nonfinite"], np.nan),
        heads["max_score"],
        -heads["entropy"],
        change,
    )
    # NaN comes last in ascending order.
    worst = [
        np.argsort(-values, kind="stable")[:count][~np.isnan(np.sort(-values)[:count])] for values in criteria
    ]
    return np.array(list(dict.fromkeys(np.concatenate(worst).tolist())), int)


def _find_largest(values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the index and the value of the largest number of each row; NaN if none is known."""
    at = np.where(np.isnan(values), -np.inf, values).argmax(1)
    return at, np.take_along_axis(values, at[:, None], 1)[:, 0]


class History(Sequence[dict[str, Any]]):
    """The numbers of the monitored steps: a sequence of rows like a `regard.lens.Table`, in a bounded number of bytes.

    The last 32 monitored steps are always kept. If older ones exceed `max_bytes`, every second of them is dropped, then
    three of four, and so on: the history covers the whole run evenly, and begins with its first step. Rows are made
    when they are read. `filter` returns the rows of some steps, layers or heads as a table.

    Args:
        max_bytes: Number of bytes to keep of steps that are older than the last 32.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_added = 0
        """Number of steps so far, which includes the dropped ones."""
        self._old: list[tuple[int, Snapshot]] = []  # with the number of each among all that were added
        self._recent: deque[tuple[int, Snapshot]] = deque()
        self._old_bytes, self._stride = 0, 1
        self._index: dict[Place, int] = {}  # of all places
        self._found: tuple[Sequence[Place], IntArray] = ((), np.empty(0, int))  # the last result of `_find`
        self._first: dict[str, FloatArray] = {}  # by column: the first known number of each place

    def add(self, snapshot: Snapshot) -> None:
        """Add a step; older ones may be dropped.

        Args:
            snapshot: The numbers of the step.
        """
        if not len(snapshot):
            return
        last = self.last
        if last is not None and list(last.places) == list(snapshot.places):  # keep one list of them
            snapshot = replace(snapshot, places=last.places)
        self._recent.append((self.num_added, snapshot))
        self.num_added += 1
        for place in snapshot.places:
            self._index.setdefault(place, len(self._index))
        positions = self._find(snapshot.places)
        for column in snapshot.columns:
            first = np.full(len(self._index), np.nan)
            first[: len(self._first.get(column, ()))] = self._first.get(column, ())
            first[positions] = np.where(np.isnan(first[positions]), snapshot[column], first[positions])
            self._first[column] = first
        if len(self._recent) > RECENT_STEPS:
            self._keep(*self._recent.popleft())

    def _keep(self, number: int, snapshot: Snapshot) -> None:
        """Keep a step that is no longer recent, if its turn has come."""
        if number % self._stride:
            return
        self._old.append((number, snapshot))
        self._old_bytes += snapshot.values.nbytes
        while self._old_bytes > self.max_bytes and len(self._old) > 1:
            self._stride *= 2
            self._old = [entry for entry in self._old if entry[0] % self._stride == 0]
            self._old_bytes = sum(kept.values.nbytes for _, kept in self._old)

    def _find(self, places: Sequence[Place]) -> IntArray:
        if places is not self._found[0]:  # steps with the same heads share one list of them
            self._found = places, np.fromiter(map(self._index.__getitem__, places), int, len(places))
        return self._found[1]

    @property
    def snapshots(self) -> list[Snapshot]:
        """The steps that are kept."""
        return [snapshot for _, snapshot in (*self._old, *self._recent)]

    @property
    def last(self) -> Snapshot | None:
        """The last step; None before the first."""
        return self._recent[-1][1] if self._recent else None

    # Columns

    @property
    def steps(self) -> list[int]:
        """The steps that are kept."""
        return [snapshot.step for snapshot in self.snapshots]

    @property
    def places(self) -> list[Place]:
        """All heads or layers, in the order in which they were first measured."""
        return list(self._index)

    @property
    def columns(self) -> list[str]:
        """The names of the columns; empty before the first step."""
        return ["step", *self.last.keys, *self.last.columns] if self.last is not None else []

    def first(self, column: str) -> FloatArray:
        """Return the first known number of each head of the last step, (heads,); NaN if none is known.

        Args:
            column: Name of the column.
        """
        return self._first[column][self._find(self.last.places if self.last else ())]

    def recent(self, column: str, count: int) -> FloatArray:
        """Return the numbers of the last steps, the very last one included, for each head of the last step.

        Args:
            column: Name of the column.
            count: Number of steps, at most 32.

        Returns:
            (steps, heads); fewer steps if fewer were monitored, and NaN where a head was not measured.
        """
        last = [snapshot for _, snapshot in self._recent][-count:]
        return self._align(last, column)[:, self._find(last[-1].places if last else ())]

    def array(self, column: str) -> FloatArray:
        """Return a column of numbers as (steps, places), in the order of `steps` and `places`.

        Args:
            column: Name of the column.

        Returns:
            The numbers, NaN where a head or layer was not measured.
        """
        return self._align(self.snapshots, column)

    def _align(self, snapshots: Sequence[Snapshot], column: str) -> FloatArray:
        values = np.full((len(snapshots), len(self._index)), np.nan)
        for at, snapshot in enumerate(snapshots):
            if not at or snapshot.places is not snapshots[at - 1].places:
                positions = self._find(snapshot.places)
            values[at, positions] = snapshot[column]
        return values

    def find_numbers(self, places: Sequence[Place], column: str) -> FloatArray:
        """Return the numbers of the last step for some heads, (heads,); NaN where a head was not measured.

        Args:
            places: The heads.
            column: Name of the column.
        """
        if self.last is None:
            return np.full(len(places), np.nan)
        numbers = self.last[column]
        if list(places) == self.last.places:
            return numbers
        known = dict(zip(self.last.places, numbers.tolist(), strict=True))
        return np.array([known.get(place, np.nan) for place in places])

    # Rows

    def filter(self, predicate: Callable[[dict[str, Any]], bool] | None = None, /, **values: Any) -> Table:
        """Return the rows that satisfy a condition, like `Table.filter`; `step=100` reads that step only.

        Args:
            predicate: Called with each row; rows for which it returns True are kept.
            **values: Values that the columns of these names must equal, such as `step=100, layer=3`.

        Returns:
            A table.
        """
        steps = [
            snapshot for snapshot in self.snapshots if values.get("step", snapshot.step) == snapshot.step
        ]
        rows = Table(row for snapshot in steps or self.snapshots[:1] for row in snapshot.rows())
        return rows.filter(predicate, **values)

    def column(self, name: str) -> list[Any]:
        """Return one column, with one value for each row.

        Args:
            name: Name of the column.
        """
        return [row[name] for row in self]

    def to_pandas(self) -> Any:
        """Return all rows as a pandas DataFrame."""
        return self[:].to_pandas()

    def __len__(self) -> int:
        return sum(map(len, self.snapshots))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for snapshot in self.snapshots:
            yield from snapshot.rows()

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Table:
        """Return one row, or a table for a slice."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return Table(islice(self, start, stop))
            return Table(self)[index]
        (row,) = self[index : index + 1 or None] or [None]
        if row is None:
            raise IndexError(f"row {index} of a history with {len(self):,} rows")
        return row

    def __repr__(self) -> str:
        more = len(self) - PRINTED_ROWS
        return repr(self[:PRINTED_ROWS]) + (f"\n… and {more:,} more rows" if more > 0 else "")

    def _repr_html_(self) -> str:
        return self[:PRINTED_ROWS]._repr_html_()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept as tensors, numbers and text, which `torch.load` reads with its default arguments."""
        entries, lists = [], list[list[Place]]()
        for number, snapshot in (*self._old, *self._recent):
            if not lists or lists[-1] is not snapshot.places:
                lists.append(snapshot.places)
            entries.append((number, snapshot.step, len(lists) - 1, torch.from_numpy(snapshot.values.copy())))
        return {
            "keys": list(self.last.keys) if self.last else [],
            "columns": list(self.last.columns) if self.last else [],
            "lists": [list(places) for places in lists],
            "entries": entries,
            "num_old": len(self._old),
            "num_added": self.num_added,
            "stride": self._stride,
            "places": self.places,
            "first": {name: torch.from_numpy(values.copy()) for name, values in self._first.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by what `state_dict` returned.

        Args:
            state: The result of `state_dict`.
        """
        keys, columns = tuple(state["keys"]), tuple(state["columns"])
        lists = [[tuple(place) for place in places] for places in state["lists"]]
        entries = [
            (number, Snapshot(step, keys, lists[places], columns, values.numpy().copy()))
            for number, step, places, values in state["entries"]
        ]
        self._old, self._recent = entries[: state["num_old"]], deque(entries[state["num_old"] :])
        self._old_bytes = sum(snapshot.values.nbytes for _, snapshot in self._old)
        self.num_added, self._stride = state["num_added"], state["stride"]
        self._index = {tuple(place): index for index, place in enumerate(state["places"])}
        self._found = (), np.empty(0, int)
        self._first = {name: values.numpy().copy() for name, values in state["first"].items()}
