"""The attention function and the mask function that transformers calls for `attn_implementation="regard"`."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.capture.call import CapturedArgs
from regard.capture.patching import exclude_from_compile
from regard.errors import ArgumentError
from regard.transformers.attention_weights import AttentionWeights
from regard.transformers.layer_choice import UnrecordedWeights, is_chosen
from regard.transformers.recorded_call import record_call

try:  # absent in older releases, where every call records
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

Tensor = Any  # the types of torch are not followed

NAME = "regard"

# Whether the forward method of a class of layers has the parameter output_attentions.
_has_parameter: dict[type[nn.Module], bool] = {}

# Arguments that `sdpa` alone gets a mask for: transformers compares the name of the implementation.
REFUSED_ARGUMENTS = {
    "indices": "an index of keys for each query",
    "block_indices": "an index of keys for each query",
    "cache": "the cache of continuous batching",
}


def register() -> None:
    """Register the attention function and the mask function with transformers."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, create_mask)


def create_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Create a mask as `sdpa` does, or as `eager` does for a family that supports nothing else.

    Returns:
        Boolean, (batch, 1, q_len, kv_len), True = attend, or numbers that are added to the scores; None if the layers
        can do without.
    """
    name = "sdpa"
    if config is not None and not supports_sdpa(config):
        name = "eager" if needs_added_mask(config) else "sdpa"
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[name](*args, config=config, **kwargs)
    return mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, AttentionWeights | UnrecordedWeights | None]:
    """Compute the attention of a layer as `sdpa` does, and record it if weights are requested.

    Args:
        module: The layer.
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        value: (batch, kv_heads, kv_len, value_dim).
        attention_mask: Boolean, True = attend, or added to the scores; None for none, or causal if the layer is.
        dropout: Dropout probability of the weights. The recorded weights are those before dropout.
        scaling: Factor of the scores; None for 1/√head_dim.
        **kwargs: Further arguments of the model; `softcap`, `s_aux`, `position_bias` and `is_causal` have a meaning.

    Returns:
        The output, (batch, q_len, heads, value_dim), and the lazy weights; None if they are not requested.
    """
    for name, meaning in REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise ArgumentError(
                'attn_implementation="regard"',
                received=f"{meaning} in {type(module).__name__}",
                expected="a model that passes a mask",
                hint='Load it with attn_implementation="sdpa", and record its attention with regard.watch.',
            )
    if attention_mask is None and not supports_sdpa(module):
        kwargs["is_causal"] = False
    is_plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    requested = _is_requested(module, kwargs)
    is_recorded = requested and is_chosen(module)
    call = None
    if is_recorded or not is_plain:
        # The rule of `sdpa` for causal layers without a mask.
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        sink = kwargs.get("s_aux")
        args = CapturedArgs(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=bool(query.shape[-2] > 1 and attention_mask is None and is_causal),
            scale=scaling,
            softcap=kwargs.get("softcap"),
            # A parameter has a gradient even where gradients are disabled.
            sink=None if sink is None else (sink if torch.is_grad_enabled() else sink.detach()).reshape(-1),
            position_bias=kwargs.get("position_bias"),
            kernel=NAME,
        )
        call = _record(module, args, keep=is_recorded)
    if is_plain:
        options = {name: argument for name, argument in kwargs.items() if name != "output_attentions"}
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        options |= {"dropout": dropout, "scaling": scaling}
        output = sdpa(module, query, key, value, attention_mask, **options)[0]
    else:
        if dropout:
            raise ArgumentError(
                'attn_implementation="regard"',
                received=f"dropout of {dropout:g} in a layer with a soft cap or a sink",
                expected="no dropout of attention weights",
                hint="Call model.eval(), set attention_dropout=0 in the configuration, or train with eager attention.",
            )
        assert call is not None
        output = (call.matrix @ value).transpose(1, 2).contiguous()
    if not requested:
        return output, None
    return output, AttentionWeights(call) if call is not None and is_recorded else UnrecordedWeights()


# A compiled model leaves its graph here, and only if weights are requested.
_record = exclude_from_compile(record_call)


def _may_read_weights(hook: Any) -> bool:
    """Return whether a forward hook of a layer is the user's, as those of kvpress, and may read what it returns."""
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.partition(".")[0] not in ("accelerate", "regard", "torch", "transformers")


def _is_requested(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a model requests weights, as far as a layer can know it; if it cannot, it records them."""
    requested = kwargs.get("output_attentions")
    if requested:
        return True
    if torch.compiler.is_compiling() and not getattr(_active_collector, "compiling", False):
        return False  # a compiled layer cannot read what the model around it collects
    if any(map(_may_read_weights, module._forward_hooks.values())):
        return True
    collected = None if _active_collector is None else _active_collector.get()
    if collected is None:
        return requested is None
    if any("attentions" in name for name in collected):
        return True
    # Layers with this parameter return the weights to a model that collects them on its own.
    layer_class = type(module)
    if layer_class not in _has_parameter:
        _has_parameter[layer_class] = "output_attentions" in inspect.signature(layer_class.forward).parameters
    return _has_parameter[layer_class]


# By an implementation and the name of a module of Python: whether every model in it supports the implementation.
_support: dict[tuple[str, str], bool] = {}


def supports_sdpa(part: Any) -> bool:
    """Return whether every model of a family supports `sdpa`.

    `sdpa` gets no mask where a layer that declares `is_causal` can do without. The layers of a family that does not
    support `sdpa` declare nothing, so they need every mask, and a call without one attends to every key.
    """
    return bool(_supports("sdpa", _find_module_name(part)))


def needs_added_mask(part: Any) -> bool:
    """Return whether a family supports `eager` alone: its layers may add the mask to their scores, or extend it."""
    name = _find_module_name(part)
    return not any(_supports(implementation, name) for implementation in ("sdpa", "flash_attn", "flex_attn"))


def _find_module_name(part: Any) -> str:
    """Return the name of the module of Python that defines the layers of a family."""
    name = type(part).__module__
    return name if isinstance(part, nn.Module) else name.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a compiled model does not trace it
def _supports(implementation: str, module_name: str) -> bool:
    key = implementation, module_name
    if key not in _support:
        names = vars(sys.modules.get(module_name, object)).values()
        models: list[Any] = [
            found
            for found in names
            if isinstance(found, type)
            and issubclass(found, PreTrainedModel)
            and found.__module__ == module_name
        ]
        _support[key] = all(getattr(model, f"_supports_{implementation}", False) for model in models)
    return _support[key]
