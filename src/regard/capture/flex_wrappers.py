"""Wrap `flex_attention`, and what `torch.compile` makes of it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.nn.attention import flex_attention as flex

from regard.capture.captured_args import CapturedArgs
from regard.capture.dense_attention import hold_products
from regard.capture.patching import unwrap_original
from regard.capture.wrappers import count_captures, find_running_module, notify


def wrap_flex_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `flex_attention`, or a function that `torch.compile` made of it."""
    kernel = "torch: flex_attention" + (", compiled" if is_compiled_flex_attention(original) else "")

    @wraps(unwrap_original(flex.flex_attention))
    def attend(*args: Any, **kwargs: Any) -> Any:
        module = find_running_module()
        if module is None:
            return original(*args, **kwargs)
        before = count_captures()
        with hold_products():  # without compilation, it computes a softmax
            result = original(*args, **kwargs)
        if count_captures() != before:
            return result
        arguments = inspect.signature(unwrap_original(flex.flex_attention)).bind(*args, **kwargs).arguments
        captured = CapturedArgs(
            arguments["query"],
            arguments["key"],
            arguments["value"],
            attn_mask=arguments.get("block_mask"),
            scale=arguments.get("scale"),
            enable_gqa=arguments.get("enable_gqa", False),
            score_mod=arguments.get("score_mod"),
            output=result[0] if isinstance(result, tuple) else result,
            kernel=kernel,
        )
        edited = notify(module, captured).edited_output
        if edited is None:
            return result
        return (edited, *result[1:]) if isinstance(result, tuple) else edited

    return attend


def wrap_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.compile`: `flex_attention` is compiled without its wrapper, and the result is wrapped.

    Layers compile it at their first call and keep the result, which must not become slower after the watch.
    """

    @wraps(original)
    def compile_function(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is flex.flex_attention:
            return wrap_flex_attention(original(unwrap_original(args[0]), *args[1:], **kwargs))
        return original(*args, **kwargs)

    return compile_function


def is_compiled_flex_attention(function: Any) -> bool:
    """Return whether a function is `torch.compile(flex_attention)`."""
    if not isinstance(function, types.FunctionType):
        return False
    original = vars(function).get("_torchdynamo_orig_callable")
    return original is not None and unwrap_original(original) is unwrap_original(flex.flex_attention)
