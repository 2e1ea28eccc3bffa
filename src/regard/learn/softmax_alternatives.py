"""Softmax, its alternatives, and an experiment that shows why the scores are divided by √d_k before it.

All turn a row of scores into shares. Most of them have two steps: compute a part from each score, then divide by the
sum of the parts. They differ in the part:

    softmax               exp(score / temperature)      every key has a share; adding a constant changes nothing
    normalised_sigmoid    1 / (1 + exp(−score))         high scores saturate: the best key cannot stand out
    normalised_relu       max(score, 0)                 no share for scores below 0; none at all if all are
    divide_by_sum         the score itself              negative shares, and undefined where the sum is 0
    divide_by_maximum     the score itself              divided by the largest: the sum need not be 1

Two are different. `hardmax` gives everything to the largest score and has no gradient; `sparsemax` is the distribution
nearest to the scores, with exact zeros. All work on the last axis. A mask is boolean, True = attend, and a fully masked
row is zeros.

A dot product is a sum of d_k products. If the entries are independent, with mean 0 and variance σ², each product has
the variance σ⁴, and variances add up:

    Var(query · key) = d_k σ⁴

So scores grow like √d_k. Softmax depends on their differences and ends up giving everything to one key, where its
Jacobian is nearly 0 and nothing can be learned. Divided by √d_k, the scores have variance σ⁴ in any dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from regard.learn.validation import (
    Bools,
    Floats,
    MaskLike,
    as_counts,
    as_floats,
    as_mask,
    require,
)
from regard.render.table import format_table


def softmax(scores: ArrayLike, mask: MaskLike = None, temperature: float = 1.0) -> Floats:
    """Compute exp(score / temperature), divided by the sum of the row.

    A low temperature sharpens: at 0 it is `hardmax`. A high one flattens: at infinity all shares are equal.

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.
        temperature: At least 0.

    Returns:
        Shares (…, kv_len).

    >>> softmax([0, 1, 2]).round(3)
    array([0.09 , 0.245, 0.665])
    >>> softmax([1000, 1001, 1002]).round(3)  # only differences count
    array([0.09 , 0.245, 0.665])
    >>> softmax([0, 1, 2], temperature=np.inf).round(3)
    array([0.333, 0.333, 0.333])
    """
    hint = "1 changes nothing, a lower one sharpens, a higher one flattens."
    require(temperature >= 0, "softmax", f"temperature {temperature:g}", "temperature of at least 0", hint)
    if temperature == 0:
        return hardmax(scores, mask)
    scores, visible = _prepare_scores("softmax", scores, mask)
    # Subtract before dividing: at any temperature the largest exponent is exactly 0.
    with np.errstate(over="ignore", invalid="ignore"):
        differences = (scores - _find_largest(scores, visible)) / temperature
    return _normalise(np.exp(np.where(visible, differences, -np.inf)), visible)


def hardmax(scores: ArrayLike, mask: MaskLike = None) -> Floats:
    """Give everything to the largest score of each row, in equal parts if several are largest.

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.

    Returns:
        Shares (…, kv_len).

    >>> hardmax([[0, 1, 2], [3, 0, 3]])
    array([[0. , 0. , 1. ],
           [0.5, 0. , 0.5]])
    """
    scores, visible = _prepare_scores("hardmax", scores, mask)
    return _normalise(np.where(scores == _find_largest(scores, visible), 1.0, 0.0), visible)


def sparsemax(scores: ArrayLike, mask: MaskLike = None) -> Floats:
    """Compute the distribution nearest to each row of scores, in Euclidean distance.

    It is max(score − threshold, 0), with the threshold chosen so that the shares sum to 1. Scores below it get exactly
    0 (Martins & Astudillo, 1602.02068).

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.

    Returns:
        Shares (…, kv_len).

    >>> sparsemax([0, 1, 1.5])  # the threshold is 0.75
    array([0.  , 0.25, 0.75])
    """
    scores, visible = _prepare_scores("sparsemax", scores, mask)
    differences = np.where(visible, scores - _find_largest(scores, visible), -np.inf)
    descending = -np.sort(-differences, axis=-1)  # the largest, 0, comes first; masked scores come last
    # If the k largest are kept, the threshold is (their sum − 1) / k. Keep those above their own threshold.
    counts = np.arange(1, scores.shape[-1] + 1)
    thresholds = (np.cumsum(descending, axis=-1) - 1) / counts
    kept = (descending > thresholds).sum(axis=-1, keepdims=True)
    if scores.shape[-1] == 0:
        return scores
    threshold = np.take_along_axis(thresholds, np.maximum(kept - 1, 0), axis=-1)
    # A fully masked row has no threshold; subtract 0 there.
    threshold = np.where(visible.any(axis=-1, keepdims=True), threshold, 0.0)
    return np.maximum(differences - threshold, 0.0)


def normalised_sigmoid(scores: ArrayLike, mask: MaskLike = None) -> Floats:
    """Compute the sigmoid of each score, divided by the sum of the row.

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.

    Returns:
        Shares (…, kv_len).

    >>> normalised_sigmoid([0, 0, 100]).round(3)  # the sigmoid of 100 is 1, and of 0 already a half
    array([0.25, 0.25, 0.5 ])
    """
    scores, visible = _prepare_scores("normalised_sigmoid", scores, mask)
    return _normalise((1 + np.tanh(scores / 2)) / 2, visible)  # the sigmoid, in a form that cannot overflow


def normalised_relu(scores: ArrayLike, mask: MaskLike = None) -> Floats:
    """Compute max(score, 0), divided by the sum of the row; a row without a positive score is zeros.

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.

    Returns:
        Shares (…, kv_len).

    >>> normalised_relu([[-1, 1, 3], [-1, -2, -3]])
    array([[0.  , 0.25, 0.75],
           [0.  , 0.  , 0.  ]])
    """
    scores, visible = _prepare_scores("normalised_relu", scores, mask)
    return _normalise(np.maximum(scores, 0.0), visible)


def divide_by_sum(scores: ArrayLike, mask: MaskLike = None) -> Floats:
    """Divide each score by the sum of its row; not a distribution if a score is negative.

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.

    Returns:
        Quotients (…, kv_len).

    >>> divide_by_sum([[1, 1, 2], [-1, 1, 2]])
    array([[ 0.25,  0.25,  0.5 ],
           [-0.5 ,  0.5 ,  1.  ]])
    """
    scores, visible = _prepare_scores("divide_by_sum", scores, mask)
    return _divide(scores, scores.sum(axis=-1, keepdims=True), visible)


def divide_by_maximum(scores: ArrayLike, mask: MaskLike = None) -> Floats:
    """Divide each score by the largest of its row: the best gets 1, and the sum can be any number.

    Args:
        scores: Scores (…, kv_len).
        mask: Boolean, True = attend; broadcasts to the shape of the scores.

    Returns:
        Quotients (…, kv_len).

    >>> divide_by_maximum([1, 1, 2])
    array([0.5, 0.5, 1. ])
    """
    scores, visible = _prepare_scores("divide_by_maximum", scores, mask)
    return _divide(scores, _find_largest(scores, visible), visible)


def softmax_jacobian(weights: ArrayLike) -> Floats:
    """Compute the Jacobian of softmax from its result: diag(weights) − weights weightsᵀ.

    Entry [i, j] is the derivative of weight i with respect to score j. It vanishes as one weight approaches 1: a
    saturated softmax passes back no gradient.

    Args:
        weights: Softmax weights (…, kv_len).

    Returns:
        The Jacobian (…, kv_len, kv_len).

    >>> softmax_jacobian([0.75, 0.25])
    array([[ 0.1875, -0.1875],
           [-0.1875,  0.1875]])
    >>> bool(np.abs(softmax_jacobian(softmax([40, 0, 0, 0, 0]))).max() < 1e-16)
    True
    """
    weights = as_floats("softmax_jacobian", "weights", weights, "kv_len")
    diagonal = weights[..., :, None] * np.eye(weights.shape[-1])
    return diagonal - weights[..., :, None] * weights[..., None, :]


# Softmax and its alternatives by name, in the order of the table.
ALTERNATIVES: dict[str, Callable[..., Floats]] = {
    function.__name__: function
    for function in (
        softmax,
        sparsemax,
        hardmax,
        normalised_sigmoid,
        normalised_relu,
        divide_by_sum,
        divide_by_maximum,
    )
}


@dataclass(frozen=True, eq=False)
class AlternativeRow:
    """The `weights` (kv_len,) of one function, and how they react to two changes of the scores.

    `change_if_shifted` is the largest change of a weight when 1 is added to every score. `change_if_doubled` is the
    largest change when every score is doubled.

    >>> row = compare_softmax_alternatives([2.0, 1.0, 0.0]).rows["softmax"]
    >>> row.change_if_shifted < 1e-12, round(row.change_if_doubled, 4)
    (True, 0.2016)
    """

    name: str
    weights: Floats
    change_if_shifted: float
    change_if_doubled: float


@dataclass(frozen=True, eq=False)
class AlternativeTable:
    """The weights of softmax and its alternatives for the same `scores` (kv_len,), one of `rows` for each name.

    >>> list(compare_softmax_alternatives([2.0, 1.0, 0.0]).rows)[:3]
    ['softmax', 'sparsemax', 'hardmax']
    """

    scores: Floats
    rows: dict[str, AlternativeRow]

    def __str__(self) -> str:
        keys = [f"{score:g}" for score in self.scores]
        cells = [
            [
                name,
                *(f"{weight:.4f}" for weight in row.weights),
                f"{row.weights.sum():.4f}",
                f"{row.change_if_shifted:.4f}",
                f"{row.change_if_doubled:.4f}",
            ]
            for name, row in self.rows.items()
        ]
        return format_table(cells, ["score", *keys, "sum", "change at +1", "change at ×2"])


def compare_softmax_alternatives(scores: ArrayLike) -> AlternativeTable:
    """Compare the weights that softmax and its alternatives give to one row of scores.

    Args:
        scores: One row of scores (kv_len,).

    Returns:
        A table with a row for each function; `print` it to read it.

    Raises:
        ArgumentError: If the scores are not one row.

    >>> print(compare_softmax_alternatives([1, 0.5, 0, -1]))
                 score       1     0.5       0       -1     sum  change at +1  change at ×2
               softmax  0.4740  0.2875  0.1744   0.0641  1.0000        0.0000        0.1832
             sparsemax  0.7500  0.2500  0.0000   0.0000  1.0000        0.0000        0.2500
               hardmax  1.0000  0.0000  0.0000   0.0000  1.0000        0.0000        0.0000
    normalised_sigmoid  0.3444  0.2933  0.2356   0.1267  1.0000        0.0440        0.0733
       normalised_relu  0.6667  0.3333  0.0000   0.0000  1.0000        0.2222        0.0000
         divide_by_sum  2.0000  1.0000  0.0000  -2.0000  1.0000        2.0000        0.0000
     divide_by_maximum  1.0000  0.5000  0.0000  -1.0000  0.5000        1.0000        0.0000
    """
    scores = as_floats("compare_softmax_alternatives", "scores", scores, "kv_len")
    received, hint = f"scores of shape {scores.shape}", "Select one query, e.g. scores[0]."
    require(scores.ndim == 1, "compare_softmax_alternatives", received, "one row of shape (kv_len,)", hint)
    rows = {}
    for name, function in ALTERNATIVES.items():
        weights = function(scores)
        shifted, doubled = (np.abs(function(x) - weights).max() for x in (scores + 1, scores * 2))
        rows[name] = AlternativeRow(name, weights, float(shifted), float(doubled))
    return AlternativeTable(scores, rows)


def _prepare_scores(operation: str, scores: ArrayLike, mask: MaskLike) -> tuple[Floats, Bools]:
    """Set masked scores to 0, so that they cannot matter, and return them with the visible entries."""
    scores = as_floats(operation, "scores", scores, "kv_len")
    visible = np.ones(scores.shape, dtype=bool) if mask is None else as_mask(operation, mask, scores.shape)
    visible = visible & (scores != -np.inf)  # a score of −inf is the other way to mask a key
    return np.where(visible, scores, 0.0), visible


def _find_largest(scores: Floats, visible: Bools) -> Floats:
    """Find the largest visible score of each row; 0 in a fully masked row."""
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=visible)
    return np.where(largest == -np.inf, 0.0, largest)


def _normalise(parts: Floats, visible: Bools) -> Floats:
    """Divide the visible parts by their sum; rows that sum to 0 are zeros."""
    parts = np.where(visible, parts, 0.0)
    total = parts.sum(axis=-1, keepdims=True)
    shares = parts / np.where(total == 0.0, 1.0, total)
    return np.where(visible, shares, 0.0)  # a NaN spreads to the visible entries only


def _divide(parts: Floats, divisor: Floats, visible: Bools) -> Floats:
    """Divide without guarding against 0, so that quotients may be infinite; masked entries are zeros."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(visible, parts / divisor, 0.0)


def unit_vectors(vectors: ArrayLike) -> Floats:
    """Divide vectors by their lengths; a vector of zeros stays zero.

    Args:
        vectors: Vectors (…, d).

    Returns:
        Unit vectors (…, d).

    >>> unit_vectors([[3, 4], [0, 0]])
    array([[0.6, 0.8],
           [0. , 0. ]])
    """
    vectors = as_floats("unit_vectors", "vectors", vectors, "d")
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0.0, 1.0, lengths)


@dataclass(frozen=True)
class Sharpness:
    """Three measures of how sharp rows of weights are, each averaged over the rows.

    `largest_weight` is 1 for a one-hot row. `entropy` is in nats: 0 for a one-hot row, log(kv_len) for a uniform one.
    `gradient` is the Frobenius norm of the Jacobian of softmax: 0 where softmax is saturated.

    >>> sharpness([[1.0, 0.0, 0.0]])
    Sharpness(largest_weight=1.0, entropy=0.0, gradient=0.0)
    """

    largest_weight: float
    entropy: float
    gradient: float


def sharpness(weights: ArrayLike) -> Sharpness:
    """Measure how sharp rows of weights are: largest weight, entropy and size of the gradient.

    Args:
        weights: Softmax weights (…, kv_len).

    Returns:
        The three measures, averaged over the rows.

    >>> sharpness([0.5, 0.5])
    Sharpness(largest_weight=0.5, entropy=0.693..., gradient=0.5)
    >>> sharpness([1.0, 0.0])
    Sharpness(largest_weight=1.0, entropy=0.0, gradient=0.0)
    """
    weights = as_floats("sharpness", "weights", weights, "kv_len")
    logs = np.log(np.where(weights > 0, weights, 1.0))  # 0 · log 0 is 0, the limit
    jacobian = softmax_jacobian(weights)
    return Sharpness(
        largest_weight=float(weights.max(axis=-1).mean()),
        entropy=float(np.abs((weights * logs).sum(axis=-1)).mean()),
        gradient=float(np.sqrt((jacobian**2).sum(axis=(-1, -2))).mean()),
    )


@dataclass(frozen=True)
class VarianceRow:
    """The results for one `d_k`: the `predicted` and the measured variance, and both again for scaled scores.

    `unscaled` and `scaled` tell how sharp the weights are without and with the division by √d_k.

    >>> row = variance_experiment(16).rows[0]
    >>> row.predicted, 14 < row.variance < 18
    (16.0, True)
    """

    d_k: int
    predicted: float
    variance: float
    scaled_variance: float
    unscaled: Sharpness
    scaled: Sharpness


def variance_row(scores: Floats, d_k: int, predicted: float) -> VarianceRow:
    """Summarise dot products (samples, keys) of vectors of `d_k` numbers, whose predicted variance is given."""
    scaled = scores / math.sqrt(d_k)
    return VarianceRow(
        d_k=d_k,
        predicted=predicted,
        variance=float(scores.var()),
        scaled_variance=float(scaled.var()),
        unscaled=sharpness(softmax(scores)),
        scaled=sharpness(softmax(scaled)),
    )


@dataclass(frozen=True)
class VarianceExperiment:
    """The results of `variance_experiment`: one of `rows` for each d_k, and its settings; prints as a table.

    >>> [row.d_k for row in variance_experiment([4, 16]).rows]
    [4, 16]
    """

    rows: tuple[VarianceRow, ...]
    keys: int
    samples: int
    sigma: float
    unit: bool

    def __str__(self) -> str:
        entries = "unit vectors" if self.unit else f"entries of variance {self.sigma**2:g}"
        headings = ["d_k", "predicted", "variance", "/ √d_k", "largest", "/ √d_k", "entropy", "/ √d_k"]
        table = [
            [
                f"{row.d_k}",
                *(f"{x:.4g}" for x in (row.predicted, row.variance, row.scaled_variance)),
                f"{row.unscaled.largest_weight:.3f}",
                f"{row.scaled.largest_weight:.3f}",
                f"{row.unscaled.entropy:.3f}",
                f"{row.scaled.entropy:.3f}",
                f"{row.unscaled.gradient:.3f}",
                f"{row.scaled.gradient:.3f}",
            ]
            for row in self.rows
        ]
        title = f"{self.samples} queries against {self.keys} keys each, {entries}"
        return f"{title}\n{format_table(table, [*headings, 'gradient', '/ √d_k'])}"


def variance_experiment(
    d_k: Iterable[int] | int = (1, 4, 16, 64, 256),
    *,
    keys: int = 8,
    samples: int = 400,
    sigma: float = 1.0,
    unit: bool = False,
    seed: int = 0,
) -> VarianceExperiment:
    """Measure the variance of dot products for each d_k, and how sharp softmax is, with and without scaling.

    Args:
        d_k: Numbers of entries to try, in rising order, or a single one.
        keys: Number of keys drawn for each query.
        samples: Number of queries drawn for each d_k.
        sigma: Standard deviation of the entries, which are independent and normal.
        unit: Divide every vector by its length.
        seed: Seed of the random numbers.

    Returns:
        The results, one row for each d_k; `print` it to read it.

    >>> experiment = variance_experiment(d_k=[4, 256])
    >>> [round(row.variance / row.d_k, 1) for row in experiment.rows]
    [1.0, 1.0]
    >>> [round(row.scaled_variance, 1) for row in experiment.rows]
    [1.0, 1.0]
    >>> experiment.rows[1].unscaled.largest_weight > 0.9 > 0.5 > experiment.rows[1].scaled.largest_weight
    True
    """
    sizes = as_counts("variance_experiment", "d_k", d_k, minimum=1)
    rng = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        query = rng.normal(scale=sigma, size=(samples, 1, size))
        key = rng.normal(scale=sigma, size=(samples, keys, size))
        if unit:
            query, key = unit_vectors(query), unit_vectors(key)
        scores = (query * key).sum(axis=-1)  # (samples, keys)
        rows.append(variance_row(scores, size, predicted=1 / size if unit else size * sigma**4))
    return VarianceExperiment(tuple(rows), keys, samples, sigma, unit)
