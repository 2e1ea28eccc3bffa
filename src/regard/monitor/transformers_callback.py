"""A callback for `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback as _TrainerCallback
except ImportError:
    _TrainerCallback = None

from regard.monitor.loggers import summarise_heads
from regard.monitor.training_monitor import Monitor


class TrainerCallback(_TrainerCallback or object):  # type: ignore[misc]
    """Monitor the model of a `transformers.Trainer`: `Trainer(…, callbacks=[TrainerCallback(every=50)])`.

    The numbers of all heads together are also in `trainer.state.log_history`. Evaluation is not counted, because the
    trainer switches the model to eval mode. A resumed run continues the step count.

    Args:
        every: Monitor one of this many optimiser steps.
        **options: Other arguments of `Monitor`, such as `to` and `alarms`.

    Attributes:
        monitor: The `Monitor`, after training has begun.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        if _TrainerCallback is None:
            raise ImportError("TrainerCallback: transformers is not installed. pip install 'regard[hf]'")
        self.monitor: Monitor | None = None
        self._options = {"every": every, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the monitor; a monitor left over from a failed run is detached."""
        self.on_train_end(args, state, control)
        self.monitor = Monitor(kwargs["model"], optimizer=None, **self._options)
        self.monitor.attach(step=state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step; the trainer calls it once for all batches of a step, after the optimiser."""
        assert self.monitor is not None
        self.monitor.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the numbers of a monitored step to the trainer's `log_history`, which its checkpoints save."""
        assert self.monitor is not None
        rows = self.monitor.last_rows
        if rows and rows[0]["step"] == state.global_step - 1:
            state.log_history.append({**summarise_heads(rows), "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the monitor."""
        if self.monitor is not None:
            self.monitor.detach()
