"""The case matrix: generated cases of the engine against the float64 definition, under the error rule."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from regard.testing import (
    ENGINES,
    Case,
    build_inputs,
    check_case,
    draw_cases,
    find_uncovered_pairs,
    format_counts,
    list_compiled_engines,
)
from regard.tiling import use_tile_sizes
from tests.helpers.nightly import keep_in_ci

TILE = 16
ENGINES_HERE = ENGINES if importlib.util.find_spec("torch") else ENGINES[:1]


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
            failures += check_case(case, inputs, list_engines(case))
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
    cases = [case for case, possible in draw_cases(150, seed, TILE) if possible]
    assert run_chunk(cases) == []
