"""Wrap softmax and exponential, to read the layers that compute their weights themselves.

`followed_tensor` follows the result to the product with the value. A softmax of the shape of attention that reaches no
product is reported if nothing else of its module is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from regard.capture import wrappers
from regard.capture.captured_args import CapturedArgs
from regard.capture.dense_attention import arrange_heads, find_holder
from regard.capture.followed_tensor import SoftmaxTrace, WeightProduct, follow
from regard.capture.score_rows import summarise_score_rows

Tensor = Any  # the types of torch are not followed

KERNEL = "own softmax of the layer"

# Code of regard that computes softmax and exponentials itself, inside the modules of a watched model.
_OWN_CODE = (
    "regard.core",
    "regard.engines",
    "regard.measures",
    "regard.lens",
    "regard.diagnosis",
    "regard.interventions",
)


def wrap_softmax(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `torch.softmax` or `Tensor.softmax`."""

    @wraps(original)
    def softmax(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        ndim = getattr(result, "ndim", 0)
        # Over another axis than the last, three axes are no attention: weights of a convolution, or of classes.
        if ndim >= 3 and isinstance(dim, int) and (ndim > 3 or dim in (-1, 2)):
            _start(result, dim, scores, is_normalised=True)
        return result

    return softmax


def wrap_exp(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `torch.exp` or `Tensor.exp`, for a softmax written as an exponential divided by its sum."""

    @wraps(original)
    def exp(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        if getattr(result, "ndim", 0) >= 3 and _may_be_attention(result, -1):
            _start(result, -1, args[0] if args else kwargs.get("input"), is_normalised=False)
        return result

    return exp


def _start(result: Tensor, dim: int, scores: Tensor, is_normalised: bool) -> None:
    """Follow a result, if a selected module of a watched model is running."""
    modules = [] if _is_own_code() else _list_running_modules()
    if not modules or not wrappers.is_selected(modules[0]) or wrappers.find_obstacle(result) is not None:
        return
    trace = SoftmaxTrace(tuple(result.shape), dim, is_normalised)
    trace.on_product = partial(_notify, trace, modules)
    if is_normalised and _may_be_attention(result, dim):
        _notice(modules[0], trace)
    follow(result, trace, summarise_score_rows(scores, result, dim))


def _list_running_modules() -> list[nn.Module]:
    """List the modules of watched models that are running, the innermost first, without `nn.Softmax`."""
    return [module for module in wrappers.iter_running_modules() if not isinstance(module, nn.Softmax)]


def _notice(module: nn.Module, trace: SoftmaxTrace) -> None:
    """Tell the watchers of a module that it computes a softmax, which is reported if it is not read."""
    for watcher, name in wrappers.list_watchers(module):
        watcher.notice_softmax(name, module, trace)


def _notify(trace: SoftmaxTrace, modules: list[nn.Module], product: WeightProduct | None) -> Tensor | None:
    """Pass a product to the watchers of the innermost module that runs both softmax and product.

    Args:
        trace: The softmax.
        modules: The modules that ran at the softmax, the innermost first.
        product: The product, or None if the softmax cannot be read.

    Returns:
        The output of the product, if an intervention changes it; else None.
    """
    if product is None:
        _notice(modules[0], trace)
        return None
    running = _list_running_modules()
    module = next((module for module in running if any(module is other for other in modules)), modules[0])
    trace.is_read = True
    dense = arrange_heads(product, module)
    held = find_holder()
    if held is not None:
        held.append(dense)
    elif wrappers.is_selected(module):
        trace.on_channels = partial(wrappers.report_channels, module)
        captured = wrappers.notify(module, CapturedArgs(None, None, None, dense=dense, kernel=KERNEL))
        if captured.edited_output is not None and product.output is not None:
            edited, output = captured.edited_output, product.output.clone()
            arranged = arrange_heads(product._replace(output=output), module).output
            assert arranged is not None
            if arranged.ndim < output.ndim:  # two axes of heads, which may not have a view as one
                arranged, edited = output, edited.reshape(output.shape)
            arranged.copy_(edited)
            return output
    return None


def _may_be_attention(weights: Tensor, dim: Any) -> bool:
    """Return whether a softmax has the shape of attention: over keys, (batch, heads, q_len, kv_len), or square."""
    if not isinstance(weights, torch.Tensor) or weights.ndim < 3 or dim not in (-1, weights.ndim - 1):
        return False
    return weights.ndim == 4 or bool(weights.shape[-1] == weights.shape[-2])


def _is_own_code() -> bool:
    """Return whether the caller is code of regard."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("regard.capture", "torch.")):
            return bool(name.startswith(_OWN_CODE))
        frame = frame.f_back  # type: ignore[assignment]
    return False
