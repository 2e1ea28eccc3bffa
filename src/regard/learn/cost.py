"""The cost of attention: formulas for the arithmetic, measurements of time and memory, and fitted exponents.

The arithmetic is known in advance. Every query is compared with every key, so there are q_len · kv_len scores. Each
takes d_k multiply-adds to compute, and d_v to apply to a value. Twice the tokens cost four times as much.
`attention_by_loops` counts the same numbers one by one, so you can check the formulas.

Time and memory are measured, and an exponent is fitted to them. If doubling n multiplies an amount by 2^a, its points
lie on a line of slope a in a plot with two logarithmic axes.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.learn.attention import scaled_dot_product_attention
from regard.learn.validation import Floats, as_count, as_counts
from regard.render.table import format_bytes, format_seconds, format_table


@dataclass(frozen=True)
class Cost:
    """The cost of one head without a mask.

    Args:
        q_len: Number of queries.
        kv_len: Number of keys.
        d_k: Number of entries in each query and key.
        d_v: Number of entries in each value.
        itemsize: Bytes per number, 4 in float32.

    >>> cost = Cost(q_len=3, kv_len=3, d_k=3, d_v=3)
    >>> cost.entries, cost.score_multiply_adds, cost.value_multiply_adds
    (9, 27, 27)
    """

    q_len: int
    kv_len: int
    d_k: int
    d_v: int
    itemsize: int = 4

    @property
    def entries(self) -> int:
        """Number of entries in the matrix of scores, and in the matrix of weights."""
        return self.q_len * self.kv_len

    @property
    def bytes(self) -> int:
        """Bytes of one such matrix, if it is stored."""
        return self.entries * self.itemsize

    @property
    def score_multiply_adds(self) -> int:
        """Multiply-adds of the scores: each is a dot product of d_k terms."""
        return self.entries * self.d_k

    @property
    def value_multiply_adds(self) -> int:
        """Multiply-adds of the output: each weight multiplies a value of d_v numbers."""
        return self.entries * self.d_v

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the scores and the output together."""
        return self.score_multiply_adds + self.value_multiply_adds

    def by_step(self) -> FourStepTable:
        """Split the cost between the four steps; `attention_by_loops` counts the same numbers one by one.

        Returns:
            The operations of each step, and the numbers that it writes.

        >>> print(Cost(q_len=5, kv_len=5, d_k=4, d_v=4).by_step())
        step          operation           time         operations  space    numbers
        1. compare    Q @ K.T             n_q·n_k·d_k         100  n_q·n_k       25
        2. scale      scores / sqrt(d_k)  n_q·n_k              25  n_q·n_k       25
        3. normalise  softmax(scores)     n_q·n_k             120  n_q·n_k       25
        4. aggregate  weights @ V         n_q·n_k·d_v         100  n_q·d_v       20
        """
        n, pairs, outputs = self.q_len, self.entries, self.q_len * self.d_v
        # A row of m scores takes m - 1 comparisons, m subtractions, m exponentials, m additions and m divisions.
        softmax = 5 * pairs - n if self.kv_len else 0
        return FourStepTable(
            (
                StepCost("1. compare", "Q @ K.T", "n_q·n_k·d_k", self.score_multiply_adds, "n_q·n_k", pairs),
                StepCost("2. scale", "scores / sqrt(d_k)", "n_q·n_k", pairs, "n_q·n_k", pairs),
                StepCost("3. normalise", "softmax(scores)", "n_q·n_k", softmax, "n_q·n_k", pairs),
                StepCost(
                    "4. aggregate", "weights @ V", "n_q·n_k·d_v", self.value_multiply_adds, "n_q·d_v", outputs
                ),
            )
        )


@dataclass(frozen=True)
class StepCost:
    """The cost of one step: how its time and space grow, the number of operations, and the numbers it writes.

    >>> step = Cost(q_len=5, kv_len=5, d_k=4, d_v=4).by_step().rows[0]
    >>> step.operations, step.numbers
    (100, 25)
    """

    step: str
    operation: str
    time: str
    operations: int
    space: str
    numbers: int


@dataclass(frozen=True)
class FourStepTable:
    """The costs of the four steps, one `StepCost` in `rows` for each; prints as a table.

    >>> [row.operations for row in Cost(q_len=5, kv_len=5, d_k=4, d_v=4).by_step().rows]
    [100, 25, 120, 100]
    """

    rows: tuple[StepCost, ...]

    def __str__(self) -> str:
        table = [
            [row.step, row.operation, row.time, f"{row.operations:,}", row.space, f"{row.numbers:,}"]
            for row in self.rows
        ]
        names = ["step", "operation", "time", "operations", "space", "numbers"]
        return format_table(table, names, align=["left", "left", "left", "right", "left", "right"])


@dataclass(frozen=True)
class CostTable:
    """The costs of several lengths, one `Cost` in `rows` for each; prints as a table.

    >>> [cost.entries for cost in cost_table([128, 256]).rows]
    [16384, 65536]
    """

    rows: tuple[Cost, ...]

    def format_rows(self) -> list[list[str]]:
        """Format the cells of the table: length, entries, growth, memory and multiply-adds of each row."""
        before = [None, *(cost.entries for cost in self.rows[:-1])]
        return [
            [
                f"{cost.q_len:,}",
                f"{cost.entries:,}",
                f"× {cost.entries / last:g}" if last else "",
                format_bytes(cost.bytes),
                f"{cost.multiply_adds:,}",
            ]
            for cost, last in zip(self.rows, before, strict=True)
        ]

    def __str__(self) -> str:
        return format_table(self.format_rows(), ["length", "entries", "growth", "memory", "multiply-adds"])


def cost_table(
    lengths: Iterable[int] | int, *, d_k: int = 64, d_v: int | None = None, dtype: npt.DTypeLike = np.float32
) -> CostTable:
    """Tabulate the cost of self-attention in one head, for each length.

    Args:
        lengths: Numbers of tokens in rising order, or a single one.
        d_k: Number of entries in each query and key.
        d_v: Number of entries in each value; `d_k` by default.
        dtype: The NumPy dtype whose size the bytes are computed with.

    Returns:
        The costs; `print` it to read it.

    >>> print(cost_table([256, 512, 1024]))
    length    entries  growth   memory  multiply-adds
       256     65,536           262 kB      8,388,608
       512    262,144     × 4  1.05 MB     33,554,432
     1,024  1,048,576     × 4  4.19 MB    134,217,728
    """
    sizes = as_counts("cost_table", "lengths", lengths, minimum=1)
    d_k = as_count("cost_table", "d_k", d_k, minimum=1)
    d_v = d_k if d_v is None else as_count("cost_table", "d_v", d_v, minimum=1)
    itemsize = np.dtype(dtype).itemsize
    return CostTable(tuple(Cost(n, n, d_k, d_v, itemsize) for n in sizes))


def fit_exponent(lengths: Sequence[int], amounts: Sequence[float]) -> float:
    """Fit the exponent a in amount ≈ constant · length^a, by least squares on the logarithms.

    Args:
        lengths: Two or more different lengths.
        amounts: One amount for each length, above 0.

    Returns:
        The exponent.

    Raises:
        ArgumentError: If there are fewer than two lengths, or an amount is not above 0.

    >>> round(fit_exponent([1, 2, 4], [5, 20, 80]), 12)
    2.0
    """
    if len(lengths) != len(amounts) or len(set(lengths)) < 2 or min(*lengths, *amounts) <= 0:
        raise ArgumentError(
            "fit_exponent",
            received=f"{len(lengths)} lengths and {len(amounts)} amounts",
            expected="one amount for each of two or more different lengths, all above 0",
            hint="Fitting a line needs two points, and a logarithm needs a number above 0. Measure more lengths.",
        )
    x, y = np.log(lengths), np.log(amounts)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


@dataclass(frozen=True)
class ProfileRow:
    """The results for one length: the computed `cost`, and the measured `seconds` and `peak_bytes`.

    >>> rows = profile([16, 32], repeats=1).rows
    >>> rows[0].cost.entries, rows[0].seconds > 0
    (256, True)
    """

    cost: Cost
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Profile:
    """The results of `profile`: `rows`, one for each length, and the fitted `exponents` by name; prints as a table.

    >>> result = profile([16, 32], repeats=1)
    >>> sorted(result.exponents)
    ['bytes', 'entries', 'multiply_adds', 'peak_bytes', 'seconds']
    """

    rows: tuple[ProfileRow, ...]
    exponents: dict[str, float]

    def __str__(self) -> str:
        table = [
            [
                f"{row.cost.q_len:,}",
                f"{row.cost.entries:,}",
                format_bytes(row.cost.bytes),
                f"{row.cost.multiply_adds:,}",
                format_seconds(row.seconds),
                format_bytes(row.peak_bytes),
            ]
            for row in self.rows
        ]
        table.append(["grows as", *(f"n^{exponent:.2f}" for exponent in self.exponents.values())])
        return format_table(table, ["length", "entries", "matrix", "multiply-adds", "time", "peak memory"])


def profile(
    lengths: Iterable[int] = (128, 256, 512, 1024),
    *,
    d_k: int = 64,
    d_v: int | None = None,
    attend: Callable[[Floats, Floats, Floats], object] = scaled_dot_product_attention,
    repeats: int = 3,
    seed: int = 0,
) -> Profile:
    """Measure the time and the peak memory of an attention function, compute its cost, and fit exponents.

    The time is the best of `repeats` calls. The memory is the peak during a call without the arguments, measured by
    `tracemalloc`, which tracks NumPy arrays.

    Args:
        lengths: Two or more numbers of tokens, in rising order.
        d_k: Number of entries in each query and key.
        d_v: Number of entries in each value; `d_k` by default.
        attend: The function to measure, called with Q (n, d_k), K (n, d_k) and V (n, d_v) in float64.
        repeats: Number of timed calls for each length.
        seed: Seed of the random inputs.

    Returns:
        One row for each length, and the fitted exponents; `print` it to read it.

    Raises:
        ArgumentError: If there are fewer than two lengths.
        ArgumentTypeError: If `attend` cannot be called.

    >>> result = profile([32, 64, 128])
    >>> {name: round(result.exponents[name], 6) for name in ("entries", "bytes", "multiply_adds")}
    {'entries': 2.0, 'bytes': 2.0, 'multiply_adds': 2.0}
    >>> result.rows[2].peak_bytes >= result.rows[2].cost.bytes  # this attention stores the whole matrix
    True
    """
    sizes = as_counts("profile", "lengths", lengths, minimum=1)
    if len(sizes) < 2:
        raise ArgumentError(
            "profile",
            received=f"lengths {sizes}",
            expected="two lengths or more, since an exponent is the slope of a line",
            hint=f"Add another: lengths=({sizes[0]}, {2 * sizes[0]}).",
        )
    if not callable(attend):
        raise ArgumentTypeError(
            "profile",
            received=f"attend, {describe_argument(attend)}",
            expected="a function attend(Q, K, V)",
            hint="Omit attend to measure scaled_dot_product_attention.",
        )
    repeats = as_count("profile", "repeats", repeats, minimum=1)
    costs = cost_table(sizes, d_k=d_k, d_v=d_v, dtype=np.float64).rows

    rng = np.random.default_rng(seed)
    rows = []
    for cost in costs:
        Q, K = rng.normal(size=(2, cost.q_len, cost.d_k))
        V = rng.normal(size=(cost.kv_len, cost.d_v))
        call = partial(attend, Q, K, V)
        peak = _measure_peak_bytes(call)  # not in a timed call: tracing memory slows it down
        rows.append(ProfileRow(cost, min(_measure_seconds(call) for _ in range(repeats)), peak))

    amounts: dict[str, list[float]] = {
        "entries": [row.cost.entries for row in rows],
        "bytes": [row.cost.bytes for row in rows],
        "multiply_adds": [row.cost.multiply_adds for row in rows],
        "seconds": [row.seconds for row in rows],
        "peak_bytes": [row.peak_bytes for row in rows],
    }
    # Memory that tracemalloc does not track is measured as 0, which has no logarithm.
    exponents = {
        name: fit_exponent(sizes, numbers) if min(numbers) > 0 else math.nan
        for name, numbers in amounts.items()
    }
    return Profile(tuple(rows), exponents)


def _measure_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _measure_peak_bytes(call: Callable[[], object]) -> int:
    """Measure the peak of traced memory during a call, minus the memory before it."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:  # leave tracing that the caller started
            tracemalloc.stop()
    return peak - before
