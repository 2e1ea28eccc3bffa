"""Presets: the calling conventions of known functions, and how the signature describes an unknown one."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from regard import masks
from regard.errors import ArgumentError
from regard.testing.conformance.convention import CallingConvention
from regard.testing.conformance.probes import generate_probes, run_probe

PRESETS: dict[str, CallingConvention] = {
    "torch": CallingConvention(
        "b h n d", "keep", "upper_left", "torch", mask_argument="attn_mask", causal_argument="is_causal",
        scale_argument="scale", gqa_argument="enable_gqa", grouped=True,
    ),
    "multihead": CallingConvention(
        "b n (h d)", "drop", None, "torch", mask_argument="attn_mask", causal_argument="is_causal",
        heads_argument="num_heads", unsupported=("live inf",),  # its projections turn inf into NaN: inf · 0
    ),
    "flex": CallingConvention(
        "b h n d", "keep", "upper_left", "torch", mask_argument="mask", causal_argument="causal",
        scale_argument="scale", gqa_argument="enable_gqa", grouped=True,
    ),
    "flash_attn": CallingConvention(
        "b n h d", None, "lower_right", "torch", mask_argument=None, causal_argument="causal",
        scale_argument="softmax_scale", grouped=True, dtypes=("float16", "bfloat16"), device="cuda",
    ),
    "jax": CallingConvention(
        "b n h d", "keep", "upper_left", "jax", mask_argument="mask", causal_argument="is_causal",
        scale_argument="scale", grouped=True,
    ),
    "regard": CallingConvention(
        "b h n d", "keep", "lower_right", causal_argument="causal", scale_argument="scale",
        gqa_argument="enable_gqa", grouped=True,
    ),
    "numpy": CallingConvention(),
}  # fmt: skip

# Argument names by which an option of an unknown function is recognised.
ARGUMENT_NAMES = {
    "mask_argument": ("mask", "attn_mask", "attention_mask"),
    "causal_argument": ("is_causal", "causal"),
    "scale_argument": ("scale", "softmax_scale", "sm_scale"),
    "heads_argument": ("num_heads", "n_heads", "heads"),
    "gqa_argument": ("enable_gqa",),
}
LAYOUTS = ("b h n d", "h n d", "n d")


def resolve_convention(fn: Any, preset: str | None, fields: dict[str, Any]) -> tuple[Any, CallingConvention]:
    """Return a function as the kit calls it, and its convention: the preset, or what the signature says."""
    if preset is not None and preset not in PRESETS:
        raise ArgumentError(
            "check_conformance", received=f"the convention {preset!r}", expected=f"one of {', '.join(PRESETS)}",
            hint="Use a preset, or describe the function with the fields of regard.testing.CallingConvention.",
        )  # fmt: skip
    known = _find_preset(fn)
    if known is not None and preset in (None, known):
        return adapt_function(fn), replace(PRESETS[known], **fields)
    if preset is not None:
        return fn, replace(PRESETS[preset], **fields)
    if fn is None:
        return fn, CallingConvention(**fields)
    return fn, _read_signature(fn, fields)


def adapt_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a known function that is not called as `fn(query, key, value, …)`; return others unchanged."""
    adapters = {
        "multihead": _adapt_multihead, "flex": _adapt_flex, "jax": _adapt_jax, "regard": _adapt_regard,
    }  # fmt: skip
    adapt = adapters.get(_find_preset(fn) or "")
    return fn if adapt is None else adapt(fn)


def _find_preset(fn: Any) -> str | None:
    """Return the name of a function's preset, by identity and without importing anything."""
    for name, module, path in (
        ("torch", "torch.nn.functional", "scaled_dot_product_attention"),
        ("multihead", "torch.nn", "MultiheadAttention"),
        ("flex", "torch.nn.attention.flex_attention", "flex_attention"),
        ("flash_attn", "flash_attn", "flash_attn_func"),
        ("jax", "jax.nn", "dot_product_attention"),
        ("regard", "regard", "attention"),
    ):
        if module in sys.modules and getattr(sys.modules[module], path, None) is fn:
            return name
    return None


def _read_signature(fn: Callable[..., Any], fields: dict[str, Any]) -> CallingConvention:
    """Describe a function by its argument names, and by the first layout with which it returns a result."""
    try:
        arguments = set(inspect.signature(getattr(fn, "forward", fn)).parameters)
    except (TypeError, ValueError):  # built-ins have none
        arguments = set()
    recognised = {
        option: next((name for name in names if name in arguments), None)
        for option, names in ARGUMENT_NAMES.items()
        if option not in fields
    }
    guess: dict[str, Any] = {**recognised, **fields}
    guess.setdefault("grouped", guess.get("gqa_argument") is not None)
    libraries = [guess.pop("library")] if "library" in guess else _find_libraries(fn)
    layouts = [guess.pop("layout")] if "layout" in guess else LAYOUTS
    conventions = [
        CallingConvention(layout, library=library, **guess) for library in libraries for layout in layouts
    ]
    for convention in conventions if len(conventions) > 1 else ():
        probes = generate_probes(convention.array_library.dtype, None)
        basic = [probe for probe in probes if probe.capability in ("plain", "heads and batch")]
        outcomes = [run_probe(fn, convention, probe) for probe in basic]
        if all(outcome.skip_reason or outcome.result is not None for outcome in outcomes):
            return convention
    return conventions[0]


def _find_libraries(fn: Callable[..., Any]) -> list[Any]:
    """Return the array libraries that a function uses by name, else those of its module, else NumPy."""
    candidates = (inspect.unwrap(fn), getattr(fn, "forward", None), type(fn).__call__)
    function = next((candidate for candidate in candidates if hasattr(candidate, "__globals__")), None)
    namespace = getattr(function, "__globals__", {})
    for names in (getattr(getattr(function, "__code__", None), "co_names", ()), namespace):
        modules = {
            namespace[name].__name__.split(".")[0]
            for name in names
            if isinstance(namespace.get(name), ModuleType)
        }
        if libraries := [library for library in ("numpy", "torch", "jax") if library in modules]:
            return libraries
    return ["numpy"]


# -- Adapters for functions with another signature ------------------------------------------------------------


def _adapt_multihead(layer: Any) -> Callable[..., Any]:
    """Wrap `nn.MultiheadAttention` with identity projections, so that only its attention is tested."""

    @functools.wraps(layer, assigned=("__doc__",), updated=())
    def multihead(
        query: Any, key: Any, value: Any, num_heads: int, attn_mask: Any = None, is_causal: bool = False
    ) -> Any:
        import torch

        width = query.shape[-1]
        module = layer(width, num_heads, bias=False, batch_first=True, dtype=query.dtype, device=query.device)
        with torch.no_grad():
            module.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
            module.out_proj.weight.copy_(torch.eye(width))
        shape = (query.shape[0], num_heads, query.shape[1], key.shape[1])
        if (
            is_causal
        ):  # only a hint: true if the mask, which it requires too, is the triangle and nothing else
            triangle = torch.ones(shape[2:], dtype=torch.bool, device=query.device).triu(1)
            is_causal, attn_mask = attn_mask is None, triangle if attn_mask is None else triangle | attn_mask
        if attn_mask is not None and attn_mask.ndim == 4:  # it takes (batch · heads, q_len, kv_len)
            attn_mask = attn_mask.expand(shape).reshape(-1, *shape[2:])
        elif attn_mask is not None:
            attn_mask = attn_mask.expand(shape[2:])
        return module(query, key, value, attn_mask=attn_mask, is_causal=is_causal, need_weights=False)[0]

    multihead.__name__ = "nn.MultiheadAttention"
    return multihead


def _adapt_flex(flex_attention: Any) -> Callable[..., Any]:
    """Wrap `flex_attention`, uncompiled, with the mask as a block mask."""

    def flex(query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False, **options: Any) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        block_mask = None
        if mask is not None or causal:
            shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            allowed = None if mask is None else mask.expand(shape)

            def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                visible = q_idx >= kv_idx if causal else q_idx >= 0
                return visible if allowed is None else visible & allowed[b, h, q_idx, kv_idx]

            block_mask = create_block_mask(mask_mod, *shape, device=query.device)
        with warnings.catch_warnings():  # not compiled on purpose: the calls are small, and need no compiler
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(query, key, value, block_mask=block_mask, **options)

    flex.__name__ = "flex_attention"
    return flex


def _adapt_jax(dot_product_attention: Any) -> Callable[..., Any]:
    """Wrap `dot_product_attention`, compiled as in real use; its masks need all four axes."""
    import jax

    compiled = jax.jit(dot_product_attention, static_argnames=("is_causal", "scale"))

    def attention(query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if mask is not None and mask.ndim < 4:
            mask = mask[None, None]
        return compiled(query, key, value, mask=mask, **options)

    attention.__name__ = "jax.nn.dot_product_attention"
    return attention


def _adapt_regard(build_matrix: Any) -> Callable[..., Any]:
    """Wrap `regard.attention` as `regard.attention(query, key) @ value`."""

    def attention(
        query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False, **options: Any
    ) -> Any:
        parts = [masks.dense(mask)] if mask is not None else []
        parts += [masks.causal("lower_right")] if causal else []
        combined = functools.reduce(operator.and_, parts) if parts else None
        return build_matrix(query, key, mask=combined, **options) @ value

    attention.__name__ = "regard.attention"
    return attention
