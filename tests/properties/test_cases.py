"""The case matrix: generated cases of the engine against the float64 definition, under the error rule."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from regard.core import tiling
from regard.engines import torch_fused as _torch_fused
from regard.masks import atoms as _atoms
from regard.masks import base as _base
from regard.testing import ENGINES, Case, check, count_table, draw, empty_cells, fill

TILE = 16


def set_tiles(case: Case) -> None:
    """Tiles so small that every length meets several, and none so many that they only repeat each other."""
    rows = 4 * TILE if case.q_len == 257 else TILE
    tiling.TILE_ROWS, tiling.TILE_COLUMNS = rows, 2 * TILE
    _base.STEP = _atoms.STEP = rows
    _torch_fused.TESTED_ROWS, _torch_fused.JOINED_COLUMNS = rows + 8, 3 * TILE


def run_chunk(cases: list[Case]) -> list[str]:
    """The failures of some cases."""
    torch.set_num_threads(1)
    failures = []
    for case in cases:
        set_tiles(case)
        inputs = fill(case, TILE)
        assert inputs is not None
        failures += check(case, inputs, ENGINES)
    return failures


@pytest.mark.slow
def test_every_case_agrees_with_the_definition(request: pytest.FixtureRequest, capsys, monkeypatch) -> None:
    count, seed = request.config.getoption("--cases"), request.config.getoption("--case-seed")
    drawn = list(draw(count, seed, TILE))
    ran, skipped = ([case for case, possible in drawn if possible is kind] for kind in (True, False))
    # One BLAS thread for each process: tiles are small, and the processes already share the cores.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        chunks = [ran[i : i + 50] for i in range(0, len(ran), 50)]
        failures = [failure for found in pool.map(run_chunk, chunks) for failure in found]
    empty = empty_cells(ran)
    with capsys.disabled():
        print(f"\n{count_table(ran, skipped)}")
        print(
            f"{len(ran) * len(ENGINES):,} cases ran = {len(ran):,} draws × {len(ENGINES)} engines; "
            f"{len(skipped)} draws skipped, {len(empty)} pairs of choices empty, seed {seed}"
        )
    assert not failures, "\n".join([f"{len(failures)} cases failed (seed {seed})", *failures[:5]])
    assert len(ran) == count
    assert not empty or count < 5000, f"empty cells: {empty[:5]}"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_few_cases_quickly(seed: int, monkeypatch) -> None:
    # set_tiles changes these for its whole process; here they are put back.
    for module, *names in (
        (tiling, "TILE_ROWS", "TILE_COLUMNS"),
        (_base, "STEP"),
        (_atoms, "STEP"),
        (_torch_fused, "TESTED_ROWS", "JOINED_COLUMNS"),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    cases = [case for case, possible in draw(150, seed, TILE) if possible]
    assert run_chunk(cases) == []
