"""The block loop: every entry, product and measure of the matrix is computed from its tiles.

Each band of rows is read in two passes over its live blocks of keys. The first pass computes the largest score of each
row and the sum of exp(score − max) by online softmax. The second pass computes the weights exp(score − max) / sum,
which are final when a measure sees them. Blocks that the mask leaves empty are skipped; full ones are not tested.

If the engine has a compiled pass, built-in measures run in it instead; measures of your own run in this loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.accumulators import Accumulator
from regard.engines.compensated import resolve_sums
from regard.frame import as_index, take_range
from regard.measures.base import Measure, find_accumulator
from regard.problem import LARGE_SCORE, Engine, Problem
from regard.tiling import TileSizes, tile_sizes
from regard.types import Array, IntArray, Namespace

# What a compiled pass accumulates for each measure, by its number.
CompiledMeasures = dict[int, Accumulator | tuple[Accumulator, ...]]

# A block of keys: its columns, and whether the mask allows all of it.
Block = tuple[IntArray, bool]


class SoftmaxStats(NamedTuple):
    """The statistics of each row that turn scores into weights: weights = exp(scores − max) / sum.

    A logsumexp alone would lose digits: at scores of 1e4, rounding the lse costs the weights 1e-3. If all scores are
    finite and small, the lse of a fused kernel is as good; then `max` holds the lse and `sum` is None.

    Attributes:
        max: Largest score of each row, −inf for a row without live keys: (pairs, rows).
        sum: Sum of exp(score − max) of each row, in float64 if the device has it: (pairs, rows).
        is_compiled: Whether a compiled pass computed them, which rounds scores differently from the block loop.
    """

    max: Array
    sum: Array | None
    is_compiled: bool = False

    def lse(self, xp: Namespace) -> Array:
        """Compute the natural-log logsumexp of each row, −inf for a row without live keys."""
        return self.max if self.sum is None else self.max + xp.log(self.sum)

    def is_small(self, xp: Namespace) -> bool:
        """Return whether the rounding of these statistics and of scores computed on their own does not matter."""
        sizes = xp.where(self.max == -xp.inf, 0.0, xp.abs(self.max))
        return bool(xp.all(sizes < LARGE_SCORE))  # NaN is not small

    def select(self, index: Any) -> SoftmaxStats:
        """Return the statistics of some pairs or rows."""
        return SoftmaxStats(self.max[index], None if self.sum is None else self.sum[index], self.is_compiled)

    def fits(self, *, compiled: bool) -> bool:
        """Return whether a pass of the given kind may use these statistics: an lse, or those of its own kind.

        Scores that are rounded differently would give a row with one key a weight next to 1 instead of 1.
        """
        return self.sum is None or self.is_compiled == compiled


# Online softmax


def init_online_softmax(problem: Problem, rows: int) -> SoftmaxStats:
    """Return the statistics of rows before the first key: empty, or the sink's if there is one."""
    xp, pairs = problem.engine.xp, problem.shape[0]
    if problem.sink is None:
        largest = xp.full((pairs, rows), -xp.inf, dtype=problem.dtype)
        return SoftmaxStats(largest, xp.zeros((pairs, rows)))
    sink = problem.engine.cast(problem.frame.per_head(problem.sink, "sink"), problem.dtype)
    largest = xp.broadcast_to(sink[:, None], (pairs, rows))
    return SoftmaxStats(largest, xp.zeros((pairs, rows)) + xp.where(largest == -xp.inf, 0.0, 1.0))


def update_online_softmax(stats: SoftmaxStats, scores: Array, engine: Engine) -> SoftmaxStats:
    """Include a tile of scores (pairs, rows, columns) in the statistics; the order of the tiles does not matter."""
    xp = engine.xp
    assert stats.sum is not None
    largest = xp.maximum(stats.max, xp.max(scores, axis=-1))
    shift = make_finite(largest, xp)
    tile_sum = xp.sum(engine.exponentiate(scores, shift[..., None]), axis=-1)
    return SoftmaxStats(largest, stats.sum * xp.exp(stats.max - shift) + tile_sum)


def make_finite(largest: Array, xp: Namespace) -> Array:
    """Replace the −inf of rows without live keys by 0, since (−inf) − (−inf) is NaN."""
    return xp.where(largest == -xp.inf, 0.0, largest)


def normalise(scores: Array, stats: SoftmaxStats, engine: Engine) -> Array:
    """Compute exp(scores − max) / sum, zero where masked and in rows without live keys."""
    xp = engine.xp
    weights = engine.exponentiate(scores, make_finite(stats.max, xp)[..., None])
    if stats.sum is None:
        return weights
    total = xp.where(stats.sum == 0, 1.0, stats.sum)
    weights /= engine.cast(total, weights.dtype)[..., None]
    if engine.is_asynchronous or xp.any(xp.isnan(total)):
        # A NaN row is NaN at its live keys only; masked entries stay zero.
        weights = xp.where(scores == -xp.inf, 0.0, weights)
    return weights


# The loop


def run_block_loop(
    problem: Problem, measures: Sequence[Measure], known: SoftmaxStats | None = None, *, compiled: bool = True
) -> tuple[list[Any], SoftmaxStats | None]:
    """Run measures over the whole matrix; they share the pass.

    Args:
        problem: Matrix in canonical form.
        measures: The measures.
        known: Statistics of its rows, if they are known.
        compiled: Whether a compiled pass may compute what it can. For a matrix of a few tiles, the loop is faster.

    Returns:
        The result of each measure, and the statistics of all rows. If gradients are required, the engine computes the
        results and the statistics are `known`.
    """
    if not measures and known is not None:
        return [], known
    arrays = [getattr(measure, "array", None) for measure in measures]
    if measures and problem.engine.requires_grad(problem, *arrays):
        bands = tile_sizes(on_device=problem.engine.is_asynchronous).split_rows(problem.shape[1])
        return problem.engine.differentiate(problem, measures, list(bands)), known
    return _run_passes(
        problem,
        measures,
        known,
        lambda measure, state: measure.finish(state),
        compiled=compiled,
        recomputes=True,
    )


def is_whole(problem: Problem) -> bool:
    """Return whether a matrix is a single tile: a small one without a sink and gradients, with all its keys here."""
    return (
        tile_sizes().is_whole(problem.shape)
        and type(problem) is Problem
        and problem.sink is None
        and problem.key.shape[-2] == problem.shape[2]
        and not problem.engine.is_asynchronous
        and not problem.engine.requires_grad(problem)
    )


def compute_whole(problem: Problem) -> tuple[Array, Array] | None:
    """Compute scores and weights of a matrix that is a single tile, (pairs, rows, kv_len) each.

    Return None if it is not, or if the weights of a row are not finite, as those of a row without live keys.
    """
    if not is_whole(problem):
        return None
    with problem.engine.suppress_warnings():
        return _compute_tile(problem)


def _compute_tile(problem: Problem) -> tuple[Array, Array] | None:
    scores = problem.compute_all_scores()
    weights = problem.engine.softmax(scores)
    return None if weights is None else (scores, weights)


def measure_whole(problem: Problem, measures: Sequence[Measure]) -> list[Any] | None:
    """Run measures over a matrix that is a single tile; None if it is not, or the loop must compute them."""
    arrays = [array for measure in measures if (array := getattr(measure, "array", None)) is not None]
    engine, shape = problem.engine, problem.shape
    if not measures or (arrays and engine.requires_grad(problem, *arrays)) or not is_whole(problem):
        return None
    with engine.suppress_warnings():
        if (whole := _compute_tile(problem)) is None:
            return None
        (scores, weights), xp, results = whole, engine.xp, []
        q_idx = take_range(xp.arange(shape[1]), 0, shape[1])
        kv_idx = q_idx if shape[2] == shape[1] else take_range(xp.arange(shape[2]), 0, shape[2])
        for measure in measures:
            bound: Any = measure.bind(problem)
            state = bound.step(bound.init(shape, xp), weights, scores, q_idx, kv_idx, xp)
            results.append(bound.finish(resolve_sums(bound.compact(state))))
    return results


def run_measures(
    problem: Problem, measures: Sequence[Measure], known: SoftmaxStats | None = None
) -> tuple[list[Any], SoftmaxStats | None]:
    """Run measures over a small matrix as a single tile, over any other in the loop; see `run_block_loop`.

    Returns:
        The result of each measure, and the statistics; those of a small matrix are `known`.
    """
    results = measure_whole(problem, measures)
    return run_block_loop(problem, measures, known) if results is None else (results, known)


def compute_stats(problem: Problem, *, compiled: bool) -> SoftmaxStats:
    """Compute the statistics of each row over the keys of a problem, by a compiled pass if allowed and available."""
    return _run_passes(problem, [], None, None, compiled=compiled)[1]


def accumulate_states(problem: Problem, measures: Sequence[Measure], known: SoftmaxStats) -> list[Any]:
    """Run measures over a block of keys and return their states, which `merge` combines over blocks."""
    compiled = known.fits(compiled=True)
    if not known.fits(compiled=False) and len(find_compiled(problem, measures)) < len(measures):
        raise ValueError("the block loop cannot use the statistics of a compiled pass")
    return _run_passes(problem, measures, known, lambda measure, state: state, compiled=compiled)[0]


def _run_passes(
    problem: Problem, measures: Sequence[Measure], known: SoftmaxStats | None, convert: Any, *,
    compiled: bool = True, recomputes: bool = False,
) -> tuple[list[Any], SoftmaxStats]:  # fmt: skip
    """Run what a compiled pass can compute in it, and the rest in the loop; `convert` each bound measure and state.

    With `recomputes`, a compiled pass that is as fast without statistics computes its own: results of a measure then do
    not depend on earlier calls.
    """
    engine, concat = problem.engine, problem.engine.xp.concat
    with engine.suppress_warnings(), engine.no_grad():
        given = None if recomputes and problem.engine.keeps_exponentials(problem) else known
        done, stats = _run_compiled(problem, measures, given) if compiled else ({}, None)
        known = known or stats
        results = {i: convert(*bound_and_state) for i, bound_and_state in done.items()}
        rest = [measure for i, measure in enumerate(measures) if i not in done]
        if known is None or rest:
            parts = _run_groups(problem, rest, known)
            converted = [[convert(*bound_and_state) for bound_and_state in states] for states, _ in parts]
            known = known or SoftmaxStats(*(concat([own[i] for _, own in parts]) for i in range(2)))
            of_rest = iter(_concat_results(list(column), concat) for column in zip(*converted, strict=True))
        return [results[i] if i in done else next(of_rest) for i in range(len(measures))], known


def find_compiled(problem: Problem, measures: Sequence[Measure]) -> CompiledMeasures:
    """Return what a compiled pass would accumulate, by the number of the measure; empty without a compiled pass."""
    if not problem.engine.name_compiled_pass(problem):
        return {}
    found = ((i, find_accumulator(measure, problem)) for i, measure in enumerate(measures))
    compiled = {i: accumulator for i, accumulator in found if accumulator is not None}
    return {
        i: own
        for i, own in compiled.items()
        if all(problem.engine.can_accumulate(problem, part) for part in flatten_accumulators({i: own}))
    }


def _run_compiled(
    problem: Problem, measures: Sequence[Measure], known: SoftmaxStats | None
) -> tuple[dict[int, tuple[Any, Any]], SoftmaxStats | None]:
    """Compute what a compiled pass can: bound measure and state by number, and the statistics that it computed."""
    accumulators = find_compiled(problem, measures)
    if not accumulators and (measures or not problem.engine.name_compiled_pass(problem)):
        return {}, None
    bound = {i: measures[i].bind(problem) for i in accumulators}
    usable = known if known is not None and known.fits(compiled=True) else None
    largest, total = (None, None) if usable is None else usable[:2]
    done = problem.engine.accumulate(problem, flatten_accumulators(accumulators), largest, total)
    if done is None:
        return {}, None
    accumulated, largest, total = done
    states = restore_states(problem, bound, accumulators, accumulated)
    compiled = {i: (bound[i], state) for i, state in states.items()}
    return compiled, usable or SoftmaxStats(largest, total, is_compiled=True)


def flatten_accumulators(found: CompiledMeasures) -> list[Accumulator]:
    """List the accumulators of measures in order; some measures have several."""
    return [part for own in found.values() for part in (own if isinstance(own, tuple) else (own,))]


def restore_states(
    problem: Problem, bound: Mapping[int, Any], found: CompiledMeasures, accumulated: Iterable[Any]
) -> dict[int, Any]:
    """Convert what a compiled pass accumulated to the states of bound measures, by number."""
    remaining, states = iter(accumulated), {}
    for i, measure in bound.items():
        own = found[i]
        parts = [next(remaining) for _ in (own if isinstance(own, tuple) else (own,))]
        accumulated_state = problem.engine.xp.stack(parts, axis=-1) if isinstance(own, tuple) else parts[0]
        states[i] = measure.restore_state(accumulated_state)
    return states


# Each bound measure with its state, and the statistics, of a group of pairs.
GroupPart = tuple[list[tuple[Any, Any]], SoftmaxStats]


def _run_groups(problem: Problem, measures: Sequence[Measure], known: SoftmaxStats | None) -> list[GroupPart]:
    """Run measures in the loop, over groups of pairs whose tiles fit into memory together."""
    sizes = tile_sizes(on_device=problem.engine.is_asynchronous).widen(problem.shape)
    usable = known if known is not None and known.fits(compiled=False) else None
    return [
        _run_pairs(
            problem.select_pairs(pairs),
            measures,
            None if usable is None else usable.select(as_index(pairs)),
            sizes,
        )
        for pairs in sizes.split_pairs(problem.shape)
    ]


def _run_pairs(
    problem: Problem, measures: Sequence[Measure], known: SoftmaxStats | None, sizes: TileSizes
) -> GroupPart:
    """Run measures over pairs whose tiles fit into memory together."""
    engine, xp = problem.engine, problem.engine.xp
    bound: list[Any] = [measure.bind(problem) for measure in measures]
    reads_scores = any(measure.reads_scores for measure in bound)
    last_of_logs = max((i for i, measure in enumerate(bound) if hasattr(measure, "step_logs")), default=None)
    # With a kernel's lse and unmodified scores, a tile is one product and one exponential. That path cannot tell a
    # weight of zero from the smallest number, which matters if a sink may take everything.
    modified = problem.score_mods or problem.sink is not None
    from_lse = known is not None and known.sum is None and not (modified or reads_scores)
    states = [measure.init(problem.shape, xp) for measure in bound]
    buffers: list[Array] = []  # reused for every tile: fresh memory costs as much as the work done in it
    mask_cache: dict[Any, Array] = {}
    kv_range = problem.kv_range
    row_numbers, key_numbers = xp.arange(problem.shape[1]), xp.arange(kv_range.start, kv_range.stop)
    if from_lse:
        key = engine.take(problem.key, problem.key_index, np.arange(len(kv_range)), problem.dtype)
    computed: list[SoftmaxStats] = []
    for band in sizes.split_rows(problem.shape[1]):
        blocks = problem.live_blocks(band, sizes.columns * max(1, sizes.rows // problem.shape[1]))
        cached_scores: list[Any] = [None] * len(blocks)
        if known is None:
            stats, cached_scores = _run_first_pass(problem, band, blocks, sizes.cached_scores)
            computed.append(stats)
        else:
            stats = known.select((slice(None), as_index(band)))
        q_idx = take_range(row_numbers, int(band[0]), int(band[-1]) + 1)
        if from_lse:
            lse = make_finite(stats.max, xp)[..., None]
            query = engine.take(problem.query, problem.query_index, band, problem.dtype) * problem.scale
        for (columns, full), scores in zip(blocks if bound else (), cached_scores, strict=False):
            start, stop = int(columns[0]), int(columns[-1]) + 1
            kv_idx, logs = take_range(key_numbers, start, stop, kv_range.start), None
            if from_lse:
                allowed = None if full else problem.mask_tile(band, columns, mask_cache)
                own_key = key[:, start - kv_range.start : stop - kv_range.start]
                logs, weights = engine.compute_weights(query, own_key, lse, allowed, buffers)
            else:
                scores = problem.scores(band, columns, full) if scores is None else scores
                given = problem.take_given_weights(band, columns)
                weights = normalise(scores, stats, engine) if given is None else given
                if stats.sum is None and given is None:
                    weights = xp.clip(weights, None, 1.0)  # the lse is rounded
            for i, measure in enumerate(bound):
                if logs is not None and hasattr(measure, "step_logs"):
                    own = logs if i == last_of_logs else logs + 0.0  # `step_logs` overwrites its argument
                    states[i] = measure.step_logs(states[i], weights, own, q_idx, kv_idx, xp)
                else:
                    states[i] = measure.step(states[i], weights, scores, q_idx, kv_idx, xp)
    if known is None:
        computed = computed or [_run_first_pass(problem, np.arange(0), (), 0)[0]]
        known = SoftmaxStats(*(xp.concat([stats[i] for stats in computed], axis=1) for i in range(2)))
    compacted = [resolve_sums(measure.compact(state)) for measure, state in zip(bound, states, strict=True)]
    return list(zip(bound, compacted, strict=True)), known


def _run_first_pass(
    problem: Problem, band: IntArray, blocks: Sequence[Block], max_cached: int
) -> tuple[SoftmaxStats, list[Any]]:
    """Compute the statistics of a band, and the scores of each block if there are at most `max_cached` of them."""
    stats, scores_of_blocks = init_online_softmax(problem, len(band)), []
    num_scores = len(band) * problem.shape[0] * sum(len(columns) for columns, _ in blocks)
    for columns, full in blocks:
        scores = problem.scores(band, columns, full)
        stats = update_online_softmax(stats, scores, problem.engine)
        scores_of_blocks.append(scores if num_scores <= max_cached else None)
    return SoftmaxStats(stats.max, resolve_sums(stats.sum)), scores_of_blocks


def compute_entries(problem: Problem, columns: IntArray, stats: SoftmaxStats | None) -> Array:
    """Compute the weights at some columns, (pairs, rows, len(columns)); the scores if `stats` is None."""
    engine, xp = problem.engine, problem.engine.xp
    pairs, rows, _ = problem.shape
    sizes = tile_sizes(on_device=engine.is_asynchronous)
    result = xp.empty((pairs, rows, len(columns)), dtype=problem.dtype)
    with engine.suppress_warnings():
        for group in sizes.split_pairs((pairs, rows, len(columns))):
            part, own_pairs = problem.select_pairs(group), as_index(group)
            for band in sizes.split_rows(rows):
                for start in range(0, len(columns), sizes.columns):
                    block = columns[start : start + sizes.columns]
                    tile = part.scores(band, block)
                    if stats is not None:
                        own_stats = stats.select(own_pairs).select((slice(None), as_index(band)))
                        tile = normalise(tile, own_stats, engine)
                    result[own_pairs, as_index(band), start : start + sizes.columns] = tile
    return result


def _concat_results(parts: list[Any], concat: Any) -> Any:
    """Concatenate the results or states of groups of pairs; one may be a tuple of arrays."""
    if isinstance(parts[0], tuple):
        return type(parts[0])(*(_concat_results(list(column), concat) for column in zip(*parts, strict=True)))
    if isinstance(parts[0], list):
        return []  # pending tiles, of which a compacted state has none
    return parts[0] if len(parts) == 1 else concat(parts)
