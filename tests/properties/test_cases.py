"""The case matrix: generated cases of the engine against the float64 definition, under the error rule."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from regard import attention
from regard.engines import native
from regard.measures import Received
from regard.render.table import Alignment, format_table
from regard.testing import (
    ENGINES,
    Case,
    build_inputs,
    check_case,
    draw_cases,
)
from regard.testing.cases import (
    FACTORS,
    CaseInputs,
    all_pairs,
    compute_bounds,
    compute_measures,
    from_engine,
    to_engine,
)
from regard.tiling import use_tile_sizes
from tests.helpers.nightly import keep_in_ci

TILE = 16
ENGINES_HERE = ENGINES if importlib.util.find_spec("torch") else ENGINES[:1]


def list_compiled_engines() -> tuple[str, ...]:
    """List the instruction sets of the compiled pass as engines; empty if it is not built."""
    return tuple(f"compiled {name}" for name in native.list_instruction_sets())


def check_compiled(case: Case, inputs: CaseInputs, engine: str) -> list[str]:
    """Check measures and lse of the compiled pass: of arrays in two passes, or of tensors with the lse of a kernel."""
    arrays = "torch fused" if len(ENGINES_HERE) > 1 and case.seed % 2 else "numpy"
    query, key, value = (to_engine(array, arrays) for array in (inputs.query, inputs.key, inputs.value))
    bounds = compute_bounds(case, inputs)
    if "score_mod" in inputs.arguments:
        return []  # runs in the block loop, which the other engines test
    try:
        # A small matrix is a single tile, which the other engines test.
        with native.use_instruction_set(engine.removeprefix("compiled ")), use_tile_sizes(whole=0):
            matrix = attention(query, key, **inputs.arguments)
            if arrays == "torch fused":
                _ = matrix @ value
            assert "compiled pass" in matrix.plan(Received()), matrix.plan(Received())
            for bound, result in compute_measures(matrix, bounds):
                bound.check(result)
            bounds.lse.check(from_engine(matrix.lse))
    except Exception as error:
        return [f"{engine}: {case}\n    {type(error).__name__}: {error}"]
    return []


def find_uncovered_pairs(cases: list[Case]) -> list[tuple[Any, Any]]:
    """Return the possible pairs of choices of two factors that no case has."""
    covered = {pair for case in cases for pair in itertools.combinations(case.cells, 2)}
    return sorted(all_pairs() - covered, key=repr)


def format_counts(cases: list[Case], skipped: list[Case]) -> str:
    """Format a table of how many cases ran and were skipped for each choice, by dtype."""
    ran = Counter((name, choice, case.dtype) for case in cases for name, choice in case.cells)
    not_run = Counter((name, choice) for case in skipped for name, choice in case.cells)
    dtypes = FACTORS["dtype"]
    rows = [
        [name, str(choice), *(ran[name, choice, dtype] for dtype in dtypes), not_run[name, choice]]
        for name, choices in FACTORS.items()
        if name != "dtype"
        for choice in choices
    ]
    headers = ["factor", "choice", *dtypes, "skipped"]
    align: list[Alignment] = ["left" if header in ("factor", "choice") else "right" for header in headers]
    return format_table(rows, headers, align=align)


def small_tiles(case: Case) -> dict[str, int]:
    """Tiles so small that every length is split into several, but not into so many that they only repeat."""
    rows = 4 * TILE if case.q_len == 257 else TILE
    return {
        "rows": rows,
        "columns": 2 * TILE,
        "mask_rows": rows,
        "mask_tile_rows": rows + 8,
        "joined_columns": 3 * TILE,
    }


def list_engines(case: Case) -> list[str]:
    """The engines of a case: all without the compiled pass, and one instruction set of it."""
    compiled = list_compiled_engines()
    return (
        [*ENGINES_HERE, *compiled[case.seed // 2 % 3 % len(compiled) :][:1]] if compiled else [*ENGINES_HERE]
    )


def run_chunk(cases: list[Case]) -> list[str]:
    """Check some cases and return the failures."""
    if len(ENGINES_HERE) > 1:
        import torch

        torch.set_num_threads(1)
    failures = []
    for case in cases:
        inputs = build_inputs(case, TILE)
        assert inputs is not None
        with use_tile_sizes(**small_tiles(case)):
            failures += check_case(case, inputs, ENGINES_HERE)
            for engine in list_engines(case)[len(ENGINES_HERE) :]:
                failures += check_compiled(case, inputs, engine)
    return failures


@pytest.mark.slow
def test_every_case_agrees_with_the_definition(request: pytest.FixtureRequest, capsys, monkeypatch) -> None:
    count, seed = request.config.getoption("--cases"), request.config.getoption("--case-seed")
    drawn = list(draw_cases(count, seed, TILE))
    ran, skipped = ([case for case, possible in drawn if possible is kind] for kind in (True, False))
    # One BLAS thread for each process: tiles are small, and the processes already share the cores.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        chunks = [ran[i : i + 50] for i in range(0, len(ran), 50)]
        failures = [failure for found in pool.map(run_chunk, chunks) for failure in found]
    empty = find_uncovered_pairs(ran)
    with capsys.disabled():
        print(f"\n{format_counts(ran, skipped)}")
        counts = Counter(engine for case in ran for engine in list_engines(case))
        print(", ".join(f"{engine}: {count:,}" for engine, count in counts.items()))
        print(
            f"{counts.total():,} cases ran = {len(ran):,} draws on the engines above; "
            f"{len(skipped)} draws skipped, {len(empty)} pairs of choices empty, seed {seed}"
        )
    assert not failures, "\n".join([f"{len(failures)} cases failed (seed {seed})", *failures[:5]])
    assert len(ran) == count
    assert all(counts[engine] for engine in (*ENGINES_HERE, *list_compiled_engines()))
    assert not empty or count < 5000, f"empty cells: {empty[:5]}"


@pytest.mark.parametrize("seed", keep_in_ci([1, 2], 1))
def test_a_few_cases_quickly(seed: int) -> None:
    cases = [case for case, possible in draw_cases(40, seed, TILE) if possible]
    assert run_chunk(cases) == []


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("heads", FACTORS["heads"])
def test_each_choice_of_heads_without_changes(heads: str, mask: str) -> None:
    # Plain inputs reach the product in one kernel call, which a random draw of all factors seldom does.
    case = Case("float32", mask, 31, 31, 8, "head_dim", heads, "contiguous", "normal", "none", seed=1)
    assert run_chunk([case]) == []
