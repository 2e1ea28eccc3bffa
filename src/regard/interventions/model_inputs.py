"""Run a model on the inputs of an intervention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument

# Relative difference up to which runs agree, by the bytes of a number. Models of float64 have norms that compute in
# float32.
TOLERANCES = {2: 3e-2, 4: 1e-4, 8: 1e-4}


def find_tolerance(model: nn.Module) -> float:
    """Return the relative difference up to which two runs of a model agree."""
    sizes = [parameter.element_size() for parameter in model.parameters() if parameter.is_floating_point()]
    return TOLERANCES[max(min(sizes, default=4), 2)]


def copy_cache(inputs: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """Return keyword arguments with a copy of their cache: a run extends it, and the next one needs it as it was.

    Raises:
        ArgumentError: If the cache has a graph, and cannot be copied.
    """
    cached = {name: inputs[name] for name in ("past_key_values", "cache_params") if name in inputs}
    try:
        return {**inputs, **copy.deepcopy(cached)}
    except RuntimeError:
        raise ArgumentError(
            operation,
            received=f"inputs with {', '.join(cached)} that were computed with gradients",
            expected="a cache without gradients, which is copied for each run",
            hint="Fill it in torch.no_grad().",
        ) from None


def run_model(
    model: nn.Module,
    inputs: Any,
    operation: str,
    *,
    num_logits: int | None = None,
    require_grad: bool = False,
) -> Any:
    """Run a model, without a cache if it has one.

    Args:
        model: The model.
        inputs: A tensor, its first argument; or a mapping with its keyword arguments.
        operation: Name of the calling function, for error messages.
        num_logits: How many of the last logits are needed, if the model can omit the others; None for all.
        require_grad: Let copies of floating-point inputs require gradients.

    Returns:
        The output of the model.

    Raises:
        ArgumentTypeError: If `inputs` has another type.
        ArgumentError: If a cache in `inputs` has a graph.
    """
    is_mapping = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if not is_mapping and not isinstance(inputs, torch.Tensor):
        raise ArgumentTypeError(
            operation,
            received=f"inputs as {describe_argument(inputs)}",
            expected="a tensor, or a mapping with the keyword arguments of the model",
            hint='With a tokenizer: tokenizer(text, return_tensors="pt").',
        )

    def prepare(value: Any, name: str = "") -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and "mask" not in name
        # A clone, since a model may not write into a leaf of the graph.
        return value.detach().requires_grad_().clone() if require_grad and is_float else value

    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False, "logits_to_keep": num_logits}
    options = {name: option for name, option in options.items() if name in parameters and option is not None}
    if isinstance(inputs, torch.Tensor):
        return model(prepare(inputs), **options)
    return model(
        **options | {name: prepare(value, name) for name, value in copy_cache(inputs, operation).items()}
    )
