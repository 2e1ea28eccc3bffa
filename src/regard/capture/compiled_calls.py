"""Follow attention calls inside the graphs of `torch.compile`: the graph keeps an operator that notifies the watchers.

While a watch follows compiled code, the patched names hold functions that the compiler traces. The compiler guards
these names, so it makes a second graph for the time of the watch, and runs the first one afterwards. The second graph
has the operations of the first one and `regard::observe_attention`, an operator without results. One graph may run for
several modules, so the operator is given the path from the module that was compiled to the layer, and finds the module
on the Python stack. Imported only if a compiled model is watched.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch._dynamo import assume_constant_result
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from regard.capture.call import CapturedArgs
from regard.capture.context_parallel import is_context_parallel
from regard.capture.own_softmax import wrap_softmax
from regard.capture.patching import Function, Target
from regard.capture.watchers import is_recomputing, list_watchers, notify, watched
from regard.capture.wrappers import (
    move_heads_first,
    wrap_attention_function,
    wrap_flex_attention,
    wrap_sdpa,
)
from regard.engines import torch_kernels as kernels
from regard.engines.torch_precision import has_ieee_products
from regard.errors import ArgumentError

Tensor = Any  # the types of torch are not followed
Make = Callable[[Function], Function]

# Layers whose attention a graph computes in a way that is not observed, with the reason.
unobserved: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

_UNKNOWN_PATH = "?"


def follow_compiled(targets: Iterable[Target]) -> Iterator[Target]:
    """Yield the targets with wrappers that run in Python as before, and that the compiler traces."""
    kernels.get_kernel("cpu")  # checks the kernel, which the compiler could not
    for namespace, name, make_wrapper in targets:
        yield namespace, name, _make_followed(make_wrapper)
    yield vars(F), "softmax", _make_followed(_keep)  # which the compiler does not trace into


def _keep(original: Function) -> Function:
    return original


@cache  # one wrapper for each function, because the compiler guards it
def _make_followed(make_wrapper: Make) -> Make:
    @cache
    def make(original: Function) -> Function:
        wrapper = make_wrapper(original)
        trace = _TRACES.get(make_wrapper)
        traced = original if trace is None else trace(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return traced(*args, **kwargs) if is_dynamo_compiling() else wrapper(*args, **kwargs)

        call._regard_is_traced = True  # type: ignore[attr-defined]
        return call

    return make


# The operator


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "regard::observe_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor? value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale,"
    " bool enable_gqa, float? softcap, Tensor? sink, Tensor? position_bias, Tensor? lse, Tensor? output, "
    "Tensor? weights, str kernel, str path) -> ()",
    tags=[torch.Tag.cudagraph_unsafe],
)
def observe_attention(
    query: Tensor, key: Tensor, value: Tensor | None, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, softcap: float | None, sink: Tensor | None, position_bias: Tensor | None,
    lse: Tensor | None, output: Tensor | None, weights: Tensor | None, kernel: str, path: str,
) -> None:  # fmt: skip
    """Notify the watchers of a layer of a call, when the graph runs; arguments as in `CapturedArgs`."""
    if is_recomputing():
        return
    module = _find_module(path)
    if module is None or not list_watchers(module):
        return
    is_exact = query.dtype == torch.float64 or has_ieee_products("cpu")
    with torch.no_grad():
        notify(
            module,
            CapturedArgs(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, sink, position_bias,
                lse=lse if is_exact else None, output=output, weights=weights, kernel=kernel,
            ),
        )  # fmt: skip


@observe_attention.register_fake  # type: ignore[untyped-decorator]
def _observe_fake(*args: Any) -> None:
    return None


# The graph must keep it, and run it once.
_register_effectful_op(torch.ops.regard.observe_attention.default, _EffectType.ORDERED)


def _find_module(path: str) -> nn.Module | None:
    """Return the layer at the end of a path, from the nearest module on the stack."""
    frame: Any = sys._getframe(1)
    class_name, _, path = path.partition(":")
    while frame is not None and class_name != _UNKNOWN_PATH:
        code = frame.f_code
        root: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if type(root).__name__ == "OptimizedModule":  # of a class of torch, whose own frames are not run
            root = root._orig_mod
        if isinstance(root, nn.Module) and id(root) in watched:
            if class_name in ("", type(root).__qualname__):
                return root.get_submodule(path)
            break
        frame = frame.f_back
    if not class_name:
        return None  # attention outside of the watched model
    raise ArgumentError(
        "Monitor",
        received="a function that torch.compile has compiled and that calls the model",
        expected="a compiled model, or compiled blocks of a model",
        hint="Compile the model instead of the function: model.compile() or torch.compile(model).",
    )


# While the compiler traces


def _find_translator() -> Any:
    """Return the part of the compiler that traces the innermost function."""
    frame: Any = sys._getframe(1)
    while not isinstance(frame.f_locals.get("self"), InstructionTranslatorBase):
        frame = frame.f_back
    return frame.f_locals["self"]


def _read_module(variable: Any) -> nn.Module | None:
    """Return the module that a local variable of a traced function holds, if it is watched."""
    is_lazy = hasattr(variable, "is_realized") and not variable.is_realized()
    if not is_lazy and hasattr(variable, "realize"):
        variable = variable.realize()
    value = variable.peek_value() if is_lazy else getattr(variable, "value", None)
    return value if isinstance(value, nn.Module) and id(value) in watched else None


def _list_traced_modules() -> tuple[nn.Module | None, list[int]]:
    """Return the watched module that is compiled, and the ids of the watched modules that are traced inside it."""
    translator: Any = _find_translator()
    keys = (key.partition("@")[0] for key in translator.nn_module_stack)
    inner = [int(key) for key in keys if key.isdigit() and int(key) in watched]
    while translator.parent is not None:
        translator = translator.parent
    code = translator.f_code
    names = code.co_varnames[: code.co_argcount]
    variables = (translator.symbolic_locals[name] for name in names if name in translator.symbolic_locals)
    root = next(filter(None, map(_read_module, variables)), None)
    if inner and translator.f_globals.get("__name__") == "torch._dynamo.external_utils":
        # The compiler calls modules of torch's own classes in a function of its own.
        models = (watcher._model for watcher, _ in watched[inner[0]])
        root = next(module for model in models for module in model.modules() if id(module) == inner[0])
    return root, inner


@assume_constant_result  # type: ignore[untyped-decorator]
def _find_path() -> str:
    """Return class and path of the layer that is traced: "" if none is, as in a function that runs by itself."""
    root, inner = _list_traced_modules()
    if root is None:
        return _UNKNOWN_PATH if inner else ""
    target = inner[-1] if inner else id(root)
    paths = [name for name, module in root.named_modules() if id(module) == target]
    return f"{type(root).__qualname__}:{paths[0]}" if paths else _UNKNOWN_PATH


def _read_argument(translator: Any, name: str) -> Any:
    """Return an argument of the function that is traced: a fake tensor or a constant."""
    variable = translator.symbolic_locals[name]
    if hasattr(variable, "realize"):
        variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    return variable.as_proxy().node.meta["example_value"]


_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@assume_constant_result  # type: ignore[untyped-decorator]
def _find_sdpa_kernel() -> str:
    """Return "flash" if `F.scaled_dot_product_attention` would run flash on the CPU, which returns its lse as well."""
    translator = _find_translator()
    try:
        arguments = [_read_argument(translator, name) for name in _SDPA_ARGUMENTS]
        with translator.output.fake_mode:
            return "flash" if kernels.chooses_cpu_flash(*arguments) else ""
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError):
        return ""


def _trace_sdpa(original: Function) -> Function:
    if is_context_parallel(original):
        return _note_and_call(original, "compiled code runs context parallelism")

    def sdpa(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if original is kernels.SDPA and _find_sdpa_kernel() == "flash":
            bias = kernels.make_flash_bias(attn_mask, query.dtype)
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
            )
            lse, kernel = lse.detach(), "torch: flash on CPU"
        else:
            output = original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            lse, kernel = None, "torch: scaled_dot_product_attention"
        torch.ops.regard.observe_attention(
            query.detach(), key.detach(), None, None if attn_mask is None else attn_mask.detach(), dropout_p, is_causal,
            scale, enable_gqa, None, None, None, lse, None, None, kernel, _find_path(),
        )  # fmt: skip
        return output

    return sdpa


def _trace_attention_function(original: Function) -> Function:
    """Trace an attention function of transformers that computes its weights: the arguments are read as in Python."""
    if "eager" not in getattr(original, "__name__", ""):
        return original

    def attention_function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output, weights = original(module, query, key, value, *args, **kwargs)
        mask = args[0] if args else kwargs.get("attention_mask")
        sink, bias = kwargs.get("s_aux"), kwargs.get("position_bias")
        if sink is None:
            sink = getattr(module, "sinks", None)
        heads_first = move_heads_first(output, query)
        torch.ops.regard.observe_attention(
            query.detach(), key.detach(), value.detach(), None if mask is None else mask.detach(),
            kwargs.get("dropout") or 0.0, False, kwargs.get("scaling"), key.shape[-3] != query.shape[-3],
            kwargs.get("softcap"), None if sink is None else sink.detach().reshape(-1),
            None if bias is None else bias.detach(), None, None if heads_first is None else heads_first.detach(),
            None if weights is None else weights.detach(), "transformers: eager", _find_path(),
        )  # fmt: skip
        return output, weights

    return attention_function


@assume_constant_result  # type: ignore[untyped-decorator]
def _note_softmax() -> str:
    """Note that a layer computes its own softmax of the shape of attention scores."""
    root, inner = _list_traced_modules()
    scores = _read_argument(_find_translator(), "scores")
    if getattr(scores, "ndim", 0) == 4:
        _note(root, inner, "compiled code computes its own softmax")
    return ""


def _note_and_call(original: Function, reason: str) -> Function:
    """Return a function that notes, while it is traced, that its layer is not observed."""

    @assume_constant_result  # type: ignore[untyped-decorator]
    def note() -> str:
        _note(*_list_traced_modules(), reason)
        return ""

    def attend(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    return attend


def _note(root: nn.Module | None, inner: list[int], reason: str) -> None:
    module = root if not inner or root is None else next(x for x in root.modules() if id(x) == inner[-1])
    if module is not None:
        unobserved.setdefault(module, reason)


def _trace_softmax(original: Function) -> Function:
    def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _note_softmax()
        return original(scores, *args, **kwargs)

    return softmax


def _trace_flex_attention(original: Function) -> Function:
    if original is not flex.flex_attention and not hasattr(original, "_torchdynamo_orig_callable"):
        return original
    return _note_and_call(original, "compiled code calls flex_attention")


_TRACES: dict[Make, Make] = {
    wrap_sdpa: _trace_sdpa,
    wrap_attention_function: _trace_attention_function,
    wrap_softmax: _trace_softmax,
    _keep: _trace_softmax,
    wrap_flex_attention: _trace_flex_attention,
}
