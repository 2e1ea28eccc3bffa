"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback as _Callback
except ImportError:
    _Callback = None

from regard.monitor.training_monitor import Monitor


class LightningCallback(_Callback or object):  # type: ignore[misc]
    """Monitor the module of a Lightning `Trainer`: `Trainer(callbacks=[LightningCallback(every=50)])`.

    The numbers are sent to the trainer's loggers and to the targets of `to`. Validation is not counted, because the
    trainer switches the module to eval mode.

    Args:
        every: Monitor one of this many optimiser steps.
        to: More targets, as for `Monitor`.
        **options: Other arguments of `Monitor`, such as `alarms`.

    Attributes:
        monitor: The `Monitor`, after training has begun.
    """

    def __init__(self, every: int = 50, to: Any = None, **options: Any) -> None:
        if _Callback is None:
            raise ImportError("LightningCallback: lightning is not installed. pip install lightning")
        self.monitor: Monitor | None = None
        self._to = list(to) if isinstance(to, list | tuple) else [] if to is None else [to]
        self._options = {"every": every, **options}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor."""
        self._detach()
        loggers = [logger.log_metrics for logger in trainer.loggers]
        self.monitor = Monitor(pl_module, to=[*loggers, *self._to], **self._options)
        self.monitor.attach(step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the monitor."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach the monitor."""
        self._detach()

    def _detach(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()
