"""Softmax and its alternatives, from their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.learn import (
    CheckedAttention,
    compare_softmax_alternatives,
    hardmax,
    sharpness,
    softmax,
    softmax_jacobian,
    sparsemax,
)
from regard.learn.softmax_alternatives import ALTERNATIVES


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


every_alternative = pytest.mark.parametrize("function", ALTERNATIVES.values(), ids=ALTERNATIVES.keys())

rows_of_scores = st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=7).map(np.array)


@given(rows_of_scores)
def test_softmax_from_its_definition(scores: Any) -> None:
    wide = np.exp(scores.astype(np.longdouble))
    np.testing.assert_allclose(softmax(scores), (wide / wide.sum()).astype(float), rtol=1e-13)
    np.testing.assert_allclose(
        softmax(scores), CheckedAttention(1).compute_weights(scores[None])[0], rtol=1e-15
    )


@given(rows_of_scores, st.floats(0.25, 8, width=16))
def test_temperature_divides_the_scores(scores: Any, temperature: float) -> None:
    np.testing.assert_allclose(
        softmax(scores, temperature=temperature), softmax(scores / temperature), rtol=1e-12
    )


@given(rows_of_scores)
def test_temperature_ranges_from_one_hot_to_uniform(scores: Any) -> None:
    np.testing.assert_array_equal(softmax(scores, temperature=0), hardmax(scores))
    np.testing.assert_array_equal(softmax(scores, temperature=1e-300), hardmax(scores))
    np.testing.assert_allclose(softmax(scores, temperature=math.inf), 1 / len(scores))


@given(rows_of_scores)
def test_hardmax_splits_ties_equally(scores: Any) -> None:
    best = scores == scores.max()
    np.testing.assert_array_equal(hardmax(scores), best / best.sum())


@given(rows_of_scores)
def test_sparsemax_is_the_nearest_distribution(scores: Any) -> None:
    weights = sparsemax(scores)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-13)
    # The projection onto a convex set is the one point p with (scores − p) · (corner − p) ≤ 0 for every corner.
    for corner in np.eye(len(scores)):
        assert (scores - weights) @ (corner - weights) <= 1e-11


@given(rows_of_scores, st.integers(0, 2**32 - 1))
def test_no_other_distribution_is_nearer_than_sparsemax(scores: Any, seed: int) -> None:
    others = np.random.default_rng(seed).dirichlet(np.ones(len(scores)), size=20)
    nearest = np.linalg.norm(scores - sparsemax(scores))
    assert (np.linalg.norm(scores - others, axis=1) >= nearest - 1e-12).all()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalised_sigmoid", lambda s: 1 / (1 + math.exp(-s))),
        ("normalised_relu", lambda s: max(s, 0)),
        ("divide_by_sum", lambda s: s),
    ],
)
def test_parts_are_divided_by_their_sum(name: str, part: Any) -> None:
    scores = [0.5, -2.0, 3.0, 1.0, 0.0]
    parts = [part(s) for s in scores]
    np.testing.assert_allclose(ALTERNATIVES[name](scores), np.array(parts) / sum(parts), rtol=1e-14)


@every_alternative
def test_masked_scores_have_no_effect(function: Any) -> None:
    scores, mask = draw(5, 7) + 0.3, draw(5, 7, seed=1) < 0.5
    mask[2] = False
    got = function(scores, mask)
    assert got.shape == (5, 7)
    for row, seen, weights in zip(scores, mask, got, strict=True):
        assert (weights[~seen] == 0).all()
        if seen.any():
            np.testing.assert_allclose(weights[seen], function(row[seen]), rtol=1e-12, atol=1e-14)
    for poison in (math.nan, math.inf, -math.inf, 1e300):
        np.testing.assert_array_equal(function(np.where(mask, scores, poison), mask), got)
    np.testing.assert_array_equal(function(np.where(mask, scores, -math.inf)), got)


@every_alternative
def test_alternatives_work_on_the_last_axis(function: Any) -> None:
    scores = draw(2, 3, 5)
    got = function(scores)
    for where in np.ndindex(2, 3):
        np.testing.assert_allclose(got[where], function(scores[where]), rtol=1e-14)
    for shape in [(0,), (3, 0), (0, 4)]:
        assert function(np.ones(shape)).shape == shape
    order = [3, 0, 4, 1, 2]
    np.testing.assert_allclose(function(scores[..., order]), got[..., order], atol=1e-12)


def test_comparison_shows_the_properties_of_each_alternative() -> None:
    found = compare_softmax_alternatives([1, 0.5, 0, -1])
    assert list(found.rows) == list(ALTERNATIVES)
    for name, row in found.rows.items():
        np.testing.assert_array_equal(row.weights, ALTERNATIVES[name]([1, 0.5, 0, -1]))
        distribution = (row.weights >= 0).all() and abs(row.weights.sum() - 1) < 1e-12
        assert distribution == (name not in ("divide_by_sum", "divide_by_maximum"))
        assert (row.change_if_shifted < 1e-12) == (name in ("softmax", "sparsemax", "hardmax"))
        assert (row.change_if_doubled < 1e-12) == (name not in ("softmax", "sparsemax", "normalised_sigmoid"))
    assert not np.isfinite(ALTERNATIVES["divide_by_sum"]([1, -1])).any()
    assert (ALTERNATIVES["normalised_relu"]([-1, -2]) == 0).all()


@given(rows_of_scores)
def test_the_jacobian_is_the_derivative(scores: Any) -> None:
    weights, step = softmax(scores), 1e-5
    jacobian = softmax_jacobian(weights)
    for j, nudge in enumerate(np.eye(len(scores)) * step):
        slope = (softmax(scores + nudge) - softmax(scores - nudge)) / (2 * step)
        np.testing.assert_allclose(
            jacobian[:, j], slope, atol=1e-9
        )  # the next term is step² / 6, and rounding
    np.testing.assert_allclose(jacobian.sum(axis=0), 0, atol=1e-15)  # the weights keep summing to 1


def test_a_saturated_softmax_has_no_gradient() -> None:
    one_hot = softmax([40, 0, 0, 0, 0])
    assert one_hot[0] > 1 - 1e-15
    assert 1e12 * sharpness(one_hot).gradient < sharpness(softmax([4, 0, 0, 0, 0])).gradient
