"""One kernel for an output and measures at half precision: when it is called, and what becomes of its results.

The kernel of the torch engine (triton_pass) takes minutes in the interpreter; a dense computation stands for it here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from regard import Distance, Entropy, Output, Position, Received, TopK, attention, causal  # noqa: E402
from regard.engines.torch import TorchEngine  # noqa: E402
from regard.measures import Contribution  # noqa: E402
from regard.tiling import use_tile_sizes  # noqa: E402
from tests.helpers.dense_accumulators import accumulate_dense  # noqa: E402

QUERY, KEY, VALUE = torch.randn(3, 2, 9, 4, generator=torch.Generator().manual_seed(1)).half()
MEASURES = {"entropy": Entropy(), "top": TopK(2), "received": Received(), "distance": Distance()}


def run_dense(problem: Any, value: Any, index: Any, accumulators: Any) -> Any:
    """Compute what `run_measured_product` promises, for a causal mask."""
    scores = problem.query.double() @ problem.key.double().mT * problem.scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    weights, largest = scores.softmax(-1), scores.amax(-1)
    found = (accumulate_dense(each, weights, scores, problem.positions) for each in accumulators)
    dense = [
        tuple(map(torch.tensor, each)) if isinstance(each, tuple) else torch.tensor(each) for each in found
    ]
    return (
        weights @ value[index.tolist()].double(),
        dense,
        largest,
        (scores - largest[..., None]).exp().sum(-1),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the torch engine a kernel, and record the arguments of its calls."""
    found: list[Any] = []

    def name(_: TorchEngine, problem: Any, value: Any, accumulators: Any) -> str:
        return "dense kernel" if value.shape[-2] == problem.shape[-1] and accumulators else ""

    def run(_: TorchEngine, *arguments: Any) -> Any:
        found.append(arguments)
        return run_dense(*arguments)

    monkeypatch.setattr(TorchEngine, "run_measured_product", run)
    monkeypatch.setattr(TorchEngine, "name_measured_product", name)
    monkeypatch.setattr(TorchEngine, "name_compiled_pass", lambda *_: "a pass")
    for method in ("can_accumulate", "prefers_compiled_pass"):
        monkeypatch.setattr(TorchEngine, method, lambda *_: True)
    return found


def test_one_call_gives_the_output_the_measures_and_the_lse(calls: list[Any]) -> None:
    A = attention(QUERY, KEY, mask=causal())
    plan = "torch: dense kernel, one pass: output, entropy, top, received, distance, lse"
    assert A.plan(output=Output(VALUE), **MEASURES) == plan
    found = A.measure(output=Output(VALUE), **MEASURES)
    assert found._fields == ("output", *MEASURES) and A.kernel == "torch: dense kernel"
    exact = attention(QUERY.double().numpy(), KEY.double().numpy(), mask=causal())
    np.testing.assert_allclose(found.output, exact @ VALUE.double().numpy(), rtol=1e-12)
    np.testing.assert_allclose(A.lse, exact.lse, rtol=1e-6)
    for part, expected in zip(found[1:], exact.measure(**MEASURES), strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-9, atol=1e-12)
    assert len(calls) == 1


def test_the_lse_after_one_kernel_takes_no_second_pass(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = attention(QUERY.double().numpy(), KEY.double().numpy(), mask=causal()).lse
    A = attention(QUERY, KEY, mask=causal())
    A.measure(output=Output(VALUE), **MEASURES)
    monkeypatch.setattr("regard.core.matrix.compute_measures", None)
    np.testing.assert_allclose(A.lse, exact, rtol=1e-6)


def test_the_lse_after_measures_that_are_columns_of_a_value_takes_no_second_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    A = attention(QUERY.float(), KEY.float(), mask=causal())
    exact = attention(QUERY.double().numpy(), KEY.double().numpy(), mask=causal()).lse
    assert A.plan(Position()) == "torch: block loop, a single tile: position"
    with use_tile_sizes(whole=0):
        assert "position from extra value columns" in A.plan(Position())
        A.measure(Position())
    monkeypatch.setattr("regard.core.matrix.compute_measures", None)
    np.testing.assert_allclose(A.lse, exact, rtol=1e-6)


@pytest.mark.parametrize(
    "measures",
    [
        {"output": Output(VALUE)},
        {"entropy": Entropy()},
        {"output": Output(VALUE), "second": Output(VALUE), "entropy": Entropy()},
        {"output": Output(VALUE), "entropy": Entropy(), "other": Contribution(1, torch.ones(9))},
        {"output": Output(VALUE.clone().requires_grad_()), "entropy": Entropy()},
    ],
    ids=["an output alone", "no output", "two outputs", "a measure that no kernel knows", "a gradient"],
)
def test_other_calls_are_planned_without_the_kernel(calls: list[Any], measures: Any) -> None:
    assert "dense kernel" not in attention(QUERY, KEY, mask=causal()).plan(**measures)


def test_numpy_has_no_such_kernel() -> None:
    problem = attention(QUERY.numpy(), KEY.numpy()).problem
    assert problem.engine.name_measured_product(problem, VALUE.numpy(), []) == ""
