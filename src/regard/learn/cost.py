"""The cost of attention: formulas, every operation counted, measurements, fitted exponents, and published models.

The arithmetic is known in advance. Every query is compared with every key, so there are q_len · kv_len scores. Each
takes d_k multiply-adds to compute, and d_v to apply to a value. Twice the tokens cost four times as much.

`attention_by_loops` counts the same numbers one by one, so you can check the formulas. No count comes from a formula:
each line of arithmetic is followed by the line that counts it. `iter_multiplications` shows the multiply-adds.

Time and memory are measured, and an exponent is fitted to them. If doubling n multiplies an amount by 2^a, its points
lie on a line of slope a in a plot with two logarithmic axes.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from regard.learn.checked import scaled_dot_product_attention
from regard.learn.validation import (
    Bools,
    Floats,
    MaskLike,
    TrueMeans,
    as_counts,
    as_floats,
    as_mask,
    read_mask,
    require,
)
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

    @property
    def bytes_moved(self) -> int:
        """Bytes moved to and from memory if the scores and the weights are stored there; scaling happens on the way."""
        vectors = (self.q_len + self.kv_len) * (self.d_k + self.d_v)
        return (
            vectors + 4 * self.entries
        ) * self.itemsize  # the scores and the weights, each written and read

    def bytes_moved_fused(self, rows: int) -> int:
        """Count the bytes that a fused kernel moves, which reads all keys and values once for each tile of queries.

        Args:
            rows: Queries of a tile.

        Returns:
            The bytes moved to and from memory.

        >>> cost = Cost(q_len=2048, kv_len=2048, d_k=64, d_v=64, itemsize=2)
        >>> cost.bytes_moved / cost.bytes_moved_fused(rows=128)
        3.88...
        """
        vectors = self.d_k + self.d_v
        return (self.q_len + -(-self.q_len // rows) * self.kv_len) * vectors * self.itemsize

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
    d_v = d_k if d_v is None else d_v
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
    require(
        len(lengths) == len(amounts) and len(set(lengths)) > 1 and min(*lengths, *amounts) > 0,
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

    >>> result = profile([32, 64, 128])
    >>> {name: round(result.exponents[name], 6) for name in ("entries", "bytes", "multiply_adds")}
    {'entries': 2.0, 'bytes': 2.0, 'multiply_adds': 2.0}
    >>> result.rows[2].peak_bytes >= result.rows[2].cost.bytes  # this attention stores the whole matrix
    True
    """
    sizes = as_counts("profile", "lengths", lengths, minimum=1)
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


FLOAT_BYTES = np.dtype(np.float64).itemsize


@dataclass
class OperationCounts:
    """The number of operations of each kind, and the bytes of the tables written.

    >>> print(attention_by_loops([[1, 0]], [[1, 0], [0, 1]], [[5], [6]]).counts)
    score_multiply_adds            4
    value_multiply_adds            2
    additions                      4
    comparisons                    1
    exponentials                   2
    divisions                      4
    bytes_scores                  16
    bytes_exponentials            16
    bytes_weights                 16
    bytes_output                   8
    multiply_adds                  6
    bytes_written                 56
    """

    score_multiply_adds: int = 0
    value_multiply_adds: int = 0
    additions: int = 0
    comparisons: int = 0
    exponentials: int = 0
    divisions: int = 0
    bytes_scores: int = 0
    bytes_exponentials: int = 0
    bytes_weights: int = 0
    bytes_output: int = 0

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of the scores and of the output together."""
        return self.score_multiply_adds + self.value_multiply_adds

    @property
    def bytes_written(self) -> int:
        """The bytes of all four tables together."""
        return self.bytes_scores + self.bytes_exponentials + self.bytes_weights + self.bytes_output

    def __str__(self) -> str:
        names = [field.name for field in fields(self)] + ["multiply_adds", "bytes_written"]
        return format_table([[name, getattr(self, name)] for name in names], align=["left", "right"])


@dataclass(frozen=True, eq=False)
class CountedAttention:
    """The result of `attention_by_loops`: `output`, `weights`, scaled `scores`, and the `counts` of operations.

    >>> from regard.learn import attention_by_loops, cat
    >>> result = attention_by_loops(cat.Q, cat.K, cat.V)
    >>> result.weights[2].round(4), result.counts.exponentials
    (array([0.1519, 0.2505, 0.2505, 0.1519, 0.1951]), 25)
    """

    output: Floats
    weights: Floats
    scores: Floats
    counts: OperationCounts

    def __str__(self) -> str:
        (q_len, kv_len), d_v = self.weights.shape, self.output.shape[-1]
        return f"attention by loops: q_len {q_len}, kv_len {kv_len}, d_v {d_v}\n{self.counts}"


def attention_by_loops(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
) -> CountedAttention:
    """Compute attention with explicit loops, and count every operation.

    A masked pair costs no arithmetic, but its cell is still written.

    Args:
        Q: Queries (q_len, d_k).
        K: Keys (kv_len, d_k).
        V: Values (kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.

    Returns:
        The output (q_len, d_v), the weights and scaled scores (q_len, kv_len), and the counts.

    Raises:
        ArgumentError: If the arrays are not one head of one sequence, or their shapes are incompatible.

    >>> result = attention_by_loops([[0, 0]], [[1, 2], [3, 4]], [[10], [30]])
    >>> result.output, result.weights
    (array([[20.]]), array([[0.5, 0.5]]))
    >>> result.counts.multiply_adds == 1 * 2 * (2 + 1)
    True
    """
    Q, K, V, attend = _read_head("attention_by_loops", Q, K, V, mask, true_means)
    (n_q, d_k), (n_k, d_v) = Q.shape, V.shape
    counts = OperationCounts()
    scores, weights, output = np.zeros((n_q, n_k)), np.zeros((n_q, n_k)), np.zeros((n_q, d_v))
    q, k, v = Q.tolist(), K.tolist(), V.tolist()  # plain Python floats
    root = math.sqrt(d_k)

    for i in range(n_q):
        visible = [j for j in range(n_k) if attend[i, j]]

        # 1. compare and 2. scale: one dot product for each key this query attends to.
        for j in range(n_k):
            scores[i, j] = -math.inf
            if attend[i, j]:
                dot = 0.0
                for c in range(d_k):
                    dot += q[i][c] * k[j][c]
                    counts.score_multiply_adds += 1
                scores[i, j] = dot / root
                counts.divisions += 1
            counts.bytes_scores += FLOAT_BYTES

        # 3. normalise: the highest score, the exponentials of the differences, their sum, the shares.
        row = scores[i].tolist()
        highest = row[visible[0]] if visible else -math.inf
        for j in visible[1:]:
            highest = row[j] if row[j] > highest else highest
            counts.comparisons += 1
        shift = 0.0 if highest == -math.inf else highest

        exponentials, total = [0.0] * n_k, 0.0
        for j in visible:
            exponentials[j] = math.exp(row[j] - shift)
            counts.additions += 1
            counts.exponentials += 1
            counts.bytes_exponentials += FLOAT_BYTES
            total += exponentials[j]
            counts.additions += 1

        for j in range(n_k):
            weights[i, j] = 0.0
            if attend[i, j] and total != 0.0:
                weights[i, j] = exponentials[j] / total
                counts.divisions += 1
            counts.bytes_weights += FLOAT_BYTES

        # 4. aggregate: the sum of share · value.
        share = weights[i].tolist()
        for c in range(d_v):
            mixed = 0.0
            for j in visible:
                mixed += share[j] * v[j][c]
                counts.value_multiply_adds += 1
            output[i, c] = mixed
            counts.bytes_output += FLOAT_BYTES

    return CountedAttention(output, weights, scores, counts)


def _read_head(
    operation: str, Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike, true_means: TrueMeans
) -> tuple[Floats, Floats, Floats, Bools]:
    """Convert the arrays of one head, and the mask to one boolean for each pair; True everywhere without a mask."""
    Q = as_floats(operation, "Q", Q, "q_len", "d_k")
    K = as_floats(operation, "K", K, "kv_len", "d_k")
    V = as_floats(operation, "V", V, "kv_len", "d_v")
    require(
        {Q.ndim, K.ndim, V.ndim} == {2} and K.shape == (len(V), Q.shape[1]) and Q.shape[1] > 0,
        operation,
        received=f"Q of shape {Q.shape}, K of shape {K.shape} and V of shape {V.shape}",
        expected="Q (q_len, d_k), K (kv_len, d_k) and V (kv_len, d_v) of one head, with d_k at least 1",
        hint="Select one head of one sequence, e.g. Q[0, 3]. Project queries and keys to the same d_k, and compute K "
        "and V from the same sequence.",
    )
    read = read_mask(operation, mask, true_means)
    return Q, K, V, as_mask(operation, True if read is None else read, (len(Q), len(K)))


@dataclass(frozen=True)
class Multiplication:
    """One multiply-add: `left` · `right` is added to an entry of `table`, which then holds `total`.

    `table` is "scores" or "output", and the entry is [`row`, `column`]. `term` is the index of this product in its sum:
    the coordinate for a score, the key for an output. `number` counts from 1 over both tables.

    >>> from regard.learn import cat
    >>> next(iter_multiplications(cat.Q, cat.K, cat.V))
    Multiplication(number=1, table='scores', row=0, column=0, term=0, left=1.0, right=0.0, total=0.0)
    """

    number: int
    table: str
    row: int
    column: int
    term: int
    left: float
    right: float
    total: float

    def __str__(self) -> str:
        return (
            f"{self.number:>4}  {self.table}[{self.row}, {self.column}]"
            f" += {self.left:.4g} · {self.right:.4g}  →  {self.total:.4g}"
        )


def iter_multiplications(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
) -> Iterator[Multiplication]:
    """Iterate over the multiply-adds: first those of the scores before scaling, then those of the output.

    Scaling and softmax happen in between and are not included. Masked pairs are skipped, as in `attention_by_loops`.

    Args:
        Q: Queries (q_len, d_k).
        K: Keys (kv_len, d_k).
        V: Values (kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.

    Returns:
        An iterator over the multiply-adds in order.

    Raises:
        ArgumentError: If the arrays are not one head of one sequence.

    >>> for step in iter_multiplications(Q=[[1, 2]], K=[[3, 4], [3, 4]], V=[[6], [8]]):
    ...     print(step)
       1  scores[0, 0] += 1 · 3  →  3
       2  scores[0, 0] += 2 · 4  →  11
       3  scores[0, 1] += 1 · 3  →  3
       4  scores[0, 1] += 2 · 4  →  11
       5  output[0, 0] += 0.5 · 6  →  3
       6  output[0, 0] += 0.5 · 8  →  7
    """
    Q, K, V, visible = _read_head("iter_multiplications", Q, K, V, mask, true_means)
    weights = attention_by_loops(Q, K, V, visible).weights
    return _iter_products(Q.tolist(), K.tolist(), V.T.tolist(), weights.tolist(), visible)


Matrix = list[list[float]]


def _iter_products(
    queries: Matrix, keys: Matrix, columns: Matrix, weights: Matrix, visible: Bools
) -> Iterator[Multiplication]:
    number = 0
    # Both tables are dot products of rows: queries with keys, then weights with the columns of V.
    for table, lefts, rights in (("scores", queries, keys), ("output", weights, columns)):
        for row, left in enumerate(lefts):
            for column, right in enumerate(rights):
                total = 0.0
                for term, (a, b) in enumerate(zip(left, right, strict=True)):
                    if visible[row, column if table == "scores" else term]:
                        total += a * b
                        number += 1
                        yield Multiplication(number, table, row, column, term, a, b, total)


@dataclass(frozen=True)
class PublishedModel:
    """The published size of a model's attention.

    Args:
        layers: Number of layers.
        heads: Number of heads per layer.
        length: Number of tokens.
        d_k: Number of entries in each query, key and value of a head.
        source: The publication.

    >>> published_models["GPT-3"].entries
    38654705664
    >>> published_models["GPT-3"].source
    'Brown et al. 2020, arXiv:2005.14165'
    """

    layers: int
    heads: int
    length: int
    d_k: int
    source: str = ""

    @property
    def entries(self) -> int:
        """Number of attention weights of all layers and heads for one sequence."""
        return self.layers * self.heads * self.length**2

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all scores and outputs: d_k for each score, and d_k to apply its weight to a value."""
        return 2 * self.d_k * self.entries


# Sizes of well-known models by name, each with its source.
published_models = {
    "GPT-3": PublishedModel(96, 96, 2048, 128, "Brown et al. 2020, arXiv:2005.14165"),
    "LLaMA-2-70B": PublishedModel(
        80, 64, 4096, 128, "Touvron et al. 2023, arXiv:2307.09288, and its configuration"
    ),
    "ViT-Large": PublishedModel(24, 16, 197, 64, "Dosovitskiy et al. 2020, arXiv:2010.11929"),
    "AlphaFold2": PublishedModel(
        48, 8, 500, 32, "Jumper et al. 2021, doi:10.1038/s41586-021-03819-2; for 500 residues"
    ),
}


@dataclass(frozen=True)
class ModelTable:
    """The attention weights of several models; `itemsize` is the bytes per weight; prints as a table.

    >>> model_table().models["GPT-3"].heads, model_table().itemsize
    (96, 4)
    """

    models: dict[str, PublishedModel]
    itemsize: int

    def __str__(self) -> str:
        table = [
            [
                name,
                *(f"{x:,}" for x in (m.layers, m.heads, m.d_k, m.length, m.entries)),
                f"{m.multiply_adds:.2e}" if m.multiply_adds >= 1e6 else f"{m.multiply_adds}",
                format_bytes(m.entries * self.itemsize),
            ]
            for name, m in self.models.items()
        ]
        names = ["model", "layers", "heads", "d_k", "length", "weights", "multiply-adds", "memory"]
        return format_table(table, names)


def model_table(
    models: dict[str, PublishedModel] = published_models, *, dtype: npt.DTypeLike = np.float32
) -> ModelTable:
    """Tabulate the attention weights of each model for one sequence, the multiply-adds, and their size if stored.

    Args:
        models: Models by name.
        dtype: The NumPy dtype whose size the bytes are computed with.

    Returns:
        The table; `print` it to read it.

    >>> print(model_table({"this book": PublishedModel(1, 1, 5, 4), **published_models}))
          model  layers  heads  d_k  length         weights  multiply-adds   memory
      this book       1      1    4       5              25            200    100 B
          GPT-3      96     96  128   2,048  38,654,705,664       9.90e+12   155 GB
    LLaMA-2-70B      80     64  128   4,096  85,899,345,920       2.20e+13   344 GB
      ViT-Large      24     16   64     197      14,902,656       1.91e+09  59.6 MB
     AlphaFold2      48      8   32     500      96,000,000       6.14e+09   384 MB
    """
    return ModelTable(dict(models), np.dtype(dtype).itemsize)
