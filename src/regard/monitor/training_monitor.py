"""`Monitor`: measure every head of a model in one training step of N, log the numbers and raise alarms."""

from __future__ import annotations

import math
import os
import sys
import threading
import types
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from regard.capture.call import Call
from regard.capture.patching import exclude_from_compile
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.table import Table
from regard.lens.watch import Watch, check_model, is_compiled, strip_compiled, watch_step
from regard.measures import Measure
from regard.monitor.alarms import DEFAULT_ALARMS, Alarm, AlarmError, AlarmRule, AlarmWarning
from regard.monitor.head_layout import HeadSizes, LayerPart, Layout, agree_on_layout, find_layer_part
from regard.monitor.history import History, Snapshot, find_worst, summarise
from regard.monitor.history_page import build_history_page, draw_history
from regard.monitor.loggers import LogThread, StepRecord, make_target, wait_for_all
from regard.monitor.step_table import StepTable
from regard.pages.html import Page
from regard.validation import check_count

if TYPE_CHECKING:
    from regard.distributed.matrix import DistributedMatrix

__all__ = ["Incident", "Monitor"]

OnAlarm = Literal["warn", "raise"] | Callable[[Alarm], object]

# What is kept of a run, besides the history.
MAX_ALARMS, MAX_INCIDENTS = 10_000, 100
# Warnings of a step; all alarms are in `monitor.raised`.
MAX_WARNINGS = 10
# A loss is a spike if it exceeds the median of the last losses by this many median deviations, and by this share.
MIN_LOSSES, MAX_LOSSES, SPIKE_DEVIATIONS, SPIKE_SHARE = 10, 50, 10.0, 0.1


class Incident(NamedTuple):
    """A step that was monitored on demand.

    Args:
        step: The step.
        reason: Why it was monitored, such as "the loss rose from 2.1 to 3.5".
        rows: Its worst heads: with NaN or inf, the largest scores, the lowest entropy, and the fastest change.
    """

    step: int
    reason: str
    rows: Table


class Monitor:
    """Measure every attention head once every `every` training steps, log the numbers, and raise alarms.

    Training is bit-identical with and without a monitor, and unmonitored steps run no monitor code in forward or
    backward. The first step is monitored. In a monitored step, all forward passes count (gradient accumulation), except
    passes in eval mode and reruns of a layer by activation checkpointing. Padding is excluded. Functions are patched
    only while a module of the model runs, so an exception leaves none patched. Only after KeyboardInterrupt or
    SystemExit inside a forward pass do they stay patched until the next step, `detach` or the end of the `with` block.
    For a compiled model, they stay patched until the monitored step ends.
    Deleting a monitor removes its hooks. Layers are numbered in the order in which they first ran.

    `monitor.history` has one row for each step, layer and head:

    - `max_score`: the largest score, after scale, mask and score modifications; `max_score_mean`: the mean over rows
      of each row's largest score.
      Both are NaN, with a warning, if a layer computes its own softmax in a way that hides the scores.
    - `entropy`: the mean entropy of a row, in nats; `entropy_min`: the smallest.
    - `first`: the mean weight on the first token; `first_max`: the largest.
    - `saturated`: the share of rows with a weight above 0.99.
    - `nonfinite`: number of rows with NaN or inf, which the other columns exclude; `rows`: number of all rows.
    - With `measures`, three columns for each measure: its mean as `name`, its extremes as `name_min` and `name_max`.

    `monitor.layer_history` has one row for each step and layer: minimum, median and maximum over its heads of each
    column (`entropy.min`, `entropy.median`, `entropy.max`), and the heads with the largest score, the lowest entropy
    and the fastest change of the largest score. Both histories together take at most `history_bytes`, however long the
    run is: of older steps, every second one is dropped, then three of four, and so on. The last 32 monitored steps are
    kept.

    With torch.distributed, every process needs a monitor. The processes combine their numbers in each monitored step
    with one SUM and one MAX all-reduce; the process of rank 0 logs. Every head has one row: heads that tensor
    parallelism splits (parameters that are DTensors) are numbered by their index among all heads, and pipeline stages
    add their layers. With context parallelism (`context_parallel` of torch, `regard.distributed.attention`), each row
    is measured over the keys of all processes.

    Args:
        model: The model, its DistributedDataParallel, or what `torch.compile` returned for either.
        every: Monitor one in this many optimiser steps.
        measures: More measures by name, with one number for each row, such as `{"distance": regard.Distance()}`.
        to: Where the numbers go; one target, or a list. The rows of all heads go to a path: JSON lines are appended to
            a file, and a path that ends in `.parquet` is a folder with a file for each step. Numbers of the model and
            of each layer go to a function `(numbers, step)`, a TensorBoard `SummaryWriter`, a wandb run or module, or
            the module mlflow. Each target has a thread of its own. If a target raises an exception or is too slow, the
            monitor warns once, counts it in `num_failed_logs` or `num_dropped_logs`, and training continues.
        alarms: Rules to check in each monitored step; () for none. Default: the six rules of `regard.monitor`.
        on_alarm: "warn", "raise" an `AlarmError`, or a function that is called with each `Alarm`.
        optimizer: Whose steps to count: "auto" for the first optimiser that steps and holds parameters of the model,
            an optimiser, or None if the training loop calls `monitor.step()`.
        layers: Names of modules, or patterns with `*`, to monitor. Default: all.
        include_eval: Also count passes while the model is in eval mode.
        process_group: The processes to combine. Default: all, if torch.distributed is initialised.
        first_step: Number of the first step of a run, 0 or 1.
        history_bytes: Number of bytes that the two histories may take, besides the last 32 monitored steps.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.
        ArgumentError: If `every` or `history_bytes` is too small, or the model is scripted.

    >>> import torch
    >>> from regard.monitor import Monitor
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> monitor = Monitor(model, every=10, optimizer=None).attach()
    >>> _ = model(torch.ones(1, 4, 8))
    >>> monitor.step()
    >>> monitor.detach()
    >>> [round(entropy, 4) for entropy in monitor.history.column("entropy")]
    [1.3863, 1.3863]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        measures: Mapping[str, Measure] | None = None,
        to: Any = None,
        alarms: Sequence[AlarmRule] = DEFAULT_ALARMS,
        *,
        on_alarm: OnAlarm = "warn",
        optimizer: Optimizer | Literal["auto"] | None = "auto",
        layers: str | Iterable[str] | None = None,
        include_eval: bool = False,
        process_group: Any = None,
        first_step: int = 0,
        history_bytes: int = 2**27,
    ) -> None:
        model = check_model(model, "Monitor", allows_compiled=True)
        check_count(every, 1, None, "Monitor", "every", "", "every=1 monitors every step.")
        check_count(
            first_step, 0, 1, "Monitor", "first_step", "", "Most loops count from 0, trainers from 1."
        )
        check_count(history_bytes, 0, None, "Monitor", "history_bytes", "", "The default is 134,217,728.")
        if optimizer not in ("auto", None) and not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                "Monitor",
                received=f"optimizer as {describe_argument(optimizer)}",
                expected='"auto", a torch.optim.Optimizer or None',
                hint="With None, call monitor.step() after each optimiser step.",
            )
        if not callable(on_alarm) and on_alarm not in ("warn", "raise"):
            raise ArgumentError(
                "Monitor",
                received=f"on_alarm={on_alarm!r}",
                expected='"warn", "raise" or a function of an alarm',
                hint="For example on_alarm=print.",
            )
        self.every = every
        self.history = History(history_bytes // 2)
        """The numbers of each head in the monitored steps."""
        self.layer_history = History(history_bytes // 2)
        """Quantiles over the heads of each layer in the monitored steps."""
        self.raised: list[Alarm] = []
        """The alarms so far; the last 10,000."""
        self.incidents: list[Incident] = []
        """The steps that were monitored on demand, with their worst heads; the last 100."""
        # Names of layers do not depend on the wrappers.
        self._is_compiled = False
        while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
            self._is_compiled |= is_compiled(model)
            model = getattr(model, "_orig_mod", None) or model.module
        self._model = model
        self._measures = dict(measures or {})
        self._rules, self._on_alarm = tuple(alarms), on_alarm
        self._optimizer = optimizer
        self._counted: Any = None  # weak reference to the optimiser that "auto" has found
        self._layers = layers if layers is None or isinstance(layers, str) else tuple(layers)
        self._include_eval, self._group = include_eval, process_group
        targets = to if isinstance(to, list | tuple) else [] if to is None else [to]
        self._logs = [LogThread(make_target(target)) for target in targets]
        self._step = self.first_step = first_step
        self._attached = self._is_resumed = False
        self._requested: str | None = None  # why the next step is monitored
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._last_numbers: dict[str, float] = {}
        self._num_entered = 0  # `with` blocks
        self._registered = _Registered()
        weakref.finalize(self, self._registered.release).atexit = False
        weakref.finalize(self, _stop_all, self._logs).atexit = False
        self._table = StepTable(self._measures)
        self._layer_numbers: dict[
            str, int
        ] = {}  # by name; a layer keeps its number in steps that skip others
        self._parts: dict[str, LayerPart] = {}  # what this process holds
        self._layout: Layout | None = None  # what the processes have agreed on
        self._active: set[tuple[str, str, int]] = set()  # alarms whose condition still holds
        self._warned: set[Any] = set()  # what has been warned of, once

    # Steps

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps so far."""
        return self._step - self.first_step

    @property
    def is_due(self) -> bool:
        """Whether the current step is monitored."""
        return self._registered.watch is not None

    @property
    def last_rows(self) -> Table:
        """The rows of the last monitored step; empty before the first."""
        return Table(self.history.last.rows() if self.history.last else ())

    @property
    def last_numbers(self) -> dict[str, float]:
        """The numbers of all heads together in the last monitored step, by the names that loggers use."""
        return self._last_numbers.copy()

    @property
    def num_failed_logs(self) -> int:
        """Number of times that a target of `to` raised an exception, which does not stop training."""
        return sum(thread.num_failed for thread in self._logs)

    @property
    def num_dropped_logs(self) -> int:
        """Number of steps that a target of `to` was too slow for, summed over the targets."""
        return sum(thread.num_dropped for thread in self._logs)

    def attach(self, step: int | None = None) -> Monitor:
        """Start counting steps from 0; `with Monitor(…) as monitor` does the same.

        Args:
            step: Number of the next step, to resume a run.

        Returns:
            The monitor.

        Raises:
            ArgumentError: If `step` is not an integer, or the monitor is already attached and counts a different step.
        """
        hint = (
            "Pass the number of optimiser steps so far, as it is in a loaded state; detach() first if the monitor is "
            "attached."
        )
        if step is not None:
            only = self._step if self._attached or self._is_resumed else None
            step = check_count(step, only or 0, only, "monitor.attach", "step", "", hint)
        if self._attached:
            return self
        if step is not None or self._is_resumed:
            self._step, self._is_resumed = self._step if step is None else step, False
            if self._step > self.first_step:
                for thread in self._logs:
                    thread.put(self._step)
        self._attached = True
        count_step = _make_weak(self._after_optimizer_step)
        if self._optimizer == "auto":
            self._registered.hook = register_optimizer_step_post_hook(count_step)
        elif self._optimizer is not None:
            self._registered.hook = self._optimizer.register_step_post_hook(count_step)
        self._begin_step()
        return self

    def detach(self) -> None:
        """Stop counting, and wait at most ten seconds for the targets of `to`. An incomplete step is dropped.

        `attach` continues.
        """
        self._attached = False
        self._registered.release()
        wait_for_all(self._logs)
        self._warn_of_logs()
        waiting = sum(thread.num_waiting for thread in self._logs)
        if waiting:
            self._warn_once("waiting", f"targets of `to` have not logged {waiting} steps after ten seconds.")

    def __enter__(self) -> Monitor:
        self.attach()
        self._num_entered += 1
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._num_entered -= 1
        if not self._num_entered:  # the outermost of nested blocks
            self.detach()

    def step(self) -> None:
        """Count one optimiser step; call it after `optimizer.step()` if `optimizer=None`.

        Raises:
            ArgumentError: If the monitor counts the steps of an optimiser itself.
            NotCapturedError: If the step was monitored and an attention layer ran that the lens cannot capture.
            AlarmError: With `on_alarm="raise"`.
        """
        if self._optimizer is not None:
            raise ArgumentError(
                "monitor.step",
                received="a call, and the monitor counts the optimiser's steps itself",
                expected="one of the two",
                hint="Omit the call, or build the monitor with optimizer=None.",
            )
        self._end_step()

    def _after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer == "auto":
            counted = None if self._counted is None else self._counted()
            if counted is None:
                own = {id(parameter) for parameter in self._model.parameters()}
                held = (parameter for group in optimizer.param_groups for parameter in group["params"])
                if not any(id(parameter) in own for parameter in held):
                    return
                self._counted = weakref.ref(optimizer)
            elif counted is not optimizer:
                return  # several optimisers share the model: one of them counts
        self._end_step()

    def _begin_step(self) -> None:
        is_due = self._step % self.every == 0 or self._step == self.first_step
        if is_due or self._requested is not None:
            self._table = StepTable(self._measures)
            self._is_compiled |= any(map(is_compiled, self._model.modules()))
            self._start_watch()

    def _start_watch(self) -> None:
        watch = watch_step(
            self._model,
            self._layers,
            _make_weak(self._measure),
            _make_weak(self._measure_shards),
            self._is_compiled,
        )
        if self._is_compiled:
            self._registered.begin_compiled_step(watch)
        else:
            follow = _make_weak(self._follow_compiled)
            self._registered.begin_step(watch, self._model, self._include_eval, follow)

    def _follow_compiled(self) -> None:
        """Start the step again: what is running is the model as `torch.compile` has compiled it."""
        self._is_compiled = True
        self._registered.drop_watch()
        self._start_watch()

    def _end_step(self) -> None:
        if not self._attached:
            return
        step, entered = self._step, self._registered.end_step()
        self._step = step + 1
        if entered is not None:
            try:
                entered.__exit__(None, None, None)
            except BaseException:
                self.detach()
                raise
            try:
                self._finish(step)
            except ArgumentError:
                self.detach()
                raise
        self._begin_step()

    def _measure(self, call: Call) -> dict[str, Any]:
        """Measure a call inside the watch; only its sums are recorded."""
        if self._model.training or self._include_eval:
            if not self._is_compiled:
                _check_runs_in_python()
            name = strip_compiled(call.name)
            if name not in self._parts and _is_distributed():
                self._parts[name] = find_layer_part(self._model, name, HeadSizes.from_call(call))
            call.name = name
            self._table.add(call)
        return {}

    def _measure_shards(self, name: str, matrix: DistributedMatrix) -> None:
        """Measure a layer whose tokens are on the ranks of a process group, inside the watch."""
        if self._model.training or self._include_eval:
            _check_runs_in_python()
            if name not in self._parts:
                self._parts[name] = find_layer_part(self._model, name, HeadSizes.from_shards(matrix))
            self._table.add_shards(name, matrix)

    # Results

    def _finish(self, step: int) -> None:
        """Combine the table of a step with those of other processes, log it, and check the alarms."""
        table, rank = self._table, 0
        if _is_distributed():
            rank = dist.get_rank(self._group)
            layout = self._layout
            if layout is None:
                layout = agree_on_layout({name: self._parts[name] for name in table.layers}, self._group)
            if layout:
                self._layout = layout
                table.combine(layout, self._parts, self._group, self._find_device())
        heads = table.snapshot(step, self._layer_numbers)
        if rank == 0:
            self._warn_of_gaps(heads)
        if not len(heads):
            return  # a request stays open: it may have come after the forward passes of the step
        layers = summarise(heads, ("module", "layer"), self.history)
        record = StepRecord(heads, layers, summarise(heads, ()))
        if self._requested is not None:
            rows = Table(heads.select(find_worst(heads, self.history)).rows())
            self.incidents.append(Incident(step, self._requested, rows))
            del self.incidents[:-MAX_INCIDENTS]
            self._requested = None
        self._last_numbers = record.numbers(with_layers=False)
        self.history.add(heads)
        self.layer_history.add(layers)
        if rank == 0:
            for thread in self._logs:
                thread.put(record)
            self._warn_of_logs()
        self._check_alarms(heads, rank)

    def _warn_once(self, key: Any, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"Monitor: {text}", stacklevel=3)

    def _warn_of_logs(self) -> None:
        """Warn once of each target that failed, and of each that is too slow."""
        for number, thread in enumerate(self._logs):
            if thread.error is not None:
                step, error = thread.error
                self._warn_once(
                    ("failed", number),
                    f"a target of `to` failed in step {step}, and training continues without logging its numbers: "
                    f"{type(error).__name__}: {error}. It is called again in later steps; monitor.num_failed_logs "
                    "counts the failures.",
                )
            if thread.num_dropped:
                self._warn_once(
                    ("dropped", number),
                    f"a target of `to` ({type(thread.target).__name__}) is slower than the monitored steps, so steps "
                    "are dropped. monitor.num_dropped_logs counts them; a larger `every` gives the target more time.",
                )

    def _warn_of_gaps(self, heads: Snapshot) -> None:
        """Warn once if no attention ran inside a forward pass of the model, or layers have weights and no scores."""
        if not len(heads) and self._table.is_empty and self._requested is None:
            self._warn_once(
                "nothing",
                f"nothing was measured in step {heads.step}: no attention ran inside a call of the model or of one of "
                "its modules in training mode. Call modules rather than their methods, and compile modules rather "
                "than functions that call them: model.compile().",
            )
        is_unknown = np.isnan(heads["max_score"]) & (heads["rows"] > heads["nonfinite"])
        for index in np.flatnonzero(is_unknown)[:1]:
            self._warn_once(
                "scores",
                f"the scores of {heads.places[index][0]!r} are unknown, so its max_score is NaN, and neither rules "
                "about scores nor QK-clip work. The layer computes its own softmax: it exponentiates the scores, "
                "subtracts the largest one before the softmax, or changes the weights after it. Call "
                "F.scaled_dot_product_attention, or torch.softmax with the scores themselves.",
            )

    def _find_device(self) -> Any:
        if dist.get_backend(self._group) == "gloo":
            return "cpu"
        return next(self._model.parameters()).device

    def _check_alarms(self, heads: Snapshot, rank: int) -> None:
        """Report the alarms that were not active in the last monitored step; every process raises, rank 0 reports."""
        found = [alarm for rule in self._rules for alarm in rule.check(heads, self.history)]
        new = [alarm for alarm in found if alarm.place not in self._active]
        self._active = {alarm.place for alarm in found}
        self.raised.extend(new)
        del self.raised[:-MAX_ALARMS]
        if not new:
            return
        if self._on_alarm == "raise":
            self.detach()
            raise AlarmError.from_alarms(new)
        if rank == 0:
            if callable(self._on_alarm):
                for alarm in new:
                    self._on_alarm(alarm)
                return
            for alarm in new[:MAX_WARNINGS]:
                warnings.warn(str(alarm), AlarmWarning, stacklevel=2)
            if len(new) > MAX_WARNINGS:
                more = f"step {heads.step}: {len(new) - MAX_WARNINGS:,} more alarms; monitor.raised has them"
                warnings.warn(more, AlarmWarning, stacklevel=2)

    # Steps on demand

    def request(self, reason: str = "requested") -> None:
        """Monitor the next step, whatever its number.

        With torch.distributed, every process has to call it in the same step.

        Args:
            reason: Why, for `monitor.incidents`.
        """
        self._requested = reason
        if self._attached and not self.is_due:
            self._begin_step()

    def observe_loss(self, loss: float) -> bool:
        """Monitor the next step if the loss is NaN or inf, or far above the losses of the last 50 calls.

        With torch.distributed, every process has to call it in every step; it costs one all-reduce of one number.

        Args:
            loss: Loss of the step, a number or a tensor with one element.

        Returns:
            Whether the next step is monitored because of this loss.
        """
        value, reason = float(loss), None
        if not math.isfinite(value):
            reason = f"the loss is {value}"
        elif len(self._losses) >= MIN_LOSSES:
            median = float(np.median(self._losses))
            deviation = float(np.median(np.abs(np.array(self._losses) - median)))
            if value - median > max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * abs(median)):
                reason = f"the loss rose from {median:.4g} to {value:.4g}"
        if reason is None:
            self._losses.append(value)
        if _is_distributed():
            flag = torch.tensor(float(reason is not None), device=self._find_device())
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            if reason is None and flag.item():
                reason = "the loss of another process rose or is not finite"
        if reason is not None:
            self.request(reason)
        return reason is not None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, to be saved with a checkpoint: `torch.load` reads it with its defaults.

        It waits until the targets of `to` have logged the steps so far, for at most ten seconds.

        Returns:
            The number of steps, the history, and the state of the alarms.
        """
        wait_for_all(self._logs)
        return {
            "step": self._step,
            "layer_numbers": dict(self._layer_numbers),
            "history": self.history.state_dict(),
            "layer_history": self.layer_history.state_dict(),
            "raised": [tuple(alarm) for alarm in self.raised],
            "active": sorted(self._active),
            "incidents": [(step, reason, list(rows)) for step, reason, rows in self.incidents],
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; call it before `attach`.

        Files in `to` lose the rows of the next step and later ones, which this run logs again.

        Args:
            state: The result of `state_dict`.

        Raises:
            ArgumentError: If the monitor is attached, or `state` is not a result of `state_dict`.
        """
        if self._attached:
            raise ArgumentError(
                "monitor.load_state_dict",
                received="a monitor that is attached",
                expected="a monitor that does not count steps yet",
                hint="Load the state before monitor.attach() and before `with monitor:`.",
            )
        names = self.state_dict().keys()
        if not isinstance(state, Mapping) or not names <= state.keys():
            raise ArgumentError(
                "monitor.load_state_dict",
                received=describe_argument(state),
                expected="the result of monitor.state_dict()",
                hint=f"It has the entries {', '.join(names)}.",
            )
        self._step = state["step"]
        self._layer_numbers = dict(state["layer_numbers"])
        self.history.load_state_dict(state["history"])
        self.layer_history.load_state_dict(state["layer_history"])
        self.raised = [Alarm(*alarm) for alarm in state["raised"]]
        self._active = {tuple(place) for place in state["active"]}
        self.incidents = [Incident(step, reason, Table(rows)) for step, reason, rows in state["incidents"]]
        self._losses = deque(state["losses"], MAX_LOSSES)
        self._is_resumed = True

    def plot(self, column: str = "max_score", *, ax: Any = None) -> Any:
        """Draw one column of the history: a line of pixels for each layer and head, over time.

        Args:
            column: Name of a column of numbers.
            ax: The axes to draw into; by default a new figure.

        Returns:
            The axes.

        Raises:
            ArgumentError: If nothing was monitored yet, or there is no such column.
        """
        return draw_history(self.history, column, ax)

    def page(self, title: str = "Attention during training") -> Page:
        """Build a self-contained page: layers × heads at each monitored step, with a slider for the time.

        Args:
            title: Title of the page.

        Returns:
            The page; `page.save(path)` writes it.

        Raises:
            ArgumentError: If nothing was monitored yet.
        """
        return build_history_page(self.history, self.raised, title)

    def __repr__(self) -> str:
        steps = self.history.num_added
        return f"Monitor(every={self.every}, {self._step:,} steps, {steps:,} monitored, {len(self.raised)} alarms)"


def _is_distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _stop_all(threads: list[LogThread]) -> None:
    for thread in threads:
        thread.stop()


class _ForwardScope:
    """Resume a watch in the outermost forward pass of any module of a model, and suspend it when the pass ends.

    It also ends with an exception, except KeyboardInterrupt and SystemExit, for which torch calls no hooks. The hooks
    are those for all modules: hooks of a module itself would disable the fast paths of torch's own layers, and a
    training loop may call parts of the model instead of the model. The compiler would guard the hooks, so the scope
    ends as soon as a compiled form of a module runs.
    """

    def __init__(
        self, model: nn.Module, watch: Watch, include_eval: bool, follow_compiled: Callable[[], Any]
    ) -> None:
        self._model, self._watch, self._include_eval = model, watch, include_eval
        self._follow_compiled = follow_compiled
        self._module_ids = {id(module) for module in model.modules()}
        self._lock = threading.RLock()
        self._running: dict[int, list[int]] = defaultdict(list)  # ids of the running modules of each thread
        self._is_resumed = False
        self._hooks = [
            register_module_forward_pre_hook(exclude_from_compile(self._before_forward)),
            register_module_forward_hook(exclude_from_compile(self._after_forward), always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks, and suspend the watch if a module is running."""
        for hook in self._hooks:
            hook.remove()
        with self._lock:
            self._running.clear()
            self._suspend()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        is_counted = self._model.training or self._include_eval
        if id(module) not in self._module_ids:
            if is_counted and id(getattr(module, "_orig_mod", None)) in self._module_ids:
                self._follow_compiled()
            return
        with self._lock:
            self._running[threading.get_ident()].append(id(module))
            if not self._is_resumed and is_counted:
                self._is_resumed = True
                self._watch.resume()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._module_ids:
            return
        with self._lock:
            thread = threading.get_ident()
            running = self._running[thread]
            if running and running[-1] == id(module):  # else another hook failed before this one ran
                running.pop()
            if not running:
                del self._running[thread]
            if not self._running:
                self._suspend()

    def _suspend(self) -> None:
        if self._is_resumed:
            self._is_resumed = False
            self._watch.suspend()


class _Registered:
    """What a monitor has registered outside of itself; released when it is detached or collected."""

    def __init__(self) -> None:
        self.hook: Any = None  # of the optimiser
        self.watch: Watch | None = None
        self._scope: _ForwardScope | None = None

    def begin_step(
        self, watch: Watch, model: nn.Module, include_eval: bool, follow_compiled: Callable[[], Any]
    ) -> None:
        """Enter the watch of a monitored step; functions are patched only while the model runs."""
        watch.__enter__()
        watch.suspend()
        self.watch, self._scope = watch, _ForwardScope(model, watch, include_eval, follow_compiled)

    def begin_compiled_step(self, watch: Watch) -> None:
        """Enter the watch of a monitored step of a compiled model; functions are patched until the step ends."""
        watch.__enter__()
        self.watch = watch

    def end_step(self) -> Watch | None:
        """Stop watching, and return the watch of a monitored step, which is to be left."""
        watch, self.watch = self.watch, None
        if self._scope is not None:
            self._scope.remove()
            self._scope = None
        return watch

    def release(self) -> None:
        """Remove everything, also in the middle of a step."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        self.drop_watch()

    def drop_watch(self) -> None:
        """Leave the watch in the middle of a step."""
        watch = self.end_step()
        if watch is not None:
            watch.__exit__(KeyboardInterrupt, None, None)  # reports nothing about half a step


def _make_weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method as long as its object exists, without keeping the object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = reference()
        return {} if found is None else found(*args)

    return call


def _check_runs_in_python() -> None:
    """Raise an error if a compiled function called the model: its graphs are not followed."""
    if "torch._dynamo" not in sys.modules:
        return
    frame: Any = sys._getframe(1)
    end = os.path.join("_dynamo", "eval_frame.py")
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("compile_wrapper", "__call__") and code.co_filename.endswith(end):
            raise ArgumentError(
                "Monitor",
                received="a function that torch.compile has compiled and that calls the model",
                expected="a compiled model, or compiled blocks of a model",
                hint="Compile the model instead of the function: model.compile() or torch.compile(model).",
            )
        frame = frame.f_back
