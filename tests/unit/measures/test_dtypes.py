"""The dtype of a result depends on the measure alone: not on what ran before, nor on what computed it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
    Output,
    Position,
    Received,
    Spread,
    TopK,
    attention,
    causal,
)
from regard.engines.native import use_instruction_set
from regard.masks import first
from regard.measures import Contribution, Sum

N, HEADS, WIDTH = 11, 2, 5
RNG = np.random.default_rng(11)
QUERY, KEY, VALUE = RNG.normal(size=(3, 1, HEADS, N, WIDTH))

MEASURES: dict[str, Callable[[], Any]] = {
    "entropy": Entropy, "received": Received, "distance": Distance, "position": Position, "spread": Spread,
    "max_score": MaxScore, "max_weight": MaxWeight, "max of columns": lambda: MaxWeight(-2), "sum": Sum,
    "sum of columns": lambda: Sum(-2), "mass": lambda: Mass(first(2)), "near": lambda: Mass(causal()),
    "topk": lambda: TopK(3), "mean": lambda: Coarse(2, "mean"), "max": lambda: Coarse(2, "max"),
    "contribution": lambda: Contribution(2, np.ones(N)),
}  # fmt: skip
# What runs before a measure.
BEFORE: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda A, value: None,
    "lse": lambda A, value: A.lse,
    "product": lambda A, value: A @ value,
    "wider output": lambda A, value: A.measure(Output(VALUE)),
    "wider output and entropy": lambda A, value: A.measure(Output(VALUE), Entropy()),
    "wider output and distance": lambda A, value: A.measure(Output(VALUE), Distance()),
    "measures": lambda A, value: A.measure(*(make() for make in (Entropy, Received, Spread))),
}
MATRICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"score_mod": regard.score_mods.bias(RNG.normal(size=(N, N)))},
    "sink": {"sink": 0.5},
    "no key": {"mask": first(0)},
}


def make_matrix(library: str, dtype: str, kind: str) -> tuple[regard.AttentionMatrix, Any]:
    arrays: list[Any] = [array.astype(np.float32) for array in (QUERY, KEY, VALUE)]
    if library == "numpy":
        arrays = [array.astype(dtype) for array in arrays]
    else:
        torch = pytest.importorskip("torch")
        arrays = [torch.from_numpy(array).to(getattr(torch, dtype)) for array in arrays]
        if library == "torch with gradients":
            arrays = [array.requires_grad_() for array in arrays]
    query, key, value = arrays
    if kind == "linear":
        return regard.linear_attention(query, key), value
    return attention(query, key, **MATRICES[kind]), value


KINDS = [*MATRICES, "linear"]


def expect_dtypes(measure: Any) -> list[str]:
    return ["float64", "int64"] if isinstance(measure, TopK | MaxWeight) else ["float64"]


def list_dtypes(result: Any) -> list[str]:
    arrays = result if isinstance(result, tuple) else (result,)
    return [str(array.dtype).removeprefix("torch.") for array in arrays]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind, dtype", [*((kind, "float32") for kind in KINDS), ("plain", "float16")])
@pytest.mark.parametrize("library", ["numpy", "torch", "torch block loop"])
def test_measures_are_float64_whatever_ran_before(library: str, dtype: str, kind: str, before: str) -> None:
    with use_instruction_set(None) if library == "torch block loop" else nullcontext():
        for name, make in MEASURES.items():
            A, value = make_matrix(library, dtype, kind)
            BEFORE[before](A, value)
            for call in range(2):
                assert list_dtypes(A.measure(result=make()).result) == expect_dtypes(make()), (name, call)
        assert A[0, 0, 3].dtype == A.lse.dtype == A.dtype and (A @ value).dtype == value.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_measures_with_gradients_are_float64(kind: str) -> None:
    A, value = make_matrix("torch with gradients", "float32", kind)
    measures = [make() for make in MEASURES.values()]
    results = A.measure(**{f"measure_{i}": measure for i, measure in enumerate(measures)})
    assert [list_dtypes(result) for result in results] == [expect_dtypes(measure) for measure in measures]
    assert A[0, 0, 3].dtype == A.lse.dtype == A.dtype and (A @ value).dtype == value.dtype


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MEASURES)
def test_a_wider_value_changes_neither_the_measures_nor_the_matrix(
    library: str, kind: str, name: str
) -> None:
    A, _ = make_matrix(library, "float32", kind)
    fresh, _ = make_matrix(library, "float32", kind)
    results = A.measure(Output(VALUE), own=MEASURES[name]())

    def as_arrays(result: Any) -> list[Any]:
        arrays = result if isinstance(result, tuple) else (result,)
        return [A.problem.engine.to_numpy(array) for array in arrays]

    expected = as_arrays(fresh.measure(own=MEASURES[name]()).own)
    for found in (results.own, A.measure(own=MEASURES[name]()).own):
        for got, wanted in zip(as_arrays(found), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
    assert list_dtypes(results.output) == ["float64"]
    exact = as_arrays(A.to_dense())[0].astype(np.float64) @ VALUE
    np.testing.assert_allclose(as_arrays(results.output)[0], exact, atol=2e-6)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_sink_of_any_dtype_is_measured(name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    query, key = (torch.tensor(x, dtype=torch.float32).to(torch.bfloat16) for x in (QUERY, KEY))
    sink = torch.tensor([0.5, -1.25], dtype=getattr(torch, dtype))  # exact in every dtype
    expected = attention(*(x.double().numpy() for x in (query, key)), sink=[0.5, -1.25]).measure(
        own=MEASURES[name]()
    )
    for shape in ((HEADS,), ()):
        own = sink if shape else sink[0]
        found = attention(query[:, : own.numel()], key[:, : own.numel()], sink=own).measure(
            own=MEASURES[name]()
        )
        for mine, theirs in zip(_list_arrays(found.own), _list_arrays(expected.own), strict=True):
            np.testing.assert_allclose(mine, theirs[:, : own.numel()], atol=1e-5)


def _list_arrays(result: Any) -> list[Any]:
    """List the arrays of a result, which may be a named tuple of two."""
    return [np.asarray(array) for array in (result if isinstance(result, tuple) else (result,))]
