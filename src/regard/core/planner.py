"""How measures are made: by one fused call, by one pass over the tiles, or by both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from regard.core.block_loop import SoftmaxStats, run_block_loop
from regard.core.problem import Problem
from regard.core.products import Product
from regard.measures import Measure, Output
from regard.tiling import tile_sizes
from regard.types import Array, IntArray

# Columns that ride on a fused call for less than a pass over the tiles would cost.
MAX_EXTRA_COLUMNS = 16


class Plan(NamedTuple):
    """Which measures a fused call gives, and which the pass; a call without measures is for the lse alone."""

    calls: bool
    called: Mapping[str, Measure]
    passed: Mapping[str, Measure]

    def text(self, problem: Problem, known: bool) -> str:
        """What will be done, in a line or two."""
        lines = []
        if self.calls:
            riders = [name for name, each in self.called.items() if not isinstance(each, Output)]
            outputs = [name for name in self.called if name not in riders]
            what = [*outputs, *([f"{', '.join(riders)} as columns of the value"] if riders else []), "lse"]
            lines.append(f"{problem.product_name} ({problem.kernel}): {'; '.join(what)}")
        if self.passed:
            rows = f"tiles of {tile_sizes().rows} × {tile_sizes().columns}"
            lse = (
                "weights from the lse"
                if self.calls or known
                else "each band read twice, for its lse and its weights"
            )
            lines.append(f"one pass over {rows}, {lse}: {', '.join(self.passed)}")
        return "\n".join(lines) or "nothing to do"


def make_plan(problem: Problem, measures: Mapping[str, Measure], known: bool, fused: bool) -> Plan:
    """The cheapest way to the measures; `known` says that the lse is, `fused` that a kernel may be called."""
    outputs = {name: each for name, each in measures.items() if isinstance(each, Output)}
    rest = {name: each for name, each in measures.items() if name not in outputs}
    if not fused or (known and not outputs):
        return Plan(False, {}, dict(measures))
    columns = [each.columns(problem) for each in rest.values() if hasattr(each, "columns")]
    ride = len(columns) == len(rest) and None not in map(_width, columns)
    room = MAX_EXTRA_COLUMNS if outputs else MAX_EXTRA_COLUMNS + problem.key.shape[-1]
    if ride and sum(_width(each) or 0 for each in columns) <= room:
        return Plan(True, dict(measures), {})
    return Plan(True, outputs, rest)


def _width(columns: Any) -> int | None:
    return None if columns is None else columns[0].shape[-1]


class PlanResult(NamedTuple):
    """The results by name, each beginning with the axis of pairs; the rows; what a fused call gave besides."""

    results: dict[str, Any]
    rows: SoftmaxStats | None
    lse: Array | None
    ran: str


def execute(
    plan: Plan,
    problem: Problem,
    known: SoftmaxStats | None,
    canonical: Callable[[Array], tuple[Array, IntArray]],
) -> PlanResult | None:
    """What a plan makes; `canonical` gives a value as (own pairs, kv_len, value_dim), and the one for each pair.

    None where the kernel met something that it does not treat as promised: then a plan without it must do.
    """
    engine, xp = problem.engine, problem.engine.xp
    results: dict[str, Any] = {}
    lse, ran = None, ""
    if plan.calls:
        parts: list[Any] = [
            canonical(each.value) if isinstance(each, Output) else each.columns(problem)
            for each in plan.called.values()
        ]
        value, of = _side_by_side(parts or [problem.placeholder_value], xp)
        with engine.suppress_warnings(), engine.no_grad():
            product = problem.product(value, of)
            if product is None:
                return None
            output, lse, ran = product
            stops = np.cumsum([part.shape[-1] for part, _ in parts])
            for (name, each), (part, _), stop in zip(plan.called.items(), parts, stops, strict=True):
                columns = output[..., int(stop) - part.shape[-1] : int(stop)]
                results[name] = (
                    engine.cast(columns, part.dtype)
                    if isinstance(each, Output)
                    else each.from_columns(columns, lse, problem)
                )
        known = SoftmaxStats(lse, None)
    measures = [
        _as_product(each, problem, canonical) if isinstance(each, Output) else each
        for each in plan.passed.values()
    ]
    found, known = run_block_loop(problem, measures, known)
    for name, each, made in zip(plan.passed, measures, found, strict=True):
        results[name] = engine.cast(made, each.array.dtype) if isinstance(each, Product) else made
    return PlanResult(results, known, lse, ran)


def _as_product(output: Output, problem: Problem, canonical: Any) -> Product:
    engine = problem.engine
    value, of = canonical(output.value)
    finite = bool(engine.xp.all(engine.xp.isfinite(value)))
    return Product(value, of, False, finite, engine.working_dtype(problem.query, problem.key, value))


def _side_by_side(parts: list[tuple[Array, IntArray]], xp: Any) -> tuple[Array, IntArray]:
    """Values `(own pairs, kv_len, width)` as one, and which of its own pairs serves each pair."""
    if len(parts) == 1:
        return parts[0]
    several = [(array, of) for array, of in parts if len(array) > 1]
    if all(len(array) == len(several[0][0]) and np.array_equal(of, several[0][1]) for array, of in several):
        own, shared = (len(several[0][0]), several[0][1]) if several else (1, parts[0][1])
        arrays = [xp.broadcast_to(array, (own, *array.shape[1:])) for array, _ in parts]
        return xp.concat(arrays, axis=-1), shared
    each = [array[xp.asarray(of)] for array, of in parts]
    return xp.concat(each, axis=-1), np.arange(len(parts[0][1]))


def upcast(problem: Problem) -> Problem:
    """The same at the dtype of its scores: at half precision a kernel's lse is no better than that."""
    cast = problem.engine.cast
    return replace(problem, query=cast(problem.query, problem.dtype), key=cast(problem.key, problem.dtype))
