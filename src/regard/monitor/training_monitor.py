"""`Monitor`: measure every head of a model in one training step of N, log the numbers and raise alarms."""

from __future__ import annotations

import math
import os
import sys
import threading
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from regard.capture.call import Call
from regard.capture.patching import exclude_from_compile
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.table import Table
from regard.lens.watch import Watch, check_model, watch
from regard.measures import Measure
from regard.monitor.alarms import DEFAULT_ALARMS, Alarm, AlarmError, AlarmRule, AlarmWarning
from regard.monitor.history_page import build_history_page, draw_history
from regard.monitor.loggers import Logger, make_logger
from regard.monitor.step_table import (
    LayerPart,
    Layout,
    StepTable,
    agree_on_layout,
    find_layer_part,
)
from regard.pages.html import Page
from regard.validation import check_count

__all__ = ["Monitor"]

OnAlarm = Literal["warn", "raise"] | Callable[[Alarm], object]


class Monitor:
    """Measure every attention head once every `every` training steps, log the numbers, and raise alarms.

    Training is bit-identical with and without a monitor, and unmonitored steps run no monitor code in forward or
    backward. Step 0 is the first monitored step. In a monitored step, all forward passes count (gradient accumulation),
    except passes in eval mode and reruns of a layer by activation checkpointing. Padding is excluded. Functions are
    patched only while a module of the model runs, so an exception leaves none patched. Only after KeyboardInterrupt or
    SystemExit inside a forward pass do they stay patched until the next step, `detach` or the end of the `with` block.
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

    With torch.distributed, every process needs a monitor. The processes combine their numbers in each monitored step
    with one SUM and one MAX all-reduce; the process of rank 0 logs. Every head has one row: heads that tensor
    parallelism splits (parameters that are DTensors) are numbered by their index among all heads, and pipeline stages
    add their layers.

    Args:
        model: The model, or its DistributedDataParallel. It must not be compiled.
        every: Monitor one in this many optimiser steps.
        measures: More measures by name, with one number for each row, such as `{"distance": regard.Distance()}`.
        to: Where the numbers go; one target, or a list. A function `(numbers, step)`; a path, to which JSON lines are
            appended; a TensorBoard `SummaryWriter`; a wandb run or module; the module mlflow. If a target raises an
            exception, the monitor warns once, counts it in `num_failed_logs`, and continues.
        alarms: Rules to check in each monitored step; () for none. Default: the five rules of `regard.monitor`.
        on_alarm: "warn", "raise" an `AlarmError`, or a function that is called with each `Alarm`.
        optimizer: Whose steps to count: "auto" for the first optimiser that steps and holds parameters of the model,
            an optimiser, or None if the training loop calls `monitor.step()`.
        layers: Names of modules, or patterns with `*`, to monitor. Default: all.
        include_eval: Also count passes while the model is in eval mode.
        process_group: The processes to combine. Default: all, if torch.distributed is initialised.

    Raises:
        ArgumentTypeError: If an argument has the wrong type.
        ArgumentError: If the model is compiled or `every` is below 1.

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
    ) -> None:
        _check_not_compiled(model)
        check_model(model, "Monitor")
        check_count(every, 1, None, "Monitor", "every", "", "every=1 monitors every step.")
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
        self.history = Table()
        """One row for each monitored step, layer and head."""
        self.raised: list[Alarm] = []
        """All alarms so far."""
        self.num_failed_logs = 0
        """Number of times that a target of `to` raised an exception, which does not stop training."""
        # Names of layers do not depend on the wrapper.
        self._model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._measures = dict(measures or {})
        self._rules, self._on_alarm = tuple(alarms), on_alarm
        self._optimizer = optimizer
        self._counted: Any = None  # weak reference to the optimiser that "auto" has found
        self._layers = layers if layers is None or isinstance(layers, str) else tuple(layers)
        self._include_eval, self._group = include_eval, process_group
        targets = to if isinstance(to, list | tuple) else [] if to is None else [to]
        self._loggers: list[Logger] = [make_logger(target) for target in targets]
        self._step = 0
        self._attached = False
        self._num_entered = 0  # `with` blocks
        self._registered = _Registered()
        weakref.finalize(self, self._registered.release).atexit = False
        self._table = StepTable(self._measures)
        self._num_last_rows = 0
        self._layer_numbers: dict[
            str, int
        ] = {}  # by name; a layer keeps its number in steps that skip others
        self._parts: dict[str, LayerPart] = {}  # what this process holds
        self._layout: Layout | None = None  # what the processes have agreed on
        self._head_history: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        self._active: dict[tuple[str, str, int], int] = {}  # alarms whose condition still holds
        self._warned: set[Any] = set()  # what has been warned of, once

    # Steps

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps so far."""
        return self._step

    @property
    def is_due(self) -> bool:
        """Whether the current step is monitored."""
        return self._registered.watch is not None

    @property
    def last_rows(self) -> Table:
        """The rows of the last monitored step; empty before the first."""
        return self.history[len(self.history) - self._num_last_rows :]

    def attach(self, step: int | None = None) -> Monitor:
        """Start counting steps from 0; `with Monitor(…) as monitor` does the same.

        Args:
            step: Number of the next step, to resume a run.

        Returns:
            The monitor.

        Raises:
            ArgumentError: If `step` is not an integer, or the monitor is already attached and counts a different step.
        """
        hint = "Pass the number of optimiser steps so far; detach() first if the monitor is attached."
        if step is not None:
            only = self._step if self._attached else None
            step = check_count(step, only or 0, only, "monitor.attach", "step", "", hint)
        if self._attached:
            return self
        self._step = self._step if step is None else step
        self._attached = True
        count_step = _make_weak(self._after_optimizer_step)
        if self._optimizer == "auto":
            self._registered.hook = register_optimizer_step_post_hook(count_step)
        elif self._optimizer is not None:
            self._registered.hook = self._optimizer.register_step_post_hook(count_step)
        self._begin_step()
        return self

    def detach(self) -> None:
        """Stop counting. An incomplete step is dropped; `attach` continues."""
        self._attached = False
        self._registered.release()

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
        if self._step % self.every == 0:
            self._table = StepTable(self._measures)
            entered = watch(self._model, layers=self._layers, measures=_make_weak(self._measure))
            entered._warns_if_empty = False  # a step may have no forward pass
            self._registered.begin_step(entered, self._model, self._include_eval)

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
            _check_runs_in_python()
            if call.name not in self._parts and dist.is_available() and dist.is_initialized():
                self._parts[call.name] = find_layer_part(self._model, call)
            self._table.add(call)
        return {}

    # Results

    def _finish(self, step: int) -> None:
        """Combine the table of a step with those of other processes, log it, and check the alarms."""
        table, rank = self._table, 0
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank(self._group)
            layout = self._layout
            if layout is None:
                layout = agree_on_layout({name: self._parts[name] for name in table.layers}, self._group)
            if layout:
                self._layout = layout
                table.combine(layout, self._parts, self._group, self._find_device())
        rows = table.rows(step, self._layer_numbers)
        self.history.extend(rows)
        self._num_last_rows = len(rows)
        if rank == 0:
            self._warn_of_gaps(rows, step)
            for logger in self._loggers if rows else ():
                self._log(logger, rows, step)
        self._check_alarms(rows, step, rank)

    def _warn_once(self, key: Any, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"Monitor: {text}", stacklevel=3)

    def _log(self, logger: Logger, rows: list[dict[str, Any]], step: int) -> None:
        """Pass the rows to a logger; if it fails, training and the other loggers go on."""
        try:
            logger(rows, step)
        except Exception as error:
            self.num_failed_logs += 1
            self._warn_once(
                logger,
                f"a target of `to` failed in step {step}, and training continues without logging its numbers: "
                f"{type(error).__name__}: {error}. It is called again in later steps; monitor.num_failed_logs "
                "counts the failures, and monitor.history has all numbers.",
            )

    def _warn_of_gaps(self, rows: list[dict[str, Any]], step: int) -> None:
        """Warn once if no attention ran inside a forward pass of the model, or layers have weights and no scores."""
        if not rows and self._table.is_empty:
            self._warn_once(
                "nothing",
                f"nothing was measured in step {step}: no attention ran in Python inside a call of the model "
                "or of one of its modules in training mode. Call modules rather than their methods, and run "
                "compiled code only in other steps: (model if monitor.is_due else compiled)(inputs).",
            )
        for row in rows:
            if math.isnan(row["max_score"]) and row["rows"] > row["nonfinite"]:
                self._warn_once(
                    "scores",
                    f"the scores of {row['module']!r} are unknown, so its max_score is NaN, and neither rules "
                    "about scores nor QK-clip work. The layer computes its own softmax: it exponentiates the scores, "
                    "subtracts the largest one before the softmax, or changes the weights after it. Call "
                    "F.scaled_dot_product_attention, or torch.softmax with the scores themselves.",
                )

    def _find_device(self) -> Any:
        if dist.get_backend(self._group) == "gloo":
            return "cpu"
        return next(self._model.parameters()).device

    def _check_alarms(self, rows: list[dict[str, Any]], step: int, rank: int) -> None:
        """Report the alarms that were not active in the last monitored step; every process raises, rank 0 reports."""
        for row in rows:
            self._head_history[row["module"], row["head"]].append(row)
        found = [alarm for rule in self._rules for alarm in rule.check(rows, self._head_history)]
        new = [alarm for alarm in found if alarm.place not in self._active]
        self._active = {alarm.place: step for alarm in found}
        self.raised.extend(new)
        if not new:
            return
        if self._on_alarm == "raise":
            self.detach()
            raise AlarmError.from_alarms(new)
        if rank == 0:
            for alarm in new:
                if callable(self._on_alarm):
                    self._on_alarm(alarm)
                else:
                    warnings.warn(str(alarm), AlarmWarning, stacklevel=2)

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
        steps = len({row["step"] for row in self.history})
        return f"Monitor(every={self.every}, {self._step:,} steps, {steps:,} monitored, {len(self.raised)} alarms)"


class _ForwardScope:
    """Resume a watch in the outermost forward pass of any module of a model, and suspend it when the pass ends.

    It also ends with an exception, except KeyboardInterrupt and SystemExit, for which torch calls no hooks. The hooks
    are those for all modules: hooks of a module itself would disable the fast paths of torch's own layers, and a
    training loop may call parts of the model instead of the model. A compiled form of a module calls no hooks, and is
    refused.
    """

    def __init__(self, model: nn.Module, watch: Watch, include_eval: bool) -> None:
        self._model, self._watch, self._include_eval = model, watch, include_eval
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
                _raise_compiled()
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

    def begin_step(self, watch: Watch, model: nn.Module, include_eval: bool) -> None:
        """Enter the watch of a monitored step; functions are patched only while the model runs."""
        watch.__enter__()
        watch.suspend()
        self.watch, self._scope = watch, _ForwardScope(model, watch, include_eval)

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


def _check_not_compiled(model: Any) -> None:
    if isinstance(model, nn.Module) and any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in model.modules()
    ):
        _raise_compiled()


def _check_runs_in_python() -> None:
    """Raise an error if a compiled function called the model: the monitored step would not be bit-identical."""
    if "torch._dynamo" not in sys.modules:
        return
    frame: Any = sys._getframe(1)
    end = os.path.join("_dynamo", "eval_frame.py")
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("compile_wrapper", "__call__") and code.co_filename.endswith(end):
            _raise_compiled()
        frame = frame.f_back


def _raise_compiled() -> None:
    raise ArgumentError(
        "Monitor",
        received="a model that torch.compile has compiled",
        expected="a model that runs in Python in its monitored steps",
        hint="Monitor the uncompiled model, and run it in monitored steps: (model if monitor.is_due else "
        "compiled)(inputs). Results are equal up to rounding.",
    )
