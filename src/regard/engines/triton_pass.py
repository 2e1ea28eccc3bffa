"""The compiled pass of half-precision tensors on a GPU: any set of accumulators in one or two launches.

Each variant of a kernel is compared with the definition before its first use on a device (`triton_check`). If one is
wrong, the pass is off for that device, `A.kernel` says why, and the block loop runs instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from regard.accumulators import Accumulator, CellReduction, ColumnSum, RowMaxScore, RowSum, RowTopK
from regard.engines.triton_launch import (
    FEW_LARGEST,
    MAX_HEAD_DIM,
    KernelVariant,
    Launcher,
    PassInputs,
    find_target,
    round_up_power,
)
from regard.problem import Problem
from regard.types import IntArray

Tensor = Any  # torch's types are not checked

# k up to which a kernel inserts each weight where it belongs.
MAX_INSERTED = 64
HALF_DTYPES = (torch.float16, torch.bfloat16)
_DEVICE_TYPES: ContextVar[tuple[str, ...]] = ContextVar("triton_device_types", default=("cuda",))
_CHECKED: set[tuple[torch.device, KernelVariant]] = set()
_FAULTS: dict[torch.device, str] = {}


@contextmanager
def use_interpreter() -> Iterator[None]:
    """Run the pass on tensors of the CPU inside a `with` block, for tests; the process needs TRITON_INTERPRET=1."""
    token = _DEVICE_TYPES.set(("cuda", "cpu"))
    try:
        yield
    finally:
        _DEVICE_TYPES.reset(token)


def describe_pass(problem: Problem) -> str:
    """Return the name of the Triton pass for a matrix; empty if it does not cover the matrix, or is off.

    Args:
        problem: Matrix in canonical form.
    """
    query, key = problem.query, problem.key
    if query.device.type not in _DEVICE_TYPES.get() or problem.score_mods or not problem.is_softmax:
        return ""
    target = find_target(query.device)  # empty without Triton
    dtypes = (*HALF_DTYPES, torch.float32) if target == "interpreter" else HALF_DTYPES
    if query.dtype not in dtypes or key.dtype != query.dtype or not 0 < query.shape[-1] <= MAX_HEAD_DIM:
        return ""
    if 0 in problem.shape or query.device in _FAULTS:
        return ""
    if len(problem.kv_range) < problem.frame.kv_len:
        return ""  # the kernels count keys from the start of the array
    return f"Triton pass ({target})" if target else ""


def can_accumulate(accumulator: Accumulator) -> bool:
    """Return whether the kernels have an accumulator."""
    if isinstance(accumulator, RowTopK):
        return accumulator.k <= MAX_INSERTED
    return isinstance(accumulator, RowSum | ColumnSum | CellReduction | RowMaxScore)


def describe_fault(device: torch.device) -> str:
    """Return why the pass is off on a device; empty if it is not off."""
    fault = _FAULTS.get(device, "")
    return f"Triton pass off: {fault}" if fault else ""


def accumulate(
    problem: Problem, accumulators: Sequence[Accumulator], known_max: Tensor | None, known_sum: Tensor | None
) -> tuple[list[Any], Tensor, Tensor | None] | None:
    """Run the pass.

    Args:
        problem: Matrix in canonical form that `describe_pass` has a name for.
        accumulators: What to accumulate.
        known_max: Largest score of each row, or the lse if `known_sum` is None: (pairs, rows). None if unknown.
        known_sum: Σ exp(score − max) of each row: (pairs, rows).

    Returns:
        The array, or the pair of arrays, of each accumulator; the largest score of each row, or the lse that was given;
        and Σ exp(score − max) of each row, None if an lse was given. None if a kernel is wrong on this device, or if
        NaN or inf take part, which integers cannot add up: then the block loop must do the work.
    """
    base = KernelVariant("softmax", problem.query.dtype, problem.query.shape[-1])
    launches = plan_launches(base, accumulators, has_stats=known_max is not None)
    if not all(_is_right(launch.variant, problem.query.device) for launch in launches):
        return None
    launcher = Launcher(_make_inputs(problem))
    largest, total = known_max, known_sum
    found: dict[Accumulator, Any] = {}
    for launch in launches:
        if launch.variant.kernel == "softmax":
            results, _ = launcher.run_softmax(launch.variant, offset=launch.offset)
            largest, total = results["max"], results["sum"]
        else:
            if not _is_finite(largest, total):
                return None
            results, _ = launcher.run_measures(
                launch.variant, largest, total, offset=launch.offset, shares=launch.shares, cells=launch.cells
            )
        found |= {item: _read(item, results, launch.shares) for item in launch.accumulators}
    if not _is_finite(largest, total):
        return None
    results_of = [
        _cut_largest(found, item) if isinstance(item, RowTopK) else found[item] for item in accumulators
    ]
    return results_of, largest, total


def describe_product(problem: Problem, value: Tensor, accumulators: Sequence[Accumulator]) -> str:
    """Return the name of the flash loop that computes `A @ value` and accumulators; empty if one launch cannot.

    Args:
        problem: Matrix in canonical form.
        value: (own pairs, kv_len, value_dim).
        accumulators: What to accumulate.
    """
    name = describe_pass(problem)
    return name.replace("pass", "flash loop") if name and _plan_product(problem, value, accumulators) else ""


def _plan_product(
    problem: Problem, value: Tensor, accumulators: Sequence[Accumulator]
) -> PlannedLaunch | None:
    query = problem.query
    if value.dtype != query.dtype or not 0 < value.shape[-1] <= MAX_HEAD_DIM:
        return None
    base = KernelVariant("softmax", query.dtype, query.shape[-1], value.shape[-1])
    launches = plan_launches(base, accumulators, has_stats=False)
    return launches[0] if len(launches) == 1 else None


def run_product(
    problem: Problem, value: Tensor, value_index: IntArray, accumulators: Sequence[Accumulator]
) -> tuple[Tensor, list[Any], Tensor, Tensor] | None:
    """Compute `A @ value` and sums over the keys of each row in one launch.

    Args:
        problem: Matrix in canonical form that `describe_pass` has a name for.
        value: (own pairs, kv_len, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).
        accumulators: What to accumulate.

    Returns:
        The output (pairs, rows, value_dim), the array of each accumulator, and the largest score and the sum of each
        row. None if one launch cannot compute them, or the kernel is wrong, or NaN or inf take part.
    """
    launch = _plan_product(problem, value, accumulators)
    if launch is None or not _is_right(launch.variant, value.device):
        return None
    if not bool(value.isfinite().all()):
        return None  # a masked NaN must not matter, and 0 · NaN is NaN
    results, _ = Launcher(_make_inputs(problem)).run_softmax(
        launch.variant, value, value_index, launch.offset
    )
    if not _is_finite(results["max"], results["sum"]):
        return None
    sums = [_read(item, results, ()) for item in accumulators]
    return results["output"], sums, results["max"], results["sum"]


class PlannedLaunch(NamedTuple):
    """One launch: its variant, what it accumulates, and the arguments that are not part of the variant."""

    variant: KernelVariant
    accumulators: list[Accumulator]
    offset: int = 0
    shares: tuple[tuple[tuple[int, int], ...], ...] = ()
    cells: tuple[int, int] = (1, 1)


def plan_launches(
    base: KernelVariant, accumulators: Sequence[Accumulator], *, has_stats: bool
) -> list[PlannedLaunch]:
    """Distribute accumulators over as few launches as possible.

    One launch has at most one offset of distances and one grid of cells. Sums over the keys of a row need no second
    launch if the statistics are unknown: the flash loop computes both.
    """
    wanted = list(dict.fromkeys(accumulators))
    offsets = [item for item in wanted if isinstance(item, RowSum) and item.factor == "distance"]
    rows_only = all(
        isinstance(item, RowMaxScore) or (isinstance(item, RowSum) and item.intervals is None)
        for item in wanted
    )
    launches = []
    if not has_stats:
        if rows_only and len(offsets) < 2:
            variant = replace(base, row_sums=frozenset(map(_name_row_sum, wanted)))
            return [PlannedLaunch(variant, wanted, offsets[0].offset if offsets else 0)]
        launches.append(PlannedLaunch(base, []))
    grids = [item for item in wanted if isinstance(item, CellReduction)]
    largest = [item for item in wanted if isinstance(item, RowTopK)]
    rest = [item for item in wanted if item not in (*offsets, *grids, *largest)]
    for n in range(max(len(offsets), len(grids), bool(rest))):
        own = [*offsets[n : n + 1], *grids[n : n + 1], *(rest if n == 0 else ())]
        launches.append(_plan_measures(base, own))
    if largest:
        # The largest weights need the registers of a launch with every row sum.
        top_k = max(item.k for item in largest)
        last = launches[-1] if launches and launches[-1].variant.kernel == "measure" else None
        usual = last and not last.shares and last.variant.row_sums <= {"surprisal", "distance"}
        if last and usual and top_k <= FEW_LARGEST:
            launches[-1] = _plan_measures(base, [*last.accumulators, *largest])
        else:
            launches.append(_plan_measures(base, [*largest]))
    return launches


def _plan_measures(base: KernelVariant, own: list[Accumulator]) -> PlannedLaunch:
    """Plan the launch of the measure pass for some accumulators, with one offset and one grid at most."""
    row_sums = frozenset(filter(None, map(_name_row_sum, own)))
    shares = tuple(item.intervals for item in own if isinstance(item, RowSum) and item.intervals is not None)
    offset = next((item.offset for item in own if isinstance(item, RowSum) and item.factor == "distance"), 0)
    grid = next((item for item in own if isinstance(item, CellReduction)), None)
    top_k = max((item.k for item in own if isinstance(item, RowTopK)), default=0)
    variant = KernelVariant(
        "measure",
        base.dtype,
        base.head_dim,
        row_sums=row_sums,
        shares=bool(shares),
        columns=ColumnSum() in own,
        cells=grid.reduce if grid else "",
        top_k=round_up_power(top_k, least=1) if top_k else 0,
    )
    return PlannedLaunch(variant, own, offset, shares, grid.cells if grid else (1, 1))


def _name_row_sum(accumulator: Accumulator) -> str:
    """Return the name of a row sum in `ROW_SUMS`; empty for everything else."""
    if isinstance(accumulator, RowMaxScore):
        return "max_score"
    return accumulator.factor if isinstance(accumulator, RowSum) and accumulator.intervals is None else ""


def _read(accumulator: Accumulator, results: dict[str, Tensor], shares: Sequence[Any]) -> Any:
    """Return the result of an accumulator from those of its launch."""
    match accumulator:
        case ColumnSum():
            return results["columns"]
        case CellReduction():
            return results["cells"]
        case RowTopK():
            return results["top_values"], results["top_keys"]
        case RowSum(_, _, intervals) if intervals is not None:
            return results["shares"][list(shares).index(intervals)]
    return results[_name_row_sum(accumulator)]


def _cut_largest(found: dict[Accumulator, Any], accumulator: RowTopK) -> tuple[Tensor, Tensor]:
    values, keys = found[accumulator]
    return values[..., : accumulator.k].clone(), keys[..., : accumulator.k].clone()


def _is_right(variant: KernelVariant, device: torch.device) -> bool:
    """Return whether a variant passed its check on a device; the first call compiles and checks it."""
    if device in _FAULTS:
        return False
    if (device, variant) not in _CHECKED:
        from regard.engines.triton_check import find_fault

        fault = find_fault(variant, device)
        if fault:
            _FAULTS[device] = f"{variant.name}: {fault}"
            return False
        _CHECKED.add((device, variant))
    return True


def _is_finite(largest: Tensor, total: Tensor | None) -> bool:
    """Return whether statistics are numbers; the largest score of a row without live keys is −inf."""
    return bool((largest < torch.inf).all()) and (total is None or bool(total.isfinite().all()))


def _make_inputs(problem: Problem) -> PassInputs:
    sink = problem.sink
    if sink is not None:
        sink = problem.frame.per_head(sink, "sink").detach().expand(problem.shape[0])
    return PassInputs(
        problem.query.detach(), problem.key.detach(), problem.query_index, problem.key_index, problem.positions,
        problem.frame, problem.mask, problem.scale, sink,
    )  # fmt: skip
