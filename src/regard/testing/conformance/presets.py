"""Ready conventions: functions that are known, and how one that is not known is described by its signature."""

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
from regard.testing.conformance.compare import ask
from regard.testing.conformance.convention import Convention
from regard.testing.conformance.questions import Question, questions

READY: dict[str, Convention] = {
    "torch": Convention(
        "b h n d", "keep", "upper_left", "torch", mask_argument="attn_mask", causal_argument="is_causal",
        scale_argument="scale", gqa_argument="enable_gqa", grouped=True,
    ),
    "multihead": Convention(
        "b n (h d)", "drop", None, "torch", mask_argument="attn_mask", causal_argument="is_causal",
        heads_argument="num_heads", without=("live inf",),  # its projections turn inf into NaN: inf · 0
    ),
    "flex": Convention(
        "b h n d", "keep", "upper_left", "torch", mask_argument="mask", causal_argument="causal",
        scale_argument="scale", gqa_argument="enable_gqa", grouped=True,
    ),
    "flash_attn": Convention(
        "b n h d", None, "lower_right", "torch", mask_argument=None, causal_argument="causal",
        scale_argument="softmax_scale", grouped=True, dtypes=("float16", "bfloat16"), device="cuda",
    ),
    "jax": Convention(
        "b n h d", "keep", "upper_left", "jax", mask_argument="mask", causal_argument="is_causal",
        scale_argument="scale", grouped=True,
    ),
    "regard": Convention(
        "b h n d", "keep", "lower_right", causal_argument="causal", scale_argument="scale",
        gqa_argument="enable_gqa", grouped=True,
    ),
    "numpy": Convention(),
}  # fmt: skip

# Names under which functions have the options that the kit can use.
NAMES = {
    "mask_argument": ("mask", "attn_mask", "attention_mask"),
    "causal_argument": ("is_causal", "causal"),
    "scale_argument": ("scale", "softmax_scale", "sm_scale"),
    "heads_argument": ("num_heads", "n_heads", "heads"),
    "gqa_argument": ("enable_gqa",),
}
LAYOUTS = ("b h n d", "h n d", "n d")


def describe(fn: Any, name: str | None, described: dict[str, Any]) -> tuple[Any, Convention]:
    """The function as the kit calls it, and its convention: the one named, the one known, or its signature's."""
    if name is not None and name not in READY:
        raise ArgumentError(
            "conformance", received=f"the convention {name!r}", expected=f"one of {', '.join(READY)}",
            hint="Or describe the function by the fields of regard.testing.Convention.",
        )  # fmt: skip
    known = _known(fn)
    if known is not None and name in (None, known):
        return as_called(fn), replace(READY[known], **described)
    if name is not None:
        return fn, replace(READY[name], **described)
    if fn is None:
        return fn, Convention(**described)
    return fn, _by_signature(fn, described)


def as_called(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or what calls it as the others are called."""
    adapt = {"multihead": _multihead, "flex": _flex, "jax": _jax, "regard": _regard}.get(_known(fn) or "")
    return fn if adapt is None else adapt(fn)


def _known(fn: Any) -> str | None:
    """The name of the ready convention of a function, by its identity; nothing is imported to find out."""
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


def _by_signature(fn: Callable[..., Any], described: dict[str, Any]) -> Convention:
    """What the names of the arguments say, and the first layout with which the function answers at all."""
    try:
        arguments = set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # built-ins have none
        arguments = set()
    said = {
        option: next((name for name in names if name in arguments), None)
        for option, names in NAMES.items()
        if option not in described
    }
    guess: dict[str, Any] = {**said, **described}
    guess.setdefault("grouped", guess.get("gqa_argument") is not None)
    libraries = [guess.pop("library")] if "library" in guess else _libraries(fn)
    layouts = [guess.pop("layout")] if "layout" in guess else LAYOUTS
    conventions = [Convention(layout, library=x, **guess) for x in libraries for layout in layouts]
    for convention in conventions if len(conventions) > 1 else ():
        outcomes = [ask(fn, convention, question) for question in _first(convention)]
        if all(outcome.not_asked or outcome.answer is not None for outcome in outcomes):
            return convention
    return conventions[0]


def _libraries(fn: Callable[..., Any]) -> list[Any]:
    """The array libraries that a function names; those of its module where it names none, NumPy where that has none."""
    faces = (inspect.unwrap(fn), getattr(fn, "forward", None), type(fn).__call__)
    plain = next((face for face in faces if hasattr(face, "__globals__")), None)
    there = getattr(plain, "__globals__", {})
    for names in (getattr(getattr(plain, "__code__", None), "co_names", ()), there):
        modules = {there[x].__name__.split(".")[0] for x in names if isinstance(there.get(x), ModuleType)}
        if found := [library for library in ("numpy", "torch", "jax") if library in modules]:
            return found
    return ["numpy"]


def _first(convention: Convention) -> list[Question]:
    """A call of every size that a layout may have."""
    wanted = ("plain", "heads and batch")
    return [q for q in questions(convention.arrays.dtype, None) if q.capability in wanted]


# -- functions that are not called as the others are ----------------------------------------------------------


def _multihead(layer: Any) -> Callable[..., Any]:
    """`nn.MultiheadAttention` with projections that change nothing, so that its attention is what is asked."""

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
        if is_causal:  # a hint only, true where the mask it asks for as well is the triangle and nothing else
            triangle = torch.ones(shape[2:], dtype=torch.bool, device=query.device).triu(1)
            is_causal, attn_mask = attn_mask is None, triangle if attn_mask is None else triangle | attn_mask
        if attn_mask is not None and attn_mask.ndim == 4:  # it takes (batch · heads, q_len, kv_len)
            attn_mask = attn_mask.expand(shape).reshape(-1, *shape[2:])
        elif attn_mask is not None:
            attn_mask = attn_mask.expand(shape[2:])
        return module(query, key, value, attn_mask=attn_mask, is_causal=is_causal, need_weights=False)[0]

    multihead.__name__ = "nn.MultiheadAttention"
    return multihead


def _flex(flex_attention: Any) -> Callable[..., Any]:
    """`flex_attention` with the mask as a block mask, uncompiled."""

    def flex(query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False, **options: Any) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        block_mask = None
        if mask is not None or causal:
            shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            allowed = None if mask is None else mask.expand(shape)

            def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                seen = q_idx >= kv_idx if causal else q_idx >= 0
                return seen if allowed is None else seen & allowed[b, h, q_idx, kv_idx]

            block_mask = create_block_mask(mask_mod, *shape, device=query.device)
        with warnings.catch_warnings():  # that it is not compiled is meant: small calls, no compiler needed
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(query, key, value, block_mask=block_mask, **options)

    flex.__name__ = "flex_attention"
    return flex


def _jax(dot_product_attention: Any) -> Callable[..., Any]:
    """`dot_product_attention`, compiled as it is meant to be run; its masks have all four axes."""
    import jax

    compiled = jax.jit(dot_product_attention, static_argnames=("is_causal", "scale"))

    def attention(query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if mask is not None and mask.ndim < 4:
            mask = mask[None, None]
        return compiled(query, key, value, mask=mask, **options)

    attention.__name__ = "jax.nn.dot_product_attention"
    return attention


def _regard(matrix_of: Any) -> Callable[..., Any]:
    """`regard.attention(query, key) @ value`."""

    def attention(
        query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False, **options: Any
    ) -> Any:
        seen = [masks.dense(mask)] if mask is not None else []
        seen += [masks.causal("lower_right")] if causal else []
        return (
            matrix_of(query, key, mask=functools.reduce(operator.and_, seen) if seen else None, **options)
            @ value
        )

    attention.__name__ = "regard.attention"
    return attention
