"""Run cases of the case matrix on the doubles of CUDA's operators and on a pretend device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from regard import Spread, causal
from regard.core.attention import attention
from regard.testing import Case, build_inputs, draw_cases
from regard.testing.cases import compute_bounds, compute_results, to_engine
from regard.tiling import use_tile_sizes
from tests.helpers import pretend_device

TILE = 16


def small_tiles(case: Case) -> dict[str, int]:
    """Tiles so small that every length is split into several, but not into so many that they only repeat."""
    rows = 4 * TILE if case.q_len == 257 else TILE
    return {
        "rows": rows,
        "columns": 2 * TILE,
        "entries": 1 << 14,
        "cached_scores": 1 << 12,
        "mask_rows": rows,
        "mask_tile_rows": rows + 8,
        "joined_columns": 3 * TILE,
        "topk_columns": 4 * TILE,
    }


def draw(count: int, seed: int, dtypes: Any = None) -> list[Case]:
    """Draw possible cases."""
    options = {} if dtypes is None else {"dtypes": dtypes}
    return [case for case, possible in draw_cases(count, seed, TILE, **options) if possible]


def run_case(case: Case, engine: str, device: str = "cpu") -> str:
    """Return what is wrong with the results of a case; empty if nothing is."""
    inputs = build_inputs(case, TILE)
    assert inputs is not None
    try:
        with use_tile_sizes(**small_tiles(case)):
            for bound, result in compute_results(inputs, compute_bounds(case, inputs), engine, device):
                bound.check(result)
    except Exception as error:
        return f"{case}\n    {type(error).__name__}: {error}"
    return ""


def run_backward(case: Case, device: str = "cpu") -> str:
    """Differentiate the output of a case; return what was raised, or whether a gradient is missing."""
    inputs = build_inputs(case, TILE)
    assert inputs is not None
    try:
        with use_tile_sizes(**small_tiles(case)):
            gradients = _differentiate(inputs, device)
    except Exception as error:
        return f"{case}\n    {type(error).__name__}: {error}"
    return "" if all(gradient is not None for gradient in gradients) else f"{case}\n    a gradient is missing"


def _differentiate(inputs: Any, device: str) -> list[Any]:
    tensors = [to_engine(x, "torch fused", device) for x in (inputs.query, inputs.key, inputs.value)]
    for tensor in tensors:
        tensor.requires_grad_()
    output = attention(*tensors[:2], **inputs.arguments) @ tensors[2]
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(output.shape, generator=generator).to(device=output.device, dtype=output.dtype)
    if output.requires_grad:  # not if an axis is empty
        (output * direction).sum().backward()
    return [tensor.grad for tensor in tensors if output.requires_grad]


# On the pretend device, in a process of its own: torch counts the devices for gradients at the first backward pass.


def run_in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a process in which no gradient has been computed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def list_failures_on_device(count: int, seed: int, has_float64: bool) -> list[str]:
    """Run cases forward and backward on the pretend device; return what is wrong."""
    torch.set_num_threads(1)
    failures = []
    dtypes = None if has_float64 else ["float32", "float16", "bfloat16"]
    with pretend_device.use_device(has_float64=has_float64):
        for case in draw(count, seed, dtypes):
            failures += filter(None, [run_case(case, "torch block loop", pretend_device.DEVICE)])
            failures += filter(None, [run_backward(case, pretend_device.DEVICE)])
    return failures


def differentiate_measures(device: str) -> dict[str, Any]:
    """Return the gradient of the query of several results, as NumPy arrays."""
    found = {}
    for name, call in {
        "product": lambda A, v: A @ v,
        "entropy": lambda A, v: A.entropy(),
        "received": lambda A, v: A.sum(-2)[..., 0],
        "lse": lambda A, v: A.lse,
        "cells": lambda A, v: A.coarsen(8, "mean")[..., 0],
        "top": lambda A, v: A.topk(3).values,
        "spread": lambda A, v: A.measure(Spread()).spread,
    }.items():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, 2, 40, 8, generator=generator).to(device).requires_grad_() for _ in range(3)
        )
        call(attention(q, k, mask=causal()), v).sum().backward()
        found[name] = q.grad.cpu().numpy()
    return found


def differentiate_on_device() -> dict[bool, dict[str, Any]]:
    """Return the gradients of `differentiate_measures` on the pretend device, with float64 and without it."""
    found = {}
    for has_float64 in (True, False):
        with pretend_device.use_device(has_float64=has_float64):
            found[has_float64] = differentiate_measures(pretend_device.DEVICE)
    return found
