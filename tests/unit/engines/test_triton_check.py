"""What surrounds the Triton kernels, without Triton: how results are checked, sorted and described."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard.engines import triton_check, triton_launch, triton_pass  # noqa: E402
from regard.engines.triton_check import find_fault, list_variants  # noqa: E402
from regard.engines.triton_launch import BLOCK_KEYS, KernelVariant, choose_options  # noqa: E402
from regard.measures import MaxScore  # noqa: E402

VARIANTS = list_variants(torch.bfloat16, 24)
SHARES = (((0, 1),), ((3, 70), (100, 217)))
CELLS = (7, 5)
OFFSET = 67


def answer(variant, exact):
    """The results of a kernel whose only error is that of float32."""
    names = [*variant.row_sums, *["shares"] * variant.shares, *["columns"] * variant.columns]
    if variant.kernel == "softmax":
        names += ["max", "sum", *["output"] * bool(variant.value_dim)]
    found = {name: exact[name].float() for name in names}
    if variant.cells:
        found["cells"] = exact[f"cells {variant.cells}"].float()
    if variant.top_k:
        order = exact["weights"].sort(dim=-1, descending=True, stable=True)
        found["top_values"] = order.values[..., : variant.top_k].float()
        found["top_keys"] = order.indices[..., : variant.top_k].int()
    return found


@pytest.fixture
def answers(monkeypatch):
    """Changes of the results, one for each run of a kernel; None for none."""
    changes = []

    def run(variant, inputs, value, exact):
        results = answer(variant, exact)
        if changes and (change := changes.pop(0)):
            change(results)
        return results, SimpleNamespace(n_regs=40, n_spills=2)

    monkeypatch.setattr(triton_check, "_run", run)
    monkeypatch.setattr(triton_check, "find_target", lambda device: {"cpu": "sm90"}[device.type])
    return changes


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_right_results_pass(variant, answers):
    report = triton_check._check_variant(variant, "cpu")
    assert 0 < report.pop("error") < 0.1
    assert report == {
        "name": variant.name,
        "device": "cpu",
        "passed": True,
        "cause": "",
        "bit_equal": True,
        "block_rows": choose_options(variant, "sm90").block_rows,
        "registers": 40,
        "spills": 2,
    }
    assert find_fault(variant, "cpu") == ""


def add(name, error, at=(1, 5)):
    """Return a change of one number of a result."""

    def change(results):
        results[name][at] += error

    return change


def test_the_largest_error_is_named(answers):
    def change(results):
        add("columns", 1.0)(results)
        add("surprisal", 0.01)(results)

    answers += [change, change]
    report = triton_check._check_variant(VARIANTS[4], "cpu")
    assert not report["passed"] and report["bit_equal"] and report["error"] > 1
    assert report["cause"] == f"columns has {report['error']:.1f} times the error allowed"


@pytest.mark.parametrize("name", ["cells", "top_values", "top_keys", "distance"])
@pytest.mark.parametrize("error", [1.0, math.nan])
def test_a_wrong_number_is_found_wherever_it_is(name, error, answers):
    at = (1, 2, 2) if name in ("cells", "top_values", "top_keys") else (1, 5)
    # Key 0 has next to no weight in most rows.
    change = (lambda results: results[name].zero_()) if name == "top_keys" else add(name, error, at)
    answers += [change, change]
    assert f"{name} has " in find_fault(VARIANTS[5], "cpu")


def test_another_shape_is_a_fault(answers):
    answers += [lambda results: results.update(columns=results["columns"][:, 1:])] * 2
    assert find_fault(VARIANTS[3], "cpu") == "columns has inf times the error allowed"


def test_two_runs_must_give_the_same_bits(answers):
    answers += [None, add("columns", 1e-6)]
    report = triton_check._check_variant(VARIANTS[3], "cpu")
    assert not report["passed"] and not report["bit_equal"] and report["error"] <= 1
    assert report["cause"] == "two runs give different bits"


def test_what_a_compiler_raises_is_the_cause(answers):
    def fail(results):
        raise RuntimeError("no such instruction\nin line 3")

    answers.append(fail)
    report = triton_check._check_variant(VARIANTS[0], "cpu")
    assert report["cause"] == "RuntimeError: no such instruction" and not report["passed"]
    assert math.isnan(report["error"]) and report["registers"] is None


def test_the_definition_agrees_with_the_matrix():
    inputs, value = triton_check._make_inputs(VARIANTS[2], "cpu")
    exact = triton_check.compute_exact(inputs, value, inputs.key_index, OFFSET, SHARES, CELLS, 9)
    A = regard.attention(
        inputs.query.double(), inputs.key.double().expand(2, -1, -1), mask=inputs.mask, scale=inputs.scale,
        sink=inputs.sink,
    )  # fmt: skip
    weights, rows, keys = A.to_dense(), torch.arange(150)[:, None], torch.arange(217)
    expected = {
        "weights": weights,
        "lse": A.lse,
        "output": A @ value.double().expand(2, -1, -1),
        "one": weights.sum(-1),
        "surprisal": torch.special.entr(weights).sum(-1),
        "distance": (weights * (rows + OFFSET - keys).abs()).sum(-1),
        "position": (weights * keys).sum(-1),
        "max_score": A.measure(MaxScore()).max_score,
        "shares": torch.stack([weights[..., :1].sum(-1), weights[..., [*range(3, 70), *range(100, 217)]].sum(-1)]),
        "columns": weights.sum(-2),
        "cells sum": A.coarsen(CELLS, "sum"),
        "cells max": A.coarsen(CELLS, "max"),
        "top_values": A.topk(9).values,
    }  # fmt: skip
    assert exact.keys() - expected.keys() == {"max", "sum"}
    torch.testing.assert_close(exact["max"] + exact["sum"].log(), A.lse)
    for name, array in expected.items():
        torch.testing.assert_close(exact[name], array, msg=lambda text, name=name: f"{name}: {text}")


def test_a_faulty_kernel_turns_the_pass_off_for_its_device(monkeypatch):
    device, faults = torch.device("cpu"), {VARIANTS[0]: "", VARIANTS[1]: "wrong"}
    asked = []
    monkeypatch.setattr(triton_pass, "_FAULTS", {})
    monkeypatch.setattr(triton_pass, "_CHECKED", set())
    monkeypatch.setattr(
        triton_check, "find_fault", lambda variant, on: asked.append((variant, on)) or faults[variant]
    )
    assert triton_pass._is_right(VARIANTS[0], device) and triton_pass._is_right(VARIANTS[0], device)
    assert not triton_pass._is_right(VARIANTS[1], device)
    assert not triton_pass._is_right(VARIANTS[0], device)
    assert asked == [(VARIANTS[0], device), (VARIANTS[1], device)]  # each once
    assert triton_pass.describe_fault(device) == f"Triton pass off: {VARIANTS[1].name}: wrong"


@pytest.mark.parametrize(
    ("largest", "total", "is_finite"),
    [
        ([0.0, -math.inf], [1.0, 0.0], True),
        ([0.0, 1.0], None, True),
        ([math.inf, 1.0], None, False),
        ([math.nan, 1.0], [1.0, 1.0], False),
        ([0.0, 1.0], [1.0, math.nan], False),
    ],
)
def test_statistics_are_checked_for_numbers(largest, total, is_finite):
    total = None if total is None else torch.tensor(total)
    assert triton_pass._is_finite(torch.tensor(largest), total) is is_finite


def test_largest_weights_are_sorted_by_weight_then_key():
    values = torch.tensor([[0.25, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.0]])
    keys = torch.tensor([[7, 3, 9, 2], [5, 6, 7, 8]], dtype=torch.int32)
    values, keys = triton_launch._sort_largest(values, keys)
    assert values.dtype == torch.float64 and keys.dtype == torch.int64
    assert values.tolist() == [[0.5, 0.25, 0.25, 0.0], [0.0] * 4]
    assert keys.tolist() == [[9, 2, 7, 0], [0] * 4]


def test_rows_are_copied_only_if_their_numbers_are_apart():
    whole = torch.arange(24.0).reshape(2, 3, 4)
    apart = whole.mT
    for array in (whole, whole[:, ::2], whole[..., :2], apart[..., :1]):
        assert triton_launch._make_rows_contiguous(array) is array
    for array in (apart, apart[:, :1], whole[..., ::2]):
        copied = triton_launch._make_rows_contiguous(array)
        assert copied.stride(-1) == 1 and torch.equal(copied, array)


def test_constants_of_a_kernel():
    softmax = KernelVariant("softmax", torch.float16, 24, value_dim=40, row_sums=frozenset(("position",)))
    common = {"D": 24, "BLOCK_D": 32, "UPCAST": False} | {
        f"HAS_{name}": name == "POSITION"
        for name in ("ONE", "SURPRISAL", "DISTANCE", "POSITION", "MAX_SCORE")
    }
    assert softmax.list_constants() == common | {"VALUE_D": 40, "BLOCK_V": 64, "HAS_OUTPUT": True}
    measure = replace(softmax, kernel="measure", value_dim=0, columns=True, top_k=4)
    for cells in ("", "sum", "max"):
        assert replace(measure, cells=cells).list_constants() == common | {
            "HAS_SHARES": False,
            "HAS_COLUMNS": True,
            "CELL_SUM": cells == "sum",
            "CELL_MAX": cells == "max",
            "TOP_K": 4,
        }


@pytest.mark.parametrize(
    ("target", "head_dim", "value_dim", "top_k", "expected"),
    [
        ("sm90", 64, 64, 0, (128, 8, 2)),
        ("sm90", 65, 0, 8, (64, 8, 2)),
        ("sm90", 64, 128, 0, (64, 8, 2)),
        ("sm90", 64, 0, 9, (64, 4, 2)),
        ("gfx942", 64, 0, 0, (64, 4, 2)),
    ],
)
def test_options_of_a_launch(target, head_dim, value_dim, top_k, expected):
    variant = KernelVariant("softmax", torch.float16, head_dim, value_dim, top_k=top_k)
    assert choose_options(variant, target) == expected


@pytest.mark.parametrize("block_rows", [64, 128])
def test_the_matrix_of_the_check_has_every_kind_of_block(block_rows):
    inputs, _ = triton_check._make_inputs(VARIANTS[0], "cpu")
    allowed = inputs.mask.allows(inputs.frame, inputs.positions, np.arange(217), np)
    blocks = {
        (bool(tile.any()), bool(tile.all()))
        for head in allowed
        for rows in np.array_split(head, range(block_rows, 150, block_rows))
        for tile in np.array_split(rows, range(BLOCK_KEYS, 217, BLOCK_KEYS), axis=1)
    }
    assert blocks == {(False, False), (True, False), (True, True)}
