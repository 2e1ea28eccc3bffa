"""An experiment that shows why the scores are divided by √d_k.

A dot product is a sum of d_k products. If the entries are independent, with mean 0 and variance σ², each product has
the variance σ⁴, and variances add up:

    Var(query · key) = d_k σ⁴

So scores grow like √d_k. Softmax depends on their differences and ends up giving everything to one key, where its
Jacobian is nearly 0 and nothing can be learned. Divided by √d_k, the scores have variance σ⁴ in any dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.learn.softmax_alternatives import softmax, softmax_jacobian
from regard.learn.validation import Floats, as_count, as_counts, as_floats, as_number
from regard.render.table import format_table


def unit_vectors(vectors: npt.ArrayLike) -> Floats:
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


def sharpness(weights: npt.ArrayLike) -> Sharpness:
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
    """Summarise the dot products of vectors of `d_k` numbers.

    Args:
        scores: Dot products (samples, keys).
        d_k: Number of entries in each vector.
        predicted: The predicted variance.

    Returns:
        The variances, and how sharp the weights are without and with scaling.
    """
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
    keys = as_count("variance_experiment", "keys", keys, minimum=1)
    samples = as_count("variance_experiment", "samples", samples, minimum=1)
    hint = "It is the standard deviation of the entries, usually 1."
    sigma = as_number("variance_experiment", "sigma", sigma, hint, positive=True)

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
