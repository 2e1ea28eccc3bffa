"""Check one model of another package: outputs, recorded weights, and edits.

The reference weights are read below Python, where torch runs a softmax, while the model runs its package's own dense
attention or torch's math kernel. Neither regard nor the arguments that it records take part.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import NotCapturedError
from tests.helpers.base_models import flatten_tensors
from tests.third_party.models import MODELS, Inputs

ATOL = 1e-5  # float32 weights are at most 1
Result = tuple[str, str]


class SoftmaxOutputs(TorchDispatchMode):
    """Keep the result of every softmax over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_softmax = function._overloadpacket in (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)
        if is_softmax and args[1] in (-1, result.ndim - 1):
            self.weights.append(result.detach().clone())
        return result


def list_tensors(output: Any) -> list[torch.Tensor]:
    """List the tensors of an output, which may be an object with fields."""
    fields = output if isinstance(output, torch.Tensor | dict | list | tuple) else vars(output)
    return list(flatten_tensors(fields))


def run(model: torch.nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Run a model with the same random numbers as every other run, and return the tensors of its output."""
    torch.manual_seed(1)
    return list_tensors(model(**inputs))


def build(name: str) -> tuple[torch.nn.Module, Inputs]:
    """Build a model of the table with random weights that are the same each time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].build()
    for parameter in model.parameters():  # torch runs frozen layers of its own without Python
        parameter.requires_grad_(parameter.is_floating_point())
    return model.eval(), inputs


def read_dense_weights(name: str, model: torch.nn.Module, inputs: Inputs) -> tuple[str, list[torch.Tensor]]:
    """Run the dense path of a model's package, or the math kernel of torch; return its name and the weights."""
    dense = MODELS[name].dense
    label, path = dense or ("torch's math kernel", lambda _: contextlib.nullcontext())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        own = stack.enter_context(path(model))  # what the package says its weights are, or None
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        softmaxes = stack.enter_context(SoftmaxOutputs())
        run(model, inputs)
    return label, softmaxes.weights if own is None else own


def take_equal(weights: torch.Tensor, candidates: list[torch.Tensor]) -> bool:
    """Remove the first candidate that equals a recorded matrix; return whether there was one.

    A package may fold axes before the last two into one. A recording has heads last of these, a package windows.
    """
    ways = [weights] if weights.ndim < 5 else [weights, weights.transpose(-3, -4)]
    for index, candidate in enumerate(candidates):
        if candidate.numel() != weights.numel() or candidate.shape[-1] != weights.shape[-1]:
            continue
        for own in ways:
            other = candidate.reshape(own.shape).nan_to_num().to(own.dtype)
            if torch.allclose(own.nan_to_num(), other, rtol=0, atol=ATOL):
                del candidates[index]
                return True
    return False


def check_watch(name: str) -> tuple[Result, str]:
    """Return the result of `watch` with a remark, and what the weights were compared with."""
    model, inputs = build(name)
    with torch.no_grad():
        plain = run(model, inputs)
        try:
            with regard.watch(model) as recording:
                watched = run(model, inputs)
        except NotCapturedError as error:
            return ("rejected", error.received.split("was not captured: ")[-1]), ""
        if not all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)):
            return ("failed", "outputs changed"), ""
        if not recording:
            reasons = {failure.reason for failure in recording._uncaptured.values()}
            return ("rejected", "; ".join(sorted(reasons)) or "has no attention layer"), ""
        label, candidates = read_dense_weights(name, model, inputs)
        calls = [(layer, call) for layer in recording for call in recording.calls(layer)]
        missing = [layer for layer, call in calls if not take_equal(call.matrix.to_dense(), candidates)]
    if missing:
        return ("failed", f"{len(missing)} of {len(calls)} matrices differ, first of {missing[0]}"), label
    count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    return ("captured", f"{count} of {len(recording)} layers"), f"{label}: {len(calls)} matrices"
