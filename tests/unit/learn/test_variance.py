"""The variance experiment, sharpness and unit vectors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from regard import learn
from regard.learn import (
    CheckedAttention,
    fit_exponent,
    sharpness,
    softmax,
    unit_vectors,
    variance_experiment,
)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def test_variance_grows_with_d_k_unless_scaled() -> None:
    found = variance_experiment(d_k=[2, 16, 128], samples=1000)
    assert [row.d_k for row in found.rows] == [2, 16, 128]
    for row in found.rows:
        # Keys share their query, which increases the error; a quarter is more than five standard errors.
        assert row.predicted == row.d_k
        assert row.variance == pytest.approx(row.d_k, rel=0.25)
        assert row.scaled_variance == pytest.approx(row.variance / row.d_k, rel=1e-12)
    for a, b in itertools.pairwise(row.unscaled for row in found.rows):
        assert a.largest_weight < b.largest_weight
        assert a.entropy > b.entropy
        assert a.gradient > b.gradient
    last = found.rows[-1]
    assert last.unscaled.largest_weight > 0.85 > 0.45 > last.scaled.largest_weight
    assert last.scaled.gradient > 2 * last.unscaled.gradient
    assert 0.4 < fit_exponent([2, 16, 128], [math.sqrt(row.variance) for row in found.rows]) < 0.6


@pytest.mark.parametrize(("options", "power"), [({"sigma": 3.0}, 1), ({"unit": True}, -1)])
def test_variance_of_other_vectors(options: Any, power: int) -> None:
    for row in variance_experiment(d_k=[4, 32], samples=1000, **options).rows:
        assert row.predicted == pytest.approx(row.d_k**power * options.get("sigma", 1) ** 4)
        assert row.variance == pytest.approx(row.predicted, rel=0.25)


def test_experiment_depends_on_its_seed_and_prints() -> None:
    first, again, other = (variance_experiment(d_k=[4, 8], samples=20, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    title, headings, *lines = str(first).splitlines()
    assert title == "20 queries against 8 keys each, entries of variance 1"
    assert headings.split()[:3] == ["d_k", "predicted", "variance"]
    assert [line.split()[0] for line in lines] == ["4", "8"]
    assert f"{first.rows[1].scaled.gradient:.3f}" == lines[1].split()[-1]
    assert "unit vectors" in str(variance_experiment(d_k=[2], samples=3, unit=True))


def test_sharpness_from_its_definition() -> None:
    weights = softmax(draw(5, 7))
    found = sharpness(weights)
    assert found.largest_weight == pytest.approx(np.mean([max(row) for row in weights]))
    assert found.entropy == pytest.approx(np.mean([-sum(w * math.log(w) for w in row) for row in weights]))
    norms = [np.linalg.norm(np.diag(row) - np.outer(row, row)) for row in weights]
    assert found.gradient == pytest.approx(np.mean(norms))


def test_unit_vectors_remove_magnitude() -> None:
    K = learn.magnitude.K
    np.testing.assert_allclose(np.linalg.norm(unit_vectors(draw(2, 3, 5)), axis=-1), 1, rtol=1e-15)
    short, long, across = CheckedAttention(2).compute_scores(learn.magnitude.Q, unit_vectors(K))[0]
    assert short == pytest.approx(long, rel=1e-15)
    assert across < short
