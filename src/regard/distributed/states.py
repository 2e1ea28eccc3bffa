"""States of measures over blocks of keys: which rank holds a state, and how the states of ranks combine.

A state with an axis of rows stays with the rank of these rows. A state with an axis of keys travels with the keys and
ends at their rank. A state with neither, such as a picture of the whole matrix, is combined on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from regard.accumulators import Accumulator, ColumnSum
from regard.core.products import Product
from regard.distributed.key_blocks import find_runs
from regard.engines.compensated import resolve_sums
from regard.errors import ArgumentError
from regard.frame import take_range
from regard.measures import MaxWeight, Measure, Sum, as_slice, find_accumulator
from regard.problem import Problem
from regard.types import Array, IntArray, Namespace

# Lengths of rows and keys with which `init` is called to find out which axes a state has.
_PROBES = ((3, 5), (4, 5), (3, 6))


class StateAxes(NamedTuple):
    """What the state of a measure counts along its axes.

    Attributes:
        kind: "rows" if every array has an axis of rows, "keys" if every array has one of keys, else "matrix".
        key_axes: With "keys", the axis of keys of each array.
    """

    kind: Literal["rows", "keys", "matrix"]
    key_axes: tuple[int, ...] = ()


def find_state_axes(measure: Measure, problem: Problem) -> StateAxes:
    """Find out which axes the state of a measure has, by the shapes that `init` returns for several matrices.

    Args:
        measure: A measure.
        problem: The matrix.

    Raises:
        ArgumentError: If arrays of one state differ in their axes, or it holds none.
    """
    # A rank may have fewer rows than a picture of the whole matrix has cells.
    bound = measure.bind(replace(problem, positions=np.arange(problem.frame.q_len)))
    xp = problem.engine.xp
    shapes = [
        [tuple(array.shape) for array in list_arrays(resolve_sums(bound.init((1, rows, keys), xp)))]
        for rows, keys in _PROBES
    ]
    row_axes, key_axes = (_find_axes(shapes, [probe[i] for probe in _PROBES]) for i in (0, 1))
    if all(axis is not None for axis in row_axes) and row_axes:
        return StateAxes("rows")
    if all(axis is not None for axis in key_axes) and key_axes:
        return StateAxes("keys", tuple(axis for axis in key_axes if axis is not None))
    if not row_axes or any(axis is not None for axis in (*row_axes, *key_axes)):
        raise ArgumentError(
            "measure",
            received=f"{measure!r}, whose state has arrays of the shapes {shapes[0]}",
            expected="arrays that all have an axis of rows, all have one of keys, or all have neither",
            hint="Split it into two measures.",
        )
    return StateAxes("matrix")


def _find_axes(shapes: Sequence[Sequence[tuple[int, ...]]], lengths: Sequence[int]) -> list[int | None]:
    """Return, for each array, its first axis that has the given lengths in the probes; None if it has none."""
    found: list[int | None] = []
    for of_array in zip(*shapes, strict=True):
        axes = range(1, min(map(len, of_array)))
        matching = [a for a in axes if [shape[a] for shape in of_array] == list(lengths)]
        found.append(matching[0] if matching else None)
    return found


def list_arrays(state: Any) -> list[Array]:
    """List the arrays of a state, in the order in which `rebuild_state` takes them."""
    return list(_flatten(state))


def _flatten(state: Any) -> Iterator[Array]:
    if isinstance(state, list | tuple):
        for part in state:
            yield from _flatten(part)
    else:
        yield state


def rebuild_state(example: Any, arrays: Sequence[Array]) -> Any:
    """Return a state like `example` with other arrays."""
    remaining = iter(arrays)

    def rebuild(part: Any) -> Any:
        if isinstance(part, list | tuple):
            parts = [rebuild(entry) for entry in part]
            return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
        return next(remaining)

    return rebuild(example)


@dataclass(frozen=True, eq=False)
class RenumberedMeasure(Measure):
    """A measure whose state has no axis of rows: it sees queries by their positions in the whole sequence.

    Attributes:
        inner: The measure.
        key_axes: Axis of keys of each array of the state; empty if the state covers the whole matrix.
        problem: The block of keys, once the measure is bound.
    """

    inner: Measure
    key_axes: tuple[int, ...] = ()
    problem: Problem | None = None

    @property
    def reads_scores(self) -> bool:  # type: ignore[override]
        """Whether `step` reads the scores."""
        return self.inner.reads_scores

    @property
    def _has_local_rows(self) -> bool:
        return isinstance(self.inner, Product)  # its array has the rows of this rank

    @property
    def _has_local_keys(self) -> bool:
        """Whether the state may cover the keys of the block alone: built-in measures read nothing else of kv_idx."""
        return bool(self.key_axes) and type(self.inner).step in (Sum.step, MaxWeight.step, Product.step)

    def bind(self, problem: Problem) -> Measure:
        return replace(self, inner=self.inner.bind(self.view_whole(problem)), problem=problem)

    def view_whole(self, problem: Problem) -> Problem:
        """Return the problem as the inner measure sees it: its rows are all queries of the sequence."""
        if self._has_local_rows:
            return problem
        return replace(problem, positions=np.arange(problem.frame.q_len))

    def accumulator(self, problem: Problem) -> Accumulator | tuple[Accumulator, ...] | None:
        own = find_accumulator(self.inner, problem) if self._has_local_keys else None
        return own if isinstance(own, ColumnSum) else None

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        assert self.problem is not None
        rows = shape[1] if self._has_local_rows else self.problem.frame.q_len
        return self.inner.init(
            (shape[0], rows, len(self.problem.kv_range) if self._has_local_keys else shape[2]), xp
        )

    def step(
        self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        assert self.problem is not None
        if self._has_local_keys:
            first, tile = self.problem.first_key, as_slice(kv_idx)
            start, stop = tile.start - first, tile.stop - first
            kv_idx = take_range(xp.arange(start, stop), start, stop, start)
        if self._has_local_rows:
            return self.inner.step(state, weights, scores, q_idx, kv_idx, xp)
        positions = self.problem.positions[as_slice(q_idx)]
        for run in find_runs(positions):
            start, stop = int(positions[run.start]), int(positions[run.stop - 1]) + 1
            own = take_range(xp.arange(start, stop), start, stop, start)
            own_scores = None if scores is None else scores[:, run]
            state = self.inner.step(state, weights[:, run], own_scores, own, kv_idx, xp)
        return state

    def compact(self, state: Any) -> Any:
        assert self.problem is not None
        state = resolve_sums(self.inner.compact(state))
        if not self.key_axes or self._has_local_keys:
            return state
        keys = self.problem.kv_range
        arrays = [
            array[(slice(None),) * axis + (slice(keys.start, keys.stop),)]
            for array, axis in zip(list_arrays(state), self.key_axes, strict=True)
        ]
        return rebuild_state(state, arrays)


@dataclass(frozen=True, eq=False)
class SelectedScores(Measure):
    """The scores at some columns, −inf where masked: (…, q_len, len(columns)).

    Attributes:
        columns: Columns in any order: (n,).
        problem: The matrix, once the measure is bound.
    """

    columns: IntArray
    problem: Problem | None = None

    def bind(self, problem: Problem) -> Measure:
        return replace(self, problem=problem)

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        assert self.problem is not None
        return xp.full((*shape[:2], len(self.columns)), -xp.inf, dtype=self.problem.dtype)

    def step(
        self, state: Any, weights: Any, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        tile = as_slice(kv_idx)
        inside = np.flatnonzero((self.columns >= tile.start) & (self.columns < tile.stop))
        if len(inside):
            state[:, as_slice(q_idx), xp.asarray(inside)] = scores[
                ..., xp.asarray(self.columns[inside] - tile.start)
            ]
        return state

    def merge(self, a: Array, b: Array) -> Array:
        assert self.problem is not None
        return self.problem.engine.xp.where(b == -self.problem.engine.xp.inf, a, b)
