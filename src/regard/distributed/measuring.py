"""Measures over many ranks: statistics of the rows in one pass of the keys, states of the measures in another.

A state with an axis of rows stays with the rank of these rows. A state with an axis of keys travels with the keys and
ends at their rank. A state with neither, such as a picture of the whole matrix, is combined on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from regard.accumulators import Accumulator, ColumnSum
from regard.core.block_loop import (
    SoftmaxStats,
    accumulate_states,
    compute_stats,
    find_compiled,
    init_online_softmax,
    make_finite,
)
from regard.core.products import Product
from regard.distributed.ring import KeyBlock, RingPass, RingProblem, Travel, find_runs, split_parts
from regard.engines.compensated import resolve_sums
from regard.errors import ArgumentError
from regard.frame import take_range
from regard.measures import MaxWeight, Measure, Sum
from regard.measures.base import as_slice, find_accumulator
from regard.problem import Problem
from regard.types import Array, Namespace

Tensor = Any  # torch's types are not checked


def merge_stats(a: SoftmaxStats, b: SoftmaxStats, xp: Any) -> SoftmaxStats:
    """Merge the statistics of the same rows over two sets of keys."""
    assert a.sum is not None and b.sum is not None
    largest = xp.maximum(a.max, b.max)
    shift = make_finite(largest, xp).to(a.sum.dtype)
    total = sum(part.sum * xp.exp(part.max.to(a.sum.dtype) - shift) for part in (a, b))
    return SoftmaxStats(largest, total, a.is_compiled)


def run_stats_pass(ring: RingProblem, travel: Travel, *, compiled: bool) -> SoftmaxStats:
    """Compute the statistics of the rows of this rank over the keys of all ranks, with the sink."""
    key, problem = ring.take_keys()
    is_compiled = compiled and bool(problem.engine.name_compiled_pass(problem))
    start = init_online_softmax(problem, problem.shape[1])
    found = SoftmaxStats(start.max, resolve_sums(start.sum), is_compiled)

    def compute(block: KeyBlock) -> None:
        nonlocal found
        for own in _split_chunks(ring, problem, block):
            stats = compute_stats(replace(own, sink=None), compiled=compiled)
            found = merge_stats(found, stats, problem.engine.xp)

    RingPass(ring, travel, [key], compute).run()
    return found


def can_compile(ring: RingProblem, measures: Sequence[Measure]) -> bool:
    """Return whether a compiled pass computes all measures."""
    wrapped = [_wrap(measure, find_state_axes(measure, ring.problem)) for measure in measures]
    return len(find_compiled(ring.problem, wrapped)) == len(measures)


def run_measure_pass(
    ring: RingProblem, travel: Travel, measures: Sequence[Measure], known: SoftmaxStats
) -> list[Any]:
    """Compute measures in one pass, given the statistics of the rows over the keys of all ranks.

    The result of each measure is that of the rows of this rank, of its keys, or of the whole matrix.
    """
    key, problem = ring.take_keys()
    axes = [find_state_axes(measure, problem) for measure in measures]
    wrapped = [_wrap(measure, own) for measure, own in zip(measures, axes, strict=True)]
    bound = [measure.bind(problem) for measure in wrapped]
    by_keys = [i for i, own in enumerate(axes) if own.kind == "keys"]
    examples = [_empty_state(wrapped[i], replace(problem, key=key[:, :0], first_key=0)) for i in by_keys]
    states: list[Any] = [None] * len(measures)

    def compute(block: KeyBlock) -> list[Tensor] | None:
        states_of_keys: dict[int, list[Any]] = {i: [] for i in by_keys}
        for own in _split_chunks(ring, problem, block, keep_empty=bool(by_keys)):
            is_live = own.mask is None or bool(split_parts(problem, [own.kv_range]))
            found = accumulate_states(own, wrapped, known) if is_live else [None] * len(measures)
            for i, state in enumerate(found):
                if i in states_of_keys:
                    states_of_keys[i].append(_empty_state(wrapped[i], own) if state is None else state)
                elif state is not None:
                    states[i] = state if states[i] is None else bound[i].merge(states[i], state)
        joined = []
        for i, example in zip(by_keys, examples, strict=True):
            chunks = [list_arrays(state) for state in states_of_keys[i] or [example]]
            arrays = zip(*chunks, strict=True)
            joined += [torch.cat(parts, axis) for parts, axis in zip(arrays, axes[i].key_axes, strict=True)]
        return joined or None

    def returns(owner: int) -> list[tuple[tuple[int, ...], Any]]:
        length = ring.keys.lengths[owner]
        return [
            ((*array.shape[:axis], length, *array.shape[axis + 1 :]), array.dtype)
            for i, example in zip(by_keys, examples, strict=True)
            for array, axis in zip(list_arrays(example), axes[i].key_axes, strict=True)
        ]

    def split(arrays: Sequence[Tensor]) -> list[Any]:
        remaining = iter(arrays)
        return [rebuild_state(example, remaining) for example in examples]

    def merge(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        pairs = zip(by_keys, split(a), split(b), strict=True)
        return [array for i, x, y in pairs for array in list_arrays(measures[i].bind(problem).merge(x, y))]

    arrays = RingPass(ring, travel, [key], compute, returns if by_keys else None, merge).run()
    for i, state in zip(by_keys, split(arrays), strict=True):
        states[i] = state
    return [_finish(ring, measures[i], bound[i], axes[i], states[i]) for i in range(len(measures))]


def _wrap(measure: Measure, axes: StateAxes) -> Measure:
    return measure if axes.kind == "rows" else RenumberedMeasure(measure, axes.key_axes)


def _split_chunks(
    ring: RingProblem, problem: Problem, block: KeyBlock, *, keep_empty: bool = False
) -> list[Problem]:
    """Return the rows of a rank with each chunk of a block, without chunks that the mask leaves empty."""
    chunks, start = [], 0
    (key,) = block.tensors
    for chunk in ring.keys.chunks[block.owner]:
        if keep_empty or split_parts(problem, [chunk]):
            own = key[:, start : start + len(chunk)]
            chunks.append(replace(problem, key=own, first_key=chunk.start))
        start += len(chunk)
    return chunks


def _empty_state(measure: Measure, own: Problem) -> Any:
    """Return the state of a measure for a chunk of keys that no row attends to."""
    bound = measure.bind(own)
    return resolve_sums(bound.compact(bound.init(own.shape, own.engine.xp)))


def _finish(ring: RingProblem, measure: Measure, bound: Measure, axes: StateAxes, state: Any) -> Any:
    """Compute the result of a measure from its state over all blocks."""
    problem = ring.problem
    if state is None:
        state = resolve_sums(bound.compact(bound.init(problem.shape, problem.engine.xp)))
    if axes.kind == "matrix":
        assert isinstance(bound, RenumberedMeasure)
        gathered = ring.peers.exchange_all(list_arrays(state))
        bound = measure.bind(bound.view_whole(problem))
        state = reduce(bound.merge, [rebuild_state(state, arrays) for arrays in gathered])
    elif axes.kind == "keys":
        bound = measure.bind(problem)
    with problem.engine.suppress_warnings():
        return bound.finish(state)


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
    """Find out which axes the state of a measure has, by the shapes that `init` returns for several matrices."""
    # A rank may have fewer rows than a picture of the whole matrix has cells.
    bound = measure.bind(replace(problem, positions=np.arange(problem.frame.q_len)))
    xp = problem.engine.xp
    shapes = [
        [tuple(array.shape) for array in list_arrays(resolve_sums(bound.init((1, rows, keys), xp)))]
        for rows, keys in _PROBES
    ]
    row_axes, key_axes = (
        [_find_axis(of_array, [probe[i] for probe in _PROBES]) for of_array in zip(*shapes, strict=True)]
        for i in (0, 1)
    )
    if all(axis is not None for axis in row_axes) and row_axes:
        return StateAxes("rows")
    if all(axis is not None for axis in key_axes) and key_axes:
        return StateAxes("keys", tuple(axis for axis in key_axes if axis is not None))
    if not row_axes or any(axis is not None for axis in (*row_axes, *key_axes)):
        raise ArgumentError(
            "measure",
            received=f"{measure!r}, whose state has arrays of the shapes {shapes[0]}",
            expected="arrays that all have a row axis, all have a key axis, or all have neither",
            hint="Split it into two measures.",
        )
    return StateAxes("matrix")


def _find_axis(shapes: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> int | None:
    """Return the first axis of an array that has the given lengths in the probes; None if it has none."""
    axes = range(1, min(map(len, shapes)))
    return next((axis for axis in axes if [shape[axis] for shape in shapes] == lengths), None)


def list_arrays(state: Any) -> list[Array]:
    """List the arrays of a state, in the order in which `rebuild_state` takes them."""
    if isinstance(state, list | tuple):
        return [array for part in state for array in list_arrays(part)]
    return [state]


def rebuild_state(example: Any, arrays: Iterable[Array]) -> Any:
    """Return a state like `example` with other arrays."""
    remaining = iter(arrays)
    if isinstance(example, list | tuple):
        parts = [rebuild_state(entry, remaining) for entry in example]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    return next(remaining)


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
