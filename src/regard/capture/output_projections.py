"""Find the linear layer that each attention layer passes its output to: W_O, split by head."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.capture.patching import exclude_from_compile

Tensor = Any  # the types of torch are not followed


class OutputProjection(NamedTuple):
    """The linear layer after the heads of an attention layer, which adds up their outputs.

    Attributes:
        module: Name of the linear layer.
        weight: (heads, value_dim, width), detached, a view of the model's.
        bias: (width,), detached, or None.
    """

    module: str
    weight: Tensor
    bias: Tensor | None


class OutputProjections:
    """The output projections of a watched model by the name of the attention layer, found while it runs.

    A linear layer is the projection if its input is the output of the attention, heads side by side. If several layers
    read that output, or none does, there is no projection, and `faults` says why.
    """

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self._found: dict[str, list[OutputProjection]] = {}
        # By thread: the layer that ran last, and its output, until the next layer runs.
        self._pending: dict[int, tuple[str, Tensor]] = {}

    def __getitem__(self, name: str) -> OutputProjection:
        return self._found[name][0]

    def __contains__(self, name: object) -> bool:
        return len(self._found.get(str(name), ())) == 1

    def find_fault(self, name: str) -> str:
        """Say why a layer has no projection."""
        if name in self.faults:
            return self.faults[name]
        found = self._found.get(name)
        if found is None:
            return "the recording has no output projections (watch(model, values=True) records them)"
        if found:
            return f"several layers read its output ({', '.join(entry.module for entry in found)})"
        return "no linear layer reads its output, heads side by side"

    def attach(self, model: nn.Module, native: set[int]) -> Iterator[Any]:
        """Register hooks on linear layers, except those inside torch's own layers, by id, which have fast paths."""
        for name, module in model.named_modules():
            if id(module) not in native and find_weight(module) is not None:
                yield module.register_forward_pre_hook(exclude_from_compile(self._make_hook(name)))

    def expect(self, module: nn.Module, name: str, heads: int, output: Tensor | None) -> None:
        """Look for the layer that reads the output of a call, (batch, heads, q_len, value_dim); once for each layer."""
        thread = threading.get_ident()
        self._pending.pop(thread, None)
        if name in self._found:
            return
        self._found[name] = []
        if isinstance(module, nn.TransformerEncoderLayer):  # its fast path
            module = module.self_attn
        if isinstance(
            module, nn.MultiheadAttention
        ):  # it reads the weights of the layer, and does not call it
            self._add(f"{name}.out_proj", module.out_proj, name, heads)
        elif output is None or output.ndim != 4:
            self.faults[name] = "its output was not captured"
        else:
            self._pending[thread] = (name, output.detach())

    def close(self) -> None:
        """Release the outputs that are held."""
        self._pending.clear()

    def _add(self, projection_name: str, module: nn.Module, name: str, heads: int) -> None:
        weight, bias = find_weight(module), getattr(module, "bias", None)
        assert weight is not None
        weight = weight.detach().unflatten(0, (heads, -1))
        self._found[name].append(
            OutputProjection(projection_name, weight, None if bias is None else bias.detach())
        )

    def _make_hook(self, projection_name: str) -> Any:
        def compare_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            pending = self._pending.get(threading.get_ident())
            if pending is None or not args or not isinstance(args[0], torch.Tensor):
                return
            name, output = pending
            if is_merged(args[0].detach(), output):
                self._add(projection_name, module, name, output.shape[1])

        return compare_input


def find_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a linear layer as (in, out); None for another module, or one whose weight is quantised."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Linear):
        return weight.T
    return weight if type(module).__name__ == "Conv1D" else None  # of transformers: GPT-2


def is_merged(x: Tensor, output: Tensor) -> bool:
    """Return whether x is an output of attention, (batch, heads, q_len, value_dim), with its heads side by side."""
    batch, heads, q_len, dim = output.shape
    if x.numel() != output.numel() or x.shape[-1] != heads * dim or not x.numel():
        return False
    x = x.reshape(batch, q_len, heads, dim).transpose(1, 2)
    return bool(torch.equal(x[0, :, -1], output[0, :, -1])) and bool(torch.equal(x, output))
