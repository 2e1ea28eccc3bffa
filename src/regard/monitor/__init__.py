"""Monitor a training run: measure every head exactly, once every N steps, without changing the run.

`Monitor(model, every=50, to="attention.jsonl")` measures the largest score, the entropy and the weight on the first
token of every head once every N steps, and raises alarms. The package imports `regard.lens` and below, and torch;
loggers are imported where they are used.

Design notes:
- A monitored step is one table of sums and one of maxima. Calls and processes combine their tables by addition and
  maximum. One SUM and one MAX all-reduce give the same numbers as one process on the joined batch. The processes agree
  on the layers once, in the first monitored step.
- The monitor computes the largest weight of a row from its largest score and the lse. A search for the largest weight
  made the pass a third longer.
- A compiled model is not monitored. Its graph would break at each attention call, and outputs would differ by
  rounding. The monitor raises an error that names `monitor.is_due`.
- The loggers need no package extra. The monitor calls methods of the objects that it is given, and does not import
  their libraries.
- A monitored step runs inside `regard.watch`, entered and left at the boundaries of the step. Its patches are in place
  only while a module of the model runs. Other steps run none of this code.

>>> import torch
>>> from regard.monitor import Monitor
>>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
>>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
>>> with Monitor(model, every=2) as monitor:
...     for _ in range(3):
...         model(torch.ones(1, 4, 8)).sum().backward()
...         optimizer.step()
>>> monitor.history.column("step"), monitor.history.column("head")
([0, 0, 2, 2], [0, 1, 0, 1])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401 - required by every module of the package
except ImportError as error:
    raise ImportError("regard.monitor: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.monitor.alarms import (
    Alarm,
    AlarmError,
    AlarmRule,
    AlarmWarning,
    DeadHead,
    EntropyCollapse,
    NonFinite,
    SaturatedHead,
    ScoreGrowth,
)
from regard.monitor.training_monitor import Monitor

if TYPE_CHECKING:
    from regard.monitor.lightning_callback import LightningCallback
    from regard.monitor.transformers_callback import TrainerCallback

__all__ = [
    "Alarm",
    "AlarmError",
    "AlarmRule",
    "AlarmWarning",
    "DeadHead",
    "EntropyCollapse",
    "LightningCallback",
    "Monitor",
    "NonFinite",
    "SaturatedHead",
    "ScoreGrowth",
    "TrainerCallback",
]


def __getattr__(name: str) -> Any:
    """Import the callbacks on first access: their base classes are those of transformers and lightning."""
    if name == "TrainerCallback":
        from regard.monitor import transformers_callback as callbacks
    elif name == "LightningCallback":
        from regard.monitor import lightning_callback as callbacks  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'regard.monitor' has no attribute {name!r}")
    callback = getattr(callbacks, name)
    callback.__module__ = __name__
    return callback


def __dir__() -> list[str]:
    return sorted(__all__)


set_public_module(globals())
