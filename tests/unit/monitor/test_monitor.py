"""`Monitor`: training is bit-identical, every pass of a step counts once, and other steps run none of its code."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import regard
from regard.monitor import Monitor, step_table
from tests.helpers.nightly import keep_in_ci
from tests.helpers.training import Block, Decoder, compute_loss, draw_batch, train

WAYS = {
    "plain": ({}, {}),
    "accumulation": ({}, {"accumulate": 2}),
    "checkpointing": ({"checkpointing": False}, {}),
    "reentrant checkpointing": ({"checkpointing": True}, {}),
    "autocast": ({}, {"autocast": True}),
}


def build(**options: object) -> tuple[Decoder, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Decoder(**options)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


@pytest.mark.parametrize("way", keep_in_ci(WAYS, "plain"))
def test_losses_of_300_steps_are_bit_identical(way: str) -> None:
    model_options, train_options = WAYS[way]
    plain = train(*build(**model_options), 300, **train_options)
    model, optimizer = build(**model_options)
    with Monitor(model, every=20, alarms=()) as monitor:
        assert train(model, optimizer, 300, **train_options) == plain
    assert plain[-1] < plain[0]
    assert sorted(set(monitor.history.column("step"))) == list(range(0, 300, 20))
    batches = train_options.get("accumulate", 1)
    assert set(monitor.history.column("rows")) == {batches * 3 * 23}


def dense_rows(model: Decoder, batches: list[torch.Tensor]) -> dict[tuple[int, int], dict[str, float]]:
    """Compute the columns from dense float64 weights, layer by layer."""
    calls: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    inputs = []
    hooks = [
        block.register_forward_pre_hook(lambda block, args: inputs.append((block, args[0].detach())))
        for block in model.blocks
    ]
    checkpointing, model.checkpointing = model.checkpointing, None
    with torch.no_grad():
        for batch in batches:
            model(batch)
    model.checkpointing = checkpointing
    for hook in hooks:
        hook.remove()
    for block, x in inputs:
        layer = list(model.blocks).index(block)
        x = block.norm1(x)
        query = block.query(x).unflatten(-1, (block.heads, -1)).transpose(1, 2).double()
        key = block.key_value(x).unflatten(-1, (2, block.kv_heads, -1)).permute(2, 0, 3, 1, 4)[0].double()
        key = key.repeat_interleave(block.heads // block.kv_heads, 1)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        n = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
        calls.setdefault(layer, []).append((scores, scores.softmax(-1)))
    rows = {}
    for layer, parts in calls.items():
        for head in range(parts[0][0].shape[1]):
            scores, weights = (
                torch.cat([part[i][:, head].detach().flatten(0, 1) for part in parts]) for i in (0, 1)
            )
            entropy = torch.special.entr(weights).sum(-1)
            rows[layer, head] = {
                "max_score": scores.amax(),
                "max_score_mean": scores.amax(-1).mean(),
                "entropy": entropy.mean(),
                "entropy_min": entropy.amin(),
                "first": weights[:, 0].mean(),
                "first_max": weights[:, 0].amax(),
                "saturated": (weights.amax(-1) > 0.99).double().mean(),
            }
    return rows


def assert_dense_rows(
    monitor: Monitor, expected: dict[tuple[int, int], dict[str, float]], step: int = 0
) -> None:
    rows = monitor.history.filter(step=step)
    assert {(row["layer"], row["head"]) for row in rows} == set(expected)
    for row in rows:
        for name, value in expected[row["layer"], row["head"]].items():
            assert row[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


def test_two_monitors_copies_of_the_model_and_a_state_between_batches_change_no_number() -> None:
    model, optimizer = build()
    model.blocks[0].eval()
    expected = dense_rows(model, [draw_batch(0), draw_batch(1)])
    first, second = (Monitor(model, every=1, alarms=(), optimizer=optimizer) for _ in range(2))
    with first, second:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(draw_batch(7))  # another model
        compute_loss(model, draw_batch(0)).backward()
        assert first.state_dict()["step"] == 0  # the resumed run repeats the step
        compute_loss(model, draw_batch(1)).backward()
        optimizer.step()
    for monitor in (first, second):
        assert_dense_rows(monitor, expected)


def test_a_model_may_change_its_dtype_between_steps() -> None:
    model, _ = build()
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        for step, dtype in enumerate((torch.float32, torch.float64)):
            model.to(dtype)
            model(draw_batch(0))
            monitor.step()
            monitor.detach()
            assert_dense_rows(monitor, dense_rows(model, [draw_batch(0)]), step)
            monitor.attach()


@pytest.mark.parametrize("way", ["plain", "accumulation", "checkpointing", "reentrant checkpointing"])
def test_columns_equal_the_dense_definition(way: str) -> None:
    model_options, train_options = WAYS[way]
    model, optimizer = build(**model_options)
    train(model, optimizer, 20)
    batches = [draw_batch(40 + part) for part in range(train_options.get("accumulate", 1))]
    expected = dense_rows(model, batches)
    with Monitor(model, every=1, alarms=(), optimizer=optimizer) as monitor:
        train(model, optimizer, 1, first_step=40 // len(batches), **train_options)
    assert_dense_rows(monitor, expected)


def test_other_steps_run_no_code_in_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    entered = []
    folder = str(Path(regard.__file__).parent)

    def trace(frame: object, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.append(frame.f_code.co_qualname)

    calls = {}
    with Monitor(model, every=4, alarms=()) as monitor:
        for step in range(9):
            entered.clear()
            sys.setprofile(trace)
            try:
                compute_loss(model, draw_batch(step)).backward()
            finally:
                sys.setprofile(None)
            calls[step] = len(entered)
            assert monitor.is_due == (step % 4 == 0)
            optimizer.step()
    assert [step for step, count in calls.items() if count] == [0, 4, 8]
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    assert not hasattr(F.scaled_dot_product_attention, "_regard_original")


def test_passes_in_eval_mode_do_not_count_unless_included() -> None:
    for include, rows in ((False, 3 * 23), (True, 2 * 3 * 23)):
        model, optimizer = build()
        with Monitor(model, every=1, alarms=(), include_eval=include) as monitor:
            model.eval()
            with torch.no_grad():
                compute_loss(model, draw_batch(1))
            model.train()
            train(model, optimizer, 1)
        assert set(monitor.history.column("rows")) == {rows}


def test_padding_is_left_out() -> None:
    model, _ = build()
    tokens = draw_batch(0, batch=2)
    lengths = torch.tensor([23, 9])
    for left in (False, True):
        position = torch.arange(23)
        is_token = position >= 23 - lengths[:, None] if left else position < lengths[:, None]
        mask = is_token[:, None, None, :] & torch.ones(23, 23, dtype=torch.bool).tril()
        with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
            logits = model(tokens, mask)
            assert logits.shape[0] == 2
            monitor.step()
        assert set(monitor.history.column("rows")) == {23 + 9}
        assert set(monitor.history.column("nonfinite")) == {0}
        with regard.watch(model) as recording:
            model(tokens, mask)
        for row in recording.heads():
            mine = monitor.history.filter(layer=row["layer"], head=row["head"])[0]
            assert mine["first"] == pytest.approx(row["first"], rel=1e-6)
            assert mine["entropy"] == pytest.approx(row["entropy"], rel=1e-5)


def test_rows_with_nan_are_counted_and_left_out() -> None:
    model, _ = build()
    with torch.no_grad():
        model.positions.weight[20] = math.nan
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(draw_batch(0))
        monitor.step()
    first = monitor.history.filter(layer=0)
    assert set(first.column("nonfinite")) == {3 * 3}  # rows 20, 21 and 22 read key 20
    assert all(np.isfinite(row["entropy"]) and np.isfinite(row["max_score"]) for row in first)


def test_layers_keep_their_numbers_in_steps_that_skip_others() -> None:
    class LayerDrop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block(16, 4, 2) for _ in range(3))

        def forward(self, x: torch.Tensor, skipped: set[int]) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                x = x if number in skipped else block(x)
            return x

    model, logged = LayerDrop(), {}
    with Monitor(
        model, every=1, alarms=(), optimizer=None, to=lambda numbers, step: logged.update({step: numbers})
    ) as monitor:
        for skipped in ({2}, {0}, {0, 1}, set()):
            model(torch.randn(2, 5, 16), skipped)
            monitor.step()
    assert {(row["module"], row["layer"]) for row in monitor.history} == {
        (f"blocks.{n}", n) for n in range(3)
    }
    for step, numbers in logged.items():
        for layer in range(3):
            entropy = monitor.history.filter(step=step, layer=layer).column("entropy")
            assert numbers.get(f"attention/layer{layer}/entropy") == (np.median(entropy) if entropy else None)
    assert not any("layer0" in name for name in logged[1])


def test_the_outermost_of_nested_blocks_detaches() -> None:
    model, optimizer = build()
    with Monitor(model, every=1, alarms=()) as monitor:
        with monitor:
            train(model, optimizer, 1)
        train(model, optimizer, 1)
    train(model, optimizer, 1)
    assert sorted(set(monitor.history.column("step"))) == [0, 1]
    with monitor:  # it may be entered again
        train(model, optimizer, 1)
    assert sorted(set(monitor.history.column("step"))) == [0, 1, 2]


def test_the_step_of_a_resumed_run_is_checked() -> None:
    model, optimizer = build()
    monitor = Monitor(model, every=10, alarms=())
    for step in (-1, 2.5, "3", True):
        with pytest.raises(regard.ArgumentError, match="step"):
            monitor.attach(step=step)
    monitor.attach(step=np.int64(29))
    assert monitor.attach(step=29) is monitor.attach() is monitor
    with pytest.raises(regard.ArgumentError, match="detach"):
        monitor.attach(step=40)
    train(model, optimizer, 2)
    monitor.detach()
    assert set(monitor.history.column("step")) == {30}


def test_several_optimizers_count_once_and_others_not_at_all() -> None:
    model, _ = build()
    halves = list(model.blocks[0].parameters()), list(model.blocks[1].parameters())
    mine = [torch.optim.SGD(half, 0.1) for half in halves]
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    with Monitor(model, every=2, alarms=()) as monitor:
        for step in range(4):
            compute_loss(model, draw_batch(step)).backward()
            for optimizer in (foreign, *mine):
                optimizer.step()
    assert monitor.num_steps == 4
    assert sorted(set(monitor.history.column("step"))) == [0, 2]
    mine[0].step()
    assert monitor.num_steps == 4  # detached


def test_layers_that_are_not_captured_raise_once_and_detach() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x) * (x @ x.mT).sigmoid().sum()

    monitor = Monitor(Own(), every=1, optimizer=None).attach()
    monitor._model(torch.ones(1, 4, 4))
    with pytest.raises(regard.NotCapturedError):
        monitor.step()
    assert not monitor.is_due
    monitor.step()
    assert len(monitor.history) == 0


def test_more_measures_have_mean_and_extremes() -> None:
    model, optimizer = build()
    with Monitor(model, every=1, measures={"distance": regard.Distance()}, alarms=()) as monitor:
        train(model, optimizer, 1)
    row = monitor.history[0]
    assert row["distance_min"] == 0 and row["distance_min"] < row["distance"] < row["distance_max"] < 23
    with (
        pytest.raises(regard.ArgumentError, match="one number for each row"),
        Monitor(model, every=1, measures={"received": regard.TopK(2)}, optimizer=None),
    ):
        model(draw_batch(0))


def test_arguments_are_checked() -> None:
    model, optimizer = build()
    with pytest.raises(regard.ArgumentTypeError, match="optimizer"):
        Monitor(model, optimizer=3)
    with pytest.raises(regard.ArgumentError, match="every"):
        Monitor(model, every=0)
    with pytest.raises(regard.ArgumentError, match="on_alarm"):
        Monitor(model, on_alarm="print")
    with pytest.raises(regard.ArgumentTypeError, match="to="):
        Monitor(model, to=3)
    with (
        Monitor(model, optimizer=optimizer) as monitor,
        pytest.raises(regard.ArgumentError, match="Omit the call"),
    ):
        monitor.step()
    assert step_table.SATURATED_WEIGHT == 0.99
