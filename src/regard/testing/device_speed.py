"""Time a device: ratios of regard to the bare kernel, beside the estimates that were made without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

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

    Args:
        length: Number of tokens.
        rows: Rows of a tile.
        columns: Columns of a tile.
        entries: Entries of a tile over all heads that are computed together.

    Returns:
        The ratio of each line of `measure_speed`.

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


def measure_speed(device: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Time `A @ value` and four measures against `F.scaled_dot_product_attention`: causal, bfloat16, 32 heads of 64.

    Args:
        device: Device of torch.
        lengths: Numbers of tokens.

    Returns:
        For each length and kind of call: milliseconds of the bare kernel and of regard, their ratio, and the ratio that
        was estimated for an A100. A length that does not fit the memory has an "error" instead.
    """
    return [entry for length in lengths for entry in _measure_length(device, length)]


def _measure_length(device: str, length: int) -> list[dict[str, Any]]:
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
            return matrix @ value, matrix.measure(Entropy(), Received(), Distance(), Coarse(64))

        kernel = attention(query, key, mask=causal())
        _ = kernel @ value
        plan = attention(query, key, mask=causal()).plan(Entropy(), Received(), Distance(), Coarse(64))
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
