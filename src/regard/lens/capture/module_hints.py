"""What a model says of itself while it is watched: which layers mean to be causal, and the positions it reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

Tensor = Any  # the types of torch are not followed


class Read(NamedTuple):
    """The positions that one forward pass read, (batch or 1, n), and the module that read them."""

    module: str
    positions: Tensor


class Hints:
    """`causal` by module name, and every `Read` in order."""

    def __init__(self) -> None:
        self.causal: dict[str, bool] = {}
        self.reads: list[Read] = []
        self._last: Tensor = None

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Read what the model says, and hang hooks where it looks up positions; yields the hooks."""
        for name, module in model.named_modules():
            if isinstance(getattr(module, "is_causal", None), bool):
                self.causal[name] = module.is_causal
            kind = type(module).__name__.lower()
            last = name.rpartition(".")[2]
            table = isinstance(module, nn.Embedding) and (
                last == "wpe" or "position_embedding" in last or last == "embed_positions"
            )
            if table or "rotaryembedding" in kind:
                yield module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Any:
        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [kwargs.get("position_ids"), *args, *kwargs.values()]
            for each in given:
                if isinstance(each, torch.Tensor) and each.dtype == torch.int64 and each.ndim in (1, 2):
                    if each is not self._last:  # a model may look the same positions up several times
                        self.reads.append(Read(name, each.detach().reshape(-1, each.shape[-1]).clone()))
                    self._last = each
                    return

        return read
