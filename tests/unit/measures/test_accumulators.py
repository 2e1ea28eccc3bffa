"""The closed vocabulary of built-in measures: each description gives the state that `init` and `step` compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from regard import (
    Coarse,
    Distance,
    Entropy,
    Mass,
    MaxScore,
    MaxWeight,
    Measure,
    Output,
    Position,
    Received,
    Spread,
    TopK,
    attention,
    causal,
    padding,
)
from regard.accumulators import CellReduction, ColumnSum, RowMaxScore, RowMoments, RowSum, RowTopK
from regard.core.block_loop import run_block_loop
from regard.masks import first
from regard.measures import Sum
from regard.measures.base import find_accumulator
from tests.helpers.dense_accumulators import accumulate_dense

LR = "lower_right"
DESCRIBED: dict[str, Any] = {
    "entropy": (Entropy(), RowSum("surprisal")),
    "received": (Received(), ColumnSum()),
    "rows": (Sum(-1), RowSum("one")),
    "columns": (Sum(-2), ColumnSum()),
    "distance": (Distance(LR), RowSum("distance", offset=4)),
    "position": (Position(), RowSum("position")),
    "spread": (Spread(LR), RowMoments(4)),
    "mass": (Mass(first(2)), RowSum("one", intervals=((0, 2),))),
    "mass of two intervals": (Mass(first(2) | ~first(9)), RowSum("one", intervals=((0, 2), (9, 17)))),
    "mass of nothing": (Mass(first(0)), RowSum("one", intervals=())),
    "coarse": (Coarse((3, 5), "mean"), CellReduction((3, 5), "sum")),
    "coarse sum": (Coarse(4, "sum"), CellReduction((4, 4), "sum")),
    "coarse max": (Coarse(4, "max"), CellReduction((4, 4), "max")),
    "top 3": (TopK(3), RowTopK(3)),
    "largest": (MaxWeight(), RowTopK(1)),
    "largest score": (MaxScore(), RowMaxScore()),
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(LR),
    "empty rows": first(0),
    "padded": padding([0, 11]),
}


def matrix(mask: Any = None, **arguments: Any) -> Any:
    rng = np.random.default_rng(2)
    return attention(rng.normal(size=(2, 3, 13, 4)), rng.normal(size=(2, 3, 17, 4)), mask=mask, **arguments)


MEANS = ("entropy", "distance", "position")  # over the keys: with a sink they need the sum of the weights


@pytest.mark.parametrize("sink", [None, np.array([-1.0, 0.0, 2.0])], ids=["no sink", "sink"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_gives_the_result_of_the_measure(name: str, mask: str, sink: Any) -> None:
    measure, described = DESCRIBED[name]
    A = matrix(MASKS[mask], sink=sink)
    problem = A.problem
    parts = (described, RowSum("one")) if sink is not None and name in MEANS else (described,)
    assert find_accumulator(measure, problem) == (parts if len(parts) > 1 else described)
    weights, scores = (x.reshape(6, 13, 17) for x in (A.to_dense(), A.scores[...]))
    bound = measure.bind(problem)
    accumulated = [accumulate_dense(part, weights, scores, np.arange(13)) for part in parts]
    found = bound.finish(bound.restore_state(np.stack(accumulated, -1) if len(parts) > 1 else accumulated[0]))
    state = bound.init(problem.shape, np)
    q_idx, kv_idx = np.arange(13), np.arange(17)
    expected = bound.finish(bound.step(state, weights, scores, q_idx, kv_idx, np))
    for x, y in zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]:
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


class Doubled(Entropy):
    """A subclass of a user that computes something else."""

    def step(self, state, weights, scores, q_idx, kv_idx, xp):
        return super().step(state, 2 * weights, scores, q_idx, kv_idx, xp)


class Renamed(Entropy):
    """A subclass of a user that computes the same state."""

    def finish(self, state):
        return -state


class Own(Measure):
    """A measure of a user."""

    def init(self, shape, xp):
        return xp.zeros(shape[:2])

    def step(self, state, weights, scores, q_idx, kv_idx, xp):
        return state


@pytest.mark.parametrize(
    "measure",
    [Own(), Doubled(), MaxWeight(-2), Output(np.ones(17)), Mass(causal(LR)), TopK(4097)],
    ids=lambda measure: type(measure).__name__,
)
def test_other_measures_have_no_description(measure: Any) -> None:
    assert find_accumulator(measure, matrix().problem) is None


def test_a_share_of_keys_that_differ_between_heads_has_no_description() -> None:
    for mask in (padding([5, 11]), regard.masks.dense(np.arange(17)[None] % 2 == 0)):
        assert find_accumulator(Mass(mask), matrix().problem) is None


def test_a_subclass_that_only_finishes_differently_keeps_the_description() -> None:
    assert find_accumulator(Renamed(), matrix().problem) == RowSum("surprisal")
    np.testing.assert_array_equal(matrix().measure(Renamed()).renamed, -matrix().entropy())


@pytest.mark.parametrize("mask", MASKS)
def test_max_score_is_the_largest_score_of_a_row(mask: str) -> None:
    A = matrix(MASKS[mask], sink=np.array([-1.0, 50.0, 2.0]))
    np.testing.assert_allclose(A.measure(MaxScore()).max_score, A.scores[...].max(-1), rtol=1e-14)


def test_max_score_keeps_nan_and_its_gradient() -> None:
    torch = pytest.importorskip("torch")
    query, key = (torch.tensor(x) for x in np.random.default_rng(0).normal(size=(2, 9, 4)))
    query[3] = torch.nan
    found = attention(query, key, mask=causal()).measure(MaxScore()).max_score
    assert torch.equal(found.isnan(), torch.arange(9) == 3)
    key.requires_grad_()
    (largest,), _ = run_block_loop(attention(query[:3], key).problem, [MaxScore()])
    largest.sum().backward()
    best = (query[:3] @ key.detach().mT).argmax(-1)
    assert torch.equal(key.grad.abs().sum(-1) > 0, torch.zeros(9, dtype=torch.bool).index_fill(0, best, True))
