"""Check a device: generated cases in several settings, the conventions of its operators, compiled kernels, and speed.

`regard selfcheck --device cuda` prints the result, in about two minutes. The kernels for GPUs were written without one,
so this is the first thing to run on a machine that has one.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from regard.testing.cases.engine_check import ENGINES, compute_bounds, compute_results
from regard.testing.cases.factors import FACTORS, Case
from regard.testing.cases.generate import draw_cases
from regard.testing.cases.inputs import build_inputs
from regard.testing.device_conventions import describe_conventions
from regard.testing.device_speed import measure_speed
from regard.tiling import use_tile_sizes

TILE = 16
SMALL_TILES = {"rows": 64, "columns": 32, "mask_rows": 64, "mask_tile_rows": 72, "joined_columns": 48}
MAX_FAILURES = 3  # shown for each setting; all are counted
CASE_SECONDS = 75.0  # after which no further case is drawn
LENGTHS, CPU_LENGTHS = (4096, 32768), (512,)  # to time


def check_device(
    device: str,
    num_cases: int = 300,
    seed: int = 0,
    *,
    lengths: Sequence[int] | None = None,
    max_seconds: float | None = None,
) -> dict[str, Any]:
    """Compare a device with the definition, and describe it.

    Args:
        device: Device of torch, such as "cuda" or "mps".
        num_cases: Number of generated cases. Each runs with the fused kernels and with the block loop: as it is, under
            autocast to bfloat16, and with products of float32 numbers that round their inputs (TF32).
        seed: Seed of the draw.
        lengths: Numbers of tokens to time; empty to time nothing. Default: 4,096 and 32,768; 512 on the CPU.
        max_seconds: Seconds after which no further case is drawn. Default: 75.

    Returns:
        A dictionary for JSON: "device", "kernels", "conventions", "compiled_kernels", "cases", "speed", "seconds", and
        "problems", what is wrong, one sentence each. It holds no paths and no names of the machine or the user.

    Raises:
        RuntimeError: If torch cannot use the device; an AssertionError if it was not built for it.

    >>> report = check_device("cpu", num_cases=2, lengths=())
    >>> report["problems"], sorted({run["setting"] for run in report["cases"]})
    ([], ['TF32', 'as it is', 'autocast'])
    """
    import torch

    start = time.perf_counter()
    torch.zeros(1, device=device)  # raises if there is no such device
    kernels = list(check_kernels(torch.device(device).type))
    compiled = _check_compiled_kernels(device)
    cases = _run_cases(device, num_cases, seed, CASE_SECONDS if max_seconds is None else max_seconds)
    conventions = describe_conventions(torch.device(device).type)
    problems = [
        f"kernel {kernel['name']} on {kernel['device']}: {kernel['cause']}"
        for kernel in (*kernels, *compiled)
        if kernel["cause"]
    ]
    problems += [
        f"{run['failed']} of {run['count']} cases failed: {run['engine']}, {run['setting']}"
        for run in cases
        if run["failed"]
    ]
    problems += [f"{entry['operator']}: {problem}" for entry in conventions for problem in entry["problems"]]
    return {
        "device": describe_device(device),
        "kernels": kernels,
        "compiled_kernels": compiled,
        "conventions": conventions,
        "cases": cases,
        "speed": measure_speed(device, _choose_lengths(device) if lengths is None else lengths),
        "problems": problems,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _choose_lengths(device: str) -> tuple[int, ...]:
    return CPU_LENGTHS if device.startswith("cpu") else LENGTHS


def describe_device(device: str) -> dict[str, Any]:
    """Describe a device: its model, its memory, and what decides which kernels run on it.

    Args:
        device: Device of torch.
    """
    import torch

    from regard.engines.torch_precision import has_float64

    found = torch.device(device)
    description: dict[str, Any] = {"type": found.type, "has_float64": has_float64(found)}
    if found.type == "cuda":
        properties = torch.cuda.get_device_properties(found)
        description |= {
            "model": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "architecture": getattr(properties, "gcnArchName", f"sm{properties.major}{properties.minor}"),
            "gigabytes": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
        }
    return description


def check_kernels(device_type: str) -> Iterator[dict[str, Any]]:
    """Check every fused kernel of a device type, also those that are not needed.

    Args:
        device_type: "cpu", "cuda", …

    Yields:
        The name of the kernel, its device, whether its results were right, and the cause if not.
    """
    from dataclasses import replace

    from regard.engines.torch_kernels import KERNELS, find_fault

    for kernel in KERNELS.get(device_type, ()):
        for variant in (replace(kernel, alternatives={}), *kernel.alternatives.values()):
            faults = (find_fault(variant, device_type, groups) for groups in (1, 2))
            cause = next(filter(None, faults), "")
            yield {"name": variant.name, "device": device_type, "passed": not cause, "cause": cause}


def _check_compiled_kernels(device: str) -> list[dict[str, Any]]:
    """Check the kernels that Triton compiles; empty without Triton, or on a device that it does not compile for."""
    if importlib.util.find_spec("triton") is None or not device.startswith("cuda"):
        return []
    try:
        module = importlib.import_module("regard.engines.triton_check")
    except ImportError as error:
        return [{"name": "Triton", "device": device, "passed": False, "cause": f"ImportError: {error}"}]
    return list(module.check_kernels(device))


# Cases


@contextmanager
def _use_tf32() -> Iterator[None]:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def list_settings(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """List the settings that results must not depend on.

    Args:
        device: Device of torch.
    """
    import torch

    device_type = torch.device(device).type
    return {
        "as it is": nullcontext,
        "autocast": lambda: torch.autocast(device_type, dtype=torch.bfloat16),
        "TF32": _use_tf32,
    }


def _run_cases(device: str, num_cases: int, seed: int, max_seconds: float) -> list[dict[str, Any]]:
    """Run each case on the engines of torch in every setting; its definition is computed once."""
    has_bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
    has_wide = describe_device(device)["has_float64"]
    absent = {"bfloat16" if not has_bfloat16 else "", "float64" if not has_wide else ""}
    dtypes = [dtype for dtype in FACTORS["dtype"] if dtype not in absent]
    settings = list_settings(device)
    runs: dict[tuple[str, str], dict[str, Any]] = {
        (engine, setting): {
            "engine": engine, "setting": setting, "count": 0, "failed": 0, "failures": [], "largest_share": 0.0,
            "seconds": 0.0,
        }
        for setting in settings
        for engine in ENGINES[1:]
    }  # fmt: skip
    stop = time.perf_counter() + max_seconds
    for case, is_possible in draw_cases(num_cases, seed, TILE, dtypes):
        if not is_possible:
            continue
        if time.perf_counter() > stop:
            break
        inputs = build_inputs(case, TILE)
        assert inputs is not None
        bounds = compute_bounds(case, inputs)
        for (engine, setting), run in runs.items():
            started = time.perf_counter()
            with settings[setting]():
                share, message = _check_case(case, inputs, bounds, engine, device)
            run["count"] += 1
            run["failed"] += bool(message)
            run["failures"] += [message] if message and len(run["failures"]) < MAX_FAILURES else []
            run["largest_share"] = max(run["largest_share"], round(share, 3))
            run["seconds"] += time.perf_counter() - started
    return [{**run, "seconds": round(run["seconds"], 1)} for run in runs.values()]


def _check_case(case: Case, inputs: Any, bounds: Any, engine: str, device: str) -> tuple[float, str]:
    """Return the largest error as a share of what is allowed, and what is wrong, or ""."""
    from regard.engines.torch_precision import has_ieee_products

    # The CPU's fused kernel rounds its products as the setting says, as the public function does; only then.
    is_cpu_float32 = device == "cpu" and engine == ENGINES[1] and case.dtype == "float32"
    is_rounded = is_cpu_float32 and not has_ieee_products("cpu")
    share = 0.0
    try:
        with use_tile_sizes(**SMALL_TILES):
            for bound, result in compute_results(inputs, bounds, engine, device):
                if is_rounded and bound.what == "output":
                    continue
                bound.check(result)
                share = max(share, bound.compute_share(result))
    except Exception as error:
        return share, " ".join(f"{case}: {type(error).__name__}: {error}".split())
    return share, ""
