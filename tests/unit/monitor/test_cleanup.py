"""Whatever ends a run, nothing stays patched, and a monitor that is deleted removes its hooks."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

import regard
from regard.capture import patching, watchers
from regard.monitor import Monitor
from tests.helpers.training import Block, Decoder, compute_loss, draw_batch, train

ORIGINALS = F.scaled_dot_product_attention, torch.softmax, torch.Tensor.softmax


class PlannedError(Exception):
    """The error that ends a run."""


def fail(*_: Any) -> None:
    raise PlannedError


def assert_nothing_patched() -> None:
    assert ORIGINALS == (F.scaled_dot_product_attention, torch.softmax, torch.Tensor.softmax)
    assert not patching.list_patches() and not watchers.watched


def assert_nothing_registered(model: nn.Module) -> None:
    assert_nothing_patched()
    assert not module_hooks._has_any_global_hook() and not optimizer_hooks._global_optimizer_post_hooks
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.fixture(autouse=True)
def check_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    assert_nothing_registered(nn.Identity())


def raise_in_forward(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    model.norm.forward = fail  # type: ignore[method-assign]
    compute_loss(model, draw_batch(0))


def raise_in_backward(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    loss = compute_loss(model, draw_batch(0))
    model.tokens.weight.register_hook(fail)
    loss.backward()


def raise_between_batches(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    compute_loss(model, draw_batch(0)).backward()
    fail()


def raise_in_optimizer(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    compute_loss(model, draw_batch(0)).backward()
    optimizer.register_step_pre_hook(fail)
    optimizer.step()


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    "run", [raise_in_forward, raise_in_backward, raise_between_batches, raise_in_optimizer]
)
def test_a_loop_that_raises_leaves_nothing_patched(
    run: Callable[[Decoder, torch.optim.Optimizer], None], steps_before: int
) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, every=1, alarms=()).attach()
    train(model, optimizer, steps_before)
    with pytest.raises(PlannedError):
        run(model, optimizer)
    assert_nothing_patched()
    assert len({row["step"] for row in monitor.history}) == steps_before
    del monitor
    gc.collect()
    assert_nothing_registered(model)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("optimizer", ["auto", "given", None])
def test_a_monitor_that_is_deleted_removes_its_hooks(optimizer: str | None, has_run: bool) -> None:
    model = Decoder()
    given = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, every=1, optimizer=given if optimizer == "given" else optimizer).attach()
    if has_run:
        compute_loss(model, draw_batch(0)).backward()
    del monitor
    assert_nothing_registered(model)  # at once, without the garbage collector
    assert not given._optimizer_step_post_hooks
    train(model, given, 1)


def test_functions_are_patched_only_while_the_model_runs() -> None:
    seen = []

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(F.scaled_dot_product_attention is ORIGINALS[0])
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(nn.Linear(4, 4), Attention())
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        for _ in range(2):
            output = model(torch.ones(1, 2, 3, 4))
            assert_nothing_patched()
            output.sum().backward()
        model.eval()(torch.ones(1, 2, 3, 4))
        monitor.step()
    assert seen == [False, False, True]
    assert monitor.history.column("rows") == [6, 6]


def test_parts_of_the_model_count_if_they_are_called_directly() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16, 4, 2)
            self.encoder = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)

    model = Holder()
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model.encoder(model.block(torch.ones(1, 5, 16)))
        monitor.step()
    assert sorted(set(monitor.history.column("module"))) == ["block", "encoder.self_attn"]


@torch.no_grad()
def test_evaluation_in_a_monitored_step_is_bit_identical() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 16)
    expected = model(x)  # by the fast path, which hooks of its modules would disable
    for include in (False, True):
        with Monitor(model, every=1, optimizer=None, include_eval=include, alarms=()) as monitor:
            assert torch.equal(model(x), expected)
            if include:
                monitor.step()
                assert len(monitor.history) == 2 * 4


def test_a_later_watch_is_not_measured_by_a_monitor_whose_run_ended() -> None:
    model = Decoder()
    monitor = Monitor(model, every=1, optimizer=None, alarms=()).attach()
    with regard.watch(model) as recording:
        model.eval()(draw_batch(0))
    assert len(recording) == 2 and not monitor._table.layers
    monitor.detach()
    assert_nothing_registered(model)


@pytest.mark.parametrize("way", ["copy", "file"])
def test_a_model_that_is_copied_or_saved_in_a_monitored_step_takes_nothing_with_it(way: str) -> None:
    model, file = Decoder(), io.BytesIO()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, every=1, alarms=()) as monitor:
        if way == "copy":
            copied = copy.deepcopy(model)
        else:
            torch.save(model, file)
            assert b"regard" not in file.getvalue()
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        assert torch.equal(copied(draw_batch(0)), model(draw_batch(0)))
        train(copied, torch.optim.SGD(copied.parameters(), 0.1), 2)  # counts neither passes nor steps
        optimizer.step()
    assert set(monitor.history.column("rows")) == {3 * 23} and monitor.num_steps == 1


def test_a_step_in_which_nothing_was_measured_warns_once() -> None:
    model = Block(16, 4, 2)
    with Monitor(model, every=1, optimizer=None, alarms=()) as monitor:
        model.attend(torch.ones(1, 5, 16), None)  # a method, and no call of the module
        with pytest.warns(UserWarning, match="nothing was measured in step 0"):
            monitor.step()
        monitor.step()
    assert not monitor.history


def test_an_exception_in_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from regard.monitor import TrainerCallback

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        fails_at = 3

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == self.fails_at:
                raise PlannedError
            tokens = draw_batch(index, 1)[0]
            return {"input_ids": tokens, "labels": tokens}

    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    model, data = transformers.LlamaForCausalLM(config), Data()
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    callback = TrainerCallback(trainer, every=1, alarms=())
    trainer.add_callback(callback)
    with pytest.raises(PlannedError):
        trainer.train()
    assert_nothing_patched()
    data.fails_at = -1
    trainer.train()  # the monitor of the first run is detached
    assert callback.monitor.history.steps == list(range(1, 7))
    assert set(callback.monitor.history.column("rows")) == {23}
    assert_nothing_registered(model)
