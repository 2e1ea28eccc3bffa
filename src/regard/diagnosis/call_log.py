"""`CallLog`: a watch that also logs each attention call with the linear layers and norms around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.record import CaptureOptions, build_call
from regard.errors import NotCapturedError
from regard.lens.recording import Recording
from regard.lens.watch import Watch

Tensor = Any  # the types of torch are not followed


@dataclass(frozen=True)
class LoggedModule:
    """One call of a linear layer or norm: its name, input and output."""

    name: str
    input: Tensor
    output: Tensor
    is_norm: bool = False


@dataclass
class LoggedCall:
    """One attention call.

    Args:
        call: The call, with value and output.
        key: The key that was passed, with every head, (…, heads or kv_heads, kv_len, head_dim).
        value: The value that was passed, with every head.
        owner: The module that made the call.
        layer: Number of the layer, from 0, in the order in which layers first ran.
        around: Name of the module whose linear layers are logged: the call's, or one around it.
        before: Linear layers of the same module that ran before it.
        norms: Norms of the same module that ran before it.
        after: Linear layers and norms of the same module that ran after it.
    """

    call: Call
    key: Tensor
    value: Tensor
    owner: nn.Module
    layer: int = 0
    around: str = ""
    before: list[LoggedModule] = field(default_factory=list)
    norms: list[LoggedModule] = field(default_factory=list)
    after: list[LoggedModule] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.call.name

    @property
    def is_configured(self) -> bool:
        """Whether the module is one of transformers, whose configuration decides on scale and window."""
        return type(self.owner).__module__.startswith("transformers.")


class CallLog(Watch):
    """A watch whose `calls` has every call in order; the recording is made as usual.

    Args:
        model: The model.
    """

    _traces_modules = False

    def __init__(self, model: nn.Module) -> None:
        options = CaptureOptions(device=None, dtype=None, copy=True, values=True, measures=None)
        super().__init__(model, {name for name, _ in model.named_modules()}, options)
        self._calls: list[LoggedCall] = []
        self._since_call: list[LoggedModule] = []

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Log a call and record it."""
        call = build_call(module, name, args, self._options, self._biases)
        if isinstance(call, Call) and call.weights is None:  # of its own softmax, there is no query and key
            logged = LoggedCall(replace(call), args.key.detach(), args.value.detach(), module)
            logged.around, events = _select_around(name, self._since_call)
            logged.before = [event for event in events if not event.is_norm]
            logged.norms = [event for event in events if event.is_norm]
            self._add_last_events()
            self._calls.append(logged)
        super().record(module, name, args)

    def _add_last_events(self) -> None:
        """Give the last call the events of its module that followed; the others are not kept."""
        if self._calls:
            self._calls[-1].after += _select_inside(self._calls[-1].around, self._since_call)
        self._since_call.clear()

    def log_modules(self) -> Iterator[Any]:
        """Register hooks on linear layers and norms; yield their handles."""
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
            if (is_linear or is_norm(name, module)) and id(module) not in native:
                yield module.register_forward_hook(self._make_hook(name, not is_linear))

    def _make_hook(self, name: str, is_norm: bool) -> Any:
        def log_module(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor):
                self._since_call.append(LoggedModule(name, args[0].detach(), output.detach(), is_norm))

        return log_module

    @property
    def recording(self) -> Recording:
        """What was recorded."""
        return self._recording

    @property
    def calls(self) -> list[LoggedCall]:
        """The calls in order, with the linear layers of their modules."""
        self._add_last_events()
        layers = {
            name: number for number, name in enumerate(dict.fromkeys(call.module for call in self._calls))
        }
        for logged in self._calls:
            logged.layer = layers[logged.module]
        return self._calls


def is_norm(name: str, module: nn.Module) -> bool:
    """Return whether a module is a norm, such as RMSNorm: by its class or attribute, without modules inside.

    Args:
        name: Name of the module in the model.
        module: The module.
    """
    names = type(module).__name__ + name.rpartition(".")[2]
    return "norm" in names.lower() and not any(True for _ in module.children())


def _select_around(module: str, events: list[LoggedModule]) -> tuple[str, list[LoggedModule]]:
    """Select the events inside a module; if it has no linear layers, inside the module around it.

    Returns:
        The name of that module, and its events.
    """
    around = module
    while around:
        inside = _select_inside(around, events)
        if any(not event.is_norm for event in inside):
            return around, inside
        around = around.rpartition(".")[0]
    return module, [] if module else list(events)


def _select_inside(module: str, events: list[LoggedModule]) -> list[LoggedModule]:
    return [event for event in events if not module or event.name.startswith(f"{module}.")]


@contextmanager
def log_calls(model: nn.Module, linears: bool = True) -> Iterator[CallLog]:
    """Log the calls of a block; layers that cannot be captured are left to the recording's findings.

    Args:
        model: The model.
        linears: Log linear layers and norms, too.

    Yields:
        The log.
    """
    log = CallLog(model)
    handles: list[Any] = []
    try:
        with log:
            handles = list(log.log_modules()) if linears else []
            try:
                yield log
            finally:
                for handle in handles:
                    handle.remove()
    except NotCapturedError:
        pass
