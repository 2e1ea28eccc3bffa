"""From attention modules of `transformers`: their weights in a layer, what they do to scores as a mask and score mods.

Modules are read by their attributes; transformers itself is not imported. A class is known when the parity table
(`docs/parity.md`) holds it against the layer; others are refused, since a class that looks alike may not be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks import Mask, causal, sliding_window
from regard.nn.attention import MultiheadAttention
from regard.nn.rope import Rope
from regard.score_mods import ScoreMod, alibi, relative_bias, softcap

Tensor = Any  # the types of torch are not followed
Projection = tuple[Tensor, Tensor]  # weight (out, in), and bias (out,) or None


def _read(linear: Any) -> Projection:
    transposed = not isinstance(linear, nn.Linear)  # GPT-2's Conv1D keeps (in, out)
    return linear.weight.T if transposed else linear.weight, linear.bias


def _apart(*linears: Any) -> list[Projection]:
    """Query, key and value, each a module of its own."""
    return [_read(linear) for linear in linears]


def _thirds(linear: Any) -> list[Projection]:
    """Query, key and value, one after the other in one projection."""
    weight, bias = _read(linear)
    return list(zip(weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3), strict=True))


def _by_head(linear: Any, head_dim: int) -> list[Projection]:
    """The same, where each head has its query, key and value in a row."""

    def part(x: Tensor, which: int) -> Tensor:
        return None if x is None else x.unflatten(0, (-1, 3, head_dim))[:, which].flatten(0, 1)

    return [(part(linear.weight, which), part(linear.bias, which)) for which in range(3)]


def _relative(module: Any) -> ScoreMod | None:
    """T5's bias; of a stack of layers the first has the table, the others are given what it adds."""
    if not module.has_relative_attention_bias:
        return None
    return relative_bias(
        module.relative_attention_bias.weight.detach().clone(),
        bidirectional=not module.is_decoder,
        max_distance=module.relative_attention_max_distance,
    )


@dataclass(frozen=True)
class Kind:
    """How to read a class of modules."""

    projections: Callable[[Any], list[Projection]]
    out: str  # the projection of the output
    rotary: bool = False
    added: Callable[[Any], ScoreMod | None] = lambda module: None  # to the scores
    inner: str = ""  # the submodule that has the scale and the rest, where it is not the module


_LLAMA = Kind(lambda m: _apart(m.q_proj, m.k_proj, m.v_proj), "o_proj", rotary=True)
KINDS = {
    "BertAttention": Kind(
        lambda m: _apart(m.self.query, m.self.key, m.self.value), "output.dense", inner="self"
    ),
    "BloomAttention": Kind(
        lambda m: _by_head(m.query_key_value, m.head_dim), "dense", added=lambda m: alibi()
    ),
    "GPT2Attention": Kind(lambda m: _thirds(m.c_attn), "c_proj"),
    "GPTNeoXAttention": Kind(lambda m: _by_head(m.query_key_value, m.head_size), "dense", rotary=True),
    "Gemma2Attention": _LLAMA,
    "GptOssAttention": _LLAMA,
    "LlamaAttention": _LLAMA,
    "MistralAttention": _LLAMA,
    "MptAttention": Kind(lambda m: _thirds(m.Wqkv), "out_proj", added=lambda m: alibi()),
    "Qwen3Attention": _LLAMA,
    "T5Attention": Kind(lambda m: _apart(m.q, m.k, m.v), "o", added=_relative),
}


def from_transformers(module: Any) -> tuple[MultiheadAttention, dict[str, Any]]:
    """A layer with the weights of an attention module of `transformers`, copied, and the options of its calls.

    The options are the mask and the score modifications that the module stands for: `layer(x, **options)`; padding and
    cache are given to a call as ever. Known are the attentions of Llama, Mistral, Qwen 3, Gemma 2, GPT-OSS, GPT-NeoX,
    GPT-2, BLOOM, MPT, T5 and BERT. The layer gives what the module's last projection gives; what BLOOM and BERT add to
    that is not part of it. Of a stack of T5 only the first layer has the bias: its options serve all of them.

    >>> from transformers import MptConfig, MptModel
    >>> model = MptModel(MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=9))
    >>> layer, options = from_transformers(model.blocks[0].attn)
    >>> options
    {'mask': causal(), 'score_mod': [alibi()]}
    >>> layer(torch.ones(1, 3, 8), **options).shape
    torch.Size([1, 3, 8])
    """
    kind = KINDS.get(type(module).__name__)
    if kind is None:
        raise ArgumentTypeError(
            "from_transformers",
            received=f"a {type(module).__name__}"
            if isinstance(module, nn.Module)
            else describe_argument(module),
            expected="an attention module of transformers: " + ", ".join(sorted(KINDS, key=str.lower)),
            hint="For another module copy its weights into q_proj, k_proj, v_proj and out_proj of a new layer.",
        )
    inner = module.get_submodule(kind.inner)
    _check(inner)
    projections = [*kind.projections(module), _read(module.get_submodule(kind.out))]
    (query, bias), (key, _), _, (out, out_bias) = projections
    head_dim = _first(inner, "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    sinks, norm = (getattr(inner, name, None) for name in ("sinks", "q_norm"))
    layer = MultiheadAttention(
        query.shape[1],
        len(query) // head_dim,
        num_kv_heads=len(key) // head_dim,
        head_dim=head_dim,
        bias=bias is not None,
        out_bias=out_bias is not None,
        dropout=_rate(_first(inner, "attention_dropout", "attn_dropout", "attn_dropout_p", "dropout")),
        scale=_first(inner, "scaling", "inv_norm_factor", "softmax_scale"),
        rope=_rope(inner, head_dim) if kind.rotary else None,
        sink=None if sinks is None else "learned",
        qk_norm=None if norm is None else lambda width: nn.RMSNorm(width, norm.variance_epsilon),
        device=out.device,
    ).to(out.dtype)
    ours = [_read(x) for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]
    pairs = [
        pair for to, given in zip(ours, projections, strict=True) for pair in zip(to, given, strict=True)
    ]
    if sinks is not None:
        pairs.append((layer.sink, sinks))
    if norm is not None:
        pairs += [(layer.q_norm.weight, norm.weight), (layer.k_norm.weight, inner.k_norm.weight)]
    with torch.no_grad():
        for mine, theirs in pairs:
            if theirs is not None:
                mine.copy_(theirs)
    cap = getattr(inner, "attn_logit_softcapping", None)
    changes = [change for change in (kind.added(inner), cap and softcap(cap)) if change is not None]
    return layer.train(module.training), {"mask": _mask(inner), "score_mod": changes}


def _mask(module: Any) -> Mask | None:
    if not getattr(module, "is_causal", True):  # BLOOM and MPT do not say it
        return None
    window = _window(module)
    return causal() if window is None else sliding_window(window)


def _window(module: Any) -> int | None:
    if hasattr(module, "sliding_window"):
        return module.sliding_window  # type: ignore[no-any-return]
    return getattr(getattr(module, "config", None), "sliding_window", None)


def _rope(module: Any, head_dim: int) -> Rope:
    """The angles of the model's own module for them, which is named like the attention's."""
    name = type(module).__name__.replace("Attention", "RotaryEmbedding")
    rotary = getattr(sys.modules[type(module).__module__], name)(module.config)
    return Rope(head_dim, layout="half", frequencies=rotary.inv_freq, factor=float(rotary.attention_scaling))


def _check(module: Any) -> None:
    """Refuse what the layer would not do."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    without_a_place = {
        "queries and keys that are clipped": getattr(module, "clip_qkv", None),
        "angles that change with the length": parameters.get("rope_type") in ("dynamic", "longrope"),
        "a window that is not causal": not getattr(module, "is_causal", True) and _window(module),
        "a query projection beside a fused one": hasattr(module, "q_attn"),
    }
    if any(without_a_place.values()):
        raise ArgumentError(
            "from_transformers",
            received=f"a {type(module).__name__} with "
            + ", ".join(name for name, there in without_a_place.items() if there),
            expected="what the layer does: projections, positions, a mask and score modifications",
            hint="Take regard.attention with the module's own queries and keys.",
        )


def _first(module: Any, *names: str) -> Any:
    """The first of these attributes that there is."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _rate(dropout: Any) -> float:
    return float(dropout.p if isinstance(dropout, nn.Module) else dropout)
