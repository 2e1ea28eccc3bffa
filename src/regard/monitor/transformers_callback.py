"""A callback for `transformers.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

try:
    from transformers import TrainerCallback as _TrainerCallback
except ImportError:
    _TrainerCallback = None

from regard.errors import ArgumentTypeError, describe_argument
from regard.monitor.training_monitor import Monitor


class TrainerCallback(_TrainerCallback or object):  # type: ignore[misc]
    """Monitor the model of a `transformers.Trainer`: `trainer.add_callback(TrainerCallback(trainer, every=50))`.

    The numbers of all heads together go to `trainer.log`, so to everything in `report_to`. Steps have the trainer's
    numbers: the first is 1. Evaluation is not counted, because the trainer switches the model to eval mode. If a loss
    in the trainer's log is NaN or has risen suddenly, the next step is monitored. Each checkpoint contains the state of
    the monitor, so a resumed run continues it.

    Args:
        trainer: The trainer.
        every: Monitor one of this many optimiser steps, and the first.
        **options: Other arguments of `Monitor`, such as `to` and `alarms`.

    Attributes:
        monitor: The `Monitor`, after training has begun.
    """

    def __init__(self, trainer: Any, every: int = 50, **options: Any) -> None:
        if _TrainerCallback is None:
            raise ImportError("TrainerCallback: transformers is not installed. pip install 'regard[hf]'")
        if not hasattr(trainer, "callback_handler"):
            raise ArgumentTypeError(
                "TrainerCallback",
                received=describe_argument(trainer),
                expected="a transformers.Trainer",
                hint="Build the trainer first: trainer.add_callback(TrainerCallback(trainer, every=50)).",
            )
        self.monitor: Monitor | None = None
        self._trainer = trainer
        self._options = {"every": every, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the monitor, and continue its state; a monitor left over from a failed run is detached."""
        self.on_train_end(args, state, control)
        wrapped = self._trainer.model_wrapped
        model = wrapped if hasattr(wrapped, "_orig_mod") else kwargs["model"]  # Trainer(torch_compile=True)
        self.monitor = Monitor(model, optimizer=None, first_step=1, **self._options)
        path = _find_state(args, state)
        if state.global_step and path.exists():
            self.monitor.load_state_dict(torch.load(path))
        self.monitor.attach(step=state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step; the trainer calls it once for all batches of a step, after the optimiser."""
        assert self.monitor is not None
        self.monitor.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the numbers of a monitored step with the trainer."""
        assert self.monitor is not None
        last = self.monitor.history.last
        if last is not None and last.step == state.global_step:
            should_log = control.should_log
            self._trainer.log(self.monitor.last_numbers)
            control.should_log = should_log  # after a log, the trainer would not log its own numbers

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Monitor the next step if the loss that the trainer logs is NaN or has risen."""
        if self.monitor is not None and "loss" in kwargs.get("logs", ()):
            self.monitor.observe_loss(kwargs["logs"]["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the state of the monitor in the checkpoint."""
        assert self.monitor is not None
        path = _find_state(args, state)
        if path.parent.is_dir():
            torch.save(self.monitor.state_dict(), path)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the monitor."""
        if self.monitor is not None:
            self.monitor.detach()


def _find_state(args: Any, state: Any) -> Path:
    """Return where a checkpoint has the state of a process's monitor."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", f"regard_monitor_{args.process_index}.pt")
