"""The callbacks for the trainers of transformers and Lightning count optimiser steps, and leave training unchanged."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.training import Decoder, compute_loss, draw_batch


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Batches of the tests as a data set of transformers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = draw_batch(index, 1)[0]
        return {"input_ids": tokens, "labels": tokens}


def build_trainer(folder: Path, monitored: bool, **arguments: Any) -> Any:
    """Return a `transformers.Trainer` of a small Llama, with a callback or without."""
    transformers = pytest.importorskip("transformers")
    from regard.monitor import TrainerCallback

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    usual = {
        "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(str(folder), **usual | arguments),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
    )
    if monitored:
        trainer.add_callback(TrainerCallback(trainer, every=2, alarms=()))
    return trainer


def find_monitor(trainer: Any) -> Any:
    from regard.monitor import TrainerCallback

    (callback,) = (
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TrainerCallback)
    )
    return callback.monitor


def read_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.nightly
def test_transformers_trainer_compiles_the_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    runs = [build_trainer(tmp_path, monitored, **options) for monitored in (False, True)]
    for trainer in runs:
        torch._dynamo.reset()
        trainer.train()
    losses = [read_losses(trainer) for trainer in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    uncompiled = build_trainer(tmp_path, True)
    uncompiled.train()
    rows, expected = (list(find_monitor(trainer).history) for trainer in (runs[1], uncompiled))
    assert [row["module"] for row in rows] == [row["module"] for row in expected] and len(rows) == 3 * 2 * 4
    for row, other in zip(rows, expected, strict=True):
        assert row["max_score"] == pytest.approx(other["max_score"], rel=1e-5)
        assert row["entropy"] == pytest.approx(other["entropy"], rel=1e-5)


def test_transformers_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    plain = build_trainer(tmp_path, False)
    plain.train()
    trainer = build_trainer(tmp_path, True, eval_strategy="steps", eval_steps=2, report_to="tensorboard")
    trainer.train()
    assert read_losses(trainer) == read_losses(plain) and len(read_losses(trainer)) == 5
    monitor = find_monitor(trainer)
    assert monitor.history.steps == [1, 2, 4]
    assert set(monitor.history.column("rows")) == {2 * 2 * 23}  # two batches of two; evaluation is left out
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "attention/max_score" in entry}
    assert list(logged) == [1, 2, 4]
    assert logged[4]["attention/max_score"] == monitor.last_numbers["attention/max_score"]
    assert not monitor.is_due
    written = EventAccumulator(str(tmp_path / "logs")).Reload().Scalars("train/attention/max_score")
    assert [event.step for event in written] == [1, 2, 4]


def test_a_resumed_trainer_continues_the_monitor(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = build_trainer(tmp_path / "whole", True, max_steps=8)
    whole.train()
    build_trainer(tmp_path / "parts", True, max_steps=4, save_strategy="steps", save_steps=3).train()
    resumed = build_trainer(tmp_path / "parts", True, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert read_losses(resumed) == read_losses(whole)
    assert list(find_monitor(resumed).history) == list(find_monitor(whole).history)
    assert find_monitor(resumed).history.steps == [1, 2, 4, 6, 8]


def test_a_loss_of_the_trainer_that_is_nan_monitors_the_next_step(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    trainer = build_trainer(tmp_path, True, max_steps=12, logging_nan_inf_filter=False)
    compute_loss, calls = trainer.compute_loss, []

    def compute(model: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        loss = compute_loss(model, *args, **kwargs)
        return loss * float("nan") if len(calls) == 2 * 8 else loss

    trainer.compute_loss = compute
    trainer.train()
    (incident,) = [incident for incident in find_monitor(trainer).incidents if incident.step == 9]
    assert incident.reason == "the loss is nan" and incident.rows.column("step")[0] == 9


@pytest.mark.filterwarnings("default")
def test_lightning_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from regard.monitor import LightningCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Decoder()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = compute_loss(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            compute_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def run(callbacks: list[Any]) -> Module:
        torch.manual_seed(0)
        module = Module()
        data = torch.utils.data.DataLoader([draw_batch(i, 1)[0] for i in range(32)], batch_size=2)
        trainer = lightning.Trainer(
            max_steps=5, accumulate_grad_batches=2, val_check_interval=4, logger=CSVLogger(tmp_path), accelerator="cpu",
            callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, data, data)
        return module

    callback = LightningCallback(every=2, alarms=())
    assert run([callback]).losses == run([]).losses
    history = callback.monitor.history
    assert history.steps == [0, 2, 4]
    assert set(history.column("rows")) == {2 * 2 * 23}
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["attention/max_score"]]
    assert [int(row["step"]) for row in logged] == [0, 2, 4]
    assert float(logged[-1]["attention/max_score"]) == callback.monitor.last_numbers["attention/max_score"]


@pytest.mark.filterwarnings("default")
def test_a_resumed_lightning_trainer_continues_the_monitor(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from regard.monitor import LightningCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Decoder()

        def training_step(self, batch: Any, index: int) -> Any:
            return compute_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def run(max_steps: int, checkpoint: str | None = None) -> Any:
        torch.manual_seed(0)
        module, callback = Module(), LightningCallback(every=2, alarms=())
        trainer = lightning.Trainer(
            max_steps=max_steps, logger=False, accelerator="cpu", callbacks=[callback], enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        data = torch.utils.data.DataLoader([draw_batch(i, 1)[0] for i in range(32)], batch_size=2)
        trainer.fit(module, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return callback.monitor

    run(3)
    resumed, whole = run(7, str(tmp_path / "3.ckpt")), run(7)
    assert resumed.history.steps == whole.history.steps == [0, 2, 4, 6]
    assert list(resumed.history)[: 2 * 8] == list(whole.history)[: 2 * 8]
