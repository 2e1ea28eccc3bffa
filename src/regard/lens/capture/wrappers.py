"""The wrappers: each runs what it stands for, with what it was given, and tells the recordings what went through.

Which module is running is read off the Python stack: the nearest caller whose first argument is a module of a watched
model. Hooks would switch off the fast paths of `nn.TransformerEncoderLayer`, and change its output.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from regard.engines import torch_kernels as kernels

Tensor = Any  # the types of torch are not followed


class Passed(NamedTuple):
    """What went through one call of attention, in the words of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    # … and what only some functions know
    softcap: float | None = None
    sink: Tensor | None = None
    position_bias: Tensor | None = None
    lse: Tensor | None = None
    output: Tensor | None = None
    weights: Tensor | None = None  # where the function returned them: what is captured is held against them
    kernel: str = ""


class Recorder(Protocol):
    """Who is told."""

    def record(self, module: nn.Module, name: str, passed: Passed) -> None:
        """A call went through."""

    def miss(self, name: str, why: str, hint: str) -> None:
        """A call that cannot be told went through."""


# Every module of a watched model: who watches it, and its name there, None where it was not asked for.
owners: dict[int, list[tuple[Recorder, str | None]]] = {}
_thread = threading.local()


thread = threading.get_ident  # the number of this thread


def captured() -> int:
    """How many calls this thread has captured: a function that wraps another one sees whether that did it."""
    return getattr(_thread, "captured", 0)


# Ways of generating that try tokens out, by the name of what runs them in transformers.
_TRYING = {"_beam_search": "beam search", "_assisted_decoding": "speculative decoding"}


def trying() -> str:
    """Whether the caller tries tokens out that it may take back, and how: "" where it does not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _TRYING:
            return _TRYING[frame.f_code.co_name]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _running() -> nn.Module | None:
    """The module of a watched model that is running: the nearest one on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if id(first) in owners and isinstance(first, nn.Module):
                return first
        frame = frame.f_back  # type: ignore[assignment]
    return None


def tell(module: nn.Module, passed: Passed, below: str = "") -> None:
    """Tell whoever watches a module what it did; `below` names a module within it that was passed over."""
    _thread.captured = captured() + 1
    for recorder, name in tuple(owners.get(id(module), ())):
        if name is not None:
            recorder.record(module, f"{name}.{below}" if below and name else name or below, passed)


def _watched(module: nn.Module) -> bool:
    return any(name is not None for _, name in owners.get(id(module), ()))


def wrap_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.scaled_dot_product_attention`, watched. The CPU's flash kernel, where it would run, is called for its lse."""

    @wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        bias: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if _is_causal_bias(bias):
            # It looks for this function by the name it has now, and calls it again with what it stands for.
            return type(bias).__torch_function__(F.scaled_dot_product_attention, (), args, kwargs)
        module = _running()
        if module is None or not _watched(module):
            return original(*args, **kwargs)
        passed = Passed(*args, **kwargs)
        given = passed[:8]
        if getattr(_thread, "probing", False):
            _thread.probe = passed
            return passed.query.new_zeros((*passed.query.shape[:-1], passed.value.shape[-1]))
        # Who put a function of their own there wants that one to run.
        found = kernels.run_flash_with_lse(*given) if original is kernels.SDPA else None
        if found is None:
            output = original(*args, **kwargs)
            tell(module, Passed(*given, output=output, kernel=f"torch: {kernels.find_sdpa_backend(*given)}"))
        else:
            output, lse = found
            tell(module, Passed(*given, lse=lse, output=output, kernel="torch: flash on CPU"))
        return output

    return scaled_dot_product_attention


def _is_causal_bias(mask: Any) -> bool:
    """Whether it is torch's `causal_lower_right(…)` or `causal_upper_left(…)`: a tensor that is a mask in name only."""
    biases = sys.modules.get("torch.nn.attention.bias")
    return biases is not None and isinstance(mask, biases.CausalBias)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def wrap_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of transformers, watched: `(module, query, key, value, attention_mask, …)`.

    Functions that end in `F.scaled_dot_product_attention` have been captured there. What is left is captured from the
    arguments, and held against the weights or the output that the function returned.
    """

    @wraps(original)
    def attention_function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _watched(module):
            return original(module, *args, **kwargs)
        before = captured()
        result = original(module, *args, **kwargs)
        if captured() == before:
            bound = _signature(original).bind(module, *args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            for parameter in _signature(original).parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    given |= given.pop(parameter.name, {})
            tell(module, _passed(module, given, result, getattr(original, "__name__", "a function")))
        return result

    return attention_function


def _passed(module: nn.Module, given: dict[str, Any], result: Any, name: str) -> Passed:
    query, key = given["query"], given["key"]
    output, weights = result if isinstance(result, tuple) else (result, None)
    sink = given.get("s_aux")
    sink = getattr(module, "sinks", None) if sink is None else sink
    mask = given.get("attention_mask")
    scale = given.get("scaling")
    return Passed(
        query,
        key,
        given["value"],
        attn_mask=mask,
        dropout_p=given.get("dropout") or 0.0,
        scale=scale,
        enable_gqa=key.shape[-3] != query.shape[-3],
        softcap=given.get("softcap"),
        sink=sink,
        position_bias=given.get("position_bias"),
        output=output,
        weights=weights,
        kernel=f"transformers: {name}",
    )


def _probe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Passed | None:
    """What a function passes to `F.scaled_dot_product_attention`, which is not run."""
    _thread.probing, _thread.probe = True, None
    try:
        with torch.no_grad():
            function(*args, **kwargs)
    finally:
        _thread.probing = False
    found: Passed | None = _thread.probe
    _thread.probe = None
    return found


def wrap_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """`F.multi_head_attention_forward`, watched: with `need_weights=True` it does its own softmax."""

    @wraps(original)
    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        module = _running()
        if module is None or not _watched(module):
            return original(*args, **kwargs)
        before = captured()
        output, weights = original(*args, **kwargs)
        if captured() == before:
            given = _signature(original).bind(*args, **kwargs).arguments | {"need_weights": False}
            passed = _probe(original, **given)
            if passed is not None:
                tell(module, passed._replace(weights=weights, kernel="torch: softmax (need_weights)"))
        return output, weights

    return multi_head_attention_forward


def wrap_native_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch._native_multi_head_attention`, the fast path of `nn.MultiheadAttention`, watched."""

    @wraps(original)
    def native(*args: Any) -> Any:
        result = original(*args)
        module = _running()
        if module is not None and _watched(module):
            x, mask, mask_type = args[0], args[9], args[12] if len(args) > 12 else None
            _tell_fast(module, "", x, args[3:9], mask, mask_type)
        return result

    return native


def wrap_encoder_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch._transformer_encoder_layer_fwd`, the fast path of `nn.TransformerEncoderLayer`, watched."""

    @wraps(original)
    def encoder_layer(*args: Any) -> Any:
        result = original(*args)
        module = _running()
        if module is not None and _watched(module):
            x, mask, mask_type = args[0], args[18], args[19]
            if args[8] and not x.is_nested:  # norm_first
                x = F.layer_norm(x, x.shape[-1:], args[10], args[11], args[9])
            _tell_fast(module, "self_attn", x, args[1:7], mask, mask_type)
        return result

    return encoder_layer


def _tell_fast(module: nn.Module, below: str, x: Tensor, weights: Any, mask: Any, mask_type: Any) -> None:
    """What a fused layer computed with: its projections, done again."""
    if x.is_nested:
        _thread.captured = captured() + 1
        for recorder, name in tuple(owners.get(id(module), ())):
            if name is not None:
                recorder.miss(
                    f"{name}.{below}".strip("."),
                    "nested tensors, which nn.TransformerEncoder makes of a padded batch",
                    "Build it with nn.TransformerEncoder(…, enable_nested_tensor=False).",
                )
        return
    width, heads, in_weight, in_bias, out_weight, out_bias = weights
    padding, across = (mask, None) if mask_type == 1 else (None, mask)
    if across is not None and across.ndim == 4:
        across = across.expand(x.shape[0], heads, -1, -1).flatten(0, 1)
    turned = x.transpose(0, 1)
    forward = getattr(F.multi_head_attention_forward, "_regard_original", F.multi_head_attention_forward)
    passed = _probe(
        forward, turned, turned, turned, width, heads, in_weight, in_bias, None, None, False, 0.0, out_weight,
        out_bias, training=False, key_padding_mask=padding, need_weights=False, attn_mask=across,
    )  # fmt: skip
    if passed is not None:
        tell(module, passed._replace(kernel="torch: fused encoder layer (fast path)"), below)
