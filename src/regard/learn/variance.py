"""Why the scores are divided by √d_k: an experiment.

A dot product is a sum of d_k products. If the entries are independent, with mean 0 and variance σ², each product has
the variance σ⁴, and variances add up:

    Var(query · key) = d_k σ⁴

So scores grow like √d_k, and softmax, which looks at their distances, comes to give everything to one key. There its
Jacobian is nearly 0 and nothing can be learned. Divided by √d_k the scores keep the variance σ⁴ in any dimension.
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
    """The vectors divided by their lengths, (…, n, d) as they came; a vector of zeros stays as it is.

    >>> unit_vectors([[3, 4], [0, 0]])
    array([[0.6, 0.8],
           [0. , 0. ]])
    """
    vectors = as_floats("unit_vectors", "vectors", vectors, "d")
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0.0, 1.0, lengths)


@dataclass(frozen=True)
class Sharpness:
    """How sharp rows of weights are, each number a mean over the rows.

    `largest_weight` is 1 for a one-hot row. `entropy` is in nats: 0 for a one-hot row, log(kv_len) for an even one.
    `gradient` is the size of softmax's Jacobian, the root of the sum of its squared entries: 0 where it is saturated.

    >>> sharpness([[1.0, 0.0, 0.0]])
    Sharpness(largest_weight=1.0, entropy=0.0, gradient=0.0)
    """

    largest_weight: float
    entropy: float
    gradient: float


def sharpness(weights: npt.ArrayLike) -> Sharpness:
    """The largest weight, the entropy and the size of the gradient, over rows of weights (…, kv_len).

    >>> sharpness([0.5, 0.5])
    Sharpness(largest_weight=0.5, entropy=0.693..., gradient=0.5)
    >>> sharpness([1.0, 0.0])
    Sharpness(largest_weight=1.0, entropy=0.0, gradient=0.0)
    """
    weights = as_floats("sharpness", "weights", weights, "kv_len")
    logs = np.log(np.where(weights > 0, weights, 1.0))  # 0 · log 0 counts as 0, its limit
    jacobian = softmax_jacobian(weights)
    return Sharpness(
        largest_weight=float(weights.max(axis=-1).mean()),
        entropy=float(np.abs((weights * logs).sum(axis=-1)).mean()),
        gradient=float(np.sqrt((jacobian**2).sum(axis=(-1, -2))).mean()),
    )


@dataclass(frozen=True)
class VarianceRow:
    """What was found for one `d_k`: the variance `predicted` and measured, then with the scores divided by √d_k.

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
    """What is found in the dot products (samples, keys) of vectors of `d_k` numbers."""
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
    """The rows of the experiment, one for each d_k, and what it was made with; prints as a table.

    >>> [row.d_k for row in variance_experiment([4, 16]).rows]
    [4, 16]
    """

    rows: tuple[VarianceRow, ...]
    keys: int
    samples: int
    sigma: float
    unit: bool

    def __str__(self) -> str:
        drawn = "unit vectors" if self.unit else f"entries of variance {self.sigma**2:g}"
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
        title = f"{self.samples} queries against {self.keys} keys each, {drawn}"
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
    """The variance of dot products for each d_k, and what softmax makes of them, with and without scaling.

    For each d_k it draws `samples` queries and, for each of them, `keys` keys, with independent normal entries of
    standard deviation `sigma`; with `unit`, every vector is divided by its length.

    >>> found = variance_experiment(d_k=[4, 256])
    >>> [round(row.variance / row.d_k, 1) for row in found.rows]
    [1.0, 1.0]
    >>> [round(row.scaled_variance, 1) for row in found.rows]
    [1.0, 1.0]
    >>> found.rows[1].unscaled.largest_weight > 0.9 > 0.5 > found.rows[1].scaled.largest_weight
    True
    """
    sizes = as_counts("variance_experiment", "d_k", d_k, minimum=1)
    keys = as_count("variance_experiment", "keys", keys, minimum=1)
    samples = as_count("variance_experiment", "samples", samples, minimum=1)
    hint = "It is the standard deviation of the entries; 1 is the usual one."
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
