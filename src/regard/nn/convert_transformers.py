"""Conversion of `transformers` attention modules: weights become a layer, masks and biases the options of its calls.

Modules are read by their attributes; transformers itself is not imported. A class is supported if the parity table
(`docs/parity.md`) compares it with the layer. Other classes are rejected, because similar code may compute differently.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.families import ATTENTION_MODULES, UNSCALED_LAYERS, AttentionModule
from regard.masks import Mask, causal, sliding_window
from regard.nn.attention import MultiheadAttention
from regard.nn.rope import Rope
from regard.score_mods import ScoreMod, alibi, relative_bias, softcap

Tensor = Any  # mypy does not follow torch's types
Projection = tuple[Tensor, Tensor]  # weight (out, in), and bias (out,) or None


def _read_projection(linear: Any) -> Projection:
    is_transposed = not isinstance(linear, nn.Linear)  # GPT-2's Conv1D stores (in, out)
    return linear.weight.T if is_transposed else linear.weight, linear.bias


def _read_projections(module: Any, spec: AttentionModule, head_dim: int) -> list[Projection]:
    """Read query, key and value from their modules, or from one fused projection that stacks them."""
    parts = [_read_projection(module.get_submodule(name)) for name in spec.projections]
    if len(parts) == 3:
        return parts

    def split(x: Tensor) -> tuple[Tensor, ...]:
        if x is None:
            return (None,) * 3
        if not spec.by_head:
            return x.chunk(3)  # type: ignore[no-any-return]
        return tuple(part.flatten(0, 1) for part in x.unflatten(0, (-1, 3, head_dim)).unbind(1))

    [(weight, bias)] = parts
    return list(zip(split(weight), split(bias), strict=True))


def _read_bias(module: Any, spec: AttentionModule) -> ScoreMod | None:
    """Read what is added to the scores. In T5, only the first layer of a stack owns the table."""
    if spec.bias == "alibi":
        return alibi()
    if spec.bias is None or not module.has_relative_attention_bias:
        return None
    return relative_bias(
        module.relative_attention_bias.weight.detach().clone(),
        bidirectional=not module.is_decoder,
        max_distance=module.relative_attention_max_distance,
    )


def from_transformers(module: Any) -> tuple[MultiheadAttention, dict[str, Any]]:
    """Convert an attention module of `transformers` into a layer and the options of its calls.

    It supports the attention modules of Llama, Mistral, Qwen 3, Gemma 2, GPT-OSS, GPT-NeoX, GPT-2, BLOOM, MPT, T5 and
    BERT. The layer returns the output of the module's last projection; what BLOOM and BERT add to it is not included.
    In T5 only the first layer of a stack has the bias, and its options apply to all layers of the stack.

    Args:
        module: The attention module, such as `model.layers[0].self_attn`.

    Returns:
        The layer, with copied weights, and the mask and score modifications that the module implies:
        `layer(x, **options)`. Pass padding and cache to the call as usual.

    Raises:
        ArgumentTypeError: If the class of the module is not supported.
        ArgumentError: If the module uses a feature that the layer does not have, such as dynamic rotary angles.

    >>> import torch
    >>> from transformers import MptConfig, MptModel
    >>> model = MptModel(MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=9))
    >>> layer, options = from_transformers(model.blocks[0].attn)
    >>> options
    {'mask': causal(), 'score_mod': [alibi()]}
    >>> layer(torch.ones(1, 3, 8), **options).shape
    torch.Size([1, 3, 8])
    """
    spec = ATTENTION_MODULES.get(type(module).__name__)
    if spec is None or not spec.is_convertible:
        raise ArgumentTypeError(
            "from_transformers",
            received=f"a {type(module).__name__}"
            if isinstance(module, nn.Module)
            else describe_argument(module),
            expected="a transformers attention module: "
            + ", ".join(
                sorted(
                    (name for name, known in ATTENTION_MODULES.items() if known.is_convertible), key=str.lower
                )
            ),
            hint="To convert another module, copy its weights into q_proj, k_proj, v_proj and out_proj of a new layer.",
        )
    inner = module.get_submodule(spec.inner)
    _check_supported(inner)
    head_dim = _first_attribute(inner, "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    theirs = [*_read_projections(module, spec, head_dim), _read_projection(module.get_submodule(spec.out))]
    (query, bias), (key, _), _, (out, out_bias) = theirs
    sinks, norm = (getattr(inner, name, None) for name in ("sinks", "q_norm"))
    dropout = _first_attribute(inner, "attention_dropout", "attn_dropout", "attn_dropout_p", "dropout")
    layer = MultiheadAttention(
        query.shape[1],
        len(query) // head_dim,
        num_kv_heads=len(key) // head_dim,
        head_dim=head_dim,
        bias=bias is not None,
        out_bias=out_bias is not None,
        dropout=float(dropout.p if isinstance(dropout, nn.Module) else dropout),
        scale=_read_scale(inner, head_dim),
        rope=_read_rope(inner, head_dim) if spec.is_rotary else None,
        sink=None if sinks is None else "learned",
        qk_norm=None if norm is None else lambda width: nn.RMSNorm(width, norm.variance_epsilon),
        device=out.device,
    ).to(out.dtype)
    ours = [_read_projection(x) for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]
    pairs = [pair for own, source in zip(ours, theirs, strict=True) for pair in zip(own, source, strict=True)]
    if sinks is not None:
        pairs.append((layer.sink, sinks))
    if norm is not None:
        pairs += [(layer.q_norm.weight, norm.weight), (layer.k_norm.weight, inner.k_norm.weight)]
    with torch.no_grad():
        for target, source in pairs:
            if source is not None:
                target.copy_(source)
    cap = getattr(inner, "attn_logit_softcapping", None)
    score_mods = [x for x in (_read_bias(inner, spec), cap and softcap(cap)) if x is not None]
    return layer.train(module.training), {"mask": _read_mask(inner), "score_mod": score_mods}


def _read_mask(module: Any) -> Mask | None:
    if not getattr(module, "is_causal", True):  # BLOOM and MPT are causal without the attribute
        return None
    window = read_window(module)
    return causal() if window is None else sliding_window(window)


def read_window(module: Any) -> int | None:
    """Return the sliding window of an attention module in tokens; None if it has none."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window  # type: ignore[no-any-return]
    return getattr(getattr(module, "config", None), "sliding_window", None)


def _read_rope(module: Any, head_dim: int) -> Rope:
    """Take the angles from the model's own rotary module, whose class is named after the attention's."""
    name = type(module).__name__.replace("Attention", "RotaryEmbedding")
    rotary = getattr(sys.modules[type(module).__module__], name)(module.config)
    return Rope(head_dim, layout="half", frequencies=rotary.inv_freq, factor=float(rotary.attention_scaling))


def _check_supported(module: Any) -> None:
    """Raise an error if the module uses a feature that the layer does not have."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    unsupported = {
        "clipped queries and keys": getattr(module, "clip_qkv", None),
        "rotary angles that change with the length": parameters.get("rope_type") in ("dynamic", "longrope"),
        "a window that is not causal": not getattr(module, "is_causal", True) and read_window(module),
        "a query projection beside a fused one": hasattr(module, "q_attn"),
    }
    if any(unsupported.values()):
        raise ArgumentError(
            "from_transformers",
            received=f"a {type(module).__name__} with "
            + ", ".join(name for name, present in unsupported.items() if present),
            expected="only what the layer supports: projections, positions, a mask and score modifications",
            hint="Call regard.attention with the module's own queries and keys.",
        )


def _first_attribute(module: Any, *names: str) -> Any:
    """Return the first of these attributes that the module has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ArgumentError(
        "from_transformers",
        received=f"a {type(module).__name__} without {', '.join(names)}",
        expected="a module that has one of them",
        hint="Use another release of transformers; docs/compatibility.md lists those that are tested.",
    )


def _read_scale(module: Any, head_dim: int) -> float:
    """Read the scale of the scores. In older releases GPT-2 has settings instead of it; some families have none."""
    if hasattr(module, "scaling"):
        return float(module.scaling)
    if hasattr(module, "scale_attn_weights"):
        scale = head_dim**-0.5 if module.scale_attn_weights else 1.0
        return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale
    if UNSCALED_LAYERS.fullmatch(type(module).__name__):
        return 1.0
    return float(_first_attribute(module, "scaling", "inv_norm_factor", "softmax_scale"))
