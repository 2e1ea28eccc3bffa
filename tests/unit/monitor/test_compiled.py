"""`Monitor` of models that `torch.compile` has compiled: equal losses and numbers, and one more graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.monitor import Monitor
from tests.helpers.nightly import keep_in_ci
from tests.helpers.training import Decoder, draw_batch, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using .torch.compile:UserWarning",  # torch, of hooks and a compiled model
    "ignore:The .grad attribute of a Tensor:UserWarning",  # torch, of compiled blocks
)

Model = Callable[..., Any]


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_blocks(model: Decoder, **options: Any) -> Model:
    for block in model.blocks:
        block.compile(**options)
    return model


def wrap_blocks(model: Decoder, **options: Any) -> Model:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)
    return model


def compile_in_place(model: Decoder, **options: Any) -> Model:
    model.compile(**options)
    return model


WAYS: dict[str, tuple[Callable[..., Model], dict[str, Any], dict[str, Any]]] = {
    "torch.compile(model)": (torch.compile, {}, {}),
    "model.compile()": (compile_in_place, {}, {}),
    "block.compile()": (compile_blocks, {}, {}),
    "torch.compile(block)": (wrap_blocks, {}, {}),
    "accumulation": (torch.compile, {}, {"accumulate": 2}),
    "autocast": (torch.compile, {}, {"autocast": True}),
    "checkpointing": (torch.compile, {"checkpointing": False}, {}),
    "checkpointing, blocks": (compile_blocks, {"checkpointing": False}, {}),
}


def run(
    compiles: Callable[..., Model] | None, way: str, every: int | None, **options: Any
) -> tuple[Any, Any]:
    """Train for seven steps; return the losses and the history."""
    _, model_options, train_options = WAYS[way]
    torch.manual_seed(5)
    model = Decoder(**model_options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    called = model if compiles is None else compiles(model, fullgraph="autocast" not in way, **options)
    if every is None:
        return train(called, optimizer, 7, **train_options), None
    with Monitor(called, every=every, alarms=()) as monitor:
        return train(called, optimizer, 7, **train_options), monitor.history


def compare_with_uncompiled(way: str, tolerance: float, **options: Any) -> None:
    compiles = WAYS[way][0]
    plain, _ = run(compiles, way, None, **options)
    torch._dynamo.reset()
    losses, history = run(compiles, way, 3, **options)
    assert losses == plain  # bit-identical
    _, expected = run(None, way, 3)
    assert len(history) == len(expected) == 3 * 2 * 4
    for row, other in zip(history, expected, strict=True):
        assert (row["step"], row["module"], row["head"], row["rows"]) == (
            other["step"], other["module"], other["head"], other["rows"],
        )  # fmt: skip
        for name in row.keys() - {"module"}:
            assert row[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("way", keep_in_ci(WAYS, "torch.compile(model)", "block.compile()"))
def test_losses_and_numbers_equal_those_of_the_uncompiled_model(way: str) -> None:
    compare_with_uncompiled(way, 0.0, backend="aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_inductor_gives_equal_losses_and_numbers_up_to_rounding(way: str) -> None:
    compare_with_uncompiled(way, 2e-2 if way == "autocast" else 1e-4)


def test_a_monitored_step_adds_one_graph_and_other_steps_run_the_first() -> None:
    graphs: list[list[str]] = []

    def keep_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch.manual_seed(5)
    model = Decoder()
    called = torch.compile(model, backend=keep_graph)
    with torch.no_grad():
        called(draw_batch(0))
        with Monitor(called, every=2, alarms=(), optimizer=None) as monitor:
            for step in range(5):
                called(draw_batch(step))
                monitor.step()
        called(draw_batch(0))
    assert monitor.history.steps == [0, 2, 4]
    plain, monitored = graphs
    assert not any("observe_attention" in name for name in plain)
    assert sum("observe_attention" in name for name in monitored) == 2
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


class Attending(nn.Module):
    """One layer with projections, whose attention is a function of query, key and value."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(8, 3 * 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value).transpose(1, 2)


def test_layers_with_their_own_softmax_are_refused_by_name() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.softmax(query @ key.mT, -1) @ value

    layers = [Attending(F.scaled_dot_product_attention), nn.Flatten(2), nn.Linear(8, 8), Attending(attend)]
    model = torch.compile(nn.Sequential(*layers), backend="aot_eager")
    with Monitor(model, alarms=(), optimizer=None) as monitor:
        model(torch.randn(2, 4, 8))
        with pytest.raises(regard.NotCapturedError, match=r"'3'.*own softmax"):
            monitor.step()


def test_compiled_functions_that_call_the_model_are_refused() -> None:
    model = Attending(F.scaled_dot_product_attention)
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager")
    with (
        Monitor(model, alarms=(), optimizer=None),
        pytest.raises(regard.ArgumentError, match=r"model\.compile\(\)"),
    ):
        compiled(torch.randn(2, 5, 8))
