"""Find the functions to patch while a model is watched: those of torch, of transformers, and of the model's files."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias

from regard.capture import wrappers
from regard.capture.distributed_layers import wrap_distributed_attention
from regard.capture.flex_wrappers import is_compiled_flex_attention, wrap_compile, wrap_flex_attention
from regard.capture.held_functions import find_held_functions
from regard.capture.imported_names import find_imported
from regard.capture.native_wrappers import wrap_encoder_layer, wrap_native_multi_head_attention
from regard.capture.own_softmax import wrap_exp, wrap_softmax
from regard.capture.patching import class_namespace, unwrap_original
from regard.capture.regard_layers import wrap_regard_attention
from regard.core.attention import attention, layer_attention


def find_patch_targets(
    model: nn.Module,
) -> Iterator[tuple[MutableMapping[str, Any], str, Callable[..., Any]]]:
    """Yield namespace, name and wrapper of every function to patch.

    They are functions of torch, of the registry of transformers, and those that the files of the model have imported.
    """
    functional = vars(F)
    sdpa = unwrap_original(functional["scaled_dot_product_attention"])
    multi_head = unwrap_original(functional["multi_head_attention_forward"])
    yield functional, "scaled_dot_product_attention", wrappers.wrap_sdpa
    yield functional, "multi_head_attention_forward", wrappers.wrap_multi_head_attention
    yield vars(torch), "_native_multi_head_attention", wrap_native_multi_head_attention
    yield vars(torch), "_transformer_encoder_layer_fwd", wrap_encoder_layer
    yield class_namespace(CausalBias), "__torch_function__", wrappers.wrap_causal_bias
    own_softmax = {"softmax": wrap_softmax, "exp": wrap_exp, "exp_": wrap_exp}
    for name, make_wrapper in own_softmax.items():
        yield class_namespace(torch.Tensor), name, make_wrapper
        yield vars(torch), name, make_wrapper
    yield vars(torch.special), "softmax", wrap_softmax
    flex_attention = unwrap_original(flex.flex_attention)
    yield vars(flex), "flex_attention", wrap_flex_attention
    yield vars(torch), "compile", wrap_compile
    model_files = [id(namespace) for namespace in _find_namespaces(model)]
    by_function = {id(sdpa): wrappers.wrap_sdpa, id(multi_head): wrappers.wrap_multi_head_attention}
    by_function |= {
        id(unwrap_original(getattr(torch, name))): make_wrapper for name, make_wrapper in own_softmax.items()
    }
    by_function[id(flex_attention)] = wrap_flex_attention
    imported = list(find_imported(frozenset(by_function), is_compiled_flex_attention))
    for namespace in imported + [vars(part) for part in model.modules()]:
        if id(namespace) not in model_files:
            for name, value in tuple(namespace.items()):
                original = _unwrap_function(value)
                if id(original) in by_function:
                    yield namespace, name, by_function[id(original)]
                elif is_compiled_flex_attention(original):
                    yield namespace, name, wrap_flex_attention
    for namespace, name, original in find_held_functions(
        model, _find_namespaces(model), frozenset(by_function)
    ):
        yield namespace, name, by_function[id(original)]
    distributed = sys.modules.get("regard.distributed")
    distributed_attention = None
    if distributed is not None:
        distributed_attention = unwrap_original(vars(distributed)["attention"])
        yield vars(distributed), "attention", wrap_distributed_attention
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is not None:
        for name, function in tuple(interface._global_mapping.items()):
            if unwrap_original(function) is getattr(modeling, "sdpa_attention_forward", None):
                continue  # it calls F.scaled_dot_product_attention
            yield interface._global_mapping, name, wrappers.wrap_attention_function
    for namespace in _find_namespaces(model):
        for name, value in tuple(namespace.items()):
            original = unwrap_original(value)
            if id(original) in by_function:
                yield namespace, name, by_function[id(original)]
            elif is_compiled_flex_attention(original):
                yield namespace, name, wrap_flex_attention
            elif original is attention or original is layer_attention:
                yield namespace, name, wrap_regard_attention
            elif distributed_attention is not None and original is distributed_attention:
                yield namespace, name, wrap_distributed_attention
            elif _is_attention_function(original):
                yield namespace, name, wrappers.wrap_attention_function
            elif interface is not None and isinstance(value, interface):
                for key in tuple(value._local_mapping):
                    yield value._local_mapping, key, wrappers.wrap_attention_function


def _find_namespaces(model: nn.Module) -> Iterator[MutableMapping[str, Any]]:
    """Yield the globals of the files that define the model's classes, except those of torch.

    A public class may have the `__module__` of its package, so the modules of its methods count, too.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    methods = [
        item for base in classes for item in vars(base).values() if isinstance(item, types.FunctionType)
    ]
    for name in sorted({item.__module__ for item in (*classes, *methods) if item.__module__}):
        if not name.startswith("torch.") and name != "builtins" and name in sys.modules:
            yield vars(sys.modules[name])


def _unwrap_function(value: Any) -> Any:
    """Return the function that a patch replaced, or the value itself; attributes of other objects are not read."""
    is_wrapper = isinstance(value, types.FunctionType) and "_regard_original" in vars(value)
    return unwrap_original(value) if is_wrapper else value


def _is_attention_function(value: Any) -> bool:
    """Return whether a function has the parameters of transformers' attention functions."""
    if not isinstance(value, types.FunctionType):
        return False
    return value.__code__.co_varnames[:4] == ("module", "query", "key", "value")
