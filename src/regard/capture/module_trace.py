"""`ModuleTrace`: what each module of a model read and returned in one pass, to find the first one that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from regard.capture.patching import exclude_from_compile
from regard.capture.watchers import find_obstacle
from regard.engines.torch_precision import widen

Tensor = Any  # the types of torch are not followed

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Tokens of each tensor, and calls of each module, that are kept.
MAX_ROWS, MAX_CALLS = 32, 64


@dataclass(frozen=True)
class ModuleEvent:
    """One call of a module.

    Args:
        name: Name of the module; empty for the model itself.
        index: Number of the call of this module, from 0; for the model itself, number of the tensor that it returns.
        class_name: Name of its class.
        num_parts: Number of modules inside it.
        input: The first floating-point tensor that it was passed, some of its rows; None if there is none.
        output: The first that it returned, some of its rows; None if there is none.
        is_input_finite: The whole input has no NaN or inf; True if there is none.
        is_output_finite: The whole output has none.
        input_shape: Shape of the whole input; empty if there is none.
        output_shape: Shape of the whole output.
        ids: The first integer tensor that it was passed, such as token ids, some of its rows; None if there is none.
        has_weights: The module has weights of its own, or its parts have.
    """

    name: str
    index: int
    class_name: str
    num_parts: int
    input: Tensor | None
    output: Tensor | None
    is_input_finite: bool
    is_output_finite: bool
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    ids: Tensor | None = None
    has_weights: bool = False

    @property
    def has_input(self) -> bool:
        """Whether its input is known: vectors or ids."""
        return self.input is not None or self.ids is not None


@dataclass(frozen=True)
class Origin:
    """Where something began in a pass: in a module, or between two.

    Args:
        event: The first event that shows it.
        before: The event that ended before it; None if there is none.
        is_inside: It began in the module of `event`, whose input does not have it. Otherwise it began between the two.
        size: How large it is in `event`, if it is a number.
    """

    event: ModuleEvent
    before: ModuleEvent | None
    is_inside: bool
    size: float = 0.0

    @property
    def module(self) -> str:
        """Name of the module in which it began: the event's, or the smallest around both events."""
        if self.is_inside or self.before is None:
            return self.event.name
        names = [name.split(".") if name else [] for name in (self.event.name, self.before.name)]
        pairs = zip(*names, strict=False)
        return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def describe(self) -> str:
        """Say where, as a phrase: "in model.norm (LlamaRMSNorm)", or "between … and …"."""
        if self.is_inside:
            return f"in {self.event.name or 'the model'} ({self.event.class_name})"
        before = "the input" if self.before is None else self.before.name
        return f"between {before} and {self.event.name or 'the output of the model'}"


class ModuleTrace:
    """The events of the first pass of a model, in the order in which modules returned.

    Args:
        max_rows: Number of tokens of each tensor that are kept, see `select_rows`; 0 to keep none.

    If the model itself is never called, only its modules, each module has at most MAX_CALLS events.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.events: list[ModuleEvent] = []
        self._max_rows = max_rows
        self._counts: Counter[str] = Counter()
        self._is_closed = False

    def attach(self, model: nn.Module, skipped: Collection[int] = ()) -> Iterator[Any]:
        """Register hooks on all modules except those with the ids that are skipped; yield their handles."""
        for name, module in model.named_modules():
            if id(module) not in skipped:
                hook = exclude_from_compile(self._make_hook(name, sum(1 for _ in module.modules()) - 1))
                yield module.register_forward_hook(hook, with_kwargs=True)

    def _make_hook(self, name: str, num_parts: int) -> Any:
        def add_event(module: nn.Module, *call: Any) -> None:
            # Without keyword arguments, another thread adds or removes the hook just then.
            if self._is_closed or len(call) != 3 or self._counts[name] >= MAX_CALLS:
                return
            # The tensors may be followed from a softmax, or have no numbers.
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._add(name, module, num_parts, *call)

        return add_event

    def _add(
        self, name: str, module: nn.Module, num_parts: int, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        passed = (*args, *_drop_masks(kwargs))
        received, returned = _find_tensor(passed), _find_tensor([output])
        if find_obstacle(returned) is not None:
            return
        if find_obstacle(received) is not None:  # a distributed input of a layer that returns local tensors
            received = None
        index, self._counts[name] = self._counts[name], self._counts[name] + 1
        self.events.append(
            ModuleEvent(
                name,
                index,
                type(module).__name__,
                num_parts,
                self._select_rows(received),
                self._select_rows(returned),
                _is_finite(received),
                _is_finite(returned),
                () if received is None else tuple(received.shape),
                () if returned is None else tuple(returned.shape),
                self._select_rows(_find_ids(passed), -1),
                next(module.parameters(), None) is not None,
            )
        )
        if not name:
            self._is_closed = True  # one pass
            for index, tensor in enumerate(_find_outputs(output, returned), 1):
                self.events.append(
                    replace(
                        self.events[-1],
                        index=index,
                        output=self._select_rows(tensor),
                        is_output_finite=_is_finite(tensor),
                        output_shape=tuple(tensor.shape),
                    )
                )

    def _select_rows(self, tensor: Tensor | None, axis: int | None = None) -> Tensor | None:
        if tensor is None or not self._max_rows:
            return None
        axis = find_token_axis(tuple(tensor.shape)) if axis is None else axis
        rows = select_rows(tensor.shape[axis], self._max_rows)
        return tensor.detach().index_select(axis, rows.to(tensor.device))

    def find_not_finite(self) -> Origin | None:
        """Find where NaN and inf began; None if no module returned any."""
        before = None
        for event in self.events:
            if not event.is_output_finite or not event.is_input_finite:
                return Origin(event, before, is_inside=event.is_input_finite)
            before = event
        return None

    def find_change(self, other: ModuleTrace, batch: int, rows: Tensor, tolerance: float) -> Origin | None:
        """Find where some tokens first differ from another pass over as many tokens; None if they do not.

        Args:
            other: The trace of the other pass.
            batch: Number of batch entries that are compared, from the first.
            rows: (n,), True for the tokens to compare.
            tolerance: Difference that is rounding, relative to the largest number of the tensor.
        """
        before = None
        for event, changed in match_events(self.events, other.events):
            sizes = [
                _compare_tokens(a, b, batch, rows)
                for a, b in ((event.input, changed.input), (event.output, changed.output))
            ]
            largest = max(sizes)
            if largest > tolerance:
                return Origin(event, before, is_inside=sizes[0] <= tolerance, size=largest)
            before = event
        return None


def find_token_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of the tokens: of (n, width), (batch, n, width), (batch, heads, n, …) or (batch, n, heads, …)."""
    if len(shape) < 4:
        return len(shape) - 2
    return 1 + int(shape[2] > shape[1])  # the longer one


def select_rows(length: int, max_rows: int = MAX_ROWS) -> Tensor:
    """Return the rows that a trace keeps of a tensor with this many: half from the start, half evenly spaced."""
    if length <= max_rows:
        return torch.arange(length)
    half = max_rows // 2
    spaced = torch.linspace(half, length - 1, max_rows - half, dtype=torch.float64)
    return torch.cat([torch.arange(half), spaced.round().long()])


def match_events(
    first: Iterable[ModuleEvent], second: Iterable[ModuleEvent]
) -> Iterator[tuple[ModuleEvent, ModuleEvent]]:
    """Yield the events of two passes that have the same module and number, in the order of the first."""
    others = {(event.name, event.index): event for event in second}
    for event in first:
        if (event.name, event.index) in others:
            yield event, others[event.name, event.index]


def is_around(name: str, other: str) -> bool:
    """Return whether two modules are the same, or one is inside the other.

    >>> is_around("layers.1", "layers.1.mlp"), is_around("layers.1", "layers.10")
    (True, False)
    """
    return name == other or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _drop_masks(kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield keyword arguments without masks and biases, which may be −inf."""
    yield from (value for name, value in kwargs.items() if "mask" not in name and "bias" not in name)


def _find_tensor(values: Iterable[Any]) -> Tensor | None:
    """Return the first floating-point tensor with at least two axes, also inside tuples and outputs."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype in FLOATS and value.ndim > 1:
                return value
            continue
        inside = value.values() if isinstance(value, Mapping) else value
        found = _find_tensor(inside) if isinstance(value, Mapping | tuple | list) else None
        if found is not None:
            return found
    return None


def _find_outputs(output: Any, first: Tensor | None) -> Iterator[Tensor]:
    """Yield what a model returns after the first tensor, without caches, and states and weights of its layers."""
    named = (
        output.items() if isinstance(output, Mapping) else enumerate(output if type(output) is tuple else ())
    )
    for name, value in named:
        is_internal = (
            any(word in str(name) for word in ("past", "cache", "attentions")) or name == "hidden_states"
        )
        if type(value) is torch.Tensor and value is not first and not is_internal:
            yield from (value,) if value.dtype in FLOATS and value.ndim > 1 else ()


def _find_ids(values: Iterable[Any]) -> Tensor | None:
    """Return the first integer tensor, such as token ids or positions."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.ndim:
            return value if type(value) is torch.Tensor and not value.is_meta else None
    return None


def _is_finite(tensor: Tensor | None) -> bool:
    """Return whether there is no NaN or inf; −inf in whole columns masks logits and does not count."""
    if tensor is None or bool(
        tensor.sum(dtype=torch.float32).isfinite()
    ):  # a sum is finite only if all numbers are
        return True
    bad = ~tensor.isfinite()
    if not bool(bad.any()):
        return True  # the sum overflows
    masked = (tensor == -torch.inf).flatten(0, -2).all(0)
    return not bool((bad & ~masked).any())


def _compare_tokens(a: Tensor | None, b: Tensor | None, batch: int, rows: Tensor) -> float:
    """Return the largest relative difference of some tokens; 0 if the tensors have no axis of tokens."""
    if a is None or b is None or a.shape != b.shape:
        return 0.0
    first, second = (_select_tokens(x, batch, rows) for x in (a, b))
    if first is None or not first.numel():
        return 0.0
    size = float(widen(first).abs().amax().nan_to_num()) or 1.0
    return float((widen(second) - widen(first)).abs().nan_to_num(nan=torch.inf).amax()) / size


def _select_tokens(x: Tensor, batch: int, rows: Tensor) -> Tensor | None:
    """Select batch entries and tokens of (batch, n, …) or (batch, heads or channels, n, …)."""
    n = len(rows)
    if x.ndim > 2 and x.shape[1] == n:
        return x[:batch, rows]
    if x.ndim > 2 and x.shape[2] == n:
        return x[:batch, :, rows]
    return None
