"""What a model states about itself: which modules are causal, and which positions it looks up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.lens.capture.wrappers import find_obstacle

Tensor = Any  # the types of torch are not followed


class PositionLookup(NamedTuple):
    """The positions that one forward pass looked up, (batch or 1, n), and the module that did."""

    module: str
    positions: Tensor


class ModuleHints:
    """`causal` has the `is_causal` attribute of modules by name, `lookups` every position lookup in order."""

    def __init__(self) -> None:
        self.causal: dict[str, bool] = {}
        self.lookups: list[PositionLookup] = []
        self._last: Tensor = None

    def attach(self, model: nn.Module) -> Iterator[Any]:
        """Read `is_causal` of the modules, and register hooks on position embeddings.

        Yields:
            The handle of each hook, which removes it.
        """
        for name, module in model.named_modules():
            if isinstance(getattr(module, "is_causal", None), bool):
                self.causal[name] = module.is_causal
            class_name = type(module).__name__.lower()
            attribute = name.rpartition(".")[2]
            is_table = isinstance(module, nn.Embedding) and (
                attribute == "wpe" or "position_embedding" in attribute or attribute == "embed_positions"
            )
            if is_table or "rotaryembedding" in class_name:
                yield module.register_forward_pre_hook(self._make_hook(name), with_kwargs=True)

    def _make_hook(self, name: str) -> Any:
        def record_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for argument in (kwargs.get("position_ids"), *args, *kwargs.values()):
                if (
                    isinstance(argument, torch.Tensor)
                    and argument.dtype == torch.int64
                    and argument.ndim in (1, 2)
                ):
                    if find_obstacle(argument) is not None:
                        return
                    if argument is not self._last:  # a model may look up the same positions several times
                        positions = argument.detach().reshape(-1, argument.shape[-1]).clone()
                        self.lookups.append(PositionLookup(name, positions))
                    self._last = argument
                    return

        return record_positions
