"""Measures over many ranks: statistics of the rows in one pass of the keys, states of the measures in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.core.block_loop import SoftmaxStats, accumulate_states, compute_stats, find_compiled, make_finite
from regard.distributed.key_blocks import split_parts
from regard.distributed.ring import KeyBlock, Travel
from regard.distributed.ring_problem import RingProblem
from regard.distributed.states import (
    RenumberedMeasure,
    StateAxes,
    find_state_axes,
    list_arrays,
    rebuild_state,
)
from regard.engines.compensated import resolve_sums
from regard.measures import Measure
from regard.problem import Problem

Tensor = Any  # torch's types are not checked


def merge_stats(a: SoftmaxStats, b: SoftmaxStats, xp: Any) -> SoftmaxStats:
    """Merge the statistics of the same rows over two sets of keys."""
    assert a.sum is not None and b.sum is not None
    largest = xp.maximum(a.max, b.max)
    shift = make_finite(largest, xp).to(a.sum.dtype)
    total = sum(part.sum * xp.exp(part.max.to(a.sum.dtype) - shift) for part in (a, b))
    return SoftmaxStats(largest, total, a.is_compiled)


def run_stats_pass(ring: RingProblem, travel: Travel, *, compiled: bool) -> SoftmaxStats:
    """Compute the statistics of the rows of this rank over the keys of all ranks, with the sink.

    Args:
        ring: The rows of this rank.
        travel: How far each block travels.
        compiled: Whether a compiled pass computes them, if there is one.
    """
    key, problem = ring.take_keys()
    xp, (pairs, rows, _) = problem.engine.xp, problem.shape
    found: list[SoftmaxStats] = []

    def compute(block: KeyBlock) -> None:
        for own in _split_chunks(ring, problem, block):
            stats = compute_stats(replace(own, sink=None), compiled=compiled)
            found[:] = [merge_stats(found[0], stats, xp) if found else stats]

    ring.run_pass(travel, [key], compute)
    is_compiled = compiled and bool(problem.engine.name_compiled_pass(problem))
    empty = xp.full((pairs, rows), -xp.inf, dtype=problem.dtype)
    total = found[0] if found else SoftmaxStats(empty, resolve_sums(xp.zeros((pairs, rows))), is_compiled)
    if problem.sink is not None:
        sink = (
            problem.frame.per_head(problem.sink, "sink")
            .detach()
            .to(problem.dtype)[:, None]
            .expand(pairs, rows)
        )
        assert total.sum is not None
        ones = torch.where(sink == -xp.inf, 0.0, torch.ones_like(total.sum))
        total = merge_stats(total, SoftmaxStats(sink, ones, is_compiled), xp)
    return total


def can_compile(ring: RingProblem, measures: Sequence[Measure]) -> bool:
    """Return whether a compiled pass computes all measures."""
    wrapped = [_wrap(measure, find_state_axes(measure, ring.problem)) for measure in measures]
    return len(find_compiled(ring.problem, wrapped)) == len(measures)


def run_measure_pass(
    ring: RingProblem, travel: Travel, measures: Sequence[Measure], known: SoftmaxStats
) -> list[Any]:
    """Compute measures, given the statistics of the rows over the keys of all ranks.

    Args:
        ring: The rows of this rank.
        travel: How far each block travels.
        measures: The measures; they share the pass.
        known: Statistics of the rows of this rank.

    Returns:
        The result of each measure: of the rows of this rank, of its keys, or of the whole matrix.
    """
    key, problem = ring.take_keys()
    axes = [find_state_axes(measure, problem) for measure in measures]
    wrapped = [_wrap(measure, own) for measure, own in zip(measures, axes, strict=True)]
    bound = [measure.bind(problem) for measure in wrapped]
    by_keys = [i for i, own in enumerate(axes) if own.kind == "keys"]
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
        if not by_keys:
            return None
        for i, of_chunks in states_of_keys.items():
            if not of_chunks:  # a block without keys
                of_chunks.append(_empty_state(wrapped[i], _take_chunk(problem, key[:, :0], 0)))
        return [array for i in by_keys for array in _join_chunks(states_of_keys[i], axes[i])]

    if not by_keys:
        ring.run_pass(travel, [key], compute)
    else:
        examples = [_empty_state(wrapped[i], _take_chunk(problem, key[:, :0], 0)) for i in by_keys]
        shapes = [
            (tuple(array.shape), array.dtype, axis)
            for i, example in zip(by_keys, examples, strict=True)
            for array, axis in zip(list_arrays(example), axes[i].key_axes, strict=True)
        ]

        def returns(owner: int) -> list[tuple[tuple[int, ...], Any]]:
            length = ring.keys.lengths[owner]
            return [((*shape[:axis], length, *shape[axis + 1 :]), dtype) for shape, dtype, axis in shapes]

        def split(arrays: Sequence[Tensor]) -> list[Any]:
            remaining = iter(arrays)
            return [
                rebuild_state(example, [next(remaining) for _ in list_arrays(example)])
                for example in examples
            ]

        def merge(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
            pairs = zip(by_keys, split(a), split(b), strict=True)
            return [array for i, x, y in pairs for array in list_arrays(measures_of_keys[i].merge(x, y))]

        measures_of_keys = {i: measures[i].bind(problem) for i in by_keys}
        arrays = ring.run_pass(travel, [key], compute, returns, merge)
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
        own = _take_chunk(problem, key[:, start : start + len(chunk)], chunk.start)
        start += len(chunk)
        if keep_empty or split_parts(problem, [chunk]):
            chunks.append(own)
    return chunks


def _take_chunk(problem: Problem, key: Tensor, first_key: int) -> Problem:
    return replace(problem, key=key, first_key=first_key)


def _empty_state(measure: Measure, own: Problem) -> Any:
    """Return the state of a measure for a chunk of keys that no row attends to."""
    bound = measure.bind(own)
    return resolve_sums(bound.compact(bound.init(own.shape, own.engine.xp)))


def _join_chunks(states: Sequence[Any], axes: StateAxes) -> list[Tensor]:
    """Concatenate the arrays of the states of a block's chunks along their axes of keys."""
    columns = zip(*(list_arrays(state) for state in states), strict=True)
    return [torch.cat(list(arrays), axis) for arrays, axis in zip(columns, axes.key_axes, strict=True)]


def _finish(ring: RingProblem, measure: Measure, bound: Measure, axes: StateAxes, state: Any) -> Any:
    """Compute the result of a measure from its state over all blocks."""
    problem = ring.problem
    if state is None:
        state = resolve_sums(bound.compact(bound.init(problem.shape, problem.engine.xp)))
    if axes.kind == "matrix":
        assert isinstance(bound, RenumberedMeasure)
        gathered = ring.peers.exchange_all(list_arrays(state))
        bound = measure.bind(bound.view_whole(problem))
        states = [rebuild_state(state, arrays) for arrays in gathered]
        state = states[0]
        for other in states[1:]:
            state = bound.merge(state, other)
    elif axes.kind == "keys":
        bound = measure.bind(problem)
    with problem.engine.suppress_warnings():
        return bound.finish(state)


def count_norms(problem: Problem) -> tuple[float, float]:
    """Return the largest norm of a query and of a key of this rank, 0 without any."""
    with torch.no_grad():
        norms = [
            float(x.detach().to(problem.dtype).norm(dim=-1).amax()) if x.numel() else 0.0
            for x in (problem.query, problem.key)
        ]
    return norms[0], norms[1]
