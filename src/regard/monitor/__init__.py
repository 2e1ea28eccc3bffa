"""Monitor a training run: measure every head exactly, once every N steps, without changing the run.

`Monitor(model, every=50, to="attention.jsonl")` measures the largest score, the entropy and the weight on the first
token of every head once every N steps, and raises alarms. `qk_clip(model, monitor)` limits the scores. The package
imports `regard.lens` and below, and torch; loggers are imported where they are used.

Design notes:
- A monitored step is one table of sums and one of maxima. Calls and processes combine their tables by addition and
  maximum. One SUM and one MAX all-reduce give the same numbers as one process on the joined batch. The processes agree
  on the layers once, in the first monitored step.
- The numbers of a step are arrays with one entry for each head. Rules, summaries and the history work on whole arrays:
  5,120 heads cost 20 ms of processor time. Rows are made when they are read.
- The history drops every second of its older steps when its bytes run out, and then three of four. It covers the whole
  run evenly, where a window would forget how the run began. The last 32 steps, which alarms look at, are kept.
- Each target of `to` has a thread and a bounded queue, so a target that hangs delays neither training nor others.
- The monitor computes the largest weight of a row from its largest score and the lse. A search for the largest weight
  made the pass a third longer.
- A compiled model is not monitored. Its graph would break at each attention call, and outputs would differ by
  rounding. The monitor raises an error that names `monitor.is_due`.
- The loggers need no package extra. The monitor calls methods of the objects that it is given, and does not import
  their libraries. The callbacks for trainers use the trainer's own loggers, in its thread and with its step.
- `qk_clip` refuses what it does not know. A class of transformers must call the library's attention interface or be
  listed in `regard.families`, and parts of a module must be known to leave the scores alone.
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
    LostAttention,
    NonFinite,
    SaturatedHead,
    ScoreGrowth,
)
from regard.monitor.history import History, Snapshot
from regard.monitor.query_key_clip import ClippedHead, qk_clip
from regard.monitor.training_monitor import Incident, Monitor

if TYPE_CHECKING:
    from regard.monitor.lightning_callback import LightningCallback
    from regard.monitor.transformers_callback import TrainerCallback

__all__ = [
    "Alarm",
    "AlarmError",
    "AlarmRule",
    "AlarmWarning",
    "ClippedHead",
    "DeadHead",
    "EntropyCollapse",
    "History",
    "Incident",
    "LightningCallback",
    "LostAttention",
    "Monitor",
    "NonFinite",
    "SaturatedHead",
    "ScoreGrowth",
    "Snapshot",
    "TrainerCallback",
    "qk_clip",
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
