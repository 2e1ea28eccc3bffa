"""Check a device: generated cases in several settings, the conventions of its operators, compiled kernels, and speed.

`regard selfcheck --device cuda` prints the result, in about two minutes. The kernels for GPUs were written without one,
so this is the first thing to run on a machine that has one.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from regard.testing.cases import ENGINES, draw_bounds, list_dtypes, measure_case

Tensor = Any  # torch is imported when it is used


class Operator(NamedTuple):
    """A private operator, and the conventions that regard relies on."""

    name: str  # in torch.ops.aten
    run: Callable[..., Any]  # of query, key, value (batch, heads, length, dim), is_causal, and a bias or None
    dtype: str
    corner: str | None  # that a causal mask starts from; None if regard makes square causal calls only
    takes_bias: bool


def list_operators(device_type: str) -> list[Operator]:
    """List the operators that regard calls on a device type; empty if it calls none."""
    from regard.engines import torch_cuda, torch_kernels

    def cpu_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor) -> Any:
        return torch_kernels.CPU_FLASH.forward(q, k, v, causal, bias, 1.0)

    def efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor) -> Any:
        run = torch_cuda.aten._scaled_dot_product_efficient_attention
        return run(q, k, v, bias, True, 0.0, causal, scale=1.0)

    def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor) -> Any:
        return torch_cuda.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=1.0)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor) -> Any:
        run = torch_cuda.aten._scaled_dot_product_cudnn_attention
        return run(q, k, v, bias, True, 0.0, causal, False, scale=1.0)

    found = {
        "cpu": [
            Operator("_scaled_dot_product_flash_attention_for_cpu", cpu_flash, "float32", "upper_left", True)
        ],
        "cuda": [
            Operator("_scaled_dot_product_efficient_attention", efficient, "float32", "upper_left", True),
            Operator("_scaled_dot_product_flash_attention", flash, "bfloat16", None, False),
            Operator("_scaled_dot_product_cudnn_attention", cudnn, "bfloat16", None, False),
        ],
    }
    return found.get(device_type, [])


def describe_conventions(device_type: str) -> list[dict[str, Any]]:
    """Describe what the operators of a device type do with calls whose meaning their schemas leave open.

    >>> [entry["causal_corner"] for entry in describe_conventions("cpu")]
    ['upper_left']
    """
    return [dict(_describe_operator(operator, device_type)) for operator in list_operators(device_type)]


def _describe_operator(operator: Operator, device_type: str) -> Iterator[tuple[str, Any]]:
    import torch

    dtype = getattr(torch, operator.dtype)
    tolerance = 1e-5 if operator.dtype == "float32" else 3e-2
    problems: list[str] = []

    def draw(heads: int, length: int, dim: int = 8, wide: Any = None) -> Tensor:
        numbers = torch.arange(heads * length * dim, dtype=torch.float32)
        tensor = (numbers * 0.7 + length).sin().reshape(1, heads, length, dim).to(wide or dtype)
        return tensor.to(device_type)

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None) -> Any:
        try:
            output, lse, *_ = operator.run(q, k, v, causal, bias)
            rows = lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]  # some pad the rows, or add an axis
            return output.cpu().double(), rows.cpu().double(), lse.dtype
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return str(error).splitlines()[0][:120] if str(error) else type(error).__name__

    def define(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.cpu().double() for x in (q, k, v))
        scores = (q @ k.mT).masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    yield "operator", operator.name
    yield "dtype", operator.dtype
    q, k, v = draw(2, 3), draw(2, 5), draw(2, 5)
    plain = run(q, k, v, False)
    if isinstance(plain, str):
        yield "refused", plain
        yield "problems", []  # an operator that does not run is not used
        return
    everything = torch.zeros((3, 5), dtype=torch.bool)
    exact_output, exact_lse = define(q, k, v, everything)
    is_natural = torch.allclose(plain[1], exact_lse, atol=1e-4)
    natural = f"natural logarithm, {str(plain[2]).removeprefix('torch.')}"
    yield "lse", natural if is_natural else "another quantity"
    if not is_natural or not torch.allclose(plain[0], exact_output, atol=tolerance):
        problems.append("output or lse of a plain call is wrong")
    causal = run(q, k, v, True)
    corner = "refused" if isinstance(causal, str) else "neither"
    for name, diagonal in (("upper_left", 1), ("lower_right", 3)) if corner == "neither" else ():
        expected, _ = define(q, k, v, everything.logical_not().triu(diagonal))
        corner = name if torch.allclose(causal[0], expected, atol=tolerance) else corner
    yield "causal_corner", corner
    if operator.corner is not None and corner != operator.corner:
        problems.append(f"a causal mask starts from {corner}, not from {operator.corner}")
    if operator.takes_bias:
        bias = torch.zeros((1, 2, 3, 8), dtype=dtype).to(device_type)[..., :5]  # aligned rows
        bias[:, :, 1] = -math.inf
        masked = run(q, k, v, False, bias)
        yield "empty_row", masked if isinstance(masked, str) else _describe_row(masked)
        if isinstance(masked, str) or float(masked[1][0, 0, 1]) not in (0.0, -math.inf):
            problems.append("a row without live keys has neither an lse of 0 nor of −inf")
    many = draw(4, 5)
    grouped = run(many, k, v, False)
    if not isinstance(grouped, str):
        wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
        expected, _ = define(many, wide_k, wide_v, torch.zeros((5, 5), dtype=torch.bool))
        grouped = "taken" if torch.allclose(grouped[0], expected, atol=tolerance) else "wrong"
    yield "grouped_heads", grouped if grouped in ("taken", "wrong") else "refused"
    for what, dim, wide in (("float64", 8, torch.float64), ("head_dim_3", 3, dtype)):
        try:
            q, k, v = (draw(2, length, dim, wide) for length in (3, 5, 5))
            found = run(q, k, v, False)
        except (RuntimeError, TypeError) as error:  # the device has no such dtype
            found = str(error)
        yield what, "refused" if isinstance(found, str) else "taken"
    yield "problems", problems


def _describe_row(result: Any) -> str:
    output, lse, _ = result
    return f"output {float(output[0, 0, 1, 0]):g}, lse {float(lse[0, 0, 1]):g}"


HEADS, HEAD_DIM = 32, 64
ROUNDS = 5
MAX_SECONDS = 10.0  # after which no further round begins
# An A100 of 80 GB: dense bfloat16 and float32 arithmetic and memory, each at the share that large kernels reach.
FLASH_FLOPS = 312e12 * 0.6
FLOAT32_FLOPS = 19.5e12 * 0.7
BYTES_PER_SECOND = 2.0e12 * 0.75
LAUNCH_SECONDS = 8e-6
# Of the block loop, counted: reads and writes of a tile in float32, and launches, for four measures.
PASSES = 26
LAUNCHES_PER_TILE = 25
# Of the Triton kernel, if instructions were its only limit, at 32,768 tokens.
TRITON_SECONDS = 43e-3


def estimate_ratios(
    length: int, rows: int = 1024, columns: int = 2048, entries: int = 1 << 24
) -> dict[str, float]:
    """Estimate how many times as long as the bare causal kernel regard takes on an A100.

    `A @ value` adds one reduction of the output. The measures add a causal product in float32 and passes over the
    weights in memory, or the launches of the block loop if they take longer.

    >>> {name: round(ratio, 2) for name, ratio in estimate_ratios(32768).items()}
    {'A @ value': 1.0, 'measures, block loop': 58.56, 'measures, Triton': 2.83}
    """
    weights = HEADS * length**2 / 2
    bare = 4 * weights * HEAD_DIM / FLASH_FLOPS
    check = 2 * HEADS * length * HEAD_DIM / BYTES_PER_SECOND + 2 * LAUNCH_SECONDS
    arithmetic = 2 * weights * HEAD_DIM / FLOAT32_FLOPS + PASSES * 4 * weights / BYTES_PER_SECOND
    groups = -(-HEADS // max(1, entries // (min(rows, length) * min(columns, length))))
    tiles = groups * sum(-(-min(start + rows, length) // columns) for start in range(0, length, rows))
    launches = tiles * LAUNCHES_PER_TILE * LAUNCH_SECONDS
    return {
        "A @ value": (bare + check) / bare,
        "measures, block loop": (bare + max(arithmetic, launches)) / bare,
        "measures, Triton": (bare + TRITON_SECONDS * (length / 32768) ** 2) / bare,
    }


def measure_speed(device: str, length: int) -> list[dict[str, Any]]:
    """Time `A @ value` and four measures against `F.scaled_dot_product_attention`: causal, bfloat16, 32 heads of 64.

    The result has milliseconds of the bare kernel and of regard for each kind of call, their ratio, and the ratio that
    was estimated for an A100. A length that does not fit the memory has an "error" instead.
    """
    import torch

    from regard.core.attention import attention
    from regard.masks import causal
    from regard.measures import Coarse, Distance, Entropy, Received

    estimates = estimate_ratios(length)
    common = {"length": length, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    try:
        shape = (3, 1, HEADS, length, HEAD_DIM)
        query, key, value = torch.randn(shape, dtype=torch.bfloat16, device=device).unbind()

        def run_bare() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        def run_product() -> Any:
            return attention(query, key, mask=causal()) @ value

        def run_measures() -> Any:
            matrix = attention(query, key, mask=causal())
            return matrix @ value, matrix.measure(Entropy(), Received(), Distance(), Coarse(64, "mean"))

        kernel = attention(query, key, mask=causal())
        _ = kernel @ value
        plan = attention(query, key, mask=causal()).plan(
            Entropy(), Received(), Distance(), Coarse(64, "mean")
        )
        entries = []
        for what, run, description in (
            ("A @ value", run_product, kernel.kernel),
            ("measures, Triton" if "Triton" in plan else "measures, block loop", run_measures, plan),
        ):
            bare, own = _time_both(run_bare, run, device)
            entries.append({
                **common, "what": what, "runs": description, "bare_ms": round(bare * 1e3, 3),
                "regard_ms": round(own * 1e3, 3), "ratio": round(own / bare, 2),
                "estimated_ratio": round(estimates[what], 2),
            })  # fmt: skip
        return entries
    except (RuntimeError, MemoryError) as error:
        return [{**common, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}]


def _time_both(first: Callable[[], Any], second: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return the median seconds of two functions whose calls alternate; the first of several rounds is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for function, seconds in zip((first, second), times, strict=True):
            _synchronize(device)
            start = time.perf_counter()
            function()
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
        if sum(map(sum, times)) > MAX_SECONDS:
            break
    bare, own = (statistics.median(seconds[1:] or seconds) for seconds in times)
    return bare, own


def _synchronize(device: str) -> None:
    import torch

    module = getattr(torch, torch.device(device).type, None)
    wait = getattr(module, "synchronize", None)
    if wait is not None:
        wait()


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
    if lengths is None:
        lengths = CPU_LENGTHS if device.startswith("cpu") else LENGTHS
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
        "speed": [entry for length in lengths for entry in measure_speed(device, length)],
        "problems": problems,
        "seconds": round(time.perf_counter() - start, 1),
    }


def find_device() -> str | None:
    """Return the type of the accelerator that torch finds, such as "cuda"; None without one, or without a torch."""
    try:
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
    except Exception:  # none, or one that is broken, which check_installation reports
        return None
    return None if found is None else found.type


def describe_device(device: str) -> dict[str, Any]:
    """Describe a device: its model, its memory, and what decides which kernels run on it."""
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
    """Check every fused kernel of a device type, also those that are not needed."""
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
    """List the settings that results must not depend on."""
    import torch

    device_type = torch.device(device).type
    return {
        "as it is": nullcontext,
        "autocast": lambda: torch.autocast(device_type, dtype=torch.bfloat16),
        "TF32": _use_tf32,
    }


def _run_cases(device: str, num_cases: int, seed: int, max_seconds: float) -> list[dict[str, Any]]:
    """Run each case on the engines of torch in every setting; its definition is computed once."""
    from regard.engines.torch_precision import has_ieee_products

    has_wide = describe_device(device)["has_float64"]
    dtypes = [dtype for dtype in list_dtypes() if has_wide or dtype != "float64"]
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
    for case, inputs, bounds in draw_bounds(num_cases, seed, dtypes):
        if time.perf_counter() > stop:
            break
        for (engine, setting), run in runs.items():
            started = time.perf_counter()
            with settings[setting]():
                # The CPU's fused kernel rounds products as the setting says, as the public function does; only then.
                is_rounded = (device, engine, case.dtype) == ("cpu", ENGINES[1], "float32")
                skipped = "output" if is_rounded and not has_ieee_products("cpu") else ""
                share, message = measure_case(case, inputs, bounds, engine, device, skipped)
            run["count"] += 1
            run["failed"] += bool(message)
            run["failures"] += [message] if message and len(run["failures"]) < MAX_FAILURES else []
            run["largest_share"] = max(run["largest_share"], round(share, 3))
            run["seconds"] += time.perf_counter() - started
    return [{**run, "seconds": round(run["seconds"], 1)} for run in runs.values()]
