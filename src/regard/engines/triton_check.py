"""Compare the compiled Triton kernels with the definition in float64, on a matrix that has every kind of block."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.engines.triton_launch import (
    ROW_SUMS,
    KernelVariant,
    Launcher,
    PassInputs,
    choose_options,
    find_target,
)
from regard.frame import Frame
from regard.masks import causal, first, sliding_window
from regard.types import IntArray

Tensor = Any  # torch's types are not checked

RESOURCES_FILE = Path(__file__).with_name("triton_resources.json")

# Largest error of a result, relative to its largest number. Scores of half-precision inputs are float32 sums.
MAX_ERROR = 2e-5
# An output is the sum of weights that were rounded to the dtype of the value.
MAX_OUTPUT_ERROR = {torch.float32: 2e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}

_ROWS, _KV_LEN = 150, 217
_SHARES = (((0, 1),), ((3, 70), (100, 217)))
_CELLS = (7, 5)
_OFFSET = _KV_LEN - _ROWS


def list_variants(dtype: Any, head_dim: int) -> list[KernelVariant]:
    """List the variants that stand for all others: least and most of each kernel, and the usual questions."""
    softmax = KernelVariant("softmax", dtype, head_dim)
    measure = KernelVariant("measure", dtype, head_dim)
    usual = replace(measure, row_sums=frozenset(("surprisal", "distance")), columns=True, cells="sum")
    return [
        softmax,
        replace(softmax, value_dim=head_dim, row_sums=frozenset(("surprisal",))),
        replace(softmax, value_dim=head_dim, row_sums=frozenset(ROW_SUMS)),
        replace(measure, columns=True),
        usual,
        replace(usual, top_k=8),
        replace(measure, row_sums=frozenset(ROW_SUMS), shares=True, columns=True, cells="max"),
        replace(measure, top_k=64),
    ]


def check_kernels(
    device: Any,
    head_dims: tuple[int, ...] = (64, 128),
    dtypes: tuple[Any, ...] = (torch.float16, torch.bfloat16),
) -> list[dict[str, Any]]:
    """Compile kernels for a device, run each twice, and compare the results with the definition in float64.

    Returns:
        For each kernel its name, the device, whether it passed, the cause if not, the largest error as a share of what
        is allowed, whether both runs gave the same bits, the rows of a block, the registers and spilled bytes of a
        thread, and the recorded ones; None where there are none. Empty if the kernels are not for this device.
    """
    reports: list[dict[str, Any]] = []
    target = find_target(torch.device(device))
    if not target:
        return reports
    for dtype in dtypes:
        for head_dim in head_dims:
            for variant in list_variants(dtype, head_dim):
                reports.append({**_check_variant(variant, device), **_read_recorded(target, variant)})
    return reports


def find_fault(variant: KernelVariant, device: Any) -> str:
    """Return what is wrong with the results of a variant; empty if they are right and two runs give the same bits."""
    cause: str = _check_variant(variant, device)["cause"]
    return cause


def _read_recorded(target: str, variant: KernelVariant) -> dict[str, Any]:
    """Return the registers and spills of the same kernel when it was compiled ahead of time."""
    recorded = json.loads(RESOURCES_FILE.read_text("utf-8"))["kernels"] if RESOURCES_FILE.exists() else {}
    # The two half-precision dtypes take the same registers up to a few; bfloat16 is recorded.
    found = recorded.get(target, {}).get(replace(variant, dtype=torch.bfloat16).name, {})
    return {"recorded_registers": found.get("registers"), "recorded_spills": found.get("spills")}


def _check_variant(variant: KernelVariant, device: Any) -> dict[str, Any]:
    report: dict[str, Any] = {
        "name": variant.name,
        "device": str(device),
        "passed": False,
        "cause": "",
        "error": math.nan,
        "bit_equal": False,
        "block_rows": choose_options(variant, find_target(torch.device(device))).block_rows,
        "registers": None,
        "spills": None,
    }
    try:
        inputs, value = _make_inputs(variant, device)
        exact = compute_exact(
            inputs, value, inputs.key_index, _OFFSET, _SHARES, _CELLS, max(variant.top_k, 1)
        )
        results, compiled = _run(variant, inputs, value, exact)
        again, _ = _run(variant, inputs, value, exact)
        report["registers"], report["spills"] = (
            getattr(compiled, name, None) for name in ("n_regs", "n_spills")
        )
    except Exception as error:  # a compiler may raise anything; the block loop runs instead
        report["cause"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return report
    report["bit_equal"] = all(torch.equal(results[name], again[name]) for name in results)
    shares = dict(compare(results, exact, variant))
    worst = max(shares, key=lambda name: shares[name])
    report["error"] = shares[worst]
    if not shares[worst] <= 1:
        report["cause"] = f"{worst} has {shares[worst]:.1f} times the error allowed"
    elif not report["bit_equal"]:
        report["cause"] = "two runs give different bits"
    report["passed"] = not report["cause"]
    return report


def _run(
    variant: KernelVariant, inputs: PassInputs, value: Tensor, exact: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Any]:
    launcher = Launcher(inputs)
    if variant.kernel == "softmax":
        own_value = value if variant.value_dim else None
        return launcher.run_softmax(variant, own_value, inputs.key_index, offset=_OFFSET)
    device = inputs.query.device
    return launcher.run_measures(
        variant, exact["max"].float().to(device), exact["sum"].to(device), offset=_OFFSET, shares=_SHARES, cells=_CELLS
    )  # fmt: skip


def _make_inputs(variant: KernelVariant, device: Any) -> tuple[PassInputs, Tensor]:
    """Make a matrix of two heads that share a key head, with full, partial and empty blocks and a sink.

    The window of the first head leaves blocks empty, that of the second is so wide that it has full ones.
    """
    heads, width = 2, max(variant.head_dim, variant.value_dim)
    numbers = torch.arange((heads * _ROWS + 2 * _KV_LEN) * width, dtype=torch.float64)
    # Neighbouring numbers of a sine with a large step look random; products are of the size of head_dim / 2.
    wave = (numbers * 12.9898).sin().reshape(-1, width).to(variant.dtype).to(device)
    query = wave[: heads * _ROWS].reshape(heads, _ROWS, width)[..., : variant.head_dim]
    key, value = wave[heads * _ROWS :].reshape(2, 1, _KV_LEN, width)
    mask = causal("lower_right") & (sliding_window([60, 200], align="lower_right") | first(3))
    inputs = PassInputs(
        query, key[..., : variant.head_dim], np.arange(heads), np.zeros(heads, np.int64), np.arange(_ROWS),
        Frame((heads,), _ROWS, _KV_LEN), mask, 4 / variant.head_dim**0.5, torch.tensor([0.5, -math.inf], device=device),
    )  # fmt: skip
    return inputs, value[..., : max(variant.value_dim, 1)]


def compute_exact(
    inputs: PassInputs,
    value: Tensor,
    value_index: IntArray,
    offset: int,
    shares: tuple[tuple[tuple[int, int], ...], ...],
    cells: tuple[int, int],
    top_k: int,
) -> dict[str, Tensor]:
    """Compute every result of the kernels by its definition, in float64 on the CPU.

    Args:
        inputs: The matrix.
        value: (own pairs, kv_len, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).
        offset: Added to the position of a row in "distance".
        shares: Intervals of keys of each share.
        cells: Number of cells along the rows and the columns.
        top_k: Number of largest weights.

    Returns:
        The results by name, as `Launcher` returns them, and "weights", (pairs, rows, kv_len).
    """
    query, key, value = (array.detach().double().cpu() for array in (inputs.query, inputs.key, value))
    scores = inputs.scale * query[inputs.query_index] @ key[inputs.key_index].mT
    rows, kv_len = scores.shape[1:]
    if inputs.mask is not None:
        allowed = inputs.mask.allows(inputs.frame, inputs.positions, np.arange(kv_len), np)
        scores = scores.masked_fill(~torch.from_numpy(np.array(allowed)), -math.inf)
    sink = torch.full((len(scores),), -math.inf) if inputs.sink is None else inputs.sink.cpu()
    sink = sink.double()[:, None].expand(scores.shape[:2])
    largest = torch.maximum(scores.amax(-1), sink)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    powers, sink_power = (scores - shift[..., None]).exp(), (sink - shift).exp()
    total = powers.sum(-1) + sink_power
    weights = powers / torch.where(total == 0, 1.0, total)[..., None]
    i, j = torch.from_numpy(np.asarray(inputs.positions))[:, None], torch.arange(kv_len)
    row_cell, column_cell = torch.arange(rows) * cells[0] // rows, j * cells[1] // kv_len
    cell_of = (row_cell[:, None] * cells[1] + column_cell).flatten().expand(len(weights), -1)
    empty = torch.zeros((len(weights), cells[0] * cells[1]), dtype=torch.float64)
    flat = weights.flatten(1)
    order = torch.sort(weights, dim=-1, descending=True, stable=True)
    return {
        "max": largest,
        "sum": total,
        "lse": torch.where(total == 0, -math.inf, shift + total.log()),
        "output": weights @ value[value_index],
        "one": weights.sum(-1),
        "surprisal": -torch.special.xlogy(weights, weights).sum(-1),
        "distance": (weights * (i + offset - j).abs()).sum(-1),
        "position": (weights * j).sum(-1),
        "max_score": scores.amax(-1),
        "shares": torch.stack([_sum_intervals(weights, share) for share in shares]),
        "columns": weights.sum(-2),
        "cells sum": empty.scatter_add(1, cell_of, flat).reshape(-1, *cells),
        "cells max": empty.scatter_reduce(1, cell_of, flat, "amax").reshape(-1, *cells),
        "top_values": order.values[..., :top_k],
        "weights": weights,
    }


def _sum_intervals(weights: Tensor, intervals: tuple[tuple[int, int], ...]) -> Tensor:
    """Compute the weight of each row on the keys of some intervals."""
    return torch.stack([weights[..., :0].sum(-1), *(weights[..., a:b].sum(-1) for a, b in intervals)]).sum(0)


def compare(
    results: dict[str, Tensor], exact: dict[str, Tensor], variant: KernelVariant
) -> Iterator[tuple[str, float]]:
    """Compare results with the definition.

    Args:
        results: Results of a launch.
        exact: Result of `compute_exact`.
        variant: The variant that was launched.

    Yields:
        The name of each result, and its largest error as a share of what is allowed.
    """
    found = {name: array.double().cpu() for name, array in results.items()}
    if "max" in found:  # alone, both may be rounded together
        total = found.pop("sum")
        found["lse"] = torch.where(total == 0, -math.inf, found.pop("max") + total.log())
    keys = found.pop("top_keys", None)
    for name, array in found.items():
        expected = exact[f"cells {variant.cells}"] if name == "cells" else exact[name]
        if name == "top_values":
            expected = expected[..., : array.shape[-1]]
        limit = MAX_OUTPUT_ERROR[variant.dtype] if name == "output" else MAX_ERROR
        yield name, _find_error(array, expected, limit)
    if keys is not None:
        at_keys = exact["weights"].gather(-1, keys.long())
        yield (
            "top_keys",
            _find_error(torch.where(found["top_values"] > 0, at_keys, 0.0), found["top_values"], MAX_ERROR),
        )


def _find_error(array: Tensor, expected: Tensor, limit: float) -> float:
    """Return the largest error as a share of `limit` times the largest number, or times 1 if that is larger."""
    if array.shape != expected.shape:
        return math.inf
    equal = array == expected  # −inf as well
    size = torch.where(expected.isfinite(), expected.abs(), 0.0).amax().clamp(min=1.0)
    error = torch.where(equal, 0.0, (array - expected).abs()).amax() / (size * limit)
    return math.inf if math.isnan(float(error)) else float(error)
