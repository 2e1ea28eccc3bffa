"""Plan and compute measures: by one product, by the block loop, or by both.

Some measures are a product of the matrix with a few columns. They are computed as extra columns of the value in one
call of the fused kernel, which also returns the lse. The block loop computes the other measures from that lse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from regard.core.block_loop import (
    CompiledMeasures,
    SoftmaxStats,
    find_compiled,
    flatten_accumulators,
    is_whole,
    restore_states,
    run_measures,
)
from regard.core.products import Product
from regard.measures import Measure
from regard.problem import Problem
from regard.tiling import has_few_rows, tile_sizes
from regard.types import Array, IntArray, Namespace

# Extra value columns that cost a fused call less than a pass over the tiles.
MAX_EXTRA_COLUMNS = 16

TWO_PASSES = "two passes (lse, then weights)"


class Plan(NamedTuple):
    """Which measures come from one product, and which from the block loop.

    Attributes:
        has_product: Whether there is a product; one without measures is computed for its lse.
        from_product: Measures that the product gives.
        from_loop: Measures that the block loop computes.
    """

    has_product: bool
    from_product: Mapping[str, Measure]
    from_loop: Mapping[str, Measure]

    def describe(self, problem: Problem, stats: SoftmaxStats | None) -> str:
        """Describe what runs and why, one line for the product, the compiled pass and the block loop each."""
        lines = []
        if self.has_product:
            extra = [name for name, measure in self.from_product.items() if not isinstance(measure, Product)]
            results = ", ".join([*(name for name in self.from_product if name not in extra), "lse"])
            columns = f"; {', '.join(extra)} from extra value columns" if extra else ""
            lines.append(f"{problem.kernel}, one product: {results}{columns}")
        if self.from_loop and is_whole(problem):
            lines.append(f"{problem.engine.name}: block loop, a single tile: {', '.join(self.from_loop)}")
        elif self.from_loop:
            names, measures = list(self.from_loop), list(self.from_loop.values())
            compiled = [names[i] for i in find_compiled(problem, measures)]
            rest = [name for name in names if name not in compiled]
            if compiled:
                kernel = f"{problem.engine.name}: {problem.engine.name_compiled_pass(problem)}"
                lines.append(f"{kernel}, {self._describe_compiled(problem, stats)}: {', '.join(compiled)}")
            if rest:
                kernel, passes = (
                    f"{problem.engine.name}: block loop",
                    self._describe_passes(stats, compiled=False),
                )
                if passes == TWO_PASSES and not problem.engine.prefers_compiled_pass(problem):
                    exact = "scores too large for the lse of a fused kernel"
                    if not problem.can_fuse:
                        kernel = problem.kernel
                    elif not has_few_rows(problem.shape):
                        kernel = f"{kernel} ({exact})"
                sizes = tile_sizes(on_device=problem.engine.is_asynchronous).widen(problem.shape)
                tiles = f"tiles of {sizes.rows} × {sizes.columns}"
                lines.append(f"{kernel}, {tiles}, {passes}: {', '.join(rest)}")
        return "\n".join(lines) or "nothing to compute"

    def _describe_compiled(self, problem: Problem, stats: SoftmaxStats | None) -> str:
        if problem.engine.keeps_exponentials(problem):
            return "one pass"
        return self._describe_passes(stats, compiled=True)

    def _describe_passes(self, stats: SoftmaxStats | None, *, compiled: bool) -> str:
        if self.has_product:
            return "one pass with the lse of the product"
        return "one pass with the cached lse" if stats and stats.fits(compiled=compiled) else TWO_PASSES


def make_plan(problem: Problem, measures: Mapping[str, Measure], known: bool) -> Plan:
    """Choose the cheapest way to compute measures; `known` says whether the lse is cached."""
    outputs = {name: measure for name, measure in measures.items() if isinstance(measure, Product)}
    if not outputs and is_whole(problem):
        return Plan(False, {}, dict(measures))
    rest = {name: measure for name, measure in measures.items() if name not in outputs}
    prefers_pass = problem.engine.prefers_compiled_pass(problem)
    can_fuse = not prefers_pass and problem.can_fuse
    if not can_fuse or (known and not outputs):
        return Plan(False, {}, dict(measures))
    wide = upcast(problem)
    columns = (measure.value_columns(wide) for measure in rest.values())
    widths = [found[0].shape[-1] for found in columns if found is not None]
    max_width = MAX_EXTRA_COLUMNS if outputs else MAX_EXTRA_COLUMNS + problem.key.shape[-1]
    are_columns = len(widths) == len(rest) and sum(widths) <= max_width
    needs_no_lse = (
        not outputs and not (rest and are_columns) and _reads_scores_once(problem, [*rest.values()])
    )
    if needs_no_lse or problem.has_large_scores:
        return Plan(False, {}, dict(measures))
    return Plan(True, dict(measures), {}) if are_columns else Plan(True, outputs, rest)


def _reads_scores_once(problem: Problem, measures: list[Measure]) -> bool:
    """Return whether measures need no lse of a product, because each score is computed once without it."""
    if problem.engine.keeps_exponentials(problem):
        return len(find_compiled(problem, measures)) == len(measures)
    sizes = tile_sizes(on_device=problem.engine.is_asynchronous)
    return has_few_rows(problem.shape) and math.prod(problem.shape) <= sizes.cached_scores


def need_own_product(problem: Problem, products: Iterable[Product]) -> bool:
    """Return whether outputs are computed by products of their own: for a gradient, or at half precision."""
    engine = problem.engine
    is_half = engine.working_dtype(problem.query) != problem.query.dtype
    return is_half or engine.requires_grad(problem, *(product.array for product in products))


class PlanResult(NamedTuple):
    """The results of a plan.

    Attributes:
        results: Results by name; arrays begin with the axis of pairs.
        stats: Softmax statistics of each row.
        lse: The lse of the product, (pairs, rows); None without one.
        kernel: Name of the kernel that computed the product; empty without one.
    """

    results: dict[str, Any]
    stats: SoftmaxStats | None
    lse: Array | None
    kernel: str


def compute_measures(
    problem: Problem, measures: Mapping[str, Measure], known: SoftmaxStats | None = None
) -> PlanResult:
    """Plan and compute measures without gradients."""
    if known is None and (given := problem.given_lse) is not None:
        known = SoftmaxStats(given, None)
    plan = make_plan(problem, measures, known is not None)
    done = _run_product(upcast(problem), plan.from_product) if plan.has_product else None
    if done is None:
        results, lse, kernel, from_loop = dict[str, Any](), None, "", measures
    else:
        (results, lse, kernel), from_loop = done, plan.from_loop
        problem, known = upcast(problem), SoftmaxStats(lse, None)
    computed, stats = run_measures(problem, list(from_loop.values()), known)
    for (name, measure), result in zip(from_loop.items(), computed, strict=True):
        if isinstance(measure, Product):
            result = problem.engine.cast(result, measure.array.dtype)
        results[name] = result
    return PlanResult(results, stats, lse, kernel)


def _run_product(
    problem: Problem, measures: Mapping[str, Measure]
) -> tuple[dict[str, Any], Array, str] | None:
    """Compute measures as columns of one fused product: results by name, the lse, and the name of the kernel.

    Return None if the fused kernel cannot handle the inputs, or its lse is not good enough for the weights.
    """
    engine, xp = problem.engine, problem.engine.xp
    parts: list[Any] = [
        (measure.array, measure.pair_index)
        if isinstance(measure, Product)
        else measure.value_columns(problem)
        for measure in measures.values()
    ]
    value, index = _concat_values(parts or [problem.placeholder_value], xp)
    with engine.suppress_warnings(), engine.no_grad():
        product = problem.product(value, index)
        if product is None or product[1] is None:
            return None
        output, lse, kernel = product
        lse = engine.cast(lse, problem.dtype)  # a value may be wider than query and key
        if problem.score_mods and not SoftmaxStats(lse, None).is_small(xp):
            return None  # a large bias: the rounded lse would cost the weights digits
        results = {}
        stops = np.cumsum([part.shape[-1] for part, _ in parts])
        for (name, measure), (part, _), stop in zip(measures.items(), parts, stops, strict=True):
            columns = engine.cast(output[..., int(stop) - part.shape[-1] : int(stop)], part.dtype)
            if not isinstance(measure, Product):  # in the dtype of the block loop's sums
                columns = engine.cast(measure.finish_columns(columns, lse, problem), xp.float64)
            results[name] = columns
    return results, lse, kernel


def find_measured_product(
    problem: Problem, outputs: Mapping[str, Product], measures: Mapping[str, Measure]
) -> tuple[str, CompiledMeasures]:
    """Return the name of the kernel that computes one output and measures at once, and what it accumulates.

    The name is empty if there is no such kernel.
    """
    engine = problem.engine
    prefers_pass = engine.prefers_compiled_pass(problem)
    if len(outputs) != 1 or not measures or not (prefers_pass or engine.keeps_exponentials(problem)):
        return "", {}
    (output,) = outputs.values()
    found = find_compiled(problem, list(measures.values()))
    if len(found) < len(measures) or engine.requires_grad(problem, output.array):
        return "", {}
    if not prefers_pass and not make_plan(problem, {**outputs, **measures}, known=False).from_loop:
        return "", {}  # one fused product is enough
    return engine.name_measured_product(problem, output.array, flatten_accumulators(found)), found


def compute_measured_product(
    problem: Problem, outputs: Mapping[str, Product], measures: Mapping[str, Measure]
) -> PlanResult | None:
    """Compute one output and measures at once; None if the engine has no kernel for them."""
    kernel, accumulators = find_measured_product(problem, outputs, measures)
    if not kernel:
        return None
    engine = problem.engine
    ((name, output),) = outputs.items()
    bound = {i: measure.bind(problem) for i, measure in enumerate(measures.values())}
    with engine.suppress_warnings(), engine.no_grad():
        done = engine.run_measured_product(
            problem, output.array, output.pair_index, flatten_accumulators(accumulators)
        )
        if done is None:
            return None
        product, accumulated, largest, total = done
        states = restore_states(problem, bound, accumulators, accumulated)
        finished = (bound[i].finish(state) for i, state in states.items())
        results = dict(zip(measures, finished, strict=True))
    stats = SoftmaxStats(largest, total, is_compiled=True)
    return PlanResult({name: product, **results}, stats, None, f"{engine.name}: {kernel}")


def _concat_values(parts: list[tuple[Array, IntArray]], xp: Namespace) -> tuple[Array, IntArray]:
    """Concatenate values (own pairs, kv_len, width) along their columns; also return the index of the result."""
    if len(parts) == 1:
        return parts[0]
    several = [(array, index) for array, index in parts if len(array) > 1]
    if all(
        len(array) == len(several[0][0]) and np.array_equal(index, several[0][1]) for array, index in several
    ):
        own, shared = (len(several[0][0]), several[0][1]) if several else (1, parts[0][1])
        arrays = [xp.broadcast_to(array, (own, *array.shape[1:])) for array, _ in parts]
        return xp.concat(arrays, axis=-1), shared
    arrays = [array[xp.asarray(index)] for array, index in parts]
    return xp.concat(arrays, axis=-1), np.arange(len(parts[0][1]))


def upcast(problem: Problem) -> Problem:
    """Cast query and key to the dtype of the scores: at half precision a kernel's lse has only half precision."""
    cast = problem.engine.cast
    return replace(problem, query=cast(problem.query, problem.dtype), key=cast(problem.key, problem.dtype))
