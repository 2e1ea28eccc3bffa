"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback as _Callback
except ImportError:
    _Callback = None

from regard.monitor.training_monitor import Monitor


class LightningCallback(_Callback or object):  # type: ignore[misc]
    """Monitor the module of a Lightning `Trainer`: `Trainer(callbacks=[LightningCallback(every=50)])`.

    The numbers of all heads together are sent to the trainer's loggers, with the trainer's step. Validation is not
    counted, because the trainer switches the module to eval mode. A loss that is NaN or has risen suddenly monitors the
    next step. Checkpoints contain the state of the monitor, and a resumed run continues it.

    Args:
        every: Monitor one of this many optimiser steps.
        **options: Other arguments of `Monitor`, such as `to` and `alarms`.

    Attributes:
        monitor: The `Monitor`, after training has begun.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        if _Callback is None:
            raise ImportError("LightningCallback: lightning is not installed. pip install lightning")
        self.monitor: Monitor | None = None
        self._options = {"every": every, **options}
        self._state: dict[str, Any] = {}  # of the checkpoint from which the run is resumed
        self._num_logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor."""
        self._detach()
        self.monitor = Monitor(pl_module, **self._options)
        if self._state:
            self.monitor.load_state_dict(self._state)
        self._num_logged = self.monitor.history.num_added
        self.monitor.attach(step=trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers of a monitored step with the trainer's loggers, and look at the loss."""
        assert self.monitor is not None
        history = self.monitor.history
        if history.num_added > self._num_logged and history.last is not None:
            self._num_logged = history.num_added
            for logger in trainer.loggers:
                logger.log_metrics(self.monitor.last_numbers, step=history.last.step)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self.monitor.observe_loss(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor, which Lightning saves in its checkpoints."""
        return self._state if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._state = state_dict

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the monitor."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach the monitor."""
        self._detach()

    def _detach(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()
