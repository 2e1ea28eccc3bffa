"""The Triton kernels without a GPU: in Triton's interpreter against float64, and compiled for absent GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard.accumulators import CellReduction, ColumnSum, RowMaxScore, RowSum, RowTopK  # noqa: E402
from regard.engines import triton_check, triton_pass  # noqa: E402
from regard.engines.triton_check import RESOURCES_FILE, check_kernels, list_variants  # noqa: E402
from regard.engines.triton_compile import SHARED_LIMITS, TARGETS, measure_resources  # noqa: E402
from regard.engines.triton_launch import (  # noqa: E402
    BLOCK_KEYS,
    KernelVariant,
    count_units,
    find_target,
    pack_segments,
)
from regard.frame import Frame  # noqa: E402
from regard.masks.segments import build_segments  # noqa: E402
from tests.helpers.nightly import keep_in_ci  # noqa: E402

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_interpreted(*arguments: str) -> Any:
    """Run a part of tests/helpers/triton_interpreted.py in a process with Triton's interpreter."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.triton_interpreted", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    return report


@pytest.mark.nightly
@needs_triton
@pytest.mark.slow
def test_every_shape_mask_and_dtype_in_the_interpreter(request):
    every_dtype = request.config.getoption("--every-dtype")
    report = run_interpreted("shapes", *(["every dtype"] if every_dtype else []))
    assert report["failed"] == ""
    assert report["launches"] == 6 * 5 * 3 * (3 if every_dtype else 1)
    outputs = [report["worst"].pop(f"{dtype} softmax output") for dtype in ("float32", "float16", "bfloat16")]
    assert max(outputs) <= 1
    # Beside the output, nothing is rounded to half precision; a GPU is allowed ten times what was seen here.
    assert len(report["worst"]) == 3 * 16 and max(report["worst"].values()) <= 0.1


@pytest.mark.nightly
@needs_triton
@pytest.mark.slow
def test_check_kernels_reports_each_variant():
    reports = run_interpreted("kernels")["reports"]
    assert [report["name"] for report in reports] == [v.name for v in list_variants(torch.bfloat16, 24)]
    for report in reports:
        assert report["passed"] and report["cause"] == "" and report["bit_equal"], report
        assert report["device"] == "cpu" and 0 < report["error"] <= 1
        assert report["registers"] is None and report["recorded_registers"] is None


@pytest.mark.nightly
@needs_triton
@pytest.mark.slow
def test_the_matrix_uses_the_pass():
    report = run_interpreted("matrix")
    errors = report["errors"]
    output_error = errors.pop("flash output")
    assert output_error < 0.03  # weights and output in bfloat16
    assert max(errors.values()) < 2e-4, errors
    assert report["output_dtype"] == "torch.bfloat16"
    assert report["plan"].splitlines()[0] == (
        "torch: Triton pass (interpreter), two passes (lse, then weights): entropy, received, distance, position, "
        "mass, coarse, peak, top, max_weight, max_score"
    )
    assert "block loop" in report["plan"].splitlines()[1] and report["plan"].endswith("spread, columns")
    assert report["flash_plan"] == (
        "torch: Triton flash loop (interpreter), one pass: output, entropy, distance, lse"
    )
    assert report["flash_kernel"] == "torch: Triton flash loop (interpreter)"
    assert report["nan_rows"]
    assert "Triton pass off: measure d16 bfloat16: columns: " in report["off_kernel"]
    assert "Triton pass (" not in report["off_plan"]


@pytest.mark.nightly
@needs_triton
@pytest.mark.slow
def test_no_address_outside_the_arrays(tmp_path):
    report = run_interpreted("addresses", str(tmp_path))
    assert report[""]["cause"] == "" and report[""]["count"] > 100_000
    for overrun in ("read", "write"):
        assert "addresses outside every array" in report[overrun]["cause"]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", keep_in_ci(["sm90", "gfx942"], "sm90"))
def test_compiled_kernels_spill_nothing_and_use_matrix_instructions(target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorded = json.loads(RESOURCES_FILE.read_text("utf-8"))["kernels"][target]
    flash, wide_flash = (list_variants(torch.bfloat16, head_dim)[1] for head_dim in (64, 128))
    for variant in (flash, wide_flash, list_variants(torch.bfloat16, 128)[4]):
        found = measure_resources(variant, target)
        assert found["spills"] == 0 and found["mma"] > 0, (variant.name, found)
        assert found["shared"] <= SHARED_LIMITS[target]
        assert variant.name in recorded


def test_recorded_resources_cover_every_target_without_a_spill():
    recorded = json.loads(RESOURCES_FILE.read_text("utf-8"))["kernels"]
    names = {variant.name for head_dim in (64, 128) for variant in list_variants(torch.bfloat16, head_dim)}
    assert set(recorded) == set(TARGETS) >= {"sm80", "sm86", "sm89", "sm90", "sm100", "gfx942"}
    for target, kernels in recorded.items():
        assert set(kernels) == names
        for name, found in kernels.items():
            assert found["spills"] == 0 and found["mma"] > 0, (target, name, found)
            assert found["shared"] <= SHARED_LIMITS[target], (target, name, found)


# The host side needs no Triton.


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "dense"])
def test_packed_segments_are_the_mask(kv_len, mask):
    rows = 70
    masks = {
        "none": None,
        "causal": regard.causal("lower_right"),
        "window": regard.sliding_window(9, align="lower_right") | regard.masks.first(2),
        "dense": regard.masks.dense(np.random.default_rng(kv_len).random((2, 1, rows, kv_len)) < 0.8),
    }
    frame = Frame((2, 3), rows, kv_len)
    distinct, pair_index = build_segments(masks[mask], frame, np.arange(rows), 32, BLOCK_KEYS)
    first, offsets, segments, tiles = pack_segments(distinct, pair_index, kv_len)
    assert tiles.dtype == np.int32 and tiles.shape[1:] == (32, 2)
    bits = np.unpackbits(tiles.view(np.uint8), axis=2, bitorder="little").astype(bool)
    for pair in range(6):
        found = np.zeros((96, 256), int)
        for block in range(3):
            for start, stop, tile in segments[
                offsets[first[pair] + block] : offsets[first[pair] + block + 1]
            ]:
                for column in range(start, stop, BLOCK_KEYS):  # as the kernels read it: whole blocks
                    allowed = np.ones((32, BLOCK_KEYS), bool) if tile < 0 else bits[tile]
                    found[block * 32 : block * 32 + 32, column : column + BLOCK_KEYS] += allowed
        expected = np.ones((rows, kv_len), bool)
        if masks[mask] is not None:
            expected = masks[mask].allows(frame, np.arange(rows), np.arange(kv_len), np)
            expected = expected[pair if len(expected) > 1 else 0]
        np.testing.assert_array_equal(found[:rows, :kv_len], expected)
        assert not found[:, kv_len:].any()


def test_a_launch_has_one_offset_and_one_grid():
    base = KernelVariant("softmax", torch.float16, 64)
    row_sums = [RowSum("surprisal"), RowSum("distance", 3), RowMaxScore()]
    (launch,) = triton_pass.plan_launches(base, row_sums, has_stats=False)
    assert launch.variant.kernel == "softmax" and launch.offset == 3
    assert launch.variant.row_sums == {"surprisal", "distance", "max_score"}
    (launch,) = triton_pass.plan_launches(base, row_sums, has_stats=True)
    assert launch.variant.kernel == "measure"
    grids = [CellReduction((4, 4), "sum"), CellReduction((8, 2), "max")]
    shares = [RowSum("one", intervals=((0, 1),)), RowSum("one", intervals=((2, 5), (7, 9)))]
    wanted = [*row_sums, *grids, *shares, ColumnSum(), RowTopK(3), RowTopK(5), RowSum("distance", -1)]
    statistics, one, two = triton_pass.plan_launches(base, [*wanted, *wanted], has_stats=False)
    assert statistics.accumulators == [] and statistics.variant == base
    assert {*one.accumulators} | {*two.accumulators} == {*wanted}
    assert (one.offset, two.offset, one.cells, two.cells) == (3, -1, (4, 4), (8, 2))
    assert one.shares == (((0, 1),), ((2, 5), (7, 9))) and one.variant.columns
    assert two.variant.cells == "max" and not two.variant.columns and two.shares == ()
    assert one.variant.top_k == 0 and two.variant.top_k == 8  # the one with fewer row sums


def test_few_largest_weights_share_the_launch_of_the_usual_measures():
    base = KernelVariant("softmax", torch.float16, 64)
    usual = [RowSum("surprisal"), RowSum("distance"), ColumnSum(), CellReduction((4, 4), "sum")]
    (launch,) = triton_pass.plan_launches(base, [*usual, RowTopK(3), RowTopK(5)], has_stats=True)
    assert launch.variant.top_k == 8 and launch.variant.columns and launch.variant.cells == "sum"
    _, launch = triton_pass.plan_launches(base, [*usual, RowTopK(9)], has_stats=True)
    assert launch.variant == KernelVariant("measure", torch.float16, 64, top_k=16)
    _, launch = triton_pass.plan_launches(base, [*usual, RowSum("position"), RowTopK(1)], has_stats=True)
    assert launch.variant == KernelVariant("measure", torch.float16, 64, top_k=1)
    statistics, launch = triton_pass.plan_launches(base, [RowTopK(64)], has_stats=False)
    assert statistics.variant == base and launch.variant.top_k == 64
    assert triton_pass.plan_launches(base, [], has_stats=True) == []
    variant = KernelVariant("measure", torch.float16, 64, columns=True)
    planned = triton_pass.PlannedLaunch(variant, [ColumnSum()], offset=0, shares=(), cells=(1, 1))
    assert triton_pass.plan_launches(base, [ColumnSum()], has_stats=True) == [planned]


def test_statistics_that_are_known_are_not_computed_again(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_pass, "plan_launches", lambda *_, has_stats: asked.append(has_stats) or [])
    monkeypatch.setattr(triton_pass, "Launcher", lambda _: None)
    problem = regard.attention(*torch.zeros(2, 3, 4, dtype=torch.float16)).problem
    known = torch.zeros(1, 3)
    assert triton_pass.accumulate(problem, [], known, known) == ([], known, known)
    assert asked == [True]


@pytest.mark.parametrize(
    ("value", "is_planned"),
    [
        (torch.zeros(1, 300, 128, dtype=torch.float16), True),
        (torch.zeros(1, 100, 129, dtype=torch.float16), False),
        (torch.zeros(1, 100, 0, dtype=torch.float16), False),
        (torch.zeros(1, 100, 64, dtype=torch.bfloat16), False),
    ],
    ids=["more keys than the limit of value_dim", "value_dim too large", "no value_dim", "another dtype"],
)
def test_a_flash_loop_takes_values_of_its_dtype_and_a_limited_width(value, is_planned, monkeypatch):
    query, key = (torch.zeros(n, 64, dtype=torch.float16) for n in (5, value.shape[1]))
    problem = regard.attention(query, key).problem
    monkeypatch.setattr(triton_pass, "describe_pass", lambda _: "triton pass")
    name = triton_pass.describe_product(problem, value, [RowSum("surprisal")])
    assert name == ("triton flash loop" if is_planned else "")


@pytest.mark.parametrize("rows", [1, 2, 1000, 1 << 20, (1 << 24) - 1])
def test_integers_hold_the_sum_of_a_column(rows):
    assert rows * count_units(rows) < 2**62


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_check():
    assert find_target(torch.device("cuda", 0)) == "" and check_kernels("cuda") == []


def test_each_variant_of_a_device_is_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(triton_check, "find_target", lambda device: "sm90")
    monkeypatch.setattr(
        triton_check,
        "_check_variant",
        lambda variant, device: checked.append((variant, device)) or {"passed": True},
    )
    reports = check_kernels("cuda", head_dims=(64, 128), dtypes=(torch.bfloat16,))
    variants = [variant for head_dim in (64, 128) for variant in list_variants(torch.bfloat16, head_dim)]
    assert checked == [(variant, "cuda") for variant in variants]
    recorded = json.loads(RESOURCES_FILE.read_text("utf-8"))["kernels"]["sm90"]
    assert reports == [
        {
            "passed": True,
            "recorded_registers": recorded[variant.name]["registers"],
            "recorded_spills": recorded[variant.name]["spills"],
        }
        for variant in variants
    ]


def test_the_pass_is_not_used_on_the_cpu():
    query = torch.ones((1, 4, 8), dtype=torch.float16)
    A = regard.attention(query, query)
    assert triton_pass.describe_pass(A.problem) == "" and triton_pass.describe_fault(query.device) == ""
