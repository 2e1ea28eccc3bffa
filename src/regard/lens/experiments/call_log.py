"""`CallLog`: a watch that also logs each attention call with the linear layers that ran before and after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from regard.errors import NotCapturedError
from regard.lens.capture.call import Call
from regard.lens.capture.record import CaptureOptions, build_call
from regard.lens.capture.wrappers import CapturedArgs
from regard.lens.recording import Recording
from regard.lens.watch import Watch

Tensor = Any  # the types of torch are not followed


@dataclass(frozen=True)
class LinearEvent:
    """One call of a linear layer: its name, input and output."""

    name: str
    input: Tensor
    output: Tensor


@dataclass
class LoggedCall:
    """One attention call.

    Args:
        call: The call, with value and output.
        key: The key that was passed, with every head, (…, heads or kv_heads, kv_len, head_dim).
        value: The value that was passed, with every head.
        is_configured: The module is one of transformers, whose configuration decides on scale and window.
        layer: Number of the layer, from 0, in the order in which layers first ran.
        before: Linear layers of the same module that ran before it.
        after: Linear layers of the same module that ran after it.
    """

    call: Call
    key: Tensor
    value: Tensor
    is_configured: bool = False
    layer: int = 0
    before: list[LinearEvent] = field(default_factory=list)
    after: list[LinearEvent] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.call.name


class CallLog(Watch):
    """A watch whose `calls` has every call in order; the recording is made as usual.

    Args:
        model: The model.
        linears: Log linear layers, too.
    """

    def __init__(self, model: nn.Module, linears: bool = True) -> None:
        options = CaptureOptions(device=None, dtype=None, copy=True, values=True, measures=None)
        super().__init__(model, {name for name, _ in model.named_modules()}, options)
        self._linears = linears
        self._events: list[LinearEvent | LoggedCall] = []

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Log a call and record it."""
        call = build_call(module, name, args, self._options, self._biases)
        if isinstance(call, Call) and call.weights is None:  # of its own softmax, there is no query and key
            is_configured = type(module).__module__.startswith("transformers.")
            key, value = args.key.detach(), args.value.detach()
            self._events.append(LoggedCall(replace(call), key, value, is_configured))
        super().record(module, name, args)

    def log_linears(self) -> Iterator[Any]:
        """Register hooks on linear layers; yield their handles."""
        native = {
            id(part)
            for module in self._model.modules()
            if isinstance(
                module, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
            )
            for part in module.modules()
        }
        for name, module in self._model.named_modules():
            is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if is_linear and id(module) not in native:
                yield module.register_forward_hook(self._make_linear_hook(name))

    def _make_linear_hook(self, name: str) -> Any:
        def log_linear(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
                self._events.append(LinearEvent(name, args[0].detach(), output.detach()))

        return log_linear

    @property
    def recording(self) -> Recording:
        """What was recorded."""
        return self._recording

    @property
    def calls(self) -> list[LoggedCall]:
        """The calls in order, with the linear layers of their modules."""
        calls = [event for event in self._events if isinstance(event, LoggedCall)]
        layers = {name: number for number, name in enumerate(dict.fromkeys(call.module for call in calls))}
        last_end = 0
        for logged in calls:
            logged.layer = layers[logged.module]
            position = next(i for i, event in enumerate(self._events) if event is logged)
            before, after = self._events[last_end:position], self._events[position + 1 :]
            logged.before, logged.after = self._select_linears(logged.module, before, after)
            last_end = position + 1
        return calls

    def _select_linears(
        self, module: str, before: list[Any], after: list[Any]
    ) -> tuple[list[LinearEvent], list[LinearEvent]]:
        """Select the linear layers inside a module; if it has none, inside the module around it."""
        until_next = []
        for event in after:
            if isinstance(event, LoggedCall):
                break
            until_next.append(event)
        linears = [
            [event for event in events if isinstance(event, LinearEvent)] for events in (before, until_next)
        ]
        if not module:
            return linears[0], linears[1]
        while module:
            inside = [[event for event in part if event.name.startswith(f"{module}.")] for part in linears]
            if inside[0]:
                return inside[0], inside[1]
            module = module.rpartition(".")[0]
        return [], []


@contextmanager
def log_calls(model: nn.Module, linears: bool = True) -> Iterator[CallLog]:
    """Log the calls of a block; layers that cannot be captured are left to the recording's findings.

    Args:
        model: The model.
        linears: Log linear layers, too.

    Yields:
        The log.
    """
    log = CallLog(model, linears)
    handles: list[Any] = []
    try:
        with log:
            handles = list(log.log_linears()) if linears else []
            try:
                yield log
            finally:
                for handle in handles:
                    handle.remove()
    except NotCapturedError:
        pass
