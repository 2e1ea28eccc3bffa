"""What attention costs: counted, measured, and fitted.

The arithmetic is known before anything runs. Every query meets every key, so there are q_len · kv_len scores; each
takes d_k multiply-adds to make and d_v to spend. Twice the tokens, four times all of it. `attention_by_loops` counts
the same numbers one by one, for those who would rather not believe a formula.

Time and memory are another matter: they are measured, and an exponent is fitted to them. If doubling n multiplies an
amount by 2^a, its points lie on a line of slope a once both axes are logarithms.
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
    """The work of one head without a mask: `q_len` queries and `kv_len` keys of `d_k` numbers, values of `d_v`.

    `itemsize` is the bytes of one number: 4 in float32.

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
        """The entries of the matrix of scores, and as many weights: one for each pair."""
        return self.q_len * self.kv_len

    @property
    def bytes(self) -> int:
        """What one such matrix takes if it is stored."""
        return self.entries * self.itemsize

    @property
    def score_multiply_adds(self) -> int:
        """Each score is a dot product of d_k terms."""
        return self.entries * self.d_k

    @property
    def value_multiply_adds(self) -> int:
        """Each weight multiplies a value of d_v numbers."""
        return self.entries * self.d_v

    @property
    def multiply_adds(self) -> int:
        """Those of the scores and those of the output together."""
        return self.score_multiply_adds + self.value_multiply_adds


@dataclass(frozen=True)
class CostTable:
    """The costs of several lengths, one of `Cost` in `rows` for each; prints as a table.

    >>> [cost.entries for cost in cost_table([128, 256]).rows]
    [16384, 65536]
    """

    rows: tuple[Cost, ...]

    def __str__(self) -> str:
        before = [None, *(cost.entries for cost in self.rows[:-1])]
        table = [
            [
                f"{cost.q_len:,}",
                f"{cost.entries:,}",
                f"× {cost.entries / last:g}" if last else "",
                format_bytes(cost.bytes),
                f"{cost.multiply_adds:,}",
            ]
            for cost, last in zip(self.rows, before, strict=True)
        ]
        return format_table(table, ["length", "entries", "growth", "memory", "multiply-adds"])


def cost_table(
    lengths: Iterable[int] | int, *, d_k: int = 64, d_v: int | None = None, dtype: npt.DTypeLike = np.float32
) -> CostTable:
    """The cost of one head attending over itself, for each length; d_v is d_k unless given.

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


def fitted_exponent(lengths: Sequence[int], amounts: Sequence[float]) -> float:
    """The a for which amount ≈ constant · length^a fits best, by least squares on the logarithms.

    >>> round(fitted_exponent([1, 2, 4], [5, 20, 80]), 12)
    2.0
    """
    if len(lengths) != len(amounts) or len(set(lengths)) < 2 or min(*lengths, *amounts) <= 0:
        raise ArgumentError(
            "fitted_exponent",
            received=f"{len(lengths)} lengths and {len(amounts)} amounts",
            expected="one amount for each of two or more different lengths, all above 0",
            hint="A line needs two points, and a logarithm a number above 0: measure more lengths.",
        )
    x, y = np.log(lengths), np.log(amounts)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


@dataclass(frozen=True)
class ProfileRow:
    """One length: its `cost`, which is counted, and the `seconds` and `peak_bytes`, which are measured.

    >>> rows = profile([16, 32], repeats=1).rows
    >>> rows[0].cost.entries, rows[0].seconds > 0
    (256, True)
    """

    cost: Cost
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Profile:
    """What `profile` found: `rows`, one for each length, and the fitted `exponents` by name; prints as a table.

    >>> found = profile([16, 32], repeats=1)
    >>> sorted(found.exponents)
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
    """Entries, bytes and multiply-adds counted, time and peak memory measured, an exponent fitted to each.

    `attend(Q, K, V)` is what is measured, on (n, d_k), (n, d_k) and (n, d_v) in float64: any function of these. The
    time is the best of `repeats` calls. The memory is the most that was held at once, the arguments left out; it is
    seen by `tracemalloc`, which knows of NumPy's arrays.

    >>> found = profile([32, 64, 128])
    >>> {name: round(found.exponents[name], 6) for name in ("entries", "bytes", "multiply_adds")}
    {'entries': 2.0, 'bytes': 2.0, 'multiply_adds': 2.0}
    >>> found.rows[2].peak_bytes >= found.rows[2].cost.bytes  # this attention stores the whole matrix
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
            hint="Leave it out to measure scaled_dot_product_attention.",
        )
    repeats = as_count("profile", "repeats", repeats, minimum=1)
    costs = cost_table(sizes, d_k=d_k, d_v=d_v, dtype=np.float64).rows

    rng = np.random.default_rng(seed)
    rows = []
    for cost in costs:
        Q, K = rng.normal(size=(2, cost.q_len, cost.d_k))
        V = rng.normal(size=(cost.kv_len, cost.d_v))
        call = partial(attend, Q, K, V)
        peak = _peak_bytes(call)  # apart from the time, which watching the memory would lengthen
        rows.append(ProfileRow(cost, min(_seconds(call) for _ in range(repeats)), peak))

    amounts: dict[str, list[float]] = {
        "entries": [row.cost.entries for row in rows],
        "bytes": [row.cost.bytes for row in rows],
        "multiply_adds": [row.cost.multiply_adds for row in rows],
        "seconds": [row.seconds for row in rows],
        "peak_bytes": [row.peak_bytes for row in rows],
    }
    # Nothing is seen of memory that tracemalloc does not know, and a logarithm of 0 fits no line.
    exponents = {
        name: fitted_exponent(sizes, numbers) if min(numbers) > 0 else math.nan
        for name, numbers in amounts.items()
    }
    return Profile(tuple(rows), exponents)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes held at once during the call, beyond those held before it."""
    watched = tracemalloc.is_tracing()
    if not watched:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not watched:  # somebody else's tracing goes on
            tracemalloc.stop()
    return peak - before


@dataclass(frozen=True)
class PublishedModel:
    """The published size of a model's attention: `layers` of `heads` over `length` tokens, and the `source` of these.

    >>> published_models["GPT-3"].entries
    38654705664
    >>> published_models["GPT-3"].source
    'Brown et al. 2020, arXiv:2005.14165'
    """

    layers: int
    heads: int
    length: int
    source: str = ""

    @property
    def entries(self) -> int:
        """The weights of all layers and heads for one sequence."""
        return self.layers * self.heads * self.length**2


# The sizes of models people know, by name, each with its source.
published_models = {
    "GPT-3": PublishedModel(96, 96, 2048, "Brown et al. 2020, arXiv:2005.14165"),
    "LLaMA-2-70B": PublishedModel(
        80, 64, 4096, "Touvron et al. 2023, arXiv:2307.09288, and its configuration"
    ),
    "ViT-Large": PublishedModel(24, 16, 197, "Dosovitskiy et al. 2020, arXiv:2010.11929"),
    "AlphaFold2": PublishedModel(48, 8, 500, "Jumper et al. 2021, Nature 596, 583; for 500 residues"),
}


@dataclass(frozen=True)
class ModelTable:
    """The models of `published_models`, or others, side by side; `itemsize` is the bytes of one weight.

    >>> model_table().models["GPT-3"].heads, model_table().itemsize
    (96, 4)
    """

    models: dict[str, PublishedModel]
    itemsize: int

    def __str__(self) -> str:
        table = [
            [
                name,
                *(f"{x:,}" for x in (m.layers, m.heads, m.length, m.entries)),
                format_bytes(m.entries * self.itemsize),
            ]
            for name, m in self.models.items()
        ]
        return format_table(table, ["model", "layers", "heads", "length", "weights", "memory"])


def model_table(
    models: dict[str, PublishedModel] = published_models, *, dtype: npt.DTypeLike = np.float32
) -> ModelTable:
    """The weights of one sequence through each model, and what they would take if they were stored.

    >>> print(model_table())
          model  layers  heads  length         weights   memory
          GPT-3      96     96   2,048  38,654,705,664   155 GB
    LLaMA-2-70B      80     64   4,096  85,899,345,920   344 GB
      ViT-Large      24     16     197      14,902,656  59.6 MB
     AlphaFold2      48      8     500      96,000,000   384 MB
    """
    return ModelTable(dict(models), np.dtype(dtype).itemsize)
