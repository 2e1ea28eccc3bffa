"""The callbacks for the trainers of transformers and Lightning count optimiser steps, and leave training unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.training import Decoder, compute_loss, draw_batch


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from regard.monitor import TrainerCallback

    class Dataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = draw_batch(index, 1)[0]
            return {"input_ids": tokens, "labels": tokens}

    def run(callbacks: list[Any]) -> Any:
        transformers.set_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            eval_strategy="steps", eval_steps=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        data = Dataset()
        trainer = transformers.Trainer(
            transformers.LlamaForCausalLM(config),
            arguments,
            train_dataset=data,
            eval_dataset=data,
            callbacks=callbacks,
        )
        trainer.train()
        return trainer

    def losses(trainer: Any) -> list[float]:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    callback = TrainerCallback(every=2, alarms=())
    trainer = run([callback])
    assert losses(trainer) == losses(run([])) and len(losses(trainer)) == 5
    history = callback.monitor.history
    assert sorted(set(history.column("step"))) == [0, 2, 4]
    assert set(history.column("rows")) == {2 * 2 * 23}  # two batches of two; evaluation is left out
    logged = [entry for entry in trainer.state.log_history if "attention/max_score" in entry]
    assert [entry["step"] for entry in logged] == [1, 3, 5]
    assert not callback.monitor.is_due


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
    assert sorted(set(history.column("step"))) == [0, 2, 4]
    assert set(history.column("rows")) == {2 * 2 * 23}
    assert "attention/max_score" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
