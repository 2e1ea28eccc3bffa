"""`ModuleTrace`: what each module of a model read and returned in one pass, to find the first one that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from regard.engines.torch_precision import widen
from regard.lens.capture.patching import exclude_from_compile

Tensor = Any  # the types of torch are not followed


@dataclass(frozen=True)
class ModuleEvent:
    """One call of a module.

    Args:
        name: Name of the module; empty for the model itself.
        index: Number of the call of this module, from 0.
        class_name: Name of its class.
        num_parts: Number of modules inside it.
        input: The first floating-point tensor that it was passed, some of its rows; None if there is none.
        output: The first that it returned, some of its rows; None if there is none.
        is_input_finite: The whole input has no NaN or inf; True if there is none.
        is_output_finite: The whole output has none.
    """

    name: str
    index: int
    class_name: str
    num_parts: int
    input: Tensor | None
    output: Tensor | None
    is_input_finite: bool
    is_output_finite: bool


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
        max_rows: Number of tokens of each tensor that are kept, evenly spaced; 0 to keep none.
    """

    def __init__(self, max_rows: int = 32) -> None:
        self.events: list[ModuleEvent] = []
        self._max_rows = max_rows
        self._counts: Counter[str] = Counter()
        self._is_closed = False

    def attach(self, model: nn.Module, skipped: Collection[int] = ()) -> Iterator[Any]:
        """Register hooks.

        Args:
            model: The model.
            skipped: Ids of modules that get no hooks.

        Yields:
            The handle of each hook.
        """
        for name, module in model.named_modules():
            if id(module) not in skipped:
                hook = exclude_from_compile(self._make_hook(name, sum(1 for _ in module.modules()) - 1))
                yield module.register_forward_hook(hook, with_kwargs=True)

    def _make_hook(self, name: str, num_parts: int) -> Any:
        def add_event(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._is_closed:
                return
            received, returned = _find_tensor((*args, *_drop_masks(kwargs))), _find_tensor([output])
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
                )
            )
            self._is_closed = not name  # one pass

        return add_event

    def _select_rows(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not self._max_rows:
            return None
        axis = 1 if tensor.ndim > 2 else 0
        rows = torch.linspace(0, tensor.shape[axis] - 1, min(tensor.shape[axis], self._max_rows))
        return tensor.detach().index_select(axis, rows.round().long().to(tensor.device))

    def find_not_finite(self) -> Origin | None:
        """Find where NaN and inf began; None if no module returned any."""
        before = None
        for event in self.events:
            if not event.is_output_finite or not event.is_input_finite:
                return Origin(event, before, is_inside=event.is_input_finite)
            before = event
        return None

    def find_change(self, other: ModuleTrace, batch: int, rows: Tensor, tolerance: float) -> Origin | None:
        """Find where some tokens first differ from another pass over as many tokens.

        Args:
            other: The trace of the other pass.
            batch: Number of batch entries that are compared, from the first.
            rows: (n,), True for the tokens to compare.
            tolerance: Difference that is rounding, relative to the largest number of the tensor.

        Returns:
            The first event, or None if none differs.
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


def match_events(
    first: Iterable[ModuleEvent], second: Iterable[ModuleEvent]
) -> Iterator[tuple[ModuleEvent, ModuleEvent]]:
    """Yield the events of two passes that have the same module and number, in the order of the first."""
    others = {(event.name, event.index): event for event in second}
    for event in first:
        if (event.name, event.index) in others:
            yield event, others[event.name, event.index]


def _drop_masks(kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield keyword arguments without masks and biases, which may be −inf."""
    yield from (value for name, value in kwargs.items() if "mask" not in name and "bias" not in name)


def _find_tensor(values: Iterable[Any]) -> Tensor | None:
    """Return the first floating-point tensor with at least two axes, also inside tuples and outputs."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.ndim > 1:
                return value
            continue
        inside = value.values() if isinstance(value, Mapping) else value
        found = _find_tensor(inside) if isinstance(value, Mapping | tuple | list) else None
        if found is not None:
            return found
    return None


def _is_finite(tensor: Tensor | None) -> bool:
    """Return whether there is no NaN or inf; −inf in whole columns masks logits and does not count."""
    if tensor is None:
        return True
    bad = ~tensor.isfinite()
    if not bool(bad.any()):
        return True
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
    """Select batch entries and tokens of (batch, n, …) or (batch, heads, n, …)."""
    n = len(rows)
    if x.ndim > 2 and x.shape[1] == n:
        return x[:batch, rows]
    if x.ndim > 3 and x.shape[2] == n:
        return x[:batch, :, rows]
    return None
