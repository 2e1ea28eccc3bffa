"""Choose the layers that record their weights, and what the others return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from regard.capture.module_names import find_place, is_selected
from regard.errors import ArgumentError, NotCapturedError

# Modules that do not record.
_not_chosen: WeakSet[nn.Module] = WeakSet()

Layers = int | str | Iterable[int | str]


def choose_layers(model: nn.Module, layers: Layers | None = None) -> list[str]:
    """Choose the layers whose weights `output_attentions=True` returns; the others cost nothing.

    `outputs.attentions` keeps its length: a layer that was not chosen returns `UnrecordedWeights`, which raises an
    error when it is read. So `outputs.attentions[2]` is layer 2 whatever was chosen.

    Args:
        model: The model.
        layers: Numbers of layers, names of modules, or patterns with `*`. The number of a layer is the first number in
            the name of its modules: 2 chooses `model.layers.2.self_attn`; −1 is the last layer. A name chooses all
            modules inside. None chooses every layer again.

    Returns:
        The names of the modules that were chosen.

    Raises:
        ArgumentError: If a number or name matches no module of the model.

    >>> import torch, transformers
    >>> import regard.transformers
    >>> config = transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=3, n_head=2)
    >>> model = transformers.GPT2Model._from_config(config, attn_implementation="regard").eval()
    >>> "h.2.attn" in regard.transformers.choose_layers(model, -1)
    True
    >>> outputs = model(torch.arange(4)[None], output_attentions=True)
    >>> outputs.attentions[2][0, 1, 3].sum().round(decimals=3)
    tensor(1., grad_fn=<RoundBackward1>)
    >>> outputs.attentions[0][0, 1, 3]
    Traceback (most recent call last):
        ...
    regard.NotCapturedError: outputs.attentions: received a layer that was not chosen; ...
    """
    modules = dict(model.named_modules())
    chosen = set(modules)
    if layers is not None:
        wanted = [layers] if isinstance(layers, int | str) else list(layers)
        chosen = {name for layer in wanted for name in _match(layer, list(modules))}
    for name, module in modules.items():
        (_not_chosen.discard if name in chosen else _not_chosen.add)(module)
    return [name for name in modules if name in chosen]


def is_chosen(module: nn.Module) -> bool:
    """Return whether a module records its weights."""
    return not _not_chosen or module not in _not_chosen


def _match(layer: int | str, names: list[str]) -> Iterator[str]:
    """Yield the names that a number, name or pattern chooses."""
    if isinstance(layer, str):
        chosen = [name for name in names if is_selected(name, layer)]
    else:
        numbers = {
            name: (stack, number)
            for name in names
            for stack, number in [find_place(name)]
            if number is not None
        }
        counts: dict[str, int] = {}  # of the layers in each stack of layers
        for stack, number in numbers.values():
            counts[stack] = max(counts.get(stack, 0), number + 1)
        chosen = [
            name
            for name, (stack, number) in numbers.items()
            if number == (layer if layer >= 0 else layer + counts[stack])
        ]
    if not chosen:
        examples = [name for name in names if find_place(name).number is not None][:2] or names[:2]
        raise ArgumentError(
            "choose_layers",
            received=f"layers with {layer!r}",
            expected="layer numbers, module names, or patterns that match module names",
            hint=f"The model has {', '.join(map(repr, examples))}, …",
        )
    yield from chosen


class UnrecordedWeights:
    """What `outputs.attentions` holds for a layer that was not chosen; it raises an error when it is read.

    Moving and converting it, as `.to("cpu")` or `.detach()` do, returns it unchanged.
    """

    def _keep(self, *_: Any, **__: Any) -> UnrecordedWeights:
        """Return these weights unchanged."""
        return self

    to = cpu = cuda = detach = clone = float = half = double = bfloat16 = _keep

    def _raise_not_chosen(self, *_: Any, **__: Any) -> Any:
        raise NotCapturedError(
            "outputs.attentions",
            received="a layer that was not chosen",
            expected="one of the layers of regard.transformers.choose_layers",
            hint="Choose it as well, or call choose_layers(model) for all, and run the model again.",
        )

    __getitem__ = __len__ = __iter__ = __bool__ = __array__ = _raise_not_chosen
    __mul__ = __rmul__ = __truediv__ = __add__ = __radd__ = __sub__ = __matmul__ = _raise_not_chosen

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions of torch, such as `torch.stack`."""
        return cls()._raise_not_chosen()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'UnrecordedWeights' object has no attribute {name!r}")
        return self._raise_not_chosen()

    def __repr__(self) -> str:
        return "UnrecordedWeights()"
