"""The definition as steps that can be replaced one at a time: what a function with exactly one fault would return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from regard.testing.conformance.attention_call import Call, causal_mask


class Answer(NamedTuple):
    """output (batch, heads, q_len, value_dim); weights (batch, heads, q_len, kv_len) and three gradients, or None."""

    output: Any
    weights: Any = None
    gradients: Any = None
    changed: bool = False  # the function wrote into its arguments


def given(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The arrays as they came."""
    return query, key, value


def interleave(array: Any, heads: int) -> Any:
    """Each key head for heads / kv_heads query heads in a row."""
    kv_heads = array.shape[1]
    return array if kv_heads in (0, heads) else np.repeat(array, heads // kv_heads, axis=1)


def scale_of(call: Call) -> float:
    """The scale asked for, 1/√head_dim unless given."""
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


def mask_of(call: Call) -> Any:
    """The mask, True = attend."""
    return np.True_ if call.mask is None else call.mask


def causal_of(call: Call) -> Any:
    """The causal triangle asked for."""
    if call.causal is None:
        return np.True_
    return causal_mask(call.query.shape[-2], call.key.shape[-2], call.causal)


def hide(scores: Any, allowed: Any) -> tuple[Any, Any]:
    """Scores with −inf where hidden, and which of them may have weight."""
    return np.where(allowed, scores, -np.inf), allowed


def largest(scores: Any, axis: Any) -> Any:
    """What is subtracted before the exponential."""
    return np.max(scores, axis=axis, keepdims=True, initial=-np.inf)


def nothing(scores: Any, kv_len: int) -> Any:
    """The weights of a row that sees nothing."""
    return 0.0


def unchanged(array: Any) -> Any:
    """The array itself."""
    return array


def sum_over(exponentials: Any, axis: Any, base: Any) -> Any:
    """What the exponentials, of scores less `base`, are divided by."""
    return exponentials.sum(axis=axis, keepdims=True)


def after_softmax(call: Call, weights: Any, live: Any, allowed: Any) -> tuple[Any, Any]:
    """Weights and which of them count."""
    return weights, live


def sum_of_live(weights: Any, live: Any, value: Any) -> Any:
    """weights @ value, what is hidden left out before the sum: 0 · NaN would be NaN."""
    if np.isfinite(value).all():
        return weights @ value
    return np.where(live[..., None], weights[..., None] * value[..., None, :, :], 0).sum(-2)


def both(output: Any, weights: Any) -> tuple[Any, Any]:
    """What is returned, in its order."""
    return output, weights


@dataclass(frozen=True)
class Steps:
    """The definition, a step to a field. A fault is some of them replaced."""

    arrange: Callable[..., Any] = given
    repeat: Callable[..., Any] = interleave
    scale: Callable[..., Any] = scale_of
    mask: Callable[..., Any] = mask_of
    causal: Callable[..., Any] = causal_of
    hide: Callable[..., Any] = hide
    shift: Callable[..., Any] = largest
    exponential: Callable[..., Any] = np.exp
    axis: Any = -1  # of the softmax
    total: Callable[..., Any] = sum_over
    empty: Callable[..., Any] = nothing
    after: Callable[..., Any] = after_softmax
    combine: Callable[..., Any] = sum_of_live
    finish: Callable[..., Any] = unchanged
    returned: Callable[..., Any] = both
    rounded: bool = False  # every intermediate result is rounded to the dtype of the inputs
    # Of the gradients:
    backward_scale: Callable[..., Any] = scale_of
    backward_centre: bool = True  # Σ weight · gradient of the row is subtracted, as the softmax asks
    backward_through: bool = True  # gradients reach query and key
    backward_empty: float = 0.0
    backward_key: bool = True  # a key that nobody sees is kept out of the gradients, NaN included
    backward_value: bool = True  # … and a value


DEFINITION = Steps()
HALVES = ("float16", "bfloat16")


def attend(call: Call, steps: Steps, dtype: Any = np.float64, gradient_of: Any = None) -> Answer:
    """What a function of these steps returns, computed in `dtype`; with `gradient_of`, the output's, gradients too."""
    with np.errstate(all="ignore"):
        halved = steps.rounded and call.dtype in HALVES
        to = partial(round_to, dtype=call.dtype) if halved else unchanged
        query, key, value = steps.arrange(*(x.astype(dtype) for x in (call.query, call.key, call.value)))
        heads = query.shape[1]
        key, value = steps.repeat(key, heads), steps.repeat(value, heads)
        scores = to(to(query @ key.swapaxes(-1, -2)) * dtype(steps.scale(call)))
        allowed = np.broadcast_to(steps.mask(call) & steps.causal(call), scores.shape)
        hidden, live = steps.hide(scores, allowed)
        shift = steps.shift(hidden, steps.axis)
        base = np.where(shift == -np.inf, 0, shift)
        exponentials = to(steps.exponential(hidden - base))
        total = steps.total(exponentials, steps.axis, base)
        weights = np.where(live, to(exponentials / np.where(total == 0, 1, total)), 0)
        blind = ~np.any(live, axis=steps.axis, keepdims=True)
        weights = np.where(blind, steps.empty(scores, scores.shape[-1]), weights)
        weights, live = steps.after(call, weights, live | (blind & (weights != 0)), allowed)
        output = steps.finish(steps.combine(weights, live, value))
        answer = Answer(*steps.returned(output, weights))
        if gradient_of is not None:
            slopes = _gradients((query, key, value), weights, live, gradient_of, call, steps)
            answer = answer._replace(gradients=slopes)
        return answer


def _gradients(
    arrays: tuple[Any, Any, Any], weights: Any, live: Any, gradient_of: Any, call: Call, steps: Steps
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value where the output's is `gradient_of`; what is hidden has none."""
    query, key, value = arrays
    seen = live.any(-2)[..., None]
    key = np.where(seen, key, 0) if steps.backward_key else key
    value = np.where(seen, value, 0) if steps.backward_value else value
    slope = gradient_of @ value.swapaxes(-1, -2)
    if steps.backward_centre:
        slope = slope - (slope * weights).sum(-1, keepdims=True)
    slope = weights * slope
    slope = np.where(live.any(-1, keepdims=True), slope, steps.backward_empty) * steps.backward_scale(call)
    if not steps.backward_through:
        slope = np.zeros_like(slope)
    of_value = weights.swapaxes(-1, -2) @ gradient_of
    return slope @ key, slope.swapaxes(-1, -2) @ query, of_value


def round_to(array: Any, dtype: str) -> Any:
    """The array rounded to what a dtype can hold, in the dtype it came in.

    >>> round_to(np.array([1.0, 1.001, 1.005], np.float32), "bfloat16")
    array([1.       , 1.       , 1.0078125], dtype=float32)
    """
    array = np.asarray(array)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(dtype).astype(array.dtype)
    bits = array.astype(np.float32).view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(array), even.view(np.float32), array).astype(array.dtype)
